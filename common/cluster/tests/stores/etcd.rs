//! Records in a real etcd of one member: the promises, many records, compaction, leases, TLS and
//! the state that `health` reports.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use data_encoding::BASE64;
use farside_cluster::{Change, Commit, RecordStore, ShardRecord, StoreError, StoreOptions, open};
use farside_fabric::tcp::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;

use crate::contract::{self, LONG, get, put};
use crate::etcd_process::{Etcd, is_left_out, until};
use crate::server;

/// The problems that the store reports.
pub(crate) fn problems(store: &dyn RecordStore) -> Vec<String> {
    let health = store.health().unwrap();
    health.into_iter().filter_map(|found| found.problem).collect()
}

fn change(key: &str, value: &str) -> Change {
    (key.to_owned(), Some(value.as_bytes().to_vec()))
}

#[test]
fn etcd_keeps_the_promises() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &[]);
    let store = etcd.store();
    contract::check_all(&*store);
    // Another cluster of the same etcd has records of its own, even if its name begins alike.
    for name in ["test", "test-10"] {
        let uri = format!("etcd://{}/{name}", etcd.host(0));
        let other = open(&uri, &StoreOptions::default()).unwrap();
        assert!(other.read().unwrap().by_key.is_empty());
        assert_eq!(put(&*other, "a", None, "other"), Commit::Done);
    }
    assert_ne!(get(&*store, "a").unwrap().0, "other");
}

#[test]
fn the_greatest_cluster_is_one_commit_and_many_records_are_one_read() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &[]);
    let store = etcd.store();
    let shards = (0..128).map(|shard| ShardRecord::default().change(shard));
    let changes: Vec<_> = shards.chain([change("cluster", "1")]).collect();
    let conditions = [("cluster".to_owned(), None)];
    assert_eq!(store.commit(&conditions, &changes).unwrap(), Commit::Done);
    assert_eq!(store.commit(&conditions, &changes).unwrap(), Commit::Refused);
    let records = store.read().unwrap();
    assert_eq!(records.by_key.len(), 129);
    assert!(records.by_key.values().all(|found| found.revision == records.revision));
    // More than two pages.
    for hundred in 0..21 {
        let key = |number| format!("more/{}", hundred * 100 + number);
        let changes: Vec<_> = (0..100).map(|number| change(&key(number), "x")).collect();
        assert_eq!(store.commit(&[], &changes).unwrap(), Commit::Done);
    }
    assert_eq!(store.read().unwrap().by_key.len(), 129 + 2100);
}

#[test]
fn compacted_changes_end_a_wait() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &[]);
    let store = etcd.store();
    let since = store.read().unwrap().revision;
    for _ in 0..3 {
        store.commit(&[], &[change("a", "1")]).unwrap();
    }
    let revision = store.read().unwrap().revision;
    etcd.request("kv/compaction", &json!({ "revision": revision.to_string() }));
    let waiting = thread::spawn({
        let store = Arc::clone(&store);
        move || store.wait_for_change(since, LONG).unwrap()
    });
    until("the wait goes on", || waiting.is_finished().then_some(()));
    waiting.join().unwrap();
}

#[test]
fn an_announcement_survives_its_lease_and_ends_without_it() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &[]);
    let store = etcd.store();
    let mut announcement = store.announce(&server(7)).unwrap();
    let count = || store.read().unwrap().servers().count();
    assert_eq!(count(), 1);
    let leases = || etcd.request("lease/leases", &json!({}))["leases"].clone();
    let lease = leases()[0]["ID"].clone();
    let state = etcd.request("lease/timetolive", &json!({ "ID": lease }));
    assert_eq!(state["grantedTTL"], "10");
    // Losing the lease removes the record, until the server keeps it alive again.
    for has_changed in [false, true] {
        let lease = leases()[0]["ID"].clone();
        etcd.request("lease/revoke", &json!({ "ID": lease }));
        assert_eq!(count(), 0);
        if has_changed {
            announcement.update(&server(7)).unwrap();
        } else {
            announcement.keep_alive().unwrap();
        }
        assert_eq!(count(), 1);
        assert_eq!(leases().as_array().unwrap().len(), 1);
    }
    // Without signs of life it ends after ten seconds. The wait sees it.
    drop(announcement);
    let revision = store.read().unwrap().revision;
    store.wait_for_change(revision, LONG).unwrap();
    assert_eq!(count(), 0);
}

#[test]
fn a_full_etcd_is_reported() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &["--quota-backend-bytes", "400000"]);
    let store = etcd.store();
    assert_eq!(problems(&*store), Vec::<String>::new());
    let big = "x".repeat(30_000);
    let error = until("etcd is not full", || store.commit(&[], &[change("a", &big)]).err());
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains("etcdctl alarm disarm"));
    let found = problems(&*store);
    assert!(found.iter().any(|problem| problem.contains("no space")), "{found:?}");
    // Reading still works.
    assert!(get(&*store, "a").is_some());
}

/// The files of a CA, and of a certificate for 127.0.0.1.
fn tls_files(folder: &std::path::Path, name: &str) -> TlsFiles {
    let mut params = CertificateParams::new([]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &ca).unwrap();
    let write = |suffix: &str, text: String| {
        let path = folder.join(format!("{name}-{suffix}.pem"));
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    TlsFiles {
        ca: write("ca", ca.pem()),
        certificate: write("certificate", certificate.pem()),
        key: write("key", key.serialize_pem()),
    }
}

#[test]
fn etcd_with_tls_wants_the_right_certificates() {
    if is_left_out() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (tls, other) = (tls_files(folder.path(), "own"), tls_files(folder.path(), "other"));
    let text = |path: &Option<std::path::PathBuf>| path.as_ref().unwrap().display().to_string();
    let arguments = [
        ["--cert-file", &text(&tls.certificate)],
        ["--key-file", &text(&tls.key)],
        ["--trusted-ca-file", &text(&tls.ca)],
    ];
    let etcd =
        Etcd::start_with(1, &[&arguments.concat()[..], &["--client-cert-auth"]].concat(), &tls);
    let with = |tls: &TlsFiles| StoreOptions { tls: tls.clone(), ..StoreOptions::default() };
    let store = etcd.store_at(&[0], &with(&tls));
    until("etcd does not serve", || store.read().ok());
    assert_eq!(put(&*store, "a", None, "1"), Commit::Done);
    store.wait_for_change(store.read().unwrap().revision, Duration::from_millis(50)).unwrap();
    assert!(store.announce(&server(1)).unwrap().keep_alive().is_ok());
    // No certificate, one of another CA, and a server that another CA has signed.
    let without = TlsFiles { ca: tls.ca.clone(), ..TlsFiles::default() };
    let foreign = TlsFiles { ca: tls.ca.clone(), ..other.clone() };
    let distrusting = TlsFiles { ca: other.ca.clone(), ..tls.clone() };
    for wrong in [&without, &foreign, &distrusting] {
        let error = etcd.store_at(&[0], &with(wrong)).read().unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    }
    // Files that cannot be used are an error before any request.
    let mixed = TlsFiles { key: other.key.clone(), ..tls.clone() };
    let without_ca = TlsFiles { ca: None, ..tls.clone() };
    let missing = TlsFiles { ca: Some(folder.path().join("missing.pem")), ..tls };
    for wrong in [&mixed, &without_ca, &missing] {
        let uri = format!("etcd://{}/test", etcd.host(0));
        assert!(matches!(open(&uri, &with(wrong)), Err(StoreError::Failed { .. })));
    }
}

#[test]
fn wrong_uris_are_refused() {
    let refused = |uri: &str| {
        let opened = open(uri, &StoreOptions::default());
        opened.err().unwrap_or_else(|| panic!("{uri} is accepted")).to_string()
    };
    let long = format!("etcd://h:2379/{}", "x".repeat(64));
    let wrong = [
        "etcd://h:2379",
        "etcd://h:2379/",
        "etcd://h:2379/Name",
        "etcd://h:2379/a/b",
        "etcd:///name",
        "etcd://h/name",
        "etcd://h:/name",
        "etcd://h:99999/name",
        "etcd://h:+1/name",
        "etcd://h:1,/name",
        "etcd://::1:2379/name",
        "etcd://h x:2379/name",
        "http://h:2379/name",
        &long,
    ];
    for uri in wrong {
        assert!(refused(uri).contains("names no cluster"), "{uri}");
    }
    let secret = refused("etcd://root:hush@h:2379/name");
    assert!(secret.contains("`password`") && !secret.contains("hush"), "{secret}");
    for uri in ["etcd://h:1,[::1]:2,10.0.0.1:3/a-1", &format!("etcd://h:1/{}", "x".repeat(63))] {
        assert!(open(uri, &StoreOptions::default()).is_ok(), "{uri}");
    }
    let half = StoreOptions { user: Some("root".into()), ..StoreOptions::default() };
    assert!(open("etcd://h:1/a", &half).is_err());
}

/// The watch of a test must not keep the keys of another prefix: the key in base64 is that of this.
#[test]
fn keys_are_below_the_prefix_of_the_cluster() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &[]);
    put(&*etcd.store(), "a", None, "1");
    let key = BASE64.encode(b"/farside/test-1/a");
    let found = etcd.request("kv/range", &json!({ "key": key }));
    assert_eq!(found["kvs"][0]["value"], BASE64.encode(b"1"));
}
