//! Proves that slow pipelines lose nothing. If a caller pauses for long between two calls, posted
//! chains are refused as late, and are posted again with their blocks. `kv-cli load` is such a
//! caller when a disk is slow. Also, more bytes may be in flight than the machine copies within
//! GRACE.
//!
//! Guards against two bugs. A block counts as written although its chain was refused, so a key is
//! linked to a block without its content. Chains queue after so many others that each READ is too
//! late, and is repeated.

use std::time::Duration;

use farside_tests::{ServerProcess, fill, get_in_turn, self_describing};

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
