//! Starting and stopping.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_fabric::shm::RegionMemory;
use rustix::event::EventfdFlags;

use crate::error::{ServerError, system};
use crate::huge_pages::{self, Background};
use crate::recovery::{self, Opened};
use crate::restore::restored_memory;
use crate::service::ControlService;
use crate::service::acceptor::{BoundListener, listen};

/// A running server: a region, a socket, and a thread that sleeps until a client connects, asks
/// for blocks or leaves. Stops when dropped.
///
/// It takes nothing of the process for itself: no signal, no global state, no log subscriber.
#[derive(Debug)]
pub struct Server {
    address: Address,
    stop: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    /// While a large region gets its 2 MiB pages, and until the server stops.
    background: Option<Background>,
}

impl Server {
    /// Creates or continues the region, and serves it in the background.
    ///
    /// # Errors
    /// A [`ServerError`] that says what to do. Nothing is left running, and a region that was there
    /// is not reformatted.
    pub fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        Self::start_unless(config, &AtomicBool::new(false))
    }

    /// The same; fails if it restores a snapshot, which may take minutes, and is told to stop
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_unless(config: &ServerConfig, stop: &AtomicBool) -> Result<Self, ServerError> {
        config.validate()?;
        check_new(config)?;
        let address = config.address()?.clone();
        let listening = listen(&address, config)?;
        let mut memory = match &config.restore {
            Some(snapshot) => restored_memory(snapshot, config, stop)?,
            None => region_memory(config)?,
        };
        let replaces_unfinished = memory.replaces_unfinished();
        let opened = recovery::open(&memory, config)?;
        memory.name_file()?;
        if replaces_unfinished {
            tracing::warn!(
                "a server was killed before the region of {address} was complete: what it left was \
                 removed, and this region is new and empty; to have a snapshot, stop this server, \
                 delete its region_file and start with --restore"
            );
        }
        let bytes = ByteSize(opened.format.region_bytes);
        let incarnation = opened.incarnation;
        // Before a device pins the memory.
        let work = huge_pages::make(&memory, address.is_rdma(), stop);
        let memory = Arc::new(memory);
        let mut server = Self::serve(config, listening, memory.clone(), opened)?;
        let (pages, huge_pages) = (memory.pages_text(), ByteSize(memory.huge_bytes()));
        tracing::info!(%address, memory = %bytes, pages, %huge_pages, incarnation, "serving");
        match work {
            Some(work) => server.background = Some(Background::start(work, memory)),
            None => huge_pages::advise(&memory),
        }
        Ok(server)
    }

    /// Serves a region in the background.
    fn serve(
        config: &ServerConfig,
        listening: Box<dyn BoundListener>,
        memory: Arc<RegionMemory>,
        opened: Opened,
    ) -> Result<Self, ServerError> {
        let (address, stop) = (config.address()?.clone(), stop_event()?);
        let service = ControlService::new(config, listening, memory, opened, &stop)?;
        let stop = Stopper(Arc::new(stop));
        let thread = thread::Builder::new()
            .name("farside-control".to_owned())
            .spawn(move || service.run())
            .map_err(system("start a thread"))?;
        Ok(Self { address, stop, thread: Some(thread), background: None })
    }

    /// Where clients connect.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Lets go of all clients and of the region, in order.
    pub fn stop(mut self) {
        self.shut_down();
    }

    /// What stops this server from elsewhere, while a thread waits in [`Server::wait`].
    pub fn stopper(&self) -> Stopper {
        self.stop.clone()
    }

    /// Waits until the server was stopped, or failed.
    ///
    /// # Errors
    /// [`ServerError`] when it failed: clients are no longer served.
    pub fn wait(mut self) -> Result<(), ServerError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), ServerError> {
        let joined = self.thread.take().map(JoinHandle::join);
        self.background = None;
        match joined {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(ServerError::Panicked),
            None => Ok(()),
        }
    }

    fn shut_down(&mut self) {
        self.stop.stop();
        if let Err(error) = self.join() {
            tracing::error!("the server did not stop in order: {error}");
        }
    }
}

/// Stops a server, once or several times, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Tells the server to stop. Returns at once.
    pub fn stop(&self) {
        // An event counter takes a one unless it is full, and then the thread is awake anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn stop_event() -> Result<OwnedFd, ServerError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(system("create an event"))
}

/// What only matters if there is no region yet, before there is memory for one.
fn check_new(config: &ServerConfig) -> Result<(), ServerError> {
    if config.listen.as_ref().is_some_and(Address::is_rdma)
        && !config.region_file.as_deref().is_some_and(Path::exists)
    {
        config.rdma.check_grace(config.grace_ms)?;
    }
    Ok(())
}

pub(crate) fn region_memory(config: &ServerConfig) -> Result<RegionMemory, ServerError> {
    let (bytes, huge_pages) = (config.region_bytes(), config.huge_pages);
    Ok(match &config.region_file {
        Some(path) => RegionMemory::file(path, bytes, huge_pages)?,
        None => RegionMemory::anonymous(bytes, huge_pages)?,
    })
}
