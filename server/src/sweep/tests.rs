//! That a step of the sweeper reads a bounded number of bytes, whatever the words of a client that
//! is gone lead to. Guards against words that all lead to one large block.

use farside_config::ServerConfig;
use farside_fabric::boot_time_ns;
use farside_fabric::shm::{HugePages, RegionMemory};
use farside_layout::{
    BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, BlockAddress, BlockRef, BlockStamp, SizeClass, SlotState,
    SlotWord, seal,
};
use zerocopy::IntoBytes;

use super::*;
use crate::index::SubtableImage;
use crate::recovery::{self, Opened};

const GONE: u16 = 7;
const WORDS: usize = 40;

/// How many steps it takes to sweep after a client that is gone, where so many words of unfinished
/// INSERTs lead to a block of 4 MiB by this writer; and how many words are left.
fn sweep(writer: u16) -> (usize, usize) {
    let memory = RegionMemory::anonymous(16 << 20, HugePages::Never).unwrap();
    let Opened { region, geometry, index, .. } =
        recovery::open(&memory, &ServerConfig::default()).unwrap();
    let class = SizeClass::for_bytes(BLOCK_BYTES_MAX).unwrap();
    let address = BlockAddress::from_offset(geometry.chunk_offset(2).unwrap()).unwrap();
    let stamp = BlockStamp { address, generation: 1, writer, written_at_ms: 1, expires_at_ms: 0 };
    let mut image = vec![0u64; (BLOCK_BYTES_MAX / 8) as usize];
    let value_bytes = BLOCK_BYTES_MAX - BLOCK_HEADER_BYTES - 1;
    seal(image.as_mut_bytes(), 1, value_bytes as u32, stamp).unwrap();
    region.write(address.offset(), &image).unwrap();
    let word = SlotWord::empty(0).pending(9, BlockRef { address, class, generation_low: 1 });
    let subtable = || SubtableImage::read(&region, index.places[0]).unwrap();
    for (slot, _) in subtable().slots().take(WORDS) {
        region.store(slot, word.bits()).unwrap();
    }
    let own = OwnEndpoint::over_memory(&region);
    let mut sweeper = Sweeper::default();
    sweeper.add(GONE, 0, 0);
    let mut steps = 0;
    while !sweeper.is_done() {
        sweeper.step(&index, &own, boot_time_ns()).unwrap();
        steps += 1;
    }
    let left =
        subtable().slots().filter(|(_, slot)| slot.word().state() == SlotState::Pending).count();
    (steps, left)
}

#[test]
fn a_step_reads_no_more_than_two_large_blocks() {
    assert_eq!(sweep(GONE), (WORDS / 2 + 1, 0));
}

#[test]
fn of_a_block_that_is_anothers_only_the_header_is_read() {
    assert_eq!(sweep(GONE + 1), (1, WORDS));
}
