//! A lane's task, and what the pipeline and it tell each other.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use farside_fabric::{AnyFabric, LaneId};
use farside_layout::hash::KeyHash;

use farside_protocol::{Action, Answer, Failure, Operation, Successor};

use crate::connection::SessionRegion;

/// What a lane is to do. Key and value stand in its image buffer.
#[derive(Clone, Copy)]
pub(super) struct Job<'v> {
    pub(super) action: Action<'v>,
    pub(super) hash: KeyHash,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
    /// What a READ of the cached location led to.
    pub(super) successor: Option<Successor>,
}

impl Job<'_> {
    #[inline]
    pub(super) fn operation(
        self,
        handle: SessionRegion<'_>,
        lane: LaneId,
    ) -> Operation<'_, AnyFabric> {
        let staged = Operation::staged(handle, lane, self.hash, self.key_bytes, self.value_bytes);
        staged.after(self.successor)
    }
}

/// Between a pipeline and one of its lanes.
#[derive(Default)]
pub(super) struct Mailbox<'v> {
    pub(super) job: Cell<Option<Job<'v>>>,
    pub(super) answer: Cell<Option<std::result::Result<Answer, Failure>>>,
    pub(super) is_answered: Cell<bool>,
}

impl Mailbox<'_> {
    #[inline]
    pub(super) fn answer(&self, answer: std::result::Result<Answer, Failure>) {
        self.answer.set(Some(answer));
        self.is_answered.set(true);
    }
}

/// A lane's task: waits for a job, runs it, answers, for ever.
pub(super) async fn run_lane(handle: SessionRegion<'_>, lane: LaneId, mailbox: Rc<Mailbox<'_>>) {
    loop {
        let job = poll_fn(|_| mailbox.job.take().map_or(Poll::Pending, Poll::Ready)).await;
        mailbox.answer(job.operation(handle, lane).perform(job.action).await);
    }
}
