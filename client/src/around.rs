//! A fabric around another, which does some things otherwise: what kv-bench and tests put between
//! the library and a region. Not a part of the API.

#[cfg(feature = "around")]
use std::sync::Arc;

use farside_fabric::{Buffer, Completion, Counters, Fabric, LaneId, Nanos, Timing, Verb};

/// Puts something around the fabric of each session, which has so many lanes.
#[cfg(feature = "around")]
pub type Wrap = Arc<dyn Fn(Box<dyn Fabric + Send>, u16) -> Box<dyn Fabric + Send> + Send + Sync>;

/// What is done otherwise. What it does not say, the fabric does.
#[allow(missing_docs, reason = "the functions of `Fabric`")]
pub trait Rule<F: Fabric + ?Sized> {
    fn now(&self, fabric: &F) -> Nanos {
        fabric.now()
    }

    fn wall_clock_ns(&self, fabric: &F) -> u64 {
        fabric.wall_clock_ns()
    }

    fn post(&mut self, fabric: &mut F, lane: LaneId, chain: &[Verb], deadline: Nanos) {
        fabric.post(lane, chain, deadline);
    }

    fn has_room(&self, fabric: &F, under_way_bytes: u64) -> bool {
        fabric.has_room(under_way_bytes)
    }

    fn set_patience(&mut self, fabric: &mut F, patience: Nanos) {
        fabric.set_patience(patience);
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
}

/// A fabric, and a rule that everything goes through.
pub struct Around<F: Fabric + ?Sized, R> {
    /// What is done otherwise.
    pub rule: R,
    /// What does the rest.
    pub fabric: Box<F>,
}

impl<F: Fabric + ?Sized, R: Rule<F>> Fabric for Around<F, R> {
    fn timing(&self) -> Timing {
        self.fabric.timing()
    }

    fn now(&self) -> Nanos {
        self.rule.now(&self.fabric)
    }

    fn wall_clock_ns(&self) -> u64 {
        self.rule.wall_clock_ns(&self.fabric)
    }

    fn expect(&self, remote: u64, bytes: u32) {
        self.fabric.expect(remote, bytes);
    }

    fn post(&mut self, lane: LaneId, chain: &[Verb], deadline: Nanos) {
        self.rule.post(&mut self.fabric, lane, chain, deadline);
    }

    fn has_room(&self, under_way_bytes: u64) -> bool {
        self.rule.has_room(&self.fabric, under_way_bytes)
    }

    fn set_patience(&mut self, patience: Nanos) {
        self.rule.set_patience(&mut self.fabric, patience);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.rule.wait(&mut self.fabric, lane, until);
    }

    fn ring(&mut self) {
        self.rule.ring(&mut self.fabric);
    }

    fn poll(&mut self) -> Option<Completion> {
        self.rule.poll(&mut self.fabric)
    }

    fn relax(&mut self) {
        self.rule.relax(&mut self.fabric);
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

    fn counters(&self) -> Counters {
        self.fabric.counters()
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        self.fabric.lane_counters(lane)
    }
}
