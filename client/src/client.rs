//! A client: what its sessions share, and how it connects anew.

mod builder;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_control::attach::ConnectOptions;
use farside_control::{Role, ServerStatistics};

use crate::connection::{ServerConnection, SessionEngine, SessionOptions};
use crate::control::{ANSWER_TIMEOUT, Control, PERMILLE_ALL};
use crate::reconnecting::{ReconnectBudget, Reconnecting};
use crate::{ConnectError, Contact, Error, OperationError, Result, Session};
pub use builder::ClientBuilder;
use farside_protocol::{Failure, OpenRegion};

/// A connection to a memory server: cheap to clone, shared by all threads of a process.
///
/// Operations go through a [`Session`], one per thread. When the server goes away, sessions
/// reconnect by themselves as soon as it is back.
///
/// A background thread talks to the server. It takes the signal mask of the thread that connects:
/// block there what only others are to handle.
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

/// What all clones of a client, and its sessions, share.
pub(crate) struct ClientInner {
    connect_options: ConnectOptions,
    pub(crate) options: SessionOptions,
    wrap: Option<farside_fabric::Intercept>,
    connections: Reconnecting<ServerConnection>,
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
    /// [`Error::Connect`]: `Unreachable` if the server went away and did not come back, `Refused`
    /// if it did and refuses this client, `System` if the system refuses a thread or a descriptor,
    /// and over RDMA `Rdma`. [`Error::Operation`]: `Layout` if the region is damaged,
    /// `Unregistered` if the system refuses memory for RDMA. [`Error::Lateness`] for a writer.
    pub fn session(&self) -> Result<Session> {
        Session::open(self.shared.clone())
    }

    /// What the server knows about its region and its clients: one message each way.
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server does not answer.
    pub fn statistics(&self) -> Result<ServerStatistics> {
        self.ask(Control::statistics)
    }

    /// Asks the server something that does no harm to ask twice: again on a new connection if the
    /// present one is lost before the answer.
    fn ask<T>(&self, question: impl Fn(&Control) -> Option<T>) -> Result<T> {
        let mut losses = ReconnectBudget::default();
        loop {
            let connection = self.shared.connection()?;
            match question(&connection.control) {
                Some(answer) => return Ok(answer),
                None if connection.control.is_lost() => losses.add(&self.shared)?,
                None => return Err(self.shared.unreachable(Contact::Silent, ANSWER_TIMEOUT)),
            }
        }
    }
}

/// How often a caller that waits for a collection asks whether it has ended.
const COLLECT_POLL: Duration = Duration::from_millis(5);

impl Client {
    /// Has the server look for lost blocks, which dead clients held, and waits until it has; what
    /// it knows then. Other clients go on meanwhile. Takes as long as two walks of the server's
    /// through the index, and as its slowest client takes to answer.
    ///
    /// # Errors
    /// [`OperationError::Denied`] for a reader, [`ConnectError::Unreachable`] if the server does
    /// not answer.
    pub fn collect(&self) -> Result<ServerStatistics> {
        if self.shared.role() == Role::Reader {
            return Err(OperationError::Denied.into());
        }
        self.ask(|control| {
            let before = control.collect()?;
            loop {
                let now = control.statistics()?;
                if now.collections >= before.collections_next {
                    return Some(now);
                }
                std::thread::sleep(COLLECT_POLL);
            }
        })
    }

    /// Tells the server how far a snapshot is that this program takes, in thousandths, 1000 when it
    /// is complete: for readers of [`ServerStatistics`]. One message, which is not answered,
    /// and takes the place of one that still waits.
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server went away and did not come back.
    pub fn report_snapshot(&self, permille: u32) -> Result<()> {
        self.shared.connection()?.control.tell_snapshot(permille.min(PERMILLE_ALL));
        Ok(())
    }
}

impl ClientInner {
    /// The server's address.
    pub(crate) fn server(&self) -> String {
        self.connect_options.address.to_string()
    }

    pub(crate) fn unreachable(&self, contact: Contact, tried: Duration) -> Error {
        ConnectError::Unreachable { server: self.server(), tried, contact, source: None }.into()
    }

    /// An engine for one session, and the region that it has opened.
    pub(crate) fn open(
        &self,
        connection: &ServerConnection,
    ) -> Result<std::result::Result<(SessionEngine, OpenRegion), Failure>> {
        connection.open(self.options, self.wrap.as_ref())
    }

    /// The error behind a failure; `None` if the connection is lost, and nothing happened. Where
    /// the outcome of the last operation is unknown, it is given up as well: without a goodbye the
    /// server looks for what it may have left, and sessions connect anew.
    pub(crate) fn failed(&self, connection: &ServerConnection, failure: Failure) -> Option<Error> {
        let error = match failure {
            Failure::Error(error) => Some((*error).into()),
            Failure::Lost(_) => None,
            Failure::HalfDone { .. } => Some(OperationError::Indeterminate.into()),
            Failure::NoAnswer(waited) => {
                Some(self.unreachable(Contact::Silent, Duration::from_nanos(waited)))
            }
        };
        if matches!(error, None | Some(Error::Operation(OperationError::Indeterminate))) {
            connection.control.give_up();
        }
        error
    }

    /// The error for what did not happen because its connection was lost.
    pub(crate) fn disconnected(&self) -> Error {
        Error::Disconnected { server: self.server() }
    }

    /// How long connecting, and reconnecting, may take.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect_options.timeout
    }

    pub(crate) fn role(&self) -> Role {
        self.connect_options.role
    }

    /// The connection, a new one if the last was lost.
    pub(crate) fn connection(&self) -> Result<Arc<ServerConnection>> {
        let gave_up = |tried| self.unreachable(Contact::Lost, tried);
        self.connections.get(|now| now.control.is_lost(), || self.reconnect(), gave_up)
    }

    fn reconnect(&self) -> Result<ServerConnection> {
        let connection = ServerConnection::establish(&self.connect_options)?;
        tracing::info!(incarnation = connection.welcome.incarnation, "reconnected");
        Ok(connection)
    }
}
