//! The task of a lane: the future that executes operations which need more than one chain.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside_fabric::{AnyFabric, LaneId};
use farside_layout::hash::KeyHash;
use farside_protocol::{Action, Answer, DisplacedPut, Failure, Operation, Successor};

use crate::connection::SessionRegion;

/// The operation of a lane. Its key and value are in the lane's buffer for a new block.
#[derive(Clone, Copy)]
pub(super) struct Job<'v> {
    pub(super) action: Action<'v>,
    pub(super) hash: KeyHash,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
    /// The block that replaced the one at the cached location, if a READ there found its name.
    pub(super) successor: Option<Successor>,
}

impl Job<'_> {
    #[inline]
    pub(super) fn operation(
        self,
        handle: SessionRegion<'_>,
        lane: LaneId,
    ) -> Operation<'_, AnyFabric> {
        let Self { hash, key_bytes, value_bytes, successor, .. } = self;
        Operation::staged(handle, lane, hash, (key_bytes, value_bytes), successor)
    }
}

pub(super) type LaneAnswer = std::result::Result<Answer, Failure>;

/// Passes jobs from the pipeline to the task, and answers back.
#[derive(Default)]
struct Mailbox<'v> {
    /// The job, and the region of its key.
    job: Cell<Option<(SessionRegion<'v>, Job<'v>)>>,
    /// The PUT of the job, if its chain at the cached location was in vain.
    displaced: Cell<Option<DisplacedPut>>,
    answer: Cell<Option<LaneAnswer>>,
}

/// A lane's task: waits for a job, runs it, stores the answer, and waits for the next one.
async fn run_lane(lane: LaneId, mailbox: Rc<Mailbox<'_>>) {
    loop {
        let next = poll_fn(|_| mailbox.job.take().map_or(Poll::Pending, Poll::Ready));
        let (handle, job) = next.await;
        let operation = job.operation(handle, lane);
        let answer = match mailbox.displaced.take() {
            Some(put) => operation.put_after(put).await,
            None => operation.perform(job.action).await,
        };
        mailbox.answer.set(Some(answer));
    }
}

/// The task of a lane. It runs one job after another, without end. Created with the lane's first
/// operation that needs it, and then kept, so that operations allocate nothing.
pub(super) struct LaneTask<'s> {
    mailbox: Rc<Mailbox<'s>>,
    future: Pin<Box<dyn Future<Output = ()> + 's>>,
}

impl<'s> LaneTask<'s> {
    pub(super) fn new(id: LaneId) -> Self {
        let mailbox = Rc::new(Mailbox::default());
        let future = Box::pin(run_lane(id, mailbox.clone()));
        Self { mailbox, future }
    }

    /// Gives the task a job at this region. `displaced` is the PUT of the job, if its chain at the
    /// cached location was in vain.
    pub(super) fn give(
        &mut self,
        handle: SessionRegion<'s>,
        job: Job<'s>,
        displaced: Option<DisplacedPut>,
    ) {
        self.mailbox.displaced.set(displaced);
        self.mailbox.job.set(Some((handle, job)));
    }

    /// Polls the task. Returns the answer to its job, if it has one.
    pub(super) fn poll(&mut self) -> Option<LaneAnswer> {
        let mut context = Context::from_waker(Waker::noop());
        // The future never ends: its mailbox shows when a job has completed.
        let _ = self.future.as_mut().poll(&mut context);
        self.mailbox.answer.take()
    }
}
