//! Connecting: [`Client`] and its builder.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside_common::config::ClientConfig;
use farside_common::control::{Role, ServerStatistics, Token};
use farside_common::fabric::verbs::Options;

use crate::connection::{Connection, Target};
use crate::engine::EngineOptions;
use crate::{Error, Result, Session};

/// A connection to a memory server: cheap to clone, shared by all threads of a process.
///
/// Operations go through a [`Session`], one per thread. When the server goes away, sessions
/// reconnect by themselves as soon as it is back.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

/// What all clones of a client, and its sessions, share.
pub(crate) struct Shared {
    target: Target,
    pub(crate) options: EngineOptions,
    state: Mutex<State>,
}

struct State {
    connection: Arc<Connection>,
    /// When reconnecting failed last.
    failed_at: Option<Instant>,
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

#[cfg(test)]
impl Client {
    /// An engine whose fabric is something around the real one.
    pub(crate) fn engine_over<F: farside_common::fabric::Fabric>(
        &self,
        around: impl FnOnce(farside_common::fabric::shm::ShmFabric) -> F,
    ) -> std::result::Result<
        crate::engine::Engine<F, crate::control::ControlDepot>,
        crate::engine::Failure,
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

    /// How long connecting, and reconnecting, may take.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.target.timeout
    }

    pub(crate) fn role(&self) -> Role {
        self.target.role
    }

    /// The connection, a new one if the last was lost. The first session that needs it connects;
    /// the others wait for it, and fail with it.
    pub(crate) fn connection(&self) -> Result<Arc<Connection>> {
        let asked_at = Instant::now();
        let mut state = self.lock();
        if !state.connection.control.is_lost() {
            return Ok(state.connection.clone());
        }
        if state.failed_at.is_some_and(|at| at > asked_at) {
            return Err(self.unreachable(asked_at.elapsed()));
        }
        match Connection::establish(&self.target) {
            Ok(connection) => {
                tracing::info!(incarnation = connection.welcome.incarnation, "reconnected");
                state.connection = Arc::new(connection);
                Ok(state.connection.clone())
            }
            Err(error) => {
                state.failed_at = Some(Instant::now());
                Err(error)
            }
        }
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
}

/// The most operations a session can have in flight.
pub const PIPELINE_DEPTH_MAX: u16 = 1024;

impl Default for ClientBuilder {
    fn default() -> Self {
        Self {
            server: None,
            role: Role::Writer,
            token: Token::NONE,
            cache_bytes: 64 << 20,
            pipeline_depth: 64,
            connect_timeout: Duration::from_secs(4),
            rdma: Options::default(),
        }
    }
}

impl ClientBuilder {
    /// Takes everything from a configuration.
    pub fn config(self, config: &ClientConfig) -> Self {
        Self {
            server: config.server.clone().or(self.server),
            role: config.role,
            token: config.token(),
            cache_bytes: config.cache_bytes.0 as usize,
            pipeline_depth: config.pipeline_depth,
            connect_timeout: Duration::from_millis(config.connect_timeout_ms),
            rdma: config.rdma.options(),
        }
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

    /// The most memory each session uses to remember where keys are, 32 bytes a key; 0 switches
    /// the location cache off. 64 MiB by default, provided by the system only as it is used.
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

    /// How many operations a session can have in flight: at least 1, at most
    /// [`PIPELINE_DEPTH_MAX`], 64 by default.
    pub fn pipeline_depth(mut self, depth: u16) -> Self {
        self.pipeline_depth = depth;
        self
    }

    /// How long connecting may take, and reconnecting when the server went away. 4 s by default.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Error::Address`] without a server's address, [`Error::Unreachable`] when none answers
    /// there in time, [`Error::Refused`] with the server's reason, [`Error::Layout`] for a region
    /// that cannot be.
    pub fn connect(self) -> Result<Client> {
        let address = self.server.unwrap_or_default().parse()?;
        let (role, token, timeout) = (self.role, self.token, self.connect_timeout);
        let target = Target { address, role, token, timeout, rdma: self.rdma };
        let connection = Arc::new(Connection::establish(&target)?);
        let lanes = self.pipeline_depth.clamp(1, PIPELINE_DEPTH_MAX);
        let options = EngineOptions { cache_bytes: self.cache_bytes, lanes };
        let state = Mutex::new(State { connection, failed_at: None });
        Ok(Client { shared: Arc::new(Shared { target, options, state }) })
    }
}
