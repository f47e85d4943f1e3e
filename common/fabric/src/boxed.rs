use super::{Buffer, ChainError, Completion, Counters, Fabric, LaneId, Nanos, Timing, Verb};

/// For who learns only at run time which fabric there is, and can afford a call through a table.
impl<F: Fabric + ?Sized> Fabric for Box<F> {
    fn timing(&self) -> Timing {
        (**self).timing()
    }

    fn now(&self) -> Nanos {
        (**self).now()
    }

    fn wall_clock_ns(&self) -> u64 {
        (**self).wall_clock_ns()
    }

    fn expect(&self, remote: u64, bytes: u32) {
        (**self).expect(remote, bytes);
    }

    fn post(&mut self, lane: LaneId, chain: &[Verb], deadline: Nanos) {
        (**self).post(lane, chain, deadline);
    }

    fn has_room(&self, under_way_bytes: u64) -> bool {
        (**self).has_room(under_way_bytes)
    }

    fn set_patience(&mut self, patience: Nanos) {
        (**self).set_patience(patience);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        (**self).wait(lane, until);
    }

    fn ring(&mut self) {
        (**self).ring();
    }

    fn poll(&mut self) -> Option<Completion> {
        (**self).poll()
    }

    fn relax(&mut self) {
        (**self).relax();
    }

    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        (**self).buffer(lane, buffer)
    }

    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        (**self).buffer_mut(lane, buffer)
    }

    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        (**self).reserve(lane, buffer, bytes)
    }

    fn run(&mut self, lane: LaneId, chain: &[Verb], deadline: Nanos) -> Result<u64, ChainError> {
        (**self).run(lane, chain, deadline)
    }

    fn counters(&self) -> Counters {
        (**self).counters()
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        (**self).lane_counters(lane)
    }
}
