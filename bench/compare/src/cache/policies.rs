//! The requests that caches are compared on, and the hits of exact policies: what a cache could
//! have that sees every request. A miss stores the key, and all objects have the same length.

use std::collections::{BTreeSet, VecDeque};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// Hits in percent of the requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ExactHits {
    /// With LRU.
    pub lru: f64,
    /// With FIFO.
    pub fifo: f64,
    /// With S3-FIFO (Yang et al., SOSP 2023).
    pub s3_fifo: f64,
    /// With Belady's optimum, which evicts the key whose next request is furthest in the future.
    pub belady: f64,
}

impl ExactHits {
    /// Replays the trace with caches of so many objects.
    pub fn of(trace: &Trace, objects: u64) -> Self {
        let objects = objects.max(1) as usize;
        let percent = |hits: u64| 100.0 * hits as f64 / trace.requests.len().max(1) as f64;
        Self {
            lru: percent(hits(trace, objects, |number, _| number)),
            fifo: percent(hits(trace, objects, |number, stored| stored.unwrap_or(number))),
            s3_fifo: percent(S3Fifo::new(trace.keys, objects).hits(trace)),
            belady: percent(belady(trace, objects)),
        }
    }
}

/// The hits of a cache that evicts the key of the lowest rank, be it the one just requested. `rank`
/// has the number of the request, and the key's rank if it is stored.
fn hits(trace: &Trace, objects: usize, mut rank: impl FnMut(u32, Option<u32>) -> u32) -> u64 {
    let (mut ranks, mut order) = (vec![None; trace.keys as usize], BTreeSet::new());
    let mut hits = 0;
    for (number, key) in trace.requests.iter().enumerate() {
        let stored = &mut ranks[*key as usize];
        let new = rank(number as u32, *stored);
        if let Some(old) = stored.replace(new) {
            hits += 1;
            order.remove(&(old, *key));
        }
        order.insert((new, *key));
        if order.len() > objects
            && let Some((_, evicted)) = order.pop_first()
        {
            ranks[evicted as usize] = None;
        }
    }
    hits
}

fn belady(trace: &Trace, objects: usize) -> u64 {
    let mut next = vec![u32::MAX; trace.requests.len()];
    let mut last = vec![u32::MAX; trace.keys as usize];
    for (number, key) in trace.requests.iter().enumerate().rev() {
        next[number] = std::mem::replace(&mut last[*key as usize], number as u32);
    }
    hits(trace, objects, |number, _| u32::MAX - next[number as usize])
}

/// The share of the small queue.
const SMALL_SHARE: f64 = 0.1;
/// How many hits in the small queue lead to the main queue.
const HITS_TO_MAIN: u8 = 2;
const HITS_MAX: u8 = 3;

/// Where a key is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
    /// Only its name, since it left the small queue for the ghosts with this number.
    Ghost(u64),
}

/// A small queue in front of the main one, and ghosts: the names of keys that left the small one.
struct S3Fifo {
    objects: usize,
    small_max: usize,
    places: Vec<Place>,
    hits: Vec<u8>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// An entry counts if the key's place agrees.
    ghosts: VecDeque<(u64, u32)>,
    ghosts_count: usize,
    ghosts_made: u64,
}

impl S3Fifo {
    fn new(keys: u32, objects: usize) -> Self {
        Self {
            objects,
            small_max: ((objects as f64 * SMALL_SHARE) as usize).max(1),
            places: vec![Place::Nowhere; keys as usize],
            hits: vec![0; keys as usize],
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: VecDeque::new(),
            ghosts_count: 0,
            ghosts_made: 0,
        }
    }

    fn hits(mut self, trace: &Trace) -> u64 {
        trace.requests.iter().filter(|key| self.request(**key)).count() as u64
    }

    /// Serves a request. Returns whether it is a hit.
    fn request(&mut self, key: u32) -> bool {
        let place = self.places[key as usize];
        let hits = &mut self.hits[key as usize];
        if matches!(place, Place::Small | Place::Main) {
            *hits = (*hits + 1).min(HITS_MAX);
            return true;
        }
        *hits = 0;
        while self.small.len() + self.main.len() >= self.objects {
            self.evict();
        }
        // The ghost may have gone meanwhile.
        let was_ghost = matches!(place, Place::Ghost(_));
        self.ghosts_count -= usize::from(matches!(self.places[key as usize], Place::Ghost(_)));
        let (queue, place) = match was_ghost {
            true => (&mut self.main, Place::Main),
            false => (&mut self.small, Place::Small),
        };
        queue.push_back(key);
        self.places[key as usize] = place;
        false
    }

    fn evict(&mut self) {
        if self.small.len() < self.small_max && !self.main.is_empty() {
            return self.evict_from_main();
        }
        while let Some(key) = self.small.pop_front() {
            if std::mem::take(&mut self.hits[key as usize]) < HITS_TO_MAIN {
                return self.add_ghost(key);
            }
            self.main.push_back(key);
            self.places[key as usize] = Place::Main;
            if self.main.len() > self.objects - self.small_max {
                return self.evict_from_main();
            }
        }
    }

    fn evict_from_main(&mut self) {
        while let Some(key) = self.main.pop_front() {
            let hits = &mut self.hits[key as usize];
            if *hits == 0 {
                self.places[key as usize] = Place::Nowhere;
                return;
            }
            *hits -= 1;
            self.main.push_back(key);
        }
    }

    fn add_ghost(&mut self, key: u32) {
        self.ghosts_made += 1;
        self.ghosts_count += 1;
        self.ghosts.push_back((self.ghosts_made, key));
        self.places[key as usize] = Place::Ghost(self.ghosts_made);
        while self.ghosts_count > self.objects - self.small_max
            && let Some((number, key)) = self.ghosts.pop_front()
        {
            if self.places[key as usize] == Place::Ghost(number) {
                self.places[key as usize] = Place::Nowhere;
                self.ghosts_count -= 1;
            }
        }
    }
}

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
    use std::collections::HashMap;

    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn trace(requests: impl Iterator<Item = u32>) -> Trace {
        let requests: Vec<u32> = requests.collect();
        let keys = requests.iter().map(|key| key + 1).max().unwrap_or(0);
        Trace { name: String::new(), requests, keys, data_keys: keys.into() }
    }

    fn of_letters(letters: &str) -> Trace {
        trace(letters.bytes().map(|letter| u32::from(letter - b'a')))
    }

    #[test]
    fn fifo_evicts_what_was_stored_first_and_lru_what_was_used_first() {
        let trace = of_letters("abcadacb");
        assert_eq!(hits(&trace, 3, |number, stored| stored.unwrap_or(number)), 2);
        assert_eq!(hits(&trace, 3, |number, _| number), 3);
    }

    #[test]
    fn s3_fifo_protects_a_key_that_comes_back() {
        let outcomes = |objects, letters| {
            let trace = of_letters(letters);
            let mut cache = S3Fifo::new(trace.keys, objects);
            let outcome = |key: &u32| if cache.request(*key) { '+' } else { '-' };
            trace.requests.iter().map(outcome).collect::<String>()
        };
        assert_eq!(outcomes(4, "abcdeafghia"), "----------+");
        // Two hits in the small queue protect it as well.
        assert_eq!(outcomes(4, "aaabcdefgha"), "-++-------+");
    }

    /// The most hits that any choice of evictions can have.
    fn most_hits(
        keys: &[u32],
        stored: u32,
        objects: u32,
        known: &mut HashMap<(usize, u32), u64>,
    ) -> u64 {
        let Some((key, rest)) = keys.split_first() else { return 0 };
        if let Some(most) = known.get(&(keys.len(), stored)) {
            return *most;
        }
        let with = stored | (1 << key);
        let most = if with == stored {
            1 + most_hits(rest, stored, objects, known)
        } else if with.count_ones() <= objects {
            most_hits(rest, with, objects, known).max(most_hits(rest, stored, objects, known))
        } else {
            let victims = (0..32).filter(|victim| with & (1 << victim) != 0);
            let after = victims.map(|victim| with & !(1 << victim));
            after.map(|stored| most_hits(rest, stored, objects, known)).max().unwrap_or(0)
        };
        known.insert((keys.len(), stored), most);
        most
    }

    #[test]
    fn belady_is_the_optimum() {
        let mut random = SmallRng::seed_from_u64(3);
        for _ in 0..300 {
            let keys: Vec<u32> = (0..24).map(|_| random.random_range(0..6)).collect();
            for objects in 1..5 {
                let expected = most_hits(&keys, 0, objects, &mut HashMap::new());
                let found = belady(&trace(keys.iter().copied()), objects as usize);
                assert_eq!(found, expected, "{keys:?} {objects}");
            }
        }
    }

    #[test]
    fn no_policy_beats_belady() {
        let mut random = SmallRng::seed_from_u64(4);
        for _ in 0..20 {
            let keys = random.random_range(5..300u32);
            let skew = random.random_range(1..4);
            let key = |_| (f64::from(keys) * random.random::<f64>().powi(skew)) as u32;
            let trace = trace((0..3000).map(key));
            for objects in [1, u64::from(keys / 7 + 1), u64::from(keys / 2)] {
                let ExactHits { lru, fifo, s3_fifo, belady } = ExactHits::of(&trace, objects);
                assert!(lru.max(fifo).max(s3_fifo) <= belady, "{objects} of {keys} keys");
            }
        }
    }

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
