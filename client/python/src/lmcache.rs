//! The native connector of `farside.lmcache`.
//!
//! LMCache submits batches and polls an eventfd. Worker threads, each with a session, execute the
//! batches straight from and to LMCache's memory. A batch of much memory is split between the
//! workers. The thread that drains completions drops a batch's Python objects, because that needs
//! the GIL.

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use farside::{Client, Error, Outcome, Session};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustix::event::{EventfdFlags, eventfd};

use crate::arguments::{KeptSource, Keys, Lifetime, Seconds, Target, check_apart, put_many};
use crate::fork::ProcessLocal;
use crate::{errors, state};

/// A part of a batch has at least so much memory, unless it is the only one. Less is not worth a
/// second thread's wakeup.
const PART_BYTES_MIN: usize = 1 << 20;
/// Limit on the worker threads.
const WORKERS_MAX: usize = 64;

/// A completion, as LMCache takes it: number, success, error, and results of the keys.
type Completion = (u64, bool, String, Option<Vec<bool>>);

#[derive(Default)]
struct Jobs {
    parts: VecDeque<Part>,
    is_closed: bool,
}

/// What the connector and its workers share.
struct Shared {
    client: Client,
    /// The lifetime of stored values.
    lifetime: Lifetime,
    jobs: Mutex<Jobs>,
    has_jobs: Condvar,
    completed: Mutex<Vec<Arc<Batch>>>,
    /// Written for each completed batch.
    eventfd: OwnedFd,
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn completed(&self) -> MutexGuard<'_, Vec<Arc<Batch>>> {
        self.completed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a part of a batch; `None` once the connector is closed.
    fn next_part(&self) -> Option<Part> {
        let mut jobs = self.jobs();
        loop {
            if jobs.is_closed {
                return None;
            }
            if let Some(part) = jobs.parts.pop_front() {
                return Some(part);
            }
            jobs = self.has_jobs.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Executes parts until the connector is closed.
    fn work(&self) {
        let mut session: Option<Session> = None;
        while let Some(part) = self.next_part() {
            let opened = match session.take() {
                Some(session) => Ok(session),
                None => self.client.session(),
            };
            let batch = match opened {
                Ok(mut opened) => {
                    let mut has_panicked = false;
                    let batch = part.run(&mut opened, self.lifetime, &mut has_panicked);
                    session = (!has_panicked).then_some(opened);
                    batch
                }
                Err(error) => part.fail(&error),
            };
            if let Some(batch) = batch {
                self.completed().push(batch);
                // It fails only if the counter is full, and then the eventfd is readable.
                let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
            }
        }
    }
}

struct Inner {
    shared: Arc<Shared>,
    /// How many workers there were at first.
    num_workers: usize,
    workers: Mutex<Vec<JoinHandle<()>>>,
    batches: Mutex<u64>,
}

impl Inner {
    /// Ends the workers, each after its present part. Returns the parts that are left, and the
    /// completed batches that were not drained. Call it without the GIL.
    fn close(&self) -> (VecDeque<Part>, Vec<Arc<Batch>>) {
        let left = {
            let mut jobs = self.shared.jobs();
            jobs.is_closed = true;
            std::mem::take(&mut jobs.parts)
        };
        self.shared.has_jobs.notify_all();
        // Locked until they have ended: a second call waits, too.
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        for worker in workers.drain(..) {
            // A worker that panicked has ended, too.
            let _ = worker.join();
        }
        (left, std::mem::take(&mut *self.shared.completed()))
    }
}

impl Drop for Inner {
    /// Waits for the workers, which use memory of the caller. It has no GIL: see `ProcessLocal`.
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// A native connector of LMCache, for its L2 adapter `native_plugin`.
///
/// `server` and the settings are those of `farside.Client`. `num_workers` threads execute the
/// batches. With `ttl` stored values expire after so many seconds.
///
/// >>> import select
/// >>> connector = farside.lmcache.Connector(server)
/// >>> number = connector.submit_batch_set(["block"], [memoryview(b"hello")])
/// >>> ready = select.select([connector.event_fd()], [], [])
/// >>> connector.drain_completions()
/// [(1, True, '', None)]
/// >>> buffer = bytearray(5)
/// >>> number = connector.submit_batch_get(["block", "absent"], [buffer, bytearray(5)])
/// >>> ready = select.select([connector.event_fd()], [], [])
/// >>> connector.drain_completions(), buffer
/// ([(2, True, '', [True, False])], bytearray(b'hello'))
/// >>> connector.close()
#[pyclass(frozen, module = "farside.lmcache", name = "Connector", subclass)]
pub(crate) struct Connector(ProcessLocal<Inner>);

impl Connector {
    fn submit(&self, memory: Vec<PartMemory>, keys: Vec<Vec<u8>>) -> PyResult<u64> {
        let Inner { shared, batches, .. } = self.0.get()?;
        let id = {
            let mut batches = batches.lock().unwrap_or_else(PoisonError::into_inner);
            *batches += 1;
            *batches
        };
        let parts = split(id, memory, keys);
        let mut jobs = shared.jobs();
        if jobs.is_closed {
            // The lock ends before Python code runs.
            drop(jobs);
            return Err(Python::attach(errors::closed));
        }
        jobs.parts.extend(parts);
        drop(jobs);
        shared.has_jobs.notify_all();
        Ok(id)
    }

    /// Splits the memory of a batch between the workers.
    fn shares<T>(
        &self,
        mut items: Vec<T>,
        bytes: impl Fn(&mut T) -> usize,
        share: impl Fn(Vec<T>) -> PartMemory,
    ) -> PyResult<Vec<PartMemory>> {
        let workers = self.0.get()?.num_workers;
        let all: usize = items.iter_mut().map(&bytes).sum();
        let parts = (all / PART_BYTES_MIN).clamp(1, workers).min(items.len().max(1));
        let per_part = items.len().div_ceil(parts).max(1);
        let mut shares = Vec::with_capacity(parts);
        // An empty batch completes, too.
        while shares.is_empty() || !items.is_empty() {
            let rest = items.split_off(per_part.min(items.len()));
            shares.push(share(std::mem::replace(&mut items, rest)));
        }
        Ok(shares)
    }
}

/// Copies of several keys, of which there must be as many as buffers.
fn kept_keys(keys: &Bound<'_, PyAny>, buffers: Option<usize>) -> PyResult<Vec<Vec<u8>>> {
    let keys = Keys::new(keys)?;
    let keys: Vec<_> = keys.bytes()?.into_iter().map(<[u8]>::to_vec).collect();
    match buffers {
        Some(buffers) if buffers != keys.len() => {
            Err(PyValueError::new_err("pass as many buffers as keys"))
        }
        _ => Ok(keys),
    }
}

#[pymethods]
impl Connector {
    #[new]
    #[pyo3(signature = (server=None, num_workers=2, ttl=None, **settings))]
    fn new(
        py: Python<'_>,
        server: Option<String>,
        num_workers: usize,
        ttl: Option<Seconds>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        if !(1..=WORKERS_MAX).contains(&num_workers) {
            let text = format!("num_workers = {num_workers}: pass 1 to {WORKERS_MAX}");
            return Err(PyValueError::new_err(text));
        }
        if ttl.as_ref().is_some_and(|Seconds(ttl)| ttl.is_zero()) {
            return Err(PyValueError::new_err(
                "ttl = 0: pass a time, or None for values that stay",
            ));
        }
        let lifetime = Lifetime::new(ttl, false, false)?;
        let client = state::connect(py, server, settings)?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let eventfd = eventfd.map_err(std::io::Error::from)?;
        let (jobs, has_jobs, completed) = Default::default();
        let shared = Arc::new(Shared { client, lifetime, jobs, has_jobs, completed, eventfd });
        let start = |_| {
            let shared = shared.clone();
            let name = "farside-lmcache".to_owned();
            std::thread::Builder::new().name(name).spawn(move || shared.work())
        };
        let workers = (0..num_workers).map(start).collect::<Result<Vec<_>, _>>()?;
        let (workers, batches) = (Mutex::new(workers), Mutex::new(0));
        let inner = Inner { shared, num_workers, workers, batches };
        Ok(Self(ProcessLocal::new(inner)))
    }

    /// Returns the number of the eventfd, which is readable while there are completions.
    fn event_fd(&self) -> PyResult<RawFd> {
        Ok(self.0.get()?.shared.eventfd.as_raw_fd())
    }

    /// Reads the values of keys into buffers. Its results say which were found. A value is only
    /// found if it is as long as its buffer.
    #[pyo3(signature = (keys, memoryviews, /))]
    fn submit_batch_get(
        &self,
        keys: &Bound<'_, PyAny>,
        memoryviews: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let targets = memoryviews.try_iter()?.map(|target| Target::new(&target?));
        let targets = targets.collect::<PyResult<Vec<_>>>()?;
        check_apart(&targets)?;
        let keys = kept_keys(keys, Some(targets.len()))?;
        let bytes = |target: &mut Target| target.bytes_mut().len();
        self.submit(self.shares(targets, bytes, PartMemory::Get)?, keys)
    }

    /// Stores buffers as the values of keys.
    #[pyo3(signature = (keys, memoryviews, /))]
    fn submit_batch_set(
        &self,
        keys: &Bound<'_, PyAny>,
        memoryviews: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let sources = memoryviews.try_iter()?.map(|source| KeptSource::new(&source?));
        let sources = sources.collect::<PyResult<Vec<_>>>()?;
        let keys = kept_keys(keys, Some(sources.len()))?;
        let bytes = |source: &mut KeptSource| source.as_ref().len();
        self.submit(self.shares(sources, bytes, PartMemory::Set)?, keys)
    }

    /// Asks which keys are present.
    #[pyo3(signature = (keys, /))]
    fn submit_batch_exists(&self, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = kept_keys(keys, None)?;
        self.submit(vec![PartMemory::Exists(keys.len())], keys)
    }

    /// Removes keys. Its results say which are gone, also if they were absent before.
    #[pyo3(signature = (keys, /))]
    fn submit_batch_delete(&self, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = kept_keys(keys, None)?;
        self.submit(vec![PartMemory::Delete(keys.len())], keys)
    }

    /// Returns the completed batches: the number that `submit_batch_*` returned, whether it
    /// succeeded, its first error, and the results of its keys.
    fn drain_completions(&self) -> PyResult<Vec<Completion>> {
        let shared = &self.0.get()?.shared;
        // It fails if nothing was written. Read first: a batch that completes later writes again.
        let _ = rustix::io::read(&shared.eventfd, &mut [0; 8]);
        let completed = std::mem::take(&mut *shared.completed());
        Ok(completed.iter().map(|batch| batch.completion()).collect())
    }

    /// Ends the workers, each after its present part. Batches that are not complete never complete.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.0.get()?;
        let left = py.detach(|| inner.close());
        drop(left);
        Ok(())
    }
}

/// The operation of a part, and its memory in Python's objects.
enum PartMemory {
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
struct Batch {
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
    fn completion(&self) -> Completion {
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
struct Part {
    batch: Arc<Batch>,
    /// The index of its first key in the batch.
    start: usize,
    keys: Vec<Vec<u8>>,
    memory: PartMemory,
}

/// Makes a batch of these parts.
fn split(id: u64, memory: Vec<PartMemory>, keys: Vec<Vec<u8>>) -> Vec<Part> {
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
    fn run(
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
    fn fail(self, error: &Error) -> Option<Arc<Batch>> {
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
