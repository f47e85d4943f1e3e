//! An INSERT whose window is full asks the server to split the subtable, and waits.

use farside_fabric::wait_timer::WaitTimer;
use farside_fabric::{Fabric, Nanos};
use farside_layout::SplitOutcome;

use super::insert::tombs;
use super::window::ObservedWindow;
use super::{Operation, ProtocolResult, RetryState};
use crate::failure::Failure;
use crate::operation_metrics::RetryReason;
use crate::split_requests::Prefix;
use crate::waiting::{has_timed_out, no_answer};
use crate::{Exhausted, OperationError};

/// How long an INSERT waits for the end of a split that is under way before it asks the server.
const FILLING_NS: Nanos = 2_000_000;
/// The interval at which a lane checks for the server's answer.
const ANSWER_POLL_NS: Nanos = 60_000;
/// The delay before a lane asks again if the server expects memory for a split.
const LATER_NS: Nanos = 1_000_000;

impl<F: Fabric> Operation<'_, F> {
    /// Asks the server to split the subtable of a full window: one message each way, and a READ of
    /// the window every [`ANSWER_POLL_NS`]. Returns false, after a pause, if the server has to be
    /// asked again. If the server cannot split the subtable, but the window has a TOMB, waits for
    /// that and returns true.
    ///
    /// # Errors
    /// [`OperationError::OutOfSpace`] if the server cannot split the subtable, and the window has
    /// no TOMB.
    pub(super) async fn grow(
        &self,
        seen: &ObservedWindow,
        tries: &mut RetryState,
    ) -> ProtocolResult<bool> {
        let prefix = Prefix::of(self.hash.directory(), seen.local_depth);
        match self.ask_for_split(prefix, seen, tries).await {
            Err(Failure::Error(error))
                if matches!(*error, OperationError::OutOfSpace { .. }) && tombs(seen) > 0 =>
            {
                self.wait_for_tomb().await;
                Ok(true)
            }
            outcome => outcome,
        }
    }

    /// Pauses while a split moves keys to the subtable of this window. After [`FILLING_NS`] it asks
    /// the server for that split, which may have been interrupted.
    pub(super) async fn wait_or_grow(
        &self,
        seen: &ObservedWindow,
        tries: &mut RetryState,
    ) -> ProtocolResult<()> {
        if tries.move_wait.as_ref().is_none_or(|move_wait| move_wait.waited() < FILLING_NS) {
            return self.wait_for_split(tries).await;
        }
        tries.move_wait = None;
        let old_depth = seen.local_depth.saturating_sub(1);
        self.ask_for_split(Prefix::of(self.hash.directory(), old_depth), seen, tries)
            .await
            .map(drop)
    }

    async fn ask_for_split(
        &self,
        prefix: Prefix,
        seen: &ObservedWindow,
        tries: &mut RetryState,
    ) -> ProtocolResult<bool> {
        if tries.memory_wait.is_none() {
            self.handle().count_retry(RetryReason::Split);
        }
        self.region.allocator().join_split(prefix);
        let outcome = self.split_outcome(prefix, seen).await;
        self.region.allocator().leave_split(prefix);
        let now = self.now();
        let memory_wait = tries.memory_wait.get_or_insert_with(|| WaitTimer::since(now));
        memory_wait.advance(now);
        match outcome? {
            SplitOutcome::Done => Ok(true),
            SplitOutcome::Later if !has_timed_out(memory_wait) => {
                self.engine.endpoint.sleep_until(self.lane, now + LATER_NS).await;
                Ok(false)
            }
            SplitOutcome::Later | SplitOutcome::Impossible => {
                Err(OperationError::OutOfSpace { what: Exhausted::Index }.into())
            }
        }
    }

    /// Waits for the server's answer, or until the window shows that a split has begun or ended.
    /// Usually the window shows it first, because an answer passes through two more threads.
    async fn split_outcome(
        &self,
        prefix: Prefix,
        seen: &ObservedWindow,
    ) -> ProtocolResult<SplitOutcome> {
        let (mut waiting, mut current) = (WaitTimer::since(self.now()), ObservedWindow::unread());
        loop {
            let now = self.now();
            waiting.advance(now);
            self.handle().receive();
            let answer = self.region.allocator().split_outcome(prefix);
            if let Some(outcome) = answer {
                return Ok(outcome);
            }
            self.read_window_at((seen.base, seen.local_depth), &mut current).await?;
            if current.subtable_state != seen.subtable_state {
                return Ok(SplitOutcome::Done);
            }
            if self.region.allocator().is_lost() {
                return Err(Failure::Lost(self.region.index));
            }
            if has_timed_out(&waiting) {
                return Err(no_answer(&waiting));
            }
            self.engine.endpoint.sleep_until(self.lane, now + ANSWER_POLL_NS).await;
        }
    }
}
