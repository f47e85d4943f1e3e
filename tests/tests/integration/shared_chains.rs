//! Proves that operations on one key share a chain in a pipeline until it is posted (invariant
//! I20). Each of them is answered, and none shares a chain that was posted before it.

use farside::OperationError::OutOfSpace;
use farside::{BatchOutcome, Error, Outcome, Session};
use farside_tests::ServerProcess;

/// Less than the lanes of a pipeline, so that all are started before the first is posted.
const TIMES: u64 = 8;

fn server() -> ServerProcess {
    ServerProcess::start(&["--memory", "32MiB", "--index", "4MiB"])
}

fn value(session: &mut Session, key: &[u8]) -> Vec<u8> {
    session.get(key).unwrap().unwrap().data
}

fn stored(data: &[u8], outcome: &BatchOutcome) -> bool {
    matches!(outcome, BatchOutcome::Value(Some(value)) if value.data == data)
}

#[test]
fn gets_of_a_key_read_once_and_puts_write_once() {
    let server = server();
    let session = &mut server.client().session().unwrap();
    for key in [b"a", b"b", b"c"] {
        session.put(key, key).unwrap();
    }
    let before = session.counters();
    let mut batch = session.batch();
    // One key after the other: a key that takes another's place in the table ends its sharing.
    for key in [b"a", b"b"] {
        for _ in 0..TIMES / 2 {
            batch.get(key);
        }
    }
    for (at, outcome) in batch.run().unwrap().into_iter().enumerate() {
        let key = if at < TIMES as usize / 2 { b"a" } else { b"b" };
        assert!(stored(key, &outcome.unwrap()));
    }
    let cost = session.counters() - before;
    assert_eq!((cost.verbs(), cost.reads), (2, 2));

    let before = session.counters();
    let values: Vec<_> = (0..TIMES).map(|n| vec![n as u8; 100 * n as usize]).collect();
    let mut batch = session.batch();
    for value in &values {
        batch.put(b"c", value);
    }
    let outcomes = batch.run().unwrap();
    assert!(outcomes.into_iter().all(|outcome| outcome.unwrap() == BatchOutcome::Stored));
    let cost = session.counters() - before;
    assert_eq!((cost.round_trips, cost.compare_swaps), (1, 1));
    assert_eq!(value(session, b"c"), values[TIMES as usize - 1], "the last one started");
    server.assert_verifies();
}

#[test]
fn only_what_may_be_shared_is() {
    let server = server();
    let session = &mut server.client().session().unwrap();
    for key in [b"a", b"d"] {
        session.put(key, b"old").unwrap();
    }
    // A GET beside a PUT, and operations of which each has to say what it found.
    let mut batch = session.batch();
    batch.get(b"a").put(b"a", b"new").insert(b"n", b"1").insert(b"n", b"2");
    batch.delete(b"d").delete(b"d");
    let outcomes: Vec<_> = batch.run().unwrap().into_iter().map(|it| it.unwrap()).collect();
    assert!(stored(b"old", &outcomes[0]) || stored(b"new", &outcomes[0]), "{outcomes:?}");
    assert_eq!(outcomes[1], BatchOutcome::Stored);
    for both in [&outcomes[2..4], &outcomes[4..6]] {
        let applied = both.iter().filter(|&it| *it == BatchOutcome::Applied(true)).count();
        assert_eq!(applied, 1, "{outcomes:?}");
    }
    assert_eq!(value(session, b"a"), b"new");
    server.assert_verifies();
}

#[test]
fn what_was_shared_stays_until_it_is_taken() {
    let server = server();
    let session = &mut server.client().session().unwrap();
    session.put(b"a", b"value").unwrap();
    let mut pipeline = session.pipeline().unwrap();
    for _ in 0..3 {
        pipeline.get(b"a").unwrap();
    }
    for round in 0..3 {
        let completed = pipeline.wait().unwrap();
        assert!(completed.ticket.number() < 3);
        assert!(matches!(completed.result.unwrap(), Outcome::Value(Some((b"value", _)))));
        // In the lane that READ for all, the first time.
        pipeline.put(b"b", &[round; 1000]).unwrap();
    }
}

#[test]
fn none_shares_a_read_that_was_posted_before_it() {
    let server = server();
    let client = server.client();
    let (mut reader, mut writer) = (client.session().unwrap(), client.session().unwrap());
    for key in [b"a", b"b"] {
        writer.put(key, b"old").unwrap();
        value(&mut reader, key);
    }
    let mut pipeline = reader.pipeline().unwrap();
    for key in [b"b", b"a"] {
        pipeline.get(key).unwrap();
    }
    // Both are posted here, and one is not taken.
    assert_eq!(pipeline.wait().unwrap().ticket.number(), 0);
    writer.put(b"a", b"new").unwrap();
    let later = pipeline.get(b"a").unwrap();
    let mut found = None;
    while let Some(completed) = pipeline.wait() {
        if completed.ticket == later
            && let Outcome::Value(Some((value, _))) = completed.result.unwrap()
        {
            found = Some(value.to_vec());
        }
    }
    assert_eq!(found.as_deref(), Some(&b"new"[..]));
}

#[test]
fn where_the_shared_chain_fails_each_fails_on_its_own() {
    let server = ServerProcess::start(&["--memory", "8MiB"]);
    let session = &mut server.client().session().unwrap();
    // Their blocks stay when there is no room for large ones.
    session.put(b"small", b"small").unwrap();
    let large = vec![7; 256 << 10];
    let full = (0..).find(|n: &u64| session.put(&n.to_le_bytes(), &large).is_err()).unwrap();
    let mut batch = session.batch();
    let key = full.to_le_bytes();
    for _ in 0..TIMES {
        batch.put(&key, &large);
    }
    batch.put(&key, b"small").put(&key, &large);
    for (at, outcome) in batch.run().unwrap().into_iter().enumerate() {
        let is_small = at as u64 == TIMES;
        assert!(
            matches!(
                (&outcome, is_small),
                (Err(Error::Operation(OutOfSpace { .. })), false)
                    | (Ok(BatchOutcome::Stored), true)
            ),
            "{at}: {outcome:?}"
        );
    }
    assert_eq!(value(session, &key), b"small");
    server.assert_verifies();
}
