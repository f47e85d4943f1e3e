//! The heartbeats of a connection to a server of a cluster.

use farside_fabric::{Nanos, Trust, boot_time_ns};

/// Heartbeats in the time for which an answer extends the trust in a server.
const HEARTBEATS_PER_TRUST: Nanos = 4;

/// Takes a map that a server has sent.
type TakeMap = Box<dyn Fn(&[u8]) + Send>;

/// What a connection to a server of a cluster needs to know.
pub(crate) struct ClusterLink {
    /// Takes the maps that the server sends.
    pub(crate) take_map: TakeMap,
    /// How long the client trusts the server after it sent a heartbeat that the server answered.
    pub(crate) trust_ns: Nanos,
}

/// The heartbeats of a connection to a server of a cluster.
pub(super) struct Heartbeats {
    pub(super) link: ClusterLink,
    trust: Trust,
    /// When the last heartbeat was sent.
    pub(super) sent_at: Nanos,
    /// Until when the client trusts the server.
    pub(super) trusted_until: Nanos,
}

impl Heartbeats {
    pub(super) fn new(link: ClusterLink, trust: Trust) -> Self {
        let now = boot_time_ns();
        // The server has just answered the hello.
        Self { trusted_until: now.saturating_add(link.trust_ns), sent_at: now, link, trust }
    }

    pub(super) fn period_ns(&self) -> Nanos {
        self.link.trust_ns / HEARTBEATS_PER_TRUST
    }

    /// When to send the next heartbeat, or to give the server up.
    pub(super) fn next_step_at(&self) -> Nanos {
        self.trusted_until.min(self.sent_at.saturating_add(self.period_ns()))
    }

    /// Takes the answer to the heartbeat that was sent at this time.
    pub(super) fn answered(&mut self, sent_at: Nanos) {
        let until = sent_at.saturating_add(self.link.trust_ns);
        self.trusted_until = self.trusted_until.max(until);
        self.trust.extend(until);
    }
}
