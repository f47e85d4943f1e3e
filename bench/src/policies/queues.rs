//! Queues of keys, as linked lists in arrays with an entry for each key of the trace. A key is in
//! at most one of the queues.

use super::Request;

/// No key.
const NONE: u32 = u32::MAX;
/// [`Queues::queue`] of a key that is in none.
const ABSENT: u8 = u8::MAX;

/// `Q` queues.
pub(crate) struct Queues<const Q: usize> {
    newer: Vec<u32>,
    older: Vec<u32>,
    queue: Vec<u8>,
    bytes_of: Vec<u32>,
    newest: [u32; Q],
    oldest: [u32; Q],
    bytes: [u64; Q],
}

impl<const Q: usize> Queues<Q> {
    pub(crate) fn new(keys: u32) -> Self {
        let keys = keys as usize;
        Self {
            newer: vec![NONE; keys],
            older: vec![NONE; keys],
            queue: vec![ABSENT; keys],
            bytes_of: vec![0; keys],
            newest: [NONE; Q],
            oldest: [NONE; Q],
            bytes: [0; Q],
        }
    }

    /// The queue that the key is in.
    pub(crate) fn queue_of(&self, key: u32) -> Option<usize> {
        let queue = self.queue[key as usize];
        (queue != ABSENT).then_some(queue as usize)
    }

    /// The bytes of a queue's keys.
    pub(crate) fn bytes(&self, queue: usize) -> u64 {
        self.bytes[queue]
    }

    /// Makes the key the newest of the queue. It leaves the queue that it was in.
    pub(crate) fn push(&mut self, queue: usize, Request { key, bytes }: Request) {
        self.remove(key);
        let at = key as usize;
        self.queue[at] = queue as u8;
        self.bytes_of[at] = bytes;
        self.bytes[queue] += u64::from(bytes);
        let former = std::mem::replace(&mut self.newest[queue], key);
        self.older[at] = former;
        match former {
            NONE => self.oldest[queue] = key,
            former => self.newer[former as usize] = key,
        }
    }

    /// Moves the key to the newest end of a queue.
    pub(crate) fn transfer(&mut self, queue: usize, key: u32) {
        self.push(queue, Request { key, bytes: self.bytes_of[key as usize] });
    }

    /// Takes the key out of its queue, if it is in one.
    pub(crate) fn remove(&mut self, key: u32) {
        let Some(queue) = self.queue_of(key) else { return };
        let at = key as usize;
        let newer = std::mem::replace(&mut self.newer[at], NONE);
        let older = std::mem::replace(&mut self.older[at], NONE);
        match newer {
            NONE => self.newest[queue] = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest[queue] = newer,
            older => self.newer[older as usize] = newer,
        }
        self.queue[at] = ABSENT;
        self.bytes[queue] -= u64::from(self.bytes_of[at]);
    }

    /// The oldest key of the queue.
    pub(crate) fn oldest(&self, queue: usize) -> Option<u32> {
        some(self.oldest[queue])
    }

    /// The key that is next to this one in its queue, on the newer side.
    pub(crate) fn newer(&self, key: u32) -> Option<u32> {
        some(self.newer[key as usize])
    }

    /// Removes the oldest key of the queue.
    pub(crate) fn pop(&mut self, queue: usize) -> Option<u32> {
        let key = self.oldest(queue)?;
        self.remove(key);
        Some(key)
    }
}

fn some(key: u32) -> Option<u32> {
    (key != NONE).then_some(key)
}
