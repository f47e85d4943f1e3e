//! Making room in a full region, for use as a cache: keys that were written long ago go first,
//! approximately.
//!
//! A sample of the class's blocks is looked at, and the oldest of them are unlinked. Done when a
//! client asks for blocks and the depot has none.

use farside_control::FreeBlock;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{BlockRef, SizeClass, SlotState, SlotWord};

use crate::content::{BlockReader, Content};
use crate::expiry::Reaper;
use crate::index::Index;
use crate::own_endpoint::OwnEndpoint;
use crate::walk::{Budget, Cursor};

/// The most keys that go for one request.
const EVICTIONS_MAX: usize = 1024;
/// How many blocks are looked at for each that goes.
const SAMPLE: usize = 5;
/// How many bytes of blocks are read for one request, and some of one block more: enough for a
/// sample of what a session asks for, which is 2 MiB or one block.
const SAMPLE_BYTES_MAX: u64 = 32 << 20;
/// How much of the index is looked through for one request: 32 MiB.
const SUBTABLES_MAX: usize = 4096;

/// A slot whose key may go.
struct Candidate {
    written_at_ms: u64,
    slot: u64,
    word: SlotWord,
    block: BlockRef,
    generation: u32,
    deadline: Nanos,
}

/// Chooses keys to remove, and removes them.
pub(crate) struct Evictor {
    reader: BlockReader,
    /// How old a word may be for a compare-and-swap to rely on (invariant I4).
    word_ns: Nanos,
    /// Where the next sample begins: samples go round the index, whose order is that of hashes.
    cursor: Cursor,
    evicted: u64,
}

impl Evictor {
    pub(crate) fn new(reader: BlockReader, word_ns: Nanos) -> Self {
        Self { reader, word_ns, cursor: Cursor::default(), evicted: 0 }
    }

    /// How many keys were removed.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Unlinks up to `count` blocks of the class, one at least if a client could find it. They have
    /// not rested.
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
        let going = sample.len().div_ceil(SAMPLE).min(wanted);
        let mut blocks = Vec::with_capacity(going);
        for Candidate { slot, word, block, generation, deadline, .. } in sample {
            if blocks.len() == going {
                break;
            }
            // One that was replaced meanwhile is not old any more.
            if own.unlink_to_tombstone(slot, word, block, deadline)? {
                let removed = reaper.schedule_removal(slot, word, block, generation, own.now());
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
                deadline = own.now().saturating_add(self.word_ns);
            }
            let Some((slot, content)) = walk.next()? else { break };
            let word = content.word();
            let Ok(block) = word.block() else { continue };
            if word.state() != SlotState::Live || block.class != class {
                continue;
            }
            if let Some(Content { generation, written_at_ms, .. }) =
                self.reader.read(&content, block, &mut walk.budget)?
            {
                let found = Candidate { written_at_ms, slot, word, block, generation, deadline };
                sample.push(found);
            }
        }
        Ok(sample)
    }
}
