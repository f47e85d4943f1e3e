//! That the server neither follows, nor waits for, nor removes what another user put under a name
//! that the server invents. And that a region belongs to the server's own user.
//!
//! Guards against links in a folder that all users can write to: one removed any file, another made
//! one anywhere.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::process::Command;

use super::*;

const OTHER_USER: u32 = 65_534;

/// Whether this process may give files away; says what is left out if not.
#[allow(clippy::print_stderr, reason = "a test that leaves something out says so")]
fn can_give_away(what: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("left out, because only root can give a file away: {what}");
    }
    is_root
}

/// What can stand under a name, made by the function.
type Trap = (&'static str, fn(&std::path::Path));

const TRAPS: [Trap; 4] = [
    ("a link to a file", |at| {
        let victim = at.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(victim, at).unwrap();
    }),
    ("a link to nothing", |at| symlink(at.with_file_name("nothing"), at).unwrap()),
    ("a pipe", |at| assert!(Command::new("mkfifo").arg(at).status().unwrap().success())),
    ("a second name of a file", |at| {
        let victim = at.with_file_name("victim");
        fs::write(&victim, "precious").unwrap();
        fs::hard_link(victim, at).unwrap();
    }),
];

/// Starts the server where something stands under this name; the line that it ends with.
fn start_in_trap(name: &str, (what, make): Trap) -> String {
    let place = Place::with_file();
    let at = place.folder.path().join(name);
    make(&at);
    let before = fs::symlink_metadata(&at).unwrap();
    let line = place.start_error();
    let after = fs::symlink_metadata(&at).unwrap();
    assert_eq!((before.ino(), before.len()), (after.ino(), after.len()), "{what}: {line}");
    assert!(!place.folder.path().join("nothing").exists(), "{what}: {line}");
    if let Ok(victim) = fs::read(place.folder.path().join("victim")) {
        assert_eq!(victim, b"precious", "{what}: {line}");
    }
    assert!(!place.region_file().exists() && !place.socket().exists(), "{what}: {line}");
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
fn what_belongs_to_another_user_is_not_used_by_root_either() {
    if !can_give_away("files of another user under the names of region and lock") {
        return;
    }
    let place = Place::with_file();
    place.start().stop();
    let give = |name: &str, to: u32| {
        chown(place.folder.path().join(name), Some(to), None).unwrap();
    };
    give("region", OTHER_USER);
    let line = place.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
    give("region", 0);
    give("kv.sock.lock", OTHER_USER);
    let line = place.start_error();
    assert!(line.contains("kv.sock.lock: it belongs to user 65534"), "{line}");
    give("kv.sock.lock", 0);
    place.start().stop();
    // A link that another user made leads where that user wants.
    let region = place.region_file();
    let elsewhere = place.folder.path().join("elsewhere");
    fs::rename(&region, &elsewhere).unwrap();
    symlink(&elsewhere, &region).unwrap();
    place.start().stop();
    std::os::unix::fs::lchown(&region, Some(OTHER_USER), None).unwrap();
    let line = place.start_error();
    assert!(line.contains("region belongs to another user"), "{line}");
}

#[test]
fn an_empty_file_where_a_region_was_is_refused() {
    let place = Place::with_file();
    place.start().stop();
    fs::OpenOptions::new().write(true).open(place.region_file()).unwrap().set_len(0).unwrap();
    let line = place.start_error();
    assert!(line.contains("is empty: a region was there") && line.contains("remove"), "{line}");
    assert_eq!(fs::metadata(place.region_file()).unwrap().len(), 0);
    fs::remove_file(place.region_file()).unwrap();
    place.start().stop();
}

#[test]
fn what_a_killed_server_had_not_completed_goes_with_the_next_start() {
    let place = Place::with_file();
    let unfinished = place.folder.path().join("region.restoring");
    fs::write(&unfinished, b"half").unwrap();
    place.start().stop();
    assert!(!unfinished.exists() && place.region_file().exists());
}
