//! The record of a running server, which etcd removes with its lease.

use std::sync::Arc;

use serde_json::json;

use super::gateway::{Failure, Gateway, Repeat};
use super::wire::{Lease, Put, base64};
use crate::records::ServerRecord;
use crate::store::{Announcement, StoreError};

/// How long the record stays after the last sign of life, in seconds.
const TTL_S: u64 = 10;

type Result<T> = std::result::Result<T, StoreError>;

/// A server's record with a lease.
pub(super) struct EtcdAnnouncement {
    gateway: Arc<Gateway>,
    /// The key, in base64.
    key: String,
    value: String,
    /// The lease with which the value was written; `None` if etcd has lost it.
    lease: Option<u64>,
}

impl EtcdAnnouncement {
    /// Writes the record at this key.
    pub(super) fn new(gateway: Arc<Gateway>, key: String, server: &ServerRecord) -> Result<Self> {
        let mut announced = Self { gateway, key, value: base64(server.value()), lease: None };
        announced.write()?;
        Ok(announced)
    }

    /// Writes the record with the lease, or with a new one if there is none any more.
    fn write(&mut self) -> Result<()> {
        if let Some(lease) = self.lease.take() {
            match self.put(lease) {
                Ok(()) => {
                    self.lease = Some(lease);
                    return Ok(());
                }
                Err(Failure::NoLease) => {}
                Err(failure) => return Err(self.gateway.unexpected(failure)),
            }
        }
        let body = json!({ "TTL": TTL_S.to_string() });
        let granted = self.gateway.call("lease/grant", &body, Repeat::Harmless);
        let written = granted.and_then(|lease: Lease| match lease.id {
            0 => Err(Failure::Final(self.gateway.failed("it granted a lease without a number"))),
            id => self.put(id).map(|()| id),
        });
        self.lease = Some(written.map_err(|failure| self.gateway.unexpected(failure))?);
        Ok(())
    }

    fn put(&self, lease: u64) -> std::result::Result<(), Failure> {
        let body = json!({ "key": self.key, "value": self.value, "lease": lease.to_string() });
        self.gateway.call("kv/put", &body, Repeat::Harmless).map(|_: Put| ())
    }

    /// Whether etcd still has the lease, which now lasts longer.
    fn extend(&self, lease: u64) -> std::result::Result<bool, Failure> {
        let body = json!({ "ID": lease.to_string() });
        match self.gateway.call_stream("lease/keepalive", &body) {
            Ok(Lease { ttl, .. }) => Ok(ttl > 0),
            Err(Failure::NoLease) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

impl Announcement for EtcdAnnouncement {
    fn keep_alive(&mut self) -> Result<()> {
        if let Some(lease) = self.lease {
            match self.extend(lease) {
                Ok(true) => return Ok(()),
                Ok(false) => self.lease = None,
                Err(failure) => return Err(self.gateway.unexpected(failure)),
            }
            tracing::warn!("FS-048 etcd has ended the lease of this server: it is announced again");
        }
        self.write()
    }

    fn update(&mut self, server: &ServerRecord) -> Result<()> {
        self.value = base64(server.value());
        self.write()
    }
}
