//! The figures of runs, printed in one line.

use std::fmt;
use std::time::Duration;

use farside_tests::faults::Fault;

/// The commands of `kv-cli` that run beside the workers.
pub(super) const CHORES: [&[&str]; 3] =
    [&["gc"], &["compact"], &["snapshot", "--force", "snapshot"]];

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
