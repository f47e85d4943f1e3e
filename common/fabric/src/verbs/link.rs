//! A session's connection to one region: a queue pair, and its chains in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use super::handles::{CompletionQueue, ProtectionDomain, QueuePair};
use super::identifier::EventChannel;
use crate::rdma::{Options, RemoteRegion};
use crate::{Flight, LaneId, Nanos, Trust};

/// A queue pair that the peer has accepted.
pub(super) struct Connected {
    pub(super) queue_pair: Arc<QueuePair>,
    pub(super) events: Arc<EventChannel>,
    /// The peer's private data, followed by zeros.
    pub(super) reply: Vec<u8>,
}

/// A data connection that the server has accepted. It becomes a `Link` when a fabric takes it.
pub struct DataLink {
    pub(super) connected: Connected,
    pub(super) domain: Arc<ProtectionDomain>,
    /// The number of work requests for which the queue pair has room.
    pub(super) sends: u32,
    pub(super) lanes: u16,
    pub(super) options: Options,
    pub(super) trust: Trust,
}

impl DataLink {
    /// The server's reply, followed by zeros.
    pub fn reply(&self) -> &[u8] {
        &self.connected.reply
    }

    /// Makes the connection break when this trust ends while chains are in flight.
    pub fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    pub(super) fn completions(&self) -> &Arc<CompletionQueue> {
        &self.connected.queue_pair.completions
    }
}

/// The connection to one region. Its completions arrive in its fabric's queue.
pub(super) struct Link {
    pub(super) remote: RemoteRegion,
    pub(super) inline_bytes_max: u32,
    /// `None` after it was destroyed because of an error.
    pub(super) queue_pair: Option<Arc<QueuePair>>,
    pub(super) events: Arc<EventChannel>,
    pub(super) delivery_max_ns: Nanos,
    pub(super) lateness_max_ns: Nanos,
    /// The lanes whose chains wait for the doorbell, and the payload of these chains.
    pub(super) posted: VecDeque<LaneId>,
    pub(super) posted_bytes: u64,
    /// The number of chains that the device has.
    pub(super) in_flight: usize,
    /// The flow control of these chains.
    pub(super) flight: Flight,
    /// When the queue pair reported its first error.
    pub(super) broken_at: Option<Nanos>,
    /// When the clock was first read after the last completion or doorbell; 0 until it is read.
    /// Valid only while chains are in flight.
    pub(super) silent_since: Nanos,
    trust: Trust,
}

impl Link {
    pub(super) fn new(link: DataLink, remote: RemoteRegion) -> Self {
        let DataLink { connected, lanes, options, trust, .. } = link;
        let Connected { queue_pair, events, .. } = connected;
        Self {
            remote,
            inline_bytes_max: queue_pair.inline_bytes,
            queue_pair: Some(queue_pair),
            events,
            delivery_max_ns: options.delivery_max_ns(),
            lateness_max_ns: options.lateness_max_ns(),
            posted: VecDeque::with_capacity(lanes.into()),
            posted_bytes: 0,
            in_flight: 0,
            flight: Flight::new(lanes),
            broken_at: None,
            silent_since: 0,
            trust,
        }
    }

    /// Removes the first posted chain, whose payload has `bytes`.
    #[inline]
    pub(super) fn unpost(&mut self, bytes: u64) {
        self.posted.pop_front();
        self.posted_bytes -= bytes;
    }

    /// Whether chains have been in flight without any completion for so long that the peer must be
    /// dead. Also true if a chain that changes the region has been in flight for so long that it
    /// might take effect too late, or if the server is not trusted any more.
    #[inline]
    pub(super) fn is_overdue(&self, now: Nanos) -> bool {
        now.saturating_sub(self.silent_since) > self.delivery_max_ns
            || !self.trust.holds_at(now)
            || self.flight.has_change_older_than(self.delivery_max_ns, now)
    }
}
