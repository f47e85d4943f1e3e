//! Eviction: makes room in a full region that is used as a cache, by removing keys that were
//! written long ago.
//!
//! When a client asks for blocks and the depot has none, the server reads a sample of the blocks of
//! the class, and unlinks the oldest ones: a fifth of them at most.

use farside_control::FreeBlock;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{BlockRef, SizeClass, SlotState, SlotWord};

use crate::content::{BlockFields, BlockReader};
use crate::expiry::Reaper;
use crate::index::Index;
use crate::own_endpoint::OwnEndpoint;
use crate::walk::{Budget, Cursor};

/// Limit on the keys that are removed for one request.
const EVICTIONS_MAX: usize = 1024;
/// How many blocks are read for each block that is unlinked.
const SAMPLE: usize = 5;
/// How many bytes of blocks are read for one request; the last block may exceed this limit. The
/// limit is enough for the sample of a session's request, which is for 2 MiB of blocks or for one
/// block.
const SAMPLE_BYTES_MAX: u64 = 32 << 20;
/// Limit on the subtables that are read for one request: 32 MiB.
const SUBTABLES_MAX: usize = 4096;

/// A slot whose key may be removed.
struct Candidate {
    written_at_ms: u64,
    slot: u64,
    word: SlotWord,
    block: BlockRef,
    generation: u32,
    deadline: Nanos,
}

/// Chooses the keys to remove, and removes them.
pub(crate) struct Evictor {
    reader: BlockReader,
    /// How old a word may be for a CAS that expects it (invariant I4).
    proof_age_max_ns: Nanos,
    /// The slot at which the next sample begins. A sample reads on from the end of the last one,
    /// and round the end of the index. The hash of a key decides its place there, so a sample has
    /// keys of every age.
    cursor: Cursor,
    /// The number of keys that were removed.
    pub(crate) evicted: u64,
}

impl Evictor {
    pub(crate) fn new(reader: BlockReader, proof_age_max_ns: Nanos) -> Self {
        Self { reader, proof_age_max_ns, cursor: Cursor::default(), evicted: 0 }
    }

    /// Unlinks up to `count` blocks of the class. The blocks have not rested.
    pub(crate) fn make_room(
        &mut self,
        class: SizeClass,
        count: u32,
        index: &Index,
        own: &OwnEndpoint,
        reaper: &mut Reaper,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        let wanted = (count as usize).min(EVICTIONS_MAX);
        let mut sample = self.sample(class, wanted * SAMPLE, index, own)?;
        sample.sort_unstable_by_key(|candidate| candidate.written_at_ms);
        let evictions = sample.len().div_ceil(SAMPLE).min(wanted);
        let mut blocks = Vec::with_capacity(evictions);
        for Candidate { slot, word, block, generation, deadline, .. } in sample {
            if blocks.len() == evictions {
                break;
            }
            // A value that was replaced meanwhile is not old any more.
            if own.unlink_to_tombstone(slot, word, block, deadline)? {
                let removed =
                    reaper.schedule_tomb_clearing(slot, word, block, generation, own.now());
                blocks.push(removed.block);
            }
        }
        self.evicted += blocks.len() as u64;
        Ok(blocks)
    }

    fn sample(
        &mut self,
        class: SizeClass,
        size: usize,
        index: &Index,
        own: &OwnEndpoint,
    ) -> Result<Vec<Candidate>, ChainError> {
        let mut sample = Vec::new();
        let subtables = index.places.len().min(SUBTABLES_MAX);
        let mut walk = self.cursor.walk_round(index, Budget::new(subtables, SAMPLE_BYTES_MAX));
        let mut deadline = 0;
        loop {
            if walk.is_between_subtables() {
                if sample.len() >= size {
                    break;
                }
                deadline = own.now().saturating_add(self.proof_age_max_ns);
            }
            let Some((slot, content)) = walk.next()? else { break };
            let word = content.word();
            let Ok(block) = word.block() else { continue };
            if word.state() != SlotState::Live || block.class != class {
                continue;
            }
            if let Some(BlockFields { generation, written_at_ms, .. }) =
                self.reader.read(&content, block, &mut walk.budget)?
            {
                let found = Candidate { written_at_ms, slot, word, block, generation, deadline };
                sample.push(found);
            }
        }
        Ok(sample)
    }
}
