//! The walk through the slots of a subtable, and the blocks that they link.

use farside_fabric::{Buffer, Fabric};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockRef, ChunkUse, ROW_BYTES, ROWS_PER_SUBTABLE, Slot, SlotState, SlotWord,
    slot_in_subtable,
};

use super::{CheckError, LinkedSlot, Observer, Problem, REREADS_MAX, Scope, Walk, links_block};

/// A subtable, and the prefix of the hash that leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Subtable {
    pub(super) offset: u64,
    pub(super) prefix: u32,
    pub(super) local_depth: u8,
}

/// The location of a slot.
#[derive(Clone, Copy)]
struct SlotLocation {
    subtable: Subtable,
    row: usize,
    offset: u64,
}

impl SlotLocation {
    /// Whether the slot is in the window of the key with this hash.
    fn is_in_window_of(&self, hash: KeyHash) -> bool {
        let row = self.row as u64 * ROW_BYTES;
        let window = hash.window_offset();
        hash.directory_index(self.subtable.local_depth) == u64::from(self.subtable.prefix)
            && (window == row || window + ROW_BYTES == row)
    }
}

/// The content of a linked block.
#[derive(Clone, Copy)]
pub(super) struct BlockContent {
    pub(super) key_bytes: u64,
    pub(super) value_bytes: u64,
    pub(super) superseded: bool,
    hash: KeyHash,
}

impl<F: Fabric> Walk<'_, F> {
    /// Visits the slots of the subtable that was read last.
    pub(super) async fn visit_subtable(
        &mut self,
        subtable: Subtable,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        self.report.subtables += 1;
        if self.row(0)?.header.forward().is_some() {
            self.report.subtables_splitting += 1;
        }
        for row in 0..ROWS_PER_SUBTABLE {
            for (n, slot) in self.row(row)?.slots.into_iter().enumerate() {
                let offset = subtable.offset + slot_in_subtable(row, n);
                let location = SlotLocation { subtable, row, offset };
                self.visit_slot(location, slot, observer).await?;
            }
        }
        Ok(())
    }

    async fn visit_slot(
        &mut self,
        location: SlotLocation,
        mut slot: Slot,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        for _ in 0..REREADS_MAX {
            let word = slot.word();
            let problem = match self.examine(location, slot).await? {
                Ok(None) => {
                    self.report.count_slot(word.state());
                    return Ok(());
                }
                Ok(Some((block, content))) => {
                    self.report.count_slot(word.state());
                    self.report.count_key(block);
                    observer.linked(block);
                    let linked = LinkedSlot { word, offset: location.offset };
                    self.linked.push(linked);
                    return self.count_key(linked, content).await;
                }
                Err(problem) => problem,
            };
            // If the slot has not changed, the problem is real: see the documentation of `check`.
            let reread = self.reads.slot(location.offset).await?;
            let block = word.block().ok();
            let chunk = block.and_then(|block| self.geometry.chunk_of(block.address.offset()));
            if reread == slot && !self.reload_chunk(chunk).await? {
                self.report.count_slot(word.state());
                self.report.add_problem(problem);
                return Ok(());
            }
            slot = reread;
        }
        self.report.count_slot(slot.word().state());
        self.report.unsettled += 1;
        Ok(())
    }

    /// Counts a key, and checks that no other slot holds it too.
    async fn count_key(
        &mut self,
        linked: LinkedSlot,
        content: Option<BlockContent>,
    ) -> Result<(), CheckError> {
        let Some(content) = content else { return Ok(()) };
        self.report.count_content(&content);
        // The key of a FROZEN slot may be LIVE in another subtable already.
        if linked.word.state() != SlotState::Live {
            return Ok(());
        }
        if let Some(other) = self.keys.insert(content.hash, linked)
            && self.are_unchanged(other, linked).await?
        {
            let (first, second) = (other.offset, linked.offset);
            self.report.add_problem(Problem::KeyTwice { first, second });
        }
        Ok(())
    }

    /// Checks a slot. Returns the block that it links, if any, and the block's content, if the
    /// scope includes blocks.
    async fn examine(
        &self,
        location: SlotLocation,
        slot: Slot,
    ) -> Result<Result<Option<(BlockRef, Option<BlockContent>)>, Problem>, CheckError> {
        let word = slot.word();
        let offset = location.offset;
        if word.state() == SlotState::Empty && word != word.emptied() {
            return Ok(Err(Problem::EmptyWord { offset, bits: word.bits() }));
        }
        if !links_block(word.state()) {
            return Ok(Ok(None));
        }
        let block = match self.block_of(offset, word) {
            Ok(block) => block,
            Err(problem) => return Ok(Err(problem)),
        };
        if self.scope == Scope::Index {
            return Ok(Ok(Some((block, None))));
        }
        let bytes = block.class.block_bytes();
        self.reads.read(block.address.offset(), Buffer::ReadBlock, bytes).await?;
        Ok(self.check_block(location, slot, block).map(|content| Some((block, Some(content)))))
    }

    /// Returns the block that a slot leads to, if a block of its class can start there.
    fn block_of(&self, offset: u64, word: SlotWord) -> Result<BlockRef, Problem> {
        let invalid = |error| Problem::SlotBlock { offset, error };
        let block = word.block().map_err(invalid)?;
        self.geometry.check_block(block).map_err(invalid)?;
        let (start, bytes) = (block.address.offset(), block.class.block_bytes());
        let chunk = self.geometry.chunk_of(start);
        let chunk_use = chunk.and_then(|chunk| self.chunk_use(chunk).ok());
        if chunk_use != Some(ChunkUse::Blocks(block.class)) {
            return Err(Problem::BlockChunk { offset, block: start, bytes });
        }
        let chunk_start = chunk.and_then(|chunk| self.geometry.chunk_offset(chunk)).unwrap_or(0);
        let within = start - chunk_start;
        if within.is_multiple_of(bytes) && within / bytes < block.class.blocks_per_span() {
            Ok(block)
        } else {
            Err(Problem::BlockStride { offset, block: start, bytes })
        }
    }

    /// Checks that the slot links the block that was read last. Returns the content of the block.
    fn check_block(
        &self,
        location: SlotLocation,
        slot: Slot,
        linked: BlockRef,
    ) -> Result<BlockContent, Problem> {
        let offset = location.offset;
        let buffer = self.reads.endpoint.buffer(self.reads.lane, Buffer::ReadBlock);
        let bytes = linked.class.block_bytes() as usize;
        let bytes = &buffer[..bytes.min(buffer.len())];
        let block = Block::decode(bytes, linked.address)
            .map_err(|error| Problem::Block { offset, error })?;
        let header = block.header_word();
        let (expected, generation) = (linked.generation_low, header.generation);
        if !linked.has_generation(generation) {
            let block = linked.address.offset();
            return Err(Problem::Generation { offset, block, expected, generation });
        }
        let hash = self.hasher.hash(block.key());
        if hash.fingerprint() != slot.word().fingerprint() {
            return Err(Problem::Fingerprint { offset });
        }
        if !location.is_in_window_of(hash) {
            return Err(Problem::Window { offset });
        }
        if slot.hint() != hash.hint(slot.word().incarnation()) {
            return Err(Problem::Hint { offset });
        }
        Ok(BlockContent {
            key_bytes: block.key().len() as u64,
            value_bytes: block.value().len() as u64,
            superseded: header.mark.is_set(),
            hash,
        })
    }
}
