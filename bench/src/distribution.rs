//! Which record an operation is about.

use std::str::FromStr;

use rand::{Rng, RngExt};

use crate::zipfian::{THETA, Zipfian};

/// The shape of popularity among records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A few records are very popular, and stand anywhere.
    Zipfian,
    /// All are equally popular.
    Uniform,
    /// The newest are the most popular.
    Latest,
    /// Some are popular, all of these alike, and stand anywhere.
    Hotspot,
}

impl Shape {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zipfian => "zipfian",
            Self::Uniform => "uniform",
            Self::Latest => "latest",
            Self::Hotspot => "hotspot",
        }
    }
}

impl FromStr for Shape {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Zipfian, Self::Uniform, Self::Latest, Self::Hotspot]
            .into_iter()
            .find(|shape| shape.name() == text)
            .ok_or("there are zipfian, uniform, latest and hotspot")
    }
}

/// How far popular records stand out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// Zipfian and latest: the exponent, between 0 and 1.
    pub theta: f64,
    /// Hotspot: the share of the records that is hot.
    pub hot_set: f64,
    /// Hotspot: the share of the operations that goes to them.
    pub hot_operations: f64,
}

/// YCSB's share of hot records.
pub const HOT_SET: f64 = 0.2;
/// YCSB's share of operations on them.
pub const HOT_OPERATIONS: f64 = 0.8;

impl Default for Skew {
    fn default() -> Self {
        Self { theta: THETA, hot_set: HOT_SET, hot_operations: HOT_OPERATIONS }
    }
}

/// A permutation of the records, so that popular ranks stand far apart. Upstream hashes ranks
/// modulo the number of records instead, which leaves out a third of them and adds up others; a
/// permutation keeps every rank's probability.
#[derive(Clone, Debug)]
struct Scramble {
    items: u64,
    factor: u64,
}

impl Scramble {
    fn new(items: u64) -> Self {
        // Multiples of the golden section modulo 1 spread evenly, however many are taken.
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

/// Draws records.
#[derive(Clone, Debug)]
pub struct Distribution(Draw);

#[derive(Clone, Debug)]
enum Draw {
    Zipfian(Zipfian, Scramble),
    Uniform,
    Latest(Zipfian),
    Hotspot(Hotspot, Scramble),
}

/// YCSB's `HotspotIntegerGenerator`: uniform within the hot records, and within the others.
#[derive(Clone, Debug)]
struct Hotspot {
    hot: u64,
    cold: u64,
    operations: f64,
}

impl Hotspot {
    fn new(records: u64, skew: &Skew) -> Self {
        let hot = ((records as f64 * skew.hot_set) as u64).min(records);
        let cold = records - hot;
        // Where one of the sets is empty all goes to the other.
        let operations = match (hot, cold) {
            (0, _) => 0.0,
            (_, 0) => 1.0,
            _ => skew.hot_operations,
        };
        Self { hot, cold, operations }
    }

    /// A rank; the hot ones come first.
    #[inline]
    fn draw(&self, random: &mut impl Rng) -> u64 {
        let u: f64 = random.random();
        if u < self.operations {
            below(random, self.hot)
        } else {
            self.hot + below(random, self.cold)
        }
    }
}

impl Distribution {
    /// For this many loaded records, at least 1.
    pub fn new(shape: Shape, skew: &Skew, records: u64) -> Self {
        let scramble = Scramble::new(records);
        Self(match shape {
            Shape::Zipfian => Draw::Zipfian(Zipfian::new(records, skew.theta), scramble),
            Shape::Uniform => Draw::Uniform,
            Shape::Latest => Draw::Latest(Zipfian::new(records, skew.theta)),
            Shape::Hotspot => Draw::Hotspot(Hotspot::new(records, skew), scramble),
        })
    }

    /// A record below `records_now`, which is never less than the number of loaded records.
    ///
    /// Zipfian and hotspot draw among the loaded records; latest among as many of the newest.
    #[inline]
    pub fn draw(&self, random: &mut impl Rng, records_now: u64) -> u64 {
        match &self.0 {
            Draw::Zipfian(ranks, scramble) => scramble.record(ranks.draw(random)),
            Draw::Uniform => below(random, records_now),
            Draw::Latest(ranks) => records_now - 1 - ranks.draw(random),
            Draw::Hotspot(ranks, scramble) => scramble.record(ranks.draw(random)),
        }
    }
}

/// A number below `end`, equally likely but for a bias of `end` in 2^64.
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
    fn hot_records_get_their_share_of_the_operations_and_all_of_a_set_alike() {
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
            // The records are the same ones in another order.
            let distribution = Distribution::new(Shape::Hotspot, &skew, 1000);
            let mut records = counts(1000, |random| distribution.draw(random, 1000));
            let mut ranked = ranked;
            records.sort_unstable();
            ranked.sort_unstable();
            assert_eq!(records, ranked);
        }
        // All hot, none hot.
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
        for shape in [Shape::Zipfian, Shape::Uniform, Shape::Latest, Shape::Hotspot] {
            for records in [1, 2, 3, 10, 4096] {
                let distribution = Distribution::new(shape, &Skew::default(), records);
                for extra in 0..200 {
                    let now = records + extra;
                    assert!(distribution.draw(&mut random, now) < now, "{shape:?} {records}");
                }
            }
        }
    }

    #[test]
    fn scrambling_is_a_permutation_that_parts_neighbours() {
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
    fn uniform_reaches_all_alike() {
        let distribution = Distribution::new(Shape::Uniform, &Skew::default(), 10);
        let counts = counts(10, |random| distribution.draw(random, 10));
        assert!(counts.iter().all(|count| (share(*count) - 0.1).abs() < 0.01), "{counts:?}");
    }

    #[test]
    fn shapes_are_known_by_name() {
        assert_eq!("latest".parse(), Ok(Shape::Latest));
        assert!("zipf".parse::<Shape>().unwrap_err().contains("zipfian"));
    }
}
