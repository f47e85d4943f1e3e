//! A client: the state that its sessions share, and how it reconnects.

mod admin;
mod builder;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_control::Role;
use farside_control::attach::ConnectOptions;

use crate::cluster::Cluster;
use crate::connection::{ServerConnection, SessionOptions};
use crate::fetches::Fetches;
use crate::metrics::ClientMetrics;
use crate::reconnecting::ReconnectBudget;
use crate::shards::ShardLink;
use crate::{Contact, Error, OperationError, RegisteredBuffer, Result, Session};
pub use admin::Admin;
pub use builder::ClientBuilder;
use farside_protocol::Failure;
use serde::Serialize;

/// A connection to a memory server, or to the servers of a cluster: cheap to clone, shared by all
/// threads of a process.
///
/// Operations go through a [`Session`], one per thread. If a server goes away and returns, sessions
/// reconnect by themselves.
///
/// A background thread talks to each server. It inherits the signal mask of the connecting thread:
/// before you connect, block the signals that other threads are to handle.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<ClientInner>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (server, role) = (self.shared.server(), self.shared.role());
        let mut client = f.debug_struct("Client");
        client.field("server", &server).field("role", &role).finish_non_exhaustive()
    }
}

/// The state that all clones of a client and its sessions share.
pub(crate) struct ClientInner {
    /// In a cluster its address and the others are seeds.
    pub(crate) connect_options: ConnectOptions,
    pub(crate) options: SessionOptions,
    intercept: Option<farside_fabric::Intercept>,
    /// `None` for a server without a cluster.
    pub(crate) cluster: Option<Arc<Cluster>>,
    /// By the number of the shard.
    pub(crate) links: Box<[ShardLink]>,
    pub(crate) fetches: Fetches,
    /// `None` without the option.
    pub(crate) metrics: Option<Arc<ClientMetrics>>,
}

/// The limits of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: usize,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
    /// The length of the region, in bytes.
    pub region_bytes: u64,
    /// How long an unlinked block stays untouched: GRACE.
    pub grace: Duration,
}

impl Client {
    /// Returns a builder, which collects the settings of a connection.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Opens a session for one thread. It reads the directory of the index: a few round trips.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// std::thread::scope(|scope| {
    ///     let work = || client.session()?.increment("visits", 1);
    ///     let threads = [scope.spawn(work), scope.spawn(work)];
    ///     threads.into_iter().try_for_each(|thread| thread.join().expect("no panic").map(drop))
    /// })?;
    /// assert_eq!(client.session()?.increment("visits", 0)?, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Connect`]: `Unreachable` if the server went away and did not return, `Refused` if
    /// it returned and refuses this client, `System` if the system refuses a thread or a
    /// descriptor, and over RDMA `Rdma`. [`Error::Operation`]: `Layout` if the region is damaged,
    /// `Unregistered` if the system refuses memory for RDMA. [`Error::Lateness`] for a writer whose
    /// retry settings are too slow for the region's GRACE.
    pub fn session(&self) -> Result<Session> {
        Session::open(self.shared.clone())
    }

    /// Returns memory for long values, of so many bytes, all zero. Over RDMA a device transfers
    /// between it and a region without a copy. [`Session::get_into`] takes the buffer, and
    /// [`Session::put`] any part of it.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// let mut session = client.session()?;
    /// let mut buffer = client.buffer(1 << 20)?;
    /// buffer[..5].copy_from_slice(b"hello");
    /// session.put("greeting", &buffer[..5])?;
    /// let read = session.get_into("greeting", &mut buffer)?.expect("it was just put");
    /// assert_eq!(buffer[..read.bytes], *b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The system's error: it has no such memory. If it does not allow so much to be registered,
    /// the first call that uses the buffer fails with `Unregistered`.
    pub fn buffer(&self, bytes: usize) -> std::io::Result<RegisteredBuffer> {
        RegisteredBuffer::new(bytes)
    }

    /// Returns what an operator can do: statistics, clients, hot keys, collection,
    /// compaction.
    pub fn admin(&self) -> Admin<'_> {
        Admin { client: self, shard: None }
    }
}

impl ClientInner {
    /// The server's address; in a cluster the seeds.
    pub(crate) fn server(&self) -> String {
        let ConnectOptions { address, others, .. } = &self.connect_options;
        match self.cluster {
            Some(_) => std::iter::once(address)
                .chain(others)
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(","),
            None => address.to_string(),
        }
    }

    pub(crate) fn intercept(&self) -> Option<&farside_fabric::Intercept> {
        self.intercept.as_ref()
    }

    /// The number of lanes of a session's engine. In a cluster a pipeline needs one more.
    pub(crate) fn lanes(&self) -> u16 {
        self.options.lanes + u16::from(self.cluster.is_some())
    }

    /// The size of the location cache of each shard, in bytes.
    pub(crate) fn cache_bytes_of_shard(&self) -> usize {
        self.options.cache_bytes / self.links.len()
    }

    /// Returns the error for a failed operation; `None` if the connection is lost and the operation
    /// had no effect.
    ///
    /// Gives the connection up if it is lost or the operation's outcome is unknown. Then sessions
    /// reconnect. The server gets no goodbye, so it cleans up what the operation may have left.
    pub(crate) fn handle_failure(
        &self,
        shard: usize,
        connection: &ServerConnection,
        failure: Failure,
    ) -> Option<Error> {
        let error = match failure {
            Failure::Error(error) => Some((*error).into()),
            Failure::Lost(_) => None,
            Failure::NoAnswer(waited_ns) => {
                let waited = Duration::from_nanos(waited_ns);
                Some(self.unreachable(shard, Contact::Silent, waited))
            }
        };
        if matches!(error, None | Some(Error::Operation(OperationError::Indeterminate))) {
            connection.control.give_up();
        }
        error
    }

    /// The error of an operation that had no effect because its connection was lost.
    pub(crate) fn disconnected(&self, shard: usize) -> Error {
        let last = self.links[shard].connections.last();
        let server = last.map_or_else(|| self.server(), |connection| connection.server());
        Error::Disconnected { server }
    }

    /// Counts a loss of the connection. Returns the error once the budget is used up.
    pub(crate) fn count_loss(&self, shard: usize, budget: &mut ReconnectBudget) -> Result<()> {
        if budget.count_loss(self.connect_options.timeout) {
            return Ok(());
        }
        Err(self.unreachable(shard, Contact::Lost, budget.since_first_loss()))
    }

    pub(crate) fn role(&self) -> Role {
        self.connect_options.role
    }
}
