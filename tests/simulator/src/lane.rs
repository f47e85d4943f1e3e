//! A lane of the simulated fabric: its chain and the chain's progress.

use farside_fabric::{Buffer, ChainError, Counters, Nanos, RegionIndex, Verb};

/// The state of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Idle,
    /// A chain is under way.
    Posted,
    /// The lane waits until this time.
    Waiting(Nanos),
    /// The chain or the wait has ended, and `poll` has not returned it yet.
    Complete,
}

/// A lane and its chain.
pub(crate) struct Lane {
    pub(crate) phase: Phase,
    /// The region that the chain accesses.
    pub(crate) region: RegionIndex,
    /// The chain that the session posted, and the chain that is executed. They differ only if a
    /// mutant changed the chain.
    pub(crate) posted_chain: Vec<Verb>,
    pub(crate) chain: Vec<Verb>,
    /// The index of the current verb.
    pub(crate) verb_index: usize,
    /// The groups of the verb's words that are still to be accessed, each in one step. Bit 0 of a
    /// group is word `skipped`.
    pub(crate) units: Vec<u64>,
    /// The number of the verb's first words that were accessed before the groups were made.
    pub(crate) skipped: usize,
    /// Whether `units` has one group only, and no other process can notice its access.
    pub(crate) is_unnoticed: bool,
    /// The words whose access no other process can notice, and whether these are all words.
    pub(crate) unnoticed: u64,
    pub(crate) all_unnoticed: bool,
    pub(crate) posted_at: Nanos,
    /// A hash of the times at which the operation's chains were posted.
    pub(crate) posted_times: u64,
    /// How long the operations take that the chain stands for, before its first compare-and-swap.
    pub(crate) delay: Nanos,
    /// For `QueueUncounted`: the chain may still be in its queue.
    pub(crate) is_queued: bool,
    pub(crate) deadline: Nanos,
    pub(crate) found: u64,
    /// The session gets no completion of the chain, which is executed.
    pub(crate) is_cut: bool,
    pub(crate) result: Result<u64, ChainError>,
    /// A hash of the words that the chain has read so far. It does not depend on the order.
    pub(crate) progress: u64,
    pub(crate) buffers: [Vec<u64>; Buffer::COUNT],
    pub(crate) counters: Counters,
}

impl Lane {
    pub(crate) fn new() -> Self {
        Self {
            phase: Phase::Idle,
            region: RegionIndex::FIRST,
            posted_chain: Vec::with_capacity(4),
            chain: Vec::with_capacity(4),
            verb_index: 0,
            units: Vec::with_capacity(4),
            skipped: 0,
            is_unnoticed: false,
            unnoticed: 0,
            all_unnoticed: false,
            posted_at: 0,
            posted_times: 0,
            delay: 0,
            is_queued: false,
            deadline: 0,
            found: 0,
            is_cut: false,
            result: Ok(0),
            progress: 0,
            buffers: std::array::from_fn(|_| vec![0; 32]),
            counters: Counters::default(),
        }
    }

    /// Whether the lane's chain has a verb that writes.
    pub(crate) fn changes(&self) -> bool {
        self.chain.iter().any(|verb| read_target(verb).is_none())
    }

    /// Returns the error of a chain that was cut off, or whose completion was lost. `fenced`: the
    /// server has fenced the client, so that a chain cut before any atomic verb is known to be
    /// refused.
    pub(crate) fn fate(&self, fenced: bool) -> ChainError {
        let is_atomic = |verb: &Verb| matches!(verb, Verb::CompareSwap { .. });
        let done = self.chain.iter().take(self.verb_index).any(is_atomic);
        if !self.changes() || fenced && !done { ChainError::Fenced } else { ChainError::Unknown }
    }
}

/// Returns the buffer of a READ, and the number of the word there at which it begins.
pub(crate) fn read_target(verb: &Verb) -> Option<(Buffer, usize)> {
    match *verb {
        Verb::Read { into, .. } => Some((into, 0)),
        Verb::ReadPart { into, at, .. } => Some((into, at as usize / 8)),
        _ => None,
    }
}

/// Returns the buffer of a WRITE, and the offset there at which it begins, in bytes.
pub(crate) fn write_source(verb: &Verb) -> Option<(Buffer, usize)> {
    match *verb {
        Verb::Write { from, .. } => Some((from, 0)),
        Verb::WritePart { from, at, .. } => Some((from, at as usize)),
        _ => None,
    }
}

/// Returns the offset that a verb accesses and the number of bytes, in whole words.
pub(crate) fn extent(verb: &Verb) -> (u64, u64) {
    match *verb {
        Verb::Read { remote, bytes, .. }
        | Verb::Write { remote, bytes, .. }
        | Verb::ReadPart { remote, bytes, .. }
        | Verb::WritePart { remote, bytes, .. }
        | Verb::ReadSplit { remote, bytes, .. }
        | Verb::WriteSplit { remote, bytes, .. } => (remote, u64::from(bytes)),
        Verb::WriteU32 { remote, .. }
        | Verb::WriteWord { remote, .. }
        | Verb::CompareSwap { remote, .. } => (remote, 8),
    }
}
