//! The records of a run: their keys, the lengths of their values, and which of them exist while
//! threads insert new ones.
//!
//! Keys are made as YCSB makes them: "user" and the hash of the record's number, so that
//! neighbouring records are not neighbouring keys. The length of a record's value depends only on
//! the record's number, and never changes. So every reader in every process knows what to expect,
//! and an overwrite takes a block of the same size.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Counts the records that exist while threads insert new ones: all below
/// [`RecordCounter::stored`], as in YCSB's `AcknowledgedCounterGenerator`.
pub struct RecordCounter {
    loaded: u64,
    next: AtomicU64,
    stored: AtomicU64,
    /// The records that are stored, while one before them is not yet.
    ahead: Mutex<BinaryHeap<Reverse<u64>>>,
}

/// The number of records ahead for which there is memory from the start.
const AHEAD: usize = 1 << 16;

impl RecordCounter {
    /// A counter for a store into which this number of records was loaded.
    pub fn new(records: u64) -> Self {
        let [next, stored] = [records; 2].map(AtomicU64::new);
        Self { loaded: records, next, stored, ahead: Mutex::new(BinaryHeap::with_capacity(AHEAD)) }
    }

    /// Returns a new record, which the caller inserts.
    pub fn claim(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of records that exist.
    #[inline]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    /// Counts a record as stored. Loaded records are counted already.
    pub fn acknowledge(&self, record: u64) {
        if record < self.loaded {
            return;
        }
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.push(Reverse(record));
        let mut stored = self.stored.load(Ordering::Relaxed);
        while ahead.peek() == Some(&Reverse(stored)) {
            ahead.pop();
            stored += 1;
        }
        self.stored.store(stored, Ordering::Release);
    }
}

/// The length of every key, in bytes, as in YCSB with `zeropadding=20`.
pub const KEY_BYTES: usize = PREFIX.len() + DIGITS;

/// A record's key.
pub type Key = [u8; KEY_BYTES];

const PREFIX: [u8; 4] = *b"user";
const DIGITS: usize = 20;
/// Digits are written in pairs, and in two halves.
const HALF_PAIRS: usize = DIGITS / 4;
/// The number of values that half of the digits can show.
const HALF_RANGE: u64 = 100u64.pow(HALF_PAIRS as u32);
/// The texts 00, 01, 02 and so on up to 99.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[0; 2]; 100];
    let mut number = 0;
    while number < 100 {
        pairs[number] = [b'0' + number as u8 / 10, b'0' + number as u8 % 10];
        number += 1;
    }
    pairs
};
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 1_099_511_628_211;

/// YCSB's `Utils.fnvhash64`: FNV-1a over the number's eight bytes, and the absolute value of this
/// as a signed number.
#[inline]
pub const fn hash(number: u64) -> u64 {
    let mut hash = FNV_OFFSET;
    let mut byte = 0;
    while byte < 8 {
        hash = (hash ^ (number >> (byte * 8) & 0xff)).wrapping_mul(FNV_PRIME);
        byte += 1;
    }
    (hash as i64).unsigned_abs()
}

/// The key of a record.
#[inline]
pub fn key_of(record: u64) -> Key {
    let hash = hash(record);
    let mut key = [b'0'; KEY_BYTES];
    key[..PREFIX.len()].copy_from_slice(&PREFIX);
    let (pairs, _) = key[PREFIX.len()..].as_chunks_mut::<2>();
    // Two halves, which the processor computes in parallel: within a half, each division waits for
    // the one before it.
    let (mut high, mut low) = (hash / HALF_RANGE, hash % HALF_RANGE);
    for pair in (0..HALF_PAIRS).rev() {
        pairs[pair] = PAIRS[(high % 100) as usize];
        pairs[HALF_PAIRS + pair] = PAIRS[(low % 100) as usize];
        high /= 100;
        low /= 100;
    }
    key
}

/// The lengths of the values, in bytes, over the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueSize {
    /// All values have this length.
    Constant(u32),
    /// All lengths from the first to the second, both included, equally often.
    Uniform(u32, u32),
    /// The ETC pool of Facebook's memcached, as fitted by Atikoglu et al., "Workload Analysis of a
    /// Large-Scale Key-Value Store" (SIGMETRICS 2012).
    Facebook,
    /// ZippyDB at Facebook, as fitted by Cao et al., "Characterizing, Modeling, and Benchmarking
    /// RocksDB Key-Value Workloads at Facebook" (FAST 2020).
    ZippyDb,
}

/// Limit on a value whose length comes from a formula, in bytes: a server's default limit.
const FORMULA_BYTES_MAX: u32 = 1 << 20;
/// The longest value that can be asked for, in bytes.
pub const VALUE_BYTES_MAX: u32 = 4 << 20;

/// The share of each length from 0 to 14 in the ETC pool; the paper's table, in 1/100,000.
const ETC_SHORT: [u32; 15] =
    [536, 47, 17_820, 9239, 18, 2740, 65, 606, 23, 837, 837, 8989, 92, 326, 1980];
const ETC_UNIT: f64 = 100_000.0;
/// The distribution of the longer values of the ETC pool.
const ETC: Pareto = Pareto { location: 15.0, scale: 214.476, shape: 0.348_238 };
const ZIPPYDB: Pareto = Pareto { location: 0.0, scale: 25.45, shape: 0.2615 };

/// The generalised Pareto distribution.
struct Pareto {
    location: f64,
    scale: f64,
    shape: f64,
}

impl Pareto {
    fn quantile(&self, u: f64) -> f64 {
        self.location + self.scale * ((1.0 - u).powf(-self.shape) - 1.0) / self.shape
    }

    /// The mean, with longer values cut off at [`FORMULA_BYTES_MAX`].
    fn mean(&self) -> f64 {
        let longest = f64::from(FORMULA_BYTES_MAX) - self.location;
        let rest = (1.0 + self.shape * longest / self.scale).powf(1.0 - 1.0 / self.shape);
        self.location + self.scale / (1.0 - self.shape) * (1.0 - rest)
    }
}

impl ValueSize {
    /// The length of a record's value.
    #[inline]
    pub fn of(&self, record: u64) -> u32 {
        match *self {
            Self::Constant(bytes) => bytes,
            Self::Uniform(min, max) => {
                min + (uniform(record) * (f64::from(max - min) + 1.0)) as u32
            }
            Self::Facebook | Self::ZippyDb => self.of_formula(record),
        }
    }

    #[inline(never)]
    fn of_formula(&self, record: u64) -> u32 {
        let u = uniform(record);
        if *self == Self::Facebook { etc(u) } else { capped(ZIPPYDB.quantile(u)) }
    }

    /// The mean over all records.
    pub fn mean(&self) -> f64 {
        match *self {
            Self::Constant(bytes) => bytes.into(),
            Self::Uniform(min, max) => f64::midpoint(min.into(), max.into()),
            Self::Facebook => {
                let shares = ETC_SHORT.map(|share| f64::from(share) / ETC_UNIT);
                let short: f64 = (0..).zip(shares).map(|(n, share)| f64::from(n) * share).sum();
                short + (1.0 - shares.iter().sum::<f64>()) * ETC.mean()
            }
            Self::ZippyDb => ZIPPYDB.mean(),
        }
    }

    /// The length of the shortest possible value.
    pub fn min(&self) -> u32 {
        match *self {
            Self::Constant(bytes) => bytes,
            Self::Uniform(min, _) => min,
            Self::Facebook | Self::ZippyDb => 0,
        }
    }

    /// The length of the longest possible value.
    pub fn max(&self) -> u32 {
        match *self {
            Self::Constant(bytes) => bytes,
            Self::Uniform(_, max) => max,
            Self::Facebook | Self::ZippyDb => FORMULA_BYTES_MAX,
        }
    }
}

#[inline]
fn etc(u: f64) -> u32 {
    let mut below = 0;
    for (length, share) in (0..).zip(ETC_SHORT) {
        below += share;
        if u * ETC_UNIT < f64::from(below) {
            return length;
        }
    }
    let short = f64::from(below) / ETC_UNIT;
    capped(ETC.quantile((u - short) / (1.0 - short)))
}

fn capped(bytes: f64) -> u32 {
    (bytes.round() as u32).min(FORMULA_BYTES_MAX)
}

/// A pseudo-random number from 0 up to 1 that depends only on the record: SplitMix64.
#[inline]
fn uniform(record: u64) -> f64 {
    let mut bits = record.wrapping_mul(64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ bits >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

impl FromStr for ValueSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|bytes| *bytes <= VALUE_BYTES_MAX);
        let ends = text.strip_prefix("uniform:").and_then(|ends| ends.split_once('-'));
        let found = match (text, ends) {
            ("facebook", _) => Some(Self::Facebook),
            ("zippydb", _) => Some(Self::ZippyDb),
            (_, Some((min, max))) => number(min)
                .zip(number(max))
                .filter(|(min, max)| min <= max)
                .map(|(min, max)| Self::Uniform(min, max)),
            _ => number(text).map(Self::Constant),
        };
        found.ok_or_else(|| {
            format!(
                "write a number of bytes up to {VALUE_BYTES_MAX}, as in 64, or uniform:16-1024, \
                 facebook or zippydb"
            )
        })
    }
}

impl fmt::Display for ValueSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(bytes) => write!(f, "{bytes}"),
            Self::Uniform(min, max) => write!(f, "uniform:{min}-{max}"),
            Self::Facebook => f.write_str("facebook"),
            Self::ZippyDb => f.write_str("zippydb"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_exists_as_soon_as_all_before_it_do() {
        let counter = RecordCounter::new(5);
        let claimed: Vec<u64> = (0..3).map(|_| counter.claim()).collect();
        assert_eq!(claimed, [5, 6, 7]);
        counter.acknowledge(7);
        counter.acknowledge(6);
        assert_eq!(counter.stored(), 5);
        counter.acknowledge(5);
        assert_eq!(counter.stored(), 8);
    }

    #[test]
    fn threads_that_insert_side_by_side_lose_no_record() {
        let counter = RecordCounter::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| counter.acknowledge(counter.claim())));
            }
        });
        assert_eq!(counter.stored(), 200_000);
    }

    #[test]
    fn the_first_keys_are_those_of_ycsb() {
        // The keys that upstream loads first. Many of its bug reports show them.
        assert_eq!(&key_of(0), b"user06284781860667377211");
        assert_eq!(&key_of(1), b"user08517097267634966620");
        assert_eq!(&key_of(2), b"user01820151046732198393");
    }

    #[test]
    fn keys_are_distinct_and_of_one_length() {
        let mut keys: Vec<Key> = (0..200_000).map(key_of).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 200_000);
        assert!(keys.iter().all(|key| key[4..].iter().all(u8::is_ascii_digit)));
        assert_eq!(key_of(u64::MAX).len(), KEY_BYTES);
    }

    const RECORDS: u64 = 400_000;

    fn sorted(size: ValueSize) -> Vec<u32> {
        let mut sizes: Vec<u32> = (0..RECORDS).map(|record| size.of(record)).collect();
        sizes.sort_unstable();
        sizes
    }

    fn mean(sizes: &[u32]) -> f64 {
        sizes.iter().map(|bytes| f64::from(*bytes)).sum::<f64>() / sizes.len() as f64
    }

    const ALL: [ValueSize; 4] = [
        ValueSize::Constant(64),
        ValueSize::Uniform(16, 1024),
        ValueSize::Facebook,
        ValueSize::ZippyDb,
    ];

    #[test]
    fn means_and_bounds_are_those_of_the_formulas() {
        for size in ALL {
            let sizes = sorted(size);
            let (sample, formula) = (mean(&sizes), size.mean());
            assert!((sample / formula - 1.0).abs() < 0.02, "{size}: {sample} and {formula}");
            assert!(sizes[0] >= size.min() && *sizes.last().unwrap() <= size.max(), "{size}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_papers() {
        let quantile = |sizes: &[u32], q: f64| f64::from(sizes[(sizes.len() as f64 * q) as usize]);
        // The cumulative distribution, F(x) = 1 - (1 + k x / sigma)^(-1/k). The code under test
        // uses its inverse.
        let share = |x: f64, scale: f64, k: f64| 1.0 - (1.0 + k * x / scale).powf(-1.0 / k);
        let (etc, zippydb) = (sorted(ValueSize::Facebook), sorted(ValueSize::ZippyDb));
        for q in [0.5, 0.7, 0.9, 0.99, 0.999] {
            let x = quantile(&etc, q) - 15.0;
            // 0.44155 of the values are shorter than 15 bytes.
            let expected = 0.441_55 + 0.558_45 * share(x, 214.476, 0.348_238);
            assert!((expected - q).abs() < 0.005, "{q}: {x} is {expected}");
            let x = quantile(&zippydb, q);
            let expected = share(x, 25.45, 0.2615);
            assert!((expected - q).abs() < 0.01, "{q}: {x} is {expected}");
        }
        let count = |bytes| etc.iter().filter(|size| **size == bytes).count() as f64;
        assert!((count(2) / RECORDS as f64 - 0.1782).abs() < 0.005, "{}", count(2));
        assert!((count(11) / RECORDS as f64 - 0.089_89).abs() < 0.005, "{}", count(11));
        let uniform = sorted(ValueSize::Uniform(0, 9));
        let count = |bytes| uniform.iter().filter(|size| **size == bytes).count() as f64;
        assert!((0..10).all(|bytes| (count(bytes) / RECORDS as f64 - 0.1).abs() < 0.005));
    }

    #[test]
    fn neighbouring_records_have_independent_sizes() {
        let sizes = ValueSize::Uniform(1, 1000);
        assert!((0..100).filter(|record| sizes.of(*record) == sizes.of(record + 1)).count() < 5);
    }

    #[test]
    fn a_size_is_parsed_from_its_name() {
        for text in ["64", "0", "uniform:16-1024", "facebook", "zippydb"] {
            assert_eq!(text.parse::<ValueSize>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "uniform:5-4", "uniform:5", "twitter", "4194305", "1KiB"] {
            assert!(text.parse::<ValueSize>().unwrap_err().contains("zippydb"), "{text}");
        }
    }
}
