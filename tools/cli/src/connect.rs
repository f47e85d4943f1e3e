//! Connects to the configured server, and decodes arguments.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Once;

use farside::{Client, Role};
use farside_cli::formats::Encoding;
use farside_config::command_line::one_line;
use farside_config::{ClientConfig, check_private};

use crate::args::Args;
use crate::output::{self, Usage};

/// Returns the config file's settings, with the server of the command line if it names one.
pub(crate) fn config(args: &Args) -> anyhow::Result<ClientConfig> {
    let config = config_without_server(args)?;
    if config.server.is_none() {
        return Err(Usage::error(
            "which server? Give --server shm:///path/of/kv.sock, set FARSIDE_SERVER, or write \
             `server = \"...\"` into ~/.config/farside/client.toml",
        ));
    }
    Ok(config)
}

/// As [`config`], for a command that needs no server.
pub(crate) fn config_without_server(args: &Args) -> anyhow::Result<ClientConfig> {
    let mut config = match ClientConfig::file(args.config.as_deref()) {
        Some(path) => {
            let config = ClientConfig::load(&path)?;
            if config.secret.is_some() {
                check_exposure(&path, args.strict_config)?;
            }
            config
        }
        None => ClientConfig::default(),
    };
    if let Some(server) = args.server.as_ref().filter(|server| !server.is_empty()) {
        config.server = Some(server.clone());
    }
    Ok(config)
}

/// Warns once if other users can read a file with a secret; fails if `strict`.
fn check_exposure(path: &Path, strict: bool) -> anyhow::Result<()> {
    static WARNED: Once = Once::new();
    match check_private(path) {
        Err(exposed) if strict => return Err(exposed.into()),
        Err(exposed) => {
            WARNED.call_once(|| output::print_message(format_args!("warning: {exposed}")))
        }
        Ok(()) => {}
    }
    Ok(())
}

/// Connects with the role of the config file: a writer by default. The client has no location
/// cache: no command uses a key twice, so a cache would only take time to set up.
pub(crate) fn writer(args: &Args) -> anyhow::Result<Client> {
    Ok(Client::builder().config(&config(args)?).cache_bytes(0).connect()?)
}

/// Connects as a reader, which cannot change anything.
pub(crate) fn reader(args: &Args) -> anyhow::Result<Client> {
    let client = Client::builder().config(&config(args)?).cache_bytes(0);
    Ok(client.role(Role::Reader).connect()?)
}

/// Decodes an argument that is a key.
pub(crate) fn key(args: &Args, text: &OsStr) -> anyhow::Result<Vec<u8>> {
    let key = decode(args.key_encoding, "key", text)?;
    if key.is_empty() {
        return Err(Usage::error("the key is empty: keys have at least one byte"));
    }
    Ok(key)
}

/// Decodes an argument; the error names it.
pub(crate) fn decode(encoding: Encoding, name: &str, text: &OsStr) -> anyhow::Result<Vec<u8>> {
    let decoded = encoding.decode(text.as_bytes());
    decoded.map_err(|error| Usage::error(format!("the {name}: {}", one_line(error.as_ref()))))
}
