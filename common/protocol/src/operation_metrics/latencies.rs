//! Histograms of latencies: four buckets for each power of two of nanoseconds, so that a bucket is
//! at most a quarter as wide as its least latency.

use std::ops::AddAssign;
use std::sync::atomic::AtomicU64;

use farside_fabric::Nanos;

use super::{add_to, read};

/// Log2 of the buckets for each power of two.
const STEPS_BITS: u32 = 2;
const STEPS: usize = 1 << STEPS_BITS;
/// More than any number of nanoseconds needs: a power of two, so that no index needs a check.
const BUCKETS: usize = 256;

/// The bucket of this latency.
#[inline(always)]
fn bucket_of(latency: Nanos) -> usize {
    let shift = (latency | STEPS as Nanos).ilog2() - STEPS_BITS;
    (shift as usize * STEPS + (latency >> shift) as usize) % BUCKETS
}

/// The least latency of a bucket.
fn least_of(bucket: usize) -> Nanos {
    match bucket.checked_sub(2 * STEPS) {
        None => bucket as Nanos,
        Some(_) => {
            let shift = bucket / STEPS - 1;
            ((STEPS + bucket % STEPS) as Nanos).checked_shl(shift as u32).unwrap_or(Nanos::MAX)
        }
    }
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

    /// The latency at most so long that this share of all are not longer, from 0 to 1: the middle
    /// of its bucket. `None` if there are no latencies.
    pub fn quantile(&self, share: f64) -> Option<Nanos> {
        let rank = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut passed = 0;
        let bucket = self.buckets.iter().position(|count| {
            passed += count;
            passed >= rank
        })?;
        let (least, next) = (least_of(bucket), least_of(bucket + 1));
        Some(least + (next - least) / 2)
    }

    /// The number of latencies from one power of two up to the next, for these powers. The first
    /// count has also all shorter ones, and one count more at the end has all longer ones.
    pub fn by_powers_of_two(&self, powers: std::ops::Range<u32>) -> Vec<u64> {
        let mut counts = vec![0; powers.len() + 1];
        for (bucket, count) in self.buckets.iter().enumerate() {
            let power = least_of(bucket).max(1).ilog2();
            let at = power.saturating_sub(powers.start) as usize;
            counts[at.min(powers.len())] += count;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_in_the_bucket_between_its_bounds() {
        let around = (0..64).flat_map(|power| [-1, 0, 1].map(|by| (1_u64 << power).wrapping_add_signed(by)));
        for latency in (0..5000).chain(around).chain([u64::MAX]) {
            let bucket = bucket_of(latency);
            assert!(least_of(bucket) <= latency, "{latency}");
            let next = least_of(bucket + 1);
            assert!(latency < next || next == Nanos::MAX, "{latency}");
        }
        assert!((1..BUCKETS).all(|bucket| least_of(bucket - 1) <= least_of(bucket)));
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
