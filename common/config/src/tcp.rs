//! The table `[tcp]` of a server.

use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, bad_value, from_text};
use crate::size::ByteSize;

/// Limit on the threads that execute verbs.
const THREADS_MAX: u16 = 256;
/// The number of these threads by default, on a machine with at least as many processors.
const THREADS_DEFAULT: usize = 4;
/// The least memory for requests and replies that wait.
const BUFFERS_BYTES_MIN: u64 = 4 << 20;
/// The least and the most of this memory by default, which is a part of the region's length.
const BUFFERS_BYTES_DEFAULT: (u64, u64) = (64 << 20, 1 << 30);
const BUFFERS_DIVISOR: u64 = 8;

/// How to use TCP, for a `tcp://` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpConfig {
    /// How many threads execute the clients' verbs; if unset, as many as there are processors, at
    /// most four.
    pub threads: Option<u16>,
    /// How long one of these threads polls for requests before it sleeps, in microseconds.
    pub spin_us: u64,
    /// Limit on the memory for requests and replies that wait: an eighth of the region by default,
    /// from 64 MiB to 1 GiB.
    #[serde(deserialize_with = "from_text")]
    pub buffers: Option<ByteSize>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { threads: None, spin_us: 50, buffers: None }
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

    /// Returns the limit on the memory for requests and replies that wait, for a region of this
    /// length.
    pub fn buffers_bytes(&self, region_bytes: u64) -> u64 {
        let (least, most) = BUFFERS_BYTES_DEFAULT;
        let default = (region_bytes / BUFFERS_DIVISOR).clamp(least, most);
        self.buffers.map_or(default, |buffers| buffers.0)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(threads) = self.threads
            && !(1..=THREADS_MAX).contains(&threads)
        {
            let advice = format!("write a number from 1 to {THREADS_MAX}");
            return Err(bad_value("tcp.threads", threads, advice));
        }
        if let Some(buffers) = self.buffers
            && buffers.0 < BUFFERS_BYTES_MIN
        {
            let advice = format!("write {} or more", ByteSize(BUFFERS_BYTES_MIN));
            return Err(bad_value("tcp.buffers", buffers, advice));
        }
        Ok(())
    }
}
