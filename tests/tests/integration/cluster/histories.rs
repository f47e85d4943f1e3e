//! Proves that operations on one key of a cluster are linearizable, from the records of real
//! processes.
//!
//! Meanwhile servers are killed, stopped and started again on their region files, mostly at another
//! address. Servers are frozen, for less and for longer than clients trust them, and than they
//! trust themselves. Clients are killed and replaced. In the soak, members of etcd are killed and
//! frozen, the leader changes, and the network cuts servers off from etcd, from clients, or from
//! both. At the end a new client reads every key, twice, with a kill of all servers in between.
//!
//! `histories::a_history_with_one_wrong_answer_is_refused` shows that the check can fail: the same
//! code records and checks the histories of both.

mod faults;

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use farside::Client;
use farside_cluster::random_id;
use farside_fabric::tcp::{LATENESS_MAX_NS, TlsFiles};
use farside_linearizability::{Ended, Record};
use farside_tests::cluster::TestCluster;
use farside_tests::etcd_process::{Etcd, is_left_out};
use farside_tests::faults::Fault;
use farside_tests::network::Network;
use farside_tests::{
    TEST_TIMEOUT, Worker, device, is_over_shm, network_or_left_out, scaled, wait_until,
};
use faults::{EtcdMembers, ShardServer};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::histories::workers::{Workers, keep};
use crate::histories::{ENOUGH_TIMEOUT, soak_time};

/// The time of a soak's run, after which the next one begins in a new cluster.
const ROUND: Duration = Duration::from_secs(25);

fn run(plan: Plan, duration: Duration, seed: u64) -> Figures {
    let mut run = Run::start(plan);
    run.continue_for(duration, &mut SmallRng::seed_from_u64(seed));
    run.check()
}

/// Checks that there was enough to check, and no violation.
fn assert_good(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 2, "{figures}");
}

#[on(each)]
fn of_servers_and_clients_that_are_killed_and_frozen_are_linearizable() {
    const DURATION: Duration = Duration::from_secs(6);
    assert_good(&run(Plan::default(), DURATION, 1));
}

/// One session of each worker has its operations in pipelines, one in batches, and one in tasks of
/// an async client. Their connections break before, within and after chains: an operation that had
/// no effect is run again.
#[on(each)]
fn of_many_operations_in_flight_whose_connections_break_are_linearizable() {
    const DURATION: Duration = Duration::from_secs(6);
    let plan = Plan { lanes: Some("lanes"), ..Plan::default() };
    let figures = run(plan, DURATION, 1);
    assert_good(&figures);
    assert!(!figures.broken.contains(&0), "{figures}");
}

/// Runs of these plans, one for each seed, for the time of a soak. On a slow machine it takes more
/// time, until the figures are complete.
fn soak_of(plan: impl Fn(u64) -> Plan, is_complete: impl Fn(&Figures) -> bool) {
    let (started, mut total) = (Instant::now(), Figures::default());
    for seed in 0.. {
        total.add(&run(plan(seed), ROUND, seed));
        if started.elapsed() >= soak_time() * if is_complete(&total) { 1 } else { 4 } {
            break;
        }
    }
    println!("in {:?}: {total}", started.elapsed());
    assert_good(&total);
    assert!(is_complete(&total), "{total}");
}

/// Runs of this mode of the workers.
fn soak_of_lanes(mode: &'static str) {
    let plan = |_| Plan { lanes: Some(mode), ..Plan::default() };
    soak_of(plan, |total| !total.broken.contains(&0));
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_pipelines() {
    soak_of_lanes("pipelines");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_batches() {
    soak_of_lanes("batches");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak_of_async_clients() {
    soak_of_lanes("async");
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak() {
    if is_left_out() {
        return;
    }
    let has_networks = network_or_left_out().is_some();
    let plan = |seed| {
        let has_partitions = has_networks && seed % 2 == 1;
        Plan { has_etcd: true, has_partitions, ..Plan::default() }
    };
    soak_of(plan, |total| total.has_all_kinds(has_networks));
}

const SERVERS: usize = 3;
const WORKERS: usize = 2;
const ARGUMENTS: &str = "--memory 128MiB --grace-ms 20";
/// A run continues until it has made more operations than this.
const OPERATIONS_MIN: u64 = 3_000;
/// Limit on the servers that are out of order at once.
const FAULTY_MAX: usize = 2;
/// The time between two faults, in milliseconds, of a short run and of one with etcd.
const INTERVAL_MS: [std::ops::Range<u64>; 2] = [20..300, 50..700];

/// The events of a run. Servers and clients are always killed, and servers frozen.
#[derive(Clone, Copy, Default)]
struct Plan {
    /// The records are in an etcd whose members fail, and not in a folder.
    has_etcd: bool,
    /// Each server is behind a network of its own, which fails.
    has_partitions: bool,
    /// The mode of workers that have many operations in flight, and whose connections break.
    lanes: Option<&'static str>,
}

/// Servers, their workers, and the operations of these.
struct Run {
    plan: Plan,
    workers: Workers,
    servers: Vec<ShardServer>,
    cluster: TestCluster,
    etcd: Option<EtcdMembers>,
    figures: Figures,
}

impl Run {
    fn start(plan: Plan) -> Self {
        let network = || plan.has_partitions.then(|| Network::new().unwrap());
        let networks: Vec<_> = (0..SERVERS).map(|_| network()).collect();
        let hosts: Vec<_> = networks.iter().flatten().map(Network::records_host).collect();
        let start_etcd = || Etcd::start_at(&hosts, 3, &[], &TlsFiles::default());
        let etcd = plan.has_etcd.then(|| EtcdMembers::new(start_etcd()));
        let uri = etcd.as_ref().map(|members| members.etcd.uri("127.0.0.1"));
        let hash_key = random_id().unwrap();
        let cluster = TestCluster::create_at(uri, SERVERS as u16, hash_key, ARGUMENTS);
        let servers = networks
            .into_iter()
            .enumerate()
            .map(|(number, network)| ShardServer::start(&cluster, number, network, etcd.as_ref()));
        let servers = servers.collect();
        cluster.wait_for_servers();
        let workers = Workers::new(cluster.folder().join("histories"));
        let mut run = Self { plan, workers, servers, cluster, etcd, figures: Figures::default() };
        (0..WORKERS).for_each(|_| run.start_worker());
        run
    }

    fn seeds(&self) -> String {
        let addresses = self.servers.iter().map(|server| server.process.address());
        addresses.collect::<Vec<_>>().join(",")
    }

    fn start_worker(&mut self) {
        let (seeds, folder) = (self.seeds(), self.cluster.folder());
        let mode = self.plan.lanes.unwrap_or("cluster");
        self.workers.start(Some(mode), |program, first, arguments| {
            Worker::start_at(&seeds, program, folder, first, arguments)
        });
    }

    /// Whether there is enough to check: operations, and each fault of servers and clients.
    fn has_enough(&self) -> bool {
        self.figures.has_kills_and_freezes()
            && (self.plan.lanes.is_none() || !self.broken().contains(&0))
            && self.workers.operations() > 2 * scaled(OPERATIONS_MIN)
    }

    /// How often connections of workers have broken before, within and after a chain.
    fn broken(&self) -> [u64; 3] {
        let faults = self.workers.faults();
        [Fault::BrokenBefore, Fault::BrokenWithin, Fault::BrokenAfter]
            .map(|fault| faults[fault as usize])
    }

    /// Makes faults for `duration`, and further until there is enough to check.
    fn continue_for(&mut self, duration: Duration, random: &mut SmallRng) {
        let started = Instant::now();
        let (end, interval) = (started + duration, &INTERVAL_MS[usize::from(self.plan.has_etcd)]);
        while Instant::now() < end || (!self.has_enough() && started.elapsed() < ENOUGH_TIMEOUT) {
            std::thread::sleep(Duration::from_millis(random.random_range(interval.clone())));
            self.workers.members.iter_mut().for_each(|member| member.worker.check());
            self.servers.iter_mut().for_each(ShardServer::check);
            self.repair(Instant::now(), random);
            match random.random_range(0..8) {
                0..4 => self.fail_server(random, end),
                4..7 => {
                    let Self { etcd, figures, .. } = self;
                    etcd.iter_mut().for_each(|members| members.fail(random, end, figures));
                }
                _ => self.replace_worker(random),
            }
        }
        self.repair(Instant::now() + TEST_TIMEOUT, random);
    }

    /// Ends the faults whose time is over.
    fn repair(&mut self, now: Instant, random: &mut SmallRng) {
        let Self { servers, etcd, cluster, figures, .. } = self;
        etcd.iter_mut().for_each(|members| members.repair(now));
        servers.iter_mut().for_each(|server| server.repair(cluster, now, random, figures));
    }

    fn fail_server(&mut self, random: &mut SmallRng, end: Instant) {
        let faulty = self.servers.iter().filter(|server| server.has_fault()).count();
        let server = &mut self.servers[random.random_range(0..SERVERS)];
        if faulty < FAULTY_MAX && !server.has_fault() {
            server.fail(random, end, &mut self.figures);
        }
    }

    fn replace_worker(&mut self, random: &mut SmallRng) {
        self.workers.kill(random.random_range(0..WORKERS));
        self.figures.clients_killed += 1;
        self.start_worker();
    }

    /// Connects another client, and waits until it reaches all shards.
    fn client(&self) -> Client {
        let builder = Client::builder().server(&self.seeds());
        let client = builder.connect_timeout(TEST_TIMEOUT).connect().unwrap();
        for shard in 0..SERVERS as u16 {
            wait_until(&format!("shard {shard} is served"), TEST_TIMEOUT, || {
                client.admin().shard(shard).statistics().is_ok()
            });
        }
        client
    }

    /// Stops all workers, reads every key, and checks the recorded history.
    fn check(&mut self) -> Figures {
        // Their last operations need the servers.
        drop(self.client());
        self.workers.stop();
        std::mem::take(&mut self.workers.members).into_iter().for_each(|it| it.worker.wait());
        self.read_all();
        self.servers.iter_mut().for_each(|server| server.process.kill());
        self.servers.iter_mut().for_each(|server| server.process.start_again());
        self.read_all();
        // After a client's death, a server executes chains that have left until their deadlines.
        // When a device executes the last one is not known.
        let is_over_shm = is_over_shm() && !self.plan.has_partitions;
        let late_ns = if is_over_shm { 0 } else { LATENESS_MAX_NS };
        let recorded = self.workers.recorded(device().is_none().then_some(late_ns));
        let history = &recorded.history;
        self.figures.operations = history.len() as u64;
        self.figures.unknown = recorded.count(Ended::Unknown);
        self.figures.failed = recorded.count(Ended::Failed);
        self.figures.full = recorded.full;
        self.figures.broken = self.broken();
        let of_workers = || history.iter().filter(|record| !self.workers.is_reader(record.process));
        self.figures.longest_pause = longest_pause(of_workers());
        self.figures.longest_call = longest_call(of_workers());
        let started = Instant::now();
        if let Err(violation) = farside_linearizability::check(history) {
            println!("VIOLATION: {violation}\nThe history is in {}", keep(history).display());
            self.figures.violations = 1;
        }
        self.figures.checking = started.elapsed();
        println!("{}", self.figures);
        self.figures
    }

    /// A new client reads all keys. Then no server may have another client, and all regions must be
    /// intact.
    fn read_all(&mut self) {
        let client = self.client();
        self.figures.inserted += self.workers.read_all(&client);
        for shard in 0..SERVERS as u16 {
            wait_until("dead clients are noticed", TEST_TIMEOUT, || {
                client.admin().shard(shard).statistics().is_ok_and(|found| found.clients == 1)
            });
        }
        // A server that has just started may have an older map, which is all that the command asks
        // for.
        wait_until("all regions are verified", TEST_TIMEOUT, || {
            let verified = self.servers[0].process.cli(&["verify"]);
            assert!(matches!(verified.code, Some(0 | 3)), "{verified:?}");
            verified.code == Some(0)
        });
        for server in &self.servers {
            let log = server.process.log();
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

impl Drop for Run {
    /// Prints the servers' logs if the test has failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.servers.iter().for_each(|server| println!("{}", server.process.log()));
        }
    }
}

/// The figures of one run, or the sums over several.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    operations: u64,
    /// Operations without a known result.
    unknown: u64,
    /// Operations that failed and had no effect.
    failed: u64,
    /// Sessions that stopped because their file was full.
    full: u64,
    /// Connections that broke before, within and after a chain.
    broken: [u64; 3],
    /// New keys that were read at the end.
    inserted: u64,
    clients_killed: u64,
    servers_killed: u64,
    /// Servers that were told to stop.
    servers_stopped: u64,
    servers_frozen: u64,
    /// Servers that were frozen for longer than they trust themselves.
    frozen_for_long: u64,
    /// Restarts at another address.
    moved: u64,
    /// Servers that were cut off from clients, from etcd, and from both.
    partitions: [u64; 3],
    etcd_killed: u64,
    etcd_frozen: u64,
    leaders_moved: u64,
    /// The longest time between two successful operations on a key.
    longest_pause: Duration,
    /// The time of the longest call with a known result. A call may be a batch.
    longest_call: Duration,
    violations: u64,
    /// The time that the check of the history took.
    checking: Duration,
}

impl Figures {
    fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.unknown += other.unknown;
        self.failed += other.failed;
        self.full += other.full;
        self.broken.iter_mut().zip(other.broken).for_each(|(sum, more)| *sum += more);
        self.inserted += other.inserted;
        self.clients_killed += other.clients_killed;
        self.servers_killed += other.servers_killed;
        self.servers_stopped += other.servers_stopped;
        self.servers_frozen += other.servers_frozen;
        self.frozen_for_long += other.frozen_for_long;
        self.moved += other.moved;
        self.partitions.iter_mut().zip(other.partitions).for_each(|(sum, more)| *sum += more);
        self.etcd_killed += other.etcd_killed;
        self.etcd_frozen += other.etcd_frozen;
        self.leaders_moved += other.leaders_moved;
        self.longest_pause = self.longest_pause.max(other.longest_pause);
        self.longest_call = self.longest_call.max(other.longest_call);
        self.violations += other.violations;
        self.checking += other.checking;
    }

    /// Whether servers and clients have had each of their faults.
    fn has_kills_and_freezes(&self) -> bool {
        let counts =
            [self.clients_killed, self.servers_killed, self.servers_stopped, self.servers_frozen];
        !counts.contains(&0)
    }

    /// Whether each fault of a soak has happened.
    fn has_all_kinds(&self, has_networks: bool) -> bool {
        let of_etcd = [self.etcd_killed, self.etcd_frozen, self.leaders_moved];
        self.has_kills_and_freezes()
            && self.frozen_for_long > 0
            && !of_etcd.contains(&0)
            && (!has_networks || !self.partitions.contains(&0))
    }
}

/// Returns the longest time between two successful operations on a key.
fn longest_pause<'r>(records: impl Iterator<Item = &'r Record>) -> Duration {
    let mut ends: HashMap<&str, Vec<u64>> = HashMap::new();
    for record in records.filter(|it| matches!(it.result, Ended::Done | Ended::Refused)) {
        ends.entry(&record.key).or_default().extend(record.returned);
    }
    let pauses = ends.values_mut().filter_map(|ends| {
        ends.sort_unstable();
        ends.windows(2).map(|pair| pair[1] - pair[0]).max()
    });
    Duration::from_nanos(pauses.max().unwrap_or(0))
}

/// Returns the time of the longest call with a known result.
fn longest_call<'r>(records: impl Iterator<Item = &'r Record>) -> Duration {
    let known = records.filter(|record| record.result != Ended::Unknown);
    let times = known.filter_map(|it| it.returned.map(|returned| returned - it.invoke));
    Duration::from_nanos(times.max().unwrap_or(0))
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [from_clients, from_etcd, from_both] = self.partitions;
        let [before, within, after] = self.broken;
        write!(
            f,
            "{} operations ({} unknown, {} failed; {} sessions full), connections broken {before} \
             times before a chain, {within} within one, {after} after one, {} new keys, {} clients \
             killed, {} servers killed, {} stopped, {} frozen ({} for over 5 s), {} moved to \
             another address, {} cut off from clients, {} from etcd, {} from both, {} members of \
             etcd killed, {} frozen, {} changes of the leader, longest pause of a key {:.2?}, \
             longest call {:.2?}",
            self.operations,
            self.unknown,
            self.failed,
            self.full,
            self.inserted,
            self.clients_killed,
            self.servers_killed,
            self.servers_stopped,
            self.servers_frozen,
            self.frozen_for_long,
            self.moved,
            from_clients,
            from_etcd,
            from_both,
            self.etcd_killed,
            self.etcd_frozen,
            self.leaders_moved,
            self.longest_pause,
            self.longest_call,
        )?;
        let rate = self.operations as f64 / self.checking.as_secs_f64();
        write!(f, ", {} violations; {rate:.0} operations checked a second", self.violations)
    }
}
