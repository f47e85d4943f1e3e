//! What a pipeline counts for the metrics of its client.
//!
//! A GET or PUT at a cached location is counted by the protocol. This counts those that need a
//! task, followers, and failures. An operation counts from the post of its first verb on: not the
//! time for which it was queued.

use farside_fabric::{LaneId, Nanos};
use farside_protocol::{Action, Answer, OperationKind, RetryReason};

use super::task::LaneAnswer;
use super::{LaneScheduler, LaneState, PipelineLane};
use crate::Error;
use crate::connection::SessionRegion;
use crate::session_regions::SessionRegions;

impl PipelineLane<'_> {
    /// Begins to measure the verbs of the lane's task. `since` is when the operation's first verb
    /// was posted, if one was.
    #[inline]
    pub(super) fn begin_measuring(
        &mut self,
        handle: SessionRegion<'_>,
        LaneId(id): LaneId,
        since: Option<Nanos>,
    ) {
        let since = || since.unwrap_or_else(|| handle.engine.endpoint.now());
        if let Some(measured) = handle.begin_measuring(id..id + 1, since) {
            self.measured = measured;
        }
    }

    /// When the first verb of the lane's operation was posted.
    fn since(&self) -> Nanos {
        match (self.state, &self.put) {
            (LaneState::Reading, _) => self.read.posted(),
            (LaneState::Writing, Some(put)) => put.posted(),
            _ => self.measured.since,
        }
    }
}

impl LaneScheduler<'_> {
    /// Counts an operation that the lane's task has completed, unless it failed.
    #[inline]
    pub(super) fn measure(&self, id: LaneId, answer: &LaneAnswer) {
        let lane = &self.lanes[usize::from(id.0)];
        self.handle(id).end_measuring(&lane.measured, id.0..id.0 + 1);
        if let Ok(answer) = answer {
            self.count(id, answer);
        }
    }

    /// Counts the operation of a lane, or a follower of it: that has the same answer, and takes as
    /// long.
    #[inline]
    pub(super) fn count(&self, id: LaneId, answer: &Answer) {
        let Some(metrics) = self.handle(id).metrics() else { return };
        let lane = &self.lanes[usize::from(id.0)];
        let latency = self.engine.endpoint.now().saturating_sub(lane.since());
        metrics.add(OperationKind::of(lane.job.action), answer.applied, latency);
    }
}

/// Counts an operation that failed. If the caller repeats it, that is a retry.
#[cold]
pub(super) fn count_failed(
    regions: &SessionRegions,
    repeats_lost: bool,
    action: Action<'_>,
    error: &Error,
) {
    let Some(metrics) = &regions.metrics else { return };
    match error {
        Error::Disconnected { .. } if repeats_lost => {
            metrics.operations.add_retry(RetryReason::Connection);
        }
        error => metrics.add_error(OperationKind::of(action), error),
    }
}
