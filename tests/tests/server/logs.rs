//! That the log says what a person has to know before clients get errors, and that strangers do not
//! fill it. It says that the memory gets full and is no longer, that the index cannot grow, and which
//! client was fenced, and why.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use farside_tests::binary;

use super::*;

/// A `kv-server` process whose log is in a file; ended with its test.
struct Logged(Child);

impl Logged {
    /// Starts it with these arguments besides; returns where its log is, too.
    fn start(place: &Place, arguments: &[&str]) -> (Self, PathBuf) {
        let path = place.folder.path().join("log");
        let mut command = Command::new(binary("kv-server"));
        command.arg("--listen").arg(format!("shm://{}", place.socket().display()));
        command.args(["--grace-ms", "1"]).args(arguments).stdin(Stdio::null());
        let server = command.stderr(File::create(&path).unwrap()).spawn().unwrap();
        (Self(server), path)
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_log_says_that_memory_gets_full_and_which_client_was_fenced() {
    let place = Place::new();
    let (_server, path) = Logged::start(&place, &["--memory", "48MiB"]);
    let log = || std::fs::read_to_string(&path).unwrap();
    let count = |line: &str| log().matches(line).count();
    eventually("it serves", || count("serving") == 1);
    let (client, gone) = (place.writer(), place.writer());
    let class = class(2 << 20);
    let mut blocks = Vec::new();
    // One of the chunks is the index's.
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
    // There are places for a while.
    let subtables = (0..).flat_map(|depth: u8| (0..1u32 << depth).map(move |of| (of, depth)));
    let stuck = subtables.map(|(prefix, depth)| {
        client.fill_window(prefix, depth);
        std::iter::repeat_with(|| client.split(prefix, depth))
            .find(|outcome| *outcome != SplitOutcome::Later)
    });
    assert!(stuck.flatten().any(|outcome| outcome == SplitOutcome::Impossible));
    eventually("the log says so", || count("the index cannot grow") == 1);
    client.give(class, blocks, true);
    eventually("chunks are free", || client.statistics().chunks_free > 20);
    eventually("the log says so", || count("less than 100 % of the memory is in use again") == 1);
    assert_eq!(count(" of the memory is in use, "), 3, "{}", log());
    drop(gone);
    eventually("it is fenced", || count("lost a client and fenced it: it disconnected") == 1);
}

/// Whether a silent connection goes by itself or is dropped because there are too many, the number
/// of lines follows the time, not the connections. Before, there was a line for each.
#[test]
fn silent_connections_do_not_fill_the_log() {
    const ROUNDS: usize = 10;
    const CONNECTIONS: usize = 300;
    let place = Place::new();
    let (_server, path) = Logged::start(&place, &["--memory", "16MiB"]);
    let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
    eventually("it serves", || std::fs::read_to_string(&path).unwrap().contains("serving"));
    let (before, since) = (lines(), Instant::now());
    let connect = || Connection::connect(&place.socket(), PATIENCE).unwrap();
    let mut buffer = [0; 256];
    for _ in 0..ROUNDS {
        (0..CONNECTIONS).for_each(|_| drop(connect()));
        let silent: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
        // The server keeps the last 64.
        let dropped = &silent[CONNECTIONS - 65];
        dropped.set_receive_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(dropped.receive(&mut [0; 8]).unwrap().0, 0);
        // The youngest may still become a client.
        let youngest = silent.last().unwrap();
        youngest.set_receive_timeout(Some(PATIENCE)).unwrap();
        youngest.send(&hello(Role::Reader), None).unwrap();
        let (bytes, _) = youngest.receive(&mut buffer).unwrap();
        assert!(decode_reply(&buffer[..bytes]).unwrap().is_ok());
    }
    assert_eq!(place.writer().take(class(64), 1).len(), 1);
    let log = std::fs::read_to_string(&path).unwrap();
    let told = log.matches("closed the oldest connection without a client").count();
    let seconds = since.elapsed().as_secs() as usize;
    assert!((1..=seconds + 1).contains(&told), "{told} lines in {seconds} s");
    // Besides these the writer's.
    assert!(lines() - before <= told + 3, "{log}");
}
