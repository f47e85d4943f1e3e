//! How to connect.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_config::{ClientConfig, PIPELINE_DEPTH};
use farside_control::attach::ConnectOptions;
use farside_control::{Role, Token};

use super::{Client, ClientInner};
use crate::connection::{ServerConnection, SessionOptions};
use crate::reconnecting::Reconnecting;
use crate::{Error, RdmaOptions, Result};

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
    rdma: RdmaOptions,
    wrap: Option<farside_fabric::Intercept>,
}

/// Without the secret.
impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("server", &self.server)
            .field("role", &self.role)
            .field("cache_bytes", &self.cache_bytes)
            .field("pipeline_depth", &self.pipeline_depth)
            .field("connect_timeout", &self.connect_timeout)
            .field("rdma", &self.rdma)
            .finish_non_exhaustive()
    }
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
    ///
    /// ```
    /// use std::time::Duration;
    /// use farside::{Client, RdmaOptions};
    ///
    /// let patient = RdmaOptions { ack_timeout: 18, spin: Duration::ZERO, ..Default::default() };
    /// let builder = Client::builder().server("rdma://10.9.0.1:7400").rdma(patient);
    /// # let _ = builder;
    /// ```
    pub fn rdma(mut self, options: RdmaOptions) -> Self {
        self.rdma = options;
        self
    }

    /// How many operations a session can have in flight: a number in [`PIPELINE_DEPTH`], 64 by
    /// default.
    ///
    /// For each of them a session keeps buffers as long as the largest value they had to hold so
    /// far, until it is dropped: at most about this x 2 x twice the largest value.
    pub fn pipeline_depth(mut self, depth: u16) -> Self {
        self.pipeline_depth = depth;
        self
    }

    /// How long connecting may take, and reconnecting when the server went away. 3 s by default, as
    /// for every program here; at most a day: more is taken for that.
    ///
    /// All of it is used: attempts follow each other with pauses of up to 250 ms, and the last one
    /// is made when the time is over. Then
    /// [`ConnectError::Unreachable`](crate::ConnectError::Unreachable) says how far it came. A
    /// server that is lost during a call is connected to anew, for as long again, if the call has
    /// changed nothing yet.
    ///
    /// It is for connecting only. While the server is connected and does not answer, because it is
    /// stopped, say, most operations go on without it; one that needs memory from it waits for 5 s
    /// at most, whatever this is, and fails as
    /// [`ConnectError::Unreachable`](crate::ConnectError::Unreachable).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The interceptor between each session and its fabric: for kv-compare and tests.
    #[doc(hidden)]
    pub fn around(mut self, wrap: farside_fabric::Intercept) -> Self {
        self.wrap = Some(wrap);
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Error::PipelineDepth`] for a depth out of range, [`Error::Address`] without a server's
    /// address. [`Error::Connect`]: `Unreachable` if none answers there in time, `Refused` with the
    /// server's reason, `Layout` for a region that cannot be; `System` if the system refuses a
    /// thread or a descriptor, and `Rdma` over RDMA.
    pub fn connect(self) -> Result<Client> {
        let lanes = self.pipeline_depth;
        if !PIPELINE_DEPTH.contains(&lanes) {
            return Err(Error::PipelineDepth { depth: lanes });
        }
        let address = self.server.unwrap_or_default().parse()?;
        let (role, token) = (self.role, self.token);
        let timeout = self.connect_timeout.min(CONNECT_TIMEOUT_MAX);
        let connect_options = ConnectOptions { address, role, token, timeout, rdma: self.rdma };
        let connections = Reconnecting::new(ServerConnection::establish(&connect_options)?);
        let options = SessionOptions { cache_bytes: self.cache_bytes, lanes };
        let shared = ClientInner { connect_options, options, wrap: self.wrap, connections };
        Ok(Client { shared: Arc::new(shared) })
    }
}
