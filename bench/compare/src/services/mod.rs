//! Servers whose CPU executes every operation: redis, valkey and memcached, if they are installed.
//! The driver reaches them over a Unix socket.

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
    /// An error of the client library of redis and valkey.
    #[error(transparent)]
    Redis(#[from] ::redis::RedisError),
    /// An answer that does not fit the request.
    #[error("the server answered {0}, which does not fit the request")]
    Answer(String),
}

/// How many bytes a server stores for a record at most, besides its key and value.
const RECORD_OVERHEAD_BYTES: u64 = 256;
const MIB: u64 = 1 << 20;
/// The memory of memcached that is not for records, in MiB.
const MEMCACHED_MIB: u64 = 64;

/// Whether the server program of this name is installed.
pub fn is_installed(program: &str) -> bool {
    find_program(program, None).is_some()
}

/// Starts a server with room for this number of records. It stores nothing on disk.
pub fn start(
    program: &str,
    records: u64,
    value_bytes: u32,
    interrupt: &Interrupt,
) -> Result<Daemon> {
    let record = KEY_BYTES as u64 + u64::from(value_bytes) + RECORD_OVERHEAD_BYTES;
    start_with(program, records * record / MIB + MEMCACHED_MIB, interrupt)
}

/// Starts a server. The memory is that of memcached; the others have no limit.
pub fn start_with(program: &str, memory_mib: u64, interrupt: &Interrupt) -> Result<Daemon> {
    let path = find_program(program, None).unwrap_or_else(|| program.into());
    let arguments = |socket: &Path| {
        let socket = socket.display().to_string();
        let mib = memory_mib.to_string();
        let arguments = match program {
            // As root memcached starts only with -u. Everything else is memcached's default.
            "memcached" => vec!["-s", &socket, "-m", &mib, "-u", "root"],
            _ => vec!["--port", "0", "--unixsocket", &socket, "--save", "", "--appendonly", "no"],
        };
        arguments.into_iter().map(str::to_owned).collect()
    };
    let answers = |socket: &Path| UnixStream::connect(socket).is_ok();
    Daemon::start(path, arguments, answers, interrupt)
}

#[cfg(test)]
mod tests;
