//! How a pipeline of a cluster reaches its shards, while operations on other shards are in flight.
//!
//! An operation whose shard has no connection is *parked*. A thread of the client connects to the
//! shard. Then this opens the shard's region on the *setup lane*, which no operation uses.
//! Meanwhile the setup lane waits for a millisecond again and again.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use farside_fabric::{Fabric, LaneId, Nanos, interrupt};
use farside_protocol::{Failure, OpenRegion, RetryReason};

use super::{LaneScheduler, LaneState};
use crate::Error;
use crate::connection::ServerConnection;
use crate::session_regions::OpenShard;
use crate::shards::ShardState;

/// How often parked operations look for their shards.
const LOOK_INTERVAL_NS: Nanos = 1_000_000;
/// Of so many lanes, one may wait for a shard; further operations on such shards fail at once. So
/// a shard that is down leaves most lanes to the others.
const LANES_PER_PARKED: usize = 4;

/// An operation that waits for its shard.
pub(super) struct ParkedLane {
    lane: LaneId,
    shard: usize,
    since: Instant,
}

/// The work of the setup lane.
#[derive(Default)]
pub(super) enum Setup<'s> {
    #[default]
    Idle,
    /// It waits for a moment.
    Waiting,
    /// It opens the region of a shard.
    Opening {
        shard: usize,
        connection: Arc<ServerConnection>,
        region: Pin<Box<dyn Future<Output = Result<OpenRegion, Failure>> + 's>>,
    },
}

/// What a parked operation finds.
enum Found<'s> {
    Open(&'s OpenShard),
    NotYet,
    Unavailable(Error),
}

impl<'s> LaneScheduler<'s> {
    /// Starts an operation whose shard has no connection, and whose lane is filled.
    #[cold]
    pub(super) fn start_without_shard(&mut self, id: LaneId, shard: usize) {
        if self.shared.cluster.is_none() {
            let open = self.targets[usize::from(id.0)];
            return self.answer_at_once(id, Failure::Lost(open.region.index));
        }
        let since = Instant::now();
        match self.find_shard(shard, since) {
            Found::NotYet if !self.may_park(shard) => {
                let (contact, tried) = (crate::Contact::Lost, Duration::ZERO);
                self.fail(id, self.shared.unreachable(shard, contact, tried));
            }
            Found::NotYet => self.park(ParkedLane { lane: id, shard, since }),
            found => self.unpark(id, found),
        }
    }

    /// Whether another operation may wait for this shard. A batch waits for all its operations
    /// anyway, and a shard that the session has never used is usually connected at once.
    fn may_park(&self, shard: usize) -> bool {
        self.waits_for_all
            || self.regions.latest(shard).is_none()
            || self.queues.parked.len() * LANES_PER_PARKED < self.lanes.len()
    }

    /// Parks an operation that has begun, and had no effect because its connection was lost.
    #[cold]
    pub(super) fn park_lost(&mut self, id: LaneId) {
        self.begun -= 1;
        let open = self.targets[usize::from(id.0)];
        self.handle(id).count_retry(RetryReason::Connection);
        open.connection.control.give_up();
        // Operations that are started from now on do not begin.
        self.shards[open.number] = None;
        self.engine.endpoint.fabric_mut().disconnect(open.region.index);
        self.park(ParkedLane { lane: id, shard: open.number, since: Instant::now() });
    }

    fn park(&mut self, parked: ParkedLane) {
        let lane = &mut self.lanes[usize::from(parked.lane.0)];
        lane.state = LaneState::Parked;
        lane.put = None;
        lane.job.successor = None;
        self.queues.parked.push(parked);
        self.wait_for_shards();
    }

    /// Makes the setup lane wait for a moment, unless it is at work.
    fn wait_for_shards(&mut self) {
        if matches!(self.setup, Setup::Idle) {
            let mut fabric = self.engine.endpoint.fabric_mut();
            let until = fabric.now() + LOOK_INTERVAL_NS;
            fabric.wait(self.regions.setup_lane(), until);
            self.setup = Setup::Waiting;
        }
    }

    /// Continues after a chain or a wait of the setup lane has completed.
    #[cold]
    pub(super) fn step_setup(&mut self) {
        match std::mem::take(&mut self.setup) {
            Setup::Idle => {}
            Setup::Waiting => {
                let _ = self.engine.endpoint.take_result(self.regions.setup_lane());
            }
            Setup::Opening { shard, connection, region } => {
                self.poll_opening(shard, connection, region);
            }
        }
        self.serve_parked();
    }

    fn poll_opening(
        &mut self,
        shard: usize,
        connection: Arc<ServerConnection>,
        mut region: Pin<Box<dyn Future<Output = Result<OpenRegion, Failure>> + 's>>,
    ) {
        let mut context = Context::from_waker(Waker::noop());
        let opened = match region.as_mut().poll(&mut context) {
            std::task::Poll::Pending => {
                self.setup = Setup::Opening { shard, connection, region };
                return;
            }
            std::task::Poll::Ready(opened) => opened,
        };
        let opened =
            opened.map_err(|failure| self.shared.handle_failure(shard, &connection, failure));
        match opened.map(|region| self.regions.opened(shard, region, connection)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) | Err(Some(error)) => self.fail_parked(shard, &error),
            // The connection was lost again.
            Err(None) => {}
        }
    }

    /// Looks for the shards of all parked operations.
    fn serve_parked(&mut self) {
        for parked in std::mem::take(&mut self.queues.parked) {
            match self.find_shard(parked.shard, parked.since) {
                Found::NotYet => self.queues.parked.push(parked),
                found => self.unpark(parked.lane, found),
            }
        }
        if !self.queues.parked.is_empty() {
            self.wait_for_shards();
        }
    }

    fn unpark(&mut self, id: LaneId, found: Found<'s>) {
        let lane = &mut self.lanes[usize::from(id.0)];
        match found {
            Found::Open(open) => {
                self.targets[usize::from(id.0)] = open;
                lane.state = LaneState::Queued;
                let action = lane.job.action;
                // Its limits may differ from those of the shard by which the operation was checked.
                let bytes = (lane.job.key_bytes, lane.job.value_bytes);
                match open.region.check_lengths(bytes) {
                    Ok(()) => self.enqueue(id, action),
                    Err(error) => self.answer_at_once(id, error.into()),
                }
            }
            Found::NotYet => {}
            Found::Unavailable(error) => self.fail(id, error),
        }
    }

    /// Answers an operation whose shard cannot be reached, and queues its followers again.
    fn fail(&mut self, id: LaneId, error: Error) {
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.unavailable = Some(Box::new(error));
        let failure = Failure::Lost(self.targets[usize::from(id.0)].region.index);
        let first_follower = lane.answer(Err(failure));
        self.queues.answered.push(id);
        if let Some(first) = first_follower {
            self.complete_followers(id, first);
        }
    }

    fn fail_parked(&mut self, shard: usize, error: &Error) {
        for parked in std::mem::take(&mut self.queues.parked) {
            match parked.shard == shard {
                true => self.fail(parked.lane, error.clone()),
                false => self.queues.parked.push(parked),
            }
        }
    }

    /// Returns the region of a shard for an operation that has waited since then. Begins to open it
    /// if there is a connection.
    fn find_shard(&mut self, shard: usize, since: Instant) -> Found<'s> {
        if let Some(open) = self.regions.live(shard) {
            self.shards[shard] = Some(open);
            return Found::Open(open);
        }
        if let Setup::Opening { .. } = self.setup {
            return Found::NotYet;
        }
        match self.shared.try_connection(shard) {
            ShardState::Down(error) => Found::Unavailable(error),
            ShardState::Connecting
                if since.elapsed() > self.shared.connect_options.timeout
                    || interrupt::is_given_up() =>
            {
                let (contact, tried) = (crate::Contact::Lost, since.elapsed());
                Found::Unavailable(self.shared.unreachable(shard, contact, tried))
            }
            ShardState::Connecting => Found::NotYet,
            ShardState::Connected(connection) => match self.begin_opening(shard, connection) {
                Ok(()) => Found::NotYet,
                Err(error) => Found::Unavailable(error),
            },
        }
    }

    fn begin_opening(
        &mut self,
        shard: usize,
        connection: Arc<ServerConnection>,
    ) -> crate::Result<()> {
        if let Setup::Waiting = self.setup {
            // The lane has one chain or wait at a time. The wait ends within a moment.
            return Ok(());
        }
        let Some(index) = self.regions.add(self.shared, shard, &connection)? else {
            connection.control.give_up();
            return Ok(());
        };
        let (engine, lane, opened) = (self.engine, self.regions.setup_lane(), connection.clone());
        let region = Box::pin(async move { opened.open_on(engine, lane, index).await });
        self.poll_opening(shard, connection, region);
        Ok(())
    }
}
