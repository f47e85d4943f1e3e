//! Proves that a snapshot taken while clients write has, for every key, a value that the key had
//! meanwhile. It can be restored into a region of another size. Damaged files are refused in one
//! line. A restore, a snapshot and a dump leave no unfinished file if they get a signal, or if the
//! file would be longer than the system allows.
//!
//! This version reads what former ones wrote, or refuses it and changes nothing. `tests/kept` has a
//! region and a snapshot of each format that a release wrote, all with the same keys. With
//! `FARSIDE_UPDATE=1` the test adds those of the present formats, if they are missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use farside::{Session, Store, Ttl};
use farside_config::signals::is_ignored;
use farside_layout::{
    CHUNK_BYTES, FORMAT_VERSION, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SUBTABLE_BYTES, SlotState,
    SlotWord, Superblock, slot_in_subtable,
};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    ServerProcess, StopOnDrop, TEST_TIMEOUT, binary, fill, left_out, scaled, self_describing,
    send_signal, wait_until,
};
use rustix::process::Signal;

const WRITERS: u64 = 3;

fn snapshot(server: &ServerProcess, to: &Path) {
    server.cli(&["snapshot", to.to_str().unwrap()]).succeeded();
}

fn restored(snapshot: &Path, memory: &str) -> ServerProcess {
    ServerProcess::start(&format!("--memory {memory} --restore {}", snapshot.display()))
}

/// Writers number their values. Each key's number in the snapshot is at least the last acknowledged
/// one when the snapshot began, and at most the last begun one when it ended.
#[on(any)]
fn a_snapshot_under_load_has_a_value_that_each_key_had_meanwhile() {
    let keys = scaled(3000).max(100);
    let server = ServerProcess::start("--memory 64MiB");
    let total = (keys * WRITERS) as usize;
    let (begun, done): (Vec<_>, Vec<_>) =
        (0..total).map(|_| (AtomicU64::new(0), AtomicU64::new(0))).unzip();
    let load = |numbers: &[AtomicU64]| -> Vec<u64> {
        numbers.iter().map(|number| number.load(Ordering::SeqCst)).collect()
    };
    let file = server.folder().join("snapshot");
    let stop = AtomicBool::new(false);
    let client = server.client();
    let (before, after) = std::thread::scope(|scope| {
        let _stops = StopOnDrop(&stop);
        for writer in 0..WRITERS {
            let (client, begun, done, stop) = (client.clone(), &begun, &done, &stop);
            scope.spawn(move || {
                let mut session = client.session().unwrap();
                for round in 1u64.. {
                    for key in writer * keys..(writer + 1) * keys {
                        if stop.load(Ordering::Relaxed) && round > 1 {
                            return;
                        }
                        let bytes = 24 + (key % 50) as usize * 10;
                        begun[key as usize].store(round, Ordering::SeqCst);
                        let value = self_describing::value(key, writer, round, bytes);
                        // Some keys are deleted and inserted again, in another slot.
                        if round % 4 == 3 && key % 5 == 0 {
                            session.delete(key.to_le_bytes()).unwrap();
                        } else {
                            session.put(key.to_le_bytes(), &value).unwrap();
                        }
                        done[key as usize].store(round, Ordering::SeqCst);
                    }
                }
            });
        }
        let all_stored = || load(&done).iter().all(|number| *number > 0);
        wait_until("every writer stores", Duration::from_secs(300), all_stored);
        let before = load(&done);
        snapshot(&server, &file);
        let after = load(&begun);
        stop.store(true, Ordering::Relaxed);
        (before, after)
    });
    for memory in ["32MiB", "200MiB"] {
        let other = restored(&file, memory);
        other.assert_verifies();
        let mut session = other.session();
        for key in 0..total as u64 {
            let possible = before[key as usize]..=after[key as usize];
            let value = session.get(key.to_le_bytes()).unwrap();
            let is_removal = |round: u64| round % 4 == 3 && key % 5 == 0;
            match value.map(|value| self_describing::count_in(key, &value)) {
                Some(number) => {
                    let number = number.expect("a value that was not written");
                    let right = possible.contains(&number) && !is_removal(number);
                    assert!(right, "key {key} has {number}, not one of {possible:?}");
                }
                // A scan may miss a key that is deleted and inserted again.
                None => assert!(key % 5 == 0, "key {key} is missing"),
            }
        }
    }
}

#[on(any)]
fn a_restore_keeps_expiry_times_binary_keys_and_large_values() {
    let server = ServerProcess::start("--memory 64MiB");
    let mut session = server.session();
    let every_byte: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..1 << 20).map(|n: u32| (n ^ (n >> 8)) as u8).collect();
    session.put(&every_byte, &large).unwrap();
    session.put(b"empty", b"").unwrap();
    let day = Duration::from_millis(86_400_001);
    let before = SystemTime::now() - Duration::from_millis(1);
    session.put_with_ttl(b"day", b"1", day).unwrap();
    let after = SystemTime::now();
    session.put_with_ttl(b"soon", b"2", Duration::from_secs(1)).unwrap();
    let ends = |session: &mut farside::Session| {
        let entries = session.scan().unwrap().map(Result::unwrap);
        let mut ends: Vec<_> = entries.map(|entry| (entry.key, entry.expires_at)).collect();
        ends.sort_unstable();
        ends
    };
    let file = server.folder().join("snapshot");
    snapshot(&server, &file);
    std::thread::sleep(Duration::from_secs(2));
    let other = restored(&file, "32MiB");
    let mut restored_session = other.session();
    assert_eq!(restored_session.get(b"soon").unwrap(), None);
    assert_eq!(restored_session.get(&every_byte).unwrap().unwrap().data, large);
    assert_eq!(restored_session.get(b"empty").unwrap().unwrap().data, b"");
    assert_eq!(ends(&mut restored_session), ends(&mut session));
    let end =
        ends(&mut restored_session).into_iter().find(|(key, _)| key == b"day").unwrap().1.unwrap();
    assert!((before + day..=after + day).contains(&end), "to the millisecond");
    assert!(restored_session.store(b"day", b"3", Store::if_value(b"1")).unwrap().applied);
    // An existing file is replaced only with --force, and then as a whole.
    let name = file.to_str().unwrap();
    assert_eq!(server.cli(&["snapshot", name]).code, Some(2));
    server.cli(&["snapshot", name, "--force"]).succeeded();
    let paths = std::fs::read_dir(server.folder()).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(paths.filter(|path| path.to_string_lossy().contains("snapshot")).count(), 1);
}

/// Starts a server in this folder that must refuse the snapshot.
fn restore(folder: &Path, snapshot: &Path, memory: &str) -> CommandOutput {
    let address = format!("shm://{}", folder.join("kv.sock").display());
    let mut server = command("kv-server");
    server.args(["--listen", &address, "--memory", memory]).arg("--region-file");
    CommandOutput::of(server.arg(folder.join("region")).arg("--restore").arg(snapshot))
}

fn assert_refused(folder: &Path, snapshot: &Path, memory: &str, why: &str) {
    let CommandOutput { code, stderr, .. } = restore(folder, snapshot, memory);
    let last = stderr.lines().last().unwrap_or_default();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(last.starts_with("kv-server: cannot restore ") && last.contains(why), "{stderr}");
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.filter(|name| name.contains("region")).collect();
    assert!(names.is_empty(), "files after a refusal: {names:?}");
}

#[on(any)]
fn a_damaged_snapshot_is_refused_and_leaves_no_region_file() {
    let server = ServerProcess::start("--memory 64MiB");
    let mut session = server.session();
    fill(&mut session, 0..5000, |key| self_describing::value(key, 0, 0, 1000));
    let file = server.folder().join("snapshot");
    snapshot(&server, &file);
    let whole = std::fs::read(&file).unwrap();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let other = server.folder().join("other");
    let refuses = |bytes: &[u8], why: &str| {
        std::fs::write(&other, bytes).unwrap();
        assert_refused(folder.path(), &other, "64MiB", why);
    };
    refuses(&whole[..whole.len() / 2], "it is truncated after");
    refuses(&whole[..whole.len() - 1], "it is truncated after 5000 records");
    for offset in [14, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[offset] ^= 1;
        refuses(&damaged, "it is corrupted");
    }
    refuses(b"{\"key\":\"a\"}\n", "it is no snapshot");
    assert_refused(folder.path(), &server.folder().join("missing"), "64MiB", "cannot be opened");
    assert_refused(folder.path(), &file, "8MiB", "start the server with more --memory");
    let region = folder.path().join("region");
    std::fs::write(&region, b"something").unwrap();
    let CommandOutput { code, stderr, .. } = restore(folder.path(), &file, "64MiB");
    assert!(code != Some(0) && stderr.contains("is there already"), "{stderr}");
    assert_eq!(std::fs::read(&region).unwrap(), b"something");
}

/// A value beyond the default limit is restored by a server that has no flag for it.
#[on(any)]
fn the_limits_of_a_region_are_restored_with_it() {
    let server =
        ServerProcess::start("--memory 32MiB --key-bytes-max 2000 --value-bytes-max 2000000");
    let mut session = server.session();
    let (key, value) = (vec![7; 2000], vec![8; 2_000_000]);
    session.put(&key, &value).unwrap();
    let file = server.folder().join("snapshot");
    snapshot(&server, &file);
    let other = restored(&file, "32MiB");
    let mut session = other.session();
    assert_eq!(session.get(&key).unwrap().unwrap().data, value);
    let limits = session.limits();
    assert_eq!((limits.key_bytes_max, limits.value_bytes_max), (2000, 2_000_000));
    // A flag overrides the snapshot.
    let arguments = format!("--restore {} --value-bytes-max 3000000", file.display());
    let wide = ServerProcess::start(&arguments);
    let limits = wide.client().session().unwrap().limits();
    assert_eq!((limits.key_bytes_max, limits.value_bytes_max), (2000, 3_000_000));
    // The log is that of one server, which restores and serves.
    let log = other.log();
    for line in ["restoring a snapshot", "restored the snapshot", " serving "] {
        assert_eq!(log.matches(line).count(), 1, "{line}: {log}");
    }
    for line in ["stopped", "continuing", "client=1 role=Writer\n", "a client left", "is for new"] {
        let before_serving = log.split(" serving ").next().unwrap();
        assert!(!before_serving.contains(line), "{line}: {log}");
    }
}

#[on(any)]
fn a_restored_region_file_goes_on_as_any_other() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    session.put(b"key", b"value").unwrap();
    let file = server.folder().join("snapshot");
    snapshot(&server, &file);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = folder.path().join("region").display().to_string();
    // The file that a server leaves if it is killed while it restores.
    std::fs::write(folder.path().join("region.restoring"), b"half").unwrap();
    let on_region = format!("--region-file {region}");
    let mut other = ServerProcess::start(&format!("{on_region} --restore {}", file.display()));
    assert_eq!(*other.session().get(b"key").unwrap().unwrap(), *b"value");
    assert_eq!(other.terminate(), Some(0));
    CommandOutput::of(command("kv-cli").args(["verify", "--region", &region])).succeeded();
    let next = ServerProcess::start(&on_region);
    assert_eq!(*next.session().get(b"key").unwrap().unwrap(), *b"value");
}

#[on(any)]
fn a_region_file_is_verified_without_a_server() {
    let mut server = ServerProcess::start_with_file("--memory 32MiB");
    let mut session = server.session();
    fill(&mut session, 0..1000, |_| b"value");
    drop(session);
    let region = server.region_file();
    let verify = |path: &Path| {
        let output = CommandOutput::of(command("kv-cli").args(["verify", "--region"]).arg(path));
        (output.code, output.text().to_owned(), output.stderr)
    };
    let (code, _, output) = verify(&region);
    assert!(
        code == Some(5) && output.contains("a server uses") && output.lines().count() == 1,
        "{output}"
    );
    server.kill();
    let (code, report, output) = verify(&region);
    assert!(code == Some(0) && report.contains("keys        1000"), "{report}{output}");
    assert!(verify(Path::new("/nonexistent/region")).2.contains("cannot open"));
    let pipe = server.folder().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(verify(&pipe).2.contains("pipe is not a file"), "it would wait for a writer");
    // Damage the index: the command reports it, and a server skips the slot.
    let mut bytes = std::fs::read(&region).unwrap();
    let (_, format) = Superblock::decode(&bytes, bytes.len() as u64).unwrap();
    let index = format.geometry().chunk_offset(0).unwrap();
    // Searches the subtables one after another. A split has emptied the first one.
    let slot_of = |n: usize| slot_in_subtable(n / SLOTS_PER_ROW, n % SLOTS_PER_ROW);
    let word = (index..index + CHUNK_BYTES)
        .step_by(SUBTABLE_BYTES as usize)
        .flat_map(|subtable| {
            (0..ROWS_PER_SUBTABLE * SLOTS_PER_ROW).map(move |n| (subtable + slot_of(n)) as usize)
        })
        .find(|at| {
            let bits = u64::from_le_bytes(bytes[*at..at + 8].try_into().unwrap());
            SlotWord::from_bits(bits).state() == SlotState::Live
        })
        .unwrap();
    bytes[word + 4] |= 63;
    std::fs::write(&region, &bytes).unwrap();
    let (code, report, output) = verify(&region);
    assert!(code == Some(4) && report.contains("DAMAGE"), "{report}");
    assert!(output.contains("--restore"), "{output}");
    assert_eq!(std::fs::read(&region).unwrap(), bytes, "verify changed the file");
    server.start_again();
    server.wait_for_log("FS-019 skipped the damaged slot");
}

#[on(any)]
fn a_snapshot_shows_while_it_is_taken() {
    let server = ServerProcess::start("--memory 16MiB");
    let (taking, observer) = (server.client(), server.client());
    let wait_for = |under_way: u64, permille: u64, taken: u64| {
        wait_until("the snapshot shows", TEST_TIMEOUT, || {
            let now = observer.admin().statistics().unwrap();
            (now.snapshots, now.snapshot_permille, now.snapshots_taken)
                == (under_way, permille, taken)
        });
    };
    taking.admin().report_snapshot(400).unwrap();
    wait_for(1, 400, 0);
    taking.admin().report_snapshot(1000).unwrap();
    wait_for(0, 0, 1);
    taking.admin().report_snapshot(1).unwrap();
    wait_for(1, 1, 1);
    drop(taking);
    wait_for(0, 0, 1);
    observer.session().unwrap().put(b"key", b"value").unwrap();
    snapshot(&server, &server.folder().join("snapshot"));
    wait_for(0, 0, 2);
    let shown = server.cli(&["stat"]);
    assert!(shown.text().contains("snapshots   2 so far"), "{shown:?}");
}

/// kv-cli counts the keys with a second client, only for the progress bar. Here the server has no
/// room for this client.
#[on(any)]
fn a_snapshot_whose_keys_cannot_be_counted_is_taken() {
    let server = ServerProcess::start_with_config("clients_max = 2\n", "--memory 16MiB");
    let observer = server.client();
    observer.session().unwrap().put(b"key", b"value").unwrap();
    wait_until("one is left", TEST_TIMEOUT, || observer.admin().statistics().unwrap().clients == 1);
    let file = server.folder().join("snapshot");
    snapshot(&server, &file);
    let restored = restored(&file, "16MiB");
    let value = restored.session().get(b"key").unwrap();
    assert_eq!(*value.unwrap(), *b"value");
}

/// Returns a server with so many keys that a signal arrives while they are written to a file.
fn with_many_keys() -> ServerProcess {
    let server = ServerProcess::start("--memory 96MiB");
    fill(&mut server.session(), 0..20_000, |key| self_describing::value(key, 0, 0, 1000));
    server
}

/// Returns a server with so many keys that a signal arrives while they are restored.
fn with_very_many_keys() -> ServerProcess {
    let server = ServerProcess::start("--memory 96MiB");
    let mut session = server.session();
    let mut pipeline = session.pipeline().unwrap();
    for key in 0..100_000u64 {
        while pipeline.put(key.to_le_bytes(), b"value").is_err() {
            pipeline.wait().unwrap().result.unwrap();
        }
    }
    drop(pipeline);
    server
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[on(shm, tcp_in_soak)]
fn an_unfinished_snapshot_or_dump_is_removed() {
    let server = with_many_keys();
    let folder = tempfile::tempdir().unwrap();
    for (what, name) in [("snapshot", "all.snap"), ("dump", "all.jsonl")] {
        let to = folder.path().join(name);
        let child = server.command("kv-cli").arg(what).arg(&to).spawn().unwrap();
        wait_until("it has begun", TEST_TIMEOUT, || !names(folder.path()).is_empty());
        send_signal(&child, Signal::TERM);
        let output = CommandOutput::new(child.wait_with_output().unwrap());
        output.expect_line(143, &["kv-cli: cannot write ", name, "stopped by SIGTERM"]);
        assert_eq!(names(folder.path()), [""; 0]);
        let mut limited = Command::new("sh");
        // At most 1 MiB, whatever the shell counts in.
        limited.args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""]).arg(binary("kv-cli"));
        limited.arg(what).arg(&to).env("FARSIDE_SERVER", server.address());
        let output = CommandOutput::of(&mut limited);
        output.expect_line(5, &["kv-cli: cannot write ", name, "File too large"]);
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[on(shm, tcp_in_soak)]
fn a_stopped_restore_leaves_no_region_file() {
    let server = with_very_many_keys();
    let file = server.folder().join("snapshot");
    server.cli(&["snapshot", file.to_str().unwrap()]).succeeded();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = folder.path().join("region");
    let arguments =
        format!("--memory 96MiB --region-file {} --restore {}", region.display(), file.display());
    let elsewhere = tempfile::tempdir().unwrap();
    let mut other = ServerProcess::spawn_in(elsewhere.path(), &arguments, |command| command);
    other.wait_for_log("restoring a snapshot");
    assert_eq!(other.terminate(), Some(1), "{}", other.log());
    let last = other.log().lines().last().unwrap_or_default().to_owned();
    assert!(last.starts_with("kv-server: cannot restore ") && last.contains("told to stop"));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[on(shm, tcp_in_soak)]
fn a_server_whose_terminal_closes_stops_cleanly() {
    if is_ignored(Signal::HUP.as_raw()) {
        left_out("under nohup", "SIGHUP is ignored");
        return;
    }
    let server = ServerProcess::start("--memory 16MiB");
    server.signal(Signal::HUP);
    server.wait_for_log("stopped");
}

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
