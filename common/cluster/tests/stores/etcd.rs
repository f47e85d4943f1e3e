//! Records in a real etcd of one member: the promises, many records, compaction, leases, TLS and
//! the state that `health` reports. With users: tokens end, users change, and not every user may do
//! everything. With three members, of which some are frozen or killed. A frozen process accepts
//! connections and answers nothing, so only a deadline finds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use farside_cluster::{Change, Commit, RecordStore, ShardRecord, StoreError, StoreOptions, open};
use farside_control::Secret;
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

fn as_user(user: &str, password: &str) -> StoreOptions {
    let (user, password) = (Some(user.to_owned()), Some(Secret(password.to_owned())));
    StoreOptions { user, password, ..StoreOptions::default() }
}

/// Makes the user root, and one that may use the records of the tests' cluster only.
fn make_users(etcd: &Etcd) {
    let base64 = |text: &str| BASE64.encode(text.as_bytes());
    for (user, password) in [("root", "r"), ("farside", "f"), ("other", "o")] {
        etcd.request("auth/user/add", &json!({ "name": user, "password": password }));
    }
    for role in ["root", "records"] {
        etcd.request("auth/role/add", &json!({ "name": role }));
    }
    let range = json!({
        "permType": "READWRITE",
        "key": base64("/farside/test-1/"),
        "range_end": base64("/farside/test-10"),
    });
    etcd.request("auth/role/grant", &json!({ "name": "records", "perm": range }));
    etcd.request("auth/user/grant", &json!({ "user": "root", "role": "root" }));
    etcd.request("auth/user/grant", &json!({ "user": "farside", "role": "records" }));
}

/// Calls again while etcd is not reached: to check a password may take longer than a call.
fn reached<T>(mut call: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    until("etcd is not reached", || match call() {
        Err(StoreError::Unreachable { .. }) => None,
        result => Some(result),
    })
}

fn check_denied<T>(call: impl FnMut() -> Result<T, StoreError>) {
    let error = reached(call).err().expect("etcd refuses it");
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
}

/// Does one of everything.
fn use_all(store: &dyn RecordStore, value: &str) {
    let stored = reached(|| {
        let revision = store.read()?.by_key.get("a").map(|found| found.revision);
        let change = ("a".to_owned(), Some(value.as_bytes().to_vec()));
        store.commit(&[("a".to_owned(), revision)], &[change])
    });
    assert_eq!(stored.unwrap(), Commit::Done);
    let revision = reached(|| store.read()).unwrap().revision;
    reached(|| store.wait_for_change(revision - 1, Duration::from_secs(5))).unwrap();
    reached(|| store.announce(&server(1))?.keep_alive()).unwrap();
}

#[test]
fn users_log_in_and_again_when_tokens_end() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(1, &["--auth-token", "simple", "--auth-token-ttl", "1"]);
    make_users(&etcd);
    // Until etcd checks users, a user is no error.
    let store = etcd.store_at(&[0], &as_user("farside", "f"));
    use_all(&*store, "1");
    etcd.request("auth/enable", &json!({}));
    use_all(&*store, "2");
    check_denied(|| etcd.store().read());
    check_denied(|| etcd.store_at(&[0], &as_user("farside", "wrong")).read());
    let other = etcd.store_at(&[0], &as_user("other", "o"));
    check_denied(|| other.read());
    check_denied(|| other.commit(&[], &[("a".to_owned(), None)]));
    assert!(other.wait_for_change(1, Duration::from_secs(5)).is_err());
    // A token ends within about two seconds. Each of these is the first to notice it.
    let mut announcement = reached(|| store.announce(&server(2))).unwrap();
    let end_token = || thread::sleep(Duration::from_millis(2500));
    end_token();
    reached(|| announcement.keep_alive()).unwrap();
    end_token();
    let revision = reached(|| store.read()).unwrap().revision;
    end_token();
    reached(|| store.wait_for_change(revision - 1, Duration::from_secs(5))).unwrap();
    end_token();
    use_all(&*store, "3");
}

#[test]
fn a_token_of_before_a_change_of_users_is_replaced() {
    if is_left_out() {
        return;
    }
    let mut etcd = Etcd::start(1, &["--auth-token", "simple"]);
    make_users(&etcd);
    let store = etcd.store_at(&[0], &as_user("farside", "f"));
    let root = etcd.store_at(&[0], &as_user("root", "r"));
    etcd.request("auth/enable", &json!({}));
    use_all(&*store, "1");
    use_all(&*root, "2");
    // Every change of users makes the revision of the older tokens too old.
    let login = etcd.request("auth/authenticate", &json!({ "name": "root", "password": "r" }));
    let token = login["token"].as_str();
    let body = json!({ "name": "new", "password": "n" });
    etcd.request_with("auth/user/add", &body, token);
    use_all(&*store, "3");
    // A member that starts again knows no simple token.
    etcd.kill(0);
    etcd.restart(0);
    until("etcd does not come back", || store.read().ok());
    use_all(&*store, "4");
}

/// More than the deadline of any call, for a machine that is busy.
const CALL_MAX: Duration = Duration::from_secs(60);

/// Calls, and checks that it ended by its deadline.
fn bounded<T>(call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = call();
    assert!(begun.elapsed() < CALL_MAX, "a call took {:?}", begun.elapsed());
    result
}

/// Counts in a record, as servers change theirs: by what it read, and once more after a commit
/// with an unknown outcome. Returns the number.
fn count_on(store: &dyn RecordStore) -> u64 {
    until("no commit succeeds", || {
        let records = bounded(|| store.read()).ok()?;
        let found = records.by_key.get("count");
        let number: u64 =
            found.map_or(0, |found| std::str::from_utf8(&found.value).unwrap().parse().unwrap());
        let condition = ("count".to_owned(), found.map(|found| found.revision));
        let change = ("count".to_owned(), Some((number + 1).to_string().into_bytes()));
        match bounded(|| store.commit(&[condition], &[change])) {
            Ok(Commit::Done) => Some(number + 1),
            Ok(Commit::Refused) | Err(StoreError::Unreachable { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    })
}

#[test]
fn one_frozen_member_of_three_is_passed_over() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let mut announcement = store.announce(&server(1)).unwrap();
    let mut last = 0;
    for frozen in 0..3 {
        // A watch on the frozen member ends by its timeout. The others may tell it of a change.
        let revision = store.read().unwrap().revision;
        let watcher = etcd.store_at(&[frozen], &StoreOptions::default());
        watcher.read().unwrap();
        thread::scope(|scope| {
            let wait = || watcher.wait_for_change(revision, Duration::from_secs(3));
            let watching = scope.spawn(move || bounded(wait));
            thread::sleep(Duration::from_millis(200));
            etcd.freeze(frozen);
            for _ in 0..3 {
                let number = count_on(&*store);
                assert!(number > last);
                last = number;
            }
            watching.join().unwrap().unwrap();
        });
        // This one has no other member.
        assert!(matches!(bounded(|| watcher.read()), Err(StoreError::Unreachable { .. })));
        assert!(watcher.commit(&[], &[("x".to_owned(), None)]).is_err());
        // A watch begins at another member, and sees a change.
        let revision = until("no read", || store.read().ok()).revision;
        count_on(&*store);
        bounded(|| store.wait_for_change(revision, LONG)).unwrap();
        until("the announcement is not kept alive", || bounded(|| announcement.keep_alive()).ok());
        let found = problems(&*store);
        assert!(found.iter().any(|problem| problem.contains("start this member")), "{found:?}");
        etcd.thaw(frozen);
        until("the member does not come back", || watcher.read().ok());
    }
    until("a problem remains", || problems(&*store).is_empty().then_some(()));
    assert_eq!(store.read().unwrap().servers().count(), 1);
}

#[test]
fn each_member_of_three_is_killed_while_records_change() {
    if is_left_out() {
        return;
    }
    let mut etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let is_over = Arc::new(AtomicBool::new(false));
    let counting = thread::spawn({
        let (store, is_over) = (Arc::clone(&store), Arc::clone(&is_over));
        move || {
            let mut last = 0;
            while !is_over.load(Ordering::Relaxed) {
                let number = count_on(&*store);
                assert!(number > last, "a commit was lost: {number} after {last}");
                last = number;
            }
            last
        }
    });
    let reader = etcd.store();
    let number = || {
        let found = reader.read().ok().and_then(|records| {
            let value = &records.by_key.get("count")?.value;
            std::str::from_utf8(value).unwrap().parse::<u64>().ok()
        });
        found.unwrap_or(0)
    };
    for killed in 0..3 {
        etcd.kill(killed);
        let before = until("no reads", || Some(number()).filter(|number| *number > 0));
        until("no progress without a member", || (number() > before + 5).then_some(()));
        etcd.restart(killed);
        let own = etcd.store_at(&[killed], &StoreOptions::default());
        until("the member does not come back", || own.read().ok());
    }
    is_over.store(true, Ordering::Relaxed);
    let last = counting.join().unwrap();
    assert_eq!(get(&*store, "count").unwrap().0, last.to_string());
}

#[test]
fn no_commit_is_lost_when_the_leader_changes() {
    if is_left_out() {
        return;
    }
    let etcd = Etcd::start(3, &[]);
    let store = etcd.store();
    let mut last = 0;
    for _ in 0..6 {
        let leader = until("no leader", || etcd.leader());
        let next = (leader + 1) % 3;
        until("the leader does not change", || etcd.move_leader(next).then_some(()));
        let number = count_on(&*store);
        assert!(number > last, "a commit was lost: {number} after {last}");
        last = number;
        until("the change is not seen", || (etcd.leader() == Some(next)).then_some(()));
    }
}

#[test]
fn a_cluster_without_a_majority_is_reported() {
    if is_left_out() {
        return;
    }
    let mut etcd = Etcd::start(3, &[]);
    let only_first = etcd.store_at(&[0], &StoreOptions::default());
    let found = problems(&*only_first);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|problem| problem.contains("add its HOST:PORT")));
    let store = etcd.store();
    count_on(&*store);
    etcd.kill(1);
    etcd.kill(2);
    // No read is answered from what the rest has: that could be old.
    until("a read is not linearizable", || bounded(|| store.read()).err());
    let condition = ("count".to_owned(), None);
    assert!(bounded(|| store.commit(&[condition], &[])).is_err());
    until("the missing leader is not reported", || {
        problems(&*store).iter().any(|problem| problem.contains("no leader")).then_some(())
    });
    // With all members gone, the check still answers.
    etcd.kill(0);
    assert_eq!(bounded(|| problems(&*store)).len(), 3);
    for member in 0..3 {
        etcd.restart(member);
    }
    until("the cluster does not come back", || store.read().ok());
}
