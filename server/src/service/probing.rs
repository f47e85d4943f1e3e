//! Probes the hosts of clients, because a host without power sends no disconnect.

use farside_fabric::Nanos;
use farside_fabric::rdma::ProbeState;

use super::acceptor::DataConnection;

/// The time of the next probe.
pub(super) struct Probing {
    /// Pause between two probes; 0 disables them.
    period_ns: Nanos,
    /// When all clients were probed last, or when the first of them connected.
    probed_at: Nanos,
}

impl Probing {
    pub(super) fn every(period_ns: Nanos) -> Self {
        Self { period_ns, probed_at: 0 }
    }

    /// Notes that a client connected. Only the first client sets the time of the next probe.
    /// Otherwise clients that keep connecting would postpone every probe.
    pub(super) fn note_connected(&mut self, is_first: bool, now: Nanos) {
        if is_first {
            self.probed_at = now;
        }
    }

    /// Notes that all clients are probed now.
    pub(super) fn begin(&mut self, now: Nanos) {
        self.probed_at = now;
    }

    /// Returns when to probe next, if there are clients.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        (self.period_ns > 0).then(|| self.probed_at.saturating_add(self.period_ns))
    }
}

/// Probes the first of a client's sessions. Returns whether the session answered the previous
/// probe, or was not probed yet.
///
/// A dead session is dropped. This does not mean that the client is dead: the packet with which it
/// disconnected the session may have been lost.
pub(super) fn probe_first<C: DataConnection + ?Sized>(sessions: &mut Vec<Box<C>>) -> bool {
    let Some(first) = sessions.first_mut() else { return false };
    let state = first.probe_state();
    if matches!(state, Ok(ProbeState::Dead)) {
        sessions.remove(0);
        return false;
    }
    // A session that cannot be probed is disconnecting, and an event will report it.
    let _ = first.probe();
    matches!(state, Ok(ProbeState::Idle | ProbeState::Alive))
}

#[cfg(test)]
mod tests {
    use std::io;

    use farside_fabric::rdma::ConnectionId;

    use super::*;

    /// A session in this state, and how often it was probed.
    struct Fake(ProbeState, u32);

    impl DataConnection for Fake {
        fn id(&self) -> ConnectionId {
            ConnectionId(0)
        }

        fn probe_state(&mut self) -> io::Result<ProbeState> {
            Ok(self.0)
        }

        fn probe(&mut self) -> io::Result<()> {
            self.1 += 1;
            Ok(())
        }
    }

    #[test]
    fn a_dead_session_is_dropped_and_the_next_is_probed() {
        let mut sessions =
            vec![Box::new(Fake(ProbeState::Dead, 0)), Box::new(Fake(ProbeState::Idle, 0))];
        assert!(!probe_first(&mut sessions), "the channel has to show whether the client is alive");
        assert_eq!(sessions.len(), 1);
        assert!(probe_first(&mut sessions));
        assert_eq!(sessions[0].1, 1);
        sessions[0].0 = ProbeState::Alive;
        assert!(probe_first(&mut sessions));
        // While the device retransmits the probe.
        sessions[0].0 = ProbeState::Pending;
        assert!(!probe_first(&mut sessions));
        assert_eq!(sessions.len(), 1);
        sessions[0].0 = ProbeState::Dead;
        assert!(!probe_first(&mut sessions) && sessions.is_empty());
        assert!(!probe_first(&mut sessions));
    }

    #[test]
    fn clients_that_connect_and_disconnect_postpone_no_probe() {
        let mut probing = Probing::every(1000);
        probing.note_connected(true, 5000);
        for now in [5400, 5800, 5999] {
            probing.note_connected(false, now);
            assert_eq!(probing.next_at(), Some(6000));
        }
        probing.begin(6000);
        assert_eq!(probing.next_at(), Some(7000));
        probing.note_connected(true, 9000);
        assert_eq!(probing.next_at(), Some(10_000), "there was no client before");
    }

    #[test]
    fn a_period_of_0_means_no_probes() {
        let mut probing = Probing::every(0);
        probing.note_connected(true, 5000);
        assert_eq!(probing.next_at(), None);
    }
}
