//! Which server, and with what.

use anyhow::{Context, bail};
use farside::{Client, Role};
use farside_common::config::ClientConfig;

use crate::args::Args;

/// How long to look for a server when no config file says: a person is waiting.
const CONNECT_TIMEOUT_MS: u64 = 1000;

/// What the config file says, and the server that was asked for.
pub(crate) fn config(args: &Args) -> anyhow::Result<ClientConfig> {
    let mut config = match ClientConfig::file(args.config.as_deref()) {
        Some(path) => ClientConfig::load(&path)?,
        None => ClientConfig { connect_timeout_ms: CONNECT_TIMEOUT_MS, ..Default::default() },
    };
    if let Some(server) = args.server.as_ref().filter(|server| !server.is_empty()) {
        config.server = Some(server.clone());
    }
    if config.server.is_none() {
        bail!(
            "which server? Give --server shm:///path/of/kv.sock, set FARSIDE_SERVER, or write \
             `server = \"...\"` into ~/.config/farside/client.toml"
        );
    }
    Ok(config)
}

/// Connects to read and write, or as the config file says. No command comes to a key twice, so a
/// location cache would only take time to set up.
pub(crate) fn writer(args: &Args) -> anyhow::Result<Client> {
    Ok(Client::builder().config(&config(args)?).cache_bytes(0).connect()?)
}

/// Connects to read only: whatever goes wrong here, nothing is changed.
pub(crate) fn reader(args: &Args) -> anyhow::Result<Client> {
    let client = Client::builder().config(&config(args)?).cache_bytes(0);
    Ok(client.role(Role::Reader).connect()?)
}

/// The bytes of an argument that is a key.
pub(crate) fn key(args: &Args, text: &std::ffi::OsStr) -> anyhow::Result<Vec<u8>> {
    let key = args.key_encoding.decode_argument("key", text)?;
    (!key.is_empty()).then_some(key).context("the key is empty: keys have at least one byte")
}
