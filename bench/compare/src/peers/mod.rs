//! What others published, on Farside's fabrics: for each store a driver of its sequence of verbs,
//! written from the published description. None of it is their code, and what a file leaves out it
//! says. They work in blocks that a kv-server gave out as free ones ([`memory`]), so that they
//! share its memory region and the way there.
//!
//! A driver is for one client: several would need the parts that are left out. Their caches of
//! locations have no bound.

pub mod fusee;
pub mod index;
pub mod lanes;
pub mod memory;
pub mod race;
pub mod reach;
pub mod swarm;
pub mod table;

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use farside_bench::keys::Key;
use farside_bench::store::Action;
use farside_fabric::{ChainError, Endpoint, Fabric, LaneId};

/// Why an operation of a peer fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// A verb failed.
    #[error("a verb failed: {0}")]
    Chain(#[from] ChainError),
    /// No free piece, or no slot.
    #[error("its memory is full, and it does not grow: leave out the workload that inserts, d")]
    OutOfMemory,
    /// Other operations kept changing the slot.
    #[error("gave up after {0} attempts, because other operations kept changing the same slot")]
    Contended(usize),
    /// What the description does not have.
    #[error("it has no such operation")]
    Unsupported,
}

/// The result of a peer's operation.
pub type Result<T> = std::result::Result<T, PeerError>;

/// How often an operation begins again before it fails.
const ATTEMPTS_MAX: usize = 1000;

/// What a peer is to hold.
#[derive(Clone, Copy, Debug)]
pub struct PeerDemand {
    /// How many records at most.
    pub records: u64,
    /// The length of each value, in bytes.
    pub value_bytes: usize,
    /// How many operations are in flight at most.
    pub depth: u16,
}

/// More pieces than records: those in use by operations, and those that rest.
const SPARE_PIECES: u64 = 1 << 14;

impl PeerDemand {
    /// So many pieces of memory, if each record has one and every change takes another.
    fn pieces(&self) -> u64 {
        self.records + SPARE_PIECES + u64::from(self.depth)
    }
}

/// A published store, over any fabric.
pub trait Peer {
    /// The fabric it is on.
    type Fabric: Fabric;
    /// How many lanes of the fabric an operation takes. The second of operation n is n + depth.
    const LANES: u16 = 1;

    /// What its verbs go through.
    fn endpoint(&self) -> &Endpoint<Self::Fabric>;

    /// Puts the key's value into the buffer; whether the key is there.
    fn get(
        &self,
        lane: LaneId,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> impl Future<Output = Result<bool>>;

    /// Stores a value: for an INSERT only if the key is absent. Whether it did.
    fn store(
        &self,
        lane: LaneId,
        key: &Key,
        value: &[u8],
        is_insert: bool,
    ) -> impl Future<Output = Result<bool>>;

    /// Removes the key; whether it was there.
    fn delete(&self, lane: LaneId, key: &Key) -> impl Future<Output = Result<bool>>;

    /// One operation, on a lane of its own. Whether the key was as required; a GET puts the value
    /// into the buffer, others take it from there.
    fn perform(
        &self,
        lane: LaneId,
        action: Action,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> impl Future<Output = Result<bool>> {
        async move {
            match action {
                Action::Get => self.get(lane, key, value).await,
                Action::Put => self.store(lane, key, value, false).await,
                Action::Insert => self.store(lane, key, value, true).await,
                Action::Delete => self.delete(lane, key).await,
            }
        }
    }

    /// Waits for what operations left in flight when they ended.
    fn settle(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Whether nothing is in flight that operations left when they ended.
    fn is_alone(&self) -> bool {
        true
    }
}

/// What a client remembers, by the hash of a key; or a client that remembers nothing.
struct Cache<T> {
    known: RefCell<HashMap<u64, T, BuildHasherDefault<Hashed>>>,
    is_used: bool,
}

impl<T: Copy> Cache<T> {
    fn new(is_used: bool) -> Self {
        Self { known: RefCell::default(), is_used }
    }

    #[inline]
    fn get(&self, tag: u64) -> Option<T> {
        self.known.borrow().get(&tag).copied()
    }

    #[inline]
    fn insert(&self, tag: u64, value: T) {
        if self.is_used {
            self.known.borrow_mut().insert(tag, value);
        }
    }

    fn remove(&self, tag: u64) {
        self.known.borrow_mut().remove(&tag);
    }
}

/// The key is a hash already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    #[inline]
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests;
