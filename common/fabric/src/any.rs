//! The fabric of a session, chosen once when it connects. On the data path only this file
//! distinguishes the fabrics.

use std::sync::Arc;

use crate::shm::ShmFabric;
use crate::tcp::TcpFabric;
#[cfg(feature = "verbs")]
use crate::verbs::VerbsFabric;
use crate::{
    Buffer, ChainError, Completion, Counters, Fabric, LaneId, Lent, Nanos, RegionIndex, Timing,
    Verb, Wakeup,
};

/// The fabric that the server's address names, or a fabric with interceptors around it.
// With a separate tag, instead of one in a niche of a field, a match takes one instruction.
#[repr(u8)]
#[allow(clippy::large_enum_variant, reason = "one per session")]
pub enum AnyFabric {
    /// Shared memory of this host.
    Shm(ShmFabric),
    /// TCP.
    Tcp(TcpFabric),
    /// RDMA.
    #[cfg(feature = "verbs")]
    Verbs(VerbsFabric),
    /// A fabric whose calls are intercepted ([`crate::Intercepted`]).
    Intercepted(Box<dyn Fabric + Send>),
}

/// Makes the same call on each fabric. Only that on shared memory is inlined: beside a network's
/// round trip a virtual call costs nothing, and with further inlined copies GETs on shared memory
/// took 8 % more instructions.
macro_rules! on {
    ($any:expr, $as_dyn:ident, $fabric:ident => $call:expr) => {
        match $any {
            AnyFabric::Shm($fabric) => $call,
            any => {
                let $fabric = any.$as_dyn();
                $call
            }
        }
    };
}

impl Fabric for AnyFabric {
    #[inline]
    fn timing(&self, region: RegionIndex) -> Timing {
        on!(self, as_dyn, fabric => fabric.timing(region))
    }

    #[inline]
    fn now(&self) -> Nanos {
        on!(self, as_dyn, fabric => fabric.now())
    }

    #[inline]
    fn wall_clock_ns(&self) -> u64 {
        on!(self, as_dyn, fabric => fabric.wall_clock_ns())
    }

    #[inline]
    fn prefetch(&self, region: RegionIndex, remote: u64, bytes: u32) {
        on!(self, as_dyn, fabric => fabric.prefetch(region, remote, bytes));
    }

    #[inline]
    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        on!(self, as_dyn_mut, fabric => fabric.post(lane, region, chain, deadline));
    }

    #[inline]
    fn post_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) {
        on!(self, as_dyn_mut, fabric => fabric.post_read(lane, region, remote, into, bytes));
    }

    #[inline]
    fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        on!(self, as_dyn, fabric => fabric.has_room(region, under_way_bytes))
    }

    #[inline]
    fn set_patience(&mut self, region: RegionIndex, patience: Nanos) {
        on!(self, as_dyn_mut, fabric => fabric.set_patience(region, patience));
    }

    #[inline]
    fn wait(&mut self, lane: LaneId, until: Nanos) {
        on!(self, as_dyn_mut, fabric => fabric.wait(lane, until));
    }

    #[inline]
    fn ring(&mut self) {
        on!(self, as_dyn_mut, fabric => fabric.ring());
    }

    #[inline(always)]
    fn poll(&mut self) -> Option<Completion> {
        on!(self, as_dyn_mut, fabric => fabric.poll())
    }

    #[inline]
    fn relax(&mut self) {
        on!(self, as_dyn_mut, fabric => fabric.relax());
    }

    fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        on!(self, as_dyn_mut, fabric => fabric.set_wakeup(wakeup));
    }

    #[inline]
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        on!(self, as_dyn, fabric => fabric.buffer(lane, buffer))
    }

    #[inline]
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        on!(self, as_dyn_mut, fabric => fabric.buffer_mut(lane, buffer))
    }

    // Without `always` the compiler makes a call of it, in every operation of a pipeline.
    #[inline(always)]
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        on!(self, as_dyn_mut, fabric => fabric.reserve(lane, buffer, bytes))
    }

    #[inline]
    fn run(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        on!(self, as_dyn_mut, fabric => fabric.run(lane, region, chain, deadline))
    }

    // Without `always` the compiler makes a call of it, in every GET.
    #[inline(always)]
    fn run_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> Result<(), ChainError> {
        on!(self, as_dyn_mut, fabric => fabric.run_read(lane, region, remote, into, bytes))
    }

    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        self.as_dyn_mut().part_sum(lane, verb, part, before)
    }

    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        self.as_dyn_mut().lend(lane, memory)
    }

    fn disconnect(&mut self, region: RegionIndex) {
        self.as_dyn_mut().disconnect(region);
    }

    fn any(&mut self) -> Option<&mut AnyFabric> {
        match self {
            Self::Intercepted(fabric) => fabric.any(),
            own => Some(own),
        }
    }

    fn replaced(&mut self, region: RegionIndex) {
        self.as_dyn_mut().replaced(region);
    }

    #[inline]
    fn counters(&self) -> Counters {
        on!(self, as_dyn, fabric => fabric.counters())
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        on!(self, as_dyn, fabric => fabric.lane_counters(lane))
    }
}

impl AnyFabric {
    #[inline(never)]
    fn as_dyn(&self) -> &dyn Fabric {
        match self {
            Self::Shm(fabric) => fabric,
            Self::Tcp(fabric) => fabric,
            #[cfg(feature = "verbs")]
            Self::Verbs(fabric) => fabric,
            Self::Intercepted(fabric) => &**fabric,
        }
    }

    #[inline(never)]
    fn as_dyn_mut(&mut self) -> &mut dyn Fabric {
        match self {
            Self::Shm(fabric) => fabric,
            Self::Tcp(fabric) => fabric,
            #[cfg(feature = "verbs")]
            Self::Verbs(fabric) => fabric,
            Self::Intercepted(fabric) => &mut **fabric,
        }
    }

    /// Whether an RDMA device or another process executes the verbs, and not this process.
    pub fn is_remote(&self) -> bool {
        !matches!(self, Self::Shm(_) | Self::Intercepted(_))
    }

    /// Whether this thread executes a chain as soon as it posts it, and never waits.
    pub fn executes_at_once(&self) -> bool {
        matches!(self, Self::Shm(_))
    }
}
