//! A lane of the simulated fabric: its chain, and how far that has come.

use farside_fabric::{Buffer, ChainError, Counters, Nanos, RegionIndex, Verb};

/// What a lane is in the middle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    /// A chain is under way.
    Posted,
    /// Until this time.
    Waiting(Nanos),
    /// Over, and the session does not know it yet.
    Complete,
}

/// One lane's chain.
pub(super) struct Lane {
    pub(super) phase: Phase,
    /// Where the chain goes.
    pub(super) region: RegionIndex,
    /// What was posted, and what is executed: the same, unless the fabric lies.
    pub(super) asked: Vec<Verb>,
    pub(super) chain: Vec<Verb>,
    /// The verb that is executing.
    pub(super) at: usize,
    /// Which of its words still have to be accessed, in groups that are accessed at once: bits that
    /// count from `skipped`.
    pub(super) units: Vec<u64>,
    /// So many of its words before them were accessed already.
    pub(super) skipped: usize,
    /// The only group is one that no process notices.
    pub(super) is_unnoticed: bool,
    /// Those that it makes no difference when they are accessed, and whether these are all.
    pub(super) unnoticed: u64,
    pub(super) all_unnoticed: bool,
    pub(super) posted: Nanos,
    /// It may still be in its queue, as far as a mutant goes by that.
    pub(super) is_queued: bool,
    pub(super) deadline: Nanos,
    pub(super) found: u64,
    pub(super) result: Result<u64, ChainError>,
    /// A hash of what the chain brought so far, whatever the order.
    pub(super) progress: u64,
    pub(super) buffers: [Vec<u64>; Buffer::COUNT],
    pub(super) counters: Counters,
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Idle,
            region: RegionIndex::FIRST,
            asked: Vec::with_capacity(4),
            chain: Vec::with_capacity(4),
            at: 0,
            units: Vec::with_capacity(4),
            skipped: 0,
            is_unnoticed: false,
            unnoticed: 0,
            all_unnoticed: false,
            posted: 0,
            is_queued: false,
            deadline: 0,
            found: 0,
            result: Ok(0),
            progress: 0,
            buffers: std::array::from_fn(|_| vec![0; 32]),
            counters: Counters::default(),
        }
    }

    /// Whether its chain changes anything.
    pub(super) fn changes(&self) -> bool {
        self.chain.iter().any(|verb| !matches!(verb, Verb::Read { .. }))
    }

    /// What the client is told of a chain that was cut off, or that it is not told the end of.
    /// `fenced`: a server that fences refuses a chain that it cuts before any atomic verb, and says
    /// so.
    pub(super) fn fate(&self, fenced: bool) -> ChainError {
        let is_atomic = |verb: &Verb| matches!(verb, Verb::CompareSwap { .. });
        let done = self.chain.iter().take(self.at).any(is_atomic);
        if !self.changes() || fenced && !done { ChainError::Fenced } else { ChainError::Unknown }
    }
}

/// Where a verb accesses the region and how much, in whole words.
pub(super) fn extent(verb: &Verb) -> (u64, u64) {
    match *verb {
        Verb::Read { remote, bytes, .. } | Verb::Write { remote, bytes, .. } => {
            (remote, u64::from(bytes))
        }
        Verb::WriteU32 { remote, .. }
        | Verb::WriteWord { remote, .. }
        | Verb::CompareSwap { remote, .. } => (remote, 8),
    }
}
