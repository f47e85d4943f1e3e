//! The serving thread's work on the region: it serves requests for memory, and does the chores: it
//! sweeps, removes expired values and collects lost blocks. It also decides when to recall blocks,
//! and what to log of the memory in use.
//!
//! Each kind of memory has recalls of its own: each class of blocks, and chunks for the index. A
//! client whose request found no memory of one kind cannot use memory of another kind.

use farside_config::ServerConfig;
use farside_control::{FreeBlock, Role, ServerMessage, ServerStatistics, SplitOutcome};
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::{BlockAddress, Format, NamedBlock, SizeClass, block_bytes};

use crate::chores::collect::{Collector, CollectorRequest};
use crate::chores::depot::{BlockError, ReturnCounts};
use crate::chores::eviction::{Evictor, Tools};
use crate::chores::expiry::{Reaper, RemovedBlock};
use crate::chores::sweep::Sweeper;
use crate::region::content::{BlockReader, for_each_owned_extent};
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::served::{RegionTables, ServedRegion};

/// How long readers get the same figures of the depot, so that their requests cost little time.
const FIGURES_AGE_NS_MAX: Nanos = 100_000_000;

/// The requests that eviction sends to clients.
#[derive(Clone, Copy, Default)]
pub(crate) struct Questions {
    /// Ask all writers for the blocks that they do not need.
    pub(crate) recall: bool,
    /// Ask all clients what they have read.
    pub(crate) reads: bool,
}

/// The region and its chores.
pub(crate) struct RegionKeeper {
    pub(crate) opened: ServedRegion,
    own: OwnEndpoint,
    recalls: Recalls,
    sweeper: Sweeper,
    pub(crate) collector: Collector,
    pub(crate) reaper: Reaper,
    /// `None` unless the region is a cache.
    evictor: Option<Evictor>,
    /// For how long eviction runs before the other chores have their next turn: as long as they had
    /// in the last one, if there is so much to evict. A step of expiry may take 2 ms.
    lead_ns: Nanos,
    memory_level: MemoryLevel,
    /// The number of splits when the log said that the index cannot grow. `None` if it can.
    stuck_at_splits: Option<u64>,
    statistics: ServerStatistics,
    /// When the depot's figures in `statistics` were counted, which takes a walk over all chunks.
    /// `None` once a request or a chore may have changed them.
    figures_at: Option<Nanos>,
}

impl RegionKeeper {
    pub(crate) fn new(config: &ServerConfig, mut opened: ServedRegion, own: OwnEndpoint) -> Self {
        if config.evict {
            let Format { key_bytes_max, value_bytes_max, .. } = opened.format;
            let bytes = block_bytes(key_bytes_max as usize, value_bytes_max as usize);
            let largest = SizeClass::for_bytes(bytes).unwrap_or(SizeClass::LARGEST_OF_VALUES);
            opened.depot.keep_reserve(largest);
        }
        let grace = opened.format.grace_ns();
        let reader = || BlockReader::new(&opened.region, &opened.format);
        Self {
            recalls: Recalls::new(),
            sweeper: Sweeper::default(),
            collector: Collector::new(own.fence_delay_ns()),
            reaper: Reaper::new(reader(), (grace, own.proof_age_max_ns(grace)), opened.is_new),
            evictor: config
                .evict
                .then(|| Evictor::new(reader(), (grace, own.proof_age_max_ns(grace)))),
            lead_ns: 0,
            memory_level: MemoryLevel::default(),
            stuck_at_splits: None,
            statistics: ServerStatistics {
                incarnation: opened.incarnation,
                chunks: opened.geometry.chunks().into(),
                ..Default::default()
            },
            figures_at: None,
            opened,
            own,
        }
    }

    /// Takes blocks for a client. Returns the answer, and whether to send a recall to all writers.
    pub(crate) fn take_blocks(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
    ) -> Result<(ServerMessage, bool), ChainError> {
        self.figures_at = None;
        let blocks = self.opened.take_blocks(class, count, now)?;
        if let Some(evictor) = self.evictor.as_mut().filter(|_| count > 0) {
            evictor.note_request(class, (count, blocks.len()), &self.opened.depot, now);
        }
        self.statistics.blocks_taken += blocks.len() as u64;
        if count == 0 || !blocks.is_empty() {
            return Ok((ServerMessage::Blocks { class, rested: true, soon: false, blocks }, false));
        }
        if let Some(larger) = self.larger_class(class, true) {
            return Ok((ServerMessage::Larger { class, larger }, false));
        }
        let evicts = self.evict_for(class)?;
        let begins_recall = !evicts && self.begin_recall(Some(class), now);
        let soon =
            evicts || self.recalls.is_recent(class, now) || self.opened.has_block_soon(class, now);
        if !soon && let Some(larger) = self.larger_class(class, false) {
            return Ok((ServerMessage::Larger { class, larger }, begins_recall));
        }
        self.statistics.requests_denied += u64::from(!soon);
        let is_full = |evictor: &Evictor| evictor.is_full_of_pins(class, &self.opened.depot);
        if !soon && self.evictor.as_ref().is_some_and(is_full) {
            return Ok((ServerMessage::AllPinned { class }, begins_recall));
        }
        if let Some(at) = self.opened.depot.chunk_free_at().filter(|_| !soon) {
            let in_ms = (at.saturating_sub(now) / 1_000_000).try_into().unwrap_or(u32::MAX);
            return Ok((ServerMessage::RoomLater { class, in_ms }, begins_recall));
        }
        Ok((ServerMessage::Blocks { class, rested: true, soon, blocks }, begins_recall))
    }

    /// Returns the class whose blocks to take for a value of this class, of which a cache has none:
    /// the next larger one with keys that can go, or the one of last resort. There may be more
    /// classes in use than chunks, and a chunk needs long to change its class. With `at_once` only
    /// for a class without any span.
    fn larger_class(&self, class: SizeClass, at_once: bool) -> Option<SizeClass> {
        let (evictor, depot) = (self.evictor.as_ref()?, &self.opened.depot);
        if class > SizeClass::LARGEST_OF_VALUES || at_once && !depot.spans(class).is_empty() {
            return None;
        }
        let has_room = |larger: &SizeClass| {
            let has_keys = depot.blocks_lasting(*larger) > 0;
            has_keys && !evictor.is_full_of_pins(*larger, depot)
                || depot.is_last_resort(*larger) && depot.blocks_to_give(*larger).0 > 0
        };
        SizeClass::of_values().filter(|larger| class < *larger).find(has_room)
    }

    /// Evicts a first few keys for a request that found no blocks, if the region is a cache.
    /// Returns whether evicted blocks rest, or will soon, so that the client will get some.
    fn evict_for(&mut self, class: SizeClass) -> Result<bool, ChainError> {
        let Some(evictor) = &mut self.evictor else { return Ok(false) };
        let ServedRegion { index, depot, .. } = &mut self.opened;
        let (own, reaper) = (&self.own, &mut self.reaper);
        let evicted = evictor.make_room_at_once(class, &mut Tools { index, own, reaper, depot })?;
        self.statistics.blocks_returned += evicted as u64;
        let is_searching = evictor.is_searching(class, self.own.now());
        Ok(is_searching || self.opened.depot.blocks_to_give(class).1 > 0)
    }

    /// Evicts keys ahead of demand. Returns the requests to clients that this takes.
    fn evict(&mut self, now: Nanos) -> Result<Questions, ChainError> {
        let Some(evictor) = &mut self.evictor else { return Ok(Questions::default()) };
        self.figures_at = None;
        let ServedRegion { index, depot, region, geometry, .. } = &mut self.opened;
        depot.refresh(now, &RegionTables { region, geometry })?;
        let before = evictor.evicted;
        let (own, reaper) = (&self.own, &mut self.reaper);
        let recall = evictor.step(&mut Tools { index, own, reaper, depot })?;
        self.statistics.blocks_returned += evictor.evicted - before;
        let reads = evictor.pulls.is_due(now);
        let recall = recall.is_some_and(|class| self.begin_recall(Some(class), now));
        Ok(Questions { recall, reads })
    }

    /// Notes that so many clients were asked for their reads.
    pub(crate) fn note_asked_for_reads(&mut self, clients: usize, now: Nanos) {
        if let Some(evictor) = self.evictor.as_mut().filter(|_| clients > 0) {
            evictor.pulls.note_asked(clients, now);
        }
    }

    /// Notes what a client has read: blocks, and how many reads found their key or did not.
    pub(crate) fn note_reads(&mut self, (found, absent): (u64, u64), blocks: &[BlockAddress]) {
        let statistics = &mut self.statistics;
        statistics.reads_found = statistics.reads_found.saturating_add(found);
        statistics.reads_absent = statistics.reads_absent.saturating_add(absent);
        if let Some(evictor) = &mut self.evictor {
            evictor.pulls.note_reported(blocks.len());
            blocks.iter().for_each(|block| self.opened.depot.note_read(*block));
        }
    }

    /// Gives the blocks of a client to the depot.
    pub(crate) fn give_blocks(
        &mut self,
        class: SizeClass,
        rested: bool,
        blocks: Vec<FreeBlock>,
        now: Nanos,
    ) -> Result<(), BlockError> {
        self.figures_at = None;
        let count = blocks.len() as u64;
        self.opened.depot.give(class, blocks, rested, now)?;
        self.statistics.blocks_returned += count;
        Ok(())
    }

    /// Gives heads that a client has just unlinked to the depot, and the extents that are theirs.
    /// The session has not written these heads, so their tables may name blocks of other keys.
    pub(crate) fn give_heads(
        &mut self,
        class: SizeClass,
        heads: Vec<FreeBlock>,
        now: Nanos,
    ) -> Result<Result<(), BlockError>, ChainError> {
        self.figures_at = None;
        for head in heads {
            let generation_low = head.generation.wrapping_sub(1) as u8;
            let named = NamedBlock { address: head.address, class, generation_low };
            let ServedRegion { index, depot, geometry, region, .. } = &mut self.opened;
            let outside = BlockError::Outside { offset: head.address.claimed_offset() };
            let Ok(block) = geometry.check_block(named) else { return Ok(Err(outside)) };
            let (mut extents, class_of_extents) = (Vec::new(), SizeClass::EXTENT);
            for_each_owned_extent(region, geometry, block, |extent| {
                extents.push(extent);
                Ok::<_, ChainError>(())
            })?;
            if let Err(error) = depot.give(class, vec![head], false, now) {
                return Ok(Err(error));
            }
            self.statistics.blocks_returned += 1 + extents.len() as u64;
            if let Err(error) = depot.give_found(class_of_extents, extents, now) {
                index.skipped.note(head.address.claimed_offset(), error);
            }
        }
        Ok(Ok(()))
    }

    /// Gives the blocks of undelivered answers back to the depot. Those that had rested need not
    /// rest again.
    pub(crate) fn take_back(&mut self, undelivered: [Option<ServerMessage>; 2]) {
        for reply in undelivered.into_iter().flatten() {
            let ServerMessage::Blocks { class, rested, blocks, .. } = reply else { continue };
            if let Err(error) = self.give_blocks(class, rested, blocks, boot_time_ns()) {
                tracing::error!("FS-051 the depot refuses blocks that were not delivered: {error}");
            }
        }
    }

    /// Splits the subtable of keys with this directory hash; `local_depth` is how many of its bits
    /// the client's subtable uses. Returns the answer, and whether to send a recall to all writers.
    ///
    /// A chunk becomes free only long after its last block was returned, so a recall does not
    /// change the answer. It is `Later` while a place rests, whose client may still clear it.
    pub(crate) fn split(
        &mut self,
        (directory_hash, local_depth): (u32, u8),
        now: Nanos,
    ) -> Result<(ServerMessage, bool), ChainError> {
        self.figures_at = None;
        let split = self.opened.split((directory_hash, local_depth), &self.own)?;
        let begins_recall = split.is_none() && self.begin_recall(None, now);
        let outcome = split.unwrap_or_else(|| self.opened.outcome_without_place(now));
        if split.is_none() && outcome == SplitOutcome::Impossible && self.stuck_at_splits.is_none()
        {
            self.stuck_at_splits = Some(self.opened.index.splits);
            tracing::warn!(
                "FS-011 the index cannot grow, for no chunk of 2 MiB is free: some new keys find \
                 no room; delete keys and run `kv-cli compact`, or restore a snapshot into a \
                 larger region"
            );
        }
        Ok((ServerMessage::Split { directory_hash, local_depth, outcome }, begins_recall))
    }

    /// Returns whether to send a recall now, for a request that found no memory of this kind.
    fn begin_recall(&mut self, class: Option<SizeClass>, now: Nanos) -> bool {
        let begins = self.recalls.note_if_due(class, self.opened.depot.returned(class), now);
        self.statistics.recalls += u64::from(begins);
        begins
    }

    /// Notes the blocks that a client holds, according to its report. `last` is true in the last
    /// message of the report.
    pub(crate) fn note_held(
        &mut self,
        connection_number: u64,
        (collection, last): (u32, bool),
        blocks: Vec<BlockAddress>,
    ) {
        if self.collector.is_awaited(connection_number, collection) {
            blocks.into_iter().for_each(|block| self.opened.depot.clear_suspicion(block));
            if last {
                self.collector.answered(connection_number);
            }
        }
    }

    /// Notes that this client said goodbye.
    pub(crate) fn sign_off(&mut self, connection_number: u64, client: u16) {
        self.reaper.forget(client);
        self.collector.lost(connection_number, false, boot_time_ns());
    }

    /// Notes that this client was fenced, possibly in the middle of an operation. Returns whether
    /// its id can be used again at once: a writer's slots must be swept first.
    pub(crate) fn note_fenced(
        &mut self,
        connection_number: u64,
        (client, role): (u16, Role),
    ) -> bool {
        // A reader cannot have stored anything: its mapping is read-only.
        if role == Role::Reader {
            self.sign_off(connection_number, client);
            return true;
        }
        let now = boot_time_ns();
        self.reaper.note_fenced(client, now);
        self.collector.lost(connection_number, true, now);
        self.sweeper.add(client, now, self.own.fence_delay_ns());
        false
    }

    /// Returns for how long a fenced client may still change the region, and use what it has read
    /// there.
    pub(crate) fn settle_ns(&self) -> Nanos {
        self.own.fence_delay_ns() + self.opened.format.grace_ns()
    }

    /// When to call [`RegionKeeper::step`]; `None` if no chore is planned.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        let sweeper = self.sweeper.next_step_at();
        let (reaper, evictor) = (self.reaper.next_step_at(), self.next_eviction_at());
        [sweeper, self.next_collection_at(), reaper, evictor].into_iter().flatten().min()
    }

    fn next_eviction_at(&self) -> Option<Nanos> {
        self.evictor.as_ref().and_then(Evictor::next_step_at)
    }

    fn next_collection_at(&self) -> Option<Nanos> {
        self.collector.next_step_at(self.sweeper.is_done())
    }

    /// Does the chores that are due. Returns the clients whose slots are swept, what the service
    /// must do for the collector, and the requests to clients.
    pub(crate) fn step(
        &mut self,
        now: Nanos,
    ) -> Result<(Vec<u16>, CollectorRequest, Questions), ChainError> {
        let is_due = |at: Option<Nanos>| at.is_some_and(|at| at <= now);
        let (mut swept, mut request) = (Vec::new(), CollectorRequest::Nothing);
        let mut questions = match is_due(self.next_eviction_at()) {
            true => self.evict(now)?,
            false => Questions::default(),
        };
        questions.reads |=
            self.evictor.as_ref().is_some_and(|it| it.pulls.is_first_due(&self.opened.depot));
        let evicted_at = boot_time_ns();
        self.lead_ns = self.lead_ns.saturating_sub(evicted_at.saturating_sub(now));
        if self.lead_ns > 0 && is_due(self.next_eviction_at()) {
            return Ok((swept, request, questions));
        }
        if is_due(self.sweeper.next_step_at()) {
            swept = self.sweeper.step(&self.opened.index, &self.own, now)?;
        }
        if is_due(self.reaper.next_step_at()) {
            for RemovedBlock { class, block } in self.reaper.step(&self.opened.index, &self.own)? {
                if let Err(error) = self.give_blocks(class, false, vec![block], boot_time_ns()) {
                    tracing::error!(
                        "FS-051 the depot refuses the block of an expired value: {error}"
                    );
                }
            }
        }
        self.log_levels();
        if is_due(self.next_collection_at()) {
            self.figures_at = None;
            let ServedRegion { region, geometry, depot, index, .. } = &mut self.opened;
            let memory = RegionTables { region, geometry };
            request = self.collector.step(depot, index, &memory, now)?;
        }
        self.lead_ns = boot_time_ns().saturating_sub(evicted_at);
        Ok((swept, request, questions))
    }

    /// Logs when the memory gets full, and when the index grows again.
    fn log_levels(&mut self) {
        let chunks: u64 = self.opened.geometry.chunks().into();
        let used = chunks - self.opened.depot.chunks_free();
        let share = format_args!("{used} of {chunks} chunks of 2 MiB");
        match self.memory_level.update(used, chunks) {
            // A cache is full in normal operation, so this is no warning.
            Some(LevelChange::Reached(level)) if self.evictor.is_some() => {
                tracing::info!("FS-012 {level} % of the memory is in use, {share}");
            }
            Some(LevelChange::Reached(level)) => tracing::warn!(
                "FS-012 {level} % of the memory is in use, {share}: delete keys and run `kv-cli \
                 compact`, or restore a snapshot into a larger region"
            ),
            Some(LevelChange::FellBelow(level)) => {
                tracing::info!("FS-013 less than {level} % of the memory is in use again, {share}");
            }
            None => {}
        }
        if self.stuck_at_splits.is_some_and(|splits| splits != self.opened.index.splits) {
            self.stuck_at_splits = None;
            tracing::info!("FS-014 the index grows again");
        }
    }

    /// Whether the last split found no memory for two more subtables.
    pub(crate) fn is_growth_blocked(&self) -> bool {
        self.stuck_at_splits.is_some()
    }

    /// Whether the region is a cache.
    pub(crate) fn evicts(&self) -> bool {
        self.evictor.is_some()
    }

    /// Returns the statistics of the region, for a client of this role.
    pub(crate) fn statistics(&mut self, role: Role, now: Nanos) -> ServerStatistics {
        let is_recent = |at: Nanos| now.saturating_sub(at) < FIGURES_AGE_NS_MAX;
        if role == Role::Writer || !self.figures_at.is_some_and(is_recent) {
            let ServedRegion { region, geometry, depot, .. } = &mut self.opened;
            if let Err(error) = depot.refresh(now, &RegionTables { region, geometry }) {
                tracing::error!("FS-052 cannot refresh the depot: {error}");
            }
            let statistics = &mut self.statistics;
            statistics.chunks_free = depot.chunks_free();
            statistics.chunks_index = depot.chunks_index();
            statistics.chunks_emptying = depot.chunks_emptying();
            statistics.chunks_emptied = depot.chunks_emptied;
            statistics.classes = depot.classes();
            self.figures_at = Some(now);
        }
        if let Some(evictor) = &self.evictor {
            for class in &mut self.statistics.classes {
                let evictions = evictor.evictions(class.class);
                (class.evicted, class.evicted_after_ms) = (evictions.keys, evictions.age_ms());
            }
        }
        let index = &self.opened.index;
        ServerStatistics {
            subtables: index.in_use,
            subtables_free: (index.free.len() + index.resting.len()) as u64,
            directory_depth: index.depth.into(),
            splits: index.splits,
            splits_stuck: index.unfinished.len() as u64,
            slots_skipped: index.skipped.count(),
            collections: self.collector.finished,
            collections_next: self.collector.next(),
            collecting: self.collector.activity(),
            blocks_collected: self.collector.recovered,
            keys_expired: self.reaper.expired,
            servers_evicting: self.evicts().into(),
            keys_evicted: self.evictor.as_ref().map_or(0, |evictor| evictor.evicted),
            ..self.statistics.clone()
        }
    }
}

/// The levels of use that are logged, in percent of the heap's chunks.
const LEVELS: [u64; 3] = [100, 90, 80];
/// How far, in percentage points, the use must fall below a level before that is logged. With a
/// smaller value, a use that varies by a chunk would fill the log.
const HYSTERESIS: u64 = 5;

/// A change that is worth a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LevelChange {
    Reached(u64),
    FellBelow(u64),
}

/// The level that was logged last; 0 below all levels.
#[derive(Debug, Default)]
pub(crate) struct MemoryLevel {
    level: u64,
}

impl MemoryLevel {
    /// Returns the change to log when `used` of `total` chunks are in use.
    pub(crate) fn update(&mut self, used: u64, total: u64) -> Option<LevelChange> {
        let reached = LEVELS.into_iter().find(|level| used * 100 >= level * total).unwrap_or(0);
        let before = self.level;
        if reached > before {
            self.level = reached;
            return Some(LevelChange::Reached(reached));
        }
        if reached < before && used * 100 < (before - HYSTERESIS) * total {
            self.level = reached;
            return Some(LevelChange::FellBelow(before));
        }
        None
    }
}

/// How long after a recall clients may still return blocks. Until then the server tells a client
/// whose request finds no block to ask again.
const RETURN_NS_MAX: Nanos = 100_000_000;
/// Pause between two recalls of one kind of memory.
const PAUSE_NS: Nanos = 20_000_000;
/// Pause after a recall in vain, after which nothing was returned. The server recalls again,
/// because a client may unlink blocks meanwhile.
const IN_VAIN_PAUSE_NS: Nanos = 50_000_000;
/// After more recalls in vain than this in a row, the pause is [`HOPELESS_PAUSE_NS`].
const IN_VAIN_MAX: u32 = 8;
const HOPELESS_PAUSE_NS: Nanos = 500_000_000;

/// The last recall of one kind of memory.
#[derive(Clone, Copy, Default)]
struct Recall {
    at: Option<Nanos>,
    /// The memory that had been returned when the recall was made.
    returned: ReturnCounts,
    /// The number of recalls in vain in a row.
    in_vain: u32,
}

impl Recall {
    /// Returns the recall to make now; `None` if it is too early.
    fn next(&self, returned: ReturnCounts, now: Nanos) -> Option<Self> {
        let next = Self { at: Some(now), returned, in_vain: 0 };
        let Some(at) = self.at else { return Some(next) };
        let in_vain = if self.returned == returned { self.in_vain + 1 } else { 0 };
        let pause = match in_vain {
            0 => PAUSE_NS,
            1..=IN_VAIN_MAX => IN_VAIN_PAUSE_NS,
            _ => HOPELESS_PAUSE_NS,
        };
        (now.saturating_sub(at) >= pause).then_some(Self { in_vain, ..next })
    }
}

/// The last recall of each class of blocks, then that of chunks.
pub(crate) struct Recalls([Recall; SizeClass::COUNT + 1]);

impl Recalls {
    pub(crate) fn new() -> Self {
        Self([Recall::default(); _])
    }

    fn of(&mut self, class: Option<SizeClass>) -> &mut Recall {
        &mut self.0[class.map_or(SizeClass::COUNT, |class| class.index().into())]
    }

    /// Returns whether a recall is due now, for a request for blocks of this class, or for a chunk.
    /// If it is due, notes that it is made. `returned` counts the memory that has been returned
    /// until now.
    pub(crate) fn note_if_due(
        &mut self,
        class: Option<SizeClass>,
        returned: ReturnCounts,
        now: Nanos,
    ) -> bool {
        let recall = self.of(class);
        let next = recall.next(returned, now);
        *recall = next.unwrap_or(*recall);
        next.is_some()
    }

    /// Whether clients may still return blocks of this class because of the last recall.
    pub(crate) fn is_recent(&mut self, class: SizeClass, now: Nanos) -> bool {
        self.of(Some(class)).at.is_some_and(|at| now.saturating_sub(at) < RETURN_NS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_is_logged_once_until_use_has_clearly_fallen_below_it() {
        let mut level = MemoryLevel::default();
        let mut update = |used| level.update(used, 1000);
        assert_eq!([update(0), update(799)], [None, None]);
        assert_eq!(update(800), Some(LevelChange::Reached(80)));
        assert_eq!([update(799), update(801), update(750), update(800)], [None; 4]);
        assert_eq!(update(749), Some(LevelChange::FellBelow(80)));
        assert_eq!(update(950), Some(LevelChange::Reached(90)));
        assert_eq!(update(1000), Some(LevelChange::Reached(100)));
        assert_eq!([update(999), update(950)], [None, None]);
        assert_eq!(update(949), Some(LevelChange::FellBelow(100)));
        assert_eq!([update(890), update(850)], [None, None]);
        assert_eq!(update(849), Some(LevelChange::FellBelow(90)));
        assert_eq!(update(0), Some(LevelChange::FellBelow(80)));
        assert_eq!(update(0), None);
    }

    #[test]
    fn recalls_in_vain_become_rare_without_effect_on_another_kind() {
        let mut recalls = Recalls::new();
        let class = SizeClass::for_bytes(64).unwrap();
        let nothing = ReturnCounts::default();
        let mut at = 5;
        assert!(recalls.note_if_due(Some(class), nothing, at));
        let pauses = (0..10).map(|_| {
            let before = at;
            while !recalls.note_if_due(Some(class), nothing, at) {
                at += 10_000_000;
            }
            at - before
        });
        let pauses: Vec<_> = pauses.collect();
        assert_eq!(pauses[..8], [IN_VAIN_PAUSE_NS; 8]);
        assert_eq!(pauses[8..], [HOPELESS_PAUSE_NS; 2]);
        assert!(recalls.is_recent(class, at) && !recalls.is_recent(class, at + RETURN_NS_MAX));
        assert!(recalls.note_if_due(None, nothing, at));
        let more = ReturnCounts { blocks: 1, ..nothing };
        assert!(recalls.note_if_due(Some(class), more, at + PAUSE_NS));
    }
}
