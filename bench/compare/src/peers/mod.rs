//! Drivers of published stores on Farside's fabrics. Each driver issues the sequence of verbs of
//! its store. It is written from the published description, not from the store's code, and its file
//! says what it leaves out. The drivers work in free blocks of a kv-server ([`memory`]), so that
//! they use the same memory region and the same fabric as Farside.
//!
//! A driver supports one client: several would need the parts that are left out. Its cache of
//! locations has no bound.

pub mod endpoint;
pub mod fusee;
pub mod index;
pub mod lanes;
pub mod memory;
pub mod race;
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
    /// There is no free piece of memory, or no free slot.
    #[error("its memory is full, and it does not grow: leave out workload d, which inserts")]
    OutOfMemory,
    /// Other operations kept changing the slot.
    #[error("gave up after {0} attempts, because other operations kept changing the same slot")]
    Contended(usize),
}

/// The result of a peer's operation.
pub type Result<T> = std::result::Result<T, PeerError>;

/// Limit on the attempts of an operation. After the last one it fails.
const ATTEMPTS_MAX: usize = 1000;

/// The capacity that a peer needs.
#[derive(Clone, Copy, Debug)]
pub struct PeerDemand {
    /// Limit on the number of records.
    pub records: u64,
    /// The length of each value, in bytes.
    pub value_bytes: usize,
    /// Limit on the operations in flight.
    pub depth: u16,
}

/// The number of pieces that belong to no record: operations use them, or they rest before
/// reuse.
const SPARE_PIECES: u64 = 1 << 14;

impl PeerDemand {
    /// The number of pieces of memory: each record has one, and every change takes another.
    fn pieces(&self) -> u64 {
        self.records + SPARE_PIECES + u64::from(self.depth)
    }
}

/// A published store, over any fabric.
pub trait Peer {
    /// The fabric that executes the store's verbs.
    type Fabric: Fabric;
    /// How many lanes of the fabric an operation uses. The second lane of operation n is n + depth.
    const LANES: u16 = 1;

    /// The endpoint that its verbs go through.
    fn endpoint(&self) -> &Endpoint<Self::Fabric>;

    /// Puts the key's value into the buffer. Returns whether the key is there.
    fn get(
        &self,
        lane: LaneId,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> impl Future<Output = Result<bool>>;

    /// Stores a value; for an INSERT only if the key is absent. Returns whether it stored the
    /// value.
    fn store(
        &self,
        lane: LaneId,
        key: &Key,
        value: &[u8],
        is_insert: bool,
    ) -> impl Future<Output = Result<bool>>;

    /// Performs one operation, on a lane of its own. Returns whether the key was as required. A GET
    /// puts the value into the buffer. A change takes the value from the buffer.
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
            }
        }
    }

    /// Waits for the chains that ended operations left in flight.
    fn wait_for_chains(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Whether ended operations left no chain in flight.
    fn has_no_chain_in_flight(&self) -> bool {
        true
    }
}

/// A client's cache of facts about keys, by their hash. Always empty if the cache is not used.
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

/// A hasher for keys that are hashes already.
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
