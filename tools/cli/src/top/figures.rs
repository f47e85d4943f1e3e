//! What `top` asks the servers, and the rates between two answers.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use farside::{Client, ConnectedClient, ServerStatistics, Session};
use farside_config::command_line::one_line;

/// The number of GETs of an absent key that are timed for each view.
const GETS_PER_VIEW: usize = 8;
/// The number of GETs from which minimum and median are taken.
const GETS_MAX: usize = 64;
/// The number of former rates that a view shows.
const HISTORY_MAX: usize = 240;

/// The content of a view.
#[derive(Clone, Default)]
pub(super) struct Figures {
    pub(super) server: String,
    /// Of each shard, or why there are none.
    pub(super) shards: Vec<Result<ShardFigures, String>>,
    pub(super) round_trip: Option<RoundTrip>,
}

/// How long GETs by this command took.
#[derive(Clone, Copy)]
pub(super) struct RoundTrip {
    pub(super) min: Duration,
    pub(super) median: Duration,
}

/// The figures of a shard.
#[derive(Clone, Default)]
pub(super) struct ShardFigures {
    pub(super) statistics: ServerStatistics,
    /// `None` before the second answer, and after a restart of the server.
    pub(super) rates: Option<Rates>,
    /// The clients except this command, those with most operations first.
    pub(super) clients: Vec<ClientFigures>,
    /// The former rates of operations, the newest last.
    pub(super) history: Vec<u64>,
}

/// Events per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Of all clients that describe themselves.
    pub(super) operations: f64,
    pub(super) reads_found: f64,
    pub(super) reads_absent: f64,
    pub(super) evicted: f64,
    pub(super) expired: f64,
    pub(super) blocks_taken: f64,
    pub(super) blocks_returned: f64,
    pub(super) splits: f64,
}

/// A client, and its operations per second, if they are known.
#[derive(Clone)]
pub(super) struct ClientFigures {
    pub(super) client: ConnectedClient,
    pub(super) operations_per_s: Option<f64>,
}

/// What a client had counted at some moment.
#[derive(Clone, Copy)]
struct ClientCounts {
    at: Instant,
    operations: u64,
    reads_found: u64,
    reads_absent: u64,
}

/// The last answers of a server.
struct ShardAnswers {
    at: Instant,
    statistics: ServerStatistics,
    counts: HashMap<u16, ClientCounts>,
}

/// Asks the servers.
pub(super) struct Collector {
    client: Client,
    /// For the GETs. `None` before the first view, and after an error.
    session: Option<Session>,
    server: String,
    last: Vec<Option<ShardAnswers>>,
    histories: Vec<VecDeque<u64>>,
    gets: VecDeque<Duration>,
}

impl Collector {
    pub(super) fn new(client: Client, server: String) -> Self {
        let shards = usize::from(client.admin().shards());
        let last = (0..shards).map(|_| None).collect();
        let histories = vec![VecDeque::new(); shards];
        Self { client, session: None, server, last, histories, gets: VecDeque::new() }
    }

    /// Asks all servers. A server that does not answer has an error in place of figures.
    pub(super) fn collect(&mut self) -> Figures {
        let shards = (0..self.last.len()).map(|shard| self.collect_shard(shard)).collect();
        Figures { server: self.server.clone(), shards, round_trip: self.time_gets() }
    }

    fn collect_shard(&mut self, shard: usize) -> Result<ShardFigures, String> {
        let admin = self.client.admin().shard(shard as u16);
        let answers = admin.statistics().and_then(|it| Ok((it, admin.clients()?)));
        let at = Instant::now();
        let (statistics, mut clients) = answers.map_err(|error| {
            self.last[shard] = None;
            one_line(&error)
        })?;
        clients.retain(|client| !client.is_asking);
        let counts = clients.iter().filter_map(|client| Some((client.id, counts(client, at)?)));
        let answers = ShardAnswers { at, statistics, counts: counts.collect() };
        let last = self.last[shard].take().filter(|last| is_same_run(last, &answers));
        let rates = last.as_ref().map(|last| rates(last, &answers));
        let history = &mut self.histories[shard];
        if let Some(rates) = rates {
            history.push_back(rates.operations as u64);
            history.drain(..history.len().saturating_sub(HISTORY_MAX));
        }
        let figures = |client: ConnectedClient| {
            let now = answers.counts.get(&client.id);
            let then = last.as_ref().and_then(|last| last.counts.get(&client.id));
            let rate =
                now.zip(then).and_then(|(now, then)| client_rate(then, now, |it| it.operations));
            ClientFigures { client, operations_per_s: rate }
        };
        let mut clients: Vec<_> = clients.into_iter().map(figures).collect();
        let rate = |of: &ClientFigures| of.operations_per_s.unwrap_or(-1.0);
        clients.sort_by(|one, other| rate(other).total_cmp(&rate(one)));
        let statistics = answers.statistics.clone();
        self.last[shard] = Some(answers);
        Ok(ShardFigures { statistics, rates, clients, history: history.iter().copied().collect() })
    }

    /// Times some GETs of absent keys, and returns the minimum and the median of the latest ones.
    fn time_gets(&mut self) -> Option<RoundTrip> {
        if self.session.is_none() {
            self.session = self.client.session().ok();
        }
        let session = self.session.as_mut()?;
        for number in 0..GETS_PER_VIEW {
            // In a cluster the keys belong to several shards.
            let key = format!("\0kv-cli top {number}");
            let began = Instant::now();
            // The shards of other keys may be available.
            if session.get(key).is_ok() {
                self.gets.push_back(began.elapsed());
            }
        }
        self.gets.drain(..self.gets.len().saturating_sub(GETS_MAX));
        let mut sorted: Vec<_> = self.gets.iter().copied().collect();
        sorted.sort_unstable();
        Some(RoundTrip { min: *sorted.first()?, median: *sorted.get(sorted.len() / 2)? })
    }
}

/// Returns what a client had counted when it described itself; `None` if it never did.
fn counts(client: &ConnectedClient, now: Instant) -> Option<ClientCounts> {
    let description = client.description.as_ref()?;
    let at = now.checked_sub(Duration::from_millis(client.description_age_ms))?;
    let (operations, reads_found, reads_absent) =
        (description.operations, description.reads_found, description.reads_absent);
    Some(ClientCounts { at, operations, reads_found, reads_absent })
}

/// Whether both answers are those of one run of a server, which counts from 0 when it starts.
fn is_same_run(last: &ShardAnswers, now: &ShardAnswers) -> bool {
    now.statistics.uptime_ms >= last.statistics.uptime_ms
        && now.statistics.incarnation == last.statistics.incarnation
}

/// Returns how often a second a client counted something; `None` if it has described itself only
/// once, or not since.
fn client_rate(
    then: &ClientCounts,
    now: &ClientCounts,
    of: impl Fn(&ClientCounts) -> u64,
) -> Option<f64> {
    let seconds = now.at.checked_duration_since(then.at)?.as_secs_f64();
    // The ages are in milliseconds, so the same description seems to move by one.
    let is_newer = seconds > 0.01;
    is_newer.then(|| of(now).saturating_sub(of(then)) as f64 / seconds)
}

fn rates(last: &ShardAnswers, now: &ShardAnswers) -> Rates {
    let seconds = now.at.duration_since(last.at).as_secs_f64().max(0.001);
    let of_server = |of: fn(&ServerStatistics) -> u64| {
        of(&now.statistics).saturating_sub(of(&last.statistics)) as f64 / seconds
    };
    let of_clients = |of: fn(&ClientCounts) -> u64| {
        let rate = |(id, now): (&u16, &ClientCounts)| client_rate(last.counts.get(id)?, now, of);
        // The sum of no numbers would be -0.
        now.counts.iter().filter_map(rate).fold(0.0, |sum, rate| sum + rate)
    };
    Rates {
        operations: of_clients(|it| it.operations),
        reads_found: of_clients(|it| it.reads_found),
        reads_absent: of_clients(|it| it.reads_absent),
        evicted: of_server(|it| it.keys_evicted),
        expired: of_server(|it| it.keys_expired),
        blocks_taken: of_server(|it| it.blocks_taken),
        blocks_returned: of_server(|it| it.blocks_returned),
        splits: of_server(|it| it.splits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(at: Instant, evicted: u64, counts: &[(u16, Instant, u64)]) -> ShardAnswers {
        let statistics = ServerStatistics { keys_evicted: evicted, ..Default::default() };
        let counts = counts.iter().map(|(id, at, operations)| {
            let [reads_found, reads_absent] = [operations / 2, operations / 4];
            (*id, ClientCounts { at: *at, operations: *operations, reads_found, reads_absent })
        });
        ShardAnswers { at, statistics, counts: counts.collect() }
    }

    #[test]
    fn rates_are_of_the_time_between_two_answers() {
        let start = Instant::now();
        let ms = |ms| start + Duration::from_millis(ms);
        let last = answers(ms(0), 10, &[(1, ms(0), 1000), (2, ms(0), 50), (4, ms(0), 7)]);
        // The second client is stopped, the third is new, the fourth is gone.
        let now = answers(ms(2000), 30, &[(1, ms(1000), 5000), (2, ms(1), 50), (3, ms(1990), 9)]);
        let rates = rates(&last, &now);
        let expected = Rates {
            operations: 4000.0,
            reads_found: 2000.0,
            reads_absent: 1000.0,
            evicted: 10.0,
            ..Default::default()
        };
        assert_eq!(rates, expected);
        assert!(is_same_run(&last, &now));
        assert_eq!(client_rate(&last.counts[&2], &now.counts[&2], |it| it.operations), None);
    }
}
