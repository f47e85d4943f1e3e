//! The table `[rdma]`, the same for servers and clients.

use std::time::Duration;

use serde::Deserialize;

use farside_fabric::rdma::{ACK_TIMEOUT, Options};
use farside_layout::grace_ms_min;

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

    /// Checks that GRACE is long enough for proofs of words: T_word in docs/protocol.md must be
    /// above 0. Otherwise no update of a new region could succeed.
    ///
    /// # Errors
    /// [`ConfigError::Value`] with the shortest GRACE that is long enough.
    pub fn check_grace(&self, grace_ms: u32) -> Result<(), ConfigError> {
        let lateness_ms = self.options().lateness_max_ns() / 1_000_000;
        let min = grace_ms_min(self.options().lateness_max_ns());
        if u64::from(grace_ms) >= min {
            return Ok(());
        }
        let advice = format!(
            "with this rdma.retry_count and rdma.ack_timeout a verb can take effect {lateness_ms} \
             ms late: write at least {min}, or lower these two keys"
        );
        Err(bad_value("grace_ms", grace_ms, advice))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_retries_need_a_longer_grace() {
        let refused = |ack_timeout, grace_ms| {
            let config = RdmaConfig { ack_timeout, ..RdmaConfig::default() };
            config.check_grace(grace_ms).is_err()
        };
        let default = RdmaConfig::default().ack_timeout;
        // By default L is 8.2 s, and T_word = 160 x `grace_ms` - L has to be above 0.
        assert!(refused(default, 52) && !refused(default, 53));
        assert!(refused(18, 193) && !refused(18, 194));
    }
}
