//! What a session has for one region: a queue pair, and what is under way on it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::handles::{CompletionQueue, ProtectionDomain, QueuePair};
use super::identifier::EventChannel;
use crate::rdma::{Options, RemoteRegion};
use crate::{Flight, LaneId, Nanos};

/// A queue pair whose peer has accepted.
pub(super) struct Connected {
    pub(super) queue_pair: Arc<QueuePair>,
    pub(super) events: Arc<EventChannel>,
    /// What the peer answered, with zeros behind it.
    pub(super) reply: Vec<u8>,
}

/// A data connection whose peer has answered.
pub struct DataLink {
    pub(super) connected: Connected,
    pub(super) domain: Arc<ProtectionDomain>,
    /// The work requests that the queue pair has room for.
    pub(super) sends: u32,
    pub(super) lanes: u16,
    pub(super) options: Options,
}

impl DataLink {
    pub(super) fn completions(&self) -> &Arc<CompletionQueue> {
        self.connected.queue_pair.completions()
    }
}

/// The connection to one region. Its completions arrive in the queue of its fabric.
pub(super) struct Link {
    pub(super) remote: RemoteRegion,
    pub(super) inline_bytes_max: u32,
    /// `None` once it had to be destroyed.
    pub(super) queue_pair: Option<Arc<QueuePair>>,
    pub(super) events: Arc<EventChannel>,
    pub(super) delivery_max_ns: Nanos,
    pub(super) lateness_max_ns: Nanos,
    /// Lanes whose chains wait for the doorbell, and the payload of these.
    pub(super) posted: VecDeque<LaneId>,
    pub(super) posted_bytes: u64,
    /// Chains with the device: how many, and how much of them there may be.
    pub(super) flying: usize,
    pub(super) flight: Flight,
    /// When the queue pair reported its first error.
    pub(super) broken_at: Option<Nanos>,
    /// When a look at the clock found chains with the device, and no answer since then; else 0.
    pub(super) silent_since: Nanos,
}

impl Link {
    pub(super) fn new(link: DataLink, remote: RemoteRegion) -> Self {
        let DataLink { connected: Connected { queue_pair, events, .. }, lanes, options, .. } = link;
        Self {
            remote,
            inline_bytes_max: queue_pair.inline_bytes(),
            queue_pair: Some(queue_pair),
            events,
            delivery_max_ns: options.delivery_max_ns(),
            lateness_max_ns: options.lateness_max_ns(),
            posted: VecDeque::with_capacity(lanes.into()),
            posted_bytes: 0,
            flying: 0,
            flight: Flight::new(lanes),
            broken_at: None,
            silent_since: 0,
        }
    }

    /// The first posted chain, of so many bytes, waits no longer.
    #[inline]
    pub(super) fn unpost(&mut self, bytes: u64) {
        self.posted.pop_front();
        self.posted_bytes -= bytes;
    }

    /// Whether it has carried a chain for so long without an answer that the peer must be gone, or
    /// a change for so long that it might take effect too late.
    #[inline]
    pub(super) fn is_overdue(&self, now: Nanos) -> bool {
        now.saturating_sub(self.silent_since) > self.delivery_max_ns
            || self.flight.has_change_older_than(self.delivery_max_ns, now)
    }
}
