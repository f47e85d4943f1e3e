//! Many operations in flight on one session: the door.

use std::fmt;

use farside_fabric::{Counters, LaneId};

use farside_protocol::{Action, Lifetime};

use crate::client::ClientInner;
use crate::connection::{ServerConnection, SessionRegion};
use crate::lanes::LaneScheduler;
use crate::{Result, Store, Version};

/// Names an operation in a pipeline: numbered in the order they were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub(crate) number: u64,
    pub(crate) lane: LaneId,
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
    /// What it asked of the fabric; nothing if it shared another operation's chain. Doorbells are
    /// shared and not counted here.
    pub counters: &'p Counters,
}

/// What an operation of a pipeline came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'p> {
    /// GET: the value and its version; `None` if the key is absent.
    Value(Option<(&'p [u8], Version)>),
    /// PUT: stored.
    Stored,
    /// Every other: whether the key was as required, and so the change made.
    Applied(bool),
}

/// Up to `pipeline_depth` operations in flight.
///
/// Starting an operation copies its key and value and never waits: when all lanes are busy it fails
/// with [`PipelineFull`]. Operations are posted and go on only inside [`Pipeline::poll`],
/// [`Pipeline::wait`] and drop: call one of them regularly. What is still in flight when the
/// pipeline is dropped is finished first.
///
/// Operations in flight are concurrent with each other, also those on the same key. GETs of one key
/// that are posted together may share a READ, and of such PUTs perhaps only the last one is carried
/// out, as if it had overwritten the others.
///
/// When the connection is lost, operations in flight fail with
/// [`Error::Disconnected`](crate::Error::Disconnected) (they have not happened) or
/// [`OperationError::Indeterminate`](crate::OperationError::Indeterminate). The pipeline stays
/// disconnected: drop it and take another from the session, which reconnects.
pub struct Pipeline<'s>(LaneScheduler<'s>);

impl fmt::Debug for Pipeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (depth, in_flight) = (self.depth(), self.in_flight());
        let mut pipeline = f.debug_struct("Pipeline");
        pipeline.field("depth", &depth).field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

impl<'s> Pipeline<'s> {
    /// Keeps up to `depth` operations in flight, as far as the session has lanes.
    pub(crate) fn new(
        handle: SessionRegion<'s>,
        connection: &'s ServerConnection,
        shared: &'s ClientInner,
        depth: usize,
    ) -> Self {
        Self(LaneScheduler::new(handle, connection, shared, depth))
    }

    /// Starts a GET.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn get(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Action::Get, key, &[])
    }

    /// Starts a PUT.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Action::Put(Lifetime::Forever), key, value)
    }

    /// Starts a store under a condition, for ever or for a time. An expected value is not copied.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn store(
        &mut self,
        key: &[u8],
        value: &[u8],
        store: Store<'s>,
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.start(store.action(), key, value)
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
        self.start(Action::Insert(Lifetime::Forever), key, value)
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
        self.start(Action::Update(Lifetime::Forever), key, value)
    }

    /// Starts a DELETE.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    pub fn delete(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.start(Action::Delete, key, &[])
    }

    pub(crate) fn start(
        &mut self,
        action: Action<'s>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(action, key, value)
    }

    /// How many operations can be started before one has to be taken.
    pub fn free_lanes(&self) -> usize {
        self.depth() - self.in_flight()
    }

    /// How many operations were started and not taken yet.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    /// How many operations can be in flight.
    pub fn depth(&self) -> usize {
        self.0.depth()
    }

    /// A finished operation, if there is one. Does not wait.
    #[inline]
    pub fn poll(&mut self) -> Option<Completed<'_>> {
        self.0.poll()
    }

    /// The next finished operation; `None` if none is in flight.
    #[inline]
    pub fn wait(&mut self) -> Option<Completed<'_>> {
        self.0.wait()
    }
}
