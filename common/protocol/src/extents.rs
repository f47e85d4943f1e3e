//! Values that are longer than a block: writing, reading and retiring their extents.
//!
//! A slot leads to the head, which names the extents (`farside_layout::ExtentTable`). The head is
//! an ordinary block to all operations on slots. What this module adds:
//!
//! - A PUT WRITEs the extents before the head exists, so no reader sees a part of a value.
//! - A GET READs the extents behind their head. The session remembers the tables of the heads that
//!   it has seen, so a GET of a cached location READs head and extents together.
//! - The session that unlinks a head owns its extents (invariant I27). It learns them before the
//!   compare-and-swap, so that the server never takes them for lost. It frees them itself only if
//!   it has written the head, with exactly this table. Otherwise it gives the head to the server,
//!   which compares the extents' headers: a hostile writer may have made a head that names blocks
//!   of other keys.

use farside_fabric::{Buffer, CHAIN_VERBS_MAX, Fabric, Verb};
use farside_layout::{
    Block, BlockHeader, Extent, ExtentTable, FreeBlock, NamedBlock, SizeClass, block_bytes,
};
use zerocopy::FromBytes;

use super::{Operation, OperationError, ProtocolResult, ProvenSlot};

mod direct;
mod read;
mod tables;
mod write;

pub use direct::ReadRange;
pub(crate) use tables::ExtentTables;
pub use write::ExtentWriter;

/// How many lanes a synchronous call uses, whose chains share doorbells.
pub(crate) const LANES_MAX: usize = 8;

/// The verbs of a chain that is being made, and which of them transfer parts of a value.
#[derive(Clone, Copy)]
struct Chain {
    verbs: [Verb; CHAIN_VERBS_MAX],
    count: usize,
    /// The extent of the first part, and the number of parts.
    first: usize,
    parts: usize,
}

impl Chain {
    const EMPTY: Self = {
        let verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };
        Self { verbs: [verb; _], count: 0, first: 0, parts: 0 }
    };

    fn has_room(&self, verbs: usize) -> bool {
        self.count + verbs <= self.verbs.len()
    }

    fn push(&mut self, verb: Verb) {
        self.verbs[self.count] = verb;
        self.count += 1;
    }

    fn verbs(&self) -> &[Verb] {
        &self.verbs[..self.count]
    }
}

/// Divides a part that is in the caller's memory: the whole words, and the bytes after them. These
/// go by a buffer of the lane, because verbs transfer whole words.
fn split_at_word(bytes: u64, buffer: Buffer) -> (u64, u64) {
    let rest = if buffer == Buffer::Lent { bytes % 8 } else { 0 };
    (bytes - rest, rest)
}

impl<F: Fabric> Operation<'_, F> {
    /// Notes that the lane's new head, whose image begins at this offset of [`Buffer::NewBlock`],
    /// is linked.
    #[cold]
    pub(crate) fn note_own_head(&self, head: FreeBlock, at: usize) {
        let fabric = self.engine.endpoint.fabric();
        let image = fabric.buffer(self.lane, Buffer::NewBlock).get(at..).unwrap_or_default();
        let start = block_bytes(self.key_bytes, 0) as usize;
        let Ok((header, _)) = BlockHeader::ref_from_prefix(image) else { return };
        let table = image.get(start..header.block_bytes() as usize).unwrap_or_default();
        let table = ExtentTable::decode(self.key_bytes, table, self.region.extent_shape);
        if let Ok(table) = table {
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.note_own((head.address, head.generation), &table);
        }
    }

    /// Frees the head that the lane has just unlinked, and its extents.
    pub(crate) fn free_old_head(&self, head: NamedBlock) {
        let is_own = self.region.extent_tables.borrow().is_own(self.lane, head.address);
        let mut allocator = self.region.allocator();
        if is_own {
            allocator.retire_old_extents(self.lane, self.now());
        } else {
            allocator.give_old_head(self.lane, head.class, head.address);
        }
    }

    /// Notes the extents of the head that a swing of this target is about to unlink. They are held
    /// before the compare-and-swap, because from then on nothing else leads to them. Returns the
    /// target with what was learnt. One round trip, unless the session knows the head's table.
    ///
    /// The extents of a damaged head stay unknown: the server finds them once they are unlinked.
    pub(crate) async fn hold_old_extents(&self, target: &ProvenSlot) -> ProtocolResult<ProvenSlot> {
        let head = self.region.geometry.block_of(target.word)?;
        let is_known = target.generation.is_some_and(|generation| {
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.recall(self.lane, head.address, generation)
        });
        let mut target = *target;
        if !is_known {
            self.read_block(head).await?;
            let fabric = self.engine.endpoint.fabric();
            let buffer = fabric.buffer(self.lane, Buffer::ReadBlock);
            let bytes = &buffer[..head.class.block_bytes() as usize];
            let Some(block) = Block::of_key(bytes, head, self.key_in(&fabric)) else {
                return Ok(target);
            };
            let Ok(table) = ExtentTable::of(&block, self.region.extent_shape) else {
                return Ok(target);
            };
            let generation = block.header_word().generation;
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.learn(self.lane, (head.address, generation), &table);
            target.generation = Some(generation);
            target.expires_at_ms = Some(block.expires_at_ms());
        }
        let mut tables = self.region.extent_tables.borrow_mut();
        let extents = tables.lane(self.lane).extents.iter().map(Extent::unlinked);
        self.region.allocator().hold_old_extents(self.lane, extents);
        Ok(target)
    }

    /// The class of the block to which a slot leads, for the key and a value of this length.
    pub(crate) fn class_in_slot(&self, value_bytes: usize) -> ProtocolResult<SizeClass> {
        let class = self.region.extent_shape.class_in_slot(self.key_bytes, value_bytes);
        class.ok_or_else(|| {
            let (bytes, max) = (value_bytes, self.region.format.value_bytes_max as usize);
            OperationError::ValueTooLong { bytes, max }.into()
        })
    }
}
