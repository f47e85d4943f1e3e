//! Which server, and with what.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Once;

use farside::{Client, Role};
use farside_config::command_line::one_line;
use farside_config::{ClientConfig, check_private};
use farside_tools::encoding::Encoding;

use crate::args::Args;
use crate::output::{self, Usage};

/// What the config file says, and the server that was asked for.
pub(crate) fn config(args: &Args) -> anyhow::Result<ClientConfig> {
    let mut config = match ClientConfig::file(args.config.as_deref()) {
        Some(path) => {
            let config = ClientConfig::load(&path)?;
            if config.secret.is_some() {
                tell_exposed(&path, args.strict_config)?;
            }
            config
        }
        None => ClientConfig::default(),
    };
    if let Some(server) = args.server.as_ref().filter(|server| !server.is_empty()) {
        config.server = Some(server.clone());
    }
    if config.server.is_none() {
        return Err(Usage::error(
            "which server? Give --server shm:///path/of/kv.sock, set FARSIDE_SERVER, or write \
             `server = \"...\"` into ~/.config/farside/client.toml",
        ));
    }
    Ok(config)
}

/// Says once that other users can read a file with a secret; fails if `strict`.
fn tell_exposed(path: &Path, strict: bool) -> anyhow::Result<()> {
    static TOLD: Once = Once::new();
    match check_private(path) {
        Err(exposed) if strict => return Err(exposed.into()),
        Err(exposed) => TOLD.call_once(|| output::tell(format_args!("warning: {exposed}"))),
        Ok(()) => {}
    }
    Ok(())
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
pub(crate) fn key(args: &Args, text: &OsStr) -> anyhow::Result<Vec<u8>> {
    let key = decode(args.key_encoding, "key", text)?;
    if key.is_empty() {
        return Err(Usage::error("the key is empty: keys have at least one byte"));
    }
    Ok(key)
}

/// The bytes that an argument stands for.
pub(crate) fn decode(encoding: Encoding, what: &str, text: &OsStr) -> anyhow::Result<Vec<u8>> {
    encoding.decode_argument(what, text).map_err(|error| Usage::error(one_line(error.as_ref())))
}
