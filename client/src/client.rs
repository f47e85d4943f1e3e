//! A client, which opens sessions.

mod admin;
mod builder;

use std::fmt;
use std::sync::Arc;

use farside_metrics::MetricsFormat;

use crate::client_inner::ClientInner;
use crate::{RegisteredBuffer, Result, Session};
pub use admin::Admin;
pub use builder::ClientBuilder;

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
    /// [`Error::Connect`](crate::Error::Connect): `Unreachable` if the server went away and did not
    /// return, `Refused` if it returned and refuses this client, `System` if the system refuses a
    /// thread or a descriptor, and over RDMA `Rdma`. [`Error::Operation`](crate::Error::Operation):
    /// `Layout` if the region is damaged, `Unregistered` if the system refuses memory for RDMA.
    /// [`Error::Lateness`](crate::Error::Lateness) for a writer whose retry settings are too slow
    /// for the region's GRACE.
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

    /// Returns the metrics of the client in this format: the operations of all its sessions by kind
    /// and result, their latencies, round trips, verbs, bytes, lookups in the location cache,
    /// retries, errors and reconnects. Sessions that have ended count too. No key is ever a label.
    ///
    /// `docs/operations.md` lists the names. The program serves the text itself, in its own way.
    ///
    /// `None` without [`ClientBuilder::metrics`](crate::ClientBuilder::metrics).
    ///
    /// ```no_run
    /// use farside::{Client, MetricsFormat};
    ///
    /// let server = "shm:///run/farside/kv.sock";
    /// let client = Client::builder().server(server).metrics(true).connect()?;
    /// client.session()?.put("greeting", "hello")?;
    /// let text = client.render_metrics(MetricsFormat::Prometheus).expect("they are on");
    /// let line = "farside_client_operations_total{operation=\"put\",result=\"applied\"} 1\n";
    /// assert!(text.contains(line));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn render_metrics(&self, format: MetricsFormat) -> Option<String> {
        let links = &self.shared.links;
        let reconnects = links.iter().map(|link| link.reconnects()).sum();
        let regions_replaced = links.iter().map(|link| link.regions_replaced()).sum();
        self.shared.metrics.as_ref()?.render(format, reconnects, regions_replaced)
    }

    /// Returns what an operator can do: statistics, clients, hot keys, collection,
    /// compaction.
    pub fn admin(&self) -> Admin<'_> {
        Admin { client: self, shard: None }
    }
}
