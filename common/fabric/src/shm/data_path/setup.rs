//! The regions of a fabric.

use std::sync::Arc;

use super::{Executor, Lane, Lease, Region, ShmFabric};
use crate::clock::Clock;
use crate::lane_chain::NO_VERB;
use crate::waits::SleepingLanes;
use crate::{CHAIN_VERBS_MAX, ChainError, Counters, Lent, RegionIndex};

impl Executor {
    /// The offset of the client's lease, by which clients of a region differ; 0 without a lease.
    pub(crate) fn client(&self) -> u64 {
        self.lease.map_or(0, |lease| lease.offset)
    }
}

impl ShmFabric {
    /// A fabric with `lanes` lanes, for one region. The server's own fabric has no lease, and is
    /// never fenced.
    pub fn new(region: Arc<Region>, lease: Option<Lease>, lanes: u16) -> Self {
        let lane = || Lane {
            chain: [NO_VERB; CHAIN_VERBS_MAX],
            verbs: 0,
            deadline: 0,
            buffers: Default::default(),
            sums: [0; CHAIN_VERBS_MAX],
            counters: Counters::default(),
        };
        let (lane_count, clock) = (usize::from(lanes), Clock::new());
        Self {
            executors: vec![Executor { region, lease, clock: clock.clone() }],
            clock,
            lanes: (0..lanes).map(|_| lane()).collect(),
            posted: Vec::with_capacity(lane_count),
            posted_bytes: 0,
            polled: 0,
            executed: 0,
            waiting: SleepingLanes::with_capacity(lane_count),
            wakeup: None,
            lent: Lent::NONE,
            doorbells: 0,
        }
    }

    /// Adds a region, in a mapping of its own. With `replaces` it takes the place of that region,
    /// whose mapping is dropped. Chains that were posted for the former region and are not executed
    /// yet fail with [`ChainError::Fenced`].
    pub fn add_region(
        &mut self,
        region: Arc<Region>,
        lease: Option<Lease>,
        replaces: Option<RegionIndex>,
    ) -> RegionIndex {
        let executor = Executor { region, lease, clock: self.clock.clone() };
        let Some(replaced) = replaces else {
            self.executors.push(executor);
            return RegionIndex(self.executors.len() as u16 - 1);
        };
        self.executors[replaced.index()] = executor;
        for at in self.executed..self.posted.len() {
            let posted = &mut self.posted[at];
            if posted.region == replaced {
                posted.result = Err(ChainError::Fenced);
                self.posted_bytes -= posted.payload_bytes;
                // It becomes the last of the executed chains.
                self.posted[self.executed..=at].rotate_right(1);
                self.executed += 1;
            }
        }
        replaced
    }
}
