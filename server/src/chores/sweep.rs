//! Clears the slots that fenced clients left in the middle of an INSERT.

use farside_fabric::{ChainError, Nanos};
use farside_layout::SlotState;

use crate::region::content::Budget;
use crate::region::index::Cursor;
use crate::region::index::Index;
use crate::region::own_endpoint::OwnEndpoint;

/// How many subtables a step reads, 2 MiB. More would let clients wait longer for answers.
const SUBTABLES_PER_STEP: usize = 256;

/// Walks the index for fenced clients, one step at a time.
#[derive(Default)]
pub(crate) struct Sweeper {
    /// Fenced clients, each with the time after which its verbs cannot take effect any more.
    waiting: Vec<(Nanos, u16)>,
    walk: Option<SweepWalk>,
}

/// One walk through the index, for all clients whose verbs could not take effect any more when it
/// began.
struct SweepWalk {
    clients: Vec<u16>,
    cursor: Cursor,
    cleared: u64,
}

impl Sweeper {
    /// Adds a client that was just fenced. Its verbs may take effect for `fence_delay_ns`.
    pub(crate) fn add(&mut self, client: u16, now: Nanos, fence_delay_ns: Nanos) {
        self.waiting.push((now.saturating_add(fence_delay_ns), client));
    }

    /// Returns when to call [`Sweeper::step`]; `None` if there is no client to sweep for.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        match self.walk {
            Some(_) => Some(0),
            None => self.waiting.iter().map(|(ready_at, _)| *ready_at).min(),
        }
    }

    /// Whether the slots of all fenced clients are cleared.
    pub(crate) fn is_done(&self) -> bool {
        self.walk.is_none() && self.waiting.is_empty()
    }

    /// Does one step. Returns the clients of a walk once it is over.
    pub(crate) fn step(
        &mut self,
        index: &Index,
        own: &OwnEndpoint,
        now: Nanos,
    ) -> Result<Vec<u16>, ChainError> {
        let mut walk = self.walk.take().unwrap_or_else(|| {
            let ready = self.waiting.extract_if(.., |(ready_at, _)| *ready_at <= now);
            let clients = ready.map(|(_, client)| client).collect();
            SweepWalk { clients, cursor: Cursor::default(), cleared: 0 }
        });
        if walk.clients.is_empty() {
            return Ok(Vec::new());
        }
        let mut step = walk.cursor.walk(index, Budget::of_step(SUBTABLES_PER_STEP));
        while let Some((slot, content)) = step.next()? {
            let word = content.word();
            let is_unfinished = matches!(word.state(), SlotState::Pending | SlotState::Aborted);
            if !is_unfinished || index.block_of(slot, word).is_none() {
                continue;
            }
            let memory = (&*index.region, &index.geometry);
            let (clients, budget) = (&walk.clients, &mut step.budget);
            let cleared = own.clear_left_by(clients, (slot, word), memory, budget)?;
            walk.cleared += u64::from(cleared);
        }
        if !step.is_over() {
            self.walk = Some(walk);
            return Ok(Vec::new());
        }
        if walk.cleared > 0 {
            tracing::info!(
                slots = walk.cleared,
                "FS-028 cleared the unfinished inserts of lost clients"
            );
        }
        Ok(walk.clients)
    }
}

#[cfg(test)]
mod tests {
    //! Checks that a step of the sweeper reads a bounded number of bytes. Guards against words of a
    //! fenced client that all lead to one large block.

    use farside_config::ServerConfig;
    use farside_fabric::boot_time_ns;
    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_layout::{
        BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, BlockAddress, BlockStamp, NamedBlock, SizeClass,
        SlotWord, seal,
    };
    use zerocopy::IntoBytes;

    use super::*;
    use crate::region::index::SubtableImage;
    use crate::region::recovery;
    use crate::region::served::ServedRegion;

    const FENCED: u16 = 7;
    const WORDS: usize = 40;

    /// Sweeps for a fenced client. `WORDS` words of unfinished INSERTs lead to a block of 4 MiB by
    /// `writer`. Returns the number of steps, and how many of the words are left.
    fn sweep(writer: u16) -> (usize, usize) {
        let memory = RegionMemory::anonymous(16 << 20, HugePages::Never).unwrap();
        let ServedRegion { region, geometry, index, .. } =
            recovery::open(&memory, &ServerConfig::default()).unwrap();
        let class = SizeClass::for_bytes(BLOCK_BYTES_MAX).unwrap();
        let address = BlockAddress::from_offset(geometry.chunk_offset(2).unwrap()).unwrap();
        let stamp = BlockStamp {
            address,
            generation: 1,
            writer,
            written_at_ms: 1,
            expires_at_ms: 0,
            is_pinned: false,
        };
        let mut image = vec![0u64; (BLOCK_BYTES_MAX / 8) as usize];
        let value_bytes = BLOCK_BYTES_MAX - BLOCK_HEADER_BYTES - 1;
        seal(image.as_mut_bytes(), 1, value_bytes as u32, stamp).unwrap();
        region.write(address.claimed_offset(), &image).unwrap();
        let word = SlotWord::empty(0).pending(9, NamedBlock { address, class, generation_low: 1 });
        let subtable = || SubtableImage::read(&region, index.places[0]).unwrap();
        for (slot, _) in subtable().slots().take(WORDS) {
            region.store(slot, word.bits()).unwrap();
        }
        let own = OwnEndpoint::over_memory(&region);
        let mut sweeper = Sweeper::default();
        sweeper.add(FENCED, 0, 0);
        let mut steps = 0;
        while !sweeper.is_done() {
            sweeper.step(&index, &own, boot_time_ns()).unwrap();
            steps += 1;
        }
        let left = subtable()
            .slots()
            .filter(|(_, slot)| slot.word().state() == SlotState::Pending)
            .count();
        (steps, left)
    }

    #[test]
    fn a_step_reads_no_more_than_two_large_blocks() {
        assert_eq!(sweep(FENCED), (WORDS / 2 + 1, 0));
    }

    #[test]
    fn only_the_header_of_another_clients_block_is_read() {
        assert_eq!(sweep(FENCED + 1), (1, WORDS));
    }
}
