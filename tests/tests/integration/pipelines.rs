//! Proves that operations on one key in a pipeline share a chain until it is posted (invariant
//! I20). Each of them gets a result, and none shares a chain that was posted before it.

use farside::OperationError::OutOfSpace;
use farside::{Error, Outcome, Session};
use farside_tests::{ServerProcess, fill_up};

/// Fewer operations than a pipeline has lanes, so all are started before the first is posted.
const TIMES: u64 = 8;

fn server() -> ServerProcess {
    ServerProcess::start("--memory 32MiB --index 4MiB")
}

fn value(session: &mut Session, key: &[u8]) -> Vec<u8> {
    session.get(key).unwrap().unwrap().data
}

fn stored(data: &[u8], outcome: &Outcome) -> bool {
    outcome.value.as_deref() == Some(data)
}

#[on(each, rdma_in_soak)]
fn gets_of_a_key_read_once_and_puts_write_once() {
    let server = server();
    let session = &mut server.session();
    for key in [b"a", b"b", b"c"] {
        session.put(key, key).unwrap();
    }
    let before = session.counters();
    let mut batch = session.batch();
    // One key after the other, because a key can replace another one in the table of shared chains.
    for key in [b"a", b"b"] {
        for _ in 0..TIMES / 2 {
            batch = batch.get(key);
        }
    }
    for (number, outcome) in batch.run().unwrap().into_iter().enumerate() {
        let key = if number < TIMES as usize / 2 { b"a" } else { b"b" };
        assert!(stored(key, &outcome.unwrap()));
    }
    let cost = session.counters() - before;
    assert_eq!((cost.verbs(), cost.reads), (2, 2));

    let before = session.counters();
    let values: Vec<_> = (0..TIMES).map(|n| vec![n as u8; 100 * n as usize]).collect();
    let mut batch = session.batch();
    for value in &values {
        batch = batch.put(b"c", value);
    }
    let outcomes = batch.run().unwrap();
    let versions: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap().version).collect();
    let (last, overwritten) = versions.split_last().unwrap();
    assert!(last.is_some() && overwritten.iter().all(Option::is_none), "{versions:?}");
    let cost = session.counters() - before;
    assert_eq!((cost.round_trips, cost.compare_swaps), (1, 1));
    assert_eq!(value(session, b"c"), values[TIMES as usize - 1], "the value of the last PUT");
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn operations_that_need_their_own_result_share_no_chain() {
    let server = server();
    let session = &mut server.session();
    for key in [b"a", b"d"] {
        session.put(key, b"old").unwrap();
    }
    // A GET beside a PUT, and pairs of operations that each return whether they had an effect.
    let batch = session.batch().get(b"a").put(b"a", b"new");
    let batch = batch.insert(b"n", b"1").insert(b"n", b"2").delete(b"d").delete(b"d");
    let outcomes: Vec<_> = batch.run().unwrap().into_iter().map(|it| it.unwrap()).collect();
    assert!(stored(b"old", &outcomes[0]) || stored(b"new", &outcomes[0]), "{outcomes:?}");
    assert!(outcomes[1].applied);
    for both in [&outcomes[2..4], &outcomes[4..6]] {
        let applied = both.iter().filter(|it| it.applied).count();
        assert_eq!(applied, 1, "{outcomes:?}");
    }
    assert_eq!(value(session, b"a"), b"new");
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_shared_result_stays_until_every_operation_has_taken_it() {
    let server = server();
    let session = &mut server.session();
    session.put(b"a", b"value").unwrap();
    let mut pipeline = session.pipeline().unwrap();
    for _ in 0..3 {
        pipeline.get(b"a").unwrap();
    }
    for round in 0..3 {
        let completed = pipeline.wait().unwrap();
        assert!(completed.ticket.number() < 3);
        assert_eq!(completed.result.unwrap().value.as_deref(), Some(&b"value"[..]));
        // The first PUT uses the lane that READ for all GETs.
        pipeline.put(b"b", [round; 1000]).unwrap();
    }
}

#[on(each, rdma_in_soak)]
fn a_get_does_not_share_a_read_that_was_posted_before_it() {
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
    // This posts both GETs, and takes the result of only one.
    assert_eq!(pipeline.wait().unwrap().ticket.number(), 0);
    writer.put(b"a", b"new").unwrap();
    let later = pipeline.get(b"a").unwrap();
    let mut found = None;
    while let Some(completed) = pipeline.wait() {
        if completed.ticket == later
            && let Some(value) = completed.result.unwrap().value
        {
            found = Some(value.to_vec());
        }
    }
    assert_eq!(found.as_deref(), Some(&b"new"[..]));
}

#[on(each, rdma_in_soak)]
fn if_a_shared_chain_fails_each_operation_has_its_own_result() {
    let server = ServerProcess::start("--memory 8MiB");
    let session = &mut server.session();
    // The session keeps blocks for small values when there is no room for large ones.
    session.put(b"small", b"small").unwrap();
    let large = vec![7; 256 << 10];
    let (full, _) = fill_up(session, 0, |_| &large);
    let mut batch = session.batch();
    let key = full.to_le_bytes();
    for _ in 0..TIMES {
        batch = batch.put(key, &large);
    }
    let batch = batch.put(key, b"small").put(key, &large);
    for (at, outcome) in batch.run().unwrap().into_iter().enumerate() {
        let is_small = at as u64 == TIMES;
        assert!(
            matches!(
                (&outcome, is_small),
                (Err(Error::Operation(OutOfSpace { .. })), false)
                    | (Ok(Outcome { applied: true, .. }), true)
            ),
            "{at}: {outcome:?}"
        );
    }
    assert_eq!(value(session, &key), b"small");
    server.assert_verifies();
}
