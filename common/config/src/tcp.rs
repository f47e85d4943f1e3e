//! The table `[tcp]` of a server.

use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, bad_value};

/// Limit on the threads that execute verbs.
const THREADS_MAX: u16 = 256;
/// The number of these threads by default, on a machine with at least as many processors.
const THREADS_DEFAULT: usize = 4;

/// How to use TCP, for a `tcp://` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpConfig {
    /// How many threads execute the clients' verbs; if unset, as many as there are processors, at
    /// most four.
    pub threads: Option<u16>,
    /// How long one of these threads polls for requests before it sleeps, in microseconds.
    pub spin_us: u64,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { threads: None, spin_us: 50 }
    }
}

impl TcpConfig {
    /// Returns the number of threads that execute verbs.
    pub fn threads(&self) -> usize {
        let processors = || thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(|| processors().min(THREADS_DEFAULT), usize::from)
    }

    /// Returns how long one of these threads polls for requests before it sleeps.
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match self.threads {
            Some(threads) if !(1..=THREADS_MAX).contains(&threads) => {
                let advice = format!("write a number from 1 to {THREADS_MAX}");
                Err(bad_value("tcp.threads", threads, advice))
            }
            _ => Ok(()),
        }
    }
}
