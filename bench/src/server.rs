//! The kv-server of a run.

use std::path::Path;

use farside_config::ClientConfig;
use farside_control::address::Address;

use crate::accounting::{self, ServerUsage};
use crate::command::Interrupt;
use crate::daemon::{Daemon, find_program};
use crate::raw_connection::RawConnection;
use crate::sizing::ServerMemory;
use crate::{Error, Result};

/// How long one attempt to connect to a starting server may take before we check that it still
/// runs.
const ANSWER_TIMEOUT_MS: u64 = 250;

/// The server of a run: one that already ran, or one of our own that is stopped when this is
/// dropped.
pub struct Server {
    /// How to connect to it.
    pub config: ClientConfig,
    /// The number of its process, if known.
    pub process: Option<u32>,
    /// The process of a server of our own, which ends when this is dropped.
    own: Option<Daemon>,
}

impl Server {
    /// Returns the server that the configuration names, or starts one with this memory.
    pub fn connect_or_start(
        config: ClientConfig,
        memory: impl FnOnce() -> Result<ServerMemory>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        if let Some(address) = &config.server {
            let process = accounting::process_at(address);
            return Ok(Self { config, process, own: None });
        }
        let own = start(memory()?, interrupt)?;
        let config = ClientConfig { server: Some(address_of(&own.socket())), ..config };
        Ok(Self { config, process: Some(own.process()), own: Some(own) })
    }

    /// Whether the server was started for this run.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The expense of its process so far, if the process is known.
    pub fn usage(&self) -> Option<ServerUsage> {
        ServerUsage::of(self.process?).ok()
    }

    /// The name of the fabric that leads to it.
    pub fn fabric(&self) -> &str {
        self.config
            .server
            .as_deref()
            .and_then(|server| server.split("://").next())
            .unwrap_or_default()
    }
}

fn start(memory: ServerMemory, interrupt: &Interrupt) -> Result<Daemon> {
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
    // The server listens long before its memory is ready, so only a connection shows that it is.
    let answers = |socket: &Path| {
        let server = Some(address_of(socket));
        let config =
            ClientConfig { server, connect_timeout_ms: ANSWER_TIMEOUT_MS, ..Default::default() };
        RawConnection::connect(&config).and_then(RawConnection::give_back).is_ok()
    };
    Daemon::start(program, arguments, answers, interrupt)
}

fn address_of(socket: &Path) -> String {
    Address::Shm(socket.to_owned()).to_string()
}
