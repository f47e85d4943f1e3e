//! Proves that the log warns a person before clients get errors, and that strangers do not fill it.
//! It says when the memory gets full, when the memory has room again, and when the index cannot
//! grow. It also says which client was fenced, and why.

use super::command::process;
use super::*;

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
