//! Belady's optimum: evicts the key whose next request is furthest in the future. It does not store
//! a key that it would evict first. With objects of one size no policy has more hits.

use std::collections::BinaryHeap;

use super::{Policy, Request};

/// The number of a request that never comes.
const NEVER: u32 = u32::MAX;

/// The optimum for one trace, whose requests have to come in order.
pub(crate) struct Belady {
    /// For each request the number of the next one for its key.
    next: Vec<u32>,
    now: usize,
    capacity: u64,
    used: u64,
    /// The next request of each stored key, and its bytes.
    stored: Vec<Option<(u32, u32)>>,
    /// Next requests and keys, the furthest first. An entry counts if `stored` agrees.
    furthest: BinaryHeap<(u32, u32)>,
}

impl Belady {
    pub(crate) fn new(requests: &[Request], keys: u32, capacity: u64) -> Self {
        let mut next = vec![NEVER; requests.len()];
        let mut last = vec![NEVER; keys as usize];
        for (number, request) in requests.iter().enumerate().rev() {
            next[number] = std::mem::replace(&mut last[request.key as usize], number as u32);
        }
        let stored = vec![None; keys as usize];
        Self { next, now: 0, capacity, used: 0, stored, furthest: BinaryHeap::new() }
    }

    /// Evicts keys that are requested after `next`, until there is room. Returns whether there is.
    /// If not, it evicts none.
    fn make_room(&mut self, next: u32, bytes: u64) -> bool {
        let (mut victims, mut freed) = (Vec::new(), 0);
        while self.used + bytes > self.capacity + freed {
            match self.furthest.peek().copied() {
                Some((at, key)) if at > next => {
                    self.furthest.pop();
                    if let Some((expected, bytes)) = self.stored[key as usize]
                        && expected == at
                    {
                        victims.push((at, key));
                        freed += u64::from(bytes);
                    }
                }
                _ => {
                    self.furthest.extend(victims);
                    return false;
                }
            }
        }
        victims.iter().for_each(|(_, key)| self.stored[*key as usize] = None);
        self.used -= freed;
        true
    }
}

impl Policy for Belady {
    fn request(&mut self, Request { key, bytes }: Request) -> bool {
        let next = self.next[self.now];
        self.now += 1;
        let is_hit = self.stored[key as usize].is_some();
        if is_hit || (next != NEVER && self.make_room(next, bytes.into())) {
            if !is_hit {
                self.used += u64::from(bytes);
            }
            self.stored[key as usize] = Some((next, bytes));
            self.furthest.push((next, key));
        }
        is_hit
    }
}
