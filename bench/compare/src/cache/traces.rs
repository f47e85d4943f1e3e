//! The requests that caches are compared on.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// A list of requests.
pub struct Trace {
    /// Its name in results.
    pub name: String,
    /// The numbers of the keys that are requested, in this order.
    pub requests: Vec<u32>,
    /// Keys are below this number.
    pub keys: u32,
    /// The number of keys of the data, without those that only a scan requests.
    pub data_keys: u64,
}

/// How many requests and keys a trace has, and the seed of its generator.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// The number of keys of the data.
    pub keys: u32,
    /// The number of requests, without those of scans.
    pub requests: usize,
    /// The seed.
    pub seed: u64,
}

/// The traces that are made, by name.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Workload {
    /// Zipfian with this exponent.
    Zipfian(f64),
    /// Zipfian; now and then a scan requests many keys once, which no other request is for.
    Scans,
    /// Zipfian; now and then all keys change their popularity.
    Shifts,
}

/// All of them.
pub(super) const WORKLOADS: [Workload; 5] = [
    Workload::Zipfian(0.7),
    Workload::Zipfian(0.99),
    Workload::Zipfian(1.2),
    Workload::Scans,
    Workload::Shifts,
];

/// The exponent of the traces that are not only zipfian.
const THETA: f64 = 0.99;
/// How many scans, or how many parts with different popularity, a trace has.
const EVENTS: usize = 10;
/// A scan's share of the requests between two scans.
const SCAN_SHARE: f64 = 0.2;

impl Workload {
    /// Its name in results.
    pub(super) fn name(self) -> String {
        match self {
            Self::Zipfian(theta) => format!("zipfian-{theta}"),
            Self::Scans => "scans".to_owned(),
            Self::Shifts => "shifts".to_owned(),
        }
    }

    /// Makes the requests.
    pub(super) fn trace(self, Extent { keys, requests, seed }: Extent) -> Trace {
        let theta = if let Self::Zipfian(theta) = self { theta } else { THETA };
        let zipfian = Cumulative::new(keys, theta);
        let mut random = SmallRng::seed_from_u64(seed);
        let (between, mut scanned) = ((requests / EVENTS).max(1), keys);
        let mut list = Vec::with_capacity(requests);
        for number in 0..requests {
            let rank = zipfian.draw(random.random());
            let shift = if self == Self::Shifts { number / between } else { 0 };
            // The shifts are by different distances, none of them a multiple of another.
            let key = (rank + mix(shift as u32) % u64::from(keys)) % u64::from(keys);
            list.push(key as u32);
            if number % between != between - 1 {
                continue;
            }
            if self == Self::Scans {
                let end = scanned + (between as f64 * SCAN_SHARE) as u32;
                list.extend(scanned..end);
                scanned = end;
            }
        }
        Trace { name: self.name(), requests: list, keys: scanned, data_keys: keys.into() }
    }
}

/// Scrambles a number.
fn mix(number: u32) -> u64 {
    let mut hash = (u64::from(number) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
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

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { keys: 1000, requests: 50_000, seed: 1 };

    #[test]
    fn ranks_are_as_frequent_as_the_law_says() {
        for theta in [0.7, 0.99, 1.2] {
            let requests = Workload::Zipfian(theta).trace(EXTENT).requests;
            let count = |key| requests.iter().filter(|requested| **requested == key).count() as f64;
            let first = (mix(0) % u64::from(EXTENT.keys)) as u32;
            let [first, fourth] = [0, 3].map(|rank| count((first + rank) % EXTENT.keys));
            let expected = 4f64.powf(theta);
            assert!((first / fourth / expected - 1.0).abs() < 0.2, "{theta}: {first} {fourth}");
        }
    }

    #[test]
    fn a_scan_requests_each_of_its_keys_once() {
        let Trace { requests, keys, data_keys, .. } = Workload::Scans.trace(EXTENT);
        assert_eq!((keys, data_keys, requests.len()), (11_000, 1000, 60_000));
        let mut scanned: Vec<u32> = requests.into_iter().filter(|key| *key >= 1000).collect();
        assert!(scanned.is_sorted());
        scanned.dedup();
        assert_eq!(scanned.len(), 10_000);
    }

    #[test]
    fn popularity_shifts() {
        let requests = Workload::Shifts.trace(EXTENT).requests;
        let hottest = |part: &[u32]| {
            let mut counts = vec![0; 1000];
            part.iter().for_each(|key| counts[*key as usize] += 1);
            (0..1000).max_by_key(|key| counts[*key])
        };
        assert_ne!(hottest(&requests[..5000]), hottest(&requests[5000..10_000]));
    }
}
