//! Removing values that have ended, so that their memory comes back: for readers they are absent
//! from their end on anyway.
//!
//! While no value has an end there is nothing to do, and the server sleeps.

use std::collections::{BTreeSet, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

use farside_control::FreeBlock;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{BLOCK_HEADER_BYTES, BlockHeader, BlockRef, SizeClass, SlotState, SlotWord};
use zerocopy::{FromBytes, IntoBytes};

use crate::content::BlockReader;
use crate::index::Index;
use crate::own_endpoint::OwnEndpoint;
use crate::walk::{Budget, Cursor};

/// How many subtables are looked through before the server looks after its clients again.
const SUBTABLES_PER_STEP: usize = 64;
/// How many values are removed before that: over RDMA each takes a round trip.
const REMOVALS_PER_STEP: usize = 256;
/// A walk rests this many times as long as it worked, and at least [`REST_NS_MIN`]: it takes a
/// twentieth of a processor at most.
const REST_FACTOR: u64 = 19;
const REST_NS_MIN: Nanos = 1_000_000_000;
/// How long it waits at most for a value to end: the clock may be set meanwhile.
const PAUSE_NS_MAX: Nanos = 60_000_000_000;
/// How long a value stays behind its end, so that a server's clock that is ahead of a client's by
/// less than this takes nothing away early.
const MARGIN_MS: u64 = 2000;

/// A slot that was taken out of service.
struct Tomb {
    ready_at: Nanos,
    slot: u64,
    word: SlotWord,
}

/// A block without a link to it, for the depot; it has not rested.
pub(crate) struct Removed {
    pub(crate) class: SizeClass,
    pub(crate) block: FreeBlock,
}

/// One walk through the index.
#[derive(Default)]
struct Pass {
    cursor: Cursor,
    worked_ns: Nanos,
    /// When the first of the values that stay ends, milliseconds since 1970.
    first_end_ms: Option<u64>,
    /// [`Index::moves`] then.
    moves: u64,
    /// Something may have been missed: an entry that a split had in its hands, or what a client
    /// that left meanwhile stored behind the walk's back.
    again: bool,
}

/// Walks the index, a step at a time, for as long as there may be values with an end.
pub(crate) struct Reaper {
    reader: BlockReader,
    grace: Nanos,
    /// How old a word may be for a compare-and-swap to rely on (invariant I4).
    word_ns: Nanos,
    /// Connected clients that store values with an end.
    clients: BTreeSet<u16>,
    pass: Option<Pass>,
    /// When the next walk begins; `None` while there is nothing that could end.
    next_pass_at: Option<Nanos>,
    tombs: VecDeque<Tomb>,
    expired: u64,
}

impl Reaper {
    /// Begins with a walk if the region may have such values from before.
    pub(crate) fn new(reader: BlockReader, (grace, word_ns): (Nanos, Nanos), is_new: bool) -> Self {
        Self {
            reader,
            grace,
            word_ns,
            clients: BTreeSet::new(),
            pass: None,
            next_pass_at: (!is_new).then_some(0),
            tombs: VecDeque::new(),
            expired: 0,
        }
    }

    /// This client stores values with an end from now on.
    pub(crate) fn announce(&mut self, client: u16, now: Nanos) {
        self.clients.insert(client);
        self.walk_soon(now);
    }

    fn walk_soon(&mut self, now: Nanos) {
        let at = now.saturating_add(REST_NS_MIN);
        self.next_pass_at = Some(self.next_pass_at.map_or(at, |next| next.min(at)));
    }

    /// This client is gone; what it stored is not.
    pub(crate) fn forget(&mut self, client: u16) {
        let stored = self.clients.remove(&client);
        if let Some(pass) = &mut self.pass {
            pass.again |= stored;
        }
    }

    /// As [`Reaper::forget`], without a goodbye: it may have stored a value with an end, and not
    /// come to announce it.
    pub(crate) fn lose(&mut self, client: u16, now: Nanos) {
        self.forget(client);
        self.walk_soon(now);
        self.pass.iter_mut().for_each(|pass| pass.again = true);
    }

    /// How many values were removed because they had ended.
    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// When there is something to do; `None` for never.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        let pass = if self.pass.is_some() { Some(0) } else { self.next_pass_at };
        let tomb = self.tombs.front().map(|tomb| tomb.ready_at);
        [pass, tomb].into_iter().flatten().min()
    }

    /// Goes on a little; returns the blocks it unlinked.
    pub(crate) fn step(
        &mut self,
        index: &Index,
        own: &OwnEndpoint,
    ) -> Result<Vec<Removed>, ChainError> {
        let now = own.now();
        self.clear_tombs(own, now)?;
        let mut removed = Vec::new();
        let due = self.next_pass_at.is_some_and(|at| at <= now);
        let Some(mut pass) = self
            .pass
            .take()
            .or_else(|| due.then(|| Pass { moves: index.moves, ..Default::default() }))
        else {
            return Ok(removed);
        };
        self.next_pass_at = None;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ms = wall.as_millis() as u64;
        let mut walk = pass.cursor.walk(index, Budget::of_step(SUBTABLES_PER_STEP));
        let mut deadline = 0;
        loop {
            if walk.is_between_subtables() {
                if removed.len() >= REMOVALS_PER_STEP {
                    break;
                }
                deadline = own.now().saturating_add(self.word_ns);
            }
            let Some((slot, content)) = walk.next()? else { break };
            let word = content.word();
            pass.again |= matches!(word.state(), SlotState::Frozen | SlotState::Copy);
            let Some((block, end_ms)) = self.block_that_ends(word)? else { continue };
            if end_ms + MARGIN_MS > wall_ms {
                let first = pass.first_end_ms.map_or(end_ms, |first| first.min(end_ms));
                pass.first_end_ms = Some(first);
            } else if let Some(found) = self.reader.read(&content, block, &mut walk.budget)?
                && found.expires_at_ms == end_ms
                && own.unlink_to_tombstone(slot, word, block, deadline)?
            {
                self.expired += 1;
                let generation = found.generation;
                removed.push(self.schedule_removal(slot, word, block, generation, own.now()));
            }
        }
        let is_over = walk.is_over();
        pass.worked_ns += own.now().saturating_sub(now);
        if is_over {
            // A split may have moved entries to where the walk had been.
            pass.again |= index.moves != pass.moves;
            self.end(&pass, wall_ms, own.now());
        } else {
            self.pass = Some(pass);
        }
        Ok(removed)
    }

    /// What is left to do about a slot that was taken out of service just now.
    pub(crate) fn schedule_removal(
        &mut self,
        slot: u64,
        word: SlotWord,
        BlockRef { address, class, .. }: BlockRef,
        generation: u32,
        now: Nanos,
    ) -> Removed {
        let ready_at = now.saturating_add(self.grace);
        self.tombs.push_back(Tomb { ready_at, slot, word: word.with_state(SlotState::Tomb) });
        // Its next content gets another generation (invariant I2).
        let block = FreeBlock { address, generation: generation.wrapping_add(1) };
        Removed { class, block }
    }

    /// Slots that no operation under way can have seen in use any more are empty.
    fn clear_tombs(&mut self, own: &OwnEndpoint, now: Nanos) -> Result<(), ChainError> {
        while let Some(tomb) = self.tombs.pop_front_if(|tomb| tomb.ready_at <= now) {
            // If a split took it meanwhile, there is nothing left to do.
            own.clear_tomb(tomb.slot, tomb.word)?;
        }
        Ok(())
    }

    /// When to walk again: as long as clients store such values, after a rest; else when the first
    /// one ends, if there is one, or in a minute.
    fn end(&mut self, pass: &Pass, wall_ms: u64, now: Nanos) {
        let rest = REST_NS_MIN.max(pass.worked_ns.saturating_mul(REST_FACTOR));
        let until_first = pass.first_end_ms.map(|first| {
            let left_ms = (first + MARGIN_MS).saturating_sub(wall_ms);
            left_ms.saturating_mul(1_000_000)
        });
        let pause = match until_first {
            _ if pass.again || !self.clients.is_empty() => Some(rest),
            Some(left) => Some(left.min(PAUSE_NS_MAX).max(rest)),
            None => None,
        };
        self.next_pass_at = pause.map(|pause| now.saturating_add(pause));
    }

    /// The block of a word whose value ends some day, and when. Only a conditional word can lead to
    /// one (invariant I19).
    fn block_that_ends(&self, word: SlotWord) -> Result<Option<(BlockRef, u64)>, ChainError> {
        if word.state() != SlotState::Live || !word.is_conditional() {
            return Ok(None);
        }
        let Ok(block) = word.block() else { return Ok(None) };
        if self.reader.geometry.check_block(block).is_err() {
            return Ok(None);
        }
        let mut words = [0u64; BLOCK_HEADER_BYTES as usize / 8];
        self.reader.region.read(block.address.offset(), &mut words)?;
        let Ok(header) = BlockHeader::ref_from_bytes(words.as_bytes()) else { return Ok(None) };
        let end_ms = header.expires_at_ms();
        Ok((end_ms != 0).then_some((block, end_ms)))
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::shm::{HugePages, RegionMemory};

    use super::*;

    fn reaper() -> Reaper {
        const BYTES: u64 = 8 << 20;
        let memory = RegionMemory::anonymous(BYTES, HugePages::Never).unwrap();
        let format = ServerConfig::default().format(BYTES, [1; 16], [2; 16]);
        let reader = BlockReader::new(&memory.region, &format);
        Reaper::new(reader, (1, 1), true)
    }

    #[test]
    fn what_a_lost_client_stored_is_looked_for() {
        let mut reaper = reaper();
        reaper.forget(7);
        assert_eq!(reaper.next_step_at(), None);
        reaper.lose(7, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + REST_NS_MIN));
        assert!(reaper.clients.is_empty());
    }

    /// When the clock that says so is years ahead, and then set right.
    #[test]
    fn an_end_far_away_is_looked_at_again_in_a_minute() {
        let mut reaper = reaper();
        const END_MS: u64 = 2_000_000_000_500;
        let mut pass = Pass { worked_ns: 1, first_end_ms: Some(END_MS), ..Default::default() };
        reaper.end(&pass, END_MS / 2, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + PAUSE_NS_MAX));
        reaper.end(&pass, END_MS - 3001, 5);
        assert_eq!(reaper.next_step_at(), Some(5 + (3001 + MARGIN_MS) * 1_000_000));
        pass.first_end_ms = None;
        reaper.end(&pass, END_MS / 2, 5);
        assert_eq!(reaper.next_step_at(), None);
    }
}
