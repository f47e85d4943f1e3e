//! The figures of runs over a cluster, printed in one line.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use farside_linearizability::{Ended, Record};

/// The figures of one run, or the sums over several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    pub(super) operations: u64,
    /// Operations without a known result.
    pub(super) unknown: u64,
    /// Operations that failed and had no effect.
    pub(super) failed: u64,
    /// Sessions that stopped because their file was full.
    pub(super) full: u64,
    /// Connections that broke before, within and after a chain.
    pub(super) broken: [u64; 3],
    /// New keys that were read at the end.
    pub(super) inserted: u64,
    pub(super) clients_killed: u64,
    pub(super) servers_killed: u64,
    /// Servers that were told to stop.
    pub(super) servers_stopped: u64,
    pub(super) servers_frozen: u64,
    /// Servers that were frozen for longer than they trust themselves.
    pub(super) frozen_for_long: u64,
    /// Restarts at another address.
    pub(super) moved: u64,
    /// Servers that were cut off from clients, from etcd, and from both.
    pub(super) partitions: [u64; 3],
    pub(super) etcd_killed: u64,
    pub(super) etcd_frozen: u64,
    pub(super) leaders_moved: u64,
    /// The longest time between two successful operations on a key.
    pub(super) longest_pause: Duration,
    /// The time of the longest call with a known result. A call may be a batch.
    pub(super) longest_call: Duration,
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
    pub(super) fn has_kills_and_freezes(&self) -> bool {
        let counts =
            [self.clients_killed, self.servers_killed, self.servers_stopped, self.servers_frozen];
        !counts.contains(&0)
    }

    /// Whether each fault of a soak has happened.
    pub(super) fn has_all_kinds(&self, has_networks: bool) -> bool {
        let of_etcd = [self.etcd_killed, self.etcd_frozen, self.leaders_moved];
        self.has_kills_and_freezes()
            && self.frozen_for_long > 0
            && !of_etcd.contains(&0)
            && (!has_networks || !self.partitions.contains(&0))
    }
}

/// Returns the longest time between two successful operations on a key.
pub(super) fn longest_pause<'r>(records: impl Iterator<Item = &'r Record>) -> Duration {
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
pub(super) fn longest_call<'r>(records: impl Iterator<Item = &'r Record>) -> Duration {
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
