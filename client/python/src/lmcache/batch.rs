//! Batches of the connector, and their parts.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside::{Error, Outcome, Session};

use super::Completion;
use crate::arguments::{KeptSource, Target};
use crate::stores::{Lifetime, put_many};

/// The operation of a part, and its memory in Python's objects.
pub(super) enum PartMemory {
    Get(Vec<Target>),
    Set(Vec<KeptSource>),
    /// Of so many keys.
    Exists(usize),
    /// Of so many keys.
    Delete(usize),
}

impl PartMemory {
    fn len(&self) -> usize {
        match self {
            Self::Get(targets) => targets.len(),
            Self::Set(sources) => sources.len(),
            Self::Exists(keys) | Self::Delete(keys) => *keys,
        }
    }
}

/// A batch, which its parts complete.
pub(super) struct Batch {
    id: u64,
    /// Whether the completion has the keys' results.
    has_results: bool,
    state: Mutex<BatchState>,
}

struct BatchState {
    parts_left: usize,
    results: Vec<bool>,
    error: Option<String>,
    /// Dropped by the thread that drains, which has the GIL.
    used: Vec<PartMemory>,
}

impl Batch {
    fn state(&self) -> MutexGuard<'_, BatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The completion of a batch whose parts are done.
    pub(super) fn completion(&self) -> Completion {
        let mut state = self.state();
        let (results, error) = (mem::take(&mut state.results), state.error.take());
        let used = mem::take(&mut state.used);
        drop(state);
        drop(used);
        let results = self.has_results.then_some(results);
        (self.id, error.is_none(), error.unwrap_or_default(), results)
    }
}

/// Some of a batch's keys.
pub(super) struct Part {
    batch: Arc<Batch>,
    /// The index of its first key in the batch.
    start: usize,
    keys: Vec<Vec<u8>>,
    memory: PartMemory,
}

/// Makes a batch of these parts.
pub(super) fn split(id: u64, memory: Vec<PartMemory>, keys: Vec<Vec<u8>>) -> Vec<Part> {
    let has_results = !matches!(memory.first(), Some(PartMemory::Set(_)));
    let (parts_left, results) = (memory.len(), vec![false; keys.len()]);
    let state = Mutex::new(BatchState { parts_left, results, error: None, used: Vec::new() });
    let batch = Arc::new(Batch { id, has_results, state });
    let mut keys = keys.into_iter();
    let mut start = 0;
    let parts = memory.into_iter().map(|memory| {
        let keys: Vec<_> = keys.by_ref().take(memory.len()).collect();
        let part = Part { batch: batch.clone(), start, keys, memory };
        start += part.keys.len();
        part
    });
    parts.collect()
}

impl Part {
    /// Executes the part. Returns its batch if that is complete now.
    /// Sets `has_panicked` if the session cannot be used any more.
    pub(super) fn run(
        mut self,
        session: &mut Session,
        lifetime: Lifetime,
        has_panicked: &mut bool,
    ) -> Option<Arc<Batch>> {
        let (keys, memory) = (&self.keys, &mut self.memory);
        let run = AssertUnwindSafe(|| match memory {
            PartMemory::Get(targets) => get(session, keys, targets),
            PartMemory::Set(sources) => {
                let sources = sources.iter().map(AsRef::as_ref);
                let entries = keys.iter().map(Vec::as_slice).zip(sources).collect();
                (Vec::new(), put_many(session, entries, lifetime).err())
            }
            PartMemory::Exists(_) => {
                let batch = keys.iter().fold(session.batch(), |batch, key| batch.version(key));
                flags(batch.run(), keys, |outcome| outcome.version.is_some())
            }
            PartMemory::Delete(_) => {
                let batch = keys.iter().fold(session.batch(), |batch, key| batch.delete(key));
                flags(batch.run(), keys, |_| true)
            }
        });
        let (results, error) = match catch_unwind(run) {
            Ok((results, error)) => (results, error.map(|error| error.to_string())),
            Err(_) => {
                *has_panicked = true;
                (Vec::new(), Some("a defect of farside: see stderr".to_owned()))
            }
        };
        self.finish(&results, error)
    }

    /// Has the part fail.
    pub(super) fn fail(self, error: &Error) -> Option<Arc<Batch>> {
        self.finish(&[], Some(error.to_string()))
    }

    fn finish(self, results: &[bool], error: Option<String>) -> Option<Arc<Batch>> {
        let Self { batch, start, memory, .. } = self;
        let mut state = batch.state();
        state.results[start..start + results.len()].copy_from_slice(results);
        state.error = state.error.take().or(error);
        state.used.push(memory);
        state.parts_left -= 1;
        let is_complete = state.parts_left == 0;
        drop(state);
        is_complete.then_some(batch)
    }
}

/// The results of keys, and the first error.
type Results = (Vec<bool>, Option<Error>);

fn flags(
    outcomes: farside::Result<Vec<farside::Result<Outcome>>>,
    keys: &[Vec<u8>],
    flag: impl Fn(&Outcome) -> bool,
) -> Results {
    let mut error = None;
    let flags = match outcomes {
        Ok(outcomes) => outcomes.into_iter().map(|outcome| match outcome {
            Ok(outcome) => flag(&outcome),
            Err(failure) => {
                error.get_or_insert(failure);
                false
            }
        }),
        Err(failure) => return (vec![false; keys.len()], Some(failure)),
    };
    (flags.collect(), error)
}

/// Reads values into their targets. If one fails, reads each by itself, so that the others count.
fn get(session: &mut Session, keys: &[Vec<u8>], targets: &mut [Target]) -> Results {
    let lengths: Vec<_> = targets.iter_mut().map(|target| target.bytes_mut().len()).collect();
    let entries = keys.iter().zip(targets.iter_mut().map(Target::bytes_mut));
    match session.get_many_into(entries) {
        Ok(read) => {
            let is_whole = |(read, length): (Option<farside::ReadValue>, _)| {
                read.is_some_and(|read| read.bytes == length)
            };
            return (read.into_iter().zip(lengths).map(is_whole).collect(), None);
        }
        // A key or its value.
        Err(Error::Operation(_)) => {}
        // The server, for all keys.
        Err(error) => return (Vec::new(), Some(error)),
    }
    let mut error = None;
    let results = keys.iter().zip(targets).map(|(key, target)| {
        let target = target.bytes_mut();
        let length = target.len();
        match session.get_into(key, target) {
            Ok(read) => read.is_some_and(|read| read.bytes == length),
            Err(failure) => {
                error.get_or_insert(failure);
                false
            }
        }
    });
    (results.collect(), error)
}
