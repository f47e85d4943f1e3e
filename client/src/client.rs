//! Connecting: [`Client`] and its builder.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside_common::attach::Target;
use farside_common::config::{ClientConfig, PIPELINE_DEPTH};
use farside_common::control::{Refusal, Request, Role, ServerStatistics, Token};
use farside_common::fabric::verbs::Options;

use crate::any_engine::AnyEngine;
use crate::connection::Connection;
use crate::engine::EngineOptions;
use crate::failure::Failure;
use crate::{Error, Result, Session};

/// A connection to a memory server: cheap to clone, shared by all threads of a process.
///
/// Operations go through a [`Session`], one per thread. When the server goes away, sessions
/// reconnect by themselves as soon as it is back.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

/// What all clones of a client, and its sessions, share.
pub(crate) struct Shared {
    target: Target,
    pub(crate) options: EngineOptions,
    #[cfg(feature = "around")]
    wrap: Option<crate::around::Wrap>,
    state: Mutex<State>,
    /// An attempt to reconnect has ended.
    attempted: Condvar,
}

struct State {
    connection: Arc<Connection>,
    /// A session is reconnecting, for all of them.
    is_connecting: bool,
    /// When reconnecting failed last, and whether the server refused.
    failed: Option<(Instant, Option<Refusal>)>,
}

/// What a region allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: usize,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
    /// The length of the region, in bytes.
    pub region_bytes: u64,
    /// How long an unlinked block stays untouched.
    pub grace: Duration,
}

impl Client {
    /// How to connect.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// A session, for one thread. It reads the directory of the index: a few round trips.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the server went away and did not come back,
    /// [`Error::Layout`] if the region is damaged.
    pub fn session(&self) -> Result<Session> {
        Session::open(self.shared.clone())
    }

    /// What the server knows about its region and its clients: one message each way.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the server does not answer.
    pub fn statistics(&self) -> Result<ServerStatistics> {
        let started = Instant::now();
        let connection = self.shared.connection()?;
        connection.control.statistics().ok_or_else(|| self.shared.unreachable(started.elapsed()))
    }
}

/// How often somebody who waits for a collection asks whether it has ended.
const COLLECT_POLL: Duration = Duration::from_millis(5);

impl Client {
    /// Has the server look for lost blocks, which dead clients held, and waits until it has; what
    /// it knows then. Everybody goes on meanwhile. Takes as long as two walks of the server's
    /// through the index, and as its slowest client takes to answer.
    ///
    /// # Errors
    /// [`Error::Denied`] for a reader, [`Error::Unreachable`] if the server does not answer.
    pub fn collect(&self) -> Result<ServerStatistics> {
        if self.shared.role() == Role::Reader {
            return Err(Error::Denied);
        }
        let started = Instant::now();
        let connection = self.shared.connection()?;
        let unreachable = || self.shared.unreachable(started.elapsed());
        let before = connection.control.collect().ok_or_else(unreachable)?;
        loop {
            let now = connection.control.statistics().ok_or_else(unreachable)?;
            if now.collections >= before.collections_next {
                return Ok(now);
            }
            std::thread::sleep(COLLECT_POLL);
        }
    }

    /// Tells the server how far a snapshot is that this program takes, in thousandths, 1000 when it
    /// is complete: for whoever looks at [`ServerStatistics`]. One message, which is not answered.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the server went away and did not come back.
    pub fn report_snapshot(&self, permille: u32) -> Result<()> {
        let request = Request::Snapshot { permille: permille.min(1000) };
        self.shared.connection()?.control.tell(request);
        Ok(())
    }
}

#[cfg(test)]
impl Client {
    /// An engine whose fabric is something around the real one.
    pub(crate) fn engine_over<F: farside_common::fabric::Fabric>(
        &self,
        around: impl FnOnce(farside_common::fabric::shm::ShmFabric) -> F,
    ) -> std::result::Result<
        crate::engine::Engine<F, crate::remote_depot::ControlDepot>,
        crate::failure::Failure,
    > {
        self.shared.connection()?.engine_over(self.shared.options, around)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves the state as it was.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn unreachable(&self, tried: Duration) -> Error {
        Error::Unreachable { server: self.target.address.to_string(), tried, source: None }
    }

    /// An engine for one session.
    pub(crate) fn engine(
        &self,
        connection: &Connection,
    ) -> std::result::Result<AnyEngine, Failure> {
        #[cfg(feature = "around")]
        if let Some(wrap) = &self.wrap {
            return connection.wrapped_engine(self.options, wrap);
        }
        connection.engine(self.options)
    }

    /// The error behind a failure; `None` if the connection is lost, and nothing happened. Where
    /// nobody knows what the last operation did, it is given up as well: without a goodbye the
    /// server looks for what it may have left, and sessions connect anew.
    pub(crate) fn failed(&self, connection: &Connection, failure: Failure) -> Option<Error> {
        let error = match failure {
            Failure::Error(error) => Some(*error),
            Failure::Disconnected => None,
            Failure::NoAnswer(waited) => Some(self.unreachable(Duration::from_nanos(waited))),
        };
        if matches!(error, None | Some(Error::Indeterminate)) {
            connection.control.give_up();
        }
        error
    }

    /// The error for what did not happen because its connection was lost.
    pub(crate) fn disconnected(&self) -> Error {
        Error::Disconnected { server: self.target.address.to_string() }
    }

    /// How long connecting, and reconnecting, may take.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.target.timeout
    }

    pub(crate) fn role(&self) -> Role {
        self.target.role
    }

    /// The connection, a new one if the last was lost. The first session that needs it connects;
    /// the others wait for it, and fail with it.
    ///
    /// Not under the lock: whoever failed and asks again would mostly have it before those who
    /// wait, and they would wait for one attempt after the other.
    pub(crate) fn connection(&self) -> Result<Arc<Connection>> {
        self.connection_by(|| Connection::establish(&self.target))
    }

    fn connection_by(
        &self,
        establish: impl FnOnce() -> Result<Connection>,
    ) -> Result<Arc<Connection>> {
        let asked_at = Instant::now();
        let mut state = self.lock();
        loop {
            if !state.connection.control.is_lost() {
                return Ok(state.connection.clone());
            }
            if let Some((at, refusal)) = state.failed
                && at > asked_at
            {
                let server = self.target.address.to_string();
                return Err(match refusal {
                    Some(source) => Error::Refused { server, source },
                    None => self.unreachable(asked_at.elapsed()),
                });
            }
            if !state.is_connecting {
                break;
            }
            state = self.attempted.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_connecting = true;
        drop(state);
        // Declared first, so it ends last, when what came of it is in the state.
        let _attempt = Attempt(self);
        let established = establish();
        let mut state = self.lock();
        match established {
            Ok(connection) => {
                tracing::info!(incarnation = connection.welcome.incarnation, "reconnected");
                state.connection = Arc::new(connection);
                Ok(state.connection.clone())
            }
            Err(error) => {
                let refusal = match &error {
                    Error::Refused { source, .. } => Some(*source),
                    _ => None,
                };
                state.failed = Some((Instant::now(), refusal));
                Err(error)
            }
        }
    }
}

/// An attempt to reconnect. Should it panic, others must not wait for it for ever.
struct Attempt<'a>(&'a Shared);

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.0.lock().is_connecting = false;
        self.0.attempted.notify_all();
    }
}

/// Collects how to connect; [`ClientBuilder::connect`] does it.
#[derive(Clone)]
#[must_use]
pub struct ClientBuilder {
    server: Option<String>,
    role: Role,
    token: Token,
    cache_bytes: usize,
    pipeline_depth: u16,
    connect_timeout: Duration,
    rdma: Options,
    #[cfg(feature = "around")]
    wrap: Option<crate::around::Wrap>,
}

/// The longest that connecting may take: no clock ends before.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

impl Default for ClientBuilder {
    fn default() -> Self {
        Self::from(&ClientConfig::default())
    }
}

impl From<&ClientConfig> for ClientBuilder {
    fn from(config: &ClientConfig) -> Self {
        Self {
            server: config.server.clone(),
            role: config.role,
            token: config.token(),
            cache_bytes: config.cache_bytes.0 as usize,
            pipeline_depth: config.pipeline_depth,
            connect_timeout: Duration::from_millis(config.connect_timeout_ms),
            rdma: config.rdma.options(),
            #[cfg(feature = "around")]
            wrap: None,
        }
    }
}

impl ClientBuilder {
    /// Takes everything from a configuration.
    pub fn config(self, config: &ClientConfig) -> Self {
        let taken = Self::from(config);
        Self { server: taken.server.clone().or(self.server), ..taken }
    }

    /// The server's address, for example `shm:///run/farside/kv.sock`.
    pub fn server(mut self, address: &str) -> Self {
        self.server = Some(address.to_owned());
        self
    }

    /// Reader or writer, which is the default. A reader gets memory it cannot write to.
    pub fn role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// The shared secret, for a server that wants one.
    pub fn secret(mut self, secret: &str) -> Self {
        self.token = Token::of(secret);
        self
    }

    /// The most memory that the client uses to remember where keys are, 16 bytes a key; 0 switches
    /// the location cache off, which all its sessions share. 64 MiB by default, provided by the
    /// system only as it is used.
    pub fn cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// How to use RDMA, for an `rdma://` address: timeouts, retries, how long to spin before a
    /// thread that waits sleeps.
    pub fn rdma(mut self, options: Options) -> Self {
        self.rdma = options;
        self
    }

    /// How many operations a session can have in flight: a number in [`PIPELINE_DEPTH`], 64 by
    /// default.
    pub fn pipeline_depth(mut self, depth: u16) -> Self {
        self.pipeline_depth = depth;
        self
    }

    /// How long connecting may take, and reconnecting when the server went away. 3 s by default, at
    /// most a day: more is taken for that.
    ///
    /// It is for connecting only. While the server is connected and does not answer, because it is
    /// stopped, say, most operations go on without it; one that needs memory from it waits for 5 s
    /// at most, whatever this is, and fails as [`Error::Unreachable`].
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// What is to be between the sessions and their fabric: for kv-bench and tests.
    #[cfg(feature = "around")]
    #[doc(hidden)]
    pub fn around(mut self, wrap: crate::around::Wrap) -> Self {
        self.wrap = Some(wrap);
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Error::PipelineDepth`] for a depth out of range, [`Error::Address`] without a server's
    /// address, [`Error::Unreachable`] when none answers there in time, [`Error::Refused`] with the
    /// server's reason, [`Error::Layout`] for a region that cannot be.
    pub fn connect(self) -> Result<Client> {
        let lanes = self.pipeline_depth;
        if !PIPELINE_DEPTH.contains(&lanes) {
            return Err(Error::PipelineDepth { depth: lanes });
        }
        let address = self.server.unwrap_or_default().parse()?;
        let (role, token) = (self.role, self.token);
        let timeout = self.connect_timeout.min(CONNECT_TIMEOUT_MAX);
        let target = Target { address, role, token, timeout, rdma: self.rdma };
        let connection = Arc::new(Connection::establish(&target)?);
        let options = EngineOptions { cache_bytes: self.cache_bytes, lanes };
        let state = State { connection, is_connecting: false, failed: None };
        let (state, attempted) = (Mutex::new(state), Condvar::new());
        let shared = Shared {
            target,
            options,
            #[cfg(feature = "around")]
            wrap: self.wrap,
            state,
            attempted,
        };
        Ok(Client { shared: Arc::new(shared) })
    }
}

#[cfg(test)]
mod tests;
