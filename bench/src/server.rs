//! A kv-server for the time of a run.

use std::path::Path;

use farside_common::address::Address;
use farside_common::config::ClientConfig;
use farside_common::fabric::shm::Connection;

use crate::accounting;
use crate::daemon::{Daemon, find_program};
use crate::interrupt::Interrupt;
use crate::sizing::Memory;
use crate::{Error, Result};

/// The server of a run: somebody's, or one of our own that is stopped when this is dropped.
pub struct Server {
    /// How to connect to it.
    pub config: ClientConfig,
    /// Its process, if known.
    pub process: Option<u32>,
    /// Stopped with this.
    _own: Option<Daemon>,
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
        let own = start(memory()?, interrupt)?;
        let config = ClientConfig { server: Some(address_of(&own.socket())), ..config };
        Ok(Self { config, process: Some(own.process()), _own: Some(own), is_own: true })
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

fn start(memory: Memory, interrupt: &Interrupt) -> Result<Daemon> {
    let this = std::env::current_exe().map_err(Error::system("finding this program"))?;
    let beside = this.parent().unwrap_or(Path::new("/")).to_owned();
    let Some(program) = find_program("kv-server", Some(&beside)) else {
        return Err(Error::NoServerProgram { beside });
    };
    let arguments = |socket: &Path| {
        let with = |flag: &str, value: String| [flag.to_owned(), value];
        [
            with("--listen", address_of(socket)),
            with("--memory", format!("{}MiB", memory.region_bytes >> 20)),
            with("--index", format!("{}KiB", memory.index_bytes >> 10)),
            with("--value-bytes-max", memory.value_bytes_max.to_string()),
        ]
        .concat()
    };
    let listens = |socket: &Path| Connection::connect(socket).is_ok();
    Daemon::start(program, arguments, listens, interrupt)
}

fn address_of(socket: &Path) -> String {
    Address::Shm(socket.to_owned()).to_string()
}
