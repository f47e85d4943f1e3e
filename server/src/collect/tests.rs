//! That a collection waits for its clients, and that each of its steps is short, whatever a client
//! left behind.

use std::cell::Cell;

use farside_config::ServerConfig;
use farside_fabric::boot_time_ns;
use farside_fabric::shm::{HugePages, RegionMemory};
use farside_fabric::waiting::WAITED_NS_MAX;
use farside_layout::{BlockAddress, ChunkEntry, HeaderWord, SizeClass};

use super::*;
use crate::recovery::{self, Opened, RegionTables};

/// Counts the headers that are looked at.
struct Counting<'a> {
    tables: RegionTables<'a>,
    headers: Cell<u64>,
}

impl RegionAccess for Counting<'_> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        self.tables.entry(chunk)
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.tables.set_entry(chunk, entry)
    }

    fn header(&self, address: BlockAddress) -> Result<HeaderWord, ChainError> {
        self.headers.set(self.headers.get() + 1);
        self.tables.header(address)
    }

    fn set_header(&self, address: BlockAddress, header: HeaderWord) -> Result<(), ChainError> {
        self.tables.set_header(address, header)
    }

    fn clear(&self, chunk: u32) -> Result<(), ChainError> {
        self.tables.clear(chunk)
    }
}

/// What collecting all small blocks of a region took.
struct Taken {
    blocks: u64,
    recovered: u64,
    collections: u64,
    reports: u32,
    headers: u64,
    headers_per_step_max: u64,
}

/// Has a client take every small block of a region and leave; collects them, a step at a time, and
/// sees that each can be taken again.
fn collect_all(collector: &mut Collector) -> Taken {
    let memory = RegionMemory::anonymous(16 << 20, HugePages::Never).unwrap();
    let opened = recovery::open(&memory, &ServerConfig::default()).unwrap();
    let Opened { region, geometry, mut depot, index, .. } = opened;
    let tables = RegionTables { region: &region, geometry: &geometry };
    let memory = Counting { tables, headers: Cell::new(0) };
    let class = SizeClass::for_bytes(64).unwrap();
    let take_all = |depot: &mut Depot, now| {
        let take = |_| depot.take(class, u32::MAX, now, &memory.tables).unwrap().len() as u64;
        (0..).map(take).take_while(|taken| *taken > 0).sum::<u64>()
    };
    let blocks = take_all(&mut depot, 0);
    let mut taken = Taken {
        blocks,
        recovered: 0,
        collections: 0,
        reports: 0,
        headers: 0,
        headers_per_step_max: 0,
    };
    collector.want(5);
    while collector.finished() == 0 {
        memory.headers.set(0);
        match collector.step(&mut depot, &index, &memory, 5).unwrap() {
            Step::Ask { .. } => {
                collector.asked(BTreeSet::new(), 5);
                taken.reports += 1;
            }
            step => assert_eq!(step, Step::Nothing),
        }
        taken.headers += memory.headers.get();
        taken.headers_per_step_max = taken.headers_per_step_max.max(memory.headers.get());
    }
    taken.recovered = collector.recovered();
    taken.collections = collector.finished();
    let hour = 3_600_000_000_000;
    assert_eq!(take_all(&mut depot, hour), blocks, "all of them can be had again");
    taken
}

/// Headers of a chunk full of the smallest blocks.
const CHUNK_HEADERS: u64 = 32_768;

#[test]
fn a_step_looks_at_a_bounded_number_of_headers() {
    let taken = collect_all(&mut Collector::new(0));
    assert!(taken.blocks >= 5 * CHUNK_HEADERS, "{} blocks", taken.blocks);
    assert_eq!((taken.recovered, taken.collections, taken.reports), (taken.blocks, 1, 2));
    assert_eq!(taken.headers, 2 * taken.blocks);
    let most = (1 << 14) + CHUNK_HEADERS;
    assert!(taken.headers_per_step_max <= most, "{} in one step", taken.headers_per_step_max);
}

#[test]
fn what_may_not_be_noted_at_a_time_takes_another_pass() {
    let mut collector = Collector { noted_max: 1, ..Collector::new(0) };
    let taken = collect_all(&mut collector);
    assert_eq!((taken.recovered, taken.collections), (taken.blocks, 1));
    // One chunk of blocks a pass, and one for those at the end that has none.
    let passes = taken.blocks / CHUNK_HEADERS;
    assert!((2 * passes..=2 * passes + 2).contains(&taken.reports.into()), "{}", taken.reports);
    assert_eq!(collector.noted.capacity(), 0);
}

#[test]
fn a_server_that_was_stopped_itself_disconnects_no_client() {
    let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
    let opened = recovery::open(&memory, &ServerConfig::default()).unwrap();
    let Opened { region, geometry, mut depot, index, .. } = opened;
    let memory = RegionTables { region: &region, geometry: &geometry };
    let mut collector = Collector::new(0);
    let mut now = boot_time_ns();
    let mut step =
        |collector: &mut Collector, now| collector.step(&mut depot, &index, &memory, now).unwrap();
    collector.want(now);
    while !matches!(step(&mut collector, now), Step::Ask { .. }) {}
    collector.asked(BTreeSet::from([7, 8]), now);
    // Stopped for an hour at a time.
    for _ in 1..ANSWER_NS / WAITED_NS_MAX {
        assert_eq!(collector.next_step_at(true), Some(now + WAITED_NS_MAX));
        now += 3_600_000_000_000;
        assert_eq!(step(&mut collector, now), Step::Nothing);
    }
    collector.answered(8);
    now += WAITED_NS_MAX;
    assert_eq!(step(&mut collector, now), Step::Disconnect(vec![7]));
}
