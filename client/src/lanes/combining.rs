//! Operations of one key that are done together, so that what is hot costs one chain.
//!
//! Until lanes begin what is new to them, another operation of a key may join one (invariant I20):
//! of GETs the first READs for all, of PUTs the last writes for all. No
//! operation waits to be combined.

use std::mem::discriminant;

use farside_fabric::{Buffer, Fabric, LaneId};
use farside_layout::BLOCK_HEADER_BYTES;
use farside_layout::hash::KeyHash;

use farside_protocol::Action;

use super::{Lane, Lanes, State};

/// For each lane, half of them for GETs, so that few keys have the place of another.
const PLACES_PER_LANE: usize = 4;

/// The lanes that were given GETs and PUTs since the last ones began, by key. A key whose place
/// another one took shares nothing.
pub(super) struct CandidateTable {
    places: Box<[(Tag, LaneId)]>,
    /// Since the last ones began: what makes tags of the same key differ.
    round: u64,
}

/// Of a key, what is done to it, and the round.
type Tag = u64;

impl CandidateTable {
    pub(super) fn new(lanes: u16) -> Self {
        let places = (usize::from(lanes) * PLACES_PER_LANE).next_power_of_two();
        Self { places: vec![(0, LaneId(0)); places].into(), round: 0 }
    }

    /// Lanes begin: nothing new can be done with what they have to do.
    #[inline]
    pub(super) fn forget(&mut self) {
        // Odd: no round comes again. Should another key's tag be the same, `is_same` tells.
        self.round = self.round.wrapping_add(0x9e37_79b9_7f4a_7c15);
    }

    /// Puts a lane in its place; who had it before, if it seems to be of the same key and kind.
    #[inline]
    fn put(&mut self, hash: KeyHash, is_put: bool, lane: LaneId) -> Option<LaneId> {
        let key = hash.tag() << 1 | u64::from(is_put);
        let tag = key ^ self.round;
        let mask = self.places.len() - 1;
        let place = &mut self.places[key as usize & mask];
        let before = std::mem::replace(place, (tag, lane));
        (before.0 == tag).then_some(before.1)
    }
}

impl Lanes<'_> {
    /// Looks for a job that a new one can be done with; whether another lane does the new one.
    #[inline]
    pub(super) fn share(&mut self, id: LaneId, action: Action<'_>, hash: KeyHash) -> bool {
        let is_put = match action {
            Action::Get => false,
            Action::Put(_) => true,
            _ => return false,
        };
        let Some(other) = self.recent.put(hash, is_put, id) else { return false };
        if !self.is_same(id, other) {
            return false;
        }
        let (by, done) = if is_put { (id, other) } else { (other, id) };
        self.recent.put(hash, is_put, by);
        let before = self.lanes[usize::from(by.0)].shared.replace(done);
        let done = &mut self.lanes[usize::from(done.0)];
        done.state = State::Shared;
        // A PUT that is done by a newer one brings those along that it was to do.
        done.shared = done.shared.or(before);
        !is_put
    }

    /// Whether two jobs that have not begun are of the same key and kind.
    fn is_same(&self, id: LaneId, other: LaneId) -> bool {
        let fabric = self.engine.endpoint.fabric();
        let of = |LaneId(id)| {
            let Lane { job, state, .. } = &self.lanes[usize::from(id)];
            let image = fabric.buffer(LaneId(id), Buffer::NewBlock);
            let key = &image[BLOCK_HEADER_BYTES as usize..][..job.key_bytes];
            (*state, discriminant(&job.action), key)
        };
        let new = of(id);
        id != other && new.0 == State::New && new == of(other)
    }

    /// Answers those whose jobs were done by this lane. If it failed, each is done on its own.
    #[inline(never)]
    pub(super) fn finish_shared(&mut self, by: LaneId, first: LaneId) {
        let mailbox = &self.lanes[usize::from(by.0)].mailbox;
        let answer = mailbox.answer.take();
        let shared = answer.as_ref().and_then(|answer| answer.as_ref().ok().copied());
        mailbox.answer.set(answer);
        let mut next = Some(first);
        while let Some(id) = next {
            let lane = &mut self.lanes[usize::from(id.0)];
            next = lane.shared.take();
            if let Some(answer) = shared {
                lane.found_by = by;
                lane.mailbox.answer(Ok(answer));
                self.finished.push_back(id);
            } else {
                lane.state = State::New;
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

    /// A [`CandidateTable::forget`] that forgets nothing is caught (invariant I20).
    #[test]
    fn only_those_of_this_round_one_key_and_kind_are_found() {
        let hasher = KeyHasher::new(&[7; 16]);
        let (key, other) = (hasher.hash(b"key"), hasher.hash(b"other"));
        let mut recent = CandidateTable::new(16);
        assert_eq!(recent.put(key, false, LaneId(1)), None);
        assert_eq!(recent.put(key, true, LaneId(2)), None);
        assert_eq!(recent.put(other, false, LaneId(3)), None);
        assert_eq!(recent.put(key, true, LaneId(4)), Some(LaneId(2)));
        for _ in 0..1000 {
            recent.forget();
            assert_eq!(recent.put(key, true, LaneId(5)), None);
        }
    }
}
