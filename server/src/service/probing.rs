//! When to look after the hosts of clients, and how: a host that lost power says nothing.

use farside_fabric::Nanos;
use farside_fabric::rdma::ProbeState;

use super::acceptor::DataConnection;

/// A clock that goes while there are clients.
pub(super) struct Probing {
    /// 0 for never.
    period_ns: Nanos,
    /// When all clients were asked last, or when the first of them came.
    at: Nanos,
}

impl Probing {
    pub(super) fn every(period_ns: Nanos) -> Self {
        Self { period_ns, at: 0 }
    }

    /// A client came. Only the first starts the clock: were it every one, those who come and go
    /// would keep the others from ever being asked.
    pub(super) fn client_came(&mut self, is_first: bool, now: Nanos) {
        if is_first {
            self.at = now;
        }
    }

    /// All clients are asked now.
    pub(super) fn begin(&mut self, now: Nanos) {
        self.at = now;
    }

    /// When to ask, if there are clients.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        (self.period_ns > 0).then(|| self.at.saturating_add(self.period_ns))
    }
}

/// Asks the first of a client's sessions for a sign of life. Returns whether the session answered
/// since the last time, or was not asked yet.
///
/// One that is dead is dropped, and says nothing of the client: its end may have been told in a
/// packet that was lost.
pub(super) fn probe_first<C: DataConnection + ?Sized>(sessions: &mut Vec<Box<C>>) -> bool {
    let Some(first) = sessions.first_mut() else { return false };
    let state = first.probe_state();
    if matches!(state, Ok(ProbeState::Dead)) {
        sessions.remove(0);
        return false;
    }
    // What cannot be asked is in the middle of ending, and an event will say so.
    let _ = first.probe();
    matches!(state, Ok(ProbeState::Idle | ProbeState::Alive))
}

#[cfg(test)]
mod tests {
    use std::io;

    use farside_fabric::rdma::ConnectionId;

    use super::*;

    /// A session in this state, and how often it was asked.
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
    fn a_dead_session_is_dropped_and_the_next_is_asked() {
        let mut sessions =
            vec![Box::new(Fake(ProbeState::Dead, 0)), Box::new(Fake(ProbeState::Idle, 0))];
        assert!(!probe_first(&mut sessions), "the channel has to say whether the client is there");
        assert_eq!(sessions.len(), 1);
        assert!(probe_first(&mut sessions));
        assert_eq!(sessions[0].1, 1);
        sessions[0].0 = ProbeState::Alive;
        assert!(probe_first(&mut sessions));
        // As long as the device sends the probe again, without an answer.
        sessions[0].0 = ProbeState::Pending;
        assert!(!probe_first(&mut sessions));
        assert_eq!(sessions.len(), 1);
        sessions[0].0 = ProbeState::Dead;
        assert!(!probe_first(&mut sessions) && sessions.is_empty());
        assert!(!probe_first(&mut sessions));
    }

    #[test]
    fn clients_that_come_and_go_put_off_no_probe() {
        let mut probing = Probing::every(1000);
        probing.client_came(true, 5000);
        for now in [5400, 5800, 5999] {
            probing.client_came(false, now);
            assert_eq!(probing.next_at(), Some(6000));
        }
        probing.begin(6000);
        assert_eq!(probing.next_at(), Some(7000));
        probing.client_came(true, 9000);
        assert_eq!(probing.next_at(), Some(10_000), "no client was there");
    }

    #[test]
    fn a_period_of_0_means_no_probes() {
        let mut probing = Probing::every(0);
        probing.client_came(true, 5000);
        assert_eq!(probing.next_at(), None);
    }
}
