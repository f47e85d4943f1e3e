//! Several servers as one [`Store`]: each record belongs to one of them, by its key.

use std::collections::VecDeque;

use farside::{CacheStatistics, Counters, Outcome, PipelineFull, Version};

use crate::keys::Key;
use crate::store::{Action, Change, Completed, Pipelined, Store};

/// 2^64 by the golden ratio: odd, and far from any pattern in keys.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which of so many servers a key belongs to: by its last digits, which differ most.
#[inline]
fn shard(key: &Key, count: usize) -> usize {
    let (words, _) = key.as_chunks();
    let scattered = u64::from_le_bytes(words[words.len() - 1]).wrapping_mul(SCATTER);
    ((u128::from(scattered) * count as u128) >> 64) as usize
}

/// A connection to each server.
pub struct Shards<S>(Vec<S>);

impl<S: Store> Shards<S> {
    /// Of one server or more.
    pub fn new(stores: Vec<S>) -> Self {
        Self(stores)
    }

    fn of(&mut self, key: &Key) -> &mut S {
        let at = shard(key, self.0.len());
        &mut self.0[at]
    }
}

impl<S: Store> Store for Shards<S> {
    type Error = S::Error;
    type Pipeline<'s>
        = ShardPipelines<S::Pipeline<'s>>
    where
        S: 's;

    fn get_into(&mut self, key: &Key, value: &mut Vec<u8>) -> Result<Option<Version>, S::Error> {
        self.of(key).get_into(key, value)
    }

    fn change(&mut self, change: Change, key: &Key, value: &[u8]) -> Result<bool, S::Error> {
        self.of(key).change(change, key, value)
    }

    fn pipeline(&mut self) -> Result<Self::Pipeline<'_>, S::Error> {
        let pipelines = self.0.iter_mut().map(S::pipeline).collect::<Result<_, _>>()?;
        Ok(ShardPipelines::new(pipelines))
    }

    fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        self.0.iter().for_each(|store| counters += store.counters());
        counters
    }

    fn cache_statistics(&self) -> CacheStatistics {
        let mut sum = CacheStatistics::default();
        for CacheStatistics { hits, misses } in self.0.iter().map(S::cache_statistics) {
            sum.hits += hits;
            sum.misses += misses;
        }
        sum
    }
}

/// What an operation came to; a value it found is in its lane.
enum Came<E> {
    Value(Option<Version>),
    Stored,
    Applied(bool),
    Failed(E),
}

/// A lane of one of the pipelines.
#[derive(Default)]
struct Lane {
    value: Vec<u8>,
    counters: Counters,
}

/// A pipeline to each server, in flight together.
pub struct ShardPipelines<P: Pipelined> {
    pipelines: Vec<P>,
    /// Those of the first pipeline come first.
    lanes: Vec<Lane>,
    finished: VecDeque<(usize, Came<P::Error>)>,
}

impl<P: Pipelined> ShardPipelines<P> {
    fn new(pipelines: Vec<P>) -> Self {
        let depth = pipelines.iter().map(P::depth).sum();
        let lanes = (0..depth).map(|_| Lane::default()).collect();
        Self { pipelines, lanes, finished: VecDeque::with_capacity(depth) }
    }

    /// Takes all that has finished.
    fn collect(&mut self) {
        let mut before = 0;
        for pipeline in &mut self.pipelines {
            while let Some(Completed { lane, result, counters }) = pipeline.poll() {
                let at = before + lane;
                let lane = &mut self.lanes[at];
                lane.counters = *counters;
                let came = match result {
                    Ok(Outcome::Value(found)) => {
                        lane.value.clear();
                        lane.value.extend_from_slice(found.map_or(&[], |(value, _)| value));
                        Came::Value(found.map(|(_, version)| version))
                    }
                    Ok(Outcome::Stored) => Came::Stored,
                    Ok(Outcome::Applied(applied)) => Came::Applied(applied),
                    Err(error) => Came::Failed(error),
                };
                self.finished.push_back((at, came));
            }
            before += pipeline.depth();
        }
    }

    fn take(&mut self) -> Option<Completed<'_, P::Error>> {
        let (lane, came) = self.finished.pop_front()?;
        let Lane { value, counters } = &self.lanes[lane];
        let result = match came {
            Came::Value(version) => {
                Ok(Outcome::Value(version.map(|version| (value.as_slice(), version))))
            }
            Came::Stored => Ok(Outcome::Stored),
            Came::Applied(applied) => Ok(Outcome::Applied(applied)),
            Came::Failed(error) => Err(error),
        };
        Some(Completed { lane, result, counters })
    }
}

impl<P: Pipelined> Pipelined for ShardPipelines<P> {
    type Error = P::Error;

    fn start(&mut self, action: Action, key: &Key, value: &[u8]) -> Result<usize, PipelineFull> {
        let at = shard(key, self.pipelines.len());
        let before: usize = self.pipelines[..at].iter().map(P::depth).sum();
        self.pipelines[at].start(action, key, value).map(|lane| before + lane)
    }

    fn wait(&mut self) -> Option<Completed<'_, P::Error>> {
        while self.finished.is_empty() && self.in_flight() > 0 {
            self.collect();
        }
        self.take()
    }

    fn poll(&mut self) -> Option<Completed<'_, P::Error>> {
        if self.finished.is_empty() {
            self.collect();
        }
        self.take()
    }

    fn in_flight(&self) -> usize {
        self.finished.len() + self.pipelines.iter().map(P::in_flight).sum::<usize>()
    }

    fn depth(&self) -> usize {
        self.lanes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys;

    #[test]
    fn records_are_spread_evenly() {
        for count in [1, 2, 3, 7] {
            let mut sums = vec![0u32; count];
            (0..10_000).for_each(|record| sums[shard(&keys::encode(record), count)] += 1);
            let fair = 10_000 / count as u32;
            assert!(sums.iter().all(|sum| sum.abs_diff(fair) < fair / 10), "{sums:?}");
        }
    }
}
