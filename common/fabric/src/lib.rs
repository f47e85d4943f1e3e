//! The verbs, the trait [`Fabric`] that executes them on regions, and its implementors.
//!
//! A fabric belongs to one session and reaches one or more regions: all in mappings of this host,
//! or all through one RDMA device. A chain names its region by a [`RegionIndex`]. All regions share
//! the session's lanes with their buffers, its clock and its sleep.
//!
//! The protocol is written once over [`Fabric`], as async functions that run on an [`Endpoint`].
//! Every `.await` in it is a round trip.

#![deny(unsafe_code)]

use std::sync::Arc;

mod any;
mod channel;
mod clock;
mod counters;
mod endpoint;
mod flight;
mod intercept;
pub mod interrupt;
mod lane_state;
#[allow(unsafe_code, reason = "memory of the caller, for the length of a call")]
mod lent;
pub mod memory;
pub mod rdma;
#[allow(unsafe_code, reason = "memory that RDMA devices access")]
mod registered;
pub mod resources;
pub mod shm;
pub mod tcp;
mod trust;
pub mod trusted_path;
#[cfg(feature = "verbs")]
#[allow(unsafe_code, reason = "the C libraries of RDMA")]
pub mod verbs;
pub mod wait_timer;
mod wakeup;

pub use any::AnyFabric;
pub use channel::{ControlChannel, MESSAGE_BYTES_MAX, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Role};
pub use clock::boot_time_ns;
pub use counters::Counters;
pub use endpoint::{Endpoint, InFlight, Loan};
pub use flight::Flight;
pub use intercept::{Intercept, Intercepted, Interceptor};
use lent::sum_after;
pub use lent::{Lent, LentMemory};
pub use registered::RegisteredBuffer;
pub use trust::Trust;
pub use wakeup::Wakeup;

/// Nanoseconds of a monotonic clock that runs on while the machine is suspended.
pub type Nanos = u64;

/// The longest chain, in verbs.
pub const CHAIN_VERBS_MAX: usize = 4;

/// The number of a lane: one operation in flight, with buffers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub u16);

/// The number of a region among those of a fabric, in the order in which they were added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub u16);

impl RegionIndex {
    /// The region that every fabric begins with.
    pub const FIRST: Self = Self(0);

    /// The index into an array with an element for each region.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A lane's buffers: targets of READs and sources of WRITEs. Over verbs they are registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// A window of the index.
    Window = 0,
    /// The block that the operation writes.
    NewBlock = 1,
    /// The block that the operation reads.
    ReadBlock = 2,
    /// The memory that the caller of a synchronous call lends to the lane ([`Fabric::lend`]). Only
    /// `ReadPart` and `WritePart` can name it.
    Lent = 3,
}

impl Buffer {
    /// The number of buffers that a lane has of its own.
    pub const COUNT: usize = 3;
}

/// An access to a region. `remote` is an offset in bytes from the region's start, and a multiple
/// of 8, except in `WriteU32`. Values are stored little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each verb's text names its fields")]
pub enum Verb {
    /// Copies `bytes`, a multiple of 8, from `remote` to the start of the buffer `into`.
    Read { remote: u64, into: Buffer, bytes: u32 },
    /// Copies `bytes`, a multiple of 8, from the start of the buffer `from` to `remote`.
    Write { remote: u64, from: Buffer, bytes: u32 },
    /// As `Read`, to the offset `at` of the buffer, a multiple of 8. The buffer has to be long
    /// enough.
    ReadPart { remote: u64, into: Buffer, at: u32, bytes: u32 },
    /// As `Write`, from the offset `at` of the buffer, which has to be long enough.
    WritePart { remote: u64, from: Buffer, at: u32, bytes: u32 },
    /// As `Read`, only as the first verb of a chain. The first `head_bytes`, a multiple of 8, go to
    /// the start of the buffer, the next ones to the lane's lent memory, as many as it has, and the
    /// others to the buffer, behind the head. [`Fabric::part_sum`] completes the lent memory.
    ReadSplit { remote: u64, into: Buffer, head_bytes: u32, bytes: u32 },
    /// As `Write`, only as the first verb of a chain: of the first `head_bytes` of the buffer, a
    /// multiple of 8, all of the lane's lent memory, and zeros to the end of the last word. On
    /// shared memory the head comes last (invariant I9).
    WriteSplit { remote: u64, from: Buffer, head_bytes: u32, bytes: u32 },
    /// Writes the four bytes of `value` at `remote`, a multiple of 4, and none beside them
    /// (invariant I9).
    WriteU32 { remote: u64, value: u32 },
    /// Writes the eight bytes of `value` at `remote`.
    WriteWord { remote: u64, value: u64 },
    /// Replaces the word at `remote` by `desired` if it is `expected`. The chain's result is the
    /// word that its last atomic verb found.
    CompareSwap { remote: u64, expected: u64, desired: u64 },
}

impl Verb {
    /// Whether the verb changes the region, and so must not be executed late (invariants I4, I13).
    #[inline]
    pub fn changes_region(self) -> bool {
        !matches!(self, Self::Read { .. } | Self::ReadPart { .. } | Self::ReadSplit { .. })
    }

    /// Whether the verb uses [`Buffer::Lent`].
    pub(crate) fn uses_lent(self) -> bool {
        match self {
            Self::ReadPart { into: buffer, .. } | Self::WritePart { from: buffer, .. } => {
                buffer == Buffer::Lent
            }
            Self::ReadSplit { .. } | Self::WriteSplit { .. } => true,
            _ => false,
        }
    }

    /// Whether the verb returns the word that it found.
    #[inline]
    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. })
    }
}

/// A report that a lane's chain or wait has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The lane.
    pub lane: LaneId,
    /// The word that the last atomic verb found, or 0 without one; or why the chain failed.
    pub result: Result<u64, ChainError>,
}

/// Why a chain was not executed to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// A verb would access bytes outside the region or is not aligned, because the offset came from
    /// damaged bytes. Neither this verb nor a later one of the chain was executed.
    #[error("an access of {bytes} bytes at offset {remote:#x} lies outside the region")]
    Outside {
        /// The offset of the access, in bytes from the region's start.
        remote: u64,
        /// Its length.
        bytes: u64,
    },
    /// This connection may not change the region. No verb of the chain was executed.
    #[error("this connection may only read")]
    Denied,
    /// The server has fenced this client. Neither the verb that the fence stopped nor a later one
    /// of the chain was executed.
    #[error("the server no longer accepts this connection")]
    Fenced,
    /// The deadline passed. Neither the last atomic verb nor a later verb was executed. Verbs
    /// before it may have been, a WRITE in part.
    #[error("the chain was not executed, because its deadline passed")]
    Late,
    /// The connection broke while the chain was in flight. Each verb has taken effect or never
    /// will. Only chains that change the region fail with this error: without its result, a READ is
    /// as good as not executed ([`ChainError::Fenced`]).
    #[error(
        "the connection broke while the chain was in flight: it may or may not have taken effect"
    )]
    Unknown,
    /// The lane already has a chain in flight, which continues and completes as usual. No verb of
    /// the second chain was executed.
    #[error("the lane has a chain in flight already")]
    Busy,
    /// The system did not allow the buffer to be registered with the RDMA device. No verb of the
    /// chain was executed.
    #[error(
        "the system does not allow {bytes} bytes to be registered for RDMA: raise the limit of \
         pinned memory (ulimit -l, LimitMEMLOCK)"
    )]
    Unregistered {
        /// The length of the verb's buffer.
        bytes: u64,
    },
}

/// The times that an implementor guarantees: constants of `docs/protocol.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// No chain takes less time from post to completion, on any hardware.
    pub round_trip_min_ns: Nanos,
    /// No chain takes effect later than this time after its post, even without a deadline.
    pub lateness_max_ns: Nanos,
}

/// The shortest round trip of a chain that a network stack in software carries: over TCP, and by an
/// RDMA device in software. It is one constant, because a server may serve clients over both, and
/// those over RDMA are not told.
///
/// Over TCP a chain takes four system calls, two of which pass a packet through the network stack.
/// A device in software passes each packet through it, and through threads or interrupts of the
/// kernel, on both sides: four passes of at least a microsecond. The fastest measured, soft-RoCE
/// without emulation, take at least 8,000 ns.
pub(crate) const SOFTWARE_ROUND_TRIP_MIN_NS: u32 = 4_000;

/// Rings the doorbell, and waits for the end of the chain that the lane has posted. No other lane
/// has one in flight.
#[inline]
pub(crate) fn wait_for<F: Fabric + ?Sized>(
    fabric: &mut F,
    lane: LaneId,
) -> Result<u64, ChainError> {
    fabric.ring();
    loop {
        match fabric.poll() {
            Some(completion) if completion.lane == lane => return completion.result,
            // The completion of a chain whose future was dropped.
            Some(_) => {}
            None => fabric.relax(),
        }
    }
}

/// Executes chains of verbs on the regions of one session.
///
/// # The contract
/// 1. Only an aligned 8-byte word is read or written atomically. A longer READ may see any mixture
///    of concurrent WRITEs, word by word, in any order. So may other READs see a longer WRITE.
/// 2. The verbs of a chain execute in order at the region, except that a WRITE may execute before
///    an earlier READ or atomic verb. No chain of the protocol has one in this position. Verbs of
///    other sessions may come between any two.
/// 3. A chain is not conditional: an atomic verb that finds another word does not stop it. A verb
///    that fails does.
/// 4. Atomic verbs are atomic among all sessions of a region, and with nothing else: those of a
///    region have one executor, and the server's CPU never writes a word that clients
///    compare-and-swap (invariant I11).
/// 5. A chain has one completion. If it reports success, every verb of the chain took effect. A
///    WRITE and an atomic verb take effect before the chain's deadline or not at all (a long WRITE
///    possibly in part), within what [`Timing::lateness_max_ns`] and the implementor's
///    documentation allow.
///
/// A chain has at most [`CHAIN_VERBS_MAX`] verbs. A lane has at most one chain or wait at a time,
/// among all regions. Chains for different regions are not ordered. The loss of a region fails its
/// own chains only. Implementors allocate nothing per chain.
pub trait Fabric {
    /// The times that hold for this region.
    fn timing(&self, region: RegionIndex) -> Timing;

    /// The time, by the clock of the deadlines.
    fn now(&self) -> Nanos;

    /// The time by the wall clock, in nanoseconds since 1970. Values expire by this time.
    fn wall_clock_ns(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.unwrap_or_default().as_nanos() as u64
    }

    /// Prefetches memory that a chain posted soon will access, if the fabric can.
    fn prefetch(&self, _region: RegionIndex, _remote: u64, _bytes: u32) {}

    /// Queues a chain for a region. [`Fabric::poll`] returns its result, also if it is an error.
    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos);

    /// As [`Fabric::post`], for a chain of one READ without a deadline.
    #[inline]
    fn post_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) {
        self.post(lane, region, &[Verb::Read { remote, into, bytes }], Nanos::MAX);
    }

    /// Whether the chain that is posted next for this region goes with the next doorbell and does
    /// not queue for long. `_under_way_bytes` estimates how much the operations in progress will
    /// have in flight. Without room, posted chains wait, and what they rely on grows old. So a
    /// pipeline then starts no operation until one has completed.
    fn has_room(&self, _region: RegionIndex, _under_way_bytes: u64) -> bool {
        true
    }

    /// Sets how long operations rely on content that they READ from this region. Chains may queue
    /// for a part of this time.
    fn set_patience(&mut self, _region: RegionIndex, _patience: Nanos) {}

    /// Queues a wait: the lane completes once the clock reads `until`.
    fn wait(&mut self, lane: LaneId, until: Nanos);

    /// Rings for all queued chains: one doorbell for each region.
    fn ring(&mut self);

    /// The next completion, if there is one.
    fn poll(&mut self) -> Option<Completion>;

    /// Spins or sleeps for a moment, after [`Fabric::poll`] returned `None`.
    fn relax(&mut self);

    /// Makes a signal of `_wakeup` end the sleep of [`Fabric::relax`], if the fabric can. Otherwise
    /// the sleep is short.
    fn set_wakeup(&mut self, _wakeup: Arc<Wakeup>) {}

    /// The content of the buffer.
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8];

    /// The buffer, to be filled before a WRITE is posted.
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8];

    /// Makes the buffer at least `bytes` long, and preserves its content. The buffer grows by
    /// doubling, so that a steady workload stops allocating. Returns false if the system does not
    /// allow so much registered memory: then verbs that need it fail with
    /// [`ChainError::Unregistered`]. Also returns false, and leaves the buffer as it is, while a
    /// device may access the lane's buffers.
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool;

    /// Executes one chain and waits for its end, while no other lane has a chain in flight.
    #[inline]
    fn run(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        self.post(lane, region, chain, deadline);
        wait_for(self, lane)
    }

    /// As [`Fabric::run`], for a single READ without a deadline.
    #[inline]
    fn run_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> Result<(), ChainError> {
        self.run(lane, region, &[Verb::Read { remote, into, bytes }], Nanos::MAX).map(drop)
    }

    /// Lends memory of the caller to a lane: the [`Buffer::Lent`] of its chains. Takes back what
    /// was lent to the lane before, which neither the fabric nor a device accesses from here on: a
    /// chain that still uses it fails, as if the connection had broken. Returns false if the fabric
    /// cannot use such memory.
    fn lend(&mut self, _lane: LaneId, _memory: Lent) -> bool {
        false
    }

    /// Returns the CRC-32 of bytes that have the CRC-32 `before`, followed by these bytes of the
    /// buffer, which the verb at index `_verb` of the lane's last chain reads or writes. A fabric
    /// whose own CPU copies them sums them at the same time. For lent memory:
    /// - Of a READ that has completed. Until then the bytes may be elsewhere; this brings them
    ///   there. For a `ReadSplit` the memory may be lent as late as now, and `part` is its start.
    /// - Of a WRITE that is posted. This may begin to write. Of a `WriteSplit` it is all of the
    ///   memory, and the head may be completed afterwards: nothing executes it before the doorbell.
    fn part_sum(
        &mut self,
        lane: LaneId,
        _verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        let (buffer, at, bytes) = part;
        let content = self.buffer(lane, buffer);
        sum_after(before, &content[at as usize..][..bytes as usize])
    }

    /// Breaks the connection to a region, if it has one. The region's chains in flight complete
    /// with an error soon, and later chains fail.
    fn disconnect(&mut self, _region: RegionIndex) {}

    /// The fabric to which setup adds regions: this one, or that behind all interceptors. `None` if
    /// neither is an [`AnyFabric`].
    fn any(&mut self) -> Option<&mut AnyFabric> {
        None
    }

    /// Reports that another region has taken the place of this one. An interceptor that holds back
    /// chains for the former region fails them, because the new region must not execute them.
    fn replaced(&mut self, _region: RegionIndex) {}

    /// The counts of all lanes.
    fn counters(&self) -> Counters;

    /// The counts of this lane, without doorbells.
    fn lane_counters(&self, lane: LaneId) -> &Counters;
}
