//! Which record an operation is about.

use std::str::FromStr;

use rand::{Rng, RngExt};

/// The shape of popularity among records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A few records are very popular, and stand anywhere.
    Zipfian,
    /// All are equally popular.
    Uniform,
    /// The newest are the most popular.
    Latest,
}

impl Shape {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zipfian => "zipfian",
            Self::Uniform => "uniform",
            Self::Latest => "latest",
        }
    }
}

impl FromStr for Shape {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Zipfian, Self::Uniform, Self::Latest]
            .into_iter()
            .find(|shape| shape.name() == text)
            .ok_or("there are zipfian, uniform and latest")
    }
}

/// YCSB's skew.
pub const THETA: f64 = 0.99;

/// Ranks with probability proportional to 1 / (rank + 1)^theta, by the method of Gray et al.,
/// "Quickly generating billion-record synthetic databases" (SIGMOD 1994), which YCSB uses as well:
/// one power per draw, exact for the first two ranks and close for the rest.
#[derive(Clone, Debug)]
pub struct Zipfian {
    items: u64,
    alpha: f64,
    /// Alpha where it is an integer, as with YCSB's skew: ten multiplications instead of a power.
    alpha_integer: Option<i32>,
    zeta: f64,
    eta: f64,
    /// Below this, `u * zeta` means rank 1.
    second: f64,
}

impl Zipfian {
    /// Ranks below `items`, which is at least 1; theta between 0 and 1.
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

    /// A rank; 0 is the most popular.
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
            Some(alpha) => base.powi(alpha),
            None => base.powf(self.alpha),
        };
        let rank = self.items as f64 * power;
        (rank as u64).min(self.items - 1)
    }

    /// The probability of a rank, by definition.
    pub fn probability(&self, rank: u64, theta: f64) -> f64 {
        ((rank + 1) as f64).powf(-theta) / self.zeta
    }
}

/// Terms of the zeta sum that are added one by one; the rest is an integral.
const ZETA_TERMS: u64 = 1 << 16;

/// The sum of 1 / i^theta for i from 1 to `items`; the tail by Euler and Maclaurin, whose error is
/// below 1e-11 here.
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
}

impl Distribution {
    /// For this many loaded records, at least 1.
    pub fn new(shape: Shape, records: u64) -> Self {
        Self(match shape {
            Shape::Zipfian => Draw::Zipfian(Zipfian::new(records, THETA), Scramble::new(records)),
            Shape::Uniform => Draw::Uniform,
            Shape::Latest => Draw::Latest(Zipfian::new(records, THETA)),
        })
    }

    /// A record below `records_now`, which is never less than the number of loaded records.
    ///
    /// Zipfian draws among the loaded records; latest among as many of the newest.
    #[inline]
    pub fn draw(&self, random: &mut impl Rng, records_now: u64) -> u64 {
        match &self.0 {
            Draw::Zipfian(ranks, scramble) => scramble.record(ranks.draw(random)),
            Draw::Uniform => below(random, records_now),
            Draw::Latest(ranks) => records_now - 1 - ranks.draw(random),
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
    use rand::distr::Distribution as _;
    use rand::rngs::SmallRng;

    use super::*;

    const DRAWS: u32 = 400_000;

    fn counts(items: u64, mut draw: impl FnMut(&mut SmallRng) -> u64) -> Vec<u32> {
        let mut random = SmallRng::seed_from_u64(7);
        let mut counts = vec![0; items as usize];
        for _ in 0..DRAWS {
            counts[draw(&mut random) as usize] += 1;
        }
        counts
    }

    fn share(count: u32) -> f64 {
        f64::from(count) / f64::from(DRAWS)
    }

    #[test]
    fn the_hottest_ranks_come_as_often_as_theory_says() {
        for items in [1000, 1_000_000] {
            let ranks = Zipfian::new(items, THETA);
            let counts = counts(items, |random| ranks.draw(random));
            for (rank, count) in counts.iter().take(2).enumerate() {
                let expected = ranks.probability(rank as u64, THETA);
                assert!((share(*count) / expected - 1.0).abs() < 0.05, "rank {rank} of {items}");
            }
            // The method is approximate for single ranks behind the second, not for many together.
            for end in [10u64, 100, 1000] {
                let expected: f64 = (0..end).map(|rank| ranks.probability(rank, THETA)).sum();
                let drawn = share(counts.iter().take(end as usize).sum());
                assert!((drawn / expected - 1.0).abs() < 0.1, "first {end} of {items}: {drawn}");
            }
        }
    }

    #[test]
    fn it_agrees_with_another_implementation() {
        let ours = Zipfian::new(5000, THETA);
        let theirs = rand_distr::Zipf::new(5000.0, THETA).unwrap();
        let ours = counts(5000, |random| ours.draw(random));
        let theirs = counts(5000, |random| theirs.sample(random) as u64 - 1);
        for end in [1, 20, 500, 2500] {
            let (a, b) = (share(ours[..end].iter().sum()), share(theirs[..end].iter().sum()));
            assert!((a - b).abs() < 0.02, "first {end}: {a} and {b}");
        }
    }

    #[test]
    fn the_shortcut_for_zeta_is_exact_enough() {
        let exact: f64 = (1..=300_000u64).map(|i| (i as f64).powf(-THETA)).sum();
        assert!((zeta(300_000, THETA) - exact).abs() < 1e-8);
    }

    #[test]
    fn draws_stay_in_range_however_few_records_there_are() {
        let mut random = SmallRng::seed_from_u64(1);
        for shape in [Shape::Zipfian, Shape::Uniform, Shape::Latest] {
            for records in [1, 2, 3, 10, 4096] {
                let distribution = Distribution::new(shape, records);
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
        let distribution = Distribution::new(Shape::Latest, 1000);
        let counts = counts(2000, |random| distribution.draw(random, 2000));
        assert!(counts[..1000].iter().all(|count| *count == 0));
        assert!(share(counts[1999]) > 0.1);
        assert!(counts[1999] > counts[1998] && counts[1998] > counts[1990]);
    }

    #[test]
    fn uniform_reaches_all_alike() {
        let distribution = Distribution::new(Shape::Uniform, 10);
        let counts = counts(10, |random| distribution.draw(random, 10));
        assert!(counts.iter().all(|count| (share(*count) - 0.1).abs() < 0.01), "{counts:?}");
    }

    #[test]
    fn shapes_are_known_by_name() {
        assert_eq!("latest".parse(), Ok(Shape::Latest));
        assert!("zipf".parse::<Shape>().unwrap_err().contains("zipfian"));
    }
}
