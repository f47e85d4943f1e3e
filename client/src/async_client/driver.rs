//! The thread of an async client. It owns a session and its pipeline, and runs all requests there.

use std::cell::{Cell, OnceCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use farside_protocol::{Action, Change, Expected, Modification, OperationKind};

use super::shared::{Job, Shared, SlotId, SlotResult};
use crate::client_inner::ClientInner;
use crate::reconnecting::ReconnectBudget;
use crate::{Completed, Error, Pipeline, Session};

/// The time for which an idle driver spins before it sleeps. Waking it costs a task a system call.
const SPIN: Duration = Duration::from_micros(20);
/// Spins between two readings of the clock.
const SPINS_PER_LOOK: u32 = 32;
/// Limits of the values that stores of one pipeline expect, in number and in bytes.
const EXPECTED_VALUES_MAX: usize = 256;
const EXPECTED_BYTES_MAX: usize = 4 << 20;

/// Runs the requests of the tasks.
pub(super) struct Driver {
    shared: Arc<Shared>,
    /// The operations in flight, by lane.
    in_flight: Vec<Option<Job>>,
    /// Operations that had no effect because the connection was lost. They run again.
    retried: VecDeque<Job>,
    /// The operations that are started next.
    starting: VecDeque<Job>,
    answers: Vec<(SlotId, Vec<u8>, SlotResult)>,
    /// Tasks that wait to be woken.
    ready: Vec<Waker>,
    budget: ReconnectBudget,
}

/// Why a pipeline is given up. It has completed all its operations.
#[derive(Clone, Copy)]
enum PipelineEnd {
    /// The connection was lost.
    Lost,
    /// It holds too many expected values.
    Full,
    /// The last [`AsyncClient`](super::AsyncClient) was dropped.
    Closed,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            in_flight: Vec::new(),
            retried: VecDeque::new(),
            starting: VecDeque::new(),
            answers: Vec::new(),
            ready: Vec::new(),
            budget: ReconnectBudget::default(),
        }
    }

    /// Runs requests until the last [`AsyncClient`](super::AsyncClient) is dropped.
    pub(super) fn run(mut self, session: Session) {
        self.guard(|driver| driver.run_in(session));
        self.shared.direct.close();
    }

    /// Runs the driver. If it panics, all requests fail, those to come too.
    fn guard(&mut self, run: impl FnOnce(&mut Self)) {
        if catch_unwind(AssertUnwindSafe(|| run(self))).is_err() {
            let mut state = self.shared.lock();
            state.fail_for_ever();
            state.drain_ready(&mut self.ready);
            drop(state);
            self.wake();
        }
    }

    fn run_in(&mut self, mut session: Session) {
        let client = session.shared.clone();
        let has_direct = session.executes_at_once();
        while self.wait_for_request() {
            let expected = ExpectedValues::new();
            let end = session.pipeline().map(|pipeline| {
                if has_direct {
                    self.shared.direct.open(&client);
                }
                self.serve(pipeline, &expected)
            });
            let end = end.and_then(|end| match end {
                PipelineEnd::Lost => client.count_loss(0, &mut self.budget).map(|()| end),
                PipelineEnd::Full | PipelineEnd::Closed => Ok(end),
            });
            match end {
                Ok(PipelineEnd::Closed) => break,
                Ok(PipelineEnd::Lost | PipelineEnd::Full) => {}
                Err(error) => self.fail_all(&client, &error),
            }
        }
    }

    /// Waits for a request. Returns false if there will be no more.
    fn wait_for_request(&self) -> bool {
        loop {
            self.shared.wakeup.clear();
            let state = self.shared.lock();
            if state.has_queued() || !self.retried.is_empty() {
                return true;
            }
            if state.is_closed() {
                return false;
            }
            drop(state);
            self.park();
        }
    }

    /// Waits for a signal while nothing is in flight.
    #[cold]
    fn park(&self) {
        let started = Instant::now();
        while started.elapsed() < SPIN {
            for _ in 0..SPINS_PER_LOOK {
                if self.shared.wakeup.is_signaled() {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        self.shared.wakeup.sleep(None);
    }

    /// Fails all requests: there is no connection.
    fn fail_all(&mut self, client: &ClientInner, error: &Error) {
        self.budget = ReconnectBudget::default();
        let mut state = self.shared.lock();
        while let Some(Job { slot, request, bytes }) =
            self.retried.pop_front().or_else(|| state.take_job())
        {
            if let Some(metrics) = &client.metrics {
                metrics.add_error(OperationKind::of(request.action), error);
            }
            state.answer(slot, bytes, Err(Box::new(error.clone())));
        }
        state.drain_ready(&mut self.ready);
        drop(state);
        self.wake();
    }

    fn wake(&mut self) {
        for waker in self.ready.drain(..) {
            // A waker is foreign code. If it panics, the other tasks still get their answers.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Runs requests in this pipeline as long as it lasts.
    fn serve<'s>(
        &mut self,
        mut pipeline: Pipeline<'s>,
        expected: &'s ExpectedValues,
    ) -> PipelineEnd {
        pipeline.set_wakeup(self.shared.wakeup.clone());
        self.in_flight.resize_with(pipeline.depth(), || None);
        let mut end = None;
        loop {
            let room = if end.is_some() { 0 } else { pipeline.free_lanes() };
            let is_closed = self.exchange(room);
            self.wake();
            let mut is_idle = self.starting.is_empty();
            while let Some(job) = self.starting.pop_front() {
                end = self.start(&mut pipeline, expected, job).or(end);
            }
            while pipeline.in_flight() > 0
                && let Some(completed) = pipeline.poll()
            {
                is_idle = false;
                end = self.complete(completed).or(end);
            }
            match end {
                _ if !is_idle => {}
                _ if pipeline.in_flight() > 0 => pipeline.relax(),
                Some(end) => return end,
                None if is_closed => return PipelineEnd::Closed,
                None => self.park(),
            }
        }
    }

    /// Stores the answers, and takes requests for up to `room` lanes, all under one lock. Returns
    /// whether there will be no further requests.
    ///
    /// Tasks that became ready here are left to tasks that are polled meanwhile, unless the driver
    /// has nothing to start: see [`State::take_ready`](super::shared::State::take_ready). Those
    /// that they have not taken since the last time are woken now.
    fn exchange(&mut self, room: usize) -> bool {
        self.shared.wakeup.clear();
        let mut state = self.shared.lock();
        state.drain_ready(&mut self.ready);
        for (slot, bytes, result) in self.answers.drain(..) {
            state.answer(slot, bytes, result);
        }
        while self.starting.len() < room
            && let Some(job) = self.retried.pop_front().or_else(|| state.take_job())
        {
            self.starting.extend(state.unless_abandoned(job));
        }
        if self.starting.is_empty() {
            state.drain_ready(&mut self.ready);
        }
        state.is_closed()
    }

    /// Starts an operation. Returns why the pipeline cannot take it, if it cannot.
    fn start<'s>(
        &mut self,
        pipeline: &mut Pipeline<'s>,
        expected: &'s ExpectedValues,
        job: Job,
    ) -> Option<PipelineEnd> {
        let (key, rest) = job.bytes.split_at(job.request.key_bytes);
        let (value, expected_value) = rest.split_at(job.request.value_bytes);
        let action = match job.request.action {
            Action::Modify(Modification {
                change: Change::Store(Some(Expected::Value(_))),
                creates,
                lifetime,
                returns,
            }) => {
                let Some(kept) = expected.keep(expected_value) else {
                    self.retried.push_back(job);
                    return Some(PipelineEnd::Full);
                };
                let change = Change::Store(Some(Expected::Value(kept)));
                Action::modify(change, creates, lifetime, returns)
            }
            action => action,
        };
        match pipeline.begin(action, key, value) {
            Ok(ticket) => self.in_flight[ticket.lane()] = Some(job),
            Err(_) => self.retried.push_back(job),
        }
        None
    }

    /// Keeps the answer of a completed operation. Returns [`PipelineEnd::Lost`] if it had no effect
    /// because the connection was lost.
    fn complete(&mut self, completed: Completed<'_>) -> Option<PipelineEnd> {
        let mut job = self.in_flight[completed.ticket.lane()].take()?;
        let result = match completed.result {
            Ok(outcome) => {
                self.budget = ReconnectBudget::default();
                Ok(outcome.map(|value| {
                    job.bytes.clear();
                    job.bytes.extend_from_slice(&value);
                    value.version
                }))
            }
            Err(Error::Disconnected { .. }) => {
                self.retried.push_back(job);
                return Some(PipelineEnd::Lost);
            }
            Err(error) => Err(Box::new(error)),
        };
        self.answers.push((job.slot, job.bytes, result));
        None
    }
}

/// The values that stores of one pipeline expect. A pipeline does not copy them, so they stay until
/// it is dropped.
struct ExpectedValues {
    values: Box<[OnceCell<Box<[u8]>>]>,
    /// How many of them are in use.
    used: Cell<usize>,
    bytes: Cell<usize>,
}

impl ExpectedValues {
    fn new() -> Self {
        let values = (0..EXPECTED_VALUES_MAX).map(|_| OnceCell::new()).collect();
        Self { values, used: Cell::new(0), bytes: Cell::new(0) }
    }

    /// Keeps a copy of this value; `None` if there is no room. A single value always has room.
    fn keep(&self, value: &[u8]) -> Option<&[u8]> {
        let (used, bytes) = (self.used.get(), self.bytes.get() + value.len());
        if used > 0 && bytes > EXPECTED_BYTES_MAX {
            return None;
        }
        let kept = self.values.get(used)?.get_or_init(|| value.into());
        self.used.set(used + 1);
        self.bytes.set(bytes);
        Some(kept)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll};

    use farside_protocol::OperationError;

    use super::super::operation::AsyncOperation;
    use super::*;

    #[test]
    fn a_panic_fails_all_requests() {
        let shared = Arc::new(Shared::new().unwrap());
        let mut found = [const { Vec::new() }; 3];
        let [mut started, mut queued, mut later] = found
            .each_mut()
            .map(|found| AsyncOperation::new(&shared, Action::Delete, [b"key", b"", b""], found))
            .map(Box::pin);
        let mut context = Context::from_waker(Waker::noop());
        let mut driver = Driver::new(shared.clone());
        assert!(started.as_mut().poll(&mut context).is_pending());
        driver.guard(|driver| {
            driver.exchange(1);
            assert!(queued.as_mut().poll(&mut context).is_pending());
            panic!("as it should");
        });
        let mut poll = |operation: &mut std::pin::Pin<Box<AsyncOperation<'_, '_>>>| {
            operation.as_mut().poll(&mut context).map(Result::unwrap_err)
        };
        let indeterminate = Error::Operation(OperationError::Indeterminate).to_string();
        let text = |polled: Poll<Error>| polled.map(|error| error.to_string());
        assert_eq!(text(poll(&mut started)), Poll::Ready(indeterminate));
        assert_eq!(text(poll(&mut queued)), Poll::Ready(Error::Defect.to_string()));
        assert!(poll(&mut later).is_pending());
        assert_eq!(text(poll(&mut later)), Poll::Ready(Error::Defect.to_string()));
    }

    #[test]
    fn expected_values_are_limited() {
        let values = ExpectedValues::new();
        let large = vec![1; EXPECTED_BYTES_MAX + 1];
        assert_eq!(values.keep(&large), Some(&*large));
        assert_eq!(values.keep(&[1]), None);
        let values = ExpectedValues::new();
        let kept = (0..=EXPECTED_VALUES_MAX).map_while(|_| values.keep(b"value"));
        assert!(kept.eq([b"value"; EXPECTED_VALUES_MAX]));
    }
}
