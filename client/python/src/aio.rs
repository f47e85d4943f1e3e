//! The native part of `farside.aio`: operations as futures of an asyncio loop.
//!
//! An operation is a future of the library's `AsyncClient`. It is polled when it is submitted, and
//! mostly completes there on shared memory. Otherwise the loop's thread keeps it, with a future of
//! the loop. A wake notes the operation's number and writes an eventfd. The loop's reader of this
//! eventfd calls `drain`, which polls the operations that were woken. So the module has no thread.

use std::future::Future;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use farside::{AsyncClient, Error, OperationError, Outcome, Store, Value, Version};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use pyo3::{IntoPyObjectExt, intern};
use rustix::event::{EventfdFlags, eventfd};

use crate::arguments::{self, Condition, KeptSource, Keys, Lifetime, Seconds};
use crate::errors::{self, PyOutcome, PyValue};
use crate::fork::ProcessLocal;
use crate::interrupts;

/// What an operation returns to Python.
enum Reply {
    Done,
    Flag(bool),
    Integer(i64),
    Length(usize),
    Version(Option<u64>),
    Bytes(Option<Value>),
    Versioned(Option<Value>),
    Outcome(Outcome),
}

impl Reply {
    fn into_object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Done => Ok(py.None()),
            Self::Flag(flag) => flag.into_py_any(py),
            Self::Integer(number) => number.into_py_any(py),
            Self::Length(bytes) => bytes.into_py_any(py),
            Self::Version(version) => version.into_py_any(py),
            Self::Bytes(value) => value.map(|value| PyBytes::new(py, &value.data)).into_py_any(py),
            Self::Versioned(value) => value.map(|value| PyValue::of(py, &value)).into_py_any(py),
            Self::Outcome(outcome) => PyOutcome::of(py, outcome).into_py_any(py),
        }
    }
}

type Operation = Pin<Box<dyn Future<Output = farside::Result<Reply>> + Send>>;

fn convert(py: Python<'_>, result: farside::Result<Reply>) -> PyResult<Py<PyAny>> {
    result.map_err(|error| errors::of_operation(py, &error))?.into_object(py)
}

/// The numbers of the operations to poll, and the eventfd that tells the loop of them.
struct Wakeups {
    ready: Mutex<Vec<usize>>,
    /// Whether the eventfd was written since the last drain.
    is_signalled: AtomicBool,
    eventfd: OwnedFd,
}

impl Wakeups {
    fn signal(&self, number: usize) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(number);
        if !self.is_signalled.swap(true, Ordering::AcqRel) {
            // It fails only if the counter is full, and then the loop wakes anyway.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Returns the numbers, and has the next signal write the eventfd again.
    fn take(&self) -> Vec<usize> {
        // It fails if nothing was written.
        let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
        // Before the numbers are taken: a number that comes later finds the flag cleared.
        self.is_signalled.store(false, Ordering::Release);
        std::mem::take(&mut *self.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Wakes one operation.
struct OperationWaker {
    number: usize,
    wakeups: Arc<Wakeups>,
}

impl Wake for OperationWaker {
    fn wake(self: Arc<Self>) {
        self.wakeups.signal(self.number);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wakeups.signal(self.number);
    }
}

/// Operations whose results are one list.
struct Group {
    /// The loop's future.
    waiter: Option<Py<PyAny>>,
    results: Vec<Option<Py<PyAny>>>,
    left: usize,
    error: Option<PyErr>,
}

/// What awaits an operation.
enum Waiter {
    /// A future of the loop.
    Future(Py<PyAny>),
    /// A place in a group.
    Member(Arc<Mutex<Group>>, usize),
}

struct Kept {
    operation: Operation,
    waiter: Waiter,
    waker: Waker,
}

/// The operations that were not complete when they were submitted, by their numbers.
#[derive(Default)]
struct Table {
    slots: Vec<Option<Kept>>,
    free: Vec<usize>,
}

impl Table {
    fn reserve(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }
}

struct Inner {
    client: Mutex<Option<AsyncClient>>,
    wakeups: Arc<Wakeups>,
    // Locked neither while an operation is polled nor while Python code runs.
    table: Mutex<Table>,
}

impl Inner {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls an operation for the first time. Returns its result, or its number with what to keep.
    fn start(&self, mut operation: Operation) -> Result<farside::Result<Reply>, Started> {
        let number = self.table().reserve();
        let waker = Arc::new(OperationWaker { number, wakeups: self.wakeups.clone() }).into();
        match operation.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => {
                self.table().free.push(number);
                Ok(result)
            }
            Poll::Pending => Err(Started { number, operation, waker }),
        }
    }

    fn keep(&self, Started { number, operation, waker }: Started, waiter: Waiter) {
        self.table().slots[number] = Some(Kept { operation, waiter, waker });
    }
}

/// An operation that is under way.
struct Started {
    number: usize,
    operation: Operation,
    waker: Waker,
}

/// The operations of one asyncio loop. `create_future` makes a future of the loop.
///
/// Each method returns the result, or a future of the loop.
#[pyclass(frozen, module = "farside._farside")]
pub(crate) struct AsyncEngine {
    inner: ProcessLocal<Inner>,
    create_future: Py<PyAny>,
}

/// Gives a future of the loop its result, unless it was cancelled.
fn resolve(py: Python<'_>, waiter: &Py<PyAny>, result: PyResult<Py<PyAny>>) -> PyResult<()> {
    let waiter = waiter.bind(py);
    if waiter.call_method0(intern!(py, "done"))?.is_truthy()? {
        return Ok(());
    }
    match result {
        Ok(result) => waiter.call_method1(intern!(py, "set_result"), (result,)),
        Err(error) => waiter.call_method1(intern!(py, "set_exception"), (error.into_value(py),)),
    }?;
    Ok(())
}

impl Waiter {
    fn resolve(self, py: Python<'_>, result: PyResult<Py<PyAny>>) -> PyResult<()> {
        let (group, place) = match self {
            Self::Future(waiter) => return resolve(py, &waiter, result),
            Self::Member(group, place) => (group, place),
        };
        let mut locked = group.lock().unwrap_or_else(PoisonError::into_inner);
        locked.note(place, result);
        if locked.left > 0 {
            return Ok(());
        }
        let Some(waiter) = locked.waiter.take() else { return Ok(()) };
        let (results, error) = (std::mem::take(&mut locked.results), locked.error.take());
        drop(locked);
        resolve(py, &waiter, error.map_or_else(|| list(py, results), Err))
    }
}

impl Group {
    fn note(&mut self, place: usize, result: PyResult<Py<PyAny>>) {
        self.left -= 1;
        match result {
            Ok(result) => self.results[place] = Some(result),
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }
}

fn list(py: Python<'_>, results: Vec<Option<Py<PyAny>>>) -> PyResult<Py<PyAny>> {
    PyList::new(py, results)?.into_py_any(py)
}

impl AsyncEngine {
    fn client(&self, py: Python<'_>) -> PyResult<AsyncClient> {
        let inner = self.inner.get()?;
        // The lock ends before Python code runs.
        let client = inner.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        client.ok_or_else(|| errors::closed(py))
    }

    /// Starts an operation.
    fn submit<F>(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(AsyncClient) -> F,
    ) -> PyResult<Py<PyAny>>
    where
        F: Future<Output = farside::Result<Reply>> + Send + 'static,
    {
        let inner = self.inner.get()?;
        match inner.start(Box::pin(operation(self.client(py)?))) {
            Ok(result) => convert(py, result),
            Err(started) => {
                let waiter = self.create_future.call0(py)?;
                inner.keep(started, Waiter::Future(waiter.clone_ref(py)));
                Ok(waiter)
            }
        }
    }

    /// Starts several operations, whose results are one list.
    fn submit_all(&self, py: Python<'_>, operations: Vec<Operation>) -> PyResult<Py<PyAny>> {
        let inner = self.inner.get()?;
        let left = operations.len();
        let results = operations.iter().map(|_| None).collect();
        let mut group = Group { waiter: None, results, left, error: None };
        let mut started = Vec::new();
        for (place, operation) in operations.into_iter().enumerate() {
            match inner.start(operation) {
                Ok(result) => group.note(place, convert(py, result)),
                Err(operation) => started.push((place, operation)),
            }
        }
        if started.is_empty() {
            return group.error.map_or_else(|| list(py, group.results), Err);
        }
        let waiter = self.create_future.call0(py)?;
        group.waiter = Some(waiter.clone_ref(py));
        let group = Arc::new(Mutex::new(group));
        for (place, operation) in started {
            inner.keep(operation, Waiter::Member(group.clone(), place));
        }
        Ok(waiter)
    }
}

#[pymethods]
impl AsyncEngine {
    #[new]
    fn new(
        py: Python<'_>,
        client: &Bound<'_, crate::client::Client>,
        create_future: Py<PyAny>,
    ) -> PyResult<Self> {
        let client = client.get().state().client(py)?;
        let client = interrupts::operate(py, || client.async_client())?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let eventfd = eventfd.map_err(std::io::Error::from)?;
        let (ready, is_signalled) = (Mutex::default(), AtomicBool::new(false));
        let wakeups = Arc::new(Wakeups { ready, is_signalled, eventfd });
        let inner = Inner { client: Mutex::new(Some(client)), wakeups, table: Mutex::default() };
        Ok(Self { inner: ProcessLocal::new(inner), create_future })
    }

    /// Returns the number of the eventfd, which is readable while operations are to be polled.
    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.inner.get()?.wakeups.eventfd.as_raw_fd())
    }

    /// Polls the operations that were woken, in the loop's thread. Resolves all that are complete,
    /// also if one fails.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get()?;
        let mut resolved = Ok(());
        for number in inner.wakeups.take() {
            let kept = inner.table().slots.get_mut(number).and_then(Option::take);
            let Some(mut kept) = kept else { continue };
            let mut context = Context::from_waker(&kept.waker);
            let poll = AssertUnwindSafe(|| kept.operation.as_mut().poll(&mut context));
            // After a panic the task gets an error, and the other operations go on. This one may
            // have taken effect.
            let unknown = || Err(Error::Operation(OperationError::Indeterminate));
            match catch_unwind(poll).unwrap_or_else(|_| Poll::Ready(unknown())) {
                Poll::Pending => inner.table().slots[number] = Some(kept),
                Poll::Ready(result) => {
                    inner.table().free.push(number);
                    resolved = resolved.and(kept.waiter.resolve(py, convert(py, result)));
                }
            }
        }
        resolved
    }

    /// Ends all operations. Those under way take effect or not.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get()?;
        let client = inner.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(client));
        let slots = {
            let mut table = inner.table();
            table.free.clear();
            std::mem::take(&mut table.slots)
        };
        let mut resolved = Ok(());
        for kept in slots.into_iter().flatten() {
            resolved = resolved.and(kept.waiter.resolve(py, Err(errors::closed_under_way(py))));
        }
        resolved
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // It refers to the loop, whose reader refers to this.
        visit.call(&self.create_future)
    }
}

/// Returns a copy of a key: the operation outlives the call.
fn kept_key(key: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    arguments::key(key).map(<[u8]>::to_vec)
}

#[pymethods]
impl AsyncEngine {
    fn get(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.get(key).await.map(Reply::Bytes) })
    }

    fn get_versioned(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.get(key).await.map(Reply::Versioned) })
    }

    fn get_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (keys, client) = (Keys::new(keys)?, self.client(py)?);
        let operation = |key: &[u8]| -> Operation {
            let (client, key) = (client.clone(), key.to_vec());
            Box::pin(async move { client.get(key).await.map(Reply::Bytes) })
        };
        let operations = keys.bytes()?.into_iter().map(operation).collect();
        self.submit_all(py, operations)
    }

    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.exists(key).await.map(Reply::Flag) })
    }

    fn version(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move {
            let version = client.version(key).await?;
            Ok(Reply::Version(version.map(Version::to_u64)))
        })
    }

    #[pyo3(signature = (key, value, ttl=None, keep_ttl=false, pinned=false))]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        let store = Lifetime::new(ttl, keep_ttl, pinned)?.of(Store::always());
        self.submit(py, |client| async move {
            client.store(key, value, store).await.map(|_| Reply::Done)
        })
    }

    #[pyo3(signature = (entries, ttl=None))]
    fn put_many(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let client = self.client(py)?;
        let store = Lifetime::new(ttl, false, false)?.of(Store::always());
        let operation = |[key, value]: [Bound<'_, PyAny>; 2]| -> PyResult<Operation> {
            let (client, key, value) = (client.clone(), kept_key(&key)?, KeptSource::new(&value)?);
            Ok(Box::pin(async move { client.store(key, value, store).await.map(|_| Reply::Done) }))
        };
        let operations = arguments::pairs(entries)?.into_iter().map(operation);
        self.submit_all(py, operations.collect::<PyResult<_>>()?)
    }

    #[pyo3(signature = (key, value, conditions, if_value, ttl, keep_ttl, pinned, returning))]
    #[expect(clippy::too_many_arguments, reason = "as the method in Python")]
    fn store(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        conditions: (bool, bool, Option<u64>),
        if_value: Option<&Bound<'_, PyAny>>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
        returning: bool,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        let expected = if_value.map(KeptSource::new).transpose()?;
        let (if_absent, if_present, if_version) = conditions;
        let condition = Condition::new(if_absent, if_present, expected.is_some(), if_version)?;
        let lifetime = Lifetime::new(ttl, keep_ttl, pinned)?;
        self.submit(py, move |client| async move {
            let store = condition.store(expected.as_ref().map(AsRef::as_ref));
            let store = lifetime.of(store);
            let store = if returning { store.returning() } else { store };
            client.store(key, value, store).await.map(Reply::Outcome)
        })
    }

    fn delete(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.delete(key).await.map(Reply::Flag) })
    }

    fn delete_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (keys, client) = (Keys::new(keys)?, self.client(py)?);
        let operation = |key: &[u8]| -> Operation {
            let (client, key) = (client.clone(), key.to_vec());
            Box::pin(async move { client.delete(key).await.map(Reply::Flag) })
        };
        let operations = keys.bytes()?.into_iter().map(operation).collect();
        self.submit_all(py, operations)
    }

    fn delete_if_version(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        version: u64,
    ) -> PyResult<Py<PyAny>> {
        let (key, version) = (kept_key(key)?, Version::from_u64(version));
        self.submit(py, move |client| async move {
            client.delete_if_version(key, version).await.map(Reply::Flag)
        })
    }

    fn take(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.take(key).await.map(Reply::Bytes) })
    }

    fn increment(&self, py: Python<'_>, key: &Bound<'_, PyAny>, delta: i64) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, move |client| async move {
            client.increment(key, delta).await.map(Reply::Integer)
        })
    }

    fn append(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        self.submit(py, |client| async move { client.append(key, value).await.map(Reply::Length) })
    }

    fn touch(&self, py: Python<'_>, key: &Bound<'_, PyAny>, ttl: Seconds) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(
            py,
            move |client| async move { client.touch(key, ttl.0).await.map(Reply::Flag) },
        )
    }
}
