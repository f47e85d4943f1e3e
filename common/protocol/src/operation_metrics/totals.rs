//! The counts of several sessions together.

use std::ops::AddAssign;

use farside_fabric::Counters;

use super::{Latencies, OperationKind, RetryReason};

/// The operations of one kind.
#[derive(Clone, Debug, Default)]
pub struct KindTotals {
    /// Those that found the key, or made their change.
    pub positive: u64,
    /// Those that did not find the key, or whose condition did not hold.
    pub negative: u64,
    /// Those that failed.
    pub errors: u64,
    /// How long those took that did not fail.
    pub latencies: Latencies,
}

/// The counts of several sessions.
#[derive(Clone, Debug, Default)]
pub struct OperationTotals {
    /// By [`OperationKind`].
    pub kinds: [KindTotals; OperationKind::ALL.len()],
    /// By [`RetryReason`].
    pub retries: [u64; RetryReason::ALL.len()],
    /// What verbs transferred, without doorbells.
    pub traffic: Counters,
}

impl AddAssign<&Self> for OperationTotals {
    fn add_assign(&mut self, other: &Self) {
        for (own, other) in self.kinds.iter_mut().zip(&other.kinds) {
            own.positive += other.positive;
            own.negative += other.negative;
            own.errors += other.errors;
            own.latencies += &other.latencies;
        }
        for (own, other) in self.retries.iter_mut().zip(other.retries) {
            *own += other;
        }
        self.traffic += other.traffic;
    }
}
