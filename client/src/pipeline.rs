//! Many operations in flight on one session: the public interface.

mod completed;
mod lanes;

use std::fmt;
use std::sync::Arc;

use farside_fabric::Wakeup;

use farside_protocol::{Action, Lifetime, Version};

pub use self::completed::{Completed, Ticket};
use self::lanes::LaneScheduler;
pub(crate) use self::lanes::PipelineMemory;
use crate::client_inner::ClientInner;
use crate::session_regions::SessionRegions;
use crate::{PipelineFull, Result, Session, Store};

/// Up to `pipeline_depth` operations in flight.
///
/// Starting an operation copies its key and value, and never waits. If all lanes are busy, it fails
/// with [`PipelineFull`]; every other error comes with the operation's [`Completed`]. The expected
/// value of a [`Store`] is not copied. Operations are posted and advance only inside
/// [`Pipeline::poll`], [`Pipeline::wait`] and drop, so call `poll` or `wait` regularly. Dropping
/// the pipeline completes the operations in flight.
///
/// Operations in flight are concurrent with each other, also those on the same key. GETs of one key
/// that are posted together may share a READ. Of PUTs to one key that are posted together, possibly
/// only the last is executed, as if it had overwritten the others.
///
/// When the connection is lost, operations in flight fail with
/// [`Error::Disconnected`](crate::Error::Disconnected) (without an effect) or
/// [`OperationError::Indeterminate`](crate::OperationError::Indeterminate). The pipeline stays
/// disconnected: drop it and create another from the session, which reconnects.
///
/// In a cluster a pipeline stays usable, and connects to a shard when an operation first needs it.
/// If a shard is lost, operations on it that had no effect wait until it is back. Once an attempt
/// to connect has failed, which takes half a second at most, a quarter of the lanes may wait (at
/// least one). Beyond that, and once the timeout for connecting is over, operations fail with
/// [`Error::Unavailable`](crate::Error::Unavailable). The operations on all other shards go on,
/// even if the caller starts each operation again as soon as it fails.
pub struct Pipeline<'s>(LaneScheduler<'s>);

impl fmt::Debug for Pipeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (depth, in_flight) = (self.depth(), self.in_flight());
        let mut pipeline = f.debug_struct("Pipeline");
        pipeline.field("depth", &depth).field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

impl Session {
    /// Returns a pipeline, which keeps up to `pipeline_depth` operations in flight.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let mut pipeline = session.pipeline()?;
    /// for number in 0..1000_u32 {
    ///     if pipeline.free_lanes() == 0 {
    ///         pipeline.wait().expect("all lanes are busy").result?;
    ///     }
    ///     pipeline.put(number.to_le_bytes(), "value")?;
    /// }
    /// while let Some(completed) = pipeline.wait() {
    ///     completed.result?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if the call reconnects.
    pub fn pipeline(&mut self) -> Result<Pipeline<'_>> {
        self.pipeline_of(usize::MAX)
    }

    /// [`Session::pipeline`] for at most this many operations in flight: creating a pipeline takes
    /// time for each lane.
    pub(crate) fn pipeline_of(&mut self, operations: usize) -> Result<Pipeline<'_>> {
        if self.shared.cluster.is_none() || self.regions.engine.pipelined.get() {
            self.handle(0)?;
        }
        let Self { regions, shared, pipeline_memory, .. } = self;
        regions.drop_former();
        Ok(Pipeline::new(regions, shared, pipeline_memory, operations))
    }
}

impl<'s> Pipeline<'s> {
    /// A pipeline of up to `depth` operations in flight, but at most as many as there are lanes.
    pub(crate) fn new(
        regions: &'s SessionRegions,
        shared: &'s Arc<ClientInner>,
        memory: &'s mut PipelineMemory,
        depth: usize,
    ) -> Self {
        Self(LaneScheduler::new(regions, shared, memory, depth))
    }

    crate::operations::define_operations!(&mut Self, std::result::Result<Ticket, PipelineFull>, 's);

    /// Lets every operation wait for its shard, because the caller waits for all of them.
    pub(crate) fn wait_for_all(&mut self) {
        self.0.wait_for_all();
    }

    /// Makes a signal of `wakeup` end the sleep of [`Pipeline::relax`].
    pub(crate) fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        self.0.set_wakeup(wakeup);
    }

    /// Spins or sleeps for a moment, after [`Pipeline::poll`] returned `None`.
    pub(crate) fn relax(&mut self) {
        self.0.relax();
    }

    // Some functions are not inlined, because tools/scripts/instructions.sh counts the instructions
    // of their calls.
    #[inline(never)]
    fn begin_get(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(Action::Get, key, &[])
    }

    #[inline(never)]
    fn begin_put(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(Action::Put(Lifetime::FOREVER), key, value)
    }

    /// Starts an operation. Every error other than [`PipelineFull`] comes with its [`Completed`].
    #[inline(never)]
    pub(crate) fn begin(
        &mut self,
        action: Action<'s>,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        self.0.start(action, key, value)
    }

    /// Returns the number of operations that can be started before a [`Completed`] must be taken.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let mut pipeline = session.pipeline()?;
    /// for number in 0..pipeline.free_lanes() {
    ///     pipeline.get(format!("user:{number}"))?;
    /// }
    /// assert_eq!(pipeline.free_lanes(), 0);
    /// assert_eq!(pipeline.get("user:0"), Err(farside::PipelineFull));
    /// # Ok(()) }
    /// ```
    pub fn free_lanes(&self) -> usize {
        self.depth() - self.in_flight()
    }

    /// Returns the number of operations that were started and whose [`Completed`] was not taken
    /// yet.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let mut pipeline = session.pipeline()?;
    /// pipeline.get("one")?;
    /// pipeline.get("two")?;
    /// assert_eq!(pipeline.in_flight(), 2);
    /// pipeline.wait();
    /// assert_eq!(pipeline.in_flight(), 1);
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    /// Returns the number of operations that can be in flight.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let pipeline = session.pipeline()?;
    /// assert_eq!(pipeline.depth(), pipeline.free_lanes());
    /// # Ok(()) }
    /// ```
    pub fn depth(&self) -> usize {
        self.0.depth()
    }

    /// Returns a completed operation, if there is one. Does not wait.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let mut pipeline = session.pipeline()?;
    /// pipeline.put("greeting", "hello")?;
    /// while pipeline.in_flight() > 0 {
    ///     if let Some(completed) = pipeline.poll() {
    ///         assert!(completed.result?.applied);
    ///     } // otherwise there is time for other work
    /// }
    /// # Ok(()) }
    /// ```
    #[inline(never)]
    pub fn poll(&mut self) -> Option<Completed<'_>> {
        self.0.poll()
    }

    /// Waits for the next completed operation; `None` if none is in flight.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let mut pipeline = session.pipeline()?;
    /// let (one, two) = (pipeline.get("one")?, pipeline.put("two", "2")?);
    /// while let Some(completed) = pipeline.wait() {
    ///     let outcome = completed.result?;
    ///     match completed.ticket {
    ///         ticket if ticket == one => assert!(outcome.value.is_none()),
    ///         ticket => assert!(ticket == two && outcome.applied),
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    #[inline(never)]
    pub fn wait(&mut self) -> Option<Completed<'_>> {
        self.0.wait()
    }
}
