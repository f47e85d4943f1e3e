//! The connection of a client, from the settings in keyword arguments, and its idle sessions.
//!
//! A call takes an idle session, or opens one if there is none. So there are as many sessions as
//! calls are under way at once, in any number of threads, and some idle ones. The lock is only held
//! while the thread has the GIL, and never across a wait. So no thread waits for it, and a fork,
//! which needs the GIL too, never copies it locked.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use farside::{Client, RdmaOptions, ReadValue, Result, Role, Session, TlsFiles};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::Seconds;
use crate::fork::ProcessLocal;
use crate::{errors, interrupts};

/// The most memory for values that an idle session keeps, in bytes.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The most idle sessions that a client keeps.
const IDLE_MAX: usize = 64;

/// A session, and memory for the value that it reads.
pub(crate) struct Worker {
    pub(crate) session: Session,
    pub(crate) value: Vec<u8>,
}

#[derive(Default)]
struct Pool {
    /// `None` once the client is closed.
    client: Option<Client>,
    // Boxed, because a session is large to move.
    #[expect(clippy::vec_box, reason = "a session is large to move")]
    idle: Vec<Box<Worker>>,
}

/// The state of an open or closed client.
pub(crate) struct State(ProcessLocal<Mutex<Pool>>);

impl State {
    pub(crate) fn new(client: Client) -> Self {
        Self(ProcessLocal::new(Mutex::new(Pool { client: Some(client), idle: Vec::new() })))
    }

    #[inline]
    fn lock(&self) -> PyResult<MutexGuard<'_, Pool>> {
        Ok(self.0.get()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the library's client.
    pub(crate) fn client(&self, py: Python<'_>) -> PyResult<Client> {
        // The lock ends before Python code runs.
        let client = self.lock()?.client.clone();
        client.ok_or_else(|| errors::closed(py))
    }

    /// Whether this process is a fork of the one that made the client.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.0.get().is_err()
    }

    pub(crate) fn is_closed(&self) -> PyResult<bool> {
        Ok(self.lock()?.client.is_none())
    }

    /// Closes the client. Calls that are under way in other threads go on.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        let pool = std::mem::take(&mut *self.lock()?);
        py.detach(|| drop(pool));
        Ok(())
    }

    /// GETs a value if that takes about a microsecond and never waits, and passes it to `take`. The
    /// thread keeps the GIL. A release costs as much as the GET itself, and another thread that
    /// takes the GIL may compute for 5 ms. `take` must not run Python code, because the pool is
    /// locked.
    #[inline]
    pub(crate) fn get_at_once<T>(
        &self,
        key: &[u8],
        take: impl FnOnce(ReadValue, &[u8]) -> T,
    ) -> PyResult<Option<T>> {
        let mut pool = self.lock()?;
        let Some(worker) = pool.idle.last_mut() else { return Ok(None) };
        let Worker { session, value } = &mut **worker;
        let read = session.get_without_waiting(key, value);
        Ok(read.map(|read| take(read, value)))
    }

    /// As [`State::get_at_once`], for several keys. `take` gets each key, and its value if that was
    /// read.
    #[inline]
    pub(crate) fn get_many_at_once<'k>(
        &self,
        keys: &[&'k [u8]],
        mut take: impl FnMut(&'k [u8], Option<&[u8]>),
    ) -> PyResult<()> {
        let mut pool = self.lock()?;
        let mut worker = pool.idle.last_mut();
        for key in keys {
            let read = worker.as_mut().and_then(|worker| {
                let Worker { session, value } = &mut ***worker;
                session.get_without_waiting(key, value).map(|_| &value[..])
            });
            take(key, read);
        }
        Ok(())
    }

    /// Runs an operation without the GIL.
    #[inline]
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&mut Session) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.run_then(py, |worker| operation(&mut worker.session), |result, _| Ok(result))
    }

    /// Runs an operation without the GIL. Passes its result to `take`, with the GIL.
    #[inline]
    pub(crate) fn run_then<T: Send, U>(
        &self,
        py: Python<'_>,
        operation: impl FnOnce(&mut Worker) -> Result<T> + Send,
        take: impl FnOnce(T, &[u8]) -> PyResult<U>,
    ) -> PyResult<U> {
        let mut worker = self.worker(py)?;
        let result = interrupts::operate(py, || operation(&mut worker));
        let result = result.and_then(|result| take(result, &worker.value));
        self.put_back(py, worker)?;
        result
    }

    #[inline]
    fn worker(&self, py: Python<'_>) -> PyResult<Box<Worker>> {
        let mut pool = self.lock()?;
        if let Some(worker) = pool.idle.pop() {
            return Ok(worker);
        }
        drop(pool);
        Ok(Box::new(Worker { session: self.session(py)?, value: Vec::new() }))
    }

    /// Opens a session.
    #[cold]
    pub(crate) fn session(&self, py: Python<'_>) -> PyResult<Session> {
        let client = self.client(py)?;
        interrupts::operate(py, || client.session())
    }

    #[inline]
    fn put_back(&self, py: Python<'_>, mut worker: Box<Worker>) -> PyResult<()> {
        if worker.value.capacity() > KEPT_BYTES_MAX {
            worker.value = Vec::new();
        }
        let mut pool = self.lock()?;
        if pool.client.is_some() && pool.idle.len() < IDLE_MAX {
            pool.idle.push(worker);
        } else {
            drop(pool);
            py.detach(|| drop(worker));
        }
        Ok(())
    }
}

/// The variable of the environment with the server's address, as for `kv-cli`.
const SERVER_VARIABLE: &str = "FARSIDE_SERVER";

/// Connects, without the GIL.
pub(crate) fn connect(
    py: Python<'_>,
    server: Option<String>,
    settings: Option<&Bound<'_, PyDict>>,
) -> PyResult<Client> {
    let of_environment = || std::env::var(SERVER_VARIABLE).ok().filter(|server| !server.is_empty());
    let server = server.or_else(of_environment).ok_or_else(|| errors::no_address(py))?;
    let (mut rdma, mut tls) = (RdmaOptions::default(), TlsFiles::default());
    let mut builder = Client::builder().server(&server);
    for (name, value) in settings.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        let name = name.cast::<PyString>()?.to_str()?;
        match name {
            "role" => builder = builder.role(role(&value.extract::<String>()?)?),
            "secret" => builder = builder.secret(&value.extract::<String>()?),
            "cache_bytes" => builder = builder.cache_bytes(value.extract()?),
            "pipeline_depth" => builder = builder.pipeline_depth(value.extract()?),
            "connect_timeout" => {
                builder = builder.connect_timeout(value.extract::<Seconds>()?.0);
            }
            "metrics" => builder = builder.metrics(value.extract()?),
            "tls_ca" => tls.ca = Some(value.extract::<PathBuf>()?),
            "tls_certificate" => tls.certificate = Some(value.extract::<PathBuf>()?),
            "tls_key" => tls.key = Some(value.extract::<PathBuf>()?),
            "rdma_retry_count" => rdma.retry_count = value.extract()?,
            "rdma_ack_timeout" => rdma.ack_timeout = value.extract()?,
            "rdma_spin" => rdma.spin = value.extract::<Seconds>()?.0,
            _ => return Err(PyTypeError::new_err(format!("a client has no setting {name}"))),
        }
    }
    let builder = builder.rdma(rdma).tls(tls);
    interrupts::detach(py, errors::of_setup, || builder.connect())
}

fn role(name: &str) -> PyResult<Role> {
    match name {
        "reader" => Ok(Role::Reader),
        "writer" => Ok(Role::Writer),
        _ => Err(PyValueError::new_err(format!("role {name:?}: write \"reader\" or \"writer\""))),
    }
}
