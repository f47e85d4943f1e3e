//! The lanes of a pipeline: each runs one operation after another as a task of its own.

mod combining;

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside_control::Role;
use farside_fabric::{AnyFabric, Buffer, Counters, Fabric, LaneId};
use farside_layout::hash::KeyHash;
use farside_protocol::{
    Action, Answer, CachedRead, Failure, OpenRegion, Operation, OperationError, Successor,
};

use crate::client::ClientInner;
use crate::connection::{ServerConnection, SessionEngine, SessionRegion};
use crate::pipeline::{Completed, Outcome, PipelineFull, Ticket};
use combining::CandidateTable;

/// What an operation takes before any has finished, in bytes; then an average over about so many.
const OPERATION_BYTES_AT_FIRST: u64 = 16 << 10;
const OPERATIONS_AVERAGED: u64 = 8;

/// What a lane is to do. Key and value stand in its image buffer.
#[derive(Clone, Copy)]
struct Job<'v> {
    action: Action<'v>,
    hash: KeyHash,
    key_bytes: usize,
    value_bytes: usize,
    /// What a READ of the cached location led to.
    successor: Option<Successor>,
}

impl Job<'_> {
    #[inline]
    fn operation(self, handle: SessionRegion<'_>, lane: LaneId) -> Operation<'_, AnyFabric> {
        let staged = Operation::staged(handle, lane, self.hash, self.key_bytes, self.value_bytes);
        staged.after(self.successor)
    }
}

/// Between a pipeline and one of its lanes.
#[derive(Default)]
struct Mailbox<'v> {
    job: Cell<Option<Job<'v>>>,
    answer: Cell<Option<std::result::Result<Answer, Failure>>>,
    is_answered: Cell<bool>,
}

impl Mailbox<'_> {
    #[inline]
    fn answer(&self, answer: std::result::Result<Answer, Failure>) {
        self.answer.set(Some(answer));
        self.is_answered.set(true);
    }
}

/// A lane's task: waits for a job, runs it, answers, for ever.
async fn run_lane(handle: SessionRegion<'_>, lane: LaneId, mailbox: Rc<Mailbox<'_>>) {
    loop {
        let job = poll_fn(|_| mailbox.job.take().map_or(Poll::Pending, Poll::Ready)).await;
        mailbox.answer(job.operation(handle, lane).perform(job.action).await);
    }
}

/// How far a lane's operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneState {
    /// Nothing was posted yet.
    Queued,
    /// Its leader, another lane, does it.
    Following,
    /// It is a GET that READs where the cache says, which needs no task: that would take 13.7 %
    /// more instructions (`docs/decisions/0016-cached-gets-without-a-task.md`).
    Reading,
    /// The lane's task does it, or has done it.
    InTask,
}

struct PipelineLane<'s> {
    mailbox: Rc<Mailbox<'s>>,
    /// Runs one job after another, for ever: made once, so that operations allocate nothing.
    task: Pin<Box<dyn Future<Output = ()> + 's>>,
    ticket: Ticket,
    job: Job<'s>,
    state: LaneState,
    /// The first of this leader's followers; of a follower, the next one.
    next_follower: Option<LaneId>,
    /// The lane whose block buffer has the value that was found.
    value_lane: LaneId,
    /// The READ of [`LaneState::Reading`].
    read: CachedRead,
    /// The value that the operation taken last found.
    value: Vec<u8>,
    /// What the operation taken last asked of the fabric, and the lane in all until then.
    counters: Counters,
    counted: Counters,
}

/// Operations in flight.
pub(crate) struct LaneScheduler<'s> {
    engine: &'s SessionEngine,
    region: &'s OpenRegion,
    connection: &'s ServerConnection,
    shared: &'s ClientInner,
    lanes: Vec<PipelineLane<'s>>,
    free: Vec<LaneId>,
    /// Lanes whose chain completed: to be polled first, before what they read grows old.
    completed: VecDeque<LaneId>,
    /// Those of them that may post more and found no room. The last one, the freshest, goes first.
    tasks: Vec<LaneId>,
    /// Lanes that were given a new job, GETs apart from what changes keys: they go first, and do
    /// not find what the others just replaced.
    gets: VecDeque<LaneId>,
    changes: VecDeque<LaneId>,
    /// GETs went first the last time, and there was no room for all changes.
    changes_first: bool,
    finished: VecDeque<LaneId>,
    started: u64,
    /// Lanes whose operation has begun and not finished.
    begun: u64,
    /// What an operation READs and WRITEs, in bytes: an average over the last ones.
    operation_bytes: u64,
    candidates: CandidateTable,
}

impl<'s> LaneScheduler<'s> {
    /// The first lanes of the engine: so many, but one at least and not more than it has.
    pub(crate) fn new(
        handle: SessionRegion<'s>,
        connection: &'s ServerConnection,
        shared: &'s ClientInner,
        count: usize,
    ) -> Self {
        let SessionRegion { engine, region } = handle;
        engine.pipelined.set(true);
        let count = u16::try_from(count).unwrap_or(u16::MAX).clamp(1, engine.lanes);
        let job = Job {
            action: Action::Get,
            hash: region.hasher.hash(&[]),
            key_bytes: 0,
            value_bytes: 0,
            successor: None,
        };
        let lane = |id| {
            let id = LaneId(id);
            let mailbox = Rc::new(Mailbox::default());
            let task = Box::pin(run_lane(handle, id, mailbox.clone()));
            let ticket = Ticket { number: 0, lane: id };
            let counted = *engine.endpoint.fabric().lane_counters(id);
            PipelineLane {
                mailbox,
                task,
                ticket,
                job,
                state: LaneState::InTask,
                next_follower: None,
                value_lane: id,
                read: CachedRead::default(),
                value: Vec::new(),
                counters: counted,
                counted,
            }
        };
        Self {
            engine,
            region,
            connection,
            shared,
            lanes: (0..count).map(lane).collect(),
            free: (0..count).rev().map(LaneId).collect(),
            completed: VecDeque::with_capacity(count.into()),
            tasks: Vec::with_capacity(count.into()),
            gets: VecDeque::with_capacity(count.into()),
            changes: VecDeque::with_capacity(count.into()),
            changes_first: false,
            finished: VecDeque::with_capacity(count.into()),
            started: 0,
            begun: 0,
            operation_bytes: OPERATION_BYTES_AT_FIRST,
            candidates: CandidateTable::new(count),
        }
    }

    pub(crate) fn start(
        &mut self,
        action: Action<'s>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        let id = self.free.pop().ok_or(PipelineFull)?;
        let ticket = Ticket { number: self.started, lane: id };
        self.started += 1;
        let checked = self.check(action, key, value);
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.ticket = ticket;
        match checked {
            Ok(()) => {
                let hash = self.region.hasher.hash(key);
                let (key_bytes, value_bytes) = (key.len(), value.len());
                lane.job = Job { action, hash, key_bytes, value_bytes, successor: None };
                (lane.state, lane.value_lane) = (LaneState::Queued, id);
                Operation::fill(self.engine, id, key, value);
                if !self.try_combine(id, action, hash) {
                    // Posted with the next step, so that operations started together wait for
                    // memory together.
                    self.region.cache.prefetch(hash);
                    self.enqueue(id, action);
                }
            }
            Err(error) => {
                lane.mailbox.answer(Err(error));
                self.finished.push_back(id);
            }
        }
        Ok(ticket)
    }

    fn check(
        &self,
        action: Action<'_>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<(), Failure> {
        self.region.check_key(key)?;
        self.region.check_value(value)?;
        self.engine.check_end(action)?;
        if self.connection.control.is_lost() {
            return Err(Failure::Lost(self.region.index));
        }
        let may = !action.changes() || self.shared.role() == Role::Writer;
        if may { Ok(()) } else { Err(OperationError::Denied.into()) }
    }

    #[inline]
    fn enqueue(&mut self, id: LaneId, action: Action<'_>) {
        let queue = if action.changes() { &mut self.changes } else { &mut self.gets };
        queue.push_back(id);
    }

    /// A new job. A GET whose location is cached needs no task: it is posted here, and looked at
    /// when it completed.
    fn begin(&mut self, id: LaneId) {
        self.begun += 1;
        let lane = &mut self.lanes[usize::from(id.0)];
        if let Action::Get = lane.job.action {
            match lane.job.operation(self.engine.at(self.region), id).post_cached() {
                Ok(Some((read, _in_flight))) => {
                    (lane.read, lane.state) = (read, LaneState::Reading);
                    return;
                }
                Ok(None) => {}
                Err(failure) => {
                    // No longer queued: no operation joins it.
                    lane.state = LaneState::InTask;
                    lane.mailbox.answer(Err(failure));
                    return self.finish(id);
                }
            }
        }
        self.run_in_task(id);
    }

    /// The READ of a cached location completed.
    fn complete_reading(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        let Some(result) = self.engine.endpoint.take_result(id) else { return };
        let answer = match result {
            Ok(_) => {
                let operation = lane.job.operation(self.engine.at(self.region), id);
                match operation.complete_cached_read(&lane.read) {
                    Some(found) => Ok(Answer { applied: true, found }),
                    None => {
                        lane.job.successor = operation.successor(&lane.read);
                        return self.run_in_task(id);
                    }
                }
            }
            Err(error) => Err(Failure::at(self.region.index, error)),
        };
        lane.mailbox.answer(answer);
        self.finish(id);
    }

    /// The task is to do the job.
    fn run_in_task(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.mailbox.job.set(Some(lane.job));
        lane.state = LaneState::InTask;
        self.poll_lane(id);
    }

    /// It has a new job, or its chain completed.
    fn advance(&mut self, id: LaneId) {
        match self.lanes[usize::from(id.0)].state {
            LaneState::Queued => self.begin(id),
            LaneState::Following => {}
            LaneState::Reading => self.complete_reading(id),
            LaneState::InTask => self.poll_lane(id),
        }
    }

    fn poll_lane(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        let mut context = Context::from_waker(Waker::noop());
        // A lane's task never ends; it says so in its mailbox when a job is done.
        let _ = lane.task.as_mut().poll(&mut context);
        if lane.mailbox.is_answered.get() {
            self.finish(id);
        }
    }

    /// It has an answer, and with it its followers.
    #[inline]
    fn finish(&mut self, id: LaneId) {
        self.begun -= 1;
        self.finished.push_back(id);
        if let Some(first) = self.lanes[usize::from(id.0)].next_follower.take() {
            self.complete_followers(id, first);
        }
    }

    /// How many operations were started and not taken yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.lanes.len() - self.free.len()
    }

    /// How many operations can be in flight.
    pub(crate) fn depth(&self) -> usize {
        self.lanes.len()
    }

    /// A finished operation, if there is one. Does not wait.
    pub(crate) fn poll(&mut self) -> Option<Completed<'_>> {
        if self.finished.is_empty() {
            self.poll_lanes();
            let Self { engine, completed, .. } = self;
            engine.endpoint.try_step(|lane| completed.push_back(lane));
            self.poll_lanes();
        }
        self.take()
    }

    /// The next finished operation; `None` if none is in flight.
    pub(crate) fn wait(&mut self) -> Option<Completed<'_>> {
        while self.finished.is_empty() && self.in_flight() > 0 {
            // New jobs first: what they post shares the next doorbell.
            self.poll_lanes();
            if self.finished.is_empty() {
                let Self { engine, completed, .. } = self;
                engine.endpoint.step(|lane| completed.push_back(lane));
                self.poll_lanes();
            }
        }
        self.take()
    }

    /// Lets lanes go on as long as the fabric has room for what they post. A lane without room
    /// waits with nothing posted, so that however much is in flight, what is posted is executed
    /// while it is fresh.
    fn poll_lanes(&mut self) {
        if !self.completed.is_empty() || !self.tasks.is_empty() {
            self.engine.endpoint.tick();
            while let Some(id) = self.completed.pop_front() {
                let may_post = self.lanes[usize::from(id.0)].state == LaneState::InTask;
                if may_post && !self.engine.endpoint.has_room(self.region.index, 0) {
                    self.tasks.push(id);
                } else {
                    self.advance(id);
                }
            }
            while self.engine.endpoint.has_room(self.region.index, 0)
                && let Some(id) = self.tasks.pop()
            {
                self.advance(id);
            }
        }
        let any_new = !self.gets.is_empty() || !self.changes.is_empty();
        if any_new && self.has_room_for_new() {
            // Anew: looking at large values took its time.
            self.engine.endpoint.tick();
            self.candidates.clear();
            while self.has_room_for_new()
                && let Some(id) = self.next_new()
            {
                self.advance(id);
            }
            self.changes_first = !self.changes_first && !self.changes.is_empty();
        }
    }

    /// Whether another operation may begin. Those that have begun count with all that they are
    /// likely to have in flight: of a GET whose location is not cached that is a small window now,
    /// and a value of any size later, when the window must not have grown old.
    #[inline]
    fn has_room_for_new(&self) -> bool {
        let under_way_bytes = self.begun * self.operation_bytes;
        self.tasks.is_empty() && self.engine.endpoint.has_room(self.region.index, under_way_bytes)
    }

    #[inline]
    fn next_new(&mut self) -> Option<LaneId> {
        let Self { gets, changes, changes_first, .. } = self;
        let (first, second) = if *changes_first { (changes, gets) } else { (gets, changes) };
        first.pop_front().or_else(|| second.pop_front())
    }

    fn take(&mut self) -> Option<Completed<'_>> {
        let id = self.finished.pop_front()?;
        self.free.push(id);
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.mailbox.is_answered.set(false);
        let answer = lane.mailbox.answer.take()?;
        let fabric = self.engine.endpoint.fabric();
        let counted = fabric.lane_counters(id);
        lane.counters = counted.since(&lane.counted);
        lane.counted = *counted;
        if lane.counters.round_trips > 0 {
            let before = self.operation_bytes - self.operation_bytes / OPERATIONS_AVERAGED;
            self.operation_bytes = before + lane.counters.bytes() / OPERATIONS_AVERAGED;
        }
        let result = match answer {
            Ok(Answer { applied, found }) => Ok(match lane.job.action {
                Action::Get => Outcome::Value(found.map(|found| {
                    lane.value.clear();
                    let block = fabric.buffer(lane.value_lane, Buffer::ReadBlock);
                    lane.value.extend_from_slice(found.value_in(block));
                    (lane.value.as_slice(), found.version)
                })),
                Action::Put(_) => Outcome::Stored,
                _ => Outcome::Applied(applied),
            }),
            Err(failure) => {
                let error = self.shared.handle_failure(self.connection, failure);
                Err(error.unwrap_or_else(|| self.shared.disconnected()))
            }
        };
        Some(Completed { ticket: lane.ticket, result, counters: &lane.counters })
    }
}

impl Drop for LaneScheduler<'_> {
    /// Finishes what is in flight: an operation that stops between two round trips would leave a
    /// PENDING word behind.
    fn drop(&mut self) {
        while self.wait().is_some() {}
        self.engine.pipelined.set(false);
    }
}
