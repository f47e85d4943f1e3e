//! Histograms of latencies: four buckets for each power of two of nanoseconds, so that a bucket is
//! at most a quarter as wide as its least latency.

use std::ops::AddAssign;
use std::sync::atomic::AtomicU64;

use farside_fabric::Nanos;

use super::{add_to, read};

/// The buckets of all numbers of 64 bits.
const BUCKETS: usize = 4 * 64;

/// The bucket of this latency: the exponent and two bits of the mantissa of its number as `f64`,
/// which take fewer instructions than the same bits of the integer. 0 counts as 2 ns.
#[inline(always)]
fn bucket_of(latency: Nanos) -> usize {
    // With a sign, because that conversion takes fewer instructions.
    ((latency as i64 as f64).to_bits() >> (f64::MANTISSA_DIGITS - 3)) as usize % BUCKETS
}

/// The bucket of 1 ns. The first buckets follow the last ones, because exponents begin below 0.
const FIRST_BUCKET: usize = (f64::MAX_EXP as usize - 1) * 4 % BUCKETS;

/// The buckets in the order of their latencies. Those of number 4 n begin with 2^n ns.
fn in_order() -> impl Iterator<Item = usize> {
    (0..BUCKETS).map(|number| (FIRST_BUCKET + number) % BUCKETS)
}

/// The least latency of the bucket of this number, in nanoseconds.
fn least_of(number: usize) -> f64 {
    2_f64.powi(number as i32 / 4) * (1.0 + (number % 4) as f64 / 4.0)
}

/// The running histogram of one session.
pub(super) struct LatencyCounts {
    sum_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Default for LatencyCounts {
    fn default() -> Self {
        let buckets = std::array::from_fn(|_| AtomicU64::default());
        Self { sum_ns: AtomicU64::default(), buckets }
    }
}

impl LatencyCounts {
    #[inline(always)]
    pub(super) fn add(&self, latency: Nanos) {
        add_to(&self.buckets[bucket_of(latency)], 1);
        add_to(&self.sum_ns, latency);
    }

    /// The number of latencies.
    pub(super) fn count(&self) -> u64 {
        self.buckets.iter().map(read).sum()
    }

    /// Adds the counts to `sum`. Returns the number of latencies.
    pub(super) fn add_to(&self, sum: &mut Latencies) -> u64 {
        let before = sum.count();
        sum.sum_ns = sum.sum_ns.wrapping_add(read(&self.sum_ns));
        for (own, sum) in self.buckets.iter().zip(sum.buckets.iter_mut()) {
            *sum += read(own);
        }
        sum.count() - before
    }
}

/// A histogram of latencies.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// Their sum.
    pub sum_ns: Nanos,
    buckets: Box<[u64; BUCKETS]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { sum_ns: 0, buckets: Box::new([0; BUCKETS]) }
    }
}

impl AddAssign<&Self> for Latencies {
    fn add_assign(&mut self, other: &Self) {
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        self.buckets.iter_mut().zip(other.buckets.iter()).for_each(|(own, other)| *own += other);
    }
}

impl Latencies {
    /// The number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns an estimate of the latency that this share (0 to 1) of all do not exceed: the middle
    /// of its bucket. `None` if there are no latencies.
    pub fn quantile(&self, share: f64) -> Option<Nanos> {
        let rank = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut passed = 0;
        let number = in_order().position(|bucket| {
            passed += self.buckets[bucket];
            passed >= rank
        })?;
        Some(least_of(number).midpoint(least_of(number + 1)) as Nanos)
    }

    /// The number of latencies from one power of two up to the next, for these powers. The first
    /// count has also all shorter ones, and one count more at the end has all longer ones.
    pub fn by_powers_of_two(&self, powers: std::ops::Range<u32>) -> Vec<u64> {
        let mut counts = vec![0; powers.len() + 1];
        for (number, bucket) in in_order().enumerate() {
            let at = (number / 4).saturating_sub(powers.start as usize);
            counts[at.min(powers.len())] += self.buckets[bucket];
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_bucket_that_ends_behind_it() {
        let mut expected = in_order();
        let mut bucket = expected.next().unwrap();
        let mut number = 0;
        for latency in 1..100_000 {
            while latency as f64 >= least_of(number + 1) {
                (bucket, number) = (expected.next().unwrap(), number + 1);
            }
            assert_eq!(bucket_of(latency), bucket, "{latency}");
        }
        assert_eq!(bucket_of(0), bucket_of(2));
        assert_eq!(Some(bucket_of(1 << 62)), in_order().nth(4 * 62));
    }

    #[test]
    fn quantiles_and_powers_are_those_of_the_latencies() {
        let counts = LatencyCounts::default();
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), None);
        (1..=1000).for_each(|latency| counts.add(latency));
        assert_eq!(counts.add_to(&mut latencies), 1000);
        for (share, exact) in [(0.0, 1), (0.5, 500), (0.99, 990), (1.0, 1000)] {
            let found = latencies.quantile(share).unwrap();
            assert!(found.abs_diff(exact) <= exact / 4, "{share}: {found}");
        }
        assert_eq!(latencies.sum_ns, 500_500);
        // Below 16, 16 to 31, 32 to 63, and all others.
        assert_eq!(latencies.by_powers_of_two(3..6), [15, 16, 32, 937]);
        let twice = &mut latencies.clone();
        *twice += &latencies;
        assert_eq!((twice.count(), twice.sum_ns), (2000, 1_001_000));
    }
}
