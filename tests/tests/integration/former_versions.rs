//! Proves that this version reads what former ones wrote, or refuses it and changes nothing.
//!
//! `tests/kept` has a region and a snapshot of each format that a release wrote, all with the same
//! keys. With `FARSIDE_UPDATE=1` the test adds those of the present formats, if they are missing.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use farside::{Session, Store, Ttl};
use farside_layout::FORMAT_VERSION;
use farside_tests::ServerProcess;
use farside_tests::command::{CommandOutput, command};

/// The number of short values. They make the index split.
const SHORT_VALUES: usize = 600;
/// A value in a block of its own.
const LONG_BYTES: usize = 5000;
/// Longer than any test runs: 8000 years.
const TTL: Duration = Duration::from_secs(8000 * 365 * 24 * 60 * 60);

fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kept").join(name)
}

/// The kept files whose names begin so, with the version that the name ends with.
fn kept_versions(kind: &str) -> Vec<(u32, PathBuf)> {
    static KEPT: Once = Once::new();
    if std::env::var_os("FARSIDE_UPDATE").is_some() {
        KEPT.call_once(keep_missing);
    }
    let files = std::fs::read_dir(kept("")).unwrap().map(|entry| entry.unwrap().path());
    let version = |path: &Path| path.file_stem()?.to_str()?.strip_prefix(kind)?.parse().ok();
    let mut found: Vec<_> = files.filter_map(|path| Some((version(&path)?, path))).collect();
    found.sort();
    assert!(!found.is_empty(), "tests/kept has no {kind}*");
    found
}

fn store_all(session: &mut Session) {
    for number in 0..SHORT_VALUES {
        session.put(format!("key {number}"), format!("value {number}")).unwrap();
    }
    session.put("long", [b'x'; LONG_BYTES]).unwrap();
    session.put("empty", "").unwrap();
    session.put_with_ttl("expires", "late", TTL).unwrap();
    session.store("pinned", "stays", Store::always().pinned()).unwrap();
}

fn check_all(session: &mut Session) {
    for number in 0..SHORT_VALUES {
        let value = session.get(format!("key {number}")).unwrap().unwrap();
        assert_eq!(value, *format!("value {number}"));
    }
    assert_eq!(session.get("long").unwrap().unwrap().data, [b'x'; LONG_BYTES]);
    assert_eq!(session.get("empty").unwrap().unwrap(), "");
    assert_eq!(session.get("expires").unwrap().unwrap(), "late");
    let ttl = session.ttl("expires").unwrap();
    assert!(matches!(ttl, Some(Ttl::For(left)) if left > TTL / 2), "{ttl:?}");
    assert_eq!(session.get("pinned").unwrap().unwrap(), "stays");
    assert_eq!(session.scan().unwrap().count(), SHORT_VALUES + 4);
}

/// Writes the files of the present formats that are not there.
fn keep_missing() {
    let mut server = ServerProcess::start_with_file("--memory 8MiB");
    store_all(&mut server.client().session().unwrap());
    let snapshot = server.folder().join("snapshot");
    server.cli(&["snapshot", snapshot.to_str().unwrap()]).succeeded();
    let snapshot = std::fs::read(snapshot).unwrap();
    let version = u32::from_le_bytes(snapshot[8..12].try_into().unwrap());
    server.terminate();
    let region = std::fs::read(server.region_file()).unwrap();
    for (name, bytes) in [
        (format!("region-{FORMAT_VERSION}.zst"), zstd::encode_all(&region[..], 19).unwrap()),
        (format!("snapshot-{version}.snap"), snapshot),
    ] {
        if !kept(&name).exists() {
            std::fs::write(kept(&name), bytes).unwrap();
        }
    }
}

#[on(each, rdma_in_soak)]
fn regions_of_former_versions_are_served_or_refused() {
    let kept = kept_versions("region-");
    let is_present = |(version, _): &(u32, PathBuf)| *version == FORMAT_VERSION;
    assert!(kept.iter().any(is_present) && !kept.iter().all(is_present), "{kept:?}");
    for (version, path) in kept {
        let bytes = zstd::decode_all(&std::fs::read(path).unwrap()[..]).unwrap();
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = folder.path().join("region");
        std::fs::write(&file, &bytes).unwrap();
        let arguments = format!("--region-file {}", file.display());
        if version == FORMAT_VERSION {
            let server = ServerProcess::spawn_in(folder.path(), &arguments, |command| command);
            server.wait_for_log("serving");
            let mut session = server.client().session().unwrap();
            check_all(&mut session);
            // The region still takes changes, and its index still grows.
            for number in 0..SHORT_VALUES {
                assert!(session.delete(format!("key {number}")).unwrap());
                session.put(format!("new {number}"), "value").unwrap();
                session.put(format!("other {number}"), "value").unwrap();
            }
            assert_eq!(session.scan().unwrap().count(), 2 * SHORT_VALUES + 4);
            continue;
        }
        let mut server = command("kv-server");
        let address = format!("shm://{}/kv.sock", folder.path().display());
        server.args(["--listen", &address, "--region-file"]).arg(&file);
        let refused = CommandOutput::of(&mut server);
        refused.expect_line(1, &[&format!("has format version {version}"), "snapshot"]);
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
    }
}

#[on(each, rdma_in_soak)]
fn snapshots_of_former_versions_are_restored() {
    for (version, path) in kept_versions("snapshot-") {
        let server = ServerProcess::start(&format!("--memory 16MiB --restore {}", path.display()));
        check_all(&mut server.client().session().unwrap());
        println!("restored a snapshot of format {version}");
    }
}
