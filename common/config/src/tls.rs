//! Checks of the table `[tls]`.

use farside_control::address::Address;
use farside_fabric::tcp::TlsFiles;

use super::{ConfigError, ServerConfig, addresses_text, bad_value};

pub(super) fn validate_server(config: &ServerConfig) -> Result<(), ConfigError> {
    let tls = &config.tls;
    if !tls.is_used() {
        return Ok(());
    }
    if !config.listens_at(Address::is_tcp) {
        let advice = "[tls] encrypts tcp:// alone: leave it out, or listen at a tcp:// address";
        return Err(bad_value("listen", addresses_text(&config.listen), advice));
    }
    needed("tls.certificate", tls.certificate.is_some(), "a server with [tls] needs one")?;
    needed("tls.key", tls.key.is_some(), "write the file of the certificate's private key")
}

pub(super) fn validate_client(tls: &TlsFiles) -> Result<(), ConfigError> {
    if !tls.is_used() {
        return Ok(());
    }
    let advice = "write the file of the CA that signed the server's certificate";
    needed("tls.ca", tls.ca.is_some(), advice)?;
    let is_paired = tls.certificate.is_some() == tls.key.is_some();
    needed("tls.key", tls.key.is_some() || is_paired, "tls.certificate needs it")?;
    needed("tls.certificate", is_paired, "tls.key needs it")
}

fn needed(key: &'static str, is_there: bool, advice: &'static str) -> Result<(), ConfigError> {
    if is_there { Ok(()) } else { Err(ConfigError::Missing { key, advice }) }
}
