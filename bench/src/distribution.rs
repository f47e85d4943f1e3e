//! The distribution of operations over records.

use clap::ValueEnum;
use rand::{Rng, RngExt};

use crate::keys;
use crate::zipfian::{THETA, Zipfian};

/// The shape of popularity among records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// A few records are very popular, and are spread over all records
    Zipfian,
    /// Upstream YCSB's zipfian: half as skewed
    ScrambledZipfian,
    /// All records are equally popular
    Uniform,
    /// The newest records are the most popular
    Latest,
    /// A share of the records is popular, all of these equally, and they are spread over all
    /// records
    Hotspot,
}

impl Shape {
    /// The name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zipfian => "zipfian",
            Self::ScrambledZipfian => "scrambled-zipfian",
            Self::Uniform => "uniform",
            Self::Latest => "latest",
            Self::Hotspot => "hotspot",
        }
    }

    /// Whether ranks follow Zipf's law, with a theta.
    pub const fn is_zipfian(self) -> bool {
        matches!(self, Self::Zipfian | Self::ScrambledZipfian | Self::Latest)
    }
}

/// The parameters of the shapes: how unequal the popularity of records is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// Zipfian, scrambled or not, and latest: the exponent, between 0 and 1.
    pub theta: f64,
    /// Hotspot: the share of the records that is hot.
    pub hot_set: f64,
    /// Hotspot: the share of the operations that goes to hot records.
    pub hot_operations: f64,
}

/// YCSB's share of hot records.
pub const HOT_SET: f64 = 0.2;
/// YCSB's share of operations on hot records.
pub const HOT_OPERATIONS: f64 = 0.8;

impl Default for Skew {
    fn default() -> Self {
        Self { theta: THETA, hot_set: HOT_SET, hot_operations: HOT_OPERATIONS }
    }
}

/// A permutation of the records, so that popular records are far apart. It keeps the probability of
/// each rank. Upstream hashes ranks instead, of far more items.
#[derive(Clone, Debug)]
struct Scramble {
    items: u64,
    factor: u64,
}

impl Scramble {
    fn new(items: u64) -> Self {
        // Multiples of the golden section modulo 1 are spread evenly, for any number of them.
        let mut factor = ((items as f64 * 0.618_033_988_749_894_9) as u64).max(1);
        while common_divisor(factor, items) != 1 {
            factor += 1;
        }
        Self { items, factor }
    }

    #[inline]
    fn record(&self, rank: u64) -> u64 {
        match rank.checked_mul(self.factor) {
            Some(product) => product % self.items,
            None => (u128::from(rank) * u128::from(self.factor) % u128::from(self.items)) as u64,
        }
    }
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The items of upstream's scrambled zipfian.
const SCRAMBLED_ITEMS: u64 = 10_000_000_000;

/// Draws records.
#[derive(Clone, Debug)]
pub struct Distribution(Draw);

#[derive(Clone, Debug)]
enum Draw {
    Zipfian(Zipfian, Scramble),
    /// YCSB's `ScrambledZipfianGenerator`: draws ranks of [`SCRAMBLED_ITEMS`] items, however few
    /// the records, and hashes them to records. Each record gets many items, which evens them out.
    ScrambledZipfian(Zipfian, u64),
    Uniform,
    Latest(Zipfian),
    Hotspot(Hotspot, Scramble),
}

/// YCSB's `HotspotIntegerGenerator`: uniform within the hot records, and within the others.
#[derive(Clone, Debug)]
struct Hotspot {
    hot: u64,
    cold: u64,
    hot_share: f64,
}

impl Hotspot {
    fn new(records: u64, skew: &Skew) -> Self {
        let hot = ((records as f64 * skew.hot_set) as u64).min(records);
        let cold = records - hot;
        // If one of the sets is empty, all operations go to the other.
        let hot_share = match (hot, cold) {
            (0, _) => 0.0,
            (_, 0) => 1.0,
            _ => skew.hot_operations,
        };
        Self { hot, cold, hot_share }
    }

    /// Draws a rank; the hot ranks come first.
    #[inline]
    fn draw(&self, random: &mut impl Rng) -> u64 {
        let u: f64 = random.random();
        if u < self.hot_share {
            below(random, self.hot)
        } else {
            self.hot + below(random, self.cold)
        }
    }
}

impl Distribution {
    /// The distribution over this number of loaded records, at least 1.
    pub fn new(shape: Shape, skew: &Skew, records: u64) -> Self {
        let scramble = Scramble::new(records);
        Self(match shape {
            Shape::Zipfian => Draw::Zipfian(Zipfian::new(records, skew.theta), scramble),
            Shape::ScrambledZipfian => {
                Draw::ScrambledZipfian(Zipfian::new(SCRAMBLED_ITEMS, skew.theta), records)
            }
            Shape::Uniform => Draw::Uniform,
            Shape::Latest => Draw::Latest(Zipfian::new(records, skew.theta)),
            Shape::Hotspot => Draw::Hotspot(Hotspot::new(records, skew), scramble),
        })
    }

    /// Draws a record below `records_now`, which is never less than the number of loaded records.
    ///
    /// Both zipfians and hotspot draw among the loaded records. Latest draws among the newest
    /// records, as many as were loaded.
    #[inline]
    pub fn draw(&self, random: &mut impl Rng, records_now: u64) -> u64 {
        match &self.0 {
            Draw::Zipfian(ranks, scramble) => scramble.record(ranks.draw(random)),
            Draw::ScrambledZipfian(ranks, records) => keys::hash(ranks.draw(random)) % records,
            Draw::Uniform => below(random, records_now),
            Draw::Latest(ranks) => records_now - 1 - ranks.draw(random),
            Draw::Hotspot(ranks, scramble) => scramble.record(ranks.draw(random)),
        }
    }
}

/// A number below `end`, equally likely except for a bias of `end` in 2^64.
#[inline]
pub fn below(random: &mut impl Rng, end: u64) -> u64 {
    ((u128::from(random.next_u64()) * u128::from(end)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;
    use crate::zipfian::tests::{counts, share};

    #[test]
    fn hot_records_get_their_share_of_the_operations_each_equally() {
        for (hot_set, hot_operations) in [(0.2, 0.8), (0.01, 0.5), (0.5, 0.1)] {
            let skew = Skew { hot_set, hot_operations, ..Skew::default() };
            let ranks = Hotspot::new(1000, &skew);
            let ranked = counts(1000, |random| ranks.draw(random));
            let hot = (1000.0 * hot_set) as usize;
            let drawn = share(ranked[..hot].iter().sum());
            assert!((drawn - hot_operations).abs() < 0.01, "{skew:?}: {drawn}");
            for half in [&ranked[..hot], &ranked[hot..]] {
                let (first, second) = half.split_at(half.len() / 2);
                let (first, second) = (first.iter().sum::<u32>(), second.iter().sum::<u32>());
                let ratio = f64::from(first) / f64::from(second);
                assert!((ratio - 1.0).abs() < 0.05, "{skew:?}: {ratio}");
            }
            // The counts of records are those of ranks, in another order.
            let distribution = Distribution::new(Shape::Hotspot, &skew, 1000);
            let mut records = counts(1000, |random| distribution.draw(random, 1000));
            let mut ranked = ranked;
            records.sort_unstable();
            ranked.sort_unstable();
            assert_eq!(records, ranked);
        }
        // No record is hot, or all are.
        for (hot_set, expected) in [(0.0, 1000), (1.0, 1000)] {
            let skew = Skew { hot_set, ..Skew::default() };
            let ranks = Hotspot::new(1000, &skew);
            let drawn = counts(1000, |random| ranks.draw(random));
            assert_eq!(drawn.iter().filter(|count| **count > 0).count(), expected);
        }
    }

    #[test]
    fn draws_stay_in_range_however_few_records_there_are() {
        let mut random = SmallRng::seed_from_u64(1);
        for shape in Shape::value_variants() {
            for records in [1, 2, 3, 10, 4096] {
                let distribution = Distribution::new(*shape, &Skew::default(), records);
                for extra in 0..200 {
                    let now = records + extra;
                    assert!(distribution.draw(&mut random, now) < now, "{shape:?} {records}");
                }
            }
        }
    }

    #[test]
    fn upstreams_zipfian_is_half_as_skewed_as_ours_and_draws_every_record() {
        let drawn = |shape, records, now| {
            let distribution = Distribution::new(shape, &Skew::default(), records);
            let mut counts = counts(now, |random| distribution.draw(random, now));
            let added = counts.split_off(records as usize);
            // Neither of them draws a record that was added since.
            assert!(added.iter().all(|count| *count == 0), "{shape:?}");
            counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
            counts
        };
        for (shape, hottest, hot) in
            [(Shape::Zipfian, 0.078, 0.61), (Shape::ScrambledZipfian, 0.038, 0.31)]
        {
            let counts = drawn(shape, 100_000, 100_000);
            let (first, thousand) = (share(counts[0]), share(counts[..1000].iter().sum()));
            assert!((first - hottest).abs() < 0.002, "{shape:?}: {first}");
            assert!((thousand - hot).abs() < 0.02, "{shape:?}: {thousand}");
        }
        let counts = drawn(Shape::ScrambledZipfian, 1000, 2000);
        // Most of the probability is spread evenly over all records.
        assert!(share(counts[999]) > 0.0005, "{}", counts[999]);
    }

    #[test]
    fn the_scrambled_records_are_those_of_ycsb() {
        let distribution = Distribution::new(Shape::ScrambledZipfian, &Skew::default(), 1000);
        let counts = counts(1000, |random| distribution.draw(random, 1000));
        let mut hot: Vec<usize> = (0..1000).collect();
        hot.sort_by_key(|record| std::cmp::Reverse(counts[*record]));
        // YCSB's keys for records 0 and 1 end in these digits: user...211 and user...620.
        assert_eq!(hot[..2], [211, 620]);
    }

    #[test]
    fn scrambling_is_a_permutation_that_separates_neighbours() {
        for items in [1, 2, 6, 1000, 65_536] {
            let scramble = Scramble::new(items);
            let mut seen = vec![false; items as usize];
            for rank in 0..items {
                assert!(!std::mem::replace(&mut seen[scramble.record(rank) as usize], true));
            }
        }
        let large = Scramble::new(u64::MAX / 3);
        assert!(large.record(u64::MAX / 3 - 1) < u64::MAX / 3);
        let scramble = Scramble::new(1_000_000);
        let hot: Vec<u64> = (0..100).map(|rank| scramble.record(rank)).collect();
        for (n, a) in hot.iter().enumerate() {
            assert!(hot[..n].iter().all(|b| a.abs_diff(*b) > 1000));
        }
    }

    #[test]
    fn latest_prefers_the_newest() {
        let distribution = Distribution::new(Shape::Latest, &Skew::default(), 1000);
        let counts = counts(2000, |random| distribution.draw(random, 2000));
        assert!(counts[..1000].iter().all(|count| *count == 0));
        assert!(share(counts[1999]) > 0.1);
        assert!(counts[1999] > counts[1998] && counts[1998] > counts[1990]);
    }

    #[test]
    fn uniform_draws_every_record_equally_often() {
        let distribution = Distribution::new(Shape::Uniform, &Skew::default(), 10);
        let counts = counts(10, |random| distribution.draw(random, 10));
        assert!(counts.iter().all(|count| (share(*count) - 0.1).abs() < 0.01), "{counts:?}");
    }
}
