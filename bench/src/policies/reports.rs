//! What clients tell the server about hits. A GET itself tells the server nothing: the client notes
//! the key in a ring of its own, and the server pulls the rings while it evicts.

use std::collections::VecDeque;

/// The number of a request that never came.
const NEVER: u64 = u64::MAX;
/// The entries of a client's ring. When it is full, a report replaces the oldest one.
const RING: usize = 4096;

/// Which hits the clients report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reporting {
    /// The number of clients. Each request comes from one of them, in turn.
    pub(crate) clients: usize,
    pub(crate) rate: Rate,
}

/// How often a client reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rate {
    /// Each key at most once in a gap after it reported or stored the key: while all clients together make as many requests as this
    /// percentage of the number of keys. With ten million keys, 2 % are half a second at 400,000
    /// requests a second.
    OncePerGap(f64),
    /// One hit of this many, whatever its key.
    OneOf(u64),
}

/// A report of a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) key: u32,
    /// The generation of the key's block.
    pub(crate) generation: u32,
    /// How many hits the report stands for.
    pub(crate) hits: u64,
}

/// The clients and their rings.
pub(crate) struct Clients {
    rate: Rate,
    /// The requests of a gap.
    gap: u64,
    /// The client of the next hit.
    next: usize,
    hits: Vec<u64>,
    rings: Vec<VecDeque<Report>>,
    /// For each key and client the request with which it last reported or stored the key.
    noted_at: Vec<u64>,
    /// The reports that the server has pulled.
    pub(crate) reports: u64,
    pub(crate) pulls: u64,
}

impl Clients {
    /// Keys are below `keys`; `data` is the number of those that are not only for scans.
    pub(crate) fn new(Reporting { clients, rate }: Reporting, keys: u32, data: u64) -> Self {
        let (gap, entries) = match rate {
            Rate::OncePerGap(percent) => {
                ((data as f64 * percent / 100.0) as u64, keys as usize * clients)
            }
            Rate::OneOf(_) => (0, 0),
        };
        Self {
            rate,
            gap: gap.max(1),
            next: 0,
            hits: vec![0; clients],
            rings: vec![VecDeque::new(); clients],
            noted_at: vec![NEVER; entries],
            reports: 0,
            pulls: 0,
        }
    }

    fn next_client(&mut self) -> usize {
        let next = (self.next + 1) % self.rings.len();
        std::mem::replace(&mut self.next, next)
    }

    fn noted_at(&mut self, key: u32, client: usize) -> Option<&mut u64> {
        self.noted_at.get_mut(key as usize * self.rings.len() + client)
    }

    /// Notes that the next client stores the key. It is as sure of the key's location then as after
    /// a report.
    pub(crate) fn insert(&mut self, key: u32, now: u64) {
        let client = self.next_client();
        if let Some(noted_at) = self.noted_at(key, client) {
            *noted_at = now;
        }
    }

    /// Notes a hit of the next client. `now` is the number of the request.
    pub(crate) fn hit(&mut self, key: u32, generation: u32, now: u64) {
        let (client, gap) = (self.next_client(), self.gap);
        let hits = match self.rate {
            Rate::OncePerGap(_) => {
                let Some(noted_at) = self.noted_at(key, client) else { return };
                if *noted_at != NEVER && now - *noted_at < gap {
                    return;
                }
                *noted_at = now;
                1
            }
            Rate::OneOf(every) => {
                self.hits[client] += 1;
                if !self.hits[client].is_multiple_of(every) {
                    return;
                }
                every
            }
        };
        let ring = &mut self.rings[client];
        if ring.len() == RING {
            ring.pop_front();
        }
        ring.push_back(Report { key, generation, hits });
    }

    /// Takes the reports out of all rings.
    pub(crate) fn pull(&mut self) -> Vec<Report> {
        let reports: Vec<Report> = self.rings.iter_mut().flat_map(|ring| ring.drain(..)).collect();
        self.reports += reports.len() as u64;
        self.pulls += 1;
        reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients(clients: usize, rate: Rate) -> Clients {
        Clients::new(Reporting { clients, rate }, 10_000, 1000)
    }

    #[test]
    fn each_client_reports_a_key_once_in_a_gap() {
        let mut clients = clients(2, Rate::OncePerGap(10.0));
        (0..1000).for_each(|now| clients.hit(7, 1, now));
        let reports = clients.pull();
        assert_eq!(reports, [Report { key: 7, generation: 1, hits: 1 }; 20]);
        assert_eq!((clients.pull().len(), clients.reports, clients.pulls), (0, 20, 2));
    }

    #[test]
    fn a_client_does_not_report_what_it_stored_in_the_same_gap() {
        let mut clients = clients(2, Rate::OncePerGap(10.0));
        clients.insert(7, 0);
        (1..100).for_each(|now| clients.hit(7, 1, now));
        assert_eq!(clients.pull().len(), 1, "only the other client reports it");
        clients.hit(7, 1, 100);
        assert_eq!(clients.pull().len(), 1);
    }

    #[test]
    fn a_fixed_rate_reports_one_hit_of_several() {
        let mut clients = clients(4, Rate::OneOf(8));
        (0..320).for_each(|now| clients.hit(now as u32 % 10, 1, now));
        let reports = clients.pull();
        assert_eq!(
            (reports.len(), reports.iter().map(|report| report.hits).sum::<u64>()),
            (40, 320)
        );
    }

    #[test]
    fn a_full_ring_forgets_its_oldest_reports() {
        let mut clients = clients(1, Rate::OneOf(1));
        (0..RING as u64 + 10).for_each(|now| clients.hit(now as u32, 1, now));
        let reports = clients.pull();
        assert_eq!((reports.len(), reports[0].key), (RING, 10));
    }
}
