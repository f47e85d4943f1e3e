//! The settings of a connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_config::{ClientConfig, PIPELINE_DEPTH_RANGE, first_and_others};
use farside_control::attach::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, ConnectOptions};
use farside_control::{Role, SecretKey};
use farside_fabric::{Intercept, Trust};

use super::Client;
use crate::client_inner::ClientInner;
use crate::cluster::{Cluster, Discovered, discover};
use crate::connection::{ServerConnection, SessionOptions};
use crate::fetches::Fetches;
use crate::shard_link::ShardLink;
use crate::{ConnectError, RdmaOptions, Refusal, SetupError, TlsFiles};

/// Collects the settings of a connection; [`ClientBuilder::connect`] makes it.
#[derive(Clone)]
#[must_use]
pub struct ClientBuilder {
    server: Option<String>,
    role: Role,
    secret_key: SecretKey,
    cache_bytes: usize,
    pipeline_depth: u16,
    operation_counters: bool,
    metrics: bool,
    connect_timeout: Option<Duration>,
    rdma: RdmaOptions,
    tls: TlsFiles,
    intercept: Option<Intercept>,
}

/// Leaves out the secret.
impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("server", &self.server)
            .field("role", &self.role)
            .field("cache_bytes", &self.cache_bytes)
            .field("pipeline_depth", &self.pipeline_depth)
            .field("connect_timeout", &self.connect_timeout)
            .field("rdma", &self.rdma)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// The longest timeout for connecting. A larger one could overflow the clock.
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
            secret_key: config.secret_key(),
            cache_bytes: config.cache_bytes.0 as usize,
            pipeline_depth: config.pipeline_depth,
            operation_counters: false,
            metrics: false,
            connect_timeout: config.connect_timeout(),
            rdma: config.rdma.options(),
            tls: config.tls.clone(),
            intercept: None,
        }
    }
}

impl ClientBuilder {
    /// Takes all settings from a configuration. If it names no server, the present one stays.
    pub fn config(self, config: &ClientConfig) -> Self {
        let configured = Self::from(config);
        Self { server: configured.server.clone().or(self.server), ..configured }
    }

    /// The server's address, for example `shm:///run/farside/kv.sock`. If the server has several,
    /// write commas between them: the client uses the best that answers, `shm://` before `rdma://`
    /// before `tcp://`.
    ///
    /// Of a cluster write the addresses of some servers, its seeds. They tell the client where all
    /// servers are, and any of them may be down. The client uses the best fabric that reaches all
    /// servers.
    pub fn server(mut self, address: &str) -> Self {
        self.server = Some(address.to_owned());
        self
    }

    /// Writer (the default) or reader. A reader gets memory that it cannot write to.
    pub fn role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// The shared secret. The client then uses only servers with the same one, which prove it.
    pub fn secret(mut self, secret: &str) -> Self {
        self.secret_key = SecretKey::of(secret);
        self
    }

    /// Size of the location cache, which all sessions of the client share: 16 bytes a key. 0
    /// switches it off. 64 MiB by default; the system provides the memory only as it is used.
    pub fn cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// Settings of RDMA, for an `rdma://` address: timeouts, retries, and how long a waiting thread
    /// spins before it sleeps.
    ///
    /// ```
    /// use std::time::Duration;
    /// use farside::{Client, RdmaOptions};
    ///
    /// let options = RdmaOptions { ack_timeout: 18, spin: Duration::ZERO, ..Default::default() };
    /// let builder = Client::builder().server("rdma://10.9.0.1:7400").rdma(options);
    /// # let _ = builder;
    /// ```
    pub fn rdma(mut self, options: RdmaOptions) -> Self {
        self.rdma = options;
        self
    }

    /// Files for TLS, for a `tcp://` address: the CA of the server's certificate, and a certificate
    /// and key if the server wants one. They are read whenever the client connects. The host in the
    /// address must be a name in the server's certificate.
    ///
    /// ```
    /// use farside::{Client, TlsFiles};
    ///
    /// let files = TlsFiles { ca: Some("/etc/farside/ca.pem".into()), ..Default::default() };
    /// let builder = Client::builder().server("tcp://kv.example:7400").tls(files);
    /// # let _ = builder;
    /// ```
    pub fn tls(mut self, files: TlsFiles) -> Self {
        self.tls = files;
        self
    }

    /// How many operations a session can have in flight: a number in [`PIPELINE_DEPTH_RANGE`], 64
    /// by default.
    ///
    /// For each of them a session keeps two buffers, which grow with the largest value so far and
    /// are freed with the session: in all at most about 4 x `depth` x the largest value.
    pub fn pipeline_depth(mut self, depth: u16) -> Self {
        self.pipeline_depth = depth;
        self
    }

    /// Whether pipelines count the verbs of each operation, for
    /// [`Completed::counters`](crate::Completed::counters). Off by default, because it takes some
    /// instructions. [`Session::counters`](crate::Session::counters) always counts.
    pub fn operation_counters(mut self, counts: bool) -> Self {
        self.operation_counters = counts;
        self
    }

    /// Whether the client has metrics, for [`Client::render_metrics`]. Off by default. If they are
    /// on, a GET at a cached location takes about 2 % more instructions.
    pub fn metrics(mut self, enabled: bool) -> Self {
        self.metrics = enabled;
        self
    }

    /// Timeout for connecting, and for reconnecting when the server went away. 3 s by default, as
    /// for all programs of Farside; more than a day counts as a day. Unless this is called,
    /// [`ClientBuilder::connect`] waits for up to 30 s if a server accepts the connection but does
    /// not answer yet, because it still makes its region.
    ///
    /// Attempts follow each other with pauses of up to 250 ms; the last one starts when the timeout
    /// is over. Then [`ConnectError::Unreachable`](crate::ConnectError::Unreachable) says how far
    /// the attempts came. If the connection is lost during a call that has changed nothing yet, the
    /// call reconnects with the same timeout.
    ///
    /// The timeout is for connecting only. While the server is connected but does not answer (it
    /// may be stopped), most operations continue without it. One that needs memory from the server
    /// waits for at most 5 s, whatever this timeout is, and fails as
    /// [`ConnectError::Unreachable`](crate::ConnectError::Unreachable).
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// Puts an interceptor between each session and its fabric. It can count, delay or fail verbs:
    /// for emulated networks and fault injection.
    ///
    /// `intercept` is called once for each session and connection, with the session's fabric and
    /// the number of its lanes. It returns the fabric that the session uses instead: usually a
    /// [`farside_fabric::Intercepted`].
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    /// use farside::Client;
    /// use farside_fabric::{Fabric, Intercepted, Interceptor, LaneId, Nanos, RegionIndex, Verb};
    ///
    /// struct CountVerbs(Arc<AtomicUsize>);
    ///
    /// impl<F: Fabric + ?Sized> Interceptor<F> for CountVerbs {
    ///     fn post(
    ///         &mut self,
    ///         fabric: &mut F,
    ///         lane: LaneId,
    ///         region: RegionIndex,
    ///         chain: &[Verb],
    ///         deadline: Nanos,
    ///     ) {
    ///         self.0.fetch_add(chain.len(), Relaxed);
    ///         fabric.post(lane, region, chain, deadline);
    ///     }
    /// }
    ///
    /// let verbs = Arc::new(AtomicUsize::new(0));
    /// let counted = verbs.clone();
    /// let builder = Client::builder().intercept_fabric(Arc::new(move |fabric, _lanes| {
    ///     Box::new(Intercepted { interceptor: CountVerbs(counted.clone()), fabric })
    /// }));
    /// # let _ = builder;
    /// ```
    pub fn intercept_fabric(mut self, intercept: Intercept) -> Self {
        self.intercept = Some(intercept);
        self
    }

    /// Connects to the server.
    ///
    /// # Errors
    /// [`SetupError::PipelineDepth`] for a depth out of range, [`SetupError::Address`] without a
    /// valid address. [`SetupError::Connect`]: `Unreachable` if no server answers in time,
    /// `Refused` with the server's reason, `Layout` for an invalid region; `System` if the system
    /// refuses a thread or a descriptor, `Tls` if one of the sides does not trust the other, and
    /// `Rdma` over RDMA.
    pub fn connect(self) -> Result<Client, SetupError> {
        let lanes = self.pipeline_depth;
        if !PIPELINE_DEPTH_RANGE.contains(&lanes) {
            return Err(SetupError::PipelineDepth { depth: lanes });
        }
        let (address, others) = first_and_others(&self.server.unwrap_or_default())?;
        let timeout = self.connect_timeout.map(|timeout| timeout.min(CONNECT_TIMEOUT_MAX));
        let mut connect_options = ConnectOptions {
            address,
            others,
            role: self.role,
            view: None,
            secret_key: self.secret_key,
            timeout: timeout.unwrap_or(CONNECT_TIMEOUT),
            answer_timeout: timeout.unwrap_or(ANSWER_TIMEOUT),
            rdma: self.rdma,
            tls: self.tls,
            trust: Trust::forever(),
        };
        let (cluster, links) = connect(&connect_options, self.cache_bytes)?;
        // A running program that loses its server hears of that sooner.
        connect_options.answer_timeout = connect_options.timeout;
        let counts_operations = self.operation_counters;
        let options = SessionOptions { cache_bytes: self.cache_bytes, lanes, counts_operations };
        let (intercept, fetches) = (self.intercept, Fetches::default());
        let metrics = self.metrics.then(Arc::default);
        let shared =
            ClientInner { connect_options, options, intercept, cluster, links, fetches, metrics };
        Ok(Client { shared: Arc::new(shared) })
    }
}

/// The cluster, if there is one, and the connections to its shards.
type Connected = (Option<Arc<Cluster>>, Box<[ShardLink]>);

/// Connects to a server, or finds out what the cluster of the seeds is.
fn connect(options: &ConnectOptions, cache_bytes: usize) -> Result<Connected, ConnectError> {
    let single = |connection| Ok((None, [ShardLink::new(Some(connection))].into()));
    // A single address is mostly that of a server without a cluster, so it is asked for nothing
    // else.
    if options.others.is_empty() {
        match ServerConnection::establish(options, cache_bytes) {
            Err(ConnectError::Refused { source: Refusal::Clustered, .. }) => {}
            connection => return single(connection?),
        }
    }
    let map = match discover(options)? {
        Discovered::NoCluster => return single(ServerConnection::establish(options, cache_bytes)?),
        Discovered::Map(map) => map,
    };
    let seeds = std::iter::once(&options.address).chain(&options.others).cloned().collect();
    let cluster = Arc::new(Cluster::new(map, seeds)?);
    let links = (0..cluster.shards()).map(|_| ShardLink::new(None)).collect();
    Ok((Some(cluster), links))
}
