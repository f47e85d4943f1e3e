//! The operations in flight of a worker, and which keys of which connections they concern.
//!
//! Operations in flight are concurrent. So two of one connection on the same key must not be in
//! flight at once: the second one waits. A GET may join an earlier GET of the same connection
//! and key until that one is posted. Both return its value.
//!
//! Operations that read a value and store another one fail if the key changes meanwhile, and start
//! over. Two of a worker on the same key would only disturb each other, so the second one waits,
//! also if it is another connection's.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use farside_resp::Protocol;

use crate::commands::operation::Operation;
use crate::commands::task::Task;
use crate::helper::Origin;

/// The number of locks: a power of two. Two keys may share one, which makes one of them wait.
const LOCKS: usize = 1 << 15;

/// For how long a command starts again that gave up: each time the library has tried for long.
const RETRY_FOR: Duration = Duration::from_secs(1);

/// A command in flight on a lane of the pipeline.
pub(crate) struct Lane {
    pub(crate) origin: Origin,
    pub(crate) protocol: Protocol,
    pub(crate) task: Task,
    pub(crate) operation: Operation,
    /// When it gave up for the first time, because the key changed all the time.
    pub(crate) failing_since: Option<Instant>,
    /// The key in the store.
    pub(crate) key: Vec<u8>,
    lock: LaneLock,
    /// The epoch in which it was started.
    epoch: u64,
    /// Whether it is a GET that others may follow.
    is_get: bool,
    /// The replies of GETs that follow this one.
    pub(crate) followers: Vec<u64>,
}

impl Lane {
    /// The operation with which a command goes on that gave up, if it can: other clients kept
    /// changing the key, and nothing was stored.
    pub(crate) fn next_attempt(&mut self) -> Option<Operation> {
        if self.failing_since.get_or_insert_with(Instant::now).elapsed() >= RETRY_FOR {
            return None;
        }
        match &mut self.task {
            Task::Modify(modify) => Some(modify.start_over()),
            _ => Some(self.operation).filter(|operation| operation.can_repeat()),
        }
    }

    /// Whether its command has one operation.
    #[inline]
    pub(crate) fn is_single(&self) -> bool {
        !matches!(self.task, Task::Modify(_))
    }
}

/// The locks that a lane holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneLock {
    /// For its connection and key.
    own: usize,
    /// For its key alone, if it stores what it derives from the present value.
    exclusive: Option<usize>,
}

/// The kind of an operation, as far as its locks depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockKind {
    /// A GET, with the protocol of its reply.
    Get(Protocol),
    /// It stores what it derives from the present value.
    Exclusive,
    Other,
}

/// All lanes of a pipeline, and the locks of keys.
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    /// For each connection and key the number of the lane that holds it, plus one; 0 if it is free.
    locks: Vec<u16>,
    /// Whether an operation holds the key for all connections.
    exclusive_locks: Vec<bool>,
    hasher: RandomState,
    seed: u64,
    /// Rises before operations are posted.
    epoch: u64,
}

/// Whether an operation on a key may start.
pub(crate) enum Access {
    /// It may, with these locks.
    Free(LaneLock),
    /// It has the reply of this lane.
    Follows(usize),
    /// It has to wait for an operation of its connection.
    Held,
    /// It has to wait for this lock of its key.
    HeldByOther(usize),
}

impl Lanes {
    pub(crate) fn new() -> Self {
        let hasher = RandomState::new();
        let seed = hasher.hash_one(0);
        let exclusive_locks = vec![false; LOCKS];
        Self { lanes: Vec::new(), locks: vec![0; LOCKS], exclusive_locks, hasher, seed, epoch: 0 }
    }

    /// Ends the epoch: no later GET joins an operation that was started before this call.
    pub(crate) fn next_epoch(&mut self) {
        self.epoch += 1;
    }

    /// A hash of a key, for all connections.
    pub(crate) fn key_hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash_one(key)
    }

    #[inline]
    fn lock_of(&self, connection: u64, key: &[u8]) -> usize {
        let mut hash = self.seed ^ connection.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mix = |hash: u64, word: u64| {
            let product = u128::from(hash ^ word) * 0x2d35_8dcc_aa6c_78a5_u128;
            (product as u64) ^ (product >> 64) as u64
        };
        let (words, rest) = key.as_chunks::<8>();
        for word in words {
            hash = mix(hash, u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        hash = mix(hash, u64::from_le_bytes(last) ^ (key.len() as u64) << 56);
        hash as usize % LOCKS
    }

    /// Whether an operation holds this lock of a key.
    pub(crate) fn is_held(&self, exclusive: usize) -> bool {
        self.exclusive_locks[exclusive]
    }

    /// Whether an operation of this connection on this key may start.
    #[inline]
    pub(crate) fn access(&self, connection: u64, key: &[u8], kind: LockKind) -> Access {
        let own = self.lock_of(connection, key);
        let Some(holder) = usize::from(self.locks[own]).checked_sub(1) else {
            if kind != LockKind::Exclusive {
                return Access::Free(LaneLock { own, exclusive: None });
            }
            // No connection has this number.
            let exclusive = self.lock_of(0, key);
            if self.is_held(exclusive) {
                return Access::HeldByOther(exclusive);
            }
            return Access::Free(LaneLock { own, exclusive: Some(exclusive) });
        };
        let lane = &self.lanes[holder];
        let is_same = lane.origin.id == connection && lane.key == key;
        let is_get = kind == LockKind::Get(lane.protocol);
        if is_get && lane.is_get && lane.epoch == self.epoch && is_same {
            return Access::Follows(holder);
        }
        Access::Held
    }

    /// Fills a lane whose operation was started with these locks.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        number: usize,
        lock: LaneLock,
        origin: Origin,
        protocol: Protocol,
        key: &[u8],
        (operation, task, is_get): (Operation, Task, bool),
    ) {
        while self.lanes.len() <= number {
            self.lanes.push(Lane {
                origin,
                protocol,
                task: Task::Ok,
                operation,
                failing_since: None,
                key: Vec::new(),
                lock,
                epoch: 0,
                is_get: false,
                followers: Vec::new(),
            });
        }
        let epoch = self.epoch;
        let lane = &mut self.lanes[number];
        lane.key.clear();
        lane.key.extend_from_slice(key);
        lane.followers.clear();
        (lane.origin, lane.protocol, lane.task) = (origin, protocol, task);
        (lane.operation, lane.failing_since) = (operation, None);
        (lane.lock, lane.epoch, lane.is_get) = (lock, epoch, is_get);
        self.locks[lock.own] = number as u16 + 1;
        if let Some(exclusive) = lock.exclusive {
            self.exclusive_locks[exclusive] = true;
        }
    }

    pub(crate) fn lane(&mut self, number: usize) -> &mut Lane {
        &mut self.lanes[number]
    }

    /// Moves a command whose next operation has another lane.
    pub(crate) fn relocate(&mut self, from: usize, to: usize, operation: Operation) {
        if from == to {
            self.lanes[from].operation = operation;
            return;
        }
        let lock = self.lanes[from].lock;
        let lane = &mut self.lanes[from];
        let (origin, protocol, failing_since) = (lane.origin, lane.protocol, lane.failing_since);
        let task = std::mem::replace(&mut lane.task, Task::Ok);
        let key = std::mem::take(&mut lane.key);
        self.fill(to, lock, origin, protocol, &key, (operation, task, false));
        self.lanes[to].failing_since = failing_since;
    }

    /// Frees the locks of a lane whose command has completed.
    #[inline]
    pub(crate) fn release(&mut self, number: usize) {
        let lock = self.lanes[number].lock;
        self.locks[lock.own] = 0;
        if let Some(exclusive) = lock.exclusive {
            self.exclusive_locks[exclusive] = false;
        }
    }
}
