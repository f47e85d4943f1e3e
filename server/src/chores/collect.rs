//! Finds lost blocks while clients run: the blocks that a dead client held, and the blocks that its
//! last operation was about to link or had unlinked.
//!
//! `docs/protocol.md` ("Lost blocks") proves step by step that no block in use is taken for a lost
//! one.

use std::collections::BTreeSet;

use farside_fabric::wait_timer::WaitTimer;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{SlotState, SlotWord};

use crate::chores::depot::{Depot, NotedSuspects, RegionAccess};
use crate::region::content::Budget;
use crate::region::content::for_each_extent;
use crate::region::index::Cursor;
use crate::region::index::Index;

/// How many subtables a step reads, 2 MiB. More would let clients wait longer for answers.
const SUBTABLES_PER_STEP: usize = 256;
/// How many block headers a step reads. The step completes the chunk in which it reaches this
/// number.
const HEADERS_PER_STEP: usize = 1 << 14;
/// In how many chunks a step turns blocks into suspects, or clears all suspicions.
const CHUNKS_PER_STEP: u32 = 2048;
/// A chunk without suspects costs a step as much as this many headers.
const HEADERS_PER_CHUNK: usize = 64;
/// How many headers a pass notes, 32 MiB of them. The pass completes the chunk in which it reaches
/// this number. If there are more suspects, the collection takes another pass for the later chunks.
const NOTED_MAX: usize = 1 << 22;
/// How long a client may take to report the blocks that it holds. Then the server fences the
/// client.
pub(crate) const REPORT_NS_MAX: Nanos = 5_000_000_000;
/// Pause between the loss of a client and a collection. Clients that are lost meanwhile share it.
const DEBOUNCE_NS: Nanos = 100_000_000;
/// How long a collection waits at most for the sweep of the slots of lost clients.
const SWEEP_NS: Nanos = 2_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    /// Turns the blocks that the depot does not have into suspects.
    Suspect,
    /// Walks the index to reduce the number of suspects. The proof does not need this walk.
    Filter,
    /// Notes the headers of the suspects.
    Note,
    /// Waits for the first reports of clients.
    FirstReport,
    /// Waits until no verb of a lost client can take effect any more.
    FenceDelay,
    /// Walks the index to clear the suspects that are linked.
    Walk,
    /// Waits for the second reports of clients.
    SecondReport,
    /// Waits again as in `FenceDelay`. Then gives the remaining suspects to the depot.
    Finish,
    /// Clears all suspicions in the chunks of this pass.
    ClearSuspicions,
}

/// A request of the collector to the service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CollectorRequest {
    Nothing,
    /// Ask every writer for a report with this number, then call [`Collector::asked`].
    Ask {
        collection: u32,
    },
    /// Disconnect these connections, whose clients did not report in time.
    Disconnect(Vec<u64>),
}

/// Runs collections, one step at a time.
pub(crate) struct Collector {
    stage: Stage,
    /// When the next collection may begin, and when it was first requested.
    wanted: Option<(Nanos, Nanos)>,
    number: u32,
    /// The number of finished collections.
    pub(crate) finished: u64,
    /// The number of lost blocks that finished collections have found.
    pub(crate) recovered: u64,
    /// The numbers of the connections whose reports are not complete.
    awaiting: BTreeSet<u64>,
    /// The wait for their reports.
    waiting: WaitTimer,
    cursor: Cursor,
    /// The chunk with which the stage continues.
    next_chunk: u32,
    /// The chunks of this pass: from `first_chunk` up to, but without `end_chunk`.
    first_chunk: u32,
    end_chunk: u32,
    noted: Vec<NotedSuspects>,
    /// The number of headers in `noted`, and the limit on it.
    noted_count: usize,
    noted_max: usize,
    /// How many lost blocks the present collection has found.
    found: u64,
    /// How long the verbs of a client can still take effect after it was fenced.
    fence_delay_ns: Nanos,
    fence_holds_at: Nanos,
}

impl Collector {
    pub(crate) fn new(fence_delay_ns: Nanos) -> Self {
        Self {
            stage: Stage::Idle,
            wanted: None,
            number: 0,
            finished: 0,
            recovered: 0,
            awaiting: BTreeSet::new(),
            waiting: WaitTimer::since(0),
            cursor: Cursor::default(),
            next_chunk: 0,
            first_chunk: 0,
            end_chunk: 0,
            noted: Vec::new(),
            noted_count: 0,
            noted_max: NOTED_MAX,
            found: 0,
            fence_delay_ns,
            fence_holds_at: 0,
        }
    }

    /// Requests a collection, which begins once the slots of lost clients are cleared.
    pub(crate) fn want(&mut self, now: Nanos) {
        let since = self.wanted.map_or(now, |(_, since)| since);
        self.wanted = Some((now, since));
    }

    /// Notes that a connection ended. `fenced` is true if its client was a writer that was just
    /// fenced.
    pub(crate) fn lost(&mut self, connection_number: u64, fenced: bool, now: Nanos) {
        self.awaiting.remove(&connection_number);
        if fenced {
            self.fence_holds_at = now.saturating_add(self.fence_delay_ns);
            let (_, since) = self.wanted.unwrap_or((now, now));
            self.wanted = Some((now.saturating_add(DEBOUNCE_NS), since));
        }
    }

    /// Returns the value that `finished` will have once a collection that begins after this call
    /// has finished.
    pub(crate) fn next(&self) -> u64 {
        self.finished + if self.stage == Stage::Idle { 1 } else { 2 }
    }

    /// Returns the activity of the current collection, encoded as in `ServerStatistics`.
    pub(crate) fn activity(&self) -> u64 {
        match self.stage {
            Stage::Idle => 0,
            Stage::Suspect | Stage::Filter | Stage::Note | Stage::Walk => 1,
            Stage::FirstReport
            | Stage::FenceDelay
            | Stage::SecondReport
            | Stage::Finish
            | Stage::ClearSuspicions => 2,
        }
    }

    /// Returns when to call [`Collector::step`]; `None` if no collection is wanted. `swept` is true
    /// if the slots of all lost clients are cleared.
    pub(crate) fn next_step_at(&self, swept: bool) -> Option<Nanos> {
        match self.stage {
            Stage::Idle => {
                let (at, since) = self.wanted?;
                let at = if swept { at } else { Nanos::MAX };
                Some(at.min(since.saturating_add(SWEEP_NS)))
            }
            Stage::Suspect | Stage::Filter | Stage::Note | Stage::Walk | Stage::ClearSuspicions => {
                Some(0)
            }
            Stage::FirstReport | Stage::SecondReport if self.awaiting.is_empty() => Some(0),
            Stage::FirstReport | Stage::SecondReport => {
                Some(self.waiting.next_look_at(REPORT_NS_MAX))
            }
            Stage::FenceDelay | Stage::Finish => Some(self.fence_holds_at),
        }
    }

    /// Notes the connections that were asked for a report.
    pub(crate) fn asked(&mut self, connection_numbers: BTreeSet<u64>, now: Nanos) {
        self.awaiting = connection_numbers;
        self.waiting = WaitTimer::since(now);
    }

    /// Whether a report with this number is still awaited from this connection.
    pub(crate) fn is_awaited(&self, connection_number: u64, number: u32) -> bool {
        self.number == number && self.awaiting.contains(&connection_number)
    }

    /// Notes that the report of a client is complete.
    pub(crate) fn answered(&mut self, connection_number: u64) {
        self.awaiting.remove(&connection_number);
    }

    /// Does a step of the current stage, or begins a collection.
    pub(crate) fn step(
        &mut self,
        depot: &mut Depot,
        index: &Index,
        memory: &impl RegionAccess,
        now: Nanos,
    ) -> Result<CollectorRequest, ChainError> {
        match self.stage {
            Stage::Idle => {
                (self.wanted, self.found) = (None, 0);
                self.begin_pass(0);
            }
            Stage::Suspect => {
                let end = self.next_chunk.saturating_add(CHUNKS_PER_STEP);
                depot.suspect(self.next_chunk..end);
                self.next_chunk = end;
                if end >= depot.chunks() {
                    self.enter(Stage::Filter);
                }
            }
            Stage::Filter => {
                if self.walk(depot, index)? {
                    self.enter(Stage::Note);
                }
            }
            Stage::Note => {
                if self.note(depot, memory)? {
                    return Ok(self.ask(Stage::FirstReport));
                }
            }
            Stage::FirstReport | Stage::SecondReport if !self.awaiting.is_empty() => {
                self.waiting.advance(now);
                if self.waiting.waited() >= REPORT_NS_MAX {
                    return Ok(CollectorRequest::Disconnect(
                        self.awaiting.iter().copied().collect(),
                    ));
                }
            }
            Stage::FirstReport => self.enter(Stage::FenceDelay),
            Stage::FenceDelay => self.enter(Stage::Walk),
            Stage::Walk => {
                if self.walk(depot, index)? {
                    return Ok(self.ask(Stage::SecondReport));
                }
            }
            Stage::SecondReport => self.enter(Stage::Finish),
            Stage::Finish => {
                if now >= self.fence_holds_at && self.recover(depot, memory, now)? {
                    self.enter(Stage::ClearSuspicions);
                }
            }
            Stage::ClearSuspicions => {
                let end = self.next_chunk.saturating_add(CHUNKS_PER_STEP);
                depot.clear_suspicions(self.next_chunk..end);
                self.next_chunk = end;
                match end >= depot.chunks() {
                    true if self.end_chunk < depot.chunks() => self.begin_pass(self.end_chunk),
                    true => self.finish(),
                    false => {}
                }
            }
        }
        Ok(CollectorRequest::Nothing)
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.cursor = Cursor::default();
        self.next_chunk = self.first_chunk;
    }

    /// Begins a pass for lost blocks from this chunk on.
    fn begin_pass(&mut self, first_chunk: u32) {
        self.first_chunk = first_chunk;
        self.noted_count = 0;
        self.enter(Stage::Suspect);
    }

    /// Enters a stage that waits for reports.
    fn ask(&mut self, stage: Stage) -> CollectorRequest {
        self.enter(stage);
        self.number = self.number.wrapping_add(1);
        CollectorRequest::Ask { collection: self.number }
    }

    /// Clears the suspicions of linked blocks. Returns whether the walk is over.
    fn walk(&mut self, depot: &mut Depot, index: &Index) -> Result<bool, ChainError> {
        let mut walk = self.cursor.walk(index, Budget::of_step(SUBTABLES_PER_STEP));
        while let Some((offset, slot)) = walk.next()? {
            clear_linked(depot, (offset, slot.word()), index)?;
        }
        Ok(walk.is_over())
    }

    /// Notes the headers of suspects. Returns true once all are noted, or `noted_max` of them.
    fn note(&mut self, depot: &Depot, memory: &impl RegionAccess) -> Result<bool, ChainError> {
        let mut headers = 0;
        while self.next_chunk < depot.chunks() && self.noted_count < self.noted_max {
            if headers >= HEADERS_PER_STEP {
                return Ok(false);
            }
            let noted = depot.note(self.next_chunk, memory)?;
            let count = noted.as_ref().map_or(0, NotedSuspects::count);
            headers += count + HEADERS_PER_CHUNK;
            self.noted_count += count;
            self.noted.extend(noted);
            self.next_chunk += 1;
        }
        self.end_chunk = self.next_chunk;
        Ok(true)
    }

    /// Gives lost blocks to the depot. Returns true once all noted suspects are checked.
    fn recover(
        &mut self,
        depot: &mut Depot,
        memory: &impl RegionAccess,
        now: Nanos,
    ) -> Result<bool, ChainError> {
        let mut headers = 0;
        while headers < HEADERS_PER_STEP {
            let Some(noted) = self.noted.pop() else { return Ok(true) };
            headers += noted.count();
            self.found += depot.recover(&noted, now, memory)?;
        }
        Ok(false)
    }

    fn finish(&mut self) {
        if self.found > 0 {
            tracing::info!(blocks = self.found, "FS-027 found lost blocks");
        }
        self.noted = Vec::new();
        self.recovered += self.found;
        self.finished += 1;
        self.first_chunk = 0;
        self.enter(Stage::Idle);
    }
}

/// Clears the suspicion on the block that a slot with this word has. A split calls it for the
/// subtables that it has just filled, because the walk may have passed them before.
///
/// The extents of a head are linked with it. If the head was rewritten since the slot was read, its
/// extents have other owners or other generations by now.
pub(crate) fn clear_linked(
    depot: &mut Depot,
    (slot, word): (u64, SlotWord),
    index: &Index,
) -> Result<(), ChainError> {
    use SlotState::{Aborted, Copy, Empty, Frozen, Live, Moved, Pending, Tomb};
    match word.state() {
        // The block is linked, in the middle of a split, or about to be linked.
        Live | Frozen | Copy | Pending | Aborted => {}
        Empty | Moved | Tomb => return Ok(()),
    }
    // By its address, because a block is not lost if the class in its word is damaged.
    if let Ok(named) = word.block() {
        depot.clear_suspicion(named.address);
    }
    let Some(block) = index.block_of(slot, word) else { return Ok(()) };
    for_each_extent(&index.region, block, |_, extent| {
        depot.clear_suspicion(extent.address());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    //! Checks that a collection waits for the reports of clients, and that each of its steps is
    //! short even if a client dies with all blocks.

    use std::cell::Cell;

    use farside_config::ServerConfig;
    use farside_fabric::boot_time_ns;
    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_fabric::wait_timer::WAITED_NS_MAX;
    use farside_layout::{BlockRef, ChunkEntry, HeaderWord, SizeClass};

    use super::*;
    use crate::region::recovery;
    use crate::region::served::{RegionTables, ServedRegion};

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
        assert!(
            cost.headers_per_step_max <= headers_max,
            "{} in one step",
            cost.headers_per_step_max
        );
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
        let mut step = |collector: &mut Collector, now| {
            collector.step(&mut depot, &index, &memory, now).unwrap()
        };
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
}
