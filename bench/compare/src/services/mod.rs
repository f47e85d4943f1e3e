//! Servers whose CPU does every operation, asked over a Unix socket: redis, valkey and memcached,
//! where they are installed.

pub mod memcached;
pub mod redis;
pub mod requests;

use std::os::unix::net::UnixStream;
use std::path::Path;

use farside_bench::Result;
use farside_bench::command::Interrupt;
use farside_bench::daemon::{Daemon, find_program};
use farside_bench::keys::KEY_BYTES;

/// Why an operation of a service fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The socket broke, or the server closed it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// What the client library of redis and valkey says.
    #[error(transparent)]
    Redis(#[from] ::redis::RedisError),
    /// An answer that nothing asked for.
    #[error("the server answered {0}")]
    Answer(String),
}

/// A server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalServer {
    /// redis-server
    Redis,
    /// valkey-server
    Valkey,
    /// memcached
    Memcached,
}

/// More than a server of these keeps for a record besides its key and value, in bytes.
const RECORD_OVERHEAD_BYTES: u64 = 256;
const MIB: u64 = 1 << 20;
/// Memory of memcached's own, in MiB.
const MEMCACHED_MIB: u64 = 64;

impl ExternalServer {
    /// The program that has to be installed.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Redis => "redis-server",
            Self::Valkey => "valkey-server",
            Self::Memcached => "memcached",
        }
    }

    /// Whether it can be started here.
    pub fn is_installed(self) -> bool {
        find_program(self.program(), None).is_some()
    }

    /// Starts it with room for so many records, and nothing kept on disk.
    pub fn start(self, records: u64, value_bytes: u32, interrupt: &Interrupt) -> Result<Daemon> {
        let program = find_program(self.program(), None).unwrap_or_else(|| self.program().into());
        let arguments = |socket: &Path| {
            let socket = socket.display().to_string();
            let record = KEY_BYTES as u64 + u64::from(value_bytes) + RECORD_OVERHEAD_BYTES;
            let mib = (records * record / MIB + MEMCACHED_MIB).to_string();
            let arguments = match self {
                Self::Redis | Self::Valkey => {
                    vec!["--port", "0", "--unixsocket", &socket, "--save", "", "--appendonly", "no"]
                }
                // It does not run as root without being told so. Its other settings are its own.
                Self::Memcached => vec!["-s", &socket, "-m", &mib, "-u", "root"],
            };
            arguments.into_iter().map(str::to_owned).collect()
        };
        let answers = |socket: &Path| UnixStream::connect(socket).is_ok();
        Daemon::start(program, arguments, answers, interrupt)
    }
}

#[cfg(test)]
mod tests;
