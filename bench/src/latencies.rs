//! The latencies of operations, counted by the buckets of a [`Histogram`].

use hdrhistogram::Histogram;

/// Limit on a recorded latency, in nanoseconds. A longer one is recorded as this.
pub const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// The number of decimal digits to which percentiles are exact.
const LATENCY_DIGITS: u8 = 3;
/// Latencies below 2 to this power have buckets of their own. Then the buckets double with each
/// power of two, which leaves half as many for each. That is what [`LATENCY_DIGITS`] requires.
const EXACT_BITS: u32 = 11;
/// The number of buckets for each power of two.
const HALF: usize = 1 << (EXACT_BITS - 1);
const BUCKETS: usize = bucket(LATENCY_NS_MAX) + 1;

/// An empty histogram of latencies that never grows.
pub fn latency_histogram() -> Histogram<u64> {
    #[allow(clippy::expect_used, reason = "the bounds are constants that fit")]
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, LATENCY_DIGITS).expect("constant bounds")
}

/// The counts of latencies that [`latency_histogram`] would have. A measured loop records into
/// these, because that takes a sixth of the instructions.
#[derive(Clone)]
pub struct Latencies(Box<[u64]>);

/// The bucket of a latency.
#[inline]
const fn bucket(latency_ns: u64) -> usize {
    let doublings = (latency_ns | ((1 << EXACT_BITS) - 1)).ilog2() - (EXACT_BITS - 1);
    doublings as usize * HALF + (latency_ns >> doublings) as usize
}

/// The shortest latency of a bucket.
const fn shortest(bucket: usize) -> u64 {
    let doublings = (bucket / HALF).saturating_sub(1);
    ((bucket - doublings * HALF) as u64) << doublings
}

impl Default for Latencies {
    fn default() -> Self {
        Self(vec![0; BUCKETS].into())
    }
}

impl Latencies {
    /// Counts a latency.
    #[inline]
    pub fn record(&mut self, latency_ns: u64) {
        // It is always there.
        if let Some(count) = self.0.get_mut(bucket(latency_ns.min(LATENCY_NS_MAX))) {
            *count += 1;
        }
    }

    /// Adds the counts of others.
    pub fn add(&mut self, others: &Self) {
        for (count, added) in self.0.iter_mut().zip(&others.0) {
            *count += added;
        }
    }

    /// The number of latencies.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The histogram of the latencies.
    pub fn histogram(&self) -> Histogram<u64> {
        let mut histogram = latency_histogram();
        for (bucket, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            // This cannot fail, because the buckets are those of the histogram.
            let _ = histogram.record_n(shortest(bucket), *count);
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_is_the_one_that_records_the_latencies_itself() {
        let (mut own, mut others, mut expected) =
            (Latencies::default(), Latencies::default(), latency_histogram());
        let mut latency_ns = 1;
        while latency_ns < 4 * LATENCY_NS_MAX {
            for near in [0, latency_ns - 1, latency_ns, latency_ns + 1, latency_ns * 10 / 7] {
                own.record(near);
                others.record(near / 3);
                expected.saturating_record(near.min(LATENCY_NS_MAX));
                expected.saturating_record((near / 3).min(LATENCY_NS_MAX));
            }
            latency_ns += latency_ns / 5 + 1;
        }
        own.record(u64::MAX);
        expected.saturating_record(u64::MAX);
        own.add(&others);
        let histogram = own.histogram();
        assert_eq!(own.count(), expected.len());
        assert_eq!((histogram.min(), histogram.max()), (expected.min(), expected.max()));
        assert!(histogram.iter_all().eq(expected.iter_all()));
        assert_eq!(histogram, expected);
    }
}
