//! W-TinyLFU (Einziger et al., ACM Transactions on Storage 2017): a small LRU window in front of a
//! segmented LRU. A key that leaves the window enters the main part only if it was requested more
//! often than the key that it would replace. The window keeps its share: Caffeine adapts it.

use super::queues::Queues;
use super::{Policy, Request, mix};

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;
/// The window's share of the cache.
const WINDOW_SHARE: f64 = 0.01;
/// The protected segment's share of the main part.
const PROTECTED_SHARE: f64 = 0.8;

/// W-TinyLFU.
pub(crate) struct WTinyLfu {
    queues: Queues<3>,
    window: u64,
    main: u64,
    protected: u64,
    sketch: Sketch,
}

impl WTinyLfu {
    /// `objects` is how many objects fit, about.
    pub(crate) fn new(keys: u32, capacity: u64, objects: usize) -> Self {
        let window = ((capacity as f64 * WINDOW_SHARE) as u64).max(1).min(capacity);
        let main = capacity - window;
        let protected = (main as f64 * PROTECTED_SHARE) as u64;
        Self { queues: Queues::new(keys), window, main, protected, sketch: Sketch::new(objects) }
    }

    fn main_bytes(&self) -> u64 {
        self.queues.bytes(PROBATION) + self.queues.bytes(PROTECTED)
    }

    /// Moves the window's oldest key to the main part, or evicts it.
    fn leave_window(&mut self) {
        let Some(key) = self.queues.oldest(WINDOW) else { return };
        let before = self.queues.bytes(WINDOW);
        self.queues.remove(key);
        let bytes = before - self.queues.bytes(WINDOW);
        while self.main_bytes() + bytes > self.main {
            let queue = if self.queues.oldest(PROBATION).is_some() { PROBATION } else { PROTECTED };
            match self.queues.oldest(queue) {
                Some(victim) if self.sketch.count(key) > self.sketch.count(victim) => {
                    self.queues.remove(victim);
                }
                _ => return,
            }
        }
        self.queues.push(PROBATION, Request { key, bytes: bytes as u32 });
    }
}

impl Policy for WTinyLfu {
    fn request(&mut self, request: Request) -> bool {
        let key = request.key;
        self.sketch.add(key);
        match self.queues.queue_of(key) {
            Some(WINDOW) => self.queues.transfer(WINDOW, key),
            Some(_) => {
                self.queues.transfer(PROTECTED, key);
                while self.queues.bytes(PROTECTED) > self.protected {
                    let Some(oldest) = self.queues.oldest(PROTECTED) else { break };
                    self.queues.transfer(PROBATION, oldest);
                }
            }
            None if u64::from(request.bytes) > self.main.max(self.window) => return false,
            None => {
                self.queues.push(WINDOW, request);
                while self.queues.bytes(WINDOW) > self.window {
                    self.leave_window();
                }
                return false;
            }
        }
        true
    }
}

const ROWS: usize = 4;
/// The largest count, of 4 bits.
const COUNT_MAX: u8 = 15;
/// All counts are halved after this many additions for each object of the cache.
const ADDITIONS_PER_OBJECT: usize = 10;

/// A count-min sketch of recent requests.
struct Sketch {
    counts: Vec<u8>,
    /// A row's length less one; the length is a power of two.
    mask: usize,
    additions: usize,
    additions_max: usize,
}

impl Sketch {
    fn new(objects: usize) -> Self {
        let width = objects.max(16).next_power_of_two();
        let additions_max = objects.max(16) * ADDITIONS_PER_OBJECT;
        Self { counts: vec![0; ROWS * width], mask: width - 1, additions: 0, additions_max }
    }

    fn places(&self, key: u32) -> [usize; ROWS] {
        let hash = mix(key);
        let (first, step) = (hash as u32 as usize, (hash >> 32) as usize | 1);
        std::array::from_fn(|row| {
            row * (self.mask + 1) + (first.wrapping_add(row * step) & self.mask)
        })
    }

    fn count(&self, key: u32) -> u8 {
        self.places(key).into_iter().map(|place| self.counts[place]).min().unwrap_or(0)
    }

    fn add(&mut self, key: u32) {
        for place in self.places(key) {
            self.counts[place] = (self.counts[place] + 1).min(COUNT_MAX);
        }
        self.additions += 1;
        if self.additions >= self.additions_max {
            self.additions /= 2;
            self.counts.iter_mut().for_each(|count| *count /= 2);
        }
    }
}
