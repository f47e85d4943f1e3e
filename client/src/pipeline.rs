//! Many operations in flight on one session: the public interface.

mod lanes;

use std::fmt;

use farside_fabric::{Counters, LaneId};

use farside_protocol::{Action, Lifetime};

use self::lanes::LaneScheduler;
use crate::client::ClientInner;
use crate::connection::{ServerConnection, SessionRegion};
use crate::{Result, Store, Version};

/// Identifies an operation of a pipeline. Tickets are numbered in the order of the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub(crate) number: u64,
    pub(crate) lane: LaneId,
}

impl Ticket {
    /// Returns the number of operations that were started in the pipeline before this one.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// Returns the number of the operation's lane, below [`Pipeline::depth`]. No other operation
    /// uses the lane until the [`Completed`] of this one is taken. So the number can index an array
    /// of data for each operation.
    pub const fn lane(self) -> usize {
        self.lane.0 as usize
    }
}

/// The pipeline has no free lane: take a [`Completed`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all lanes of the pipeline are busy: take a completed operation first")]
pub struct PipelineFull;

/// A completed operation of a pipeline.
#[derive(Debug)]
pub struct Completed<'p> {
    /// The operation's ticket.
    pub ticket: Ticket,
    /// Its result. A value's bytes are valid until the pipeline is used again.
    pub result: Result<Outcome<'p>>,
    /// The verbs of this operation; none if it shared another operation's chain. Doorbells are not
    /// counted here, because operations share them.
    pub counters: &'p Counters,
}

/// The result of a pipeline's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'p> {
    /// GET: the value and its version; `None` if the key is absent.
    Value(Option<(&'p [u8], Version)>),
    /// PUT: the value was stored.
    Stored,
    /// All other operations: whether the condition held, and so the change was made.
    Applied(bool),
}

/// Up to `pipeline_depth` operations in flight.
///
/// Starting an operation copies its key and value, and never waits: if all lanes are busy, it fails
/// with [`PipelineFull`]. Operations are posted and advance only inside [`Pipeline::poll`],
/// [`Pipeline::wait`] and drop, so call `poll` or `wait` regularly. Dropping the pipeline completes
/// the operations in flight.
///
/// Operations in flight are concurrent with each other, also those on the same key. GETs of one key
/// that are posted together may share a READ. Of PUTs to one key that are posted together, possibly
/// only the last is executed, as if it had overwritten the others.
///
/// When the connection is lost, operations in flight fail with
/// [`Error::Disconnected`](crate::Error::Disconnected) (without an effect) or
/// [`OperationError::Indeterminate`](crate::OperationError::Indeterminate). The pipeline stays
/// disconnected: drop it and create another from the session, which reconnects.
pub struct Pipeline<'s>(LaneScheduler<'s>);

impl fmt::Debug for Pipeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (depth, in_flight) = (self.depth(), self.in_flight());
        let mut pipeline = f.debug_struct("Pipeline");
        pipeline.field("depth", &depth).field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

// Some functions are not inlined, because tools/scripts/instructions.sh counts the instructions of
// their calls.
impl<'s> Pipeline<'s> {
    /// A pipeline of up to `depth` operations in flight, but at most as many as there are lanes.
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
    #[inline(never)]
    pub fn get(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(Action::Get, key, &[])
    }

    /// Starts a PUT.
    ///
    /// # Errors
    /// [`PipelineFull`]; every other error comes with its [`Completed`].
    #[inline(never)]
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(Action::Put(Lifetime::Forever), key, value)
    }

    /// Starts a store with a condition, a TTL, or both. An expected value is not copied.
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

    /// Starts an INSERT: a PUT that takes effect only if the key is absent.
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

    /// Starts an UPDATE: a PUT that takes effect only if the key is present.
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

    #[inline(never)]
    pub(crate) fn start(
        &mut self,
        action: Action<'s>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(action, key, value)
    }

    /// Returns the number of operations that can be started before a [`Completed`] must be taken.
    pub fn free_lanes(&self) -> usize {
        self.depth() - self.in_flight()
    }

    /// Returns the number of operations that were started and whose [`Completed`] was not taken
    /// yet.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    /// Returns the number of operations that can be in flight.
    pub fn depth(&self) -> usize {
        self.0.depth()
    }

    /// Returns a completed operation, if there is one. Does not wait.
    #[inline(never)]
    pub fn poll(&mut self) -> Option<Completed<'_>> {
        self.0.poll()
    }

    /// Waits for the next completed operation; `None` if none is in flight.
    #[inline(never)]
    pub fn wait(&mut self) -> Option<Completed<'_>> {
        self.0.wait()
    }
}
