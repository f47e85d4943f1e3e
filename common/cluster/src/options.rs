//! The options for access to a store.

use serde::Deserialize;

use farside_control::Secret;
use farside_fabric::tcp::TlsFiles;

/// How to get access to the records: keys of the table `[cluster]` of a config file. A store of
/// files needs none of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct StoreOptions {
    /// The user of etcd. Unset if etcd has no authentication.
    pub user: Option<String>,
    /// The password of this user. It cannot be a part of the URI, because other users of a host see
    /// the arguments of a process.
    pub password: Option<Secret>,
    /// The files for TLS with etcd. With `ca` the connections use TLS. With `certificate` and `key`
    /// etcd accepts them if it wants certificates of its clients. A user is always named by `user`:
    /// etcd's JSON gateway does not take the name in a certificate.
    pub tls: TlsFiles,
}
