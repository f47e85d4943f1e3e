//! The files for TLS with etcd.

use std::path::Path;
use std::sync::Arc;

use farside_fabric::tcp::{TlsClient, TlsFiles};
use rustls::crypto::ring;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Returns ureq's configuration with these files.
///
/// # Errors
/// What is wrong with the files.
pub(super) fn config(files: &TlsFiles) -> Result<TlsConfig, String> {
    // ureq leaves certificates out that it cannot read, and panics if the key is that of another
    // certificate. The host does not matter here.
    TlsClient::load(files, "localhost").map_err(|error| error.to_string())?;
    let ca = files.ca.as_deref().map(|path| read(path).map(|(certificates, _)| certificates));
    let ca = ca.transpose()?.unwrap_or_default();
    let client = match (&files.certificate, &files.key) {
        (Some(certificate), Some(key)) => {
            let (certificates, _) = read(certificate)?;
            let found = read(key)?.1;
            let key = found.ok_or_else(|| format!("{} has no private key", key.display()))?;
            Some(ClientCert::new_with_certs(&certificates, key))
        }
        _ => None,
    };
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&ca))
        .client_cert(client)
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build())
}

/// The certificates and the last private key of a file in PEM format.
fn read(path: &Path) -> Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>), String> {
    let unusable = |why: String| format!("cannot use the file {}: {why}", path.display());
    let pem =
        farside_fabric::trusted_path::read(path).map_err(|error| unusable(error.to_string()))?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&pem) {
        match item.map_err(|error| unusable(error.to_string()))? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(found) => key = Some(found),
            _ => {}
        }
    }
    Ok((certificates, key))
}
