//! The `kv-server` process: how it starts and stops. The integration tests' `server_cli.rs` covers
//! starts that it refuses. Its log warns a person before clients get errors, and strangers do not
//! fill it. It says when the memory gets full, when the memory has room again, and when the index
//! cannot grow. It also says which client was fenced, and why.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;

use farside_layout::RegionState;
use farside_tests::ServerProcess;
use rustix::process::Signal;

use super::*;

/// Returns a `kv-server` process in the test's folder, once it serves.
pub(super) fn process(folder: &TestFolder, arguments: &str) -> ServerProcess {
    let server = ServerProcess::spawn_in(folder.dir.path(), arguments, |command| command);
    server.wait_for_log("serving");
    server
}

/// Returns a `kv-server` process with the region file in the test's folder, once it serves.
pub(super) fn process_with_file(folder: &TestFolder) -> ServerProcess {
    process(folder, &format!("--memory 8MiB --region-file {}", folder.region_file().display()))
}

#[test]
fn a_signal_stops_the_server_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = TestFolder::new();
        let mut server = process_with_file(&folder);
        let client = folder.writer();
        // The server handles signals only a moment after it serves the socket.
        std::thread::sleep(Duration::from_millis(100));
        server.signal(signal);
        assert!(server.wait().success());
        assert_eq!(client.superblock().0.state().unwrap(), RegionState::Clean);
        assert!(!folder.socket().exists());
    }
}

#[test]
fn a_server_starts_on_the_region_of_a_killed_one() {
    let folder = TestFolder::new();
    let mut server = process_with_file(&folder);
    // The client still maps the memory, and has its descriptor.
    let client = folder.writer();
    server.kill();
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::InUse);
    server.start_again();
    eventually("it serves again", || server.log().matches("serving").count() == 2);
    assert_eq!(client.lease(), 0, "the first server's client is fenced");
    assert_eq!(folder.writer().welcome.incarnation, 2);
}

/// The test's client maps the file, too, and must not access the mapping once the file is
/// truncated.
#[test]
fn a_truncated_region_file_ends_the_server_with_one_line() {
    let folder = TestFolder::new();
    let mut server = process_with_file(&folder);
    let client = folder.writer();
    let file = std::fs::OpenOptions::new().write(true).open(folder.region_file()).unwrap();
    file.set_len(4096).unwrap();
    client.send(&Request::TakeBlocks { class: class(64), count: 1 });
    assert_eq!(server.wait().signal(), Some(Signal::BUS.as_raw()));
    let log = server.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("kv-server: ")).collect();
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("SIGBUS") && line.contains("truncated its file"), "{line}");
}

#[test]
fn the_server_tells_systemd_when_it_is_ready() {
    let folder = TestFolder::new();
    let socket = folder.dir.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let _server = ServerProcess::spawn_in(folder.dir.path(), "--memory 8MiB", |command| {
        command.env("NOTIFY_SOCKET", &socket)
    });
    let mut buffer = [0; 64];
    let bytes = notify.recv(&mut buffer).unwrap();
    assert_eq!(String::from_utf8_lossy(&buffer[..bytes]).trim(), "READY=1");
    folder.writer();
}

#[test]
fn flags_override_the_config_file_and_a_json_log_is_json() {
    let folder = TestFolder::new();
    let file = folder.dir.path().join("server.toml");
    let text = "listen = 'shm:///nowhere/kv.sock'\nmemory = '16MiB'\ngrace_ms = 7\n";
    std::fs::write(&file, format!("{text}region_file = '{}'", folder.region_file().display()))
        .unwrap();
    let arguments = format!("--config {} --log-format json --index 64KiB", file.display());
    let (log, stderr) = std::io::pipe().unwrap();
    let _server =
        ServerProcess::spawn_in(folder.dir.path(), &arguments, |command| command.stderr(stderr));
    let mut line = String::new();
    // The server's stderr is closed after this line, which must not stop it.
    BufReader::new(log).read_line(&mut line).unwrap();
    assert!(line.starts_with('{') && line.trim().ends_with('}'), "{line}");
    let client = folder.writer();
    let format = client.superblock().1;
    assert_eq!((format.grace_ms, format.region_bytes), (7, 16 << 20));
    assert_eq!(client.statistics().subtables, 8);
}

#[test]
fn lines_for_the_journal_of_systemd_begin_with_a_priority() {
    let folder = TestFolder::new();
    let log = File::create(folder.dir.path().join("log")).unwrap();
    let (device, inode) = (log.metadata().unwrap().dev(), log.metadata().unwrap().ino());
    for (inode, format, start) in
        [(inode, "human", "<6>"), (inode, "json", "<6>{"), (0, "json", "{")]
    {
        log.set_len(0).unwrap();
        let arguments = format!("--memory 8MiB --log-format {format}");
        let stream = format!("{device}:{inode}");
        let server = ServerProcess::spawn_in(folder.dir.path(), &arguments, |command| {
            command.env("JOURNAL_STREAM", stream)
        });
        server.wait_for_log("serving");
        let log = server.log();
        assert!(log.lines().all(|line| line.starts_with(start)), "{log}");
    }
}

#[test]
fn the_log_says_that_memory_gets_full_and_which_client_was_fenced() {
    let folder = TestFolder::new();
    let server = process(&folder, "--grace-ms 1 --memory 48MiB");
    let count = |line: &str| server.log().matches(line).count();
    let (client, gone) = (folder.writer(), folder.writer());
    let class = class(2 << 20);
    let mut blocks = Vec::new();
    // One of the chunks in use belongs to the index.
    for level in [80, 90, 100] {
        let statistics = client.statistics();
        let (used, all) = (statistics.chunks - statistics.chunks_free, statistics.chunks);
        for _ in used..(level * all).div_ceil(100) {
            blocks.extend(client.take(class, 1));
        }
        let line = format!("{level} % of the memory is in use, ");
        eventually("the log says so", || count(&line) == 1);
    }
    assert!(client.take(class, 1).is_empty());
    // The first splits use the free places of the index's chunks.
    let stuck = subtables_from(0).map(|(prefix, depth)| {
        client.fill_window(prefix, depth);
        std::iter::repeat_with(|| client.split(prefix, depth))
            .find(|outcome| *outcome != SplitOutcome::Later)
    });
    assert!(stuck.flatten().any(|outcome| outcome == SplitOutcome::Impossible));
    eventually("the log says so", || count("the index cannot grow") == 1);
    client.give(class, blocks, true);
    eventually("chunks are free", || client.statistics().chunks_free > 20);
    eventually("the log says so", || count("less than 100 % of the memory is in use again") == 1);
    assert_eq!(count(" of the memory is in use, "), 3, "{}", server.log());
    drop(gone);
    eventually("the client is fenced", || {
        count("lost a client and fenced it: it disconnected") == 1
    });
}

/// Silent connections close by themselves, or are closed because there are too many. Either way the
/// number of log lines grows with the time, not with the number of connections.
#[test]
fn silent_connections_do_not_fill_the_log() {
    const ROUNDS: usize = 10;
    const CONNECTIONS: usize = 300;
    let folder = TestFolder::new();
    let server = process(&folder, "--grace-ms 1 --memory 16MiB");
    let lines = || server.log().lines().count();
    let (before, since) = (lines(), Instant::now());
    for round in 0..ROUNDS {
        (0..CONNECTIONS).for_each(|_| drop(folder.connect()));
        let silent: Vec<_> = (0..CONNECTIONS).map(|_| folder.connect()).collect();
        // The server keeps the youngest 64, and closes the others.
        let dropped = &silent[CONNECTIONS - 65];
        assert_eq!(dropped.receive(&mut [0; 8]).unwrap().0, 0);
        if round == 0 {
            // The youngest may still become a client.
            let youngest = silent.last().unwrap();
            assert!(answer(youngest, &hello(Role::Reader)).unwrap().is_ok());
        }
    }
    assert_eq!(folder.writer().take(class(64), 1).len(), 1);
    let log = server.log();
    let warnings = log.matches("closed a silent connection").count();
    let seconds = since.elapsed().as_secs() as usize;
    assert!((1..=seconds + 1).contains(&warnings), "{warnings} lines in {seconds} s");
    // The other lines are about the writer and the youngest connection.
    assert!(lines() - before <= warnings + 5, "{log}");
}

/// Half of them say goodbye.
#[test]
fn readers_that_come_and_go_do_not_fill_the_log() {
    const READERS: usize = 200;
    let folder = TestFolder::new();
    let server = process(&folder, "--grace-ms 1 --memory 16MiB");
    let count = |line: &str| server.log().matches(line).count();
    let since = Instant::now();
    for _ in 0..READERS {
        drop(folder.attach(Role::Reader).unwrap());
        drop(server.client());
    }
    let last = folder.writer();
    eventually("all have left", || last.statistics().clients == 1);
    let most = 20 + since.elapsed().as_secs() as usize + 1;
    for line in ["a client connected", "a client left", "lost a client and fenced it"] {
        assert!((1..=most).contains(&count(line)), "{line}: {} lines", count(line));
    }
}
