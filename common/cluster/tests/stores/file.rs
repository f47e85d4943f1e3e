//! The folder of records: processes that are killed, damaged files, folders that it refuses.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use farside_cluster::{Commit, RecordStore, StoreError, StoreOptions, open};
use tempfile::TempDir;

use crate::contract::{self, LONG, get, put};
use crate::server;

fn store(folder: &Path) -> Arc<dyn RecordStore> {
    try_open(folder).unwrap()
}

fn try_open(folder: &Path) -> Result<Arc<dyn RecordStore>, StoreError> {
    open(&format!("file://{}", folder.display()), &StoreOptions::default())
}

/// The message of the error that opening this URI fails with.
fn refusal(uri: &str) -> String {
    open(uri, &StoreOptions::default()).err().expect("it is refused").to_string()
}

#[test]
fn a_folder_keeps_the_promises() {
    let parent = TempDir::new().unwrap();
    contract::check_all(&*store(&parent.path().join("records")));
}

#[test]
fn reading_makes_no_folder() {
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("records");
    let store = store(&folder);
    assert_eq!(store.read().unwrap().revision, 0);
    assert!(store.health().unwrap()[0].problem.is_some());
    assert!(!folder.exists());
    put(&*store, "a", None, "1");
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o7777, 0o700);
}

#[test]
fn unusable_folders_are_refused() {
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("records");
    assert!(refusal("file://records").contains("not absolute"));
    assert!(refusal("file:///").contains("a folder of its own"));
    assert!(refusal("records").contains("scheme"));
    let missing = format!("file://{}", parent.path().join("missing/records").display());
    assert!(refusal(&missing).contains("does not exist"));
    fs::create_dir(&folder).unwrap();
    for mode in [0o777, 0o770, 0o702] {
        fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
        let error = try_open(&folder).err().unwrap().to_string();
        assert!(error.contains("chmod go-w"), "{error}");
    }
    // A folder that is opened to others later is refused, too.
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    let store = store(&folder);
    put(&*store, "a", None, "1");
    fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
    assert!(store.read().is_err() && store.commit(&[], &[]).is_err());
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, b"a file").unwrap();
    assert!(try_open(&folder).err().unwrap().to_string().contains("not a folder"));
}

/// As root, in a folder of another user, who could replace each entry at any moment.
#[test]
fn what_belongs_to_other_users_is_refused_and_not_touched() {
    const OTHER: u32 = 54321;
    let parent = TempDir::new().unwrap();
    let at = |name: &str| parent.path().join(name);
    if lchown(parent.path(), Some(OTHER), None).is_err() {
        return;
    }
    fs::create_dir(at("victim")).unwrap();
    symlink(at("victim"), at("records")).unwrap();
    lchown(at("records"), Some(OTHER), None).unwrap();
    let error = try_open(&at("records")).err().unwrap().to_string();
    assert!(error.contains("the link records on its path belongs to another user"), "{error}");
    fs::create_dir(at("foreign")).unwrap();
    lchown(at("foreign"), Some(OTHER), None).unwrap();
    let error = try_open(&at("foreign")).err().unwrap().to_string();
    assert!(error.contains("belongs to another user (54321)"), "{error}");
    // The folder becomes a link after the store was opened.
    let store = store(&at("own"));
    fs::remove_file(at("records")).unwrap();
    symlink(at("victim"), at("own")).unwrap();
    lchown(at("own"), Some(OTHER), None).unwrap();
    let change = [("a".to_owned(), Some(b"1".to_vec()))];
    assert!(store.commit(&[], &change).is_err() && store.read().is_err());
    assert_eq!(fs::read_dir(at("victim")).unwrap().count(), 0);
}

/// An entry that is no file makes no operation wait, and links in the folder are not followed.
#[test]
fn pipes_and_links_in_the_folder_are_errors() {
    let folder = TempDir::new().unwrap();
    let store = store(folder.path());
    put(&*store, "a", None, "1");
    let victim = folder.path().join("victim");
    fs::write(&victim, "content").unwrap();
    for name in ["records.json", "lock", "records.json.new"] {
        let path = folder.path().join(name);
        let before = fs::read(&path).ok();
        let _ = fs::remove_file(&path);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let change = [("a".to_owned(), Some(b"2".to_vec()))];
        assert!(store.commit(&[], &change).is_err(), "{name}");
        fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
        assert!(store.commit(&[], &change).is_err(), "{name}");
        assert_eq!(fs::read(&victim).unwrap(), b"content");
        fs::remove_file(&path).unwrap();
        if let Some(bytes) = before {
            fs::write(&path, bytes).unwrap();
        }
    }
    assert_eq!(get(&*store, "a").unwrap().0, "1");
}

#[test]
fn damaged_records_are_an_error() {
    let folder = TempDir::new().unwrap();
    let store = store(folder.path());
    put(&*store, "a", None, "1");
    let path = folder.path().join("records.json");
    let whole = fs::read_to_string(&path).unwrap();
    let newer = whole.replace("\"version\":1", "\"version\":2");
    for damaged in [&whole[..whole.len() - 1], "", "[]", &newer] {
        fs::write(&path, damaged).unwrap();
        let error = store.read().unwrap_err().to_string();
        assert!(error.contains("restore it from a backup"), "{error}");
        assert!(store.commit(&[], &[("a".to_owned(), None)]).is_err());
        assert!(store.health().unwrap()[0].problem.is_some());
    }
    fs::write(&path, whole).unwrap();
    assert_eq!(get(&*store, "a").unwrap().0, "1");
}

#[test]
fn a_dropped_announcement_disappears() {
    let folder = TempDir::new().unwrap();
    let store = store(folder.path());
    let first = store.announce(&server(1)).unwrap();
    let _second = store.announce(&server(2)).unwrap();
    assert!(store.announce(&server(1)).is_err());
    let revision = store.read().unwrap().revision;
    drop(first);
    let records = store.read().unwrap();
    assert_eq!(records.servers().map(Result::unwrap).collect::<Vec<_>>(), [server(2)]);
    assert!(records.revision > revision);
    assert_eq!(store.read().unwrap(), records);
}

#[test]
fn a_removed_announcement_comes_back() {
    let folder = TempDir::new().unwrap();
    let store = store(folder.path());
    let mut announcement = store.announce(&server(1)).unwrap();
    let path = folder.path().join("servers").join(server(1).server.to_string());
    for _ in 0..2 {
        assert_eq!(store.commit(&[], &[(server(1).key(), None)]).unwrap(), Commit::Done);
        assert_eq!(store.read().unwrap().servers().count(), 0);
        announcement.keep_alive().unwrap();
        assert_eq!(store.read().unwrap().servers().count(), 1);
        fs::remove_file(&path).unwrap();
        assert_eq!(store.read().unwrap().servers().count(), 0);
        announcement.keep_alive().unwrap();
        assert_eq!(store.read().unwrap().servers().count(), 1);
    }
}

/// The folder of the process that is killed.
const FOLDER: &str = "FARSIDE_TEST_FOLDER";

/// Changes two records until it is killed, or for a while. Does nothing without a folder.
#[test]
fn child_changes_two_records() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let store = store(Path::new(&folder));
    let _announcement = store.announce(&server(3)).unwrap();
    let begun = Instant::now();
    for number in (0_u32..).take_while(|_| begun.elapsed() < LONG) {
        let change = |key: &str| (key.to_owned(), Some(number.to_string().into_bytes()));
        store.commit(&[], &[change("a"), change("b")]).unwrap();
    }
}

#[test]
fn a_killed_process_leaves_whole_changes_and_no_announcement() {
    let folder = TempDir::new().unwrap();
    let store = store(folder.path());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "file::child_changes_two_records"])
        .env(FOLDER, folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let is_whole = || {
        let records = store.read().unwrap();
        let value = |key| records.by_key.get(key).map(|found| &found.value);
        assert_eq!(value("a"), value("b"));
        value("a").is_some()
    };
    let deadline = Instant::now() + LONG;
    let mut reads = 0;
    while reads < 200 {
        reads += usize::from(is_whole());
        assert!(Instant::now() < deadline, "the child did not change records");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_whole());
    assert_eq!(store.read().unwrap().servers().count(), 0);
    // The next change does not mind what the killed process left.
    store.commit(&[], &[("a".to_owned(), None)]).unwrap();
}
