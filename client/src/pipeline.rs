//! Many operations in flight on one session.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use farside_common::control::Role;
use farside_common::fabric::{Buffer, Counters, Fabric, LaneId};
use farside_common::hash::KeyHash;

use crate::client::Shared;
use crate::connection::{Connection, ShmEngine, ShmOperation};
use crate::engine::Failure;
use crate::protocol::{Found, Operation};
use crate::{Error, Result, Version};

/// Names an operation in a pipeline: numbered in the order they were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    number: u64,
    lane: LaneId,
}

impl Ticket {
    /// How many operations were started in the pipeline before this one.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// Below [`Pipeline::depth`], and no other operation's until this one was taken: where in an
    /// array to keep what belongs to it.
    pub const fn lane(self) -> usize {
        self.lane.0 as usize
    }
}

/// The pipeline has no free lane: take a [`Completed`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all lanes of the pipeline are busy: take a completed operation first")]
pub struct PipelineFull;

/// A finished operation of a pipeline.
#[derive(Debug)]
pub struct Completed<'p> {
    /// Which.
    pub ticket: Ticket,
    /// What it came to. The bytes stay until the pipeline is used again.
    pub result: Result<Outcome<'p>>,
    /// What it asked of the fabric; doorbells are shared and not counted here.
    pub counters: &'p Counters,
}

/// What an operation of a pipeline came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'p> {
    /// GET: the value and its version; `None` if the key is absent.
    Value(Option<(&'p [u8], Version)>),
    /// PUT: stored.
    Stored,
    /// INSERT, UPDATE, DELETE: whether the key was as required, and so the change made.
    Applied(bool),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Get,
    Put,
    Insert,
    Update,
    Delete,
}

/// What a lane is to do. Key and value stand in its image buffer.
#[derive(Clone, Copy)]
struct Job {
    kind: Kind,
    hash: KeyHash,
    key_bytes: usize,
    value_bytes: usize,
}

enum Answer {
    /// The bytes are in the lane's block buffer.
    Value(Option<Found>),
    Stored,
    Applied(bool),
}

/// Between a pipeline and one of its lanes.
#[derive(Default)]
struct Mailbox {
    job: Cell<Option<Job>>,
    answer: Cell<Option<std::result::Result<Answer, Failure>>>,
    is_answered: Cell<bool>,
}

impl Mailbox {
    #[inline]
    fn answer(&self, answer: std::result::Result<Answer, Failure>) {
        self.answer.set(Some(answer));
        self.is_answered.set(true);
    }
}

struct Lane<'s> {
    mailbox: Rc<Mailbox>,
    /// Runs one job after another, for ever: made once, so that operations allocate nothing.
    task: Pin<Box<dyn Future<Output = ()> + 's>>,
    ticket: Ticket,
    /// The value that the operation taken last found.
    value: Vec<u8>,
    /// What the operation taken last asked of the fabric, and the lane in all until then.
    counters: Counters,
    counted: Counters,
}

/// Up to `pipeline_depth` operations in flight.
///
/// Starting an operation copies its key and value and never waits: when all lanes are busy it fails
/// with [`PipelineFull`]. Operations in flight are concurrent with each other, also those on the
/// same key. What is still in flight when the pipeline is dropped is finished first.
///
/// When the connection is lost, operations in flight fail with [`Error::Unreachable`] (they have
/// not happened) or [`Error::Indeterminate`]; the next use of the session reconnects.
pub struct Pipeline<'s> {
    engine: &'s ShmEngine,
    connection: &'s Connection,
    shared: &'s Shared,
    lanes: Vec<Lane<'s>>,
    free: Vec<LaneId>,
    /// Lanes that have a new job, or whose chain completed: to be polled.
    ready: Vec<LaneId>,
    finished: VecDeque<LaneId>,
    started: u64,
}

impl<'s> Pipeline<'s> {
    pub(crate) fn new(
        engine: &'s ShmEngine,
        connection: &'s Connection,
        shared: &'s Shared,
    ) -> Self {
        engine.pipelined.set(true);
        let count = engine.lanes;
        let lane = |id| {
            let id = LaneId(id);
            let mailbox = Rc::new(Mailbox::default());
            let task = Box::pin(run_lane(engine, id, mailbox.clone()));
            let ticket = Ticket { number: 0, lane: id };
            let counted = *engine.endpoint.fabric().lane_counters(id);
            Lane { mailbox, task, ticket, value: Vec::new(), counters: counted, counted }
        };
        Self {
            engine,
            connection,
            shared,
            lanes: (0..count).map(lane).collect(),
            free: (0..count).rev().map(LaneId).collect(),
            ready: Vec::with_capacity(count.into()),
            finished: VecDeque::with_capacity(count.into()),
            started: 0,
        }
    }

    /// Starts a GET.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn get(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Kind::Get, key, &[])
    }

    /// Starts a PUT.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Kind::Put, key, value)
    }

    /// Starts a PUT that happens only if the key is absent.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn insert(
        &mut self,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Kind::Insert, key, value)
    }

    /// Starts a PUT that happens only if the key is there.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn update(
        &mut self,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Kind::Update, key, value)
    }

    /// Starts a DELETE.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn delete(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Kind::Delete, key, &[])
    }

    pub(crate) fn start(
        &mut self,
        kind: Kind,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        let id = self.free.pop().ok_or(PipelineFull)?;
        let ticket = Ticket { number: self.started, lane: id };
        self.started += 1;
        let checked = self.check(kind, key, value);
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.ticket = ticket;
        match checked {
            Ok(()) => {
                let hash = self.engine.hasher.hash(key);
                let (key_bytes, value_bytes) = (key.len(), value.len());
                let job = Job { kind, hash, key_bytes, value_bytes };
                ShmOperation::fill(self.engine, id, key, value);
                lane.mailbox.job.set(Some(job));
                // Posted with the next step, so that operations started together wait for memory
                // together.
                self.engine.cache().expect(hash);
                self.ready.push(id);
            }
            Err(error) => {
                lane.mailbox.answer(Err(error.into()));
                self.finished.push_back(id);
            }
        }
        Ok(ticket)
    }

    fn check(&self, kind: Kind, key: &[u8], value: &[u8]) -> Result<()> {
        self.engine.check_key(key)?;
        self.engine.check_value(value)?;
        if self.connection.control.is_lost() {
            return Err(self.shared.unreachable(Duration::ZERO));
        }
        let may = kind == Kind::Get || self.shared.role() == Role::Writer;
        if may { Ok(()) } else { Err(Error::Denied) }
    }

    fn poll_lane(&mut self, id: LaneId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        let mut context = Context::from_waker(Waker::noop());
        // A lane's task never ends; it says so in its mailbox when a job is done.
        let _ = lane.task.as_mut().poll(&mut context);
        if lane.mailbox.is_answered.get() {
            self.finished.push_back(id);
        }
    }

    /// How many operations can be started before one has to be taken.
    pub fn free_lanes(&self) -> usize {
        self.free.len()
    }

    /// How many operations were started and not taken yet.
    pub fn in_flight(&self) -> usize {
        self.lanes.len() - self.free.len()
    }

    /// How many operations can be in flight.
    pub fn depth(&self) -> usize {
        self.lanes.len()
    }

    /// A finished operation, if there is one. Does not wait.
    pub fn poll(&mut self) -> Option<Completed<'_>> {
        if self.finished.is_empty() {
            self.poll_ready();
            let Self { engine, ready, .. } = self;
            engine.endpoint.try_step(|lane| ready.push(lane));
            self.poll_ready();
        }
        self.take()
    }

    /// The next finished operation; `None` if none is in flight.
    pub fn wait(&mut self) -> Option<Completed<'_>> {
        while self.finished.is_empty() && self.in_flight() > 0 {
            // New jobs first: what they post shares the next doorbell.
            if self.ready.is_empty() {
                let Self { engine, ready, .. } = self;
                engine.endpoint.step(|lane| ready.push(lane));
            }
            self.poll_ready();
        }
        self.take()
    }

    fn poll_ready(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        self.engine.endpoint.tick();
        for at in 0..self.ready.len() {
            self.poll_lane(self.ready[at]);
        }
        self.ready.clear();
    }

    fn take(&mut self) -> Option<Completed<'_>> {
        let id = self.finished.pop_front()?;
        self.free.push(id);
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.mailbox.is_answered.set(false);
        let answer = lane.mailbox.answer.take()?;
        let fabric = self.engine.endpoint.fabric();
        let counted = *fabric.lane_counters(id);
        lane.counters = counted - lane.counted;
        lane.counted = counted;
        let result = match answer {
            Ok(Answer::Value(None)) => Ok(Outcome::Value(None)),
            Ok(Answer::Value(Some(found))) => {
                lane.value.clear();
                lane.value.extend_from_slice(found.value_in(fabric.buffer(id, Buffer::Block)));
                Ok(Outcome::Value(Some((&lane.value, found.version))))
            }
            Ok(Answer::Stored) => Ok(Outcome::Stored),
            Ok(Answer::Applied(applied)) => Ok(Outcome::Applied(applied)),
            Err(Failure::Error(error)) => Err(*error),
            Err(Failure::Disconnected) => {
                self.connection.control.give_up();
                Err(self.shared.unreachable(Duration::ZERO))
            }
        };
        Some(Completed { ticket: lane.ticket, result, counters: &lane.counters })
    }
}

impl Drop for Pipeline<'_> {
    /// Finishes what is in flight: an operation that stops between two round trips would leave a
    /// PENDING word behind.
    fn drop(&mut self) {
        while self.wait().is_some() {}
        self.engine.pipelined.set(false);
    }
}

/// A lane's task: waits for a job, runs it, answers, for ever.
async fn run_lane(engine: &ShmEngine, lane: LaneId, mailbox: Rc<Mailbox>) {
    loop {
        let job = poll_fn(|_| mailbox.job.take().map_or(Poll::Pending, Poll::Ready)).await;
        let operation = Operation::staged(engine, lane, job.hash, job.key_bytes, job.value_bytes);
        mailbox.answer(run_job(job.kind, &operation).await);
    }
}

async fn run_job(kind: Kind, operation: &ShmOperation<'_>) -> std::result::Result<Answer, Failure> {
    Ok(match kind {
        Kind::Get => Answer::Value(operation.get().await?),
        Kind::Put => {
            operation.put().await?;
            Answer::Stored
        }
        Kind::Insert => Answer::Applied(operation.insert().await?),
        Kind::Update => Answer::Applied(operation.update().await?),
        Kind::Delete => Answer::Applied(operation.delete().await?),
    })
}
