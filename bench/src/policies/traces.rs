//! The requests that policies are compared on.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{Request, mix};
use crate::{Error, Result};

/// A list of requests.
pub struct Trace {
    /// Its name in results.
    pub name: String,
    /// The requests, in their order.
    pub requests: Vec<Request>,
    /// Keys are below this number.
    pub keys: u32,
    /// The number of keys of the data, without those that only a scan requests, and their bytes.
    pub data: (u64, u64),
}

/// How many requests and keys a trace has, and the seed of its generator.
#[derive(Clone, Copy)]
pub struct Extent {
    /// The number of keys of the data.
    pub keys: u32,
    /// The number of requests, without those of scans.
    pub requests: usize,
    /// The seed.
    pub seed: u64,
}

/// The traces that are made, by name.
#[derive(Clone, Copy, PartialEq)]
pub enum Workload {
    /// Zipfian with this exponent.
    Zipfian(f64),
    /// Zipfian; now and then a scan requests many keys once, which no other request is for.
    Scans,
    /// Zipfian; now and then a scan requests all keys of the data, one after another.
    FullScans,
    /// Zipfian; now and then all keys change their popularity.
    Shifts,
    /// Zipfian; the keys have different lengths.
    Sizes,
}

/// All of them.
pub const WORKLOADS: [Workload; 7] = [
    Workload::Zipfian(0.7),
    Workload::Zipfian(0.99),
    Workload::Zipfian(1.2),
    Workload::Scans,
    Workload::FullScans,
    Workload::Shifts,
    Workload::Sizes,
];

/// The exponent of the traces that are not only zipfian.
const THETA: f64 = 0.99;
/// How many scans, or how many parts with different popularity, a trace has.
const EVENTS: usize = 10;
/// A scan's share of the requests between two scans.
const SCAN_SHARE: f64 = 0.2;
/// The lengths of [`Workload::Sizes`], each equally frequent: from the least to 64 times as much.
const LENGTHS: u32 = 7;

impl Workload {
    /// Its name in results.
    pub fn name(self) -> String {
        match self {
            Self::Zipfian(theta) => format!("zipfian-{theta}"),
            Self::Scans => "scans".to_owned(),
            Self::FullScans => "full-scans".to_owned(),
            Self::Shifts => "shifts".to_owned(),
            Self::Sizes => "sizes".to_owned(),
        }
    }

    /// Makes the requests.
    pub fn trace(self, Extent { keys, requests, seed }: Extent) -> Trace {
        let theta = if let Self::Zipfian(theta) = self { theta } else { THETA };
        let zipfian = Cumulative::new(keys, theta);
        let mut random = SmallRng::seed_from_u64(seed);
        let length = |key: u32| if self == Self::Sizes { length(key) } else { 1 };
        let (between, mut scanned) = ((requests / EVENTS).max(1), keys);
        let mut list = Vec::with_capacity(requests);
        for number in 0..requests {
            let rank = zipfian.draw(random.random());
            let shift = if self == Self::Shifts { number / between } else { 0 };
            // The shifts are by different distances, none of them a multiple of another.
            let key = (rank + mix(shift as u32) % u64::from(keys)) % u64::from(keys);
            list.push(Request { key: key as u32, bytes: length(key as u32) });
            if number % between != between - 1 {
                continue;
            }
            if self == Self::FullScans {
                list.extend((0..keys).map(|key| Request { key, bytes: 1 }));
            }
            if self == Self::Scans {
                let end = scanned + (between as f64 * SCAN_SHARE) as u32;
                list.extend((scanned..end).map(|key| Request { key, bytes: 1 }));
                scanned = end;
            }
        }
        let bytes = (0..keys).map(|key| u64::from(length(key))).sum();
        Trace { name: self.name(), requests: list, keys: scanned, data: (keys.into(), bytes) }
    }
}

/// The length of a key's object in [`Workload::Sizes`].
fn length(key: u32) -> u32 {
    1 << (mix(key ^ 0x5eed) % u64::from(LENGTHS))
}

/// Ranks with probability proportional to 1 / (rank + 1)^theta, for any theta, by their cumulative
/// probabilities.
struct Cumulative(Vec<f64>);

impl Cumulative {
    fn new(items: u32, theta: f64) -> Self {
        let mut sum = 0.0;
        let term = |rank| {
            sum += f64::from(rank).powf(-theta);
            sum
        };
        Self((1..=items).map(term).collect())
    }

    /// The rank at this share of all probability.
    fn draw(&self, share: f64) -> u64 {
        let sum = self.0.last().copied().unwrap_or(0.0);
        let rank = self.0.partition_point(|until| *until <= share * sum);
        rank.min(self.0.len() - 1) as u64
    }
}

impl Trace {
    /// Reads a file with a request in each line: a key, and after a space the number of its bytes
    /// if objects differ. Only a key's first length counts.
    ///
    /// # Errors
    /// [`Error::Input`] if the file cannot be read, has no request, or a length is no number.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(Error::input(path))?;
        let (mut known, mut requests) = (HashMap::new(), Vec::new());
        for (number, line) in text.lines().enumerate() {
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            let bytes: u32 = match words.next().map_or(Ok(1), str::parse) {
                Ok(bytes) if bytes > 0 => bytes,
                _ => return Err(Error::input(path)(format!("line {}: no length", number + 1))),
            };
            let new = Request { key: known.len() as u32, bytes };
            requests.push(*known.entry(name).or_insert(new));
        }
        if requests.is_empty() {
            return Err(Error::input(path)("no request"));
        }
        let bytes = known.values().map(|request| u64::from(request.bytes)).sum();
        let keys = known.len() as u32;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, requests, keys, data: (keys.into(), bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { keys: 1000, requests: 50_000, seed: 1 };

    #[test]
    fn ranks_are_as_frequent_as_the_law_says() {
        for theta in [0.7, 0.99, 1.2] {
            let requests = Workload::Zipfian(theta).trace(EXTENT).requests;
            let count = |key| requests.iter().filter(|request| request.key == key).count() as f64;
            let first = (mix(0) % u64::from(EXTENT.keys)) as u32;
            let [first, fourth] = [0, 3].map(|rank| count((first + rank) % EXTENT.keys));
            let expected = 4f64.powf(theta);
            assert!((first / fourth / expected - 1.0).abs() < 0.2, "{theta}: {first} {fourth}");
        }
    }

    #[test]
    fn a_scan_requests_each_of_its_keys_once() {
        let Trace { requests, keys, data, .. } = Workload::Scans.trace(EXTENT);
        assert_eq!((keys, data, requests.len()), (11_000, (1000, 1000), 60_000));
        let mut scanned: Vec<u32> =
            requests.iter().map(|request| request.key).filter(|key| *key >= 1000).collect();
        assert!(scanned.is_sorted());
        scanned.dedup();
        assert_eq!(scanned.len(), 10_000);
    }

    #[test]
    fn a_full_scan_requests_each_key_of_the_data_once() {
        let Trace { requests, keys, data, .. } = Workload::FullScans.trace(EXTENT);
        assert_eq!((keys, data, requests.len()), (1000, (1000, 1000), 60_000));
        let scan = requests[5000..6000].iter().map(|request| request.key);
        assert!(scan.eq(0..1000));
    }

    #[test]
    fn popularity_shifts_and_lengths_stay() {
        let requests = Workload::Shifts.trace(EXTENT).requests;
        let hottest = |part: &[Request]| {
            let mut counts = vec![0; 1000];
            part.iter().for_each(|request| counts[request.key as usize] += 1);
            (0..1000).max_by_key(|key| counts[*key])
        };
        assert_ne!(hottest(&requests[..5000]), hottest(&requests[5000..10_000]));
        let sizes = Workload::Sizes.trace(EXTENT);
        assert!(sizes.requests.iter().all(|Request { key, bytes }| *bytes == length(*key)));
        assert!(sizes.data.1 > 10_000);
    }

    #[test]
    fn a_file_has_a_request_in_each_line() {
        let file = tempfile::NamedTempFile::with_suffix(".txt").unwrap();
        fs::write(file.path(), "a 7\nb 1\n\na 9\n").unwrap();
        let trace = Trace::read(file.path()).unwrap();
        let expected = [(0, 7), (1, 1), (0, 7)].map(|(key, bytes)| Request { key, bytes });
        assert_eq!((trace.requests, trace.keys, trace.data), (expected.to_vec(), 2, (2, 8)));
        for (bad, error) in [("", "no request"), ("a\nb x\n", "line 2: no length")] {
            fs::write(file.path(), bad).unwrap();
            let message = Trace::read(file.path()).err().unwrap().to_string();
            assert!(message.ends_with(error), "{message}");
        }
    }
}
