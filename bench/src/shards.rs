//! Several servers as one [`Store`]: each record belongs to one of them, by its key.

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

/// What an operation came to; a value it found is in [`ShardPipelines::value`].
enum Came<E> {
    Value(Option<Version>),
    Stored,
    Applied(bool),
    Failed(E),
}

/// A pipeline to each server, in flight together.
pub struct ShardPipelines<P> {
    /// Lanes of the first come first.
    pipelines: Vec<P>,
    /// Whose turn it is to be asked what has finished.
    turn: usize,
    /// Of the operation taken last.
    value: Vec<u8>,
    counters: Counters,
}

impl<P: Pipelined> ShardPipelines<P> {
    fn new(pipelines: Vec<P>) -> Self {
        Self { pipelines, turn: 0, value: Vec::new(), counters: Counters::default() }
    }

    /// How many lanes there are before those of this pipeline.
    fn lanes_before(&self, at: usize) -> usize {
        self.pipelines[..at].iter().map(P::depth).sum()
    }

    /// One operation that has finished, and its lane. No more: the next to start may get the lane.
    fn take_one(&mut self) -> Option<(usize, Came<P::Error>)> {
        for _ in 0..self.pipelines.len() {
            let at = self.turn;
            self.turn = (at + 1) % self.pipelines.len();
            let before = self.lanes_before(at);
            if let Some(Completed { lane, result, counters }) = self.pipelines[at].poll() {
                self.counters = *counters;
                let came = match result {
                    Ok(Outcome::Value(found)) => {
                        self.value.clear();
                        self.value.extend_from_slice(found.map_or(&[], |(value, _)| value));
                        Came::Value(found.map(|(_, version)| version))
                    }
                    Ok(Outcome::Stored) => Came::Stored,
                    Ok(Outcome::Applied(applied)) => Came::Applied(applied),
                    Err(error) => Came::Failed(error),
                };
                return Some((before + lane, came));
            }
        }
        None
    }

    fn completed(&self, (lane, came): (usize, Came<P::Error>)) -> Completed<'_, P::Error> {
        let value = self.value.as_slice();
        let result = match came {
            Came::Value(version) => Ok(Outcome::Value(version.map(|version| (value, version)))),
            Came::Stored => Ok(Outcome::Stored),
            Came::Applied(applied) => Ok(Outcome::Applied(applied)),
            Came::Failed(error) => Err(error),
        };
        Completed { lane, result, counters: &self.counters }
    }
}

impl<P: Pipelined> Pipelined for ShardPipelines<P> {
    type Error = P::Error;

    fn start(&mut self, action: Action, key: &Key, value: &[u8]) -> Result<usize, PipelineFull> {
        let at = shard(key, self.pipelines.len());
        let before = self.lanes_before(at);
        self.pipelines[at].start(action, key, value).map(|lane| before + lane)
    }

    fn wait(&mut self) -> Option<Completed<'_, P::Error>> {
        while self.in_flight() > 0 {
            if let Some(taken) = self.take_one() {
                return Some(self.completed(taken));
            }
        }
        None
    }

    fn poll(&mut self) -> Option<Completed<'_, P::Error>> {
        let taken = self.take_one()?;
        Some(self.completed(taken))
    }

    fn in_flight(&self) -> usize {
        self.pipelines.iter().map(P::in_flight).sum()
    }

    fn depth(&self) -> usize {
        self.lanes_before(self.pipelines.len())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

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

    /// Every operation finishes at once; the lane freed last is the next one's.
    #[derive(Default)]
    struct AtOnce {
        free: Vec<usize>,
        finished: VecDeque<usize>,
        counters: Counters,
    }

    impl Pipelined for AtOnce {
        type Error = ();

        fn start(&mut self, _: Action, _: &Key, _: &[u8]) -> Result<usize, PipelineFull> {
            let lane = self.free.pop().ok_or(PipelineFull)?;
            self.finished.push_back(lane);
            Ok(lane)
        }

        fn wait(&mut self) -> Option<Completed<'_, ()>> {
            self.poll()
        }

        fn poll(&mut self) -> Option<Completed<'_, ()>> {
            let lane = self.finished.pop_front()?;
            self.free.push(lane);
            Some(Completed { lane, result: Ok(Outcome::Stored), counters: &self.counters })
        }

        fn in_flight(&self) -> usize {
            self.finished.len()
        }

        fn depth(&self) -> usize {
            self.free.len() + self.finished.len()
        }
    }

    #[test]
    fn a_lane_is_nobody_elses_until_its_operation_was_taken() {
        let pipeline = || AtOnce { free: vec![0, 1, 2], ..AtOnce::default() };
        let mut pipelines = ShardPipelines::new(vec![pipeline(), pipeline()]);
        let mut in_flight = HashSet::new();
        for record in 0..1000 {
            let key = keys::encode(record);
            let lane = loop {
                // One of the two may be full while the other is not.
                let started = pipelines.start(Action::Put, &key, &[]);
                let Err(PipelineFull) = started else { break started.unwrap() };
                assert!(in_flight.remove(&pipelines.wait().unwrap().lane));
            };
            assert!(in_flight.insert(lane), "lane {lane} has an operation nobody took");
            assert_eq!(pipelines.in_flight(), in_flight.len());
        }
        while let Some(Completed { lane, .. }) = pipelines.wait() {
            assert!(in_flight.remove(&lane));
        }
        assert!(in_flight.is_empty());
        assert_eq!(pipelines.depth(), 6);
    }
}
