//! A real etcd with users: tokens end, users change, and not every user may do everything.

use std::thread;
use std::time::Duration;

use data_encoding::BASE64;
use farside_cluster::{Commit, RecordStore, StoreError, StoreOptions};
use farside_control::Secret;
use serde_json::json;

use crate::etcd_process::{Etcd, is_left_out, until};
use crate::server;

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
