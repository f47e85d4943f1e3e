//! Proves that operations on one key in a pipeline share a chain until it is posted (invariant
//! I20). Each of them gets a result, and none shares a chain that was posted before it.
//!
//! Slow pipelines lose nothing. If a caller pauses for long between two calls, posted chains are
//! refused as late, and are posted again with their blocks. `kv-cli load` is such a caller when a
//! disk is slow. Also, more bytes may be in flight than the machine copies within GRACE. Guards
//! against two bugs. A block counts as written although its chain was refused, so a key is linked
//! to a block without its content. Chains queue after so many others that each READ is too late,
//! and is repeated.

use std::time::Duration;

use farside::OperationError::OutOfSpace;
use farside::{Error, Outcome, Session};
use farside_tests::{ServerProcess, fill, fill_up, get_in_turn, self_describing};

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

#[on(each, rdma_in_soak)]
fn a_pipeline_with_a_slow_caller_loses_nothing() {
    const KEYS: u64 = 60;
    /// Longer than a posted chain may wait.
    const PAUSE: Duration = Duration::from_millis(60);
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    for round in 0..2 {
        let mut pipeline = session.pipeline().unwrap();
        for key in 0..KEYS {
            while pipeline
                .put(key.to_le_bytes(), self_describing::value(key, round, 0, 500))
                .is_err()
            {
                pipeline.wait().unwrap().result.unwrap();
            }
            if key % 4 == 0 {
                // Some operations post their next chain, which then waits for the caller.
                let _ = pipeline.poll().map(|completed| completed.result.unwrap());
                std::thread::sleep(PAUSE);
            }
        }
        while let Some(completed) = pipeline.wait() {
            completed.result.unwrap();
        }
        drop(pipeline);
        server.assert_verifies();
        for key in 0..KEYS {
            let value = session.get(key.to_le_bytes()).unwrap().unwrap();
            assert_eq!(value.data, self_describing::value(key, round, 0, 500));
        }
    }
}

// On shared memory only: it moves a gigabyte and is about doorbells of shm.
#[on(shm)]
fn values_are_read_once_even_with_more_in_flight_than_grace_allows() {
    const BYTES: usize = 256 << 10;
    /// As many keys as GETs in flight: GETs of one key would share a READ.
    const KEYS: u64 = 512;
    const GETS: u64 = 2000;
    // 128 MiB are in flight. A build without optimization takes longer than GRACE to copy and check
    // that. But GRACE is long enough for the few megabytes between the READs of one GET.
    let server = ServerProcess::start("--memory 192MiB --grace-ms 100");
    let client = server.client_builder().pipeline_depth(KEYS as u16).connect().unwrap();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..KEYS, |key| self_describing::value(key, 0, 0, BYTES));
    let before = session.counters();
    get_in_turn(&mut session, GETS, KEYS, BYTES);
    // Bytes are bounded, not READs: a descheduled thread READs its window again, which is cheap.
    let bytes = (session.counters() - before).read_bytes;
    assert!(bytes < 2 * GETS * BYTES as u64, "READ {bytes} bytes for {GETS} GETs");
}
