//! The walk through the slots of a subtable and the blocks behind them.

use farside_fabric::{Buffer, Fabric};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockRef, ChunkUse, ROW_BYTES, ROWS_PER_SUBTABLE, Slot, SlotState, SlotWord,
    slot_in_subtable,
};

use super::{CheckError, LOOKS_MAX, Linked, Observer, Problem, Scope, Walk, links};

/// A subtable and what leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Subtable {
    pub(super) offset: u64,
    pub(super) prefix: u32,
    pub(super) local_depth: u8,
}

/// Where a slot is.
#[derive(Clone, Copy)]
struct Place {
    subtable: Subtable,
    row: usize,
    offset: u64,
}

impl Place {
    /// Whether a reader of the key with this hash comes by here.
    fn belongs(&self, hash: KeyHash) -> bool {
        let row = self.row as u64 * ROW_BYTES;
        let window = hash.window_offset();
        hash.directory_index(self.subtable.local_depth) == u64::from(self.subtable.prefix)
            && (window == row || window + ROW_BYTES == row)
    }
}

/// What a linked block holds.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) key_bytes: u64,
    pub(super) value_bytes: u64,
    pub(super) superseded: bool,
    hash: KeyHash,
}

impl<F: Fabric> Walk<'_, F> {
    /// Visits the subtable that was read last.
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
                self.visit_slot(Place { subtable, row, offset }, slot, observer).await?;
            }
        }
        Ok(())
    }

    async fn visit_slot(
        &mut self,
        place: Place,
        mut slot: Slot,
        observer: &mut dyn Observer,
    ) -> Result<(), CheckError> {
        for _ in 0..LOOKS_MAX {
            let word = slot.word();
            let problem = match self.examine(place, slot).await? {
                Ok(None) => {
                    self.report.count_slot(word.state());
                    return Ok(());
                }
                Ok(Some((block, entry))) => {
                    self.report.count_slot(word.state());
                    self.report.count_key(block);
                    observer.linked(block);
                    let linked = Linked { word, offset: place.offset };
                    self.linked.push(linked);
                    return self.note_key(linked, entry).await;
                }
                Err(problem) => problem,
            };
            let again = self.reads.slot(place.offset).await?;
            if again == slot && !self.reload_chunk_of(word).await? {
                self.report.count_slot(word.state());
                self.report.add_problem(problem);
                return Ok(());
            }
            slot = again;
        }
        self.report.count_slot(slot.word().state());
        self.report.unsettled += 1;
        Ok(())
    }

    async fn reload_chunk_of(&mut self, word: SlotWord) -> Result<bool, CheckError> {
        let block = word.block().ok();
        let chunk = block.and_then(|block| self.geometry.chunk_of(block.address.offset()));
        self.reload_chunk(chunk).await
    }

    /// Counts a key and sees whether it was there already.
    async fn note_key(&mut self, linked: Linked, entry: Option<Entry>) -> Result<(), CheckError> {
        let Some(entry) = entry else { return Ok(()) };
        self.report.count_entry(&entry);
        if linked.word.state() != SlotState::Live {
            return Ok(());
        }
        if let Some(other) = self.keys.insert(entry.hash, linked)
            && self.both_stand(other, linked).await?
        {
            let (first, second) = (other.offset, linked.offset);
            self.report.add_problem(Problem::KeyTwice { first, second });
        }
        Ok(())
    }

    /// What a slot links, if it links anything; what it holds, if the scope wants to know.
    async fn examine(
        &self,
        place: Place,
        slot: Slot,
    ) -> Result<Result<Option<(BlockRef, Option<Entry>)>, Problem>, CheckError> {
        let word = slot.word();
        let offset = place.offset;
        if word.state() == SlotState::Empty && word != word.emptied() {
            return Ok(Err(Problem::EmptyWord { offset, bits: word.bits() }));
        }
        if !links(word.state()) {
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
        Ok(self.entry_in(place, slot, block).map(|entry| Some((block, Some(entry)))))
    }

    /// The block a slot leads to, if one can start there.
    fn block_of(&self, offset: u64, word: SlotWord) -> Result<BlockRef, Problem> {
        let outside = |error| Problem::SlotBlock { offset, error };
        let block = word.block().map_err(outside)?;
        self.geometry.check_block(block).map_err(outside)?;
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

    /// What the block that was read last holds, if it is the one this slot means.
    fn entry_in(&self, place: Place, slot: Slot, linked: BlockRef) -> Result<Entry, Problem> {
        let offset = place.offset;
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
        if !place.belongs(hash) {
            return Err(Problem::Window { offset });
        }
        if slot.hint() != hash.hint(slot.word().incarnation()) {
            return Err(Problem::Hint { offset });
        }
        Ok(Entry {
            key_bytes: block.key().len() as u64,
            value_bytes: block.value().len() as u64,
            superseded: header.mark.is_set(),
            hash,
        })
    }
}
