//! Moves memory between size classes: chooses spans, and evicts all of their keys.
//!
//! A chunk waits for 288 x GRACE before it can serve another class (invariant I13). So the server
//! looks ahead. It refills the reserve of free chunks as soon as a part of it is used. It also
//! empties as many chunks as clients will fill while those wait.
//!
//! Memory goes from the class whose next keys to go have been idle for longest to a class that has
//! to evict younger keys. In the end all classes evict keys of about the same age, as if they were
//! in one list.

use std::collections::VecDeque;

use farside_fabric::{ChainError, Nanos};
use farside_layout::SizeClass;

use super::policy::{self, Candidate};
use super::{Evictor, Tools, give_unlinked};
use crate::chores::depot::{Depot, VisitedBlock};
use crate::chores::expiry::RemovedBlock;

/// How often the server looks for spans to drain, at most.
pub(super) const PLAN_NS: Nanos = 100_000_000;
/// Limit on the spans that begin to drain each time: this share of all chunks, within the two
/// limits below. Clients wait while the server looks for them.
const BEGUN_SHARE_DIVISOR: u64 = 32;
const BEGUN_MIN: u64 = 16;
const BEGUN_MAX: u64 = 64;
/// Limit on the chunks that drain for another class: three of four.
const DRAINING_SHARE: (u64, u64) = (3, 4);
/// Keys of the giving class have to be idle for longer than those of the taking class by a quarter,
/// and by this time. Otherwise memory would move to and fro.
const IDLE_MS_MIN: u64 = 100;
/// How many candidates show the idle time of a class.
const CANDIDATES_OF_CLASS: usize = 64;
/// How many spans are compared to find one to drain, and by how many candidates each.
const SPANS_COMPARED: usize = 4;
const CANDIDATES_OF_SPAN: usize = 8;
/// How many blocks are evicted before the clock is read again.
const BLOCKS_PER_BATCH: usize = 64;
/// Pause before the server looks again at blocks that clients hold.
const RETRY_NS: Nanos = 50_000_000;
/// After this many passes, 5 s or more, the span offers its blocks again.
const PASSES_MAX: u32 = 100;
/// A span that offers its blocks again is not drained for a minute: a client that is stopped may
/// have a block of it.
const FAILED_NS: Nanos = 60_000_000_000;

/// A span that drains, while clients or slots still have blocks of it.
pub(super) struct Drain {
    chunk: u32,
    class: SizeClass,
    /// The index of the block with which the pass continues.
    next: u64,
    /// The number of complete passes.
    passes: u32,
    due_at: Nanos,
}

/// The spans that drain, sorted by the time at which they are due, nearly.
#[derive(Default)]
pub(super) struct Drains {
    queue: VecDeque<Drain>,
    /// The spans that did not become empty, and until when they are not drained again.
    failed: Vec<(u32, Nanos)>,
}

impl Drains {
    /// Returns when to call [`Evictor::drain`]; `None` if no span has to be emptied.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.queue.front().map(|drain| drain.due_at)
    }
}

impl Evictor {
    /// Evicts some keys of the span that is due, until `until`. Returns whether a span was due.
    pub(super) fn drain(
        &mut self,
        tools: &mut Tools<'_>,
        now: Nanos,
        until: Nanos,
    ) -> Result<bool, ChainError> {
        let Some(mut drain) = self.drains.queue.pop_front_if(|drain| drain.due_at <= now) else {
            return Ok(false);
        };
        if !tools.depot.is_draining(drain.chunk) {
            return Ok(true);
        }
        if drain.passes == 0 && drain.next == 0 {
            self.look_for_pins(drain.chunk, drain.class, tools)?;
        }
        if self.pins.are_in(drain.chunk) {
            // It cannot become empty.
            if !tools.depot.end_drain(drain.chunk, tools.own.now()) {
                drain.due_at = now.saturating_add(RETRY_NS);
                self.drains.queue.push_back(drain);
            }
            return Ok(true);
        }
        let end = drain.class.blocks_per_span();
        let outside = tools.depot.blocks_outside(drain.chunk, drain.next, end);
        let batch: Vec<_> = outside.take(BLOCKS_PER_BATCH).collect();
        let addresses = batch.iter().map(|(_, address)| *address);
        let give = |depot: &mut Depot, blocks: Vec<RemovedBlock>, now| {
            // Of a value with extents, blocks of other spans go as well.
            let is_inside = |removed: &RemovedBlock| {
                depot.span_of(removed.block.address) == Some((drain.chunk, removed.class))
            };
            let (inside, outside): (Vec<_>, Vec<_>) = blocks.into_iter().partition(is_inside);
            let inside: Vec<_> = inside.iter().map(|removed| removed.block).collect();
            let drained = depot.give_drained(drain.class, &inside, now);
            drained.and(give_unlinked(depot, outside, now))
        };
        let done = self.evict_each(addresses, drain.class, tools, until, give)?;
        let is_last = batch.len() < BLOCKS_PER_BATCH && done.tried == batch.len();
        if let Some((last, _)) = batch[..done.tried].last().filter(|_| !is_last) {
            drain.next = last + 1;
            self.drains.queue.push_front(drain);
            return Ok(true);
        }
        (drain.next, drain.passes) = (0, drain.passes + 1);
        if !tools.depot.is_draining(drain.chunk) {
            return Ok(true);
        }
        // Clients hold the blocks that are left. Those that they link meanwhile are evicted in the
        // next pass, and they return the others.
        self.recall = Some(drain.class);
        let is_over =
            drain.passes >= PASSES_MAX && tools.depot.end_drain(drain.chunk, tools.own.now());
        if is_over {
            self.drains.failed.push((drain.chunk, now.saturating_add(FAILED_NS)));
        } else {
            drain.due_at = now.saturating_add(RETRY_NS);
            self.drains.queue.push_back(drain);
        }
        Ok(true)
    }

    /// Notes a pinned value of the span, if it has one, before its other keys are evicted in vain.
    fn look_for_pins(
        &mut self,
        chunk: u32,
        class: SizeClass,
        tools: &Tools<'_>,
    ) -> Result<(), ChainError> {
        for (_, address) in tools.depot.blocks_outside(chunk, 0, class.blocks_per_span()) {
            if self.pins.are_in(chunk) {
                break;
            }
            self.candidate(VisitedBlock { address, reads: 0 }, class, false)?;
        }
        Ok(())
    }

    /// Begins to drain spans if the reserve or a class needs more chunks. Returns whether it needs
    /// more than begin at a time.
    pub(super) fn plan(&mut self, tools: &mut Tools<'_>, now: Nanos) -> Result<bool, ChainError> {
        let chunks = u64::from(tools.depot.chunks());
        self.pins.forget_old_spans(now);
        self.drains.failed.retain(|(_, until)| now < *until);
        let (mut idle_ms, mut begun) = (self.idle_ms_of_classes(tools)?, false);
        for _ in 0..(chunks / BEGUN_SHARE_DIVISOR).clamp(BEGUN_MIN, BEGUN_MAX) {
            let is_missing = tools.depot.chunks_missing() > 0;
            let taker = if is_missing { None } else { self.taker(&idle_ms, tools, now) };
            let may_drain =
                tools.depot.chunks_draining() * DRAINING_SHARE.1 < chunks * DRAINING_SHARE.0;
            if !is_missing && (taker.is_none() || !may_drain) {
                return Ok(false);
            }
            let Some(giver) = self.giver(&idle_ms, taker, tools, now) else { return Ok(false) };
            let Some(chunk) = self.span_to_drain(giver, tools)? else {
                // None of its spans that were compared can become empty. Another class may give.
                if idle_ms[usize::from(giver.index())].replace(0) == Some(0) {
                    return Ok(false);
                }
                continue;
            };
            // Large blocks need two neighbouring chunks, so the reserve should have a pair.
            let needs_pair = taker.is_none_or(|(class, _)| class.chunks_per_span() > 1)
                && !tools.depot.has_pair_coming();
            if needs_pair && taker.is_some() && !can_be_pair(chunk, tools) {
                continue;
            }
            self.begin(chunk, giver, tools, now);
            begun = true;
            if needs_pair
                && !tools.depot.has_pair_coming()
                && let Some((chunk, class)) = lasting_neighbour(chunk, tools)
            {
                self.begin(chunk, class, tools, now);
            }
        }
        Ok(begun)
    }

    pub(super) fn begin(
        &mut self,
        chunk: u32,
        class: SizeClass,
        tools: &mut Tools<'_>,
        now: Nanos,
    ) {
        tools.depot.begin_drain(chunk);
        self.drains.queue.push_back(Drain { chunk, class, next: 0, passes: 0, due_at: now });
    }

    /// Returns for how long the next keys to go have been idle, in each class; `None` for a class
    /// without keys, 0 for one with pinned values only.
    fn idle_ms_of_classes(
        &mut self,
        tools: &Tools<'_>,
    ) -> Result<[Option<u64>; SizeClass::COUNT], ChainError> {
        let wall_ms = tools.own.wall_ms();
        let mut idle_ms = [None; SizeClass::COUNT];
        for class in SizeClass::all().filter(|class| !tools.depot.spans(*class).is_empty()) {
            let pins_before = self.pins.met(class);
            let candidates = self.candidates(class, CANDIDATES_OF_CLASS, tools)?;
            let has_pins = self.pins.met(class) > pins_before;
            idle_ms[usize::from(class.index())] =
                policy::idle_ms(&candidates, wall_ms).or(has_pins.then_some(0));
        }
        Ok(idle_ms)
    }

    /// Returns the class that needs more chunks most: it has to evict the youngest keys, even if it
    /// gets all chunks that are on their way. Returns the idle time of its keys as well.
    fn taker(
        &self,
        idle_ms: &[Option<u64>; SizeClass::COUNT],
        tools: &Tools<'_>,
        now: Nanos,
    ) -> Option<(SizeClass, u64)> {
        let all_coming = tools.depot.chunks_coming();
        let has_pair = tools.depot.has_pair_coming();
        let takers = SizeClass::all().filter_map(|class| {
            let demand = self.demands[usize::from(class.index())];
            let blocks = demand.within(tools.depot.chunk_rest(), now);
            let wanted = blocks.div_ceil(class.blocks_per_span()) * class.chunks_per_span();
            // Single chunks are of no use to a class of blocks that need two.
            let coming = if class.chunks_per_span() == 1 || has_pair { all_coming } else { 0 };
            if wanted <= coming {
                return None;
            }
            let chunks = tools.depot.spans(class).len() as u64 * class.chunks_per_span();
            let idle_now = idle_ms[usize::from(class.index())].unwrap_or(0);
            Some((class, idle_now * (chunks + coming) / chunks.max(1)))
        });
        takers.min_by_key(|(_, idle_ms)| *idle_ms)
    }

    /// Returns the class that gives a span: its next keys to go have been idle for longest. Without
    /// a taking class, for the reserve, this is any one with two spans.
    fn giver(
        &self,
        idle_ms: &[Option<u64>; SizeClass::COUNT],
        taker: Option<(SizeClass, u64)>,
        tools: &Tools<'_>,
        now: Nanos,
    ) -> Option<SizeClass> {
        let givers = SizeClass::all().zip(idle_ms).filter_map(|(class, idle_ms)| {
            // All blocks of a class without candidates are free.
            let idle_ms = idle_ms.unwrap_or(u64::MAX);
            let can_give = taker.is_none_or(|(taking, idle_there)| {
                let left =
                    tools.depot.blocks_lasting(class).saturating_sub(class.blocks_per_span());
                let demand = &self.demands[usize::from(class.index())];
                class != taking
                    && idle_ms > idle_there + idle_there / 4 + IDLE_MS_MIN
                    && demand.is_met_by(left, self.grace, now)
            });
            // The last span of a class goes only to a larger one that no other class can serve.
            // That of the last resort stays.
            let can_have = |class: SizeClass| tools.depot.blocks_lasting(class) > 0;
            let is_served = taker.is_none_or(|(taking, _)| {
                SizeClass::of_values().any(|class| taking <= class && can_have(class))
            });
            let stays = is_served || tools.depot.is_last_resort(class);
            let spans_min = if stays { 2 } else { 1 };
            (can_give && tools.depot.spans(class).len() >= spans_min).then_some((idle_ms, class))
        });
        givers.max().map(|(_, class)| class)
    }

    /// Returns the span of the class whose keys have been idle for longest, of some spans. `None`
    /// if pinned values were seen in all of them, or they did not become empty lately.
    pub(super) fn span_to_drain(
        &mut self,
        class: SizeClass,
        tools: &Tools<'_>,
    ) -> Result<Option<u32>, ChainError> {
        let wall_ms = tools.own.wall_ms();
        let mut found = None;
        for _ in 0..SPANS_COMPARED {
            let Some(chunk) = self.random_span(class, tools) else { break };
            let mut candidates = Vec::<Candidate>::new();
            for _ in 0..CANDIDATES_OF_SPAN {
                self.add_run(chunk, class, (1, 1), tools, &mut candidates)?;
            }
            let has_failed = self.drains.failed.iter().any(|(failed, _)| *failed == chunk);
            if self.pins.are_in(chunk) || has_failed {
                continue;
            }
            // A span without keys is the best.
            let idle_ms = policy::idle_ms(&candidates, wall_ms).unwrap_or(u64::MAX);
            if found.is_none_or(|(longest, _)| idle_ms > longest) {
                found = Some((idle_ms, chunk));
            }
        }
        Ok(found.map(|(_, chunk)| chunk))
    }
}

fn neighbours(chunk: u32) -> impl Iterator<Item = u32> {
    [Some(chunk + 1), chunk.checked_sub(1)].into_iter().flatten()
}

/// Returns a span in the next chunk or the one before, which can drain, too.
fn lasting_neighbour(chunk: u32, tools: &Tools<'_>) -> Option<(u32, SizeClass)> {
    neighbours(chunk).find_map(|chunk| {
        let class = tools.depot.class_of_span(chunk)?;
        (tools.depot.spans(class).len() > 1).then_some((chunk, class))
    })
}

/// Whether two neighbouring chunks will be free if the span at this chunk drains, and its neighbour
/// where necessary.
fn can_be_pair(chunk: u32, tools: &Tools<'_>) -> bool {
    tools.depot.chunks_of_span(chunk) > 1
        || lasting_neighbour(chunk, tools).is_some()
        || neighbours(chunk).any(|chunk| tools.depot.is_coming(chunk))
}
