//! Proves that the server does not follow, wait for, or remove a file that another user put under a
//! name that the server chooses itself. A region must belong to the server's own user.
//!
//! Guards against links in a folder that all users can write to. Without the checks such a link
//! makes the server remove any file, or create one anywhere.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::process::Command;

use farside_tests::{OTHER_USER, left_out_without_root};

use super::*;

/// A description, and the function that makes such a file under a name.
type Trap = (&'static str, fn(&std::path::Path));

const TRAPS: [Trap; 4] = [
    ("a link to a file", |path| {
        let victim = path.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(victim, path).unwrap();
    }),
    ("a link to nothing", |path| symlink(path.with_file_name("nothing"), path).unwrap()),
    ("a pipe", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
    ("a second name of a file", |path| {
        let victim = path.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        fs::hard_link(victim, path).unwrap();
    }),
];

/// Starts the server where a trap has this name; returns the line of the server's error.
fn start_in_trap(name: &str, (what, make): Trap) -> String {
    let folder = TestFolder::with_file();
    let path = folder.dir.path().join(name);
    make(&path);
    let before = fs::symlink_metadata(&path).unwrap();
    let line = folder.start_error();
    let after = fs::symlink_metadata(&path).unwrap();
    assert_eq!((before.ino(), before.len()), (after.ino(), after.len()), "{what}: {line}");
    assert!(!folder.dir.path().join("nothing").exists(), "{what}: {line}");
    if let Ok(victim) = fs::read(folder.dir.path().join("victim")) {
        assert_eq!(victim, b"precious", "{what}: {line}");
    }
    assert!(!folder.region_file().exists() && !folder.socket().exists(), "{what}: {line}");
    line
}

#[test]
fn a_trap_under_the_name_of_an_unfinished_region_is_left_alone() {
    for trap in TRAPS {
        let line = start_in_trap("region.restoring", trap);
        assert!(line.contains("region.restoring is no regular file of this user"), "{line}");
    }
}

#[test]
fn a_trap_under_the_name_of_a_lock_is_left_alone() {
    for trap in TRAPS {
        let line = start_in_trap("kv.sock.lock", trap);
        assert!(line.contains("kv.sock.lock") && line.contains("remove it"), "{line}");
    }
}

#[test]
fn files_of_another_user_are_refused_even_by_root() {
    if left_out_without_root("it changes the owners of files") {
        return;
    }
    let folder = TestFolder::with_file();
    folder.start().stop();
    let set_owner = |name: &str, user: u32| {
        chown(folder.dir.path().join(name), Some(user), None).unwrap();
    };
    set_owner("region", OTHER_USER);
    let line = folder.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
    set_owner("region", 0);
    set_owner("kv.sock.lock", OTHER_USER);
    let line = folder.start_error();
    assert!(line.contains("kv.sock.lock: it belongs to user 54321"), "{line}");
    set_owner("kv.sock.lock", 0);
    folder.start().stop();
    // Another user can point their link at any file.
    let region = folder.region_file();
    let elsewhere = folder.dir.path().join("elsewhere");
    fs::rename(&region, &elsewhere).unwrap();
    symlink(&elsewhere, &region).unwrap();
    folder.start().stop();
    std::os::unix::fs::lchown(&region, Some(OTHER_USER), None).unwrap();
    let line = folder.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
}

#[test]
fn an_empty_file_where_a_region_was_is_refused() {
    let folder = TestFolder::with_file();
    folder.start().stop();
    fs::OpenOptions::new().write(true).open(folder.region_file()).unwrap().set_len(0).unwrap();
    let line = folder.start_error();
    assert!(line.contains("is empty: a region was there") && line.contains("remove"), "{line}");
    assert_eq!(fs::metadata(folder.region_file()).unwrap().len(), 0);
    fs::remove_file(folder.region_file()).unwrap();
    folder.start().stop();
}

#[test]
fn a_start_removes_the_unfinished_region_of_a_killed_server() {
    let folder = TestFolder::with_file();
    let unfinished = folder.dir.path().join("region.restoring");
    fs::write(&unfinished, b"half").unwrap();
    folder.start().stop();
    assert!(!unfinished.exists() && folder.region_file().exists());
}
