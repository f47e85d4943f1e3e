//! Combining: concurrent operations on one key share one chain of verbs.
//!
//! In a skewed workload, operations in flight often name the same key. With a chain each, their
//! GETs would read the same block several times. Only one of their PUTs would win the
//! compare-and-swap; the others would start over. A pipeline therefore combines them, as long as
//! none of them has been posted:
//!
//! - of several GETs the first becomes the *leader*: it reads the block once, for all of them;
//! - of several PUTs the last becomes the leader: it writes once, and the others count as
//!   overwritten by it.
//!
//! The other lanes become the leader's *followers*: they post nothing and complete with the leader.
//! No operation waits in order to be combined.
//!
//! Combining keeps operations linearizable because of invariant I20: every member of a group is
//! started before the leader posts its first verb, and completes after the leader. Followers of a
//! GET may therefore take effect immediately after it, and followers of a PUT immediately before
//! it. If an operation could join a GET that is already in flight, it might miss a change that was
//! complete before it was started. DELETE and conditional operations report what they found, so
//! each of them needs a chain of its own. The full argument is in `docs/protocol.md` ("Operations
//! may share a chain").

use std::mem::discriminant;

use farside_fabric::LaneId;
use farside_layout::hash::KeyHash;
use farside_protocol::{Action, Answer, staged_key};

use super::{LaneScheduler, LaneState, PipelineLane};

/// Table entries per lane: two for GETs and two for PUTs, so that few keys collide. A collision
/// costs an opportunity to combine, nothing else.
const ENTRIES_PER_LANE: usize = 4;

/// The lanes that a new operation may join, by key and kind of operation.
///
/// A hash table with one entry per bucket: a new candidate displaces the old one. A displaced lane
/// executes its operation alone, or with the followers it has.
#[derive(Default)]
pub(super) struct CandidateTable {
    /// The number of entries is a power of two. GETs use the even ones, PUTs the odd ones.
    entries: Vec<(CandidateTag, LaneId)>,
    /// Mixed into every tag, so that a new epoch invalidates all entries at once.
    epoch: u64,
}

/// Key, kind of operation and epoch of a candidate, in 64 bits. Different keys can have the same
/// tag: [`LaneScheduler::can_combine`] compares the keys themselves.
type CandidateTag = u64;

impl CandidateTable {
    /// Makes room for this many lanes, and removes all candidates.
    pub(super) fn provide(&mut self, lanes: u16) {
        let entries = (usize::from(lanes) * ENTRIES_PER_LANE).next_power_of_two();
        let entries = entries.max(self.entries.len());
        self.entries.clear();
        self.entries.resize(entries, (0, LaneId(0)));
        self.clear();
    }

    /// Removes all candidates, in constant time. The scheduler calls this before it lets queued
    /// lanes post (I20).
    #[inline]
    pub(super) fn clear(&mut self) {
        // An odd increment visits every 64-bit number before it repeats one.
        self.epoch = self.epoch.wrapping_add(0x9e37_79b9_7f4a_7c15);
    }

    /// Makes `lane` the candidate for a key and a kind of operation. Returns the candidate that it
    /// displaces if that one has, as far as the tag tells, the same key and kind.
    #[inline]
    fn replace(&mut self, hash: KeyHash, is_put: bool, lane: LaneId) -> Option<LaneId> {
        let key_and_kind = hash.identity() << 1 | u64::from(is_put);
        let tag = key_and_kind ^ self.epoch;
        let mask = self.entries.len() - 1;
        let entry = &mut self.entries[key_and_kind as usize & mask];
        let (old_tag, old_lane) = std::mem::replace(entry, (tag, lane));
        (old_tag == tag).then_some(old_lane)
    }
}

impl LaneScheduler<'_> {
    /// Combines the operation of `new_lane`, which is not enqueued yet, with one that is. Returns
    /// true if `new_lane` became a follower: then it must not be enqueued.
    #[inline(always)]
    pub(super) fn try_combine(
        &mut self,
        new_lane: LaneId,
        action: Action<'_>,
        hash: KeyHash,
    ) -> bool {
        let is_put = match action {
            Action::Get => false,
            Action::Put(_) => true,
            _ => return false,
        };
        let Some(candidate) = self.queues.candidates.replace(hash, is_put, new_lane) else {
            return false;
        };
        if !self.can_combine(new_lane, candidate) {
            return false;
        }
        let (leader, follower) = if is_put { (new_lane, candidate) } else { (candidate, new_lane) };
        // The next operation on the key has to find the leader.
        self.queues.candidates.replace(hash, is_put, leader);
        let leaders_list = self.lanes[usize::from(leader.0)].next_follower.replace(follower);
        let follower = &mut self.lanes[usize::from(follower.0)];
        // A PUT that led so far is in the queue already. The scheduler skips it in this state.
        follower.state = LaneState::Following;
        // At most one of the two has a list, because a new lane has none.
        follower.next_follower = follower.next_follower.or(leaders_list);
        !is_put
    }

    /// Returns whether both lanes are queued with operations of the same kind on the same key.
    ///
    /// A lane leaves [`LaneState::Queued`] before it posts its first verb, so a queued lane can
    /// still be joined (I20). PUTs may differ in value and TTL: those of the last one remain.
    #[inline(never)]
    fn can_combine(&self, new_lane: LaneId, candidate: LaneId) -> bool {
        let fabric = self.engine.endpoint.fabric();
        let describe = |LaneId(id)| {
            let PipelineLane { job, state, .. } = &self.lanes[usize::from(id)];
            let key = staged_key(&*fabric, LaneId(id), job.key_bytes);
            (*state, discriminant(&job.action), key)
        };
        let new = describe(new_lane);
        new_lane != candidate && new.0 == LaneState::Queued && new == describe(candidate)
    }

    /// Completes the followers of a leader that has its answer.
    ///
    /// If the leader succeeded, its answer is theirs. If it failed, each follower is queued again
    /// and executes its own operation: the reason may concern the leader alone, for example that
    /// there is no free block for a value as large as its own.
    #[inline(never)]
    pub(super) fn complete_followers(&mut self, leader: LaneId, first_follower: LaneId) {
        let answer = &self.lanes[usize::from(leader.0)].answer;
        let leaders_answer = answer.as_ref().and_then(|answer| answer.as_ref().ok().copied());
        // The value that a PUT stores is the leader's: those of the others were overwritten.
        let is_put = matches!(self.lanes[usize::from(leader.0)].job.action, Action::Put(_));
        let common_answer = leaders_answer.map(|answer| match is_put {
            true => Answer::stored(None),
            false => answer,
        });
        let mut next = Some(first_follower);
        while let Some(id) = next {
            let lane = &mut self.lanes[usize::from(id.0)];
            next = lane.next_follower.take();
            if let Some(answer) = common_answer {
                // The value stays in the leader's buffer until every follower has been taken: no
                // lane posts a chain while completed operations wait to be taken.
                lane.value_lane = leader;
                lane.answer = Some(Ok(answer));
                self.queues.answered.push(id);
                self.count(leader, &answer);
            } else {
                lane.state = LaneState::Queued;
                let action = lane.job.action;
                self.enqueue(id, action);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_layout::hash::KeyHasher;

    use super::*;

    const GET: bool = false;
    const PUT: bool = true;

    fn table(lanes: u16) -> CandidateTable {
        let mut table = CandidateTable::default();
        table.provide(lanes);
        table
    }

    fn hash(key: &[u8]) -> KeyHash {
        KeyHasher::new(&[7; 16]).hash(key)
    }

    #[test]
    fn a_candidate_is_found_by_its_own_key_and_kind_only() {
        let mut candidates = table(16);
        assert_eq!(candidates.replace(hash(b"key"), GET, LaneId(1)), None);
        assert_eq!(candidates.replace(hash(b"key"), PUT, LaneId(2)), None);
        assert_eq!(candidates.replace(hash(b"other"), GET, LaneId(3)), None);
        assert_eq!(candidates.replace(hash(b"key"), PUT, LaneId(4)), Some(LaneId(2)));
        assert_eq!(candidates.replace(hash(b"key"), PUT, LaneId(5)), Some(LaneId(4)));
    }

    #[test]
    fn a_key_whose_entry_was_taken_by_another_key_has_no_candidate() {
        let mut candidates = table(1);
        candidates.replace(hash(b"key"), GET, LaneId(1));
        // One lane has two entries for GETs, so some of these keys share the entry of the first.
        for other in 0..16 {
            candidates.replace(hash(&[other]), GET, LaneId(2));
        }
        assert_eq!(candidates.replace(hash(b"key"), GET, LaneId(3)), None);
    }

    /// Guards I20: fails if `clear` leaves a candidate, which may have posted its chain by now.
    #[test]
    fn no_candidate_outlives_clear() {
        let mut candidates = table(16);
        for _ in 0..1000 {
            assert_eq!(candidates.replace(hash(b"key"), PUT, LaneId(1)), None);
            candidates.clear();
        }
    }
}
