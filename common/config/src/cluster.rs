//! A server's place in a cluster: the keys `cluster` and `label`, and the table `[cluster_store]`.

use serde::Deserialize;

use farside_control::Secret;
use farside_control::address::{Address, OWN_NAME_TIMEOUT};
use farside_fabric::tcp::TlsFiles;

use super::{ConfigError, ServerConfig, bad_value};

/// The longest `label`, in bytes.
const LABEL_BYTES_MAX: usize = 64;

/// Access to the records of the cluster in etcd: the table `[cluster_store]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterStoreConfig {
    /// The user. Unset if etcd has no authentication, or knows the user by the certificate.
    pub user: Option<String>,
    /// The password of this user.
    pub password: Option<Secret>,
    /// The files for TLS with etcd. With `ca` the connections use TLS.
    pub tls: TlsFiles,
}

pub(super) fn validate(config: &ServerConfig) -> Result<(), ConfigError> {
    if config.cluster.is_none() {
        let advice = "it is for a server of a cluster: write `cluster`, too, or leave it out";
        return match &config.label {
            Some(label) => Err(bad_value("label", label, advice)),
            None if config.cluster_store != ClusterStoreConfig::default() => {
                Err(bad_value("cluster_store", "...", advice))
            }
            None => Ok(()),
        };
    }
    if let Some(label) = &config.label
        && !(1..=LABEL_BYTES_MAX).contains(&label.len())
    {
        let advice = format!("write 1 to {LABEL_BYTES_MAX} characters");
        return Err(bad_value("label", format_args!("{label:?}"), advice));
    }
    if let Some(file) = &config.restore {
        let advice = "a snapshot may have keys of all shards: start the servers of the cluster \
                      without it, and then run `kv-cli restore`";
        return Err(bad_value("restore", file.display(), advice));
    }
    config.listen.iter().try_for_each(check_address)
}

/// Checks that clients of other hosts can be told this address.
fn check_address(address: &Address) -> Result<(), ConfigError> {
    // An address that cannot be resolved is an error later, when the server listens.
    let resolved = address.resolve(OWN_NAME_TIMEOUT).unwrap_or_default();
    if resolved.iter().any(|address| address.ip().is_unspecified()) {
        let advice = "the cluster tells clients this address, and it names no host: write an \
                      address of this host's";
        return Err(bad_value("listen", address, advice));
    }
    Ok(())
}
