//! A run: a server, worker processes that record their operations, the kills of both, and the
//! figures, printed in one line.

use std::fmt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use farside::{Client, ServerStatistics};
use farside_layout::SizeClass;
use farside_linearizability::{Ended, Record, check, check_compacted};
use farside_tests::faults::Fault;
use farside_tests::network::Network;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, Worker, device, free_tcp_address, is_over_shm, is_over_tcp,
    scaled, wait_until,
};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::caches::check_cache;
use super::workers::{Member, RecordedRun, Workers, keep};

const WORKERS: usize = 2;
/// A run continues until it has made more operations than this, which takes longer on a busy
/// machine.
pub(super) const OPERATIONS_MIN: u64 = 10_000;
/// Limit on the time that a run takes until there is enough to check.
pub(crate) const ENOUGH_TIMEOUT: Duration = Duration::from_secs(240);
/// A run continues until it has seen more splits than this.
pub(super) const SPLITS_MIN: u64 = 60;
/// A run of a cache continues until the server has evicted more keys than this.
pub(super) const EVICTIONS_MIN: u64 = 1000;
/// The minimum numbers of operations and evictions of a run with long values, which take longer.
pub(super) const LONG_OPERATIONS_MIN: u64 = 2000;
pub(super) const LONG_EVICTIONS_MIN: u64 = 50;
/// A run in a full region continues until the server has denied more requests for blocks than this.
pub(super) const DENIED_MIN: u64 = 20;
/// The memory of a cache: less than the values take that are stored.
const CACHE_MEMORY: &str = "32MiB";
/// [`CACHE_MEMORY`] if some values have extents.
const LONG_CACHE_MEMORY: &str = "192MiB";
/// The memory of a server that is often full: fewer long values than the keys have.
const FULL_MEMORY: &str = "64MiB --value-bytes-max 8388608";
/// A run that kills clients continues until it has killed more than this.
pub(super) const CLIENTS_KILLED_MIN: u64 = 5;
/// A run that kills the server continues until it has restarted it more often than this.
pub(super) const SERVER_RESTARTS_MIN: u64 = 2;
/// One in this many starts of a client or server is followed by a kill during the start.
const STARTS_PER_KILL: u32 = 4;
/// The longest time that a start takes on an idle machine.
const START_MS: u64 = 60;

/// The length of an outage of the network, and the longest time between two, in milliseconds.
const OUTAGE_MS: std::ops::Range<u64> = 200..3000;
/// The length of one in three outages. Only when it is over has a client given up its connection,
/// and with it the answers to verbs that were executed.
const LONG_OUTAGE_MS: std::ops::Range<u64> = 5500..7000;
const BETWEEN_OUTAGES_MS: u64 = 1500;

/// The events of a run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Plan {
    /// Workers are killed and replaced.
    pub(super) kills_workers: bool,
    /// The server is killed and started again.
    pub(super) kills_server: bool,
    /// The number of workers with faults, of which they also die.
    pub(super) faulty: usize,
    /// The commands of [`CHORES`] run.
    pub(super) chores: bool,
    /// The network between the server's host and that of the workers fails. The first worker is on
    /// the server's host.
    pub(super) has_outages: bool,
    /// What netem does to this network between the outages.
    pub(super) netem: Option<&'static str>,
    /// The server listens at a port, too, and one of the workers uses it.
    pub(super) also_over_tcp: bool,
    /// The server evicts keys, and has less memory than the values take. Some values expire.
    pub(super) is_cache: bool,
    /// Some values have extents. Such workers have faults, too.
    pub(super) has_long: bool,
    /// With `has_long`: the server has no room for all values, and does not evict.
    pub(super) is_full: bool,
}

impl Plan {
    pub(crate) fn with_outages(netem: Option<&'static str>) -> Self {
        Self { has_outages: true, netem, ..Self::default() }
    }
}

/// A command under way.
struct Chore {
    number: usize,
    child: Child,
    /// The number of server restarts before the command began.
    restarts: u64,
}

/// A server, its workers, and their recorded operations.
pub(super) struct Run {
    plan: Plan,
    pub(super) server: ServerProcess,
    /// Declared after the server, which is therefore killed first.
    network: Option<Network>,
    /// The address of [`Plan::also_over_tcp`].
    tcp: Option<String>,
    workers: Workers,
    chore: Option<Chore>,
    figures: Figures,
}

impl Run {
    pub(super) fn start(plan: Plan) -> Self {
        // A small region is soon served again.
        let memory = match plan {
            Plan { is_cache: true, has_long: true, .. } => LONG_CACHE_MEMORY,
            Plan { is_cache: true, .. } => CACHE_MEMORY,
            Plan { is_full: true, .. } => FULL_MEMORY,
            Plan { has_long: true, .. } => "1GiB",
            Plan { kills_server: true, .. } => "256MiB",
            _ => "512MiB",
        };
        let mut arguments = format!("--memory {memory} --grace-ms 20");
        if plan.is_cache {
            arguments.push_str(" --evict");
        }
        let tcp = plan.also_over_tcp.then(free_tcp_address);
        tcp.iter().for_each(|address| arguments.push_str(&format!(" --listen {address}")));
        let network = plan.has_outages.then(|| Network::new().unwrap());
        let server = match &network {
            Some(network) => ServerProcess::start_in(network, &arguments),
            None => ServerProcess::start_with_file(&arguments),
        };
        if let (Some(network), Some(netem)) = (&network, plan.netem) {
            network.degrade(netem).unwrap();
        }
        let folder = server.folder().join("histories");
        let workers = if plan.is_cache { Workers::of_cache(folder) } else { Workers::new(folder) };
        let mut run =
            Self { plan, server, network, tcp, workers, chore: None, figures: Figures::default() };
        (0..WORKERS).for_each(|number| run.start_worker(number < plan.faulty));
        run
    }

    fn start_worker(&mut self, is_faulty: bool) {
        let mode = match &self.network {
            _ if self.plan.is_cache && self.plan.has_long => Some("long-cache"),
            _ if self.plan.is_full => Some("long-full"),
            _ if self.plan.is_cache => Some(if is_faulty { "faulty-cache" } else { "cache" }),
            _ if self.plan.has_long => Some("long"),
            _ if is_faulty => Some("faults"),
            Some(_) => Some("network"),
            None => None,
        };
        let has_tcp_worker = self.workers.members.iter().any(|member| member.is_over_tcp);
        let tcp = self.tcp.as_ref().filter(|_| !has_tcp_worker);
        let address = tcp.cloned().unwrap_or_else(|| self.server.address());
        let (network, folder) = (&self.network, self.server.folder());
        let start = |program: &str, first, arguments| match network {
            // Sees what the others have done although they got no answer.
            Some(network) if first == 0 => {
                Worker::start_beside(network, program, folder, first, arguments)
            }
            _ => Worker::start_at(&address, program, folder, first, arguments),
        };
        self.workers.start(mode, start).is_over_tcp = tcp.is_some();
    }

    /// Follows the plan for `duration`, and further until there is enough to check.
    pub(super) fn continue_for(&mut self, duration: Duration, random: &mut SmallRng) {
        let Plan { kills_workers, kills_server, chores, .. } = self.plan;
        let (started, mut before) = (Instant::now(), 0);
        while started.elapsed() < duration
            || (self.needs_more() && started.elapsed() < ENOUGH_TIMEOUT)
        {
            std::thread::sleep(Duration::from_millis(random.random_range(5..200)));
            self.fail_network(random);
            self.replace_dead();
            if chores {
                self.do_chore(random.random_range(0..CHORES.len()));
            }
            if kills_server && (!kills_workers || random.random_range(0..4) == 0) {
                self.add_statistics();
                if random.random() {
                    self.server.kill();
                } else {
                    assert_eq!(self.server.terminate(), Some(0));
                }
                let now = self.workers.operations();
                self.figures.idle_restarts += u64::from(now == before);
                before = now;
                if kills_workers && random.random() {
                    self.kill_worker(random);
                }
                while random.random_range(0..STARTS_PER_KILL) == 0 {
                    self.server.start_again();
                    std::thread::sleep(Duration::from_millis(random.random_range(0..2 * START_MS)));
                    self.server.kill();
                }
                self.server.restart();
                self.figures.server_restarts += 1;
            } else if kills_workers {
                self.kill_worker(random);
            }
        }
    }

    /// Interrupts the network, if there is one.
    fn fail_network(&mut self, random: &mut SmallRng) {
        let Some(network) = &self.network else { return };
        if random.random() {
            network.pull_cable();
        } else {
            network.lose_packets();
        }
        let is_long = random.random_range(0..3) == 0;
        let outage_ms = if is_long { LONG_OUTAGE_MS } else { OUTAGE_MS };
        std::thread::sleep(Duration::from_millis(random.random_range(outage_ms)));
        network.plug_in();
        self.figures.outages += 1;
        std::thread::sleep(Duration::from_millis(random.random_range(0..BETWEEN_OUTAGES_MS)));
    }

    /// Connects another client, which can take long while the workers keep the server busy.
    pub(super) fn client(&self) -> Client {
        self.server.client_builder().connect_timeout(Duration::from_secs(60)).connect().unwrap()
    }

    /// Returns whether there is not yet enough to check.
    fn needs_more(&self) -> bool {
        let Plan { kills_workers, kills_server, .. } = self.plan;
        let Figures { clients_killed, killed_at_start, .. } = self.figures;
        if kills_workers && (clients_killed <= CLIENTS_KILLED_MIN || killed_at_start == 0)
            || kills_server && self.figures.server_restarts <= SERVER_RESTARTS_MIN
        {
            return true;
        }
        let now = self.client().admin().statistics().unwrap();
        let has_few = match self.plan {
            Plan { is_cache: true, has_long, .. } => {
                self.figures.evicted + now.keys_evicted <= scaled(EVICTIONS_MIN)
                    || self.figures.expired + now.keys_expired == 0
                    || has_long
                        && self.figures.long_evicted + long_evicted(&now)
                            <= scaled(LONG_EVICTIONS_MIN)
            }
            Plan { is_full: true, .. } => {
                self.figures.denied + now.requests_denied <= scaled(DENIED_MIN)
            }
            _ => self.figures.splits + now.splits <= scaled(SPLITS_MIN),
        };
        let enough = if self.plan.has_long { LONG_OPERATIONS_MIN } else { OPERATIONS_MIN };
        self.workers.operations() < 2 * scaled(enough) || has_few
    }

    /// Returns whether every kind of fault has happened, and a worker has died of one.
    pub(super) fn has_all_faults(&self) -> bool {
        self.figures.suicides > 0 && has_all_kinds(&self.workers.faults())
    }

    /// Replaces workers that died of their faults; checks that the others have not failed.
    fn replace_dead(&mut self) {
        let died = |member: &mut Member| {
            if !member.is_faulty {
                member.worker.check();
            }
            member.is_faulty && member.worker.was_killed()
        };
        let members = &mut self.workers.members;
        let dead: Vec<_> = members.extract_if(.., died).map(|member| member.first).collect();
        for first in dead {
            self.workers.note_death(first);
            self.figures.suicides += 1;
            self.start_worker(true);
        }
    }

    /// Kills a worker and starts another one, which is sometimes killed while it starts.
    fn kill_worker(&mut self, random: &mut SmallRng) {
        let mut victim = random.random_range(0..WORKERS);
        loop {
            let (is_faulty, has_begun) = self.workers.kill(victim);
            self.figures.clients_killed += 1;
            self.figures.killed_at_start += u64::from(!has_begun);
            self.start_worker(is_faulty);
            if random.random_range(0..STARTS_PER_KILL) > 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(random.random_range(0..START_MS)));
            victim = WORKERS - 1;
        }
    }

    /// Starts a command, unless the previous one is still under way.
    fn do_chore(&mut self, number: usize) {
        if let Some(chore) = &mut self.chore {
            if chore.child.try_wait().unwrap().is_none() {
                return;
            }
            self.end_chore();
        }
        let mut command = self.server.command("kv-cli");
        command.args(CHORES[number]).current_dir(self.server.folder()).stdout(Stdio::null());
        let child = command.spawn().unwrap();
        let restarts = self.figures.server_restarts;
        self.chore = Some(Chore { number, child, restarts });
    }

    /// Waits for the command under way. It may fail if the server was restarted, or was too busy to
    /// answer.
    fn end_chore(&mut self) {
        let Some(Chore { number, child, restarts }) = self.chore.take() else { return };
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            self.figures.chores[number] += 1;
        } else if restarts == self.figures.server_restarts {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("no server answers"), "{:?}: {said}", CHORES[number]);
        }
    }

    /// Adds what this server has counted: a restarted server counts from 0.
    fn add_statistics(&mut self) {
        let now = self.client().admin().statistics().unwrap();
        self.figures.splits += now.splits;
        self.figures.evicted += now.keys_evicted;
        self.figures.long_evicted += long_evicted(&now);
        self.figures.denied += now.requests_denied;
        self.figures.expired += now.keys_expired;
    }

    /// Stops all workers, reads every key, and checks the recorded history.
    pub(super) fn check(&mut self) -> (Figures, Vec<Record>) {
        self.workers.stop();
        for Member { first, mut worker, is_faulty, .. } in std::mem::take(&mut self.workers.members)
        {
            if is_faulty && worker.wait_checked() {
                self.workers.note_death(first);
                self.figures.suicides += 1;
            } else if !is_faulty {
                worker.wait();
            }
        }
        self.end_chore();
        self.add_statistics();
        self.figures.faults = self.workers.faults();
        self.read_all();
        if self.plan.kills_server {
            self.server.kill();
            self.server.restart();
            self.read_all();
        }
        let recorded = self.recorded();
        self.figures.operations = recorded.history.len() as u64;
        self.figures.unknown = recorded.count(Ended::Unknown);
        self.figures.failed = recorded.count(Ended::Failed);
        self.figures.full = recorded.full;
        let history = recorded.history;
        let started = Instant::now();
        let verdict = match self.plan {
            Plan { is_cache: true, .. } => check_cache(&history),
            Plan { chores: true, .. } => check_compacted(&history).map_err(|it| it.to_string()),
            _ => check(&history).map_err(|it| it.to_string()),
        };
        if let Err(violation) = verdict {
            println!("VIOLATION: {violation}\nThe history is in {}", keep(&history).display());
            self.figures.violations = 1;
        }
        self.figures.checking = started.elapsed();
        println!("{}", self.figures);
        (self.figures, history)
    }

    /// A new client reads all keys. Then no other client may be connected, and the region must be
    /// intact.
    fn read_all(&mut self) {
        let client = self.client();
        self.figures.inserted += self.workers.read_all(&client);
        wait_until("dead clients are noticed", TEST_TIMEOUT, || {
            client.admin().statistics().unwrap().clients == 1
        });
        self.server.assert_verifies();
    }

    /// Returns all recorded operations.
    fn recorded(&self) -> RecordedRun {
        let Plan { kills_server, faulty, has_outages, .. } = self.plan;
        let breaks_connections = kills_server || faulty > 0 || has_outages;
        // After the process is gone, a server executes chains that have left until their deadlines.
        // When a device executes the last one is not known.
        let late_ns = if is_over_shm() { 0 } else { farside_fabric::tcp::LATENESS_MAX_NS };
        let recorded = self.workers.recorded(device().is_none().then_some(late_ns));
        assert!(breaks_connections || !recorded.has_lost_call, "a living client lost a call");
        recorded
    }
}

/// The number of values with extents that the server has evicted: it chose their head, or one of
/// their extents.
fn long_evicted(statistics: &ServerStatistics) -> u64 {
    let is_long = |class: SizeClass| class.is_head() || class == SizeClass::EXTENT;
    let classes = statistics.classes.iter().filter(|class| is_long(class.class));
    classes.map(|class| class.evicted).sum()
}

/// Whether every kind of fault happened. Over TCP no delay is longer than L.
pub(super) fn has_all_kinds(faults: &[u64]) -> bool {
    let is_rare = |fault: usize| is_over_tcp() && fault == Fault::Late as usize;
    faults.iter().enumerate().all(|(fault, count)| *count > 0 || is_rare(fault))
}

/// The commands of `kv-cli` that run beside the workers.
const CHORES: [&[&str]; 3] = [&["gc"], &["compact"], &["snapshot", "--force", "snapshot"]];

/// The figures of one run, or the sums over several.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    pub(super) operations: u64,
    /// Operations without a known result.
    pub(super) unknown: u64,
    pub(super) failed: u64,
    /// Sessions that stopped because their file was full.
    pub(super) full: u64,
    /// New keys that were read at the end.
    pub(super) inserted: u64,
    pub(super) clients_killed: u64,
    /// Killed clients whose sessions had not begun.
    pub(super) killed_at_start: u64,
    /// Clients that killed themselves at some verb.
    pub(super) suicides: u64,
    /// In the order of [`Fault::NAMES`].
    pub(super) faults: [u64; Fault::NAMES.len()],
    pub(super) server_restarts: u64,
    /// Restarts without an operation since the previous one.
    pub(super) idle_restarts: u64,
    pub(super) splits: u64,
    /// Keys that the server evicted, and expired values that it removed.
    pub(super) evicted: u64,
    pub(super) expired: u64,
    /// Evicted keys whose values had extents.
    pub(super) long_evicted: u64,
    /// Requests for blocks that a full server denied.
    pub(super) denied: u64,
    /// Outages of the network.
    pub(crate) outages: u64,
    /// The number of successes of each of [`CHORES`].
    pub(super) chores: [u64; CHORES.len()],
    pub(super) violations: u64,
    /// The time that the check of the history took.
    pub(super) checking: Duration,
}

impl Figures {
    pub(super) fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.unknown += other.unknown;
        self.failed += other.failed;
        self.full += other.full;
        self.inserted += other.inserted;
        self.clients_killed += other.clients_killed;
        self.killed_at_start += other.killed_at_start;
        self.suicides += other.suicides;
        self.server_restarts += other.server_restarts;
        self.idle_restarts += other.idle_restarts;
        self.splits += other.splits;
        self.evicted += other.evicted;
        self.expired += other.expired;
        self.long_evicted += other.long_evicted;
        self.denied += other.denied;
        self.outages += other.outages;
        self.violations += other.violations;
        self.checking += other.checking;
        self.faults.iter_mut().zip(other.faults).for_each(|(sum, more)| *sum += more);
        self.chores.iter_mut().zip(other.chores).for_each(|(sum, more)| *sum += more);
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations ({} unknown, {} failed; {} sessions full), {} new keys, {} clients \
             killed ({} at their start), {} by themselves, {} server restarts ({} idle), {} splits",
            self.operations,
            self.unknown,
            self.failed,
            self.full,
            self.inserted,
            self.clients_killed,
            self.killed_at_start,
            self.suicides,
            self.server_restarts,
            self.idle_restarts,
            self.splits,
        )?;
        if self.faults != [0; Fault::NAMES.len()] {
            let faults = Fault::NAMES.iter().zip(self.faults);
            let faults: Vec<String> =
                faults.map(|(name, count)| format!("{count} {name}")).collect();
            write!(f, ", chains: {}", faults.join(", "))?;
        }
        if self.evicted > 0 {
            write!(
                f,
                ", {} keys evicted, {} of them with extents, {} expired values removed",
                self.evicted, self.long_evicted, self.expired
            )?;
        }
        if self.denied > 0 {
            write!(f, ", {} requests denied", self.denied)?;
        }
        if self.outages > 0 {
            write!(f, ", {} outages of the network", self.outages)?;
        }
        for (chore, count) in CHORES.iter().zip(self.chores).filter(|(_, count)| *count > 0) {
            write!(f, ", {count} {}", chore[0])?;
        }
        let rate = self.operations as f64 / self.checking.as_secs_f64();
        write!(f, ", {} violations; {rate:.0} operations checked a second", self.violations)
    }
}
