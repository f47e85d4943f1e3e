//! A peer as a [`MeasuredStore`]: one operation after another, or many, each on a lane of the
//! pipeline. Each such lane has [`Peer::LANES`] lanes of the fabric. As in Farside's pipelines each
//! lane has a task that lives as long as the pipeline, so operations allocate nothing.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside::{Counters, PipelineFull};
use farside_bench::records::Key;
use farside_bench::store::{Action, Completed, MeasuredStore, Outcome, Pipelined};
use farside_fabric::{Fabric, LaneId, RegionIndex};

use super::{Peer, PeerError, Result};

/// A store: a peer's client, with `depth` lanes for operations.
pub struct PeerStore<P: Peer> {
    pub(super) peer: P,
    depth: u16,
}

impl<P: Peer> PeerStore<P> {
    /// A client whose fabric has `depth` times [`Peer::LANES`] lanes.
    pub fn new(peer: P, depth: u16) -> Self {
        Self { peer, depth }
    }
}

impl<P: Peer> MeasuredStore for PeerStore<P> {
    type Error = PeerError;
    type Pipeline<'s>
        = PeerPipeline<'s, P>
    where
        P: 's;

    fn perform<'v>(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
        found: &'v mut Vec<u8>,
    ) -> Result<Outcome<'v>> {
        found.clear();
        found.extend_from_slice(value);
        let operation = self.peer.perform(LaneId(0), action, key, found);
        let applied = drive_operation(&self.peer, operation)?;
        Ok(action.outcome(applied, found))
    }

    fn pipeline(&mut self) -> Result<PeerPipeline<'_, P>> {
        Ok(PeerPipeline::new(&self.peer, self.depth))
    }

    fn counters(&self) -> Counters {
        self.peer.endpoint().fabric().counters()
    }
}

impl<P: Peer> Drop for PeerStore<P> {
    /// Waits for the chains in flight, because their memory may get another use.
    fn drop(&mut self) {
        wait_for_chains(&self.peer);
    }
}

/// Performs one operation and waits for it. If no chain is in flight, it is driven alone, as in
/// Farside.
fn drive_operation<P: Peer>(
    peer: &P,
    operation: impl Future<Output = Result<bool>>,
) -> Result<bool> {
    let endpoint = peer.endpoint();
    if peer.has_no_chain_in_flight() {
        endpoint.drive(operation)
    } else {
        endpoint.drive_lanes(operation)
    }
}

fn wait_for_chains<P: Peer>(peer: &P) {
    // An error is ignored here: the next operation fails as well and reports it.
    let _ = peer.endpoint().drive_lanes(peer.wait_for_chains());
}

/// An operation, and the buffer of its value: the value to store, or the one that a GET finds.
struct Job {
    action: Action,
    key: Key,
    value: Vec<u8>,
}

/// The exchange between the pipeline and a lane's task.
#[derive(Default)]
struct Mailbox {
    job: Cell<Option<Job>>,
    answer: Cell<Option<(Job, Result<bool>)>>,
    /// Whether there is an answer that the pipeline has not noticed yet.
    is_answered: Cell<bool>,
}

struct Lane<'s> {
    mailbox: Rc<Mailbox>,
    task: Pin<Box<dyn Future<Output = ()> + 's>>,
    value: Vec<u8>,
    counters: Counters,
    total_counters: Counters,
}

/// A pipeline over the lanes of a peer.
pub struct PeerPipeline<'s, P: Peer> {
    peer: &'s P,
    depth: u16,
    lanes: Vec<Lane<'s>>,
    free: Vec<u16>,
    /// Lanes to poll next: each has a new job, or its chain has completed.
    ready: VecDeque<u16>,
    finished: VecDeque<u16>,
}

impl<'s, P: Peer> PeerPipeline<'s, P> {
    fn new(peer: &'s P, depth: u16) -> Self {
        let lane = |id| {
            let mailbox = Rc::new(Mailbox::default());
            let task = Box::pin(run_lane(peer, LaneId(id), mailbox.clone()));
            let total_counters = lane_counters_sum(peer, id, depth);
            Lane { mailbox, task, value: Vec::new(), counters: total_counters, total_counters }
        };
        let count = usize::from(depth);
        Self {
            peer,
            depth,
            lanes: (0..depth).map(lane).collect(),
            free: (0..depth).rev().collect(),
            // All of an operation's lanes may complete before its task is polled.
            ready: VecDeque::with_capacity(count * usize::from(P::LANES + 1)),
            finished: VecDeque::with_capacity(count),
        }
    }

    /// Polls the tasks of ready lanes while the fabric has room for the chains that they post.
    fn poll_lanes(&mut self) {
        let endpoint = self.peer.endpoint();
        if !self.ready.is_empty() {
            endpoint.tick();
        }
        let mut context = Context::from_waker(Waker::noop());
        while endpoint.has_room(RegionIndex::FIRST, 0)
            && let Some(id) = self.ready.pop_front()
        {
            let lane = &mut self.lanes[usize::from(id)];
            // A task never ends.
            let _ = lane.task.as_mut().poll(&mut context);
            if lane.mailbox.is_answered.take() {
                self.finished.push_back(id);
            }
        }
    }

    fn collect(&mut self, may_wait: bool) {
        let Self { peer, ready, depth, .. } = self;
        let completed = |LaneId(lane): LaneId| ready.push_back(lane % *depth);
        if may_wait {
            peer.endpoint().step(completed);
        } else {
            peer.endpoint().try_step(completed);
        }
        self.poll_lanes();
    }

    fn take(&mut self) -> Option<Completed<'_, PeerError>> {
        let id = self.finished.pop_front()?;
        let total_counters = lane_counters_sum(self.peer, id, self.depth);
        let lane = &mut self.lanes[usize::from(id)];
        let (job, result) = lane.mailbox.answer.take()?;
        self.free.push(id);
        lane.value = job.value;
        lane.counters = total_counters.since(&lane.total_counters);
        lane.total_counters = total_counters;
        let result = result.map(|applied| job.action.outcome(applied, &lane.value));
        Some(Completed { lane: id.into(), result, counters: Some(&lane.counters) })
    }
}

/// The sum of the counters of an operation's lanes so far.
#[inline]
fn lane_counters_sum<P: Peer>(peer: &P, lane: u16, depth: u16) -> Counters {
    let fabric = peer.endpoint().fabric();
    let mut sum = *fabric.lane_counters(LaneId(lane));
    for number in 1..P::LANES {
        sum += *fabric.lane_counters(LaneId(lane + number * depth));
    }
    sum
}

/// A lane's task. It never ends: it does one job after another.
async fn run_lane<P: Peer>(peer: &P, lane: LaneId, mailbox: Rc<Mailbox>) {
    loop {
        let mut job = poll_fn(|_| mailbox.job.take().map_or(Poll::Pending, Poll::Ready)).await;
        let result = peer.perform(lane, job.action, &job.key, &mut job.value).await;
        mailbox.answer.set(Some((job, result)));
        mailbox.is_answered.set(true);
    }
}

impl<P: Peer> Pipelined for PeerPipeline<'_, P> {
    type Error = PeerError;

    #[inline]
    fn start(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
    ) -> std::result::Result<usize, PipelineFull> {
        let id = self.free.pop().ok_or(PipelineFull)?;
        let lane = &mut self.lanes[usize::from(id)];
        let mut buffer = std::mem::take(&mut lane.value);
        buffer.clear();
        buffer.extend_from_slice(value);
        lane.mailbox.job.set(Some(Job { action, key: *key, value: buffer }));
        self.ready.push_back(id);
        Ok(id.into())
    }

    fn wait(&mut self) -> Option<Completed<'_, PeerError>> {
        while self.finished.is_empty() && self.in_flight() > 0 {
            // New jobs are polled first, so that the chains that they post share the next doorbell.
            self.poll_lanes();
            if self.finished.is_empty() {
                self.collect(true);
            }
        }
        self.take()
    }

    fn poll(&mut self) -> Option<Completed<'_, PeerError>> {
        if self.finished.is_empty() {
            self.poll_lanes();
            self.collect(false);
        }
        self.take()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.lanes.len() - self.free.len()
    }

    fn depth(&self) -> usize {
        self.lanes.len()
    }
}

impl<P: Peer> Drop for PeerPipeline<'_, P> {
    /// Finishes the operations in flight, so that the next pipeline finds no chain on its lanes.
    fn drop(&mut self) {
        while self.wait().is_some() {}
        wait_for_chains(self.peer);
    }
}
