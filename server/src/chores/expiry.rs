//! Expiry: removes expired values, so that their memory can be used again. To readers an expired
//! value is absent anyway.
//!
//! While no value has a time to live, the server sleeps.

use std::collections::{BTreeSet, VecDeque};

use farside_control::FreeBlock;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{BLOCK_HEADER_BYTES, BlockHeader, BlockRef, SizeClass, SlotState, SlotWord};
use zerocopy::{FromBytes, IntoBytes};

use crate::region::content::Budget;
use crate::region::content::{BlockReader, for_each_owned_extent};
use crate::region::index::Cursor;
use crate::region::index::Index;
use crate::region::own_endpoint::OwnEndpoint;

/// How many subtables a step reads. More would let clients wait longer for answers.
const SUBTABLES_PER_STEP: usize = 64;
/// Limit on the removals of a step, because over RDMA each removal takes a round trip. The step
/// completes the subtable in which it reaches this number.
const REMOVALS_PER_STEP: usize = 256;
/// How long a step clears tombstones, because a cache makes many of them. Eviction has less time in
/// each turn, and a tombstone takes longer to make than to clear. So the server does not fall
/// behind, and an INSERT that waits for a tombstone waits for little more than GRACE.
const CLEARING_NS: Nanos = 100_000;
/// How many tombstones are cleared before the clock is read again.
const TOMBS_PER_BATCH: usize = 32;
/// The tombstones of this share of GRACE are cleared together, so that the server wakes once for
/// many.
const CLEARINGS_PER_GRACE: u64 = 16;
/// After a walk the next one waits this many times as long as the walk worked, and at least
/// [`REST_NS_MIN`]. So expiry takes at most a twentieth of a processor.
const REST_FACTOR: u64 = 19;
const REST_NS_MIN: Nanos = 1_000_000_000;
/// The longest wait for a value to expire. It bounds the delay if the clock is set meanwhile.
const PAUSE_NS_MAX: Nanos = 60_000_000_000;
/// How long an expired value stays. So a server removes no value early if its clock is ahead of a
/// client's clock by less than this time.
const MARGIN_MS: u64 = 2000;

/// A slot whose key was removed: a tombstone, until `ready_at`.
struct Tomb {
    ready_at: Nanos,
    slot: u64,
    word: SlotWord,
}

/// A block that was unlinked, for the depot. It has not rested.
pub(crate) struct RemovedBlock {
    pub(crate) class: SizeClass,
    pub(crate) block: FreeBlock,
}

/// One walk through the index.
#[derive(Default)]
struct ExpiryWalk {
    cursor: Cursor,
    worked_ns: Nanos,
    /// When the first of the remaining values expires, in milliseconds since 1970.
    first_expires_at_ms: Option<u64>,
    /// [`Index::moves`] when the walk began.
    moves: u64,
    /// Whether the walk may have missed a value. A split may have moved one, or a client that has
    /// disconnected meanwhile may have stored one in a place that the walk had passed.
    may_have_missed: bool,
}

/// Walks the index, one step at a time, while there may be values with a time to live.
pub(crate) struct Reaper {
    reader: BlockReader,
    grace: Nanos,
    /// How old a word may be for a CAS that expects it (invariant I4).
    proof_age_max_ns: Nanos,
    /// Connected clients that store values with a time to live.
    clients: BTreeSet<u16>,
    walk: Option<ExpiryWalk>,
    /// When the next walk begins; `None` while no value can expire.
    next_walk_at: Option<Nanos>,
    tombs: VecDeque<Tomb>,
    /// The number of expired values that were removed.
    pub(crate) expired: u64,
}

impl Reaper {
    /// Plans a walk at once, unless the region is new.
    pub(crate) fn new(
        reader: BlockReader,
        (grace, proof_age_max_ns): (Nanos, Nanos),
        is_new: bool,
    ) -> Self {
        Self {
            reader,
            grace,
            proof_age_max_ns,
            clients: BTreeSet::new(),
            walk: None,
            next_walk_at: (!is_new).then_some(0),
            tombs: VecDeque::new(),
            expired: 0,
        }
    }

    /// Notes that this client stores values with a time to live from now on.
    pub(crate) fn announce(&mut self, client: u16, now: Nanos) {
        self.clients.insert(client);
        self.walk_soon(now);
    }

    fn walk_soon(&mut self, now: Nanos) {
        let at = now.saturating_add(REST_NS_MIN);
        self.next_walk_at = Some(self.next_walk_at.map_or(at, |next| next.min(at)));
    }

    /// Notes that this client has disconnected. The values that it stored remain.
    pub(crate) fn forget(&mut self, client: u16) {
        let stored = self.clients.remove(&client);
        if let Some(walk) = &mut self.walk {
            walk.may_have_missed |= stored;
        }
    }

    /// Notes that this client was fenced, and plans a walk. The client may have stored a value with
    /// a time to live before the server read its announcement.
    pub(crate) fn note_fenced(&mut self, client: u16, now: Nanos) {
        self.forget(client);
        self.walk_soon(now);
        self.walk.iter_mut().for_each(|walk| walk.may_have_missed = true);
    }

    /// Returns when to call [`Reaper::step`]; `None` if no walk and no clearing is planned.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        let walk = if self.walk.is_some() { Some(0) } else { self.next_walk_at };
        let tomb = self.tombs.front().map(|tomb| tomb.ready_at);
        [walk, tomb].into_iter().flatten().min()
    }

    /// Does one step. Returns the blocks that it unlinked.
    pub(crate) fn step(
        &mut self,
        index: &Index,
        own: &OwnEndpoint,
    ) -> Result<Vec<RemovedBlock>, ChainError> {
        let now = own.now();
        self.clear_rested_tombs(own, now)?;
        let mut removed = Vec::new();
        let due = self.next_walk_at.is_some_and(|at| at <= now);
        let new_walk = || due.then(|| ExpiryWalk { moves: index.moves, ..Default::default() });
        let Some(mut walk) = self.walk.take().or_else(new_walk) else { return Ok(removed) };
        self.next_walk_at = None;
        let wall_ms = own.wall_ms();
        let mut step = walk.cursor.walk(index, Budget::of_step(SUBTABLES_PER_STEP));
        let mut deadline = 0;
        loop {
            if step.is_between_subtables() {
                if removed.len() >= REMOVALS_PER_STEP {
                    break;
                }
                deadline = own.now().saturating_add(self.proof_age_max_ns);
            }
            let Some((slot, content)) = step.next()? else { break };
            let word = content.word();
            walk.may_have_missed |= matches!(word.state(), SlotState::Frozen | SlotState::Copy);
            let expiring = self.expiring_block(index, (slot, word))?;
            let Some((block, expires_at_ms)) = expiring else { continue };
            if expires_at_ms + MARGIN_MS > wall_ms {
                let first = walk.first_expires_at_ms.get_or_insert(expires_at_ms);
                *first = expires_at_ms.min(*first);
            } else if let Some(found) = self.reader.read(&content, block, &mut step.budget)?
                && found.expires_at_ms == expires_at_ms
                && own.unlink_to_tombstone(slot, word, block, deadline)?
            {
                self.expired += 1;
                let generation = found.generation;
                let now = own.now();
                self.schedule_tomb_clearing((slot, word), (block, generation), now, &mut removed)?;
            }
        }
        let is_over = step.is_over();
        walk.worked_ns += own.now().saturating_sub(now);
        if is_over {
            // A split may have moved entries to places that the walk had passed.
            walk.may_have_missed |= index.moves != walk.moves;
            self.plan_next_walk(&walk, wall_ms, own.now());
        } else {
            self.walk = Some(walk);
        }
        Ok(removed)
    }

    /// Clears tombstones that have rested for GRACE, for [`CLEARING_NS`]. No operation under way
    /// still uses them.
    fn clear_rested_tombs(&mut self, own: &OwnEndpoint, now: Nanos) -> Result<(), ChainError> {
        while own.now().saturating_sub(now) < CLEARING_NS {
            for _ in 0..TOMBS_PER_BATCH {
                let tomb = self.tombs.pop_front_if(|tomb| tomb.ready_at <= now);
                let Some(tomb) = tomb else { return Ok(()) };
                // If a split has moved the slot meanwhile, nothing is left to do.
                own.clear_tomb(tomb.slot, tomb.word)?;
            }
        }
        Ok(())
    }

    /// Schedules the clearing of a tombstone that was just made, GRACE later or a little more. Adds
    /// its block for the depot, and the extents if it is a head.
    pub(crate) fn schedule_tomb_clearing(
        &mut self,
        (slot, word): (u64, SlotWord),
        (unlinked, generation): (BlockRef, u32),
        now: Nanos,
        removed: &mut Vec<RemovedBlock>,
    ) -> Result<(), ChainError> {
        let (address, class) = (unlinked.address, unlinked.class);
        let ready_at = now.saturating_add(self.grace);
        let ready_at = ready_at
            .checked_next_multiple_of((self.grace / CLEARINGS_PER_GRACE).max(1))
            .unwrap_or(ready_at);
        self.tombs.push_back(Tomb { ready_at, slot, word: word.with_state(SlotState::Tomb) });
        // The next content of the block gets another generation (invariant I2).
        let block = FreeBlock { address, generation: generation.wrapping_add(1) };
        removed.push(RemovedBlock { class, block });
        // The head rests, so its table is there, and so do its extents (invariant I26).
        let BlockReader { region, geometry, .. } = &self.reader;
        for_each_owned_extent(region, geometry, unlinked, |block| {
            removed.push(RemovedBlock { class: SizeClass::EXTENT, block });
            Ok(())
        })
    }

    /// Plans the next walk: after a rest if clients store values with a time to live, or if the
    /// walk may have missed one. Else when the first value expires, but in a minute at the latest.
    fn plan_next_walk(&mut self, walk: &ExpiryWalk, wall_ms: u64, now: Nanos) {
        let rest = REST_NS_MIN.max(walk.worked_ns.saturating_mul(REST_FACTOR));
        let until_first = walk.first_expires_at_ms.map(|first| {
            let left_ms = (first + MARGIN_MS).saturating_sub(wall_ms);
            left_ms.saturating_mul(1_000_000)
        });
        let pause = match until_first {
            _ if walk.may_have_missed || !self.clients.is_empty() => Some(rest),
            Some(left) => Some(left.min(PAUSE_NS_MAX).max(rest)),
            None => None,
        };
        self.next_walk_at = pause.map(|pause| now.saturating_add(pause));
    }

    /// Returns the block of a word, and when its value expires; `None` if the value never expires.
    /// Only a conditional word can lead to a value with a time to live (invariant I19).
    fn expiring_block(
        &self,
        index: &Index,
        (slot, word): (u64, SlotWord),
    ) -> Result<Option<(BlockRef, u64)>, ChainError> {
        if word.state() != SlotState::Live || !word.is_conditional() {
            return Ok(None);
        }
        let Some(block) = index.block_of(slot, word) else { return Ok(None) };
        let mut words = [0u64; BLOCK_HEADER_BYTES as usize / 8];
        self.reader.region.read(block.offset(), &mut words)?;
        let Ok(header) = BlockHeader::ref_from_bytes(words.as_bytes()) else { return Ok(None) };
        let expires_at_ms = header.expires_at_ms();
        Ok((expires_at_ms != 0).then_some((block, expires_at_ms)))
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::memory::{HugePages, RegionMemory};

    use super::*;

    fn reaper() -> Reaper {
        const BYTES: u64 = 8 << 20;
        let memory = RegionMemory::anonymous(BYTES, HugePages::Never).unwrap();
        let format = ServerConfig::default().format(BYTES, [1; 16], [2; 16]);
        let reader = BlockReader::new(&memory.region, &format);
        Reaper::new(reader, (1, 1), true)
    }

    #[test]
    fn a_walk_is_planned_after_a_client_was_fenced() {
        let mut reaper = reaper();
        reaper.forget(7);
        assert_eq!(reaper.next_step_at(), None);
        reaper.note_fenced(7, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + REST_NS_MIN));
        assert!(reaper.clients.is_empty());
    }

    /// The clock may have been years ahead, and may be corrected during the wait.
    #[test]
    fn the_next_walk_begins_in_a_minute_if_the_first_value_expires_later() {
        let mut reaper = reaper();
        const END_MS: u64 = 2_000_000_000_500;
        let mut walk =
            ExpiryWalk { worked_ns: 1, first_expires_at_ms: Some(END_MS), ..Default::default() };
        reaper.plan_next_walk(&walk, END_MS / 2, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + PAUSE_NS_MAX));
        reaper.plan_next_walk(&walk, END_MS - 3001, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + (3001 + MARGIN_MS) * 1_000_000));
        walk.first_expires_at_ms = None;
        reaper.plan_next_walk(&walk, END_MS / 2, 5);
        assert_eq!(reaper.next_step_at(), None);
    }
}
