//! Decayed frequencies of keys in two bytes for each, after LRFU (Lee et al., IEEE Transactions on
//! Computers 2001). A request weighs 1 at first, and 1/e after each `memory` of time. The sum over
//! a key's requests is its frequency. It is kept as a *virtual time*: the time at which a single
//! request would weigh as much today. So a frequency decays without being touched, and keys with
//! one request are in the order of LRU.
//!
//! The frequencies are in two rows of bytes. The key's hash chooses a byte in each, and the lower
//! one counts (a count-min sketch). So evicted keys have a frequency too, and nothing is removed.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::mix;

/// The steps of virtual time in a `memory`. More steps are finer, and reach less far.
const STEPS: f64 = 12.0;
/// How far a byte reaches into the future and the past, in steps.
const AHEAD: i64 = 180;
const BEHIND: i64 = 75;
const ROWS: usize = 2;
/// The bytes of a row for each object that fits.
const BYTES_PER_OBJECT: usize = 2;
/// A byte without a virtual time.
const NEVER: i64 = i64::MIN;

/// The sketch.
pub(crate) struct Lrfu {
    /// Virtual times in steps. A server would keep the lowest 8 bits.
    times: Vec<i64>,
    /// The length of a row.
    width: usize,
    /// The time of a step.
    step: f64,
    random: SmallRng,
}

impl Lrfu {
    pub(crate) fn new(objects: usize, memory: f64) -> Self {
        let width = (objects * BYTES_PER_OBJECT).max(16);
        let random = SmallRng::seed_from_u64(2);
        Self { times: vec![NEVER; ROWS * width], width, step: memory / STEPS, random }
    }

    fn places(&self, key: u32) -> [usize; ROWS] {
        let hash = mix(key);
        let place = |row: usize| {
            let part = (hash >> (32 * row)) & u64::from(u32::MAX);
            row * self.width + ((part * self.width as u64) >> 32) as usize
        };
        std::array::from_fn(place)
    }

    /// The key's virtual time in steps; `None` if it is older than a byte can tell.
    fn time(&self, key: u32, now: u64) -> Option<f64> {
        let time = self.places(key).into_iter().map(|place| self.times[place]).min()?;
        let oldest = (now as f64 / self.step) as i64 - BEHIND;
        (time >= oldest).then_some(time as f64)
    }

    /// The key's virtual time, with one more request at `written_at`.
    pub(crate) fn score(&self, key: u32, written_at: u64, now: u64) -> f64 {
        let written = written_at as f64 / self.step;
        self.time(key, now).map_or(written, |time| sum(time, written))
    }

    /// Adds requests at this time.
    pub(crate) fn add(&mut self, key: u32, requests: f64, at: u64) {
        let added = at as f64 / self.step + STEPS * requests.ln();
        let exact = self.time(key, at).map_or(added, |time| sum(time, added));
        // Rounded up or down at random, so that small additions count too, on average.
        let rounded = (exact + self.random.random::<f64>()).floor() as i64;
        let time = rounded.min((at as f64 / self.step) as i64 + AHEAD);
        for place in self.places(key) {
            self.times[place] = self.times[place].max(time);
        }
    }
}

/// The virtual time of two frequencies together.
fn sum(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    high + STEPS * ((low - high) / STEPS).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: f64 = 1000.0;

    fn lrfu() -> Lrfu {
        Lrfu::new(1000, MEMORY)
    }

    #[test]
    fn keys_with_one_request_are_in_the_order_of_lru() {
        let lrfu = lrfu();
        assert!(lrfu.score(1, 500, 900) < lrfu.score(2, 501, 900));
    }

    #[test]
    fn a_request_weighs_a_third_after_a_memory() {
        let mut lrfu = lrfu();
        // 1/e of three requests is a little more than one request.
        lrfu.add(1, 3.0, 10_000);
        assert!(lrfu.time(1, 11_000).unwrap() > 11_000.0 / lrfu.step);
        lrfu.add(2, 2.0, 10_000);
        assert!(lrfu.time(2, 11_000).unwrap() < 11_000.0 / lrfu.step);
    }

    #[test]
    fn requests_add_up_on_average() {
        let mut lrfu = lrfu();
        (0..50).for_each(|_| lrfu.add(7, 1.0, 5000));
        let frequency = ((lrfu.time(7, 5000).unwrap() - 5000.0 / lrfu.step) / STEPS).exp();
        assert!((35.0..70.0).contains(&frequency), "{frequency}");
    }

    #[test]
    fn a_byte_forgets_what_is_too_old_and_bounds_what_is_too_frequent() {
        let mut lrfu = lrfu();
        lrfu.add(1, 1.0, 1000);
        assert!(lrfu.time(1, 1000).is_some() && lrfu.time(1, 1000 + 7 * 1000).is_none());
        lrfu.add(2, 1e12, 1000);
        assert!(lrfu.time(2, 1000).unwrap() <= AHEAD as f64 + 1000.0 / lrfu.step);
    }
}
