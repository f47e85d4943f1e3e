//! Proves that commands on one key are linearizable across clients of two gateways: the checker of
//! the library's own histories accepts what they saw. A history with one wrong answer is refused.

use std::thread;
use std::time::Instant;

use farside_linearizability::{Ended, HistoryOperation, Record, check};
use farside_tests::{ServerProcess, scaled};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::gateway::{RespServer, request};

/// Few keys, so that commands meet.
const KEYS: u64 = 8;
const CONNECTIONS: u64 = 6;
/// Commands of a connection that are on their way at once.
const PIPELINED: usize = 3;

/// A command on a key with a number as its value, as the history names it.
fn next_command(random: &mut SmallRng, process: u64, seen: &[String]) -> (Vec<String>, Record) {
    use HistoryOperation as Kind;
    let key = format!("key-{}", random.random_range(0..KEYS));
    let value = random.random_range(1..1_000_000_u32).to_string();
    let expected = || seen.last().cloned().unwrap_or_else(|| "0".to_owned());
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let (operation, words, expected) = match random.random_range(0..12) {
        0 => (Kind::Put, words(&format!("SET {key} {value}")), None),
        1 => (Kind::Insert, words(&format!("SET {key} {value} NX")), None),
        2 => (Kind::Update, words(&format!("SET {key} {value} XX")), None),
        3 => (Kind::Delete, words(&format!("DEL {key}")), None),
        4 => (Kind::Take, words(&format!("GETDEL {key}")), None),
        5 | 6 => (Kind::Increment, words(&format!("INCRBY {key} {value}")), None),
        7 | 8 => {
            let expected = expected();
            let text = format!("SET {key} {value} IFEQ {expected} GET");
            (Kind::Exchange, words(&text), Some(expected))
        }
        _ => (Kind::Get, words(&format!("GET {key}")), None),
    };
    let record = Record {
        process,
        operation,
        key,
        argument: operation.stores().then_some(value),
        expected,
        result: Ended::Done,
        found: None,
        version: None,
        invoke: 0,
        returned: None,
    };
    (words, record)
}

/// Enters a reply into the record of its command.
fn answer(record: &mut Record, reply: &[u8]) {
    use HistoryOperation as Kind;
    let text = str::from_utf8(reply).unwrap();
    // The text of a string or a number; none of nothing.
    let content = match text.as_bytes()[0] {
        b'$' => text.split("\r\n").nth(1).filter(|_| !text.starts_with("$-1")),
        b':' => text[1..].strip_suffix("\r\n"),
        b'+' => Some("OK"),
        _ => panic!("{record}: {text}"),
    };
    let is_done = match record.operation {
        Kind::Delete => content == Some("1"),
        Kind::Exchange => content == record.expected.as_deref(),
        _ => content.is_some(),
    };
    record.result = if is_done { Ended::Done } else { Ended::Refused };
    record.found = match record.operation {
        Kind::Get | Kind::Take | Kind::Increment => content.map(str::to_owned),
        Kind::Exchange if !is_done => content.map(str::to_owned),
        _ => None,
    };
}

#[on(any, rdma_in_soak)]
fn commands_on_one_key_are_linearizable() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateways = [1, 2].map(|_| RespServer::gateway(&server, &["--threads", "2"]));
    let clock = Instant::now();
    let now = || clock.elapsed().as_nanos() as u64;
    let run = &|process: u64| {
        let mut client = gateways[process as usize % gateways.len()].connect();
        let mut random = SmallRng::seed_from_u64(process);
        let (mut history, mut seen) = (Vec::new(), Vec::new());
        for _ in 0..scaled(300) {
            let commands: Vec<_> =
                (0..PIPELINED).map(|_| next_command(&mut random, process, &seen)).collect();
            let invoke = now();
            client.send(&commands.iter().flat_map(|(words, _)| request(words)).collect::<Vec<_>>());
            for (_, mut record) in commands {
                answer(&mut record, &client.reply());
                (record.invoke, record.returned) = (invoke, Some(now()));
                seen.extend(record.found.clone());
                history.push(record);
            }
        }
        history
    };
    let mut history: Vec<Record> = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CONNECTIONS).map(|process| scope.spawn(move || run(process))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let done = |kind| {
        let is_done = |record: &&Record| (record.operation, record.result) == (kind, Ended::Done);
        history.iter().filter(is_done).count()
    };
    assert!(done(HistoryOperation::Get) > 0 && done(HistoryOperation::Increment) > 0);
    check(&history).unwrap_or_else(|violation| panic!("{violation}"));

    // A value that no client has ever stored.
    let is_get = |record: &&mut Record| record.operation == HistoryOperation::Get;
    let get = history.iter_mut().find(is_get).unwrap();
    (get.result, get.found) = (Ended::Done, Some("-1".to_owned()));
    assert!(check(&history).is_err());
}
