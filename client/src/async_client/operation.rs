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
    progress: Progress,
}

enum Progress {
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
        Self { shared, request, parts, found, progress: Progress::New }
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
            Progress::New => state.take_slot(),
            Progress::Waiting(waiter) => match state.take_reserved(waiter, waker) {
                Ok(slot) => Some(slot),
                Err(waker) => {
                    *unused = waker;
                    return Poll::Pending;
                }
            },
            Progress::Submitted(slot) => match state.ask(slot, waker, self.found) {
                Asked::Answer(result) => {
                    self.progress = Progress::Done;
                    return Poll::Ready(result.map_err(|error| *error));
                }
                Asked::Pending(waker) => {
                    *unused = waker;
                    return Poll::Pending;
                }
            },
            Progress::Done => return Poll::Pending,
        };
        self.progress = match slot {
            Some(slot) => {
                state.submit(slot, self.request, self.parts, bytes, waker);
                Progress::Submitted(slot)
            }
            None => Progress::Waiting(state.wait(waker.clone())),
        };
        Poll::Pending
    }
}

impl Future for AsyncOperation<'_, '_> {
    type Output = Result<Outcome<Version>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let (Progress::New, Action::Get) = (&this.progress, this.request.action) {
            match this.shared.direct.get(this.parts[0], this.found) {
                DirectGet::Found(version) => {
                    this.progress = Progress::Done;
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
        let submits = matches!(this.progress, Progress::New | Progress::Waiting(_));
        let is_long =
            submits && this.parts.iter().map(|part| part.len()).sum::<usize>() > KEPT_BYTES_MAX;
        let bytes = is_long.then(|| this.parts.concat());
        let mut unused = None;
        let shared = this.shared;
        let mut state = shared.lock();
        let polled = this.advance(&mut state, context.waker(), bytes, &mut unused);
        let ready = state.take_ready();
        drop(state);
        if submits && matches!(this.progress, Progress::Submitted(_)) {
            shared.wakeup.signal();
        }
        ready.wake();
        polled
    }
}

impl Drop for AsyncOperation<'_, '_> {
    fn drop(&mut self) {
        if matches!(self.progress, Progress::New | Progress::Done) {
            return;
        }
        let mut state = self.shared.lock();
        // Dropping a waker may drop its task, and another operation with it. So it is dropped last,
        // without the lock.
        let _unused = match self.progress {
            Progress::Waiting(waiter) => state.stop_waiting(waiter),
            Progress::Submitted(slot) => state.give_up(slot),
            Progress::New | Progress::Done => None,
        };
        let ready = state.take_ready();
        drop(state);
        ready.wake();
    }
}
