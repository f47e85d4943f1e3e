//! A run: a cluster of three servers, worker processes that record their operations, and the faults
//! of all.

use std::time::{Duration, Instant};

use farside::Client;
use farside_cluster::random_id;
use farside_fabric::tcp::{LATENESS_MAX_NS, TlsFiles};
use farside_linearizability::Ended;
use farside_tests::cluster::TestCluster;
use farside_tests::etcd_process::Etcd;
use farside_tests::faults::Fault;
use farside_tests::network::Network;
use farside_tests::{TEST_TIMEOUT, Worker, device, is_over_shm, scaled, wait_until};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::faults::{EtcdMembers, ShardServer};
use super::figures::{Figures, longest_call, longest_pause};
use crate::histories::ENOUGH_TIMEOUT;
use crate::histories::workers::{Workers, keep};

const SERVERS: usize = 3;
const WORKERS: usize = 2;
const ARGUMENTS: &str = "--memory 128MiB --grace-ms 20";
/// A run continues until it has made more operations than this.
pub(super) const OPERATIONS_MIN: u64 = 3_000;
/// Limit on the servers that are out of order at once.
const FAULTY_MAX: usize = 2;
/// The time between two faults, in milliseconds, of a short run and of one with etcd.
const INTERVAL_MS: [std::ops::Range<u64>; 2] = [20..300, 50..700];

/// The events of a run. Servers and clients are always killed, and servers frozen.
#[derive(Clone, Copy, Default)]
pub(super) struct Plan {
    /// The records are in an etcd whose members fail, and not in a folder.
    pub(super) has_etcd: bool,
    /// Each server is behind a network of its own, which fails.
    pub(super) has_partitions: bool,
    /// The mode of workers that have many operations in flight, and whose connections break.
    pub(super) lanes: Option<&'static str>,
}

/// Servers, their workers, and the operations of these.
pub(super) struct Run {
    plan: Plan,
    workers: Workers,
    servers: Vec<ShardServer>,
    cluster: TestCluster,
    etcd: Option<EtcdMembers>,
    figures: Figures,
}

impl Run {
    pub(super) fn start(plan: Plan) -> Self {
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
    pub(super) fn continue_for(&mut self, duration: Duration, random: &mut SmallRng) {
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
    pub(super) fn check(&mut self) -> Figures {
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
