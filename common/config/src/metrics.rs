//! The address of a server's metrics.

use std::net::SocketAddr;

use serde::{Deserialize, Deserializer};

/// Returns the address at which the server answers requests for its metrics.
///
/// # Errors
/// A line that says what to write.
pub fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!(
            "`{text}` is no address for metrics; write an IP address and a port, such as \
             127.0.0.1:9400 or [::1]:9400"
        )
    })
}

pub(super) fn from_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    metrics_address(&text).map(Some).map_err(serde::de::Error::custom)
}
