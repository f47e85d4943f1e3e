//! A [`MeasuredStore`] over a server that answers requests in their order. A pipeline sends its
//! requests together when one is waited for, and reads the answers together, so one system call
//! serves many requests.

use std::collections::VecDeque;

use farside::{Counters, PipelineFull};
use farside_bench::keys::Key;
use farside_bench::store::{Action, Completed, MeasuredStore, Outcome, Pipelined};

use super::ServiceError;

type Result<T> = std::result::Result<T, ServiceError>;

/// The protocol of a server.
pub trait Protocol {
    /// Prepares a request. It is sent after the requests that were prepared before.
    fn request(&mut self, action: Action, key: &Key, value: &[u8]);

    /// Sends the prepared requests.
    fn send(&mut self) -> Result<()>;

    /// Waits for the answer to the oldest request without one. Returns whether the key was as
    /// required. The value of a GET goes into the buffer.
    fn answer(&mut self, action: Action, value: &mut Vec<u8>) -> Result<bool>;
}

/// A store: a connection to a server of this protocol.
pub struct Requests<P> {
    protocol: P,
    depth: usize,
    value: Vec<u8>,
    /// Always zero, because no request uses a fabric.
    counters: Counters,
}

impl<P: Protocol> Requests<P> {
    /// A store with up to `depth` requests in flight in a pipeline.
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
            requests: self,
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
    requests: &'s mut Requests<P>,
    /// The lanes and actions of the requests without an answer, the oldest first.
    started: VecDeque<(usize, Action)>,
    /// How many of these requests were sent.
    sent: usize,
    /// The lanes without a request.
    free: Vec<usize>,
}

impl<P: Protocol> RequestPipeline<'_, P> {
    fn take(&mut self) -> Option<Completed<'_, ServiceError>> {
        let (lane, action) = self.started.pop_front()?;
        self.sent -= 1;
        self.free.push(lane);
        let Requests { protocol, value, counters, .. } = &mut *self.requests;
        let applied = protocol.answer(action, value);
        let result = applied.map(|applied| action.outcome(applied, value));
        Some(Completed { lane, result, counters: Some(counters) })
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
        self.requests.protocol.request(action, key, value);
        self.started.push_back((lane, action));
        Ok(lane)
    }

    fn wait(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 && !self.started.is_empty() {
            if let Err(error) = self.requests.protocol.send() {
                let (lane, _) = self.started.pop_front()?;
                let counters = Some(&self.requests.counters);
                return Some(Completed { lane, result: Err(error), counters });
            }
            self.sent = self.started.len();
        }
        self.take()
    }

    /// Takes an answer to a request that was sent. Such an answer comes soon, because requests that
    /// are sent together are answered together.
    fn poll(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 { None } else { self.take() }
    }

    fn in_flight(&self) -> usize {
        self.started.len()
    }

    fn depth(&self) -> usize {
        self.requests.depth
    }
}

impl<P: Protocol> Drop for RequestPipeline<'_, P> {
    /// Reads the answers that are still due, so that no later request takes one of these answers
    /// for its own.
    fn drop(&mut self) {
        while let Some(Completed { result: Ok(_), .. }) = self.wait() {}
    }
}
