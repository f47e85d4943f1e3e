//! The policies that see every request and keep exact queues: FIFO, LRU, CLOCK, SIEVE and S3-FIFO.

use super::queues::Queues;
use super::{Policy, Request};

/// FIFO and LRU. LRU makes a key the newest at each hit.
pub(crate) struct Ordered {
    queue: Queues<1>,
    capacity: u64,
    renews: bool,
}

impl Ordered {
    pub(crate) fn fifo(keys: u32, capacity: u64) -> Self {
        Self { queue: Queues::new(keys), capacity, renews: false }
    }

    pub(crate) fn lru(keys: u32, capacity: u64) -> Self {
        Self { renews: true, ..Self::fifo(keys, capacity) }
    }
}

impl Policy for Ordered {
    fn request(&mut self, request: Request) -> bool {
        if self.queue.queue_of(request.key).is_some() {
            if self.renews {
                self.queue.transfer(0, request.key);
            }
            return true;
        }
        let bytes = u64::from(request.bytes);
        if bytes <= self.capacity {
            while self.queue.bytes(0) + bytes > self.capacity {
                self.queue.pop(0);
            }
            self.queue.push(0, request);
        }
        false
    }
}

/// CLOCK: FIFO that passes over each key that was hit since it was last passed over.
pub(crate) struct Clock {
    queue: Queues<1>,
    capacity: u64,
    was_hit: Vec<bool>,
}

impl Clock {
    pub(crate) fn new(keys: u32, capacity: u64) -> Self {
        Self { queue: Queues::new(keys), capacity, was_hit: vec![false; keys as usize] }
    }
}

impl Policy for Clock {
    fn request(&mut self, request: Request) -> bool {
        if self.queue.queue_of(request.key).is_some() {
            self.was_hit[request.key as usize] = true;
            return true;
        }
        let bytes = u64::from(request.bytes);
        if bytes > self.capacity {
            return false;
        }
        while self.queue.bytes(0) + bytes > self.capacity {
            let Some(oldest) = self.queue.oldest(0) else { break };
            if std::mem::take(&mut self.was_hit[oldest as usize]) {
                self.queue.transfer(0, oldest);
            } else {
                self.queue.remove(oldest);
            }
        }
        self.queue.push(0, request);
        false
    }
}

/// SIEVE (Zhang et al., NSDI 2024): a hand walks from the oldest key to the newest and evicts the
/// first that was not hit since the last walk. The keys that it passes over stay in their places.
pub(crate) struct Sieve {
    queue: Queues<1>,
    capacity: u64,
    was_hit: Vec<bool>,
    hand: Option<u32>,
}

impl Sieve {
    pub(crate) fn new(keys: u32, capacity: u64) -> Self {
        let was_hit = vec![false; keys as usize];
        Self { queue: Queues::new(keys), capacity, was_hit, hand: None }
    }

    fn evict(&mut self) {
        let mut hand = self.hand.or(self.queue.oldest(0));
        while let Some(key) = hand {
            if !std::mem::take(&mut self.was_hit[key as usize]) {
                self.hand = self.queue.newer(key);
                self.queue.remove(key);
                return;
            }
            hand = self.queue.newer(key).or(self.queue.oldest(0));
        }
    }
}

impl Policy for Sieve {
    fn request(&mut self, request: Request) -> bool {
        if self.queue.queue_of(request.key).is_some() {
            self.was_hit[request.key as usize] = true;
            return true;
        }
        let bytes = u64::from(request.bytes);
        if bytes <= self.capacity {
            while self.queue.bytes(0) + bytes > self.capacity {
                self.evict();
            }
            self.queue.push(0, request);
        }
        false
    }
}

/// S3-FIFO's queues.
const SMALL: usize = 0;
const MAIN: usize = 1;
/// Keys that were evicted from the small queue: their names without their values.
const GHOST: usize = 2;
/// The share of the small queue.
const SMALL_SHARE: f64 = 0.1;
/// How many hits in the small queue lead to the main queue.
const HITS_TO_MAIN: u8 = 2;
const HITS_MAX: u8 = 3;

/// S3-FIFO (Yang et al., SOSP 2023): a small queue in front of the main one, and ghosts.
pub(crate) struct S3Fifo {
    queues: Queues<3>,
    capacity: u64,
    small: u64,
    hits: Vec<u8>,
}

impl S3Fifo {
    pub(crate) fn new(keys: u32, capacity: u64) -> Self {
        let small = ((capacity as f64 * SMALL_SHARE) as u64).max(1);
        Self { queues: Queues::new(keys), capacity, small, hits: vec![0; keys as usize] }
    }

    fn evict(&mut self) {
        if self.queues.bytes(SMALL) < self.small && self.queues.oldest(MAIN).is_some() {
            self.evict_from_main();
            return;
        }
        while let Some(key) = self.queues.oldest(SMALL) {
            if self.hits[key as usize] >= HITS_TO_MAIN {
                self.hits[key as usize] = 0;
                self.queues.transfer(MAIN, key);
                if self.queues.bytes(MAIN) > self.capacity - self.small {
                    return self.evict_from_main();
                }
            } else {
                self.queues.transfer(GHOST, key);
                while self.queues.bytes(GHOST) > self.capacity - self.small {
                    self.queues.pop(GHOST);
                }
                return;
            }
        }
    }

    fn evict_from_main(&mut self) {
        while let Some(key) = self.queues.oldest(MAIN) {
            if self.hits[key as usize] == 0 {
                return self.queues.remove(key);
            }
            self.hits[key as usize] -= 1;
            self.queues.transfer(MAIN, key);
        }
    }
}

impl Policy for S3Fifo {
    fn request(&mut self, request: Request) -> bool {
        let queue = self.queues.queue_of(request.key);
        let hits = &mut self.hits[request.key as usize];
        if matches!(queue, Some(SMALL | MAIN)) {
            *hits = (*hits + 1).min(HITS_MAX);
            return true;
        }
        *hits = 0;
        let bytes = u64::from(request.bytes);
        if bytes <= self.capacity {
            while self.queues.bytes(SMALL) + self.queues.bytes(MAIN) + bytes > self.capacity {
                self.evict();
            }
            self.queues.push(if queue == Some(GHOST) { MAIN } else { SMALL }, request);
        }
        false
    }
}
