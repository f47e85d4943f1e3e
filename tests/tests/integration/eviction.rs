//! Proves that with --evict a PUT finds room however much was stored, and that the evicted keys are
//! those not written for a long time. `space.rs` proves that without it no key is evicted.

use farside_tests::{ServerProcess, fill, scaled, self_describing};

const BYTES: usize = 1000;

#[test]
fn a_cache_takes_ten_times_what_fits_and_keeps_what_is_written_often() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let (hot, total) = (200u64, scaled(100_000).max(20_000));
    for n in 0..total {
        let key = 1_000_000 + n;
        session.put(key.to_le_bytes(), self_describing::value(key, 0, 0, BYTES)).unwrap();
        let often = n % hot;
        session.put(often.to_le_bytes(), self_describing::value(often, 0, n, BYTES)).unwrap();
    }
    let is_stored = |session: &mut farside::Session, key: u64| {
        session.get(key.to_le_bytes()).unwrap().is_some_and(|value| {
            assert!(self_describing::holds(key, &value), "key {key}");
            true
        })
    };
    // Each hot key was written within the last 400 PUTs, and over 10,000 values fit.
    let kept = (0..hot).filter(|key| is_stored(&mut session, *key)).count() as u64;
    assert!(kept > hot * 8 / 10, "{kept} of {hot} that were written often");
    let early = (0..1000).filter(|n| is_stored(&mut session, 1_000_000 + n)).count();
    let late = (total - 1000..total).filter(|n| is_stored(&mut session, 1_000_000 + n)).count();
    assert!(early < 100 && late > 800, "{early} of the oldest, {late} of the newest");
    let statistics = client.admin().statistics().unwrap();
    assert!(statistics.keys_evicted > total / 2, "{statistics:?}");
    server.assert_verifies();
}

/// With small values the index must keep growing, so evicted blocks must free memory for it.
#[test]
fn a_cache_of_small_values_never_runs_out_of_index() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let total = scaled(600_000).max(100_000);
    fill(&mut session, 0..total, u64::to_le_bytes);
    let last = (total - 1000..total).filter(|n| session.get(n.to_le_bytes()).unwrap().is_some());
    assert!(last.count() > 800);
    let statistics = client.admin().statistics().unwrap();
    assert!(statistics.splits > 100 && statistics.chunks_index > 1, "{statistics:?}");
    server.assert_verifies();
}
