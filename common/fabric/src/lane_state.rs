//! What fabrics keep of a lane: the chain that a device or a server executes, and the time until
//! which the lane waits.

use crate::{Buffer, CHAIN_VERBS_MAX, Completion, LaneId, Nanos, RegionIndex, Verb, interrupt};

/// What an unused place of a chain holds.
pub(crate) const NO_VERB: Verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };

/// The stage of a lane's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The lane has no chain.
    Idle,
    /// The chain waits for the doorbell, or for room.
    Posted,
    /// The other party has the chain. Over verbs it may access the lane's buffers.
    InFlight,
    /// The connection broke with the chain in flight, which completes once it can take effect no
    /// more. Over TCP only.
    Lost,
}

/// The chain that a lane posted last.
pub(crate) struct LaneChain {
    pub(crate) region: RegionIndex,
    verbs: [Verb; CHAIN_VERBS_MAX],
    count: usize,
    pub(crate) payload_bytes: u64,
    /// [`Nanos::MAX`] if the chain changes nothing.
    pub(crate) deadline: Nanos,
    pub(crate) stage: Stage,
}

impl LaneChain {
    /// The state of a lane without a chain.
    pub(crate) const NONE: Self = Self {
        region: RegionIndex::FIRST,
        verbs: [NO_VERB; CHAIN_VERBS_MAX],
        count: 0,
        payload_bytes: 0,
        deadline: Nanos::MAX,
        stage: Stage::Idle,
    };

    /// Keeps a chain for the doorbell.
    #[inline]
    pub(crate) fn post(
        &mut self,
        region: RegionIndex,
        chain: &[Verb],
        payload_bytes: u64,
        deadline: Nanos,
    ) {
        (self.region, self.count, self.payload_bytes) = (region, chain.len(), payload_bytes);
        self.verbs[..chain.len()].copy_from_slice(chain);
        // Without a deadline the doorbell need not read the clock.
        let changes = chain.iter().any(|verb| verb.changes_region());
        self.deadline = if changes { deadline } else { Nanos::MAX };
        self.stage = Stage::Posted;
    }

    #[inline]
    pub(crate) fn verbs(&self) -> &[Verb] {
        &self.verbs[..self.count]
    }

    /// Whether a verb uses [`Buffer::Lent`].
    pub(crate) fn uses_lent(&self) -> bool {
        self.verbs().iter().any(|verb| verb.uses_lent())
    }

    /// Whether the chain must not be executed late.
    #[inline]
    pub(crate) fn has_deadline(&self) -> bool {
        self.deadline < Nanos::MAX
    }
}

/// The lanes that wait ([`Fabric::wait`](crate::Fabric::wait)), each with the time until which it
/// waits.
pub(crate) struct SleepingLanes(Vec<(Nanos, LaneId)>);

impl SleepingLanes {
    /// An empty set, with room for `lanes` lanes.
    pub(crate) fn with_capacity(lanes: usize) -> Self {
        Self(Vec::with_capacity(lanes))
    }

    pub(crate) fn add(&mut self, lane: LaneId, until: Nanos) {
        self.0.push((until, lane));
    }

    /// The earliest time for which a lane waits.
    pub(crate) fn first(&self) -> Option<Nanos> {
        self.0.iter().map(|(until, _)| *until).min()
    }

    /// The completion of a lane whose time has come, or of any if the caller has given up. Reads
    /// the clock only if a lane waits.
    #[inline]
    pub(crate) fn due(&mut self, now: impl FnOnce() -> Nanos) -> Option<Completion> {
        if self.0.is_empty() {
            return None;
        }
        let now = if interrupt::is_given_up() { Nanos::MAX } else { now() };
        let due = self.0.iter().position(|(until, _)| *until <= now)?;
        let (_, lane) = self.0.swap_remove(due);
        Some(Completion { lane, result: Ok(0) })
    }
}
