//! The queues of lanes.

use farside_fabric::LaneId;

use super::combining::CandidateTable;
use super::shards::ParkedLane;

/// A queue in a vector. A push or pop takes about half the instructions of one of a `VecDeque`,
/// because its index never wraps.
#[derive(Default)]
pub(super) struct LaneQueue {
    /// First the lanes that were taken, then those in the queue.
    lanes: Vec<LaneId>,
    /// The number of lanes that were taken.
    taken: usize,
}

impl LaneQueue {
    /// Empties the queue, and makes room for this many lanes. Afterwards it never has to grow.
    pub(super) fn reset(&mut self, lanes: u16) {
        self.lanes.clear();
        self.taken = 0;
        // Twice, so that taken lanes are seldom removed.
        self.lanes.reserve(2 * usize::from(lanes));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.taken == self.lanes.len()
    }

    #[inline]
    pub(super) fn push(&mut self, lane: LaneId) {
        if self.lanes.len() == self.lanes.capacity() {
            self.remove_taken();
        }
        self.lanes.push(lane);
    }

    #[cold]
    fn remove_taken(&mut self) {
        self.lanes.drain(..self.taken);
        self.taken = 0;
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<LaneId> {
        let lane = *self.lanes.get(self.taken)?;
        self.taken += 1;
        Some(lane)
    }

    /// Makes the lane that was taken last the first again. Nothing may have been pushed since.
    pub(super) fn put_back_first(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }
}

/// Where each lane is.
#[derive(Default)]
pub(super) struct Queues {
    pub(super) free_lanes: Vec<LaneId>,
    /// Lanes whose chain has completed. They go first, before the data that they READ gets too old.
    pub(super) chains_completed: Vec<LaneId>,
    /// Lanes whose chain has completed, and for whose next chain the fabric had no room. A stack:
    /// the lane that was pushed last goes first, because its data is the newest.
    pub(super) waiting_for_room: Vec<LaneId>,
    /// Lanes that wait until their shard is connected.
    pub(super) parked: Vec<ParkedLane>,
    /// Queued lanes with a GET. They go before the changes: otherwise they would find blocks that
    /// the changes have just replaced.
    pub(super) gets: LaneQueue,
    /// Queued lanes with an operation that changes its key.
    pub(super) changes: LaneQueue,
    /// Lanes whose operation has an answer that was not taken yet.
    pub(super) answered: LaneQueue,
    /// Lanes whose operation has failed without a chain. They are answered at the end of a turn of
    /// all lanes: otherwise a caller that starts such operations again and again, and takes their
    /// answers, would never give the others a turn.
    pub(super) refused: Vec<LaneId>,
    /// The lanes that a new operation may join.
    pub(super) candidates: CandidateTable,
}

impl Queues {
    /// Makes all of these lanes free ones. Afterwards no queue has to grow.
    pub(super) fn reset(&mut self, lanes: u16) {
        let Self {
            free_lanes,
            chains_completed,
            waiting_for_room,
            parked,
            gets,
            changes,
            answered,
            refused,
            ..
        } = self;
        parked.clear();
        free_lanes.clear();
        free_lanes.extend((0..lanes).rev().map(LaneId));
        for stack in [chains_completed, waiting_for_room, refused] {
            stack.clear();
            // One more for the setup lane.
            stack.reserve(usize::from(lanes) + 1);
        }
        for queue in [gets, changes, answered] {
            queue.reset(lanes);
        }
        self.candidates.provide(lanes);
    }

    /// Ends a turn of all lanes: the operations that failed without a chain have their answers.
    #[inline]
    pub(super) fn answer_refused(&mut self) {
        if !self.refused.is_empty() {
            self.refused.drain(..).for_each(|lane| self.answered.push(lane));
        }
    }
}

/// Takes the memory of an empty vector for values of another type. If they have the same size, the
/// memory is not allocated anew.
pub(super) fn emptied<T, U>(vector: &mut Vec<T>) -> Vec<U> {
    std::mem::take(vector).into_iter().map(|_| unreachable!("the vector is empty")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn lanes_leave_in_order_and_the_queue_does_not_grow() {
        const LANES: u16 = 5;
        let (mut queue, mut expected) = (LaneQueue::default(), VecDeque::new());
        queue.reset(LANES);
        let capacity = queue.lanes.capacity();
        for step in 0..1000_u16 {
            let target = usize::from((step % 91) * 3 % 7 % (LANES + 1));
            while expected.len() < target {
                let lane = LaneId(step % LANES);
                queue.push(lane);
                expected.push_back(lane);
            }
            while expected.len() > target {
                assert_eq!(queue.pop(), expected.pop_front());
            }
            assert_eq!(queue.is_empty(), expected.is_empty());
        }
        while let Some(lane) = expected.pop_front() {
            assert_eq!(queue.pop(), Some(lane));
        }
        assert_eq!((queue.pop(), queue.lanes.capacity()), (None, capacity));
    }
}
