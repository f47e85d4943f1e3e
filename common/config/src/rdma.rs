//! The table `[rdma]`. All keys except `mr_slice` are the same for servers and clients.

use std::time::Duration;

use serde::Deserialize;

use farside_fabric::rdma::{ACK_TIMEOUT, Options, SLICE_BYTES_MIN, SLICE_UNIT_BYTES};

use super::{ConfigError, bad_value, from_text};
use crate::size::ByteSize;

const MR_SLICE: &str = "rdma.mr_slice";

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
    /// The length of the memory regions in which a server registers its region. If unset, it is
    /// registered whole. Not for clients.
    #[serde(deserialize_with = "from_text")]
    pub mr_slice: Option<ByteSize>,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        let Options { retry_count, ack_timeout, spin, .. } = Options::default();
        Self { retry_count, ack_timeout, spin_us: spin.as_micros() as u64, mr_slice: None }
    }
}

impl RdmaConfig {
    /// Returns the fabric's options.
    pub fn options(&self) -> Options {
        let Self { retry_count, ack_timeout, spin_us, .. } = *self;
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
        if let Some(slice) = self.mr_slice
            && (slice.0 < SLICE_BYTES_MIN || !slice.0.is_multiple_of(SLICE_UNIT_BYTES))
        {
            let (unit, min) = (ByteSize(SLICE_UNIT_BYTES), ByteSize(SLICE_BYTES_MIN));
            let advice = format!("write a multiple of {unit}, at least {min}, such as 4GiB");
            return Err(bad_value(MR_SLICE, slice, advice));
        }
        Ok(())
    }

    pub(super) fn validate_client(&self) -> Result<(), ConfigError> {
        self.validate()?;
        self.mr_slice.map_or(Ok(()), |slice| {
            let advice = "it is for the config file of a server; leave it out";
            Err(bad_value(MR_SLICE, slice, advice))
        })
    }
}
