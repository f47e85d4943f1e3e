//! The lanes of a pipeline. Each lane executes one operation at a time, in a task of its own.

mod combining;
mod measuring;
mod queue;
mod room;
mod shards;
mod task;

use std::sync::Arc;
use std::time::Instant;

use farside_control::Role;
use farside_fabric::{Buffer, Counters, Fabric, LaneId, Nanos, Wakeup};
use farside_protocol::{
    Action, Answer, CachedPut, CachedRead, Failure, Measurement, Operation, OperationError,
    staged_key,
};

use super::completed::{Completed, Ticket};
use crate::client_inner::ClientInner;
use crate::connection::{SessionEngine, SessionRegion};
use crate::reconnecting::ReconnectBudget;
use crate::session_regions::{OpenShard, SessionRegions};
use crate::{Error, Outcome, PipelineFull, ValueRef};
use measuring::count_failed;
use queue::{Queues, emptied};
use shards::Setup;
use task::{Job, LaneAnswer, LaneTask};

/// Estimate of an operation's bytes before any operation has completed.
const OPERATION_BYTES_INITIAL: u64 = 16 << 10;
/// The moving average of an operation's bytes covers about this many operations.
const OPERATIONS_AVERAGED: u64 = 8;

/// The progress of a lane's operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneState {
    /// The operation waits until its shard is connected.
    Parked,
    /// The operation has posted nothing yet.
    Queued,
    /// Another lane, the leader, executes the operation.
    Following,
    /// The operation is a GET, and its READ of the cached location is in flight. The lane's task is
    /// not used: it would take 13.7 % more instructions
    /// (`docs/decisions/0016-cached-gets-without-a-task.md`).
    Reading,
    /// The operation is a PUT, and its chain at the cached location is in flight. As for
    /// [`LaneState::Reading`], the lane's task is not used.
    Writing,
    /// The lane's task executes the operation, or has completed it.
    InTask,
}

struct PipelineLane<'s> {
    ticket: Ticket,
    job: Job<'s>,
    state: LaneState,
    /// A leader's first follower, or a follower's next one.
    next_follower: Option<LaneId>,
    /// The lane whose buffer holds the value that was found: for a follower, the leader.
    value_lane: LaneId,
    /// The READ of [`LaneState::Reading`].
    read: CachedRead,
    /// The PUT of [`LaneState::Writing`].
    put: Option<CachedPut<'s>>,
    /// The result of the operation, until it is taken.
    answer: Option<LaneAnswer>,
    /// Why the operation's shard cannot be reached. This takes the place of the answer's failure.
    unavailable: Option<Box<Error>>,
    /// The losses of the shard during an operation, and the number of the operation's ticket.
    losses: (u64, ReconnectBudget),
    /// The value that the operation taken last returned.
    value: Vec<u8>,
    /// The verbs of the operation taken last, if the client counts them.
    counters: Counters,
    /// The measurement of the task's operation, if the client has metrics.
    measured: Measurement,
    /// All verbs of the lane until the operation taken last was taken, if the client counts them.
    total_counters: Counters,
    /// All bytes of the lane until the operation taken last was taken.
    total_bytes: u64,
}

impl<'s> PipelineLane<'s> {
    /// Posts the chain of a GET or PUT whose location is cached. Returns false for any other
    /// operation, which posts nothing here. From now on no other operation may join this one, even
    /// if it fails.
    #[inline(always)]
    fn post_cached(
        &mut self,
        handle: SessionRegion<'s>,
        id: LaneId,
    ) -> std::result::Result<bool, Failure> {
        match self.job.action {
            Action::Get => {
                let read = handle.cached_read(self.job.hash, || handle.engine.endpoint.now());
                let Some(read) = read else { return Ok(false) };
                (self.read, self.state) = (read, LaneState::Reading);
                handle.post_cached(id, self.job.hash, &self.read).map(|_| true)
            }
            Action::Put(lifetime) => {
                self.state = LaneState::Writing;
                let operation = self.job.operation(handle, id);
                let Some(put) = operation.cached_put(lifetime)? else { return Ok(false) };
                operation.post_cached_put(&put).map(drop)?;
                self.put = Some(put);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Stores the answer of the operation. Returns its first follower, if there is one.
    #[inline]
    fn answer(&mut self, answer: LaneAnswer) -> Option<LaneId> {
        self.answer = Some(answer);
        self.next_follower.take()
    }
}

/// Schedules the operations in flight on the lanes of a session.
pub(crate) struct LaneScheduler<'s> {
    engine: &'s SessionEngine,
    regions: &'s SessionRegions,
    shared: &'s Arc<ClientInner>,
    /// Whether the caller starts operations again that a lost connection has kept from an effect.
    repeats_lost: bool,
    /// Whether the caller waits for all operations, so that each may wait for its shard.
    waits_for_all: bool,
    /// The opening of a shard's region that is under way, and the wait for shards.
    setup: Setup<'s>,
    /// The shards that the session could not be connected to, and when it tries again.
    postponed: Vec<(usize, Instant)>,
    /// The session's memory, which gets the containers back.
    memory: &'s mut PipelineMemory,
    lanes: Vec<PipelineLane<'s>>,
    /// By lane: the region of the operation's key. While it waits for its shard, any region.
    targets: Vec<&'s OpenShard>,
    /// By the number of the shard: its region, which may be lost; `None` before it was needed.
    shards: Vec<Option<&'s OpenShard>>,
    /// The tasks of lanes. Empty as long as no operation needs one.
    tasks: Vec<Option<LaneTask<'s>>>,
    queues: Queues,
    /// Whether changes go first: GETs went first the last time, and left no room for all changes.
    changes_first: bool,
    /// The number of operations started so far: the number of the next ticket.
    started: u64,
    /// The number of lanes whose operation has begun and has no answer yet.
    begun: u64,
    /// Moving average of the bytes that an operation READs and WRITEs.
    operation_bytes: u64,
}

/// The containers of a session's pipelines, which one pipeline leaves to the next: so a batch
/// allocates none of them.
#[derive(Default)]
pub(crate) struct PipelineMemory {
    /// Empty.
    lanes: Vec<PipelineLane<'static>>,
    /// Empty, and of the size of a reference: a session moves between threads, which a vector of
    /// references to regions does not.
    targets: Vec<usize>,
    shards: Vec<usize>,
    /// One for each lane so far.
    values: Vec<Vec<u8>>,
    /// Empty, except for free lanes.
    queues: Queues,
}

impl<'s> LaneScheduler<'s> {
    /// Schedules operations on the first `count` lanes of the engine: at least one, at most all.
    pub(crate) fn new(
        regions: &'s SessionRegions,
        shared: &'s Arc<ClientInner>,
        memory: &'s mut PipelineMemory,
        count: usize,
    ) -> Self {
        let engine = &regions.engine;
        engine.pipelined.set(true);
        let count = u16::try_from(count).unwrap_or(u16::MAX).clamp(1, shared.options.lanes);
        let job = Job {
            action: Action::Get,
            hash: regions.router.hasher.hash(&[]),
            key_bytes: 0,
            value_bytes: 0,
            successor: None,
        };
        let fabric = engine.endpoint.fabric();
        let mut lanes: Vec<PipelineLane<'s>> = std::mem::take(&mut memory.lanes);
        lanes.extend((0..count).map(LaneId).map(|id| {
            let total_counters = *fabric.lane_counters(id);
            PipelineLane {
                ticket: Ticket { number: 0, lane: id },
                job,
                state: LaneState::InTask,
                next_follower: None,
                value_lane: id,
                read: CachedRead::default(),
                put: None,
                answer: None,
                unavailable: None,
                losses: Default::default(),
                value: memory.values.pop().unwrap_or_default(),
                counters: total_counters,
                measured: Measurement::default(),
                total_counters,
                total_bytes: total_counters.bytes(),
            }
        }));
        drop(fabric);
        let mut queues = std::mem::take(&mut memory.queues);
        queues.reset(count);
        let mut targets: Vec<&'s OpenShard> = emptied(&mut memory.targets);
        targets.resize(count.into(), regions.any());
        let mut shards: Vec<Option<&'s OpenShard>> = emptied(&mut memory.shards);
        shards.extend((0..regions.shards()).map(|shard| regions.latest(shard)));
        Self {
            engine,
            regions,
            shared,
            repeats_lost: false,
            waits_for_all: false,
            setup: Setup::default(),
            postponed: Vec::new(),
            lanes,
            targets,
            shards,
            tasks: Vec::new(),
            queues,
            changes_first: false,
            started: 0,
            begun: 0,
            operation_bytes: OPERATION_BYTES_INITIAL,
            memory,
        }
    }

    // Inlined, because most matches on the action disappear in a GET and a PUT.
    #[inline(always)]
    pub(crate) fn start(
        &mut self,
        action: Action<'s>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        let id = self.queues.free_lanes.pop().ok_or(PipelineFull)?;
        let ticket = Ticket { number: self.started, lane: id };
        self.started += 1;
        let (hash, shard) = self.regions.route(key);
        let open = self.shards[shard];
        self.lanes[usize::from(id.0)].ticket = ticket;
        // A shard without a connection has no limits yet: those of any other will do.
        let target = open.unwrap_or_else(|| self.regions.any());
        self.targets[usize::from(id.0)] = target;
        match self.check(target, action, key, value) {
            Ok(()) => {
                let (key_bytes, value_bytes) = (key.len(), value.len());
                let lane = &mut self.lanes[usize::from(id.0)];
                lane.job = Job { action, hash, key_bytes, value_bytes, successor: None };
                (lane.state, lane.value_lane) = (LaneState::Queued, id);
                Operation::fill(self.engine, id, key, value);
                if open.is_none() {
                    self.start_without_shard(id, shard);
                } else if !self.try_combine(id, action, hash) {
                    // The operation is not posted here: operations that are started together are
                    // posted together, so that they wait for memory at the same time.
                    target.region.cache.prefetch(hash);
                    self.enqueue(id, action);
                }
            }
            Err(error) => self.refuse(id, action, error),
        }
        Ok(ticket)
    }

    /// Answers an operation that must not be started.
    #[cold]
    fn refuse(&mut self, id: LaneId, action: Action<'s>, error: Failure) {
        self.lanes[usize::from(id.0)].job.action = action;
        self.answer_at_once(id, error);
    }

    /// Answers an operation that has not begun, at the end of the present turn or the next one.
    #[cold]
    fn answer_at_once(&mut self, id: LaneId, error: Failure) {
        self.lanes[usize::from(id.0)].answer = Some(Err(error));
        self.queues.refused.push(id);
    }

    /// Returns an error if the operation must not be started.
    #[inline(always)]
    fn check(
        &self,
        open: &OpenShard,
        action: Action<'_>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<(), Failure> {
        open.region.check_key(key)?;
        open.region.check_value(value)?;
        self.engine.check_expiry(action)?;
        let is_allowed = !action.changes() || self.shared.role() == Role::Writer;
        if is_allowed { Ok(()) } else { Err(OperationError::Denied.into()) }
    }

    #[inline]
    fn enqueue(&mut self, id: LaneId, action: Action<'_>) {
        let queue = if action.changes() { &mut self.queues.changes } else { &mut self.queues.gets };
        queue.push(id);
    }

    /// Begins a queued operation at this region. A GET or PUT whose location is cached needs no
    /// task: this posts its chain, and [`Self::complete_reading`] or [`Self::complete_writing`]
    /// completes it.
    // Inlined, as in the only frequent call it takes fewer instructions.
    #[inline(always)]
    fn begin(&mut self, id: LaneId, open: &'s OpenShard) {
        self.begun += 1;
        let handle = self.engine.at(&open.region);
        let lane = &mut self.lanes[usize::from(id.0)];
        match lane.post_cached(handle, id) {
            Ok(true) => {}
            Ok(false) => self.run_in_task(id, None),
            Err(failure) => self.finish_with(id, Err(failure)),
        }
    }

    /// Completes a GET whose READ of the cached location has completed. If the block there proves
    /// nothing, the lane's task executes the GET.
    fn complete_reading(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        let Some(result) = self.engine.endpoint.take_result(id) else { return };
        let handle = self.engine.at(&self.targets[usize::from(id.0)].region);
        if let Err(error) = result {
            return self.finish_with(id, Err(Failure::at(handle.region.index, error)));
        }
        let (fabric, now) = (self.engine.endpoint.fabric(), self.engine.endpoint.now());
        let key = (lane.job.hash, staged_key(&*fabric, id, lane.job.key_bytes));
        let completed = handle.complete_cached_read::<true>(&*fabric, now, id, key, &lane.read);
        drop(fabric);
        match completed {
            Some(found) => {
                let first_follower = lane.answer(Ok(Answer::found(found)));
                self.finish(id, first_follower);
            }
            None => {
                lane.job.successor = handle.successor_by_mark(id, &lane.read);
                handle.count_wasted_read(&lane.read);
                let posted = lane.read.posted();
                self.run_in_task(id, Some(posted));
            }
        }
    }

    /// Completes a PUT whose chain at the cached location has completed. If it did not swing the
    /// slot, the lane's task continues the PUT.
    fn complete_writing(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        let Some(result) = self.engine.endpoint.take_result(id) else { return };
        let Some(put) = &lane.put else { return };
        let handle = self.engine.at(&self.targets[usize::from(id.0)].region);
        let operation = lane.job.operation(handle, id);
        match operation.complete_cached_put(put, result) {
            Ok(None) => {
                let version = Some(put.version());
                self.finish_with(id, Ok(Answer::stored(version)));
            }
            Ok(Some(swung)) => {
                let displaced = lane.put.take().map(|put| put.displaced(swung));
                if let Some(displaced) = &displaced {
                    operation.count_displaced(displaced);
                    lane.begin_measuring(handle, id, Some(displaced.posted()));
                }
                let job = lane.job;
                lane.state = LaneState::InTask;
                self.task(id).give(handle, job, displaced);
                // Its next chain may READ a large block.
                if self.engine.endpoint.has_room(handle.region.index, 0) {
                    self.poll_lane(id);
                } else {
                    self.queues.waiting_for_room.push(id);
                }
            }
            Err(failure) => self.finish_with(id, Err(failure)),
        }
    }

    /// The region of the lane's operation.
    #[inline]
    fn handle(&self, id: LaneId) -> SessionRegion<'s> {
        self.engine.at(&self.targets[usize::from(id.0)].region)
    }

    /// The lane's task, which is created if this is its first operation that needs one.
    fn task(&mut self, id: LaneId) -> &mut LaneTask<'s> {
        if self.tasks.is_empty() {
            self.tasks.resize_with(self.lanes.len(), || None);
        }
        self.tasks[usize::from(id.0)].get_or_insert_with(|| LaneTask::new(id))
    }

    /// Gives the job to the lane's task, and polls the task. `since` is when the operation's first
    /// verb was posted, if one was.
    #[inline(never)]
    fn run_in_task(&mut self, id: LaneId, since: Option<Nanos>) {
        let handle = self.handle(id);
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.state = LaneState::InTask;
        lane.begin_measuring(handle, id, since);
        let job = lane.job;
        self.task(id).give(handle, job, None);
        self.poll_lane(id);
    }

    /// Polls the task of a lane that has a new job or whose chain has completed.
    fn poll_lane(&mut self, id: LaneId) {
        if let Some(answer) = self.task(id).poll() {
            self.measure(id, &answer);
            self.finish_with(id, answer);
        }
    }

    /// Makes an operation that has this answer ready to be taken, and completes its followers.
    #[inline(always)]
    fn finish_with(&mut self, id: LaneId, answer: LaneAnswer) {
        if let Err(Failure::Lost(_)) = answer
            && self.shared.cluster.is_some()
        {
            return self.park_lost(id);
        }
        let first_follower = self.lanes[usize::from(id.0)].answer(answer);
        self.finish(id, first_follower);
    }

    /// [`Self::finish_with`] of a lane that has its answer.
    #[inline(always)]
    fn finish(&mut self, id: LaneId, first_follower: Option<LaneId>) {
        self.begun -= 1;
        self.queues.answered.push(id);
        if let Some(first) = first_follower {
            self.complete_followers(id, first);
        }
    }

    /// Returns the number of operations that were started and whose [`Completed`] was not taken
    /// yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.lanes.len() - self.queues.free_lanes.len()
    }

    /// Returns the number of operations that can be in flight.
    pub(crate) fn depth(&self) -> usize {
        self.lanes.len()
    }

    /// Returns a completed operation, if there is one. Does not wait.
    #[inline(always)]
    pub(crate) fn poll(&mut self) -> Option<Completed<'_>> {
        if self.queues.answered.is_empty() {
            self.advance();
        }
        self.take()
    }

    /// Gives all lanes a turn, without a wait.
    #[inline(never)]
    fn advance(&mut self) {
        self.poll_lanes();
        let Self { engine, queues, .. } = self;
        engine.endpoint.try_step(|lane| queues.chains_completed.push(lane));
        self.poll_lanes();
        self.queues.answer_refused();
    }

    /// Lets every operation wait for its shard, because the caller waits for all of them.
    pub(crate) fn wait_for_all(&mut self) {
        (self.waits_for_all, self.repeats_lost) = (true, true);
    }

    /// As [`Fabric::set_wakeup`].
    pub(crate) fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        // Of an async client, which repeats them.
        self.repeats_lost = true;
        self.engine.endpoint.fabric_mut().set_wakeup(wakeup);
    }

    /// As [`Fabric::relax`].
    pub(crate) fn relax(&mut self) {
        self.engine.endpoint.fabric_mut().relax();
    }

    /// Waits for the next completed operation; `None` if none is in flight.
    #[inline(always)]
    pub(crate) fn wait(&mut self) -> Option<Completed<'_>> {
        self.wait_for_answer();
        self.take()
    }

    #[inline(never)]
    fn wait_for_answer(&mut self) {
        while self.queues.answered.is_empty() && self.in_flight() > 0 {
            // Queued operations are posted first: their chains share the next doorbell.
            self.poll_lanes();
            let Self { engine, queues, .. } = self;
            let has_answer = !(queues.answered.is_empty() && queues.refused.is_empty());
            let completed = |lane| queues.chains_completed.push(lane);
            if has_answer {
                engine.endpoint.try_step(completed);
            } else {
                engine.endpoint.step(completed);
            }
            self.poll_lanes();
            self.queues.answer_refused();
        }
    }

    #[inline(always)]
    fn take(&mut self) -> Option<Completed<'_>> {
        let id = self.queues.answered.pop()?;
        self.queues.free_lanes.push(id);
        let lane = &mut self.lanes[usize::from(id.0)];
        let fabric = self.engine.endpoint.fabric();
        let total = fabric.lane_counters(id);
        let is_counted = self.shared.options.counts_operations;
        if is_counted {
            lane.counters = total.since(&lane.total_counters);
            lane.total_counters = *total;
        }
        let bytes = total.bytes() - lane.total_bytes;
        lane.total_bytes += bytes;
        // An operation that shared another one's chain has none.
        if bytes > 0 {
            let average = self.operation_bytes;
            self.operation_bytes =
                average - average / OPERATIONS_AVERAGED + bytes / OPERATIONS_AVERAGED;
        }
        // A lane keeps its last answer: to take it out would move all of it.
        let mut expires_at_ms = 0;
        let result = match &mut lane.answer {
            Some(Ok(Answer { applied, version, number, found })) => {
                let mut value = None;
                // Without a closure, which would not be inlined.
                if let Some(found) = found {
                    lane.value.clear();
                    let block = fabric.buffer(lane.value_lane, Buffer::ReadBlock);
                    lane.value.extend_from_slice(found.value_in(block));
                    expires_at_ms = found.expires_at_ms();
                    value = Some(ValueRef { data: &lane.value, version: found.version });
                }
                Ok(Outcome { applied: *applied, version: *version, value, number: *number })
            }
            failed => {
                let Some(Err(failure)) = failed.take() else { return None };
                if let Some(error) = lane.unavailable.take() {
                    Err(*error)
                } else {
                    let OpenShard { number: shard, connection, .. } =
                        self.targets[usize::from(id.0)];
                    let error = self.shared.handle_failure(*shard, connection, failure);
                    Err(error.unwrap_or_else(|| self.shared.disconnected(*shard)))
                }
                .inspect_err(|error| {
                    count_failed(self.regions, self.repeats_lost, lane.job.action, error);
                })
            }
        };
        let counters = is_counted.then_some(&lane.counters);
        Some(Completed { ticket: lane.ticket, result, counters, expires_at_ms })
    }
}

impl Drop for LaneScheduler<'_> {
    /// Completes the operations in flight. One that stopped between two round trips would leave a
    /// PENDING word. Not after a panic, as the lane that panicked would never complete: then the
    /// session gives its connections up, as after `mem::forget`.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return std::mem::forget(std::mem::take(&mut self.lanes));
        }
        while self.wait().is_some() {}
        self.end_setup();
        self.engine.pipelined.set(false);
        let mut lanes = std::mem::take(&mut self.lanes);
        self.memory.values.extend(lanes.drain(..).map(|lane| lane.value));
        // Of an empty vector only the memory is left, which needs no lifetime.
        self.memory.lanes = lanes.into_iter().map(|_| unreachable!("no lane is left")).collect();
        self.targets.clear();
        self.shards.clear();
        self.memory.targets = emptied(&mut self.targets);
        self.memory.shards = emptied(&mut self.shards);
        self.memory.queues = std::mem::take(&mut self.queues);
    }
}
