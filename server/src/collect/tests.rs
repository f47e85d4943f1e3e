//! Checks that a collection waits for the reports of clients, and that each of its steps is short
//! even if a client dies with all blocks.

use std::cell::Cell;

use farside_config::ServerConfig;
use farside_fabric::boot_time_ns;
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_fabric::wait_timer::WAITED_NS_MAX;
use farside_layout::{BlockRef, ChunkEntry, HeaderWord, SizeClass};

use super::*;
use crate::recovery::{self, RegionTables, ServedRegion};

/// Counts the headers that are read.
struct CountingAccess<'a> {
    tables: RegionTables<'a>,
    headers: Cell<u64>,
}

impl RegionAccess for CountingAccess<'_> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        self.tables.entry(chunk)
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.tables.set_entry(chunk, entry)
    }

    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError> {
        self.headers.set(self.headers.get() + 1);
        self.tables.header(block)
    }

    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError> {
        self.tables.set_header(block, header)
    }

    fn clear(&self, chunk: u32) -> Result<(), ChainError> {
        self.tables.clear(chunk)
    }
}

/// The cost and the result of a collection of all small blocks of a region.
#[derive(Default)]
struct CollectionCost {
    blocks: u64,
    recovered: u64,
    collections: u64,
    reports: u32,
    headers: u64,
    headers_per_step_max: u64,
}

/// Takes every small block of a region for a client that dies, and collects them one step at a
/// time. Checks that each can be taken again.
fn collect_all(collector: &mut Collector) -> CollectionCost {
    let memory = RegionMemory::anonymous(16 << 20, HugePages::Never).unwrap();
    let opened = recovery::open(&memory, &ServerConfig::default()).unwrap();
    let ServedRegion { region, geometry, mut depot, index, .. } = opened;
    let tables = RegionTables { region: &region, geometry: &geometry };
    let memory = CountingAccess { tables, headers: Cell::new(0) };
    let class = SizeClass::for_bytes(64).unwrap();
    let take_all = |depot: &mut Depot, now| {
        let take = |_| depot.take(class, u32::MAX, now, &memory.tables).unwrap().len() as u64;
        (0..).map(take).take_while(|taken| *taken > 0).sum::<u64>()
    };
    let blocks = take_all(&mut depot, 0);
    let mut cost = CollectionCost { blocks, ..Default::default() };
    let now = 5;
    collector.want(now);
    while collector.finished == 0 {
        memory.headers.set(0);
        match collector.step(&mut depot, &index, &memory, now).unwrap() {
            CollectorRequest::Ask { .. } => {
                collector.asked(BTreeSet::new(), now);
                cost.reports += 1;
            }
            step => assert_eq!(step, CollectorRequest::Nothing),
        }
        cost.headers += memory.headers.get();
        cost.headers_per_step_max = cost.headers_per_step_max.max(memory.headers.get());
    }
    cost.recovered = collector.recovered;
    cost.collections = collector.finished;
    let hour = 3_600_000_000_000;
    assert_eq!(take_all(&mut depot, hour), blocks, "all of them can be taken again");
    cost
}

/// The number of headers in a chunk of the smallest blocks.
const CHUNK_HEADERS: u64 = 32_768;

#[test]
fn a_step_reads_a_bounded_number_of_headers() {
    let cost = collect_all(&mut Collector::new(0));
    assert!(cost.blocks >= 5 * CHUNK_HEADERS, "{} blocks", cost.blocks);
    assert_eq!((cost.recovered, cost.collections, cost.reports), (cost.blocks, 1, 2));
    assert_eq!(cost.headers, 2 * cost.blocks);
    let headers_max = HEADERS_PER_STEP as u64 + CHUNK_HEADERS;
    assert!(cost.headers_per_step_max <= headers_max, "{} in one step", cost.headers_per_step_max);
}

#[test]
fn suspects_beyond_the_limit_on_noted_headers_take_another_pass() {
    let mut collector = Collector { noted_max: 1, ..Collector::new(0) };
    let cost = collect_all(&mut collector);
    assert_eq!((cost.recovered, cost.collections), (cost.blocks, 1));
    // One pass for each chunk of blocks, and one for the chunks after them, which have none.
    let passes = cost.blocks / CHUNK_HEADERS;
    assert!((2 * passes..=2 * passes + 2).contains(&cost.reports.into()), "{}", cost.reports);
    assert_eq!(collector.noted.capacity(), 0);
}

#[test]
fn a_server_that_was_stopped_itself_disconnects_no_client() {
    let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
    let opened = recovery::open(&memory, &ServerConfig::default()).unwrap();
    let ServedRegion { region, geometry, mut depot, index, .. } = opened;
    let memory = RegionTables { region: &region, geometry: &geometry };
    let mut collector = Collector::new(0);
    let mut now = boot_time_ns();
    let mut step =
        |collector: &mut Collector, now| collector.step(&mut depot, &index, &memory, now).unwrap();
    collector.want(now);
    while !matches!(step(&mut collector, now), CollectorRequest::Ask { .. }) {}
    collector.asked(BTreeSet::from([7, 8]), now);
    // The server is stopped for an hour before each step.
    for _ in 1..REPORT_NS_MAX / WAITED_NS_MAX {
        assert_eq!(collector.next_step_at(true), Some(now + WAITED_NS_MAX));
        now += 3_600_000_000_000;
        assert_eq!(step(&mut collector, now), CollectorRequest::Nothing);
    }
    collector.answered(8);
    now += WAITED_NS_MAX;
    assert_eq!(step(&mut collector, now), CollectorRequest::Disconnect(vec![7]));
}
