//! Starts and stops a server.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use farside_config::size::ByteSize;
use farside_config::{MEMORY_DEFAULT, ServerConfig, addresses_text};
use farside_control::address::Address;
use farside_fabric::memory::RegionMemory;
use farside_fabric::tcp::TlsServer;
use farside_metrics::MetricsServer;

use crate::cluster::{self, Joining, Membership, Watcher};
use crate::error::{ServerError, system};
use crate::event::{new_event, signal};
use crate::metrics::{self, MetricsRegion};
use crate::region::huge_pages::{self, BackgroundCollapse};
use crate::region::recovery::{self, region_memory};
use crate::region::restore::restored_memory;
use crate::region::served::ServedRegion;
use crate::service::{ControlService, listen};

/// A running server: a region, its listeners, and a thread that sleeps until a client needs it: to
/// connect, to get blocks or to sign off. Dropping the server stops it.
///
/// It handles no signal, has no global state and installs no log subscriber.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<Address>,
    tls: Option<TlsReloader>,
    stop: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    /// Makes 2 MiB pages of a large region.
    background: Option<BackgroundCollapse>,
    metrics: Option<MetricsServer>,
}

impl Server {
    /// Creates a region, or opens the region in the region file, and serves it in the background.
    ///
    /// # Errors
    /// A [`ServerError`] that says what to do. After an error no thread runs, and an existing
    /// region is not reformatted.
    pub fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        Self::start_unless(config, &AtomicBool::new(false))
    }

    /// Starts a server as [`Server::start`] does, unless `stop` becomes true while it restores a
    /// snapshot, which may take minutes.
    ///
    /// # Errors
    /// The errors of [`Server::start`], and
    /// [`RestoreError::Stopped`](crate::RestoreError::Stopped).
    pub fn start_unless(config: &ServerConfig, stop: &AtomicBool) -> Result<Self, ServerError> {
        let tls = check(config)?.map(Arc::new);
        let addresses = config.listen.clone();
        let is_rdma = config.listens_at(Address::is_rdma);
        let (metrics, questions) =
            config.metrics.map(|at| metrics::bind(at.0)).transpose()?.unzip();
        // Waits for the records, so nothing listens yet: clients try other servers meanwhile.
        let joining = cluster::join(config, stop)?;
        // The device's first, because the others use the device.
        let mut device_first: Vec<&Address> = addresses.iter().collect();
        device_first.sort_by_key(|address| !address.is_rdma());
        let listeners = device_first.into_iter();
        let listeners = listeners.map(|address| listen(address, config, tls.as_ref()));
        let listeners = listeners.collect::<Result<Vec<_>, _>>()?;
        // Clients that connect from now on wait for this.
        let address = addresses_text(&addresses);
        tracing::info!(%address, "{}", beginning(config));
        let mut memory = match &config.restore {
            Some(snapshot) => restored_memory(snapshot, config, stop)?,
            None => region_memory(config)?,
        };
        let replaces_unfinished = memory.replaces_unfinished();
        let opening = Instant::now();
        let (opened, joined) = open_region(&memory, config, joining)?;
        let (region, geometry) = (opened.region.clone(), opened.geometry);
        let region = MetricsRegion { region, geometry, recovery: opening.elapsed() };
        memory.name_file()?;
        if replaces_unfinished {
            tracing::warn!(
                "FS-002 removed the unfinished region of {address}, left by a server that was \
                 killed. The region starts empty. To restore a snapshot, stop this server, delete \
                 its region_file and start with --restore FILE"
            );
        }
        let bytes = ByteSize(opened.format.region_bytes);
        let incarnation = opened.incarnation;
        // Makes the pages before a device pins the memory, because pinned pages cannot be replaced.
        let pages_left = huge_pages::make(&memory, is_rdma, stop);
        let memory = Arc::new(memory);
        let stop = new_event().map_err(system("create an event"))?;
        let (membership, watcher) = joined.unzip();
        let events = (&stop, questions);
        let service =
            ControlService::new(config, listeners, memory.clone(), opened, membership, events)?;
        // Before a client is accepted, which then can read the metrics at once.
        let metrics = metrics.map(|bound| metrics::serve(bound, region)).transpose()?;
        let (pages, huge_pages) = (memory.pages_text(), ByteSize(memory.huge_bytes()));
        tracing::info!(%address, memory = %bytes, pages, %huge_pages, incarnation, "serving");
        let thread = thread::Builder::new()
            .name("farside-control".to_owned())
            .spawn(move || service.run())
            .map_err(system("start a thread"))?;
        let (thread, stop) = (Some(thread), Stopper(Arc::new(stop)));
        let tls = tls.map(TlsReloader);
        let mut server = Self { addresses, tls, stop, thread, background: None, metrics };
        // The server's address must not be in the records before it listens.
        let started = watcher.map_or(Ok(()), |watcher| watcher.start(&memory));
        started.map_err(system("start a thread"))?;
        match pages_left {
            Some(work) => server.background = Some(BackgroundCollapse::start(work, memory)),
            None => huge_pages::advise(&memory),
        }
        Ok(server)
    }

    /// Checks the settings, and the files of TLS, as [`Server::start`] does before it takes memory.
    ///
    /// # Errors
    /// The error of the start.
    pub fn check(config: &ServerConfig) -> Result<(), ServerError> {
        check(config).map(drop)
    }

    /// Returns the addresses at which clients connect.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns the address at which the server answers requests for its metrics, if it does.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(MetricsServer::address)
    }

    /// Disconnects all clients, closes the region, and waits until both are done.
    pub fn stop(mut self) {
        self.shut_down();
    }

    /// Returns a handle that stops this server while a thread waits in [`Server::wait`].
    pub fn stopper(&self) -> Stopper {
        self.stop.clone()
    }

    /// Returns a handle that reads the files of TLS again; `None` without TLS.
    pub fn tls_reloader(&self) -> Option<TlsReloader> {
        self.tls.clone()
    }

    /// Waits until the server has stopped or failed.
    ///
    /// # Errors
    /// [`ServerError`] when it failed: clients are no longer served.
    pub fn wait(mut self) -> Result<(), ServerError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), ServerError> {
        let joined = self.thread.take().map(JoinHandle::join);
        (self.background, self.metrics) = (None, None);
        match joined {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(ServerError::Panicked),
            None => Ok(()),
        }
    }

    fn shut_down(&mut self) {
        self.stop.stop();
        if let Err(error) = self.join() {
            tracing::error!("FS-053 the server did not shut down cleanly: {error}");
        }
    }
}

/// What the server does until it serves, which may take minutes.
fn beginning(config: &ServerConfig) -> String {
    let file = config.region_file.as_ref().filter(|file| file.exists());
    match (&config.restore, file) {
        (Some(snapshot), _) => format!("restoring {}", snapshot.display()),
        (None, Some(file)) => format!("continuing with the region in {}", file.display()),
        (None, None) => format!("making a region of {}", config.memory.unwrap_or(MEMORY_DEFAULT)),
    }
}

/// Opens the region in this memory, as a part of a cluster if there is one.
fn open_region(
    memory: &RegionMemory,
    config: &ServerConfig,
    joining: Option<Joining>,
) -> Result<(ServedRegion, Option<(Membership, Watcher)>), ServerError> {
    let Some(joining) = joining else { return Ok((recovery::open(memory, config)?, None)) };
    let shard = joining.shard_of(memory, config)?;
    let opened = recovery::open_hashed(memory, config, Some(joining.hash_key()))?;
    let joined = joining.complete(config, shard, memory, &opened)?;
    Ok((opened, Some(joined)))
}

/// Stops a server, once or several times, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Tells the server to stop. Returns at once.
    pub fn stop(&self) {
        signal(&self.0);
    }
}

/// Reads the files of TLS again, from any thread.
#[derive(Clone)]
pub struct TlsReloader(Arc<TlsServer>);

impl TlsReloader {
    /// Reads the certificate, the key and the CA anew, for connections that are made from now on.
    ///
    /// # Errors
    /// [`ServerError::Tls`] for a file that cannot be used: then the former content stays in use.
    pub fn reload(&self) -> Result<(), ServerError> {
        Ok(self.0.reload()?)
    }
}

impl fmt::Debug for TlsReloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsReloader(..)")
    }
}

/// Checks the settings before anything listens, and before memory for a region is allocated.
/// Returns TLS, if the settings have it.
fn check(config: &ServerConfig) -> Result<Option<TlsServer>, ServerError> {
    config.validate()?;
    if !config.region_file.as_deref().is_some_and(Path::exists) {
        config.check_grace()?;
    }
    Ok(config.tls.is_used().then(|| TlsServer::load(config.tls.clone())).transpose()?)
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}
