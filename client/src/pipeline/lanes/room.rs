//! Which lanes go on: those whose chains have completed, and then queued ones, as long as the
//! fabric has room for their chains.

use farside_fabric::LaneId;

use super::{LaneScheduler, LaneState, Queues};
use crate::session_regions::OpenShard;

impl LaneScheduler<'_> {
    /// Continues lanes as long as the fabric has room for their chains.
    ///
    /// A lane without room waits before it posts. So a posted chain is executed soon, before the
    /// data that it relies on is too old, however many operations are in flight.
    pub(super) fn poll_lanes(&mut self) {
        if !self.queues.chains_completed.is_empty() || !self.queues.waiting_for_room.is_empty() {
            self.engine.endpoint.tick();
            // Its own loop over indexes, because a queue takes more instructions. Nothing is added
            // meanwhile.
            for at in 0..self.queues.chains_completed.len() {
                let id = self.queues.chains_completed[at];
                let Some(lane) = self.lanes.get(usize::from(id.0)) else {
                    self.step_setup();
                    continue;
                };
                match lane.state {
                    LaneState::Reading => self.complete_reading(id),
                    LaneState::Writing => self.complete_writing(id),
                    // It may post another chain.
                    _ if !self.has_room(id) => self.queues.waiting_for_room.push(id),
                    _ => self.poll_lane(id),
                }
            }
            self.queues.chains_completed.clear();
            if !self.queues.waiting_for_room.is_empty() {
                self.poll_waiting();
            }
        }
        if !self.queues.gets.is_empty() || !self.queues.changes.is_empty() {
            self.begin_queued();
        }
    }

    /// Continues lanes that waited for room, the last one first.
    #[cold]
    fn poll_waiting(&mut self) {
        for at in (0..self.queues.waiting_for_room.len()).rev() {
            if self.has_room(self.queues.waiting_for_room[at]) {
                let id = self.queues.waiting_for_room.remove(at);
                self.poll_lane(id);
            }
        }
    }

    /// Begins queued operations for which there is room.
    #[inline]
    fn begin_queued(&mut self) {
        // Read the clock again: the lanes before may have taken long to copy large values.
        self.engine.endpoint.tick();
        self.queues.candidates.clear();
        let mut put_back = 0;
        while let Some(id) = self.next_queued() {
            // A former leader is not queued any more: its new leader is queued instead.
            if self.lanes[usize::from(id.0)].state != LaneState::Queued {
                continue;
            }
            let open = self.targets[usize::from(id.0)];
            if self.has_room_for_another(open) {
                self.begin(id, open);
                continue;
            }
            put_back += self.put_back(id);
            if put_back >= self.lanes.len() {
                break;
            }
        }
        self.changes_first = !self.changes_first && !self.queues.changes.is_empty();
    }

    /// Queues a lane again that found no room for its operation. With one region it also stops all
    /// lanes after it; with several it goes behind them. Returns how many lanes this stops.
    #[cold]
    fn put_back(&mut self, id: LaneId) -> usize {
        let is_change = self.lanes[usize::from(id.0)].job.action.changes();
        let Queues { gets, changes, .. } = &mut self.queues;
        let queue = if is_change { changes } else { gets };
        if self.shards.len() == 1 {
            queue.put_back_first();
            return self.lanes.len();
        }
        queue.push(id);
        1
    }

    /// Returns whether the lane may post another chain of its operation.
    #[inline]
    fn has_room(&self, id: LaneId) -> bool {
        let open = self.targets[usize::from(id.0)];
        self.engine.endpoint.has_room(open.region.index, 0)
    }

    /// Returns whether a lane may begin at this region, if no lane of the region waits for room. An
    /// operation that has begun counts with the average bytes of an operation, not with those that
    /// it has posted so far. A GET without a cached location READs only a small window first, and
    /// then a value of any size. The window must not become too old while the value waits for room.
    #[inline]
    fn has_room_for_another(&self, open: &OpenShard) -> bool {
        let under_way_bytes = self.begun * self.operation_bytes;
        self.engine.endpoint.has_room(open.region.index, under_way_bytes)
    }

    #[inline]
    fn next_queued(&mut self) -> Option<LaneId> {
        let Queues { gets, changes, .. } = &mut self.queues;
        let (first, second) = if self.changes_first { (changes, gets) } else { (gets, changes) };
        first.pop().or_else(|| second.pop())
    }
}
