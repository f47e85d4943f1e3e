//! The depot over headers of the test's, for the simulator of `farside-tests`: production code.
//! Behind the feature `testing`; not a part of the API.

use std::cell::RefCell;
use std::collections::HashMap;

use farside_control::FreeBlock;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockAddress, BlockRef, ChunkEntry, ChunkUse, Geometry, HeaderWord, SizeClass,
};

use crate::depot::{Depot, DepotOptions, Memory};

/// Where the headers of blocks are.
pub trait Headers {
    /// The header word of the block there, or of what may become one.
    fn header(&self, address: BlockAddress) -> HeaderWord;

    /// Makes a header where there was none.
    fn set_header(&self, address: BlockAddress, header: HeaderWord);
}

/// A chunk table of its own, and headers of the test's.
struct Tables<'t, H>(&'t RefCell<HashMap<u32, ChunkEntry>>, &'t H);

impl<H: Headers> Memory for Tables<'_, H> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        let entry = self.0.borrow().get(&chunk).copied();
        Ok(entry.unwrap_or(ChunkEntry::new(ChunkUse::Free)))
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.0.borrow_mut().insert(chunk, entry);
        Ok(())
    }

    fn header(&self, address: BlockAddress) -> Result<HeaderWord, ChainError> {
        Ok(self.1.header(address))
    }

    fn set_header(&self, address: BlockAddress, header: HeaderWord) -> Result<(), ChainError> {
        self.1.set_header(address, header);
        Ok(())
    }

    fn clear(&self, _: u32) -> Result<(), ChainError> {
        Ok(())
    }
}

/// A depot.
pub struct TestDepot {
    depot: Depot,
    entries: RefCell<HashMap<u32, ChunkEntry>>,
}

impl TestDepot {
    /// Of a region whose chunks are used like this. `chunk_rest`: how long a chunk keeps its class,
    /// if not as long as it should.
    pub fn new(
        geometry: Geometry,
        uses: &[ChunkUse],
        grace: Nanos,
        chunk_rest: Option<Nanos>,
        now: Nanos,
    ) -> Self {
        let right = DepotOptions::new(grace, 0);
        let chunk_rest = chunk_rest.unwrap_or(right.chunk_rest);
        let depot = Depot::new(geometry, uses, DepotOptions { chunk_rest, ..right }, now);
        let entries = (0..).zip(uses).map(|(chunk, of)| (chunk, ChunkEntry::new(*of))).collect();
        Self { depot, entries: RefCell::new(entries) }
    }

    /// A slot links this block.
    pub fn link(&mut self, block: BlockRef, now: Nanos) {
        self.depot.link(block, now).expect("a block of the depot's");
    }

    /// Hands out blocks.
    pub fn take(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
        headers: &impl Headers,
    ) -> Vec<FreeBlock> {
        let tables = Tables(&self.entries, headers);
        self.depot.take(class, count, now, &tables).expect("headers do not fail")
    }

    /// Takes blocks back.
    pub fn give(&mut self, class: SizeClass, blocks: Vec<FreeBlock>, rested: bool, now: Nanos) {
        self.depot.give(class, blocks, rested, now).expect("blocks that were taken");
    }
}
