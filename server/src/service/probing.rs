//! When to look after the hosts of clients: a host that lost power says nothing.

use farside_common::fabric::Nanos;

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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(probing.next_at(), Some(10_000), "nobody was there");
    }

    #[test]
    fn who_wants_none_gets_none() {
        let mut probing = Probing::every(0);
        probing.client_came(true, 5000);
        assert_eq!(probing.next_at(), None);
    }
}
