//! A client: the state that its sessions share, and how it reconnects.

mod admin;
mod builder;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_control::Role;
use farside_control::attach::ConnectOptions;

use crate::connection::{ServerConnection, SessionEngine, SessionOptions};
use crate::fetches::Fetches;
use crate::reconnecting::{ReconnectBudget, Reconnecting};
use crate::{ConnectError, Contact, Error, OperationError, Result, Session};
pub use admin::Admin;
pub use builder::ClientBuilder;
use farside_protocol::{Failure, OpenRegion};
use serde::Serialize;

/// A connection to a memory server: cheap to clone, shared by all threads of a process.
///
/// Operations go through a [`Session`], one per thread. If the server goes away and returns,
/// sessions reconnect by themselves.
///
/// A background thread talks to the server. It inherits the signal mask of the connecting thread:
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
    connect_options: ConnectOptions,
    pub(crate) options: SessionOptions,
    intercept: Option<farside_fabric::Intercept>,
    connections: Reconnecting<ServerConnection>,
    pub(crate) fetches: Fetches,
}

/// The limits of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

    /// Returns what an administrator can do: statistics, collection, compaction.
    pub fn admin(&self) -> Admin<'_> {
        Admin { client: self }
    }
}

impl ClientInner {
    /// The server's address.
    pub(crate) fn server(&self) -> String {
        self.connect_options.address.to_string()
    }

    /// The error of operations that could not reach the server for this long.
    pub(crate) fn unreachable(&self, contact: Contact, tried: Duration) -> Error {
        ConnectError::Unreachable { server: self.server(), tried, contact, source: None }.into()
    }

    /// Opens an engine for one session, and the region that it works on. `None` if the connection
    /// was lost meanwhile.
    pub(crate) fn open(
        &self,
        connection: &ServerConnection,
    ) -> Result<Option<(SessionEngine, OpenRegion)>> {
        match connection.open(self.options, self.intercept.as_ref())? {
            Ok(opened) => Ok(Some(opened)),
            Err(failure) => self.handle_failure(connection, failure).map_or(Ok(None), Err),
        }
    }

    /// Returns the error for a failed operation; `None` if the connection is lost and the operation
    /// had no effect.
    ///
    /// Gives the connection up if it is lost or the operation's outcome is unknown. Then sessions
    /// reconnect. The server gets no goodbye, so it cleans up what the operation may have left.
    pub(crate) fn handle_failure(
        &self,
        connection: &ServerConnection,
        failure: Failure,
    ) -> Option<Error> {
        let error = match failure {
            Failure::Error(error) => Some((*error).into()),
            Failure::Lost(_) => None,
            Failure::HalfDone { .. } => Some(OperationError::Indeterminate.into()),
            Failure::NoAnswer(waited_ns) => {
                Some(self.unreachable(Contact::Silent, Duration::from_nanos(waited_ns)))
            }
        };
        if matches!(error, None | Some(Error::Operation(OperationError::Indeterminate))) {
            connection.control.give_up();
        }
        error
    }

    /// The error of an operation that had no effect because its connection was lost.
    pub(crate) fn disconnected(&self) -> Error {
        Error::Disconnected { server: self.server() }
    }

    /// Counts a loss of the connection. Returns the error once the budget is used up.
    pub(crate) fn count_loss(&self, budget: &mut ReconnectBudget) -> Result<()> {
        if budget.count_loss(self.connect_options.timeout) {
            return Ok(());
        }
        Err(self.unreachable(Contact::Lost, budget.since_first_loss()))
    }

    pub(crate) fn role(&self) -> Role {
        self.connect_options.role
    }

    /// Returns the connection, after reconnecting if it was lost.
    pub(crate) fn connection(&self) -> Result<Arc<ServerConnection>> {
        Ok(self.connections.get(|connection| connection.control.is_lost(), || self.reconnect())?)
    }

    fn reconnect(&self) -> std::result::Result<ServerConnection, ConnectError> {
        let connection = ServerConnection::establish(&self.connect_options)?;
        tracing::info!(incarnation = connection.welcome.incarnation, "reconnected");
        Ok(connection)
    }
}
