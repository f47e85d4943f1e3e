//! A fabric whose calls a component intercepts: to emulate a network, to inject faults, to count.

use std::sync::Arc;

use crate::{
    AnyFabric, Buffer, Completion, Counters, Fabric, LaneId, Lent, Nanos, RegionIndex, Timing,
    Verb, Wakeup,
};

/// Puts one or more [`Interceptor`]s around the fabric of a session, whose number of lanes it gets.
pub type Intercept =
    Arc<dyn Fn(Box<dyn Fabric + Send>, u16) -> Box<dyn Fabric + Send> + Send + Sync>;

/// The calls of [`Fabric`] that can be intercepted. By default each goes to the fabric.
#[allow(missing_docs, reason = "the functions of `Fabric`")]
pub trait Interceptor<F: Fabric + ?Sized> {
    fn now(&self, fabric: &F) -> Nanos {
        fabric.now()
    }

    fn wall_clock_ns(&self, fabric: &F) -> u64 {
        fabric.wall_clock_ns()
    }

    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        fabric.post(lane, region, chain, deadline);
    }

    fn has_room(&self, fabric: &F, region: RegionIndex, under_way_bytes: u64) -> bool {
        fabric.has_room(region, under_way_bytes)
    }

    fn set_patience(&mut self, fabric: &mut F, region: RegionIndex, patience: Nanos) {
        fabric.set_patience(region, patience);
    }

    fn wait(&mut self, fabric: &mut F, lane: LaneId, until: Nanos) {
        fabric.wait(lane, until);
    }

    fn ring(&mut self, fabric: &mut F) {
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        fabric.poll()
    }

    fn relax(&mut self, fabric: &mut F) {
        fabric.relax();
    }

    fn replaced(&mut self, fabric: &mut F, region: RegionIndex) {
        fabric.replaced(region);
    }
}

/// A fabric whose calls go through an interceptor.
pub struct Intercepted<F: Fabric + ?Sized, I> {
    /// Intercepts the calls.
    pub interceptor: I,
    /// Executes what the interceptor passes on.
    pub fabric: Box<F>,
}

impl<F: Fabric + ?Sized, I: Interceptor<F>> Fabric for Intercepted<F, I> {
    fn timing(&self, region: RegionIndex) -> Timing {
        self.fabric.timing(region)
    }

    fn now(&self) -> Nanos {
        self.interceptor.now(&self.fabric)
    }

    fn wall_clock_ns(&self) -> u64 {
        self.interceptor.wall_clock_ns(&self.fabric)
    }

    fn prefetch(&self, region: RegionIndex, remote: u64, bytes: u32) {
        self.fabric.prefetch(region, remote, bytes);
    }

    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        self.interceptor.post(&mut self.fabric, lane, region, chain, deadline);
    }

    fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        self.interceptor.has_room(&self.fabric, region, under_way_bytes)
    }

    fn set_patience(&mut self, region: RegionIndex, patience: Nanos) {
        self.interceptor.set_patience(&mut self.fabric, region, patience);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.interceptor.wait(&mut self.fabric, lane, until);
    }

    fn ring(&mut self) {
        self.interceptor.ring(&mut self.fabric);
    }

    fn poll(&mut self) -> Option<Completion> {
        self.interceptor.poll(&mut self.fabric)
    }

    fn relax(&mut self) {
        self.interceptor.relax(&mut self.fabric);
    }

    fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        self.fabric.set_wakeup(wakeup);
    }

    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.fabric.buffer(lane, buffer)
    }

    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.fabric.buffer_mut(lane, buffer)
    }

    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        self.fabric.reserve(lane, buffer, bytes)
    }

    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        self.fabric.part_sum(lane, verb, part, before)
    }

    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        self.fabric.lend(lane, memory)
    }

    fn disconnect(&mut self, region: RegionIndex) {
        self.fabric.disconnect(region);
    }

    fn any(&mut self) -> Option<&mut AnyFabric> {
        self.fabric.any()
    }

    fn replaced(&mut self, region: RegionIndex) {
        self.interceptor.replaced(&mut self.fabric, region);
    }

    fn counters(&self) -> Counters {
        self.fabric.counters()
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        self.fabric.lane_counters(lane)
    }
}
