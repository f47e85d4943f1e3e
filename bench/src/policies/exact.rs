//! The policies that see every request and keep exact queues: FIFO, LRU, CLOCK, SIEVE and S3-FIFO.

use super::queues::Queues;
use super::{Policy, Request};

/// What a policy of one queue does at a hit, and which key it evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Evicts the oldest key.
    Fifo,
    /// As FIFO, and a hit makes the key the newest.
    Lru,
    /// As FIFO, but a key that was hit becomes the newest instead.
    Clock,
    /// A hand walks from the oldest key to the newest, and evicts the first that was not hit since
    /// the last walk. The keys that it passes over stay in their places.
    Sieve,
}

/// The policies with one queue: FIFO, LRU, CLOCK, and SIEVE (Zhang et al., NSDI 2024).
pub(crate) struct OneQueue {
    order: Order,
    queue: Queues<1>,
    capacity: u64,
    was_hit: Vec<bool>,
    /// The key that SIEVE looks at next.
    hand: Option<u32>,
}

impl OneQueue {
    fn new(order: Order, keys: u32, capacity: u64) -> Self {
        let was_hit = vec![false; keys as usize];
        Self { order, queue: Queues::new(keys), capacity, was_hit, hand: None }
    }

    pub(crate) fn fifo(keys: u32, capacity: u64) -> Self {
        Self::new(Order::Fifo, keys, capacity)
    }

    pub(crate) fn lru(keys: u32, capacity: u64) -> Self {
        Self::new(Order::Lru, keys, capacity)
    }

    pub(crate) fn clock(keys: u32, capacity: u64) -> Self {
        Self::new(Order::Clock, keys, capacity)
    }

    pub(crate) fn sieve(keys: u32, capacity: u64) -> Self {
        Self::new(Order::Sieve, keys, capacity)
    }

    fn note_hit(&mut self, key: u32) {
        match self.order {
            Order::Fifo => {}
            Order::Lru => self.queue.transfer(0, key),
            Order::Clock | Order::Sieve => self.was_hit[key as usize] = true,
        }
    }

    fn evict(&mut self) {
        let mut at = self.hand.or(self.queue.oldest(0));
        while let Some(key) = at {
            if !std::mem::take(&mut self.was_hit[key as usize]) {
                if self.order == Order::Sieve {
                    self.hand = self.queue.newer(key);
                }
                return self.queue.remove(key);
            }
            if self.order == Order::Clock {
                self.queue.transfer(0, key);
                at = self.queue.oldest(0);
            } else {
                at = self.queue.newer(key).or(self.queue.oldest(0));
            }
        }
    }
}

impl Policy for OneQueue {
    fn request(&mut self, request: Request) -> bool {
        if self.queue.queue_of(request.key).is_some() {
            self.note_hit(request.key);
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
