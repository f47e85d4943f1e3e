//! Records in etcd 3.4 to 3.6, through its JSON gateway. Their keys begin with `/farside/NAME/`.
//!
//! Reads are linearizable. A commit is one transaction, which compares the revisions of the
//! records. A server's record has a lease, so it ends with the server.

mod announcement;
mod gateway;
mod health;
mod tls;
mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::announcement::EtcdAnnouncement;
use self::gateway::{Failure, Gateway, Repeat};
use self::wire::{Range, Txn, Watch, base64};
use crate::options::StoreOptions;
use crate::records::ServerRecord;
use crate::store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    Versioned,
};

/// The longest name of a cluster.
const NAME_BYTES_MAX: usize = 63;
/// The records of one answer.
const PAGE_RECORDS: usize = 1000;
/// The answers of one read. A cluster has a record for each shard and for each server.
const PAGES_MAX: usize = 64;
/// The attempts to read pages of one revision, which may be compacted after the first page.
const READS_MAX: usize = 3;
/// The changes of one part of a transaction. etcd allows 128 operations, less the parts.
const PART_CHANGES: usize = 100;

type Result<T> = std::result::Result<T, StoreError>;

/// The records of one cluster.
pub(crate) struct EtcdStore {
    gateway: Arc<Gateway>,
    prefix: String,
}

impl EtcdStore {
    /// The store with this URI; `rest` is what follows its scheme.
    pub(crate) fn open(uri: &str, rest: &str, options: &StoreOptions) -> Result<Self> {
        if let Some((_, behind)) = rest.rsplit_once('@') {
            // The password is not shown once more.
            return Err(StoreError::Uri {
                uri: format!("etcd://...@{behind}"),
                why: "other users could see the password; set `user` and `password` in the config",
            });
        }
        let wrong = |why| StoreError::Uri { uri: uri.to_owned(), why };
        let (hosts, name) = rest.split_once('/').ok_or(wrong("it has no NAME"))?;
        let is_allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) || !name.bytes().all(is_allowed) {
            return Err(wrong("a NAME has up to 63 of a-z, 0-9 and -"));
        }
        let hosts: Vec<_> = hosts.split(',').collect();
        if !hosts.iter().all(|host| is_host(host)) {
            return Err(wrong("each member needs a HOST:PORT"));
        }
        let gateway = Arc::new(Gateway::new(uri, &hosts, options)?);
        Ok(Self { gateway, prefix: format!("/farside/{name}/") })
    }

    fn key(&self, key: &str) -> String {
        base64(format!("{}{key}", self.prefix))
    }

    /// The end of the range of all keys: the prefix with a greater last byte.
    fn range_end(&self) -> String {
        base64(format!("{}0", self.prefix.trim_end_matches('/')))
    }

    /// Reads all pages at the revision of the first.
    fn read_pages(&self) -> std::result::Result<Records, Failure> {
        let mut records = Records::default();
        let mut begin = self.key("");
        for page in 0..PAGES_MAX {
            let mut body = json!({
                "key": begin,
                "range_end": self.range_end(),
                "limit": PAGE_RECORDS.to_string(),
            });
            if page > 0 {
                body["revision"] = Value::String(records.revision.to_string());
            }
            let range: Range = self.gateway.call("kv/range", &body, Repeat::Harmless)?;
            if page == 0 {
                records.revision = range.header.revision;
            }
            let Some(last) = range.kvs.last() else { return Ok(records) };
            // The least key above the last one.
            begin = base64([&last.key[..], &[0]].concat());
            for found in range.kvs {
                let key = std::str::from_utf8(&found.key).ok();
                let key = key.and_then(|key| key.strip_prefix(&self.prefix));
                let foreign = || Failure::Final(self.gateway.failed("it returned a foreign key"));
                let key = key.ok_or_else(foreign)?.to_owned();
                let value = Versioned { revision: found.mod_revision, value: found.value };
                records.by_key.insert(key, value);
            }
            if !range.more {
                return Ok(records);
            }
        }
        Err(Failure::Final(self.gateway.failed("the cluster has too many records")))
    }

    fn operation(&self, (key, value): &Change) -> Value {
        let key = self.key(key);
        match value {
            Some(value) => json!({ "request_put": { "key": key, "value": base64(value) } }),
            None => json!({ "request_delete_range": { "key": key } }),
        }
    }

    /// The operations of these changes. Without any, there is a read: etcd answers a transaction
    /// without operations from what the member has, which can be old. Many changes are in
    /// transactions within the transaction, because etcd bounds the number of operations in each.
    fn operations(&self, changes: &[Change]) -> Vec<Value> {
        let operations: Vec<_> = changes.iter().map(|change| self.operation(change)).collect();
        if operations.is_empty() {
            return vec![json!({ "request_range": { "key": self.key("") } })];
        }
        if operations.len() <= PART_CHANGES {
            return operations;
        }
        let parts = operations.chunks(PART_CHANGES);
        parts.map(|part| json!({ "request_txn": { "success": part } })).collect()
    }

    /// Waits for an event. Returns why the member ended the watch, if it did.
    fn watch(&self, since: Revision, deadline: Instant) -> Result<Option<String>> {
        let body = json!({ "create_request": {
            "key": self.key(""),
            "range_end": self.range_end(),
            "start_revision": since.saturating_add(1).to_string(),
        }});
        let watched = self.gateway.watch("watch", &body, deadline, |message: Watch| {
            // A compaction has removed the events, so there were some.
            let has_changed = !message.events.is_empty() || message.compact_revision > 0;
            Ok(match message.canceled && !has_changed {
                true => Some(Some(message.cancel_reason)),
                false => has_changed.then_some(None),
            })
        });
        watched.map(Option::flatten).map_err(|failure| self.gateway.unexpected(failure))
    }
}

impl RecordStore for EtcdStore {
    fn read(&self) -> Result<Records> {
        for _ in 1..READS_MAX {
            match self.read_pages() {
                Err(Failure::Compacted) => {}
                read => return read.map_err(|failure| self.gateway.unexpected(failure)),
            }
        }
        self.read_pages().map_err(|failure| self.gateway.unexpected(failure))
    }

    fn commit(&self, conditions: &[Condition], changes: &[Change]) -> Result<Commit> {
        let compare = conditions.iter().map(|(key, revision)| {
            json!({
                "key": self.key(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": revision.unwrap_or(0).to_string(),
            })
        });
        let compare: Vec<_> = compare.collect();
        let body = json!({ "compare": compare, "success": self.operations(changes) });
        let done = self.gateway.call("kv/txn", &body, Repeat::IfUndone);
        let Txn { succeeded, .. } = done.map_err(|failure| self.gateway.unexpected(failure))?;
        Ok(if succeeded { Commit::Done } else { Commit::Refused })
    }

    fn wait_for_change(&self, since: Revision, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let Some(reason) = self.watch(since, deadline)? else { return Ok(()) };
        // etcd gives the same reason for a token that has ended and for a user without the right.
        // A read tells them apart, and logs in again.
        tracing::debug!(reason, "etcd has ended a watch");
        self.read()?;
        if Instant::now() >= deadline {
            return Ok(());
        }
        match self.watch(since, deadline)? {
            Some(reason) => Err(self.gateway.failed(format!("it refuses to watch: {reason}"))),
            None => Ok(()),
        }
    }

    fn announce(&self, server: &ServerRecord) -> Result<Box<dyn Announcement>> {
        let gateway = Arc::clone(&self.gateway);
        let announced = EtcdAnnouncement::new(gateway, self.key(&server.key()), server)?;
        Ok(Box::new(announced))
    }

    fn health(&self) -> Result<Vec<Health>> {
        Ok(health::check(&self.gateway))
    }
}

/// Whether this is a host with a port: a name, an IPv4 address, or an IPv6 address in brackets.
fn is_host(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_ipv6 = || {
        let inner = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
        inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok())
    };
    let is_known = (!host.is_empty() && host.bytes().all(is_name)) || is_ipv6();
    is_known && port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok()
}
