//! The walk through the slots of a subtable, and the blocks that they link.

use farside_fabric::{Buffer, Fabric};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockHeader, BlockRef, ChunkUse, ExtentShape, ExtentTable, NamedBlock, ROW_BYTES,
    ROWS_PER_SUBTABLE, Slot, SlotState, extent_data_offset, slot_in_subtable,
};
use zerocopy::FromBytes;

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

/// What a slot links: its block, the block's content if it was READ, and its extents.
type Linked = (BlockRef, Option<BlockContent>, Vec<BlockRef>);

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
                Ok(Some((block, content, extents))) => {
                    self.report.count_slot(word.state());
                    self.report.count_key(block);
                    observer.linked(block);
                    let linked = |block: BlockRef| {
                        let block = block.offset();
                        LinkedSlot { word, offset: location.offset, block }
                    };
                    for extent in extents {
                        self.report.count_extent(extent);
                        observer.linked(extent);
                        self.linked.push(linked(extent));
                    }
                    let linked = linked(block);
                    self.linked.push(linked);
                    return self.count_key(linked, content).await;
                }
                Err(problem) => problem,
            };
            // If the slot has not changed, the problem is real: see the documentation of `check`.
            let reread = self.reads.slot(location.offset).await?;
            let block = word.block().ok();
            let chunk = block.and_then(|block| self.geometry.chunk_of_block(block.address));
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

    /// Checks a slot. Returns what it links, if anything. In the scope of the index, only heads are
    /// READ.
    async fn examine(
        &self,
        location: SlotLocation,
        slot: Slot,
    ) -> Result<Result<Option<Linked>, Problem>, CheckError> {
        let word = slot.word();
        let offset = location.offset;
        let is_moved = word.state() == SlotState::Moved;
        let is_empty = word.state() == SlotState::Empty;
        if is_empty && word != word.emptied() || is_moved && !word.has_moved() {
            return Ok(Err(Problem::EmptyWord { offset, bits: word.bits() }));
        }
        if !links_block(word.state()) {
            return Ok(Ok(None));
        }
        let invalid = |error| Problem::SlotBlock { offset, error };
        let block = word.block().map_err(invalid);
        let block = match block.and_then(|block| self.check_address(offset, block)) {
            Ok(block) => block,
            Err(problem) => return Ok(Err(problem)),
        };
        let is_head = block.class.is_head();
        if self.scope == Scope::Index && !is_head {
            return Ok(Ok(Some((block, None, Vec::new()))));
        }
        let bytes = block.class.block_bytes();
        self.reads.read(block.offset(), Buffer::ReadBlock, bytes).await?;
        let mut content = match self.check_block(location, slot, block) {
            Ok(content) => content,
            Err(problem) => return Ok(Err(problem)),
        };
        let mut extents = Vec::new();
        if is_head {
            match self.check_extents(offset, block, &mut extents).await? {
                Ok(value_bytes) => content.value_bytes = value_bytes,
                Err(problem) => return Ok(Err(problem)),
            }
        }
        let content = (self.scope != Scope::Index).then_some(content);
        Ok(Ok(Some((block, content, extents))))
    }

    /// Checks the extents of the head that was READ last, which the slot at this offset leads to.
    /// Returns the length of the value. In the scope of the index, only the table is checked.
    async fn check_extents(
        &self,
        offset: u64,
        head: BlockRef,
        found: &mut Vec<BlockRef>,
    ) -> Result<Result<u64, Problem>, CheckError> {
        let (key_bytes, table_bytes) = {
            let buffer = self.reads.endpoint.buffer(self.reads.lane, Buffer::ReadBlock);
            match Block::decode(&buffer, head.address) {
                Ok(block) => (block.key().len(), block.value().to_vec()),
                Err(error) => return Ok(Err(Problem::Block { offset, error })),
            }
        };
        let table = match ExtentTable::decode(key_bytes, &table_bytes, ExtentShape::OF_REGIONS) {
            Ok(table) => table,
            Err(error) => return Ok(Err(Problem::ExtentTable { offset, error })),
        };
        for (number, extent) in table.extents.iter().enumerate() {
            let block = match self.check_address(offset, extent.block()) {
                Ok(block) => block,
                Err(problem) => return Ok(Err(problem)),
            };
            found.push(block);
            if self.scope == Scope::Index {
                continue;
            }
            let start = block.offset();
            self.reads.read(start, Buffer::ReadBlock, block.class.block_bytes()).await?;
            let buffer = self.reads.endpoint.buffer(self.reads.lane, Buffer::ReadBlock);
            let header = BlockHeader::ref_from_prefix(&buffer).map(|(header, _)| header);
            let fits = header.is_ok_and(|header| {
                header.is_of_extent(extent, key_bytes)
                    && u64::from(header.value_bytes()) == table.part_bytes(number)
            });
            let from = extent_data_offset(key_bytes) as usize;
            let part_bytes = table.part_bytes(number).next_multiple_of(8) as usize;
            let part = buffer.get(from..from + part_bytes);
            if !fits || !part.is_some_and(|part| extent.has_part(part)) {
                return Ok(Err(Problem::Extent { offset, block: start }));
            }
        }
        Ok(Ok(table.value_bytes))
    }

    /// Checks that a block of its class can start where a slot leads.
    fn check_address(&self, offset: u64, block: NamedBlock) -> Result<BlockRef, Problem> {
        let invalid = |error| Problem::SlotBlock { offset, error };
        let block = self.geometry.check_block(block).map_err(invalid)?;
        let (start, bytes) = (block.offset(), block.class.block_bytes());
        let chunk = self.geometry.chunk_of(start);
        let chunk_use = chunk.and_then(|chunk| self.chunk_use(chunk).ok());
        if chunk_use != Some(ChunkUse::Blocks(block.class)) {
            return Err(Problem::BlockChunk { offset, block: start, bytes });
        }
        Ok(block)
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
            let block = linked.offset();
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
