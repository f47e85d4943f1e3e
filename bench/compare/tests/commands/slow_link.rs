//! Proves that a deep pipeline of large GETs on a slow link READs each value once and keeps the
//! link busy. The network of 25 MB/s is emulated, with its own clock, so that no figure depends on
//! this machine.
//!
//! Guards against posting all chains at once. Then chains queue for longer than operations trust
//! what they READ: values are READ up to 125 times, and GETs fail as `Contended`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside::Error;
use farside::OperationError::Contended;
use farside_bench::emulation::{Link, wrap};
use farside_tests::{ServerProcess, fill, get_in_turn, self_describing};

const BYTES_PER_S: u64 = 25_000_000;
/// The size of a value. With key and header it fills a block of 512 KiB, which a GET without a
/// cached location READs whole.
const BYTES: usize = (512 << 10) - 64;
/// As many keys as GETs in flight: GETs of one key would share a READ.
const KEYS: u64 = 256;

// On shared memory only: the network is emulated, on the clock of the test.
#[on(shm)]
fn large_values_are_read_once_at_any_depth() {
    let server = ServerProcess::start("--memory 192MiB --grace-ms 100");
    let mut writer = server.session();
    fill(&mut writer, 0..KEYS, |key| self_describing::value(key, 0, 0, BYTES));
    for depth in [1, 4, 16, 64, 256] {
        for is_cached in [false, true] {
            assert_read_once(&server, depth, is_cached);
        }
    }
}

fn assert_read_once(server: &ServerProcess, depth: u16, is_cached: bool) {
    let time = Arc::new(AtomicU64::new(0));
    let link = Link { bytes_per_s: BYTES_PER_S, simulated_clock: Some(time.clone()) };
    let builder = server.client_builder().pipeline_depth(depth).intercept_fabric(wrap(link));
    let builder = if is_cached { builder } else { builder.cache_bytes(0) };
    let mut session = builder.connect().unwrap().session().unwrap();
    let keys = KEYS.min(2 * u64::from(depth)).max(16);
    if is_cached {
        // Fills the location cache by single GETs, so that no pipeline has learned anything yet, as
        // in the uncached runs.
        (0..keys).for_each(|key| assert!(session.get(key.to_le_bytes()).unwrap().is_some()));
    }
    let (begun, before) = (time.load(Ordering::Relaxed), session.counters());
    let gets = 2 * keys;
    get_in_turn(&mut session, gets, keys, BYTES);
    let (returned, read) = (gets * BYTES as u64, (session.counters() - before).read_bytes);
    let seconds = (time.load(Ordering::Relaxed) - begun) as f64 / 1e9;
    let carried = returned as f64 / (BYTES_PER_S as f64 * seconds);
    let ratio = read as f64 / returned as f64;
    println!("{depth:4} in flight, cached {is_cached}: {ratio:.3} READ, {carried:.3} of the link");
    assert!(ratio <= 1.2, "{depth} in flight, cached {is_cached}: {read} of {returned} bytes");
    assert!(carried >= 0.85, "{depth} in flight, cached {is_cached}: {carried} of the link");
}

/// The value takes 200 ms: more than twice as long as an operation trusts its READ.
// On shared memory only: the network is emulated, on the clock of the test.
#[on(shm)]
fn a_get_of_a_value_that_cannot_arrive_in_time_fails() {
    const LARGE: usize = 1_000_000;
    let server = ServerProcess::start("--memory 64MiB --grace-ms 100");
    server.session().put(b"large", self_describing::value(0, 0, 0, LARGE)).unwrap();
    let link =
        Link { bytes_per_s: BYTES_PER_S / 5, simulated_clock: Some(Arc::new(AtomicU64::new(0))) };
    let client = server.client_builder().intercept_fabric(wrap(link)).connect().unwrap();
    let mut session = client.session().unwrap();
    let before = session.counters();
    let error = session.get(b"large").unwrap_err();
    assert!(matches!(error, Error::Operation(Contended { .. })), "{error}");
    assert!(error.to_string().contains("grace_ms"), "{error}");
    let read = (session.counters() - before).read_bytes;
    assert!(read < 80 * LARGE as u64, "READ {read} bytes");
}

/// All GETs start at once, before the sizes are known. Only two values arrive before the other
/// GETs' windows are too old, so the last GETs READ their windows some thirty times.
// On shared memory only: the network is emulated, on the clock of the test.
#[on(shm)]
fn the_first_gets_of_a_deep_pipeline_all_succeed() {
    const LARGE: usize = 1_000_000;
    const DEPTH: u16 = 64;
    let server = ServerProcess::start("--memory 128MiB --grace-ms 100");
    let value = self_describing::value(0, 0, 0, LARGE);
    fill(&mut server.session(), 0..DEPTH.into(), |_| &value);
    let link =
        Link { bytes_per_s: BYTES_PER_S, simulated_clock: Some(Arc::new(AtomicU64::new(0))) };
    let builder =
        server.client_builder().pipeline_depth(DEPTH).cache_bytes(0).intercept_fabric(wrap(link));
    let mut session = builder.connect().unwrap().session().unwrap();
    get_in_turn(&mut session, DEPTH.into(), DEPTH.into(), LARGE);
}
