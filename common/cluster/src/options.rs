//! The choice of a store by its URI, and the options for access to it.

use std::sync::Arc;

use serde::Deserialize;

use farside_control::Secret;
use farside_fabric::tcp::TlsFiles;

use crate::etcd::EtcdStore;
use crate::file::FileStore;
use crate::store::{RecordStore, StoreError};

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

/// Opens the store with this URI: `etcd://HOST:2379,HOST:2379/NAME`, or `file:///PATH`. It need not
/// be reachable yet. The name has up to 63 letters from a to z, digits and hyphens.
///
/// # Errors
/// [`StoreError::Uri`], and [`StoreError::Failed`] for a folder or options that cannot be used.
pub fn open(uri: &str, options: &StoreOptions) -> Result<Arc<dyn RecordStore>, StoreError> {
    match uri.split_once("://") {
        Some(("file", path)) => Ok(Arc::new(FileStore::open(uri, path)?)),
        Some(("etcd", rest)) => Ok(Arc::new(EtcdStore::open(uri, rest, options)?)),
        _ => Err(StoreError::Uri { uri: uri.to_owned(), why: "its scheme is unknown" }),
    }
}
