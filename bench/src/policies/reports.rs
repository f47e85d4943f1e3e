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
    /// Each block at most once in a gap: while all clients together make as many requests as this
    /// percentage of the number of keys. With ten million keys, 2 % are half a second at 400,000
    /// requests a second. At 1 % of the data that is about as long as a key stays.
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
    /// For each key and client the request with which it last reported the key's block.
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

    /// Notes that the next client stores the key, in another block than before. So the next hit of
    /// each client is the first one that it has there, and reported.
    pub(crate) fn insert(&mut self, key: u32) {
        self.next_client();
        let clients = self.rings.len();
        let noted_at = self.noted_at.iter_mut().skip(key as usize * clients).take(clients);
        noted_at.for_each(|noted_at| *noted_at = NEVER);
    }

    /// Notes a hit of the next client. `now` is the number of the request.
    pub(crate) fn hit(&mut self, key: u32, generation: u32, now: u64) {
        let (client, gap) = (self.next_client(), self.gap);
        let hits = match self.rate {
            Rate::OncePerGap(_) => {
                let noted_at = &mut self.noted_at[key as usize * self.rings.len() + client];
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
    fn a_client_reports_its_first_hit_at_each_block() {
        let mut clients = clients(2, Rate::OncePerGap(50.0));
        for generation in 1..4 {
            clients.insert(7);
            (0..100).for_each(|now| clients.hit(7, generation, now));
            assert_eq!(clients.pull(), [Report { key: 7, generation, hits: 1 }; 2]);
        }
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
