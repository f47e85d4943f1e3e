//! Zipf's law: a few ranks are drawn very often.

use rand::{Rng, RngExt};

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
pub(crate) mod tests {
    use rand::SeedableRng;
    use rand::distr::Distribution as _;
    use rand::rngs::SmallRng;

    use super::*;

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
