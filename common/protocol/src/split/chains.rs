//! Batches of chains, each chain on a lane of its own.

use farside_fabric::{ChainError, Fabric, InFlight, LaneId, Nanos, Verb};

use super::SubtableSplitter;

/// A chain of up to three verbs.
#[derive(Clone, Copy)]
pub(super) struct Chain {
    verbs: [Verb; 3],
    count: usize,
}

impl Chain {
    pub(super) fn of(verbs: &[Verb]) -> Self {
        let mut chain = Self { verbs: [verbs[0]; 3], count: verbs.len() };
        chain.verbs[..verbs.len()].copy_from_slice(verbs);
        chain
    }
}

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Executes one chain on each lane, concurrently. Returns the words that their
    /// compare-and-swaps found, in order.
    pub(super) async fn execute_batch(&self, chains: &[Chain]) -> Result<Vec<u64>, ChainError> {
        let lanes = (0..self.lanes).map(LaneId);
        let post = |(lane, chain): (LaneId, &Chain)| {
            self.endpoint.chain(lane, self.region, &chain.verbs[..chain.count], Nanos::MAX)
        };
        let in_flight: Vec<InFlight<'_>> = lanes.zip(chains).map(post).collect();
        let mut found = Vec::with_capacity(in_flight.len());
        for chain in in_flight {
            found.push(chain.await);
        }
        found.into_iter().collect()
    }

    /// Executes any number of chains, in batches.
    pub(super) async fn execute_all(
        &self,
        chains: impl Iterator<Item = Chain>,
    ) -> Result<(), ChainError> {
        let chains: Vec<Chain> = chains.collect();
        for batch in chains.chunks(self.lanes.into()) {
            self.execute_batch(batch).await?;
        }
        Ok(())
    }
}
