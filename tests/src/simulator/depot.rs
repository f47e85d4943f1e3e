//! The server's depot while clients are at work: production code. It answers at once, one block a
//! request, so that blocks find their way from client to client.

use std::cell::RefCell;
use std::ops::Range;

use farside_control::FreeBlock;
use farside_fabric::Nanos;
use farside_layout::{BlockAddress, CHUNK_BYTES, ChunkUse, HeaderWord, SizeClass};
use farside_server::testing::{Headers, TestDepot};

use super::ground::{GRACE_MS, SimRegion};
use super::memory::mix;
use super::twin::Mutant;
use super::world::World;

/// What the server's processor is called among processes.
const SERVER: usize = 15;
const GRACE_NS: Nanos = GRACE_MS as Nanos * 1_000_000;

pub(super) struct SimDepot {
    depot: TestDepot,
    twin: Option<Mutant>,
    /// Where its blocks are.
    chunk: Range<u64>,
    /// A hash of everything that it was asked and given.
    pub(super) state: u64,
}

/// The headers in memory, as the server's processor reads and writes them.
struct WorldHeaders<'w>(&'w RefCell<World>, Option<Mutant>);

impl Headers for WorldHeaders<'_> {
    fn header(&self, address: BlockAddress) -> HeaderWord {
        let world = &mut *self.0.borrow_mut();
        let Ok(place) = world.memory.place(address.offset(), 8) else {
            return HeaderWord::from_bits(0);
        };
        world.note_read(SERVER, place);
        HeaderWord::from_bits(world.memory.load(place))
    }

    fn set_header(&self, address: BlockAddress, header: HeaderWord) {
        let world = &mut *self.0.borrow_mut();
        let Ok(place) = world.memory.place(address.offset(), 8) else { return };
        if self.1 == Some(Mutant::HeadersNotWritten) {
            return world.lied(Mutant::HeadersNotWritten);
        }
        let value = header.bits();
        world.write(SERVER, place, value);
    }
}

impl SimDepot {
    /// All blocks of the last chunk are with it, except key 0's.
    pub(super) fn new(ground: &SimRegion, twin: Option<Mutant>, now: Nanos) -> Self {
        let uses = [ChunkUse::Subtables, ChunkUse::Subtables, ChunkUse::Blocks(ground.class)];
        let rest = (twin == Some(Mutant::ChunkRestsForGrace)).then_some(GRACE_NS);
        let mut depot = TestDepot::new(ground.geometry, &uses, GRACE_NS, rest, now);
        depot.link(ground.first_block(), now);
        let start = ground.first_block().address.offset() - ground.class.block_bytes();
        Self { depot, twin, chunk: start..start + CHUNK_BYTES, state: 0 }
    }

    pub(super) fn take(&mut self, class: SizeClass, world: &RefCell<World>) -> Vec<FreeBlock> {
        let now = world.borrow().now;
        let headers = WorldHeaders(world, self.twin);
        let blocks = self.depot.take(class, 1, now, &headers);
        let given = blocks
            .first()
            .map_or(0, |block| u64::from(block.address.0) << 32 | u64::from(block.generation));
        self.state = mix(mix(self.state, u64::from(class.index()) << 56 | now), given);
        if self.twin == Some(Mutant::ChunkRestsForGrace) && class.index() > 0 && given != 0 {
            world.borrow_mut().lied(Mutant::ChunkRestsForGrace);
        }
        blocks
    }

    pub(super) fn give(
        &mut self,
        (class, rested): (SizeClass, bool),
        mut blocks: Vec<FreeBlock>,
        world: &RefCell<World>,
    ) {
        let now = world.borrow().now;
        // What clients have at the start is no concern of its.
        blocks.retain(|block| self.chunk.contains(&block.address.offset()));
        for block in &blocks {
            self.state = mix(mix(self.state, block.address.0.into()), now << 1 | u64::from(rested));
        }
        let at_once = !rested && !blocks.is_empty() && self.twin == Some(Mutant::GivenAtOnce);
        if at_once {
            world.borrow_mut().lied(Mutant::GivenAtOnce);
        }
        self.depot.give(class, blocks, rested || at_once, now);
    }
}
