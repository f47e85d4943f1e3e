//! Proves that a snapshot taken while clients write has, for every key, a value that the key had
//! meanwhile. It can be restored into a region of another size. Damaged files are refused in one
//! line.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use farside::Store;
use farside_layout::{
    CHUNK_BYTES, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SUBTABLE_BYTES, SlotState, SlotWord, Superblock,
    slot_in_subtable,
};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    ServerProcess, StopOnDrop, TEST_TIMEOUT, fill, scaled, self_describing, wait_until,
};

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
