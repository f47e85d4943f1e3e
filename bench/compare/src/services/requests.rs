//! A server that answers requests in their order, as a [`MeasuredStore`]. In a pipeline requests
//! are sent together when one is waited for, and their answers are read together: a system call
//! each for many.

use std::collections::VecDeque;

use farside::{Counters, Outcome, PipelineFull};
use farside_bench::keys::Key;
use farside_bench::store::{Action, Completed, MeasuredStore, Pipelined};

use super::ServiceError;

type Result<T> = std::result::Result<T, ServiceError>;

/// How a server is asked.
pub trait Protocol {
    /// Prepares a request, to be sent after those prepared before.
    fn request(&mut self, action: Action, key: &Key, value: &[u8]);

    /// Sends what was prepared.
    fn send(&mut self) -> Result<()>;

    /// Waits for the answer to the oldest request without one. Whether the key was as required; the
    /// value of a GET goes into the buffer.
    fn answer(&mut self, action: Action, value: &mut Vec<u8>) -> Result<bool>;
}

/// A connection to such a server.
pub struct Requests<P> {
    protocol: P,
    depth: usize,
    value: Vec<u8>,
    /// They ask nothing of a fabric.
    counters: Counters,
}

impl<P: Protocol> Requests<P> {
    /// With so many requests in flight in a pipeline.
    pub fn new(protocol: P, depth: u16) -> Self {
        let counters = Counters::default();
        Self { protocol, depth: depth.into(), value: Vec::new(), counters }
    }
}

impl<P: Protocol> MeasuredStore for Requests<P> {
    type Error = ServiceError;
    type Pipeline<'s>
        = RequestPipeline<'s, P>
    where
        P: 's;

    fn perform<'v>(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
        found: &'v mut Vec<u8>,
    ) -> Result<Outcome<'v>> {
        self.protocol.request(action, key, value);
        self.protocol.send()?;
        let applied = self.protocol.answer(action, found)?;
        Ok(action.outcome(applied, found))
    }

    fn pipeline(&mut self) -> Result<RequestPipeline<'_, P>> {
        let depth = self.depth;
        Ok(RequestPipeline {
            of: self,
            started: VecDeque::with_capacity(depth),
            sent: 0,
            free: (0..depth).rev().collect(),
        })
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// Requests in flight.
pub struct RequestPipeline<'s, P: Protocol> {
    of: &'s mut Requests<P>,
    /// Lanes and requests without an answer, the oldest first.
    started: VecDeque<(usize, Action)>,
    /// How many of them were sent.
    sent: usize,
    free: Vec<usize>,
}

impl<P: Protocol> RequestPipeline<'_, P> {
    fn take(&mut self) -> Option<Completed<'_, ServiceError>> {
        let (lane, action) = self.started.pop_front()?;
        self.sent -= 1;
        self.free.push(lane);
        let Requests { protocol, value, counters, .. } = &mut *self.of;
        let applied = protocol.answer(action, value);
        let result = applied.map(|applied| action.outcome(applied, value));
        Some(Completed { lane, result, counters })
    }
}

impl<P: Protocol> Pipelined for RequestPipeline<'_, P> {
    type Error = ServiceError;

    fn start(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
    ) -> std::result::Result<usize, PipelineFull> {
        let lane = self.free.pop().ok_or(PipelineFull)?;
        self.of.protocol.request(action, key, value);
        self.started.push_back((lane, action));
        Ok(lane)
    }

    fn wait(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 && !self.started.is_empty() {
            if let Err(error) = self.of.protocol.send() {
                let (lane, _) = self.started.pop_front()?;
                let counters = &self.of.counters;
                return Some(Completed { lane, result: Err(error), counters });
            }
            self.sent = self.started.len();
        }
        self.take()
    }

    /// Answers to requests sent together come together: only those of requests not sent yet would
    /// take long.
    fn poll(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 { None } else { self.take() }
    }

    fn in_flight(&self) -> usize {
        self.started.len()
    }

    fn depth(&self) -> usize {
        self.of.depth
    }
}

impl<P: Protocol> Drop for RequestPipeline<'_, P> {
    /// Reads the answers there will be, so that no later request takes one for its own.
    fn drop(&mut self) {
        while let Some(Completed { result: Ok(_), .. }) = self.wait() {}
    }
}
