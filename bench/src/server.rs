//! A kv-server for the time of a run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use farside_common::address::Address;
use farside_common::config::ClientConfig;
use farside_common::fabric::shm::Connection;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::accounting;
use crate::interrupt::Interrupt;
use crate::sizing::Memory;
use crate::{Error, Result};

/// How long a server may take to provide its memory and listen.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long it may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// The server of a run: somebody's, or one of our own that is stopped when this is dropped.
pub struct Server {
    /// How to connect to it.
    pub config: ClientConfig,
    /// Its process, if known.
    pub process: Option<u32>,
    /// Stopped with this.
    _own: Option<OwnServer>,
    is_own: bool,
}

impl Server {
    /// The one the configuration names, or else a new one with so much memory.
    ///
    /// # Errors
    /// As for a server of its own.
    pub fn connect_or_start(
        config: ClientConfig,
        memory: impl FnOnce() -> Result<Memory>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        if let Some(address) = &config.server {
            let process = accounting::process_at(address);
            return Ok(Self { config, process, _own: None, is_own: false });
        }
        let own = OwnServer::start(memory()?, interrupt)?;
        let config = ClientConfig { server: Some(own.address.clone()), ..config };
        Ok(Self { config, process: Some(own.child.id()), _own: Some(own), is_own: true })
    }

    /// The one that this configuration names, which another kv-bench may have started.
    pub fn of_parent(config: ClientConfig, is_own: bool) -> Self {
        Self { config, process: None, _own: None, is_own }
    }

    /// Whether it was started for this run.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// The name of the fabric that leads to it.
    pub fn fabric(&self) -> &str {
        let address = self.config.server.as_deref().unwrap_or_default();
        address.split("://").next().unwrap_or_default()
    }
}

/// A child process, with its socket and log in a temporary folder.
struct OwnServer {
    child: Child,
    address: String,
    program: PathBuf,
    folder: TempDir,
}

impl OwnServer {
    fn start(memory: Memory, interrupt: &Interrupt) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let program = find_program()?;
        let folder = tempfile::Builder::new()
            .prefix("kv-bench-")
            .tempdir()
            .map_err(Error::system("making a temporary folder"))?;
        let socket = folder.path().join("kv.sock");
        let address = Address::Shm(socket.clone()).to_string();
        let log = File::create(folder.path().join(LOG)).map_err(Error::system("making a log"))?;
        let child = Command::new(&program)
            .args(["--listen", &address])
            .args(["--memory", &format!("{}MiB", memory.region_bytes >> 20)])
            .args(["--index", &format!("{}KiB", memory.index_bytes >> 10)])
            .args(["--value-bytes-max", &memory.value_bytes_max.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C in a terminal is for us: we stop the server after our threads.
            .process_group(0)
            .spawn()
            .map_err(Error::system("starting kv-server"))?;
        let mut server = Self { child, address, program, folder };
        server.wait_until_ready(&socket, interrupt)?;
        Ok(server)
    }

    fn wait_until_ready(&mut self, socket: &Path, interrupt: &Interrupt) -> Result<()> {
        let started = Instant::now();
        loop {
            interrupt.check()?;
            if Connection::connect(socket).is_ok() {
                return Ok(());
            }
            let exited = self.child.try_wait().map_err(Error::system("watching kv-server"))?;
            if exited.is_some() || started.elapsed() > START_TIMEOUT {
                let log = self.last_line();
                return Err(Error::ServerStart { program: self.program.clone(), log });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn last_line(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join(LOG)).unwrap_or_default();
        log.lines().last().unwrap_or("it said nothing").to_owned()
    }
}

const LOG: &str = "kv-server.log";

impl Drop for OwnServer {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let asked = Instant::now();
        while let Ok(None) = self.child.try_wait() {
            if asked.elapsed() > STOP_TIMEOUT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// kv-server beside this program, or in PATH.
fn find_program() -> Result<PathBuf> {
    let this = std::env::current_exe().map_err(Error::system("finding this program"))?;
    let beside = this.parent().unwrap_or(Path::new("/")).to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(beside.clone())
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join("kv-server"))
        .find(|program| program.is_file())
        .ok_or(Error::NoServerProgram { beside })
}
