//! Proves that kv-bench works in the memory of its own server, and takes no block of another server
//! that its clients could need.

use std::time::Duration;

use farside_tests::{ServerProcess, TEST_TIMEOUT, wait_until};

use crate::workloads::{bench, count, measured, words};

#[on(shm)]
fn a_run_works_in_less_memory_than_all_its_inserts_could_take() {
    let json = measured("--workload d --seconds 0.3 --threads 8 --memory 64MiB");
    assert!(count(&json) > 0);
}

#[on(shm)]
fn raw_verbs_take_no_block_that_others_could_need() {
    let verbs = |server: &ServerProcess, span: &str| {
        let address = server.address();
        bench(&words(&format!("verbs --server {address} --span {span} --seconds 0.05")))
    };
    let roomy = ServerProcess::start("--memory 32MiB");
    let mut session = roomy.session();
    verbs(&roomy, "32MiB").expect_line(5, &["can spare", "--span"]);
    assert_eq!(verbs(&roomy, "4MiB").code, Some(0));
    session.put(b"key", [0; 1000]).unwrap();
    roomy.assert_verifies();
    let cache = ServerProcess::start("--memory 8MiB --grace-ms 10 --evict");
    let client = cache.client();
    let mut session = client.session().unwrap();
    let evicted = || client.admin().statistics().unwrap().keys_evicted;
    (0..20_000u64).for_each(|key| session.put(key.to_le_bytes(), [0; 1000]).unwrap());
    // The server evicts ahead of demand, so it goes on for a moment.
    let mut before = evicted();
    wait_until("no more keys are evicted", TEST_TIMEOUT, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = evicted();
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    verbs(&cache, "1MiB").expect_line(5, &["can spare", "--span"]);
    assert_eq!(evicted(), before);
}

#[on(shm)]
fn the_raw_limit_is_measured_for_few_records_or_the_report_says_why_not() {
    let rest = "--workload c --warmup-seconds 0 --operations 999 --limit-seconds 0.1";
    for (line, part) in [
        ("--records 100 --depth 128 --value-size 64", "by raw verbs alone"),
        ("--records 9 --depth 256 --value-size 400000", "not measured: 256 operations"),
    ] {
        let output = bench(&words(&format!("ycsb {line} {rest}")));
        assert!(String::from_utf8_lossy(&output.stdout).contains(part), "{:?}", output.stderr);
    }
}
