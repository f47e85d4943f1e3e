//! The server's depot, which is production code. It answers at once, with one block for each
//! request, so that blocks go from client to client.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockRef, CHUNK_BYTES, ChunkEntry, ChunkUse, FreeBlock, HeaderWord, SizeClass,
};
use farside_server::depot::{Depot, DepotOptions, RegionAccess};

use crate::memory::mix;
use crate::mutant::Mutant;
use crate::region::{GRACE_MS, SimRegion};
use crate::world::World;

/// The process number of the server's processor.
const SERVER: usize = 15;
const GRACE_NS: Nanos = GRACE_MS as Nanos * 1_000_000;

pub(crate) struct SimDepot {
    depot: Depot,
    /// The chunk table, which no client reads.
    entries: RefCell<HashMap<u32, ChunkEntry>>,
    mutant: Option<Mutant>,
    /// The offsets of the depot's chunk.
    chunk: Range<u64>,
    /// A hash of all requests, answers and returned blocks.
    pub(crate) state: u64,
}

/// The server's access to the chunk table and to block headers.
struct WorldMemory<'w> {
    entries: &'w RefCell<HashMap<u32, ChunkEntry>>,
    world: &'w RefCell<World>,
    mutant: Option<Mutant>,
}

impl RegionAccess for WorldMemory<'_> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        let entry = self.entries.borrow().get(&chunk).copied();
        Ok(entry.unwrap_or(ChunkEntry::new(ChunkUse::Free)))
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.entries.borrow_mut().insert(chunk, entry);
        Ok(())
    }

    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError> {
        let world = &mut *self.world.borrow_mut();
        let Ok(index) = world.memory.index(block.offset(), 8) else {
            return Ok(HeaderWord::from_bits(0));
        };
        world.note_read(SERVER, index);
        Ok(HeaderWord::from_bits(world.memory.load(index)))
    }

    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError> {
        let world = &mut *self.world.borrow_mut();
        let Ok(index) = world.memory.index(block.offset(), 8) else { return Ok(()) };
        if self.mutant == Some(Mutant::HeadersNotWritten) {
            world.note_fired(Mutant::HeadersNotWritten);
        } else {
            world.write(SERVER, index, header.bits());
        }
        Ok(())
    }

    fn clear(&self, _: u32) -> Result<(), ChainError> {
        Ok(())
    }
}

impl SimDepot {
    /// Returns a depot with all blocks of the last chunk except key 0's.
    pub(crate) fn new(region: &SimRegion, mutant: Option<Mutant>, now: Nanos) -> Self {
        let uses = [ChunkUse::Subtables, ChunkUse::Subtables, ChunkUse::Blocks(region.class)];
        let mut options = DepotOptions::new(GRACE_NS, 0);
        if mutant == Some(Mutant::ChunkRestsForGrace) {
            options.chunk_rest = GRACE_NS;
        }
        let mut depot = Depot::new(region.geometry, &uses, options, now);
        depot.note_linked(region.first_block(), now).expect("a block of the depot's");
        let entries =
            (0..).zip(uses).map(|(chunk, chunk_use)| (chunk, ChunkEntry::new(chunk_use))).collect();
        let start = region.first_block().address.claimed_offset() - region.class.block_bytes();
        let entries = RefCell::new(entries);
        Self { depot, entries, mutant, chunk: start..start + CHUNK_BYTES, state: 0 }
    }

    pub(crate) fn take(&mut self, class: SizeClass, world: &RefCell<World>) -> Vec<FreeBlock> {
        let now = world.borrow().now;
        let memory = WorldMemory { entries: &self.entries, world, mutant: self.mutant };
        let blocks = self.depot.take(class, 1, now, &memory).expect("memory does not fail");
        let given = blocks
            .first()
            .map_or(0, |block| u64::from(block.address.0) << 32 | u64::from(block.generation));
        self.state = mix(mix(self.state, u64::from(class.index()) << 56 | now), given);
        if self.mutant == Some(Mutant::ChunkRestsForGrace) && class.index() > 0 && given != 0 {
            world.borrow_mut().note_fired(Mutant::ChunkRestsForGrace);
        }
        blocks
    }

    pub(crate) fn give(
        &mut self,
        (class, rested): (SizeClass, bool),
        mut blocks: Vec<FreeBlock>,
        world: &RefCell<World>,
    ) {
        let now = world.borrow().now;
        // The blocks that clients have at the start are not in the depot's chunk.
        blocks.retain(|block| self.chunk.contains(&block.address.claimed_offset()));
        for block in &blocks {
            self.state = mix(mix(self.state, block.address.0.into()), now << 1 | u64::from(rested));
        }
        let at_once = !rested && !blocks.is_empty() && self.mutant == Some(Mutant::GivenAtOnce);
        if at_once {
            world.borrow_mut().note_fired(Mutant::GivenAtOnce);
        }
        let given = self.depot.give(class, blocks, rested || at_once, now);
        given.expect("blocks that were taken");
    }
}
