//! The configuration files of server and client. Every key is documented in `config/`.

use serde::Deserialize;

/// How to reach a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientConfig {
    /// The server's address.
    pub server: Option<String>,
}
