//! LRU as redis does it: of a few random keys, the one that was used longest ago goes. A pool keeps
//! the best candidates of earlier samples. Every hit is seen.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::{Policy, Request};
use crate::distribution::below;

/// How many candidates the pool keeps: redis's `EVPOOL_SIZE`.
const POOL: usize = 16;
/// [`SampledLru::place`] of a key that is not stored.
const ABSENT: u32 = u32::MAX;

/// LRU by samples.
pub(crate) struct SampledLru {
    samples: usize,
    capacity: u64,
    used: u64,
    now: u32,
    /// The stored keys, in any order, with their bytes.
    stored: Vec<Request>,
    /// The place of each key in `stored`.
    place: Vec<u32>,
    used_at: Vec<u32>,
    pool: Vec<u32>,
    random: SmallRng,
}

impl SampledLru {
    pub(crate) fn new(samples: usize, keys: u32, capacity: u64) -> Self {
        Self {
            samples,
            capacity,
            used: 0,
            now: 0,
            stored: Vec::new(),
            place: vec![ABSENT; keys as usize],
            used_at: vec![0; keys as usize],
            pool: Vec::new(),
            random: SmallRng::seed_from_u64(1),
        }
    }

    fn evict(&mut self) {
        for _ in 0..self.samples {
            let key = self.stored[below(&mut self.random, self.stored.len() as u64) as usize].key;
            if !self.pool.contains(&key) {
                self.pool.push(key);
            }
        }
        let (place, used_at) = (&self.place, &self.used_at);
        self.pool.retain(|key| place[*key as usize] != ABSENT);
        self.pool.sort_unstable_by_key(|key| std::cmp::Reverse(used_at[*key as usize]));
        self.pool.drain(..self.pool.len().saturating_sub(POOL));
        let Some(oldest) = self.pool.pop() else { return };
        let at = std::mem::replace(&mut self.place[oldest as usize], ABSENT) as usize;
        self.used -= u64::from(self.stored.swap_remove(at).bytes);
        if let Some(moved) = self.stored.get(at) {
            self.place[moved.key as usize] = at as u32;
        }
    }
}

impl Policy for SampledLru {
    fn request(&mut self, request: Request) -> bool {
        let key = request.key as usize;
        self.now += 1;
        self.used_at[key] = self.now;
        if self.place[key] != ABSENT {
            return true;
        }
        let bytes = u64::from(request.bytes);
        if bytes <= self.capacity {
            while self.used + bytes > self.capacity {
                self.evict();
            }
            self.place[key] = self.stored.len() as u32;
            self.stored.push(request);
            self.used += bytes;
        }
        false
    }
}
