//! The table `[rdma]`, the same for servers and clients.

use std::time::Duration;

use serde::Deserialize;

use farside_fabric::rdma::{ACK_TIMEOUT, Options};

use super::{ConfigError, bad_value};

/// How to use RDMA, for an `rdma://` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RdmaConfig {
    /// How often a device resends a packet.
    pub retry_count: u8,
    /// How long a device waits for an acknowledgement: 4.096 us times 2 to this power.
    pub ack_timeout: u8,
    /// How long a thread polls for a completion before it sleeps, in microseconds.
    pub spin_us: u64,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        let Options { retry_count, ack_timeout, spin, .. } = Options::default();
        Self { retry_count, ack_timeout, spin_us: spin.as_micros() as u64 }
    }
}

impl RdmaConfig {
    /// Returns the fabric's options.
    pub fn options(&self) -> Options {
        let Self { retry_count, ack_timeout, spin_us } = *self;
        let spin = Duration::from_micros(spin_us);
        Options { retry_count, ack_timeout, spin, ..Options::default() }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.retry_count > 6 {
            let advice = "write a number from 0 to 6; with 7 some devices resend without end";
            return Err(bad_value("rdma.retry_count", self.retry_count, advice));
        }
        if !ACK_TIMEOUT.contains(&self.ack_timeout) {
            let advice = "write a number from 8 (1 ms) to 22 (17 s)";
            return Err(bad_value("rdma.ack_timeout", self.ack_timeout, advice));
        }
        Ok(())
    }
}
