//! The address of a program's metrics.

use std::net::SocketAddr;
use std::str::FromStr;

/// The address at which a program answers requests for its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress(pub SocketAddr);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!(
                "`{text}` is no address for metrics; write an IP address and a port, such as \
                 127.0.0.1:9400 or [::1]:9400"
            )
        })
    }
}
