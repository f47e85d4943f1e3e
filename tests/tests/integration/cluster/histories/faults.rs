//! The faults of servers and of members of etcd, each of which ends after a random time.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farside_tests::ServerProcess;
use farside_tests::cluster::TestCluster;
use farside_tests::etcd_process::Etcd;
use farside_tests::network::{Network, Traffic};
use rand::RngExt;
use rand::rngs::SmallRng;
use rustix::process::Signal;

use super::Figures;

/// Clients trust a server for longer than this.
const SHORT_MS: std::ops::Range<u64> = 10..180;
const MEDIUM_MS: std::ops::Range<u64> = 200..1500;
/// A server that was stopped for so long first reads the records.
const LONG_MS: std::ops::Range<u64> = 5_200..6_500;
/// One in this many freezes and partitions is long, if there is time.
const PER_LONG: u32 = 10;

/// Returns the length of a fault, which may be long until this time.
fn length(random: &mut SmallRng, end: Instant) -> Duration {
    let has_time = end > Instant::now() + Duration::from_millis(LONG_MS.end);
    let range = match random.random_range(0..PER_LONG) {
        0 if has_time => LONG_MS,
        1..4 => SHORT_MS,
        _ => MEDIUM_MS,
    };
    Duration::from_millis(random.random_range(range))
}

/// What is wrong with a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ServerFault {
    Killed,
    /// It was told to stop.
    Stopped,
    Frozen,
    CutOff,
}

/// A server with a region file.
pub(super) struct ShardServer {
    pub(super) process: ServerProcess,
    file: PathBuf,
    /// Declared after the process, which is therefore killed first.
    network: Option<Network>,
    /// Where the server finds the records.
    uri: String,
    /// Clients that know no other server find it there.
    keeps_its_address: bool,
    fault: Option<(ServerFault, Instant)>,
}

impl ShardServer {
    pub(super) fn start(
        cluster: &TestCluster,
        number: usize,
        network: Option<Network>,
        etcd: Option<&EtcdMembers>,
    ) -> Self {
        let file = cluster.folder().join(format!("region{number}"));
        let host = network.as_ref().map(Network::records_host);
        let uri = match (host, etcd) {
            (Some(host), Some(members)) => members.etcd.uri(&host),
            _ => cluster.uri(),
        };
        let process = start(cluster, network.as_ref(), &uri, &file);
        Self { process, file, network, uri, keeps_its_address: number == 0, fault: None }
    }

    pub(super) fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    /// Checks that a server without a fault has not ended.
    pub(super) fn check(&mut self) {
        let is_running =
            !matches!(self.fault, Some((ServerFault::Killed | ServerFault::Stopped, _)));
        if is_running && self.process.has_exited() {
            panic!("a server has ended: {}", self.process.log());
        }
    }

    /// Begins a fault that lasts at most until `end`, except for a moment.
    pub(super) fn fail(&mut self, random: &mut SmallRng, end: Instant, figures: &mut Figures) {
        let mut lasts = length(random, end);
        let fault = match random.random_range(0..10) {
            0..3 => ServerFault::Killed,
            3 => ServerFault::Stopped,
            4.. if self.network.is_some() && random.random_range(0..3) > 0 => ServerFault::CutOff,
            _ => ServerFault::Frozen,
        };
        match fault {
            ServerFault::Killed => {
                self.process.kill();
                figures.servers_killed += 1;
                lasts = Duration::from_millis(random.random_range(0..MEDIUM_MS.end));
            }
            ServerFault::Stopped => {
                self.process.signal(Signal::TERM);
                figures.servers_stopped += 1;
                lasts = Duration::from_millis(random.random_range(0..MEDIUM_MS.end));
            }
            ServerFault::Frozen => {
                self.process.pause();
                figures.servers_frozen += 1;
                figures.frozen_for_long += u64::from(lasts.as_millis() as u64 >= LONG_MS.start);
            }
            ServerFault::CutOff => {
                let kind = random.random_range(0..3);
                figures.partitions[kind] += 1;
                let network = self.network.as_ref().unwrap();
                // Those of clients, those of the records, or all.
                let lost = [&Traffic::ALL[..1], &Traffic::ALL[1..], &Traffic::ALL][kind];
                lost.iter().for_each(|traffic| network.lose_packets_of(*traffic));
            }
        }
        self.fault = Some((fault, Instant::now() + lasts));
    }

    /// Waits until a server that was told to stop has ended, and checks the end.
    fn check_end(&mut self, was_told: bool) {
        let (status, log) = (self.process.wait(), self.process.log());
        // The signal may come before the process can handle it, or before it has begun to serve.
        let is_early = status.signal().is_some() || log.contains("was told to stop before");
        assert!(!was_told || status.success() || is_early, "{status}: {log}");
        assert!(!log.contains("panicked"), "{log}");
    }

    /// Ends the fault if its time is over.
    pub(super) fn repair(
        &mut self,
        cluster: &TestCluster,
        now: Instant,
        random: &mut SmallRng,
        figures: &mut Figures,
    ) {
        let Some((fault, _)) = self.fault.take_if(|(_, until)| *until <= now) else { return };
        match fault {
            ServerFault::Stopped | ServerFault::Killed => {
                self.check_end(fault == ServerFault::Stopped);
                if self.keeps_its_address || random.random_range(0..4) == 0 {
                    self.process.start_again();
                } else {
                    let network = self.network.as_ref();
                    self.process = start(cluster, network, &self.uri, &self.file);
                    figures.moved += 1;
                }
            }
            ServerFault::Frozen => self.process.signal(Signal::CONT),
            ServerFault::CutOff => self.network.as_ref().unwrap().plug_in(),
        }
    }
}

fn start(
    cluster: &TestCluster,
    network: Option<&Network>,
    uri: &str,
    file: &Path,
) -> ServerProcess {
    match network {
        Some(network) => cluster.start_behind(network, uri, file),
        None => cluster.start_with_file(file),
    }
}

/// The members of etcd, and until when each is out of order.
pub(super) struct EtcdMembers {
    pub(super) etcd: Etcd,
    /// Whether the member was killed rather than frozen, and until when.
    faults: [Option<(bool, Instant)>; 3],
}

impl EtcdMembers {
    pub(super) fn new(etcd: Etcd) -> Self {
        Self { etcd, faults: [None; 3] }
    }

    /// Begins a fault, unless two members are out of order. Mostly a majority is left.
    pub(super) fn fail(&mut self, random: &mut SmallRng, end: Instant, figures: &mut Figures) {
        let failed = self.faults.iter().flatten().count();
        if failed > 1 || failed == 1 && random.random_range(0..4) > 0 {
            return;
        }
        let leader = if failed == 0 { self.etcd.leader() } else { None };
        let any = random.random_range(0..3);
        if random.random_range(0..3) == 0 && failed == 0 {
            figures.leaders_moved += u64::from(self.etcd.move_leader(any));
            return;
        }
        // Each second time it is the leader that fails.
        let member = leader.filter(|_| random.random()).unwrap_or(any);
        if self.faults[member].is_some() {
            return;
        }
        let until = Instant::now() + length(random, end);
        let is_killed = random.random();
        if is_killed {
            self.etcd.kill(member);
            figures.etcd_killed += 1;
        } else {
            self.etcd.freeze(member);
            figures.etcd_frozen += 1;
        }
        self.faults[member] = Some((is_killed, until));
    }

    /// Ends the faults whose time is over.
    pub(super) fn repair(&mut self, now: Instant) {
        for member in 0..self.faults.len() {
            match self.faults[member].take_if(|(_, until)| *until <= now) {
                Some((true, _)) => self.etcd.restart(member),
                Some((false, _)) => self.etcd.thaw(member),
                None => {}
            }
        }
    }
}
