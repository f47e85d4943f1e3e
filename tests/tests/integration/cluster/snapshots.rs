//! Snapshots of a cluster are complete or not there, and are restored into any number of shards.
//! Damaged ones are refused before a key is stored. `kv-cli load` goes on when a server restarts,
//! and says so if keys are missing.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside::{Client, Entry, Session};
use farside_snapshot::{Record, Writer};
use farside_tests::cluster::TestCluster;
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, StopOnDrop, TEST_TIMEOUT, send_signal, wait_until};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

const KEYS: u64 = 300;

fn seeds(servers: &[ServerProcess]) -> String {
    servers.iter().map(ServerProcess::address).collect::<Vec<_>>().join(",")
}

fn connect(servers: &[ServerProcess]) -> Session {
    Client::builder().server(&seeds(servers)).connect().unwrap().session().unwrap()
}

/// A `kv-cli` command for these servers. It waits for a server for `connect_timeout_ms`.
fn kv_cli(servers: &[ServerProcess], folder: &Path, connect_timeout_ms: u32) -> Command {
    let config = folder.join("client.toml");
    fs::write(&config, format!("connect_timeout_ms = {connect_timeout_ms}\n")).unwrap();
    let mut command = command("kv-cli");
    command.env("FARSIDE_SERVER", seeds(servers)).arg("--config").arg(config);
    command
}

/// Runs `kv-cli <command> <path> <flags>`.
fn run(servers: &[ServerProcess], what: &str, path: &Path, flags: &[&str]) -> CommandOutput {
    let mut command = command("kv-cli");
    command.env("FARSIDE_SERVER", seeds(servers)).arg(what).arg(path).args(flags);
    CommandOutput::of(&mut command)
}

fn key(number: u64) -> String {
    format!("key {number}")
}

fn fill(session: &mut Session) {
    (0..KEYS).for_each(|number| session.put(key(number), number.to_string()).unwrap());
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn count_keys(session: &mut Session) -> usize {
    session.scan().unwrap().map(Result::unwrap).count()
}

/// The number of the shard that the server has.
fn shard_of(cluster: &TestCluster, server: &ServerProcess, shards: u16) -> u16 {
    let address = server.address().parse().unwrap();
    let has = |shard: &u16| cluster.shard(*shard).copies[0].copy.addresses.contains(&address);
    (0..shards).find(has).unwrap()
}

/// The keys of a shard, of those with these numbers.
fn keys_of(cluster: &TestCluster, shard: u16, numbers: std::ops::Range<u64>) -> Vec<u64> {
    let router = cluster.store.read().unwrap().map().unwrap().router();
    let shard_of = |number: u64| router.shard(router.hasher.hash(key(number).as_bytes()));
    numbers.filter(|&number| shard_of(number) == usize::from(shard)).collect()
}

#[on(any)]
fn a_snapshot_under_load_is_restored_into_another_number_of_shards() {
    let (cluster, servers) = TestCluster::with_servers(3);
    let mut session = connect(&servers);
    let expires_at = UNIX_EPOCH + Duration::from_millis(8_000_000_000_123);
    session.store("expires", "1", farside::Store::always().until(expires_at)).unwrap();
    session.put_with_ttl("has expired", "1", Duration::from_millis(1)).unwrap();
    let folder = cluster.folder().join("snapshot");
    let numbers = || (0..KEYS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let (begun, done, stop) = (numbers(), numbers(), AtomicBool::new(false));
    let load = |numbers: &[AtomicU64]| -> Vec<u64> {
        numbers.iter().map(|number| number.load(Ordering::SeqCst)).collect()
    };
    let (before, after) = std::thread::scope(|scope| {
        let _stops = StopOnDrop(&stop);
        scope.spawn(|| {
            for round in 1u64.. {
                for number in 0..KEYS {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    begun[number as usize].store(round, Ordering::SeqCst);
                    session.put(key(number), round.to_string()).unwrap();
                    done[number as usize].store(round, Ordering::SeqCst);
                }
            }
        });
        wait_until("all are stored", TEST_TIMEOUT, || load(&done).iter().all(|done| *done > 0));
        let before = load(&done);
        run(&servers, "snapshot", &folder, &[]).succeeded();
        (before, load(&begun))
    });
    let files = ["shard-0000.snap", "shard-0001.snap", "shard-0002.snap", "snapshot.json"];
    assert_eq!(names(&folder), files);
    let (_smaller_cluster, two_servers) = TestCluster::with_servers(2);
    for servers in [two_servers, vec![ServerProcess::start("--memory 16MiB")]] {
        let restored = run(&servers, "restore", &folder, &[]).succeeded();
        assert!(restored.stderr.contains("301 keys restored"), "{restored:?}");
        let mut session = connect(&servers);
        for number in 0..KEYS {
            let value = session.get(key(number)).unwrap().expect("it was there all the time");
            let round: u64 = str::from_utf8(&value).unwrap().parse().unwrap();
            let possible = before[number as usize]..=after[number as usize];
            assert!(possible.contains(&round), "key {number}: {round}, not of {possible:?}");
        }
        let entry = session.scan_prefix("expires").unwrap().next().unwrap().unwrap();
        assert_eq!(entry.expires_at, Some(expires_at));
        assert_eq!(count_keys(&mut session), KEYS as usize + 1);
        // Not again, unless that is what the user wants.
        session.put("other", "stays").unwrap();
        session.put(key(0), "is replaced").unwrap();
        let again = run(&servers, "restore", &folder, &[]);
        again.expect_line(2, &["cannot restore", "the store has keys", "--force"]);
        assert_eq!(session.get(key(0)).unwrap().unwrap(), "is replaced");
        run(&servers, "restore", &folder, &["--force"]).succeeded();
        assert_ne!(session.get(key(0)).unwrap().unwrap(), "is replaced");
        assert_eq!(session.get("other").unwrap().unwrap(), "stays");
    }
}

/// Stores so much that a signal arrives while a snapshot is written.
fn fill_with_long_values(session: &mut Session) {
    for number in 0..18_000_u32 {
        session.put(number.to_le_bytes(), number.to_le_bytes().repeat(250)).unwrap();
    }
}

/// Stops a process that writes a snapshot to a folder in `parent`. On a busy machine the snapshot
/// may be complete before that; then it tries again.
fn stop_within_a_snapshot(mut snapshot: Command, parent: &Path) -> Child {
    let target = parent.join("snapshot");
    snapshot.arg("snapshot").arg(&target);
    for _ in 0..50 {
        let mut child = snapshot.spawn().unwrap();
        wait_until("it has begun", TEST_TIMEOUT, || !names(parent).is_empty());
        send_signal(&child, Signal::STOP);
        let ends = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&child)), ends).unwrap();
        if !target.exists() {
            return child;
        }
        send_signal(&child, Signal::CONT);
        assert!(child.wait().unwrap().success());
        fs::remove_dir_all(&target).unwrap();
    }
    panic!("each snapshot was complete before it could be stopped");
}

#[on(any)]
fn a_signal_during_a_snapshot_leaves_nothing() {
    let (cluster, servers) = TestCluster::with_servers(3);
    fill_with_long_values(&mut connect(&servers));
    let parent = tempfile::tempdir_in(cluster.folder()).unwrap();
    let snapshot = kv_cli(&servers, cluster.folder(), 3000);
    let child = stop_within_a_snapshot(snapshot, parent.path());
    // Not SIGINT, which kv-cli ignores if its parent does.
    send_signal(&child, Signal::TERM);
    send_signal(&child, Signal::CONT);
    let output = CommandOutput::new(child.wait_with_output().unwrap());
    output.expect_line(143, &["cannot write ", "snapshot: stopped by SIGTERM"]);
    assert_eq!(names(parent.path()), [""; 0]);
}

/// The command is stopped while it writes, and the server of a shard that is not complete dies.
#[on(any)]
fn a_shard_that_dies_during_a_snapshot_leaves_nothing() {
    let (cluster, mut servers) = TestCluster::with_servers(3);
    fill_with_long_values(&mut connect(&servers));
    let parent = tempfile::tempdir_in(cluster.folder()).unwrap();
    let snapshot = kv_cli(&servers, cluster.folder(), 200);
    let child = stop_within_a_snapshot(snapshot, parent.path());
    let complete = names(&parent.path().join(&names(parent.path())[0]));
    let unfinished = servers.iter_mut().find(|server| {
        let shard = shard_of(&cluster, server, 3);
        !complete.contains(&format!("shard-{shard:04}.snap"))
    });
    unfinished.expect("the snapshot was complete before it could be stopped").kill();
    send_signal(&child, Signal::CONT);
    let output = CommandOutput::new(child.wait_with_output().unwrap());
    output.expect_line(3, &["cannot write ", "snapshot: shard ", "is not available"]);
    assert_eq!(names(parent.path()), [""; 0]);
}

#[on(any)]
fn a_damaged_snapshot_is_refused_before_a_key_is_stored() {
    let (cluster, servers) = TestCluster::with_servers(2);
    fill(&mut connect(&servers));
    let folder = cluster.folder().join("snapshot");
    run(&servers, "snapshot", &folder, &[]).succeeded();
    let other = vec![ServerProcess::start("--memory 16MiB --value-bytes-max 100")];
    let mut session = connect(&other);
    let mut refuses = |change: &dyn Fn(&mut Vec<u8>), name: &str, code: i32, parts: &[&str]| {
        let file = folder.join(name);
        let whole = fs::read(&file).unwrap();
        let mut changed = whole.clone();
        change(&mut changed);
        match changed.is_empty() {
            true => fs::remove_file(&file).unwrap(),
            false => fs::write(&file, changed).unwrap(),
        }
        let output = run(&other, "restore", &folder, &[]);
        output.expect_line(code, &[parts, &["cannot restore", name]].concat());
        assert_eq!(count_keys(&mut session), 0, "{name}");
        fs::write(&file, whole).unwrap();
    };
    let snap = "shard-0001.snap";
    let of_other_shard = fs::read(folder.join("shard-0000.snap")).unwrap();
    refuses(&|bytes| bytes.truncate(bytes.len() - 1), snap, 5, &["it is truncated after"]);
    refuses(&|bytes| bytes.truncate(13), snap, 5, &["it is truncated after"]);
    refuses(
        &|bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
        snap,
        5,
        &["it is corrupted"],
    );
    refuses(&Vec::clear, snap, 5, &["cannot be opened"]);
    refuses(&|bytes| bytes[0] = b'x', snap, 5, &["it is no snapshot"]);
    refuses(&|bytes| bytes.clone_from(&of_other_shard), snap, 5, &["of another shard"]);
    refuses(&Vec::clear, "snapshot.json", 5, &["no snapshot of a cluster"]);
    refuses(&|bytes| bytes.truncate(20), "snapshot.json", 5, &["is not what"]);
    // A valid snapshot that the store does not allow.
    let mut writer = Writer::create(Vec::new(), 1, None).unwrap();
    let long = Record { key: b"long", value: &[7; 101], expires_at_ms: 0, is_pinned: false };
    writer.push(&long).unwrap();
    let file = cluster.folder().join("long.snap");
    fs::write(&file, writer.finish().unwrap()).unwrap();
    let long = run(&other, "restore", &file, &[]);
    long.expect_line(2, &["long.snap: the key `long`", "101", "value_bytes_max"]);
    run(&other, "restore", &cluster.folder().join("none"), &[]).expect_line(5, &["cannot restore"]);
    assert_eq!(count_keys(&mut session), 0);
    run(&other, "restore", &folder, &[]).succeeded();
    assert_eq!(count_keys(&mut session), KEYS as usize);
}

#[on(any)]
fn only_another_snapshot_is_replaced_by_a_snapshot() {
    let (cluster, servers) = TestCluster::with_servers(2);
    let mut session = connect(&servers);
    fill(&mut session);
    let folder = cluster.folder().join("snapshot");
    run(&servers, "snapshot", &folder, &[]).succeeded();
    run(&servers, "snapshot", &folder, &[]).expect_line(2, &["exists already", "--force"]);
    session.put("new", "1").unwrap();
    run(&servers, "snapshot", &folder, &["--force"]).succeeded();
    let notes = folder.join("notes");
    fs::write(&notes, "of the user").unwrap();
    let file = cluster.folder().join("file");
    fs::write(&file, "of the user").unwrap();
    let empty = cluster.folder().join("empty");
    fs::create_dir(&empty).unwrap();
    for unrelated in [&folder, &file, &empty] {
        let refused = run(&servers, "snapshot", unrelated, &["--force"]);
        refused.expect_line(2, &["cannot write", "is not the folder of a snapshot"]);
    }
    for kept in [&notes, &file] {
        assert_eq!(fs::read(kept).unwrap(), b"of the user");
    }
    assert!(names(&empty).is_empty());
    let unfinished = |name: &String| name.contains("unfinished");
    assert!(!names(cluster.folder()).iter().any(unfinished));
    // The folder has what the second snapshot wrote.
    let single = vec![ServerProcess::start("--memory 16MiB")];
    run(&single, "restore", &folder, &[]).succeeded();
    assert_eq!(count_keys(&mut connect(&single)), KEYS as usize + 1);
}

/// The keys of a shard's file are in one shard again, if the cluster is the same.
#[on(any)]
fn a_lost_shard_is_restored_from_its_file() {
    let (cluster, mut servers) = TestCluster::with_servers(2);
    let mut session = connect(&servers);
    fill(&mut session);
    let folder = cluster.folder().join("snapshot");
    run(&servers, "snapshot", &folder, &[]).succeeded();
    let lost = shard_of(&cluster, &servers[1], 2);
    let kept = keys_of(&cluster, 1 - lost, 0..KEYS)[0];
    session.put(key(kept), "is newer").unwrap();
    let spare = cluster.start("");
    servers[1].kill();
    cluster.wait_for_owner(lost, &spare);
    servers[1] = spare;
    let file = folder.join(format!("shard-{lost:04}.snap"));
    run(&servers, "restore", &file, &["--force"]).succeeded();
    let mut session = connect(&servers);
    for number in 0..KEYS {
        let value = session.get(key(number)).unwrap().expect("it was restored, or kept");
        let expected = if number == kept { "is newer".to_owned() } else { number.to_string() };
        assert_eq!(value, expected.as_str());
    }
}

#[on(any)]
fn expired_values_of_a_file_are_skipped_and_counted() {
    let (cluster, servers) = TestCluster::with_servers(2);
    let file = cluster.folder().join("all.snap");
    let mut writer = Writer::create(File::create(&file).unwrap(), 1, None).unwrap();
    let later = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64 + 600_000;
    for (key, value, expires_at_ms) in
        [("a", "1", 1), ("b", "2", later), ("c", "3", 0), ("c", "4", 0), ("d", "5", 2)]
    {
        let (key, value) = (key.as_bytes(), value.as_bytes());
        let is_pinned = key == b"b";
        writer.push(&Record { key, value, expires_at_ms, is_pinned }).unwrap();
    }
    writer.finish().unwrap();
    let restored = run(&servers, "restore", &file, &[]);
    restored.expect_line(0, &["3 keys restored", "2 expired values skipped"]);
    let entries = connect(&servers).scan().unwrap().map(Result::unwrap).collect::<Vec<_>>();
    let fields = |entry: &Entry| {
        (entry.key.clone(), entry.value.to_vec(), entry.expires_at, entry.is_pinned)
    };
    let mut found: Vec<_> = entries.iter().map(fields).collect();
    found.sort();
    let later = UNIX_EPOCH + Duration::from_millis(later);
    let [b, two, c, four] = ["b", "2", "c", "4"].map(|text| text.as_bytes().to_vec());
    assert_eq!(found, [(b, two, Some(later), true), (c, four, None, false)]);
}

/// `kv-cli load` of a pipe, and the pipe.
struct Load {
    child: Child,
    input: File,
}

impl Load {
    fn start(servers: &[ServerProcess], folder: &Path) -> Self {
        let pipe: PathBuf = folder.join("in.jsonl");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let child = kv_cli(servers, folder, 500).arg("load").arg(&pipe).spawn().unwrap();
        Self { child, input: File::options().write(true).open(&pipe).unwrap() }
    }

    /// Returns when the command has read all of it, except for what a pipe holds.
    fn write(&mut self, numbers: std::ops::Range<u64>) {
        for number in numbers {
            let key = key(number);
            writeln!(self.input, "{{\"key\":\"{key}\",\"value\":\"{number:030}\"}}").unwrap();
        }
    }

    fn finish(self) -> CommandOutput {
        drop(self.input);
        CommandOutput::new(self.child.wait_with_output().unwrap())
    }
}

/// While the server is down, more input is read than a pipe holds.
#[on(any)]
fn a_load_goes_on_when_a_server_restarts() {
    let cluster = TestCluster::create(3);
    let file = |number: usize| cluster.folder().join(format!("region{number}"));
    let mut servers: Vec<_> = (0..3).map(|number| cluster.start_with_file(&file(number))).collect();
    cluster.wait_for_servers();
    let mut load = Load::start(&servers, cluster.folder());
    load.write(0..1000);
    servers[1].kill();
    load.write(1000..5000);
    servers[1] = cluster.start_with_file(&file(1));
    load.write(5000..6000);
    let output = load.finish();
    output.expect_line(0, &["6000 keys loaded"]);
    let mut session = connect(&servers);
    for number in 0..6000 {
        let value = session.get(key(number)).unwrap().expect("it was loaded");
        assert_eq!(value, format!("{number:030}").as_str());
    }
}

#[on(any)]
fn a_load_goes_on_when_the_only_server_restarts() {
    let mut server = ServerProcess::start_with_file("--memory 16MiB");
    let mut load = Load::start(std::slice::from_ref(&server), server.folder());
    load.write(0..1000);
    let mut session = server.session();
    // While the command waits for input, what is in flight does not go on: up to 64 keys.
    let mut stored = || (0..1000).filter(|number| session.exists(key(*number)).unwrap()).count();
    wait_until("900 are stored", TEST_TIMEOUT, || stored() >= 900);
    server.kill();
    // Not more than the pipe holds: nothing is read meanwhile.
    load.write(1000..1500);
    server.restart();
    load.write(1500..2500);
    load.finish().expect_line(0, &["2500 keys loaded"]);
    let mut session = server.session();
    assert!((0..2500).all(|number| session.exists(key(number)).unwrap()));
}

#[on(any)]
fn a_load_reports_the_keys_of_a_server_that_stays_down() {
    let (cluster, mut servers) = TestCluster::with_servers(3);
    let missing = keys_of(&cluster, shard_of(&cluster, &servers[1], 3), 0..KEYS);
    servers[1].kill();
    let input = cluster.folder().join("in.jsonl");
    let line = |number| format!("{{\"key\":\"{}\",\"value\":\"1\"}}\n", key(number));
    fs::write(&input, (0..KEYS).map(line).collect::<String>()).unwrap();
    let mut load = kv_cli(&servers, cluster.folder(), 200);
    let output = CommandOutput::of(load.arg("load").arg(&input).args(["--retry-for", "300ms"]));
    assert_eq!(output.code, Some(5), "{output:?}");
    let (loaded, failed) = (KEYS as usize - missing.len(), missing.len());
    let summary = output.stderr.lines().last().unwrap();
    assert!(summary.contains(&format!("{loaded} keys loaded")), "{summary}");
    assert!(summary.ends_with(&format!("; {failed} failed")), "{summary}");
    // The first of them are named, and the others counted.
    assert!(output.stderr.contains(&format!("... and {} more", failed - 20)), "{output:?}");
    let named = output.stderr.lines().filter(|line| line.contains("is not available"));
    for line in named {
        let number = line.strip_prefix("kv-cli: line ").unwrap().split(':').next().unwrap();
        assert!(missing.contains(&(number.parse::<u64>().unwrap() - 1)), "{line}");
    }
}

/// The keys that were stored before are gone, which no operation notices.
#[on(any)]
fn a_load_fails_if_a_spare_takes_a_shard_meanwhile() {
    let (cluster, mut servers) = TestCluster::with_servers(2);
    let shard = shard_of(&cluster, &servers[1], 2);
    let mut load = Load::start(&servers, cluster.folder());
    load.write(0..1000);
    let mut session = connect(&servers);
    let first = keys_of(&cluster, shard, 0..1000)[0];
    wait_until("the shard has a key", TEST_TIMEOUT, || session.exists(key(first)).unwrap());
    let spare = cluster.start("");
    servers[1].kill();
    cluster.wait_for_owner(shard, &spare);
    load.write(1000..2000);
    let output = load.finish();
    assert_eq!(output.code, Some(5), "{output:?}");
    assert!(output.stderr.contains("came back with another region"), "{output:?}");
}
