//! How a session reaches regions: the verbs, the trait that executes them, and its implementors.
//!
//! A [`Fabric`] belongs to one session and reaches several regions of one kind: all in mappings of
//! this host, or all behind one RDMA device. A chain names its region by a [`RegionIndex`]. What a
//! session has once is shared by all regions: the lanes with their buffers, the clock, the sleep.
//!
//! The protocol is written once over [`Fabric`], as async functions that run on an [`Endpoint`];
//! every `.await` in it is a round trip.

#![deny(unsafe_code)]

mod any;
mod channel;
mod clock;
mod counters;
mod endpoint;
mod flight;
mod intercept;
pub mod rdma;
pub mod shm;
#[cfg(feature = "verbs")]
#[allow(unsafe_code, reason = "the C libraries of RDMA")]
pub mod verbs;
pub mod waiting;
mod waits;

pub use any::AnyFabric;
pub use channel::{ControlChannel, MESSAGE_BYTES_MAX, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Role};
pub use clock::boot_time_ns;
pub use counters::Counters;
pub use endpoint::{Endpoint, InFlight};
pub use flight::Flight;
pub use intercept::{Intercept, Intercepted, Interceptor};

/// Nanoseconds of a monotonic clock that goes on while the machine is suspended.
pub type Nanos = u64;

/// The longest chain, in verbs.
pub const CHAIN_VERBS_MAX: usize = 4;

/// One operation in flight, with scratch memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub u16);

/// The number of a region among those that a fabric reaches, in the order in which they were added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub u16);

impl RegionIndex {
    /// The region that every fabric begins with.
    pub const FIRST: Self = Self(0);

    /// The index into a fabric's array with an element for each region.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The scratch buffers of a lane: where READs land and WRITEs come from. Registered memory on
/// verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// A window of the index.
    Window = 0,
    /// The image of the block the operation writes.
    NewBlock = 1,
    /// The block the operation reads.
    ReadBlock = 2,
}

impl Buffer {
    /// How many buffers a lane has.
    pub const COUNT: usize = 3;
}

/// One access to a region. Remote offsets are bytes from the region's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Copies `bytes` (a multiple of 8) at `remote` (likewise) to the start of a buffer.
    Read {
        /// From where in the region.
        remote: u64,
        /// To which buffer of the lane.
        into: Buffer,
        /// How much.
        bytes: u32,
    },
    /// Copies `bytes` (a multiple of 8) from the start of a buffer to `remote` (likewise).
    Write {
        /// To where in the region.
        remote: u64,
        /// From which buffer of the lane.
        from: Buffer,
        /// How much.
        bytes: u32,
    },
    /// Writes these four bytes at `remote`, a multiple of 4.
    WriteU32 {
        /// To where in the region.
        remote: u64,
        /// What, stored little-endian.
        value: u32,
    },
    /// Writes these eight bytes at `remote`, a multiple of 8.
    WriteWord {
        /// To where in the region.
        remote: u64,
        /// What, stored little-endian.
        value: u64,
    },
    /// Replaces the word at `remote`, a multiple of 8, if it is `expected`. The chain's result is
    /// the word that its last atomic verb found.
    CompareSwap {
        /// Where in the region.
        remote: u64,
        /// What has to be there.
        expected: u64,
        /// What takes its place.
        desired: u64,
    },
}

/// What became of a lane's chain or wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub lane: LaneId,
    /// The word its last atomic verb found (0 for a chain without), or why it ended early.
    pub result: Result<u64, ChainError>,
}

/// Why a chain did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// A verb reaches outside the region or is not aligned: the bytes that led there are damaged.
    /// Neither it nor what follows in the chain was executed.
    #[error("an access of {bytes} bytes at offset {remote:#x} lies outside the region")]
    Outside {
        /// Where the access started, in bytes from the region's start.
        remote: u64,
        /// Its length.
        bytes: u64,
    },
    /// This connection may not change the region. Nothing of the chain was executed.
    #[error("this connection may only read")]
    Denied,
    /// The server gave this client up: its lease is gone. Neither the verb that found out nor what
    /// follows it was executed.
    #[error("the server no longer accepts this connection")]
    Fenced,
    /// The deadline passed. Neither the last atomic verb nor what follows it was executed; what
    /// stands before it may have been, a WRITE in part.
    #[error("the chain was late")]
    Late,
    /// The connection broke while the chain was under way: each of its verbs took effect, or will
    /// never do so. Only chains that change the region end so: a READ that is lost is as
    /// good as one that was never sent ([`ChainError::Fenced`]).
    #[error("the connection broke while the chain was on its way: it may or may not have happened")]
    Unknown,
    /// The lane has a chain in flight already, which goes on and completes on its own. Nothing of
    /// this one was executed.
    #[error("the lane has a chain in flight already")]
    Busy,
    /// The system did not let the buffer be registered with the RDMA device. Nothing of the chain
    /// was executed.
    #[error(
        "the system lets no {bytes} bytes be registered for RDMA: raise the limit of pinned \
         memory (ulimit -l, LimitMEMLOCK)"
    )]
    Unregistered {
        /// What the verb needs, in bytes.
        bytes: u64,
    },
}

/// What an implementor promises about time; the constants of `docs/protocol.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// No chain takes less than this from post to completion, whatever the hardware.
    pub round_trip_min_ns: Nanos,
    /// How long after its post a chain without a tighter deadline can still take effect.
    pub lateness_max_ns: Nanos,
}

/// Executes chains of verbs on the regions of one session.
///
/// # The contract
/// 1. The only atom is an aligned 8-byte word. A longer READ may see any mixture of concurrent
///    WRITEs, word by word, in any order; so may a longer WRITE be seen.
/// 2. The verbs of a chain execute in order at the region, except that a WRITE may execute before
///    a READ or an atomic verb that stands before it: no chain puts one there. Other sessions'
///    verbs may come between any two.
/// 3. A chain is not conditional: an atomic verb that finds another word does not stop it. A verb
///    that fails does.
/// 4. Atomic verbs are atomic among all sessions of a region, and with nothing else: a region has
///    one executor, and the server's CPU never writes a word that clients compare-and-swap
///    (invariant I11).
/// 5. A completion that reports success means that every verb of the chain took effect; one
///    completion a chain. A WRITE and an atomic verb take effect before the chain's
///    deadline or not at all (a long WRITE possibly in part), within what
///    [`Timing::lateness_max_ns`] and the implementor's documentation allow.
///
/// A chain has at most [`CHAIN_VERBS_MAX`] verbs, and a lane at most one chain or wait at a time,
/// whatever the region. Chains for different regions are in no order with each other. A region that
/// is lost fails its own chains only. Implementors allocate nothing per chain.
pub trait Fabric {
    /// What the implementor promises about time at this region.
    fn timing(&self, region: RegionIndex) -> Timing;

    /// The time, on the clock that deadlines are given in.
    fn now(&self) -> Nanos;

    /// The wall clock, nanoseconds since 1970: what values end by.
    fn wall_clock_ns(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.unwrap_or_default().as_nanos() as u64
    }

    /// Prefetches memory that a chain posted soon will access, where the fabric can.
    fn prefetch(&self, _region: RegionIndex, _remote: u64, _bytes: u32) {}

    /// Queues a chain for a region. Its outcome comes from [`Fabric::poll`], errors included.
    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos);

    /// Whether a chain posted next for this region goes with the next doorbell and does not queue
    /// for long. `_under_way_bytes` is about how much the operations under way will have in flight.
    /// Without room, what is posted waits and grows old: a pipeline starts nothing more until
    /// something completed.
    fn has_room(&self, _region: RegionIndex, _under_way_bytes: u64) -> bool {
        true
    }

    /// Operations believe what they READ from this region for this long: chains may queue for a
    /// part of it.
    fn set_patience(&mut self, _region: RegionIndex, _patience: Nanos) {}

    /// Queues a wait: the lane completes once the clock reads `until`.
    fn wait(&mut self, lane: LaneId, until: Nanos);

    /// Rings for everything queued: one doorbell for each region.
    fn ring(&mut self);

    /// The next lane that completed, if any.
    fn poll(&mut self) -> Option<Completion>;

    /// Called when [`Fabric::poll`] found nothing: spins or sleeps a little.
    fn relax(&mut self);

    /// What the buffer holds.
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8];

    /// The buffer, to be filled before a WRITE is posted.
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8];

    /// Makes the buffer at least this long; keeps its content. Grows by doubling, so that a steady
    /// workload stops allocating. False where the device may not have that much: then verbs that
    /// need it fail with [`ChainError::Unregistered`]. False, too, and nothing grows, while a
    /// device may have the lane's buffers.
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool;

    /// Executes one chain, when no other lane has anything in flight, and waits for its end.
    #[inline]
    fn run(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        self.post(lane, region, chain, deadline);
        self.ring();
        loop {
            match self.poll() {
                Some(completion) if completion.lane == lane => return completion.result,
                // The completion of a chain whose future was dropped.
                Some(_) => {}
                None => self.relax(),
            }
        }
    }

    /// What all lanes did so far.
    fn counters(&self) -> Counters;

    /// What this lane did so far, without doorbells.
    fn lane_counters(&self, lane: LaneId) -> &Counters;
}
