//! Records in etcd 3.4 to 3.6, through its JSON gateway. Their keys begin with `/farside/NAME/`.
//!
//! Reads are linearizable. A commit is one transaction, which compares the revisions of the
//! records. A server's record has a lease, so it ends with the server.

mod gateway;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_fabric::tcp::{TlsClient, TlsFiles};
use gateway::{Alarm, Alarms, FREE_SPACE, Lease, Members, Put, Range, Status, Txn, Watch, base64};
use rustls::crypto::ring;
use serde_json::{Value, json};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use self::gateway::{Failure, Gateway, Repeat};
use crate::records::ServerRecord;
use crate::store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    StoreOptions, Versioned,
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
        Ok(check(&self.gateway))
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

/// How long the record stays after the last sign of life, in seconds.
const TTL_S: u64 = 10;

/// A server's record with a lease.
struct EtcdAnnouncement {
    gateway: Arc<Gateway>,
    /// The key, in base64.
    key: String,
    value: String,
    /// The lease with which the value was written; `None` if etcd has lost it.
    lease: Option<u64>,
}

impl EtcdAnnouncement {
    /// Writes the record at this key.
    fn new(gateway: Arc<Gateway>, key: String, server: &ServerRecord) -> Result<Self> {
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

/// Returns ureq's configuration with these files.
///
/// # Errors
/// What is wrong with the files.
fn tls_config(files: &TlsFiles) -> std::result::Result<TlsConfig, String> {
    // ureq leaves certificates out that it cannot read, and panics if the key is that of another
    // certificate. The host does not matter here.
    TlsClient::load(files, "localhost").map_err(|error| error.to_string())?;
    let ca = files.ca.as_deref().map(|path| read_pem(path).map(|(certificates, _)| certificates));
    let ca = ca.transpose()?.unwrap_or_default();
    let client = match (&files.certificate, &files.key) {
        (Some(certificate), Some(key)) => {
            let (certificates, _) = read_pem(certificate)?;
            let found = read_pem(key)?.1;
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
fn read_pem(
    path: &Path,
) -> std::result::Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>), String> {
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

/// The longest time to ask one member, with a login.
const MEMBER_MAX: Duration = Duration::from_secs(2);

/// Looks at every member, and at the alarms.
fn check(gateway: &Gateway) -> Vec<Health> {
    let mut found = Vec::new();
    let mut by_id = Vec::new();
    for (endpoint, subject) in gateway.endpoints().iter().enumerate() {
        let deadline = Instant::now() + MEMBER_MAX;
        let status = gateway.call_one(endpoint, "maintenance/status", &json!({}), deadline);
        let problem = match status {
            Ok(status) => {
                by_id.push((Status::id(&status), subject.clone()));
                status.problem()
            }
            Err(failure) => Some(match gateway.unexpected(failure) {
                StoreError::Unreachable { why, .. } => {
                    format!("{why}; start this member, or replace it in etcd and in the URI")
                }
                error => error.to_string(),
            }),
        };
        found.push(Health { subject: subject.clone(), problem });
    }
    if by_id.is_empty() {
        return found;
    }
    let name = |id: u64| {
        let known = by_id.iter().find(|(known, _)| *known == id);
        known.map_or_else(|| format!("member {id:x}"), |(_, subject)| subject.clone())
    };
    match gateway.call("maintenance/alarm", &json!({ "action": "GET" }), Repeat::Harmless) {
        Ok(Alarms { alarms }) => {
            found.extend(alarms.iter().map(|alarm| Health {
                subject: name(alarm.member),
                problem: Some(alarm.problem()),
            }))
        }
        Err(failure) => found.push(Health {
            subject: "the alarms".to_owned(),
            problem: Some(gateway.unexpected(failure).to_string()),
        }),
    }
    found.extend(unlisted(gateway, &by_id));
    found
}

/// The members that the URI leaves out. It is not known which they are while one does not answer.
fn unlisted(gateway: &Gateway, by_id: &[(u64, String)]) -> Vec<Health> {
    if by_id.len() < gateway.endpoints().len() {
        return Vec::new();
    }
    let body = json!({});
    let Ok(Members { members, .. }) = gateway.call("cluster/member/list", &body, Repeat::Harmless)
    else {
        return Vec::new();
    };
    let is_left_out = |id: u64| !by_id.iter().any(|(known, _)| *known == id);
    let left_out = members.into_iter().filter(|member| is_left_out(member.id));
    let problem = "the URI leaves this member of etcd out; add its HOST:PORT, so that the records \
        can be reached without the others";
    left_out
        .map(|member| Health { subject: member.name, problem: Some(problem.to_owned()) })
        .collect()
}

impl Status {
    fn id(&self) -> u64 {
        self.header.member_id
    }

    fn problem(&self) -> Option<String> {
        let mut parts = self.version.split('.').map(|part| part.parse::<u32>().ok());
        let version = (parts.next().flatten(), parts.next().flatten());
        if !matches!(version, (Some(3), Some(4..=6))) {
            let version = &self.version;
            return Some(format!("it has version {version:?}; use etcd 3.4, 3.5 or 3.6"));
        }
        let why = "it has no leader; start enough members that more than half of them run, and \
            check the network between them";
        (self.leader == 0).then(|| why.to_owned())
    }
}

impl Alarm {
    fn problem(&self) -> String {
        match self.alarm.as_str() {
            "NOSPACE" => format!("it has no space; {FREE_SPACE}"),
            "CORRUPT" => "its data is corrupt; remove this member from etcd, delete its data, and \
                add it again"
                .to_owned(),
            other => format!("it has the alarm {other:?}; see etcd's manual"),
        }
    }
}
