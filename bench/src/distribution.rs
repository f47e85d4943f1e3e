//! The distribution of operations over records. By Zipf's law a few ranks are drawn very often.

use clap::ValueEnum;
use rand::{Rng, RngExt};

use crate::records;

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
            Draw::ScrambledZipfian(ranks, records) => records::hash(ranks.draw(random)) % records,
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

/// YCSB's exponent.
pub const THETA: f64 = 0.99;
/// [`Zipfian::alpha`] for [`THETA`].
const ALPHA: i32 = 100;

/// Ranks with probability proportional to 1 / (rank + 1)^theta, by the method of Gray et al.,
/// "Quickly generating billion-record synthetic databases" (SIGMOD 1994), which YCSB uses as well:
/// one power per draw, exact for the first two ranks and close for the rest.
#[derive(Clone, Debug)]
pub struct Zipfian {
    items: u64,
    alpha: f64,
    /// Alpha if it is an integer, as with YCSB's exponent: it needs multiplications only.
    alpha_integer: Option<i32>,
    zeta: f64,
    eta: f64,
    /// The bound of `u * zeta` below which the rank is 1.
    second: f64,
}

impl Zipfian {
    /// A generator of ranks below `items`, which is at least 1. `theta` is between 0 and 1.
    pub fn new(items: u64, theta: f64) -> Self {
        let items = items.max(1);
        let zeta_items = zeta(items, theta);
        let eta =
            (1.0 - (2.0 / items as f64).powf(1.0 - theta)) / (1.0 - zeta(2, theta) / zeta_items);
        let second = 1.0 + 0.5f64.powf(theta);
        let alpha = 1.0 / (1.0 - theta);
        let is_integer = (alpha - alpha.round()).abs() < 1e-9;
        let alpha_integer = is_integer.then_some(alpha.round() as i32);
        Self { items, alpha, alpha_integer, zeta: zeta_items, eta, second }
    }

    /// Draws a rank; 0 is the most popular.
    #[inline]
    pub fn draw(&self, random: &mut impl Rng) -> u64 {
        let u: f64 = random.random();
        let uz = u * self.zeta;
        if uz < 1.0 {
            return 0;
        }
        if uz < self.second {
            return 1.min(self.items - 1);
        }
        let base = self.eta * u - self.eta + 1.0;
        let power = match self.alpha_integer {
            // The same, but with a constant the compiler writes out the multiplications.
            Some(ALPHA) => base.powi(ALPHA),
            Some(alpha) => base.powi(alpha),
            None => base.powf(self.alpha),
        };
        let rank = self.items as f64 * power;
        (rank as u64).min(self.items - 1)
    }
}

/// The number of terms of the zeta sum that are added one by one. The rest is an integral.
const ZETA_TERMS: u64 = 1 << 16;

/// The sum of 1 / i^theta for i from 1 to `items`. The tail is the formula of Euler and Maclaurin,
/// whose error is below 1e-11 here.
fn zeta(items: u64, theta: f64) -> f64 {
    let term = |i: u64| (i as f64).powf(-theta);
    let head: f64 = (1..=items.min(ZETA_TERMS)).map(term).sum();
    if items <= ZETA_TERMS {
        return head;
    }
    let primitive = |x: u64| (x as f64).powf(1.0 - theta) / (1.0 - theta);
    let integral = primitive(items) - primitive(ZETA_TERMS);
    head + integral + (term(items) - term(ZETA_TERMS)) / 2.0
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::distr::Distribution as _;
    use rand::rngs::SmallRng;

    use super::*;

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

    const DRAWS: u32 = 400_000;

    pub(crate) fn counts(items: u64, mut draw: impl FnMut(&mut SmallRng) -> u64) -> Vec<u32> {
        let mut random = SmallRng::seed_from_u64(7);
        let mut counts = vec![0; items as usize];
        for _ in 0..DRAWS {
            counts[draw(&mut random) as usize] += 1;
        }
        counts
    }

    pub(crate) fn share(count: u32) -> f64 {
        f64::from(count) / f64::from(DRAWS)
    }

    #[test]
    fn ranks_are_drawn_as_often_as_by_another_implementation() {
        let small = [0.2, 0.5, 0.8, 0.95].map(|theta| (1000, theta));
        for (items, theta) in [&small[..], &[(5000, THETA), (1_000_000, THETA)]].concat() {
            let sample = Zipfian::new(items, theta);
            let reference = rand_distr::Zipf::new(items as f64, theta).unwrap();
            let sample = counts(items, |random| sample.draw(random));
            let reference = counts(items, |random| reference.sample(random) as u64 - 1);
            // Of single ranks only the first two are exact.
            for end in [1, 2, 30, 300, 1000] {
                let [a, b] = [&sample, &reference].map(|counts| share(counts[..end].iter().sum()));
                assert!((a / b - 1.0).abs() < 0.1, "{theta}, first {end} of {items}: {a}, {b}");
            }
        }
    }

    #[test]
    fn the_shortcut_for_zeta_is_exact_enough() {
        let exact: f64 = (1..=300_000u64).map(|i| (i as f64).powf(-THETA)).sum();
        assert!((zeta(300_000, THETA) - exact).abs() < 1e-8);
        // The constant of YCSB's source for this number of items.
        assert!((zeta(10_000_000_000, THETA) - 26.469_028_201_783_02).abs() < 1e-8);
    }
}
