//! How a pipeline of a cluster reaches its shards, while operations on other shards are in flight.
//!
//! An operation whose shard has no connection is *parked*. A thread of the client connects to the
//! shard. Then this opens the shard's region on the *setup lane*, which no operation uses.
//! Meanwhile the setup lane waits for a millisecond again and again.
//!
//! A shard that is down must leave most lanes to the others. So only a quarter of the lanes may be
//! parked, except in a short time in which most shards come back: until an attempt to connect has
//! failed. A parked operation fails after the timeout for connecting at the latest, and at once
//! when the client knows that the shard is down.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use farside_fabric::{Fabric, LaneId, Nanos, RegionIndex, interrupt};
use farside_protocol::{Failure, OpenRegion, RetryReason};

use super::{LaneScheduler, LaneState};
use crate::connection::ServerConnection;
use crate::reconnecting::ReconnectBudget;
use crate::session_regions::OpenShard;
use crate::shards::ShardState;
use crate::{Contact, Error};

/// How often parked operations look for their shards.
const LOOK_INTERVAL_NS: Nanos = 1_000_000;
/// Of so many lanes, one may wait for a shard for as long as connecting may take.
const LANES_PER_PARKED: usize = 4;
/// How long more lanes may wait, namely until the first attempt to connect has failed, but not
/// longer than this.
const BEYOND_QUOTA_MAX: Duration = Duration::from_millis(500);
/// After a failure to connect a session, for which its pipeline does not advance, this is tried
/// again after as many times the time that it took.
const POSTPONED_FACTOR: u32 = 10;

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
    Opening(Opening<'s>),
}

/// The opening of a shard's region, with a chain of the setup lane in flight.
pub(super) struct Opening<'s> {
    shard: usize,
    index: RegionIndex,
    connection: Arc<ServerConnection>,
    region: Pin<Box<dyn Future<Output = Result<OpenRegion, Failure>> + 's>>,
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
            Found::NotYet => self.park(ParkedLane { lane: id, shard, since }),
            found => self.unpark(id, found),
        }
    }

    /// Parks an operation that has begun, and had no effect because its connection was lost. Its
    /// followers are parked as operations of their own, so that each lane that waits counts.
    #[cold]
    pub(super) fn park_lost(&mut self, id: LaneId) {
        self.begun -= 1;
        let open = self.targets[usize::from(id.0)];
        let shard = open.number;
        self.handle(id).count_retry(RetryReason::Connection);
        open.connection.control.give_up();
        // The shard may have been opened again before this operation failed.
        if self.regions.latest(shard).is_some_and(|latest| std::ptr::eq(latest, open)) {
            // Operations that are started from now on do not begin.
            self.shards[shard] = None;
            self.engine.endpoint.fabric_mut().disconnect(open.region.index);
        }
        let mut next = Some(id);
        while let Some(id) = next {
            let lane = &mut self.lanes[usize::from(id.0)];
            next = lane.next_follower.take();
            if lane.losses.0 != lane.ticket.number {
                lane.losses = (lane.ticket.number, ReconnectBudget::default());
            }
            let budget = &mut lane.losses.1;
            let since = budget.count(self.shared.connect_options.timeout);
            let tried = budget.since_first_loss();
            match since {
                Some(since) => self.park(ParkedLane { lane: id, shard, since }),
                None => self.fail(id, self.shared.unreachable(shard, Contact::Lost, tried)),
            }
        }
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
            Setup::Opening(opening) => self.poll_opening(opening),
        }
        self.serve_parked();
    }

    /// Ends the work of the setup lane. Otherwise the next pipeline would take its completion for
    /// one of its own.
    pub(super) fn end_setup(&mut self) {
        let (lane, endpoint) = (self.regions.setup_lane(), &self.engine.endpoint);
        match std::mem::take(&mut self.setup) {
            Setup::Idle => return,
            Setup::Waiting => {}
            // No operation waits for it any more.
            Setup::Opening(Opening { index, .. }) => endpoint.fabric_mut().disconnect(index),
        }
        let mut has_ended = false;
        while !has_ended {
            endpoint.step(|completed| has_ended |= completed == lane);
        }
        let _ = endpoint.take_result(lane);
    }

    fn poll_opening(&mut self, mut opening: Opening<'s>) {
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(opened) = opening.region.as_mut().poll(&mut context) else {
            self.setup = Setup::Opening(opening);
            return;
        };
        let Opening { shard, connection, .. } = opening;
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

    /// Answers an operation whose shard cannot be reached.
    fn fail(&mut self, id: LaneId, error: Error) {
        self.lanes[usize::from(id.0)].unavailable = Some(Box::new(error));
        let failure = Failure::Lost(self.targets[usize::from(id.0)].region.index);
        self.answer_at_once(id, failure);
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
        let (tried, has_failed) = match self.shared.try_connection(shard) {
            ShardState::Down(error) => return Found::Unavailable(error),
            ShardState::Connecting { tried, has_failed } => (tried, has_failed),
            ShardState::Connected(connection) if self.may_open(shard) => {
                return match self.begin_opening(shard, connection) {
                    Ok(()) => Found::NotYet,
                    Err(error) => Found::Unavailable(error),
                };
            }
            ShardState::Connected(_) => (Duration::ZERO, self.is_postponed(shard)),
        };
        let (waited, timeout) = (since.elapsed(), self.shared.connect_options.timeout);
        let tried = tried.max(waited);
        let has_quota =
            self.waits_for_all || self.queues.parked.len() * LANES_PER_PARKED < self.lanes.len();
        let may_wait = match has_quota {
            true => waited <= timeout,
            false => !has_failed && tried <= BEYOND_QUOTA_MAX.min(timeout),
        };
        if may_wait && !interrupt::is_given_up() {
            return Found::NotYet;
        }
        Found::Unavailable(self.shared.unreachable(shard, Contact::Lost, tried))
    }

    /// Whether the setup lane is free, and may open the region of this shard.
    fn may_open(&mut self, shard: usize) -> bool {
        let now = Instant::now();
        self.postponed.retain(|(_, until)| *until > now);
        // A lane has one chain or wait at a time. The wait ends within a moment.
        matches!(self.setup, Setup::Idle) && !self.is_postponed(shard)
    }

    fn is_postponed(&self, shard: usize) -> bool {
        self.postponed.iter().any(|(postponed, _)| *postponed == shard)
    }

    fn begin_opening(
        &mut self,
        shard: usize,
        connection: Arc<ServerConnection>,
    ) -> crate::Result<()> {
        let started = Instant::now();
        let index = match self.regions.add(self.shared, shard, &connection) {
            Ok(Some(index)) => index,
            Ok(None) => {
                connection.control.give_up();
                return Ok(());
            }
            // The server may only be busy.
            Err(Error::Unavailable { .. }) => {
                let until = Instant::now() + started.elapsed() * POSTPONED_FACTOR;
                self.postponed.push((shard, until));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let (engine, lane, opened) = (self.engine, self.regions.setup_lane(), connection.clone());
        let region = Box::pin(async move { opened.open_on(engine, lane, index).await });
        self.poll_opening(Opening { shard, index, connection, region });
        Ok(())
    }
}
