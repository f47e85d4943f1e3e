//! The future of one operation of an async client.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use farside_protocol::{Action, Version};

use super::direct::DirectGet;
use super::shared::{Asked, KEPT_BYTES_MAX, Request, Shared, SlotId, State, WaiterId};
use crate::{Outcome, Result};

/// Submits its request when it is first polled, and returns the answer.
pub(super) struct AsyncOperation<'c, 'b> {
    shared: &'c Shared,
    request: Request,
    /// Key, value, and expected value.
    parts: [&'b [u8]; 3],
    /// The found value is appended to it.
    found: &'b mut Vec<u8>,
    progress: OperationProgress,
}

enum OperationProgress {
    /// The future was not polled yet.
    New,
    /// The task waits for a slot.
    Waiting(WaiterId),
    /// The request is in a slot.
    Submitted(SlotId),
    Done,
}

impl<'c, 'b> AsyncOperation<'c, 'b> {
    pub(super) fn new(
        shared: &'c Shared,
        action: Action<'static>,
        parts: [&'b [u8]; 3],
        found: &'b mut Vec<u8>,
    ) -> Self {
        let [key_bytes, value_bytes, _] = parts.map(<[u8]>::len);
        let request = Request { action, key_bytes, value_bytes };
        Self { shared, request, parts, found, progress: OperationProgress::New }
    }

    /// Advances the operation under the lock. Wakers that are no longer used go to `unused`.
    #[inline]
    fn advance(
        &mut self,
        state: &mut State,
        waker: &Waker,
        bytes: Option<Vec<u8>>,
        unused: &mut Option<Waker>,
    ) -> Poll<Result<Outcome<Version>>> {
        let slot = match self.progress {
            OperationProgress::New => state.take_slot(),
            OperationProgress::Waiting(waiter) => match state.take_reserved(waiter, waker) {
                Ok(slot) => Some(slot),
                Err(waker) => {
                    *unused = waker;
                    return Poll::Pending;
                }
            },
            OperationProgress::Submitted(slot) => match state.ask(slot, waker, self.found) {
                Asked::Answer(result) => {
                    self.progress = OperationProgress::Done;
                    return Poll::Ready(result.map_err(|error| *error));
                }
                Asked::Pending(waker) => {
                    *unused = waker;
                    return Poll::Pending;
                }
            },
            OperationProgress::Done => return Poll::Pending,
        };
        self.progress = match slot {
            Some(slot) => {
                state.submit(slot, self.request, self.parts, bytes, waker);
                OperationProgress::Submitted(slot)
            }
            None => OperationProgress::Waiting(state.wait(waker.clone())),
        };
        Poll::Pending
    }
}

impl Future for AsyncOperation<'_, '_> {
    type Output = Result<Outcome<Version>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let (OperationProgress::New, Action::Get) = (&this.progress, this.request.action) {
            match this.shared.direct.get(this.parts[0], this.found) {
                DirectGet::Found(version) => {
                    this.progress = OperationProgress::Done;
                    let [version, value] = [Some(version); 2];
                    let outcome = Outcome { applied: true, version, value, number: 0 };
                    return Poll::Ready(Ok(outcome));
                }
                DirectGet::Yield => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                DirectGet::Unanswered => {}
            }
        }
        let submits =
            matches!(this.progress, OperationProgress::New | OperationProgress::Waiting(_));
        let is_long =
            submits && this.parts.iter().map(|part| part.len()).sum::<usize>() > KEPT_BYTES_MAX;
        let bytes = is_long.then(|| this.parts.concat());
        let mut unused = None;
        let shared = this.shared;
        let mut state = shared.lock();
        let polled = this.advance(&mut state, context.waker(), bytes, &mut unused);
        let ready = state.take_ready();
        drop(state);
        if submits && matches!(this.progress, OperationProgress::Submitted(_)) {
            shared.wakeup.signal();
        }
        ready.wake();
        polled
    }
}

impl Drop for AsyncOperation<'_, '_> {
    fn drop(&mut self) {
        if matches!(self.progress, OperationProgress::New | OperationProgress::Done) {
            return;
        }
        let mut state = self.shared.lock();
        // Dropping a waker may drop its task, and another operation with it. So it is dropped last,
        // without the lock.
        let _unused = match self.progress {
            OperationProgress::Waiting(waiter) => state.stop_waiting(waiter),
            OperationProgress::Submitted(slot) => state.give_up(slot),
            OperationProgress::New | OperationProgress::Done => None,
        };
        let ready = state.take_ready();
        drop(state);
        ready.wake();
    }
}
