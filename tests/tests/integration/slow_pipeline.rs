//! Proves that a caller who leaves a pipeline alone for long between two calls loses nothing: what
//! was posted before is refused as late and has to be written again, content and all. `kv-cli load`
//! is such a caller when a disk is slow.
//!
//! Guards against a bug: a block counted as written although its chain had been refused, so a key
//! got linked to a block without its content.

use std::time::Duration;

use farside_tests::{ServerProcess, proof};

#[test]
fn a_slow_caller_loses_nothing() {
    const KEYS: u64 = 60;
    /// Longer than a posted chain may wait.
    const PAUSE: Duration = Duration::from_millis(60);
    let server = ServerProcess::start(&["--memory", "32MiB"]);
    let mut session = server.client().session().unwrap();
    for round in 0..2 {
        let mut pipeline = session.pipeline().unwrap();
        for key in 0..KEYS {
            while pipeline.put(&key.to_le_bytes(), &proof::value(key, round, 0, 500)).is_err() {
                pipeline.wait().unwrap().result.unwrap();
            }
            if key % 4 == 0 {
                // Some go on to their next chain, which then waits for the caller.
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
            let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
            assert_eq!(value.data, proof::value(key, round, 0, 500));
        }
    }
}
