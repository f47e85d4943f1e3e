//! Proves that kv-server's metrics are right: what clients and the server do is counted.
//! `metrics/http.rs` is about requests for them, `metrics/files.rs` about the files that name them.
//! `metrics/client.rs` is about the metrics of clients.

mod client;
mod files;
mod http;
mod scrape;

use std::time::Duration;

use farside_tests::{ServerProcess, TEST_TIMEOUT, device, fill, is_over_shm, scaled, wait_until};
pub(crate) use scrape::METRICS;
use scrape::Scrape;

#[on(any, rdma_in_soak)]
fn metrics_show_what_clients_and_the_server_do() {
    let server = ServerProcess::start(&format!("--memory 64MiB {METRICS}"));
    let empty = Scrape::of(&server);
    assert_eq!(empty.value("farside_region_bytes"), f64::from(64 << 20));
    assert_eq!((empty.value("farside_keys"), empty.value("farside_incarnation")), (0.0, 1.0));
    let heap: f64 =
        ["free", "index", "blocks", "emptying"].map(|state| heap(&empty, state)).iter().sum();
    assert!((50 << 20..=64 << 20).contains(&(heap as u64)), "{heap}");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..scaled(5000), |_| [7; 90]);
    let later = wait_for(&server, |now| now.value("farside_keys") == scaled(5000) as f64);
    assert_eq!(later.labelled("farside_clients", ("role", "writer")), 1.0);
    assert_eq!(later.labelled("farside_clients", ("role", "reader")), 0.0);
    let sessions = if is_over_shm() { 0.0 } else { 1.0 };
    assert_eq!(later.value("farside_sessions"), sessions);
    let load = later.value("farside_index_load_ratio") * later.value("farside_index_slots");
    assert!((load - scaled(5000) as f64).abs() < 0.01, "{load}");
    assert!(later.value("farside_index_splits_total") > 5.0 || scaled(5000) < 5000);
    let class = later.labelled("farside_class_bytes", ("block_bytes", "192"));
    assert!(class >= 192.0 * scaled(5000) as f64, "{class}");
    assert!(heap_of_blocks(&later) >= class && heap_of_blocks(&empty) == 0.0);
    let taken = later.value("farside_blocks_taken_total");
    assert!(taken >= scaled(5000) as f64, "{taken}");
    let kind = |kind| later.labelled("farside_control_messages_total", ("kind", kind));
    assert!(kind("take_blocks") > 0.0 && kind("goodbye") >= 1.0, "{:?}", later.samples);
    assert!(later.value("process_cpu_seconds_total") > empty.value("process_cpu_seconds_total"));
    if device().is_some() {
        wait_for(&server, |now| now.value("farside_probes_total") > 0.0);
    }
    drop((session, client));
    wait_for(&server, |now| now.labelled("farside_clients", ("role", "writer")) == 0.0);
}

fn heap(scrape: &Scrape, state: &str) -> f64 {
    scrape.labelled("farside_heap_bytes", ("state", state))
}

fn heap_of_blocks(scrape: &Scrape) -> f64 {
    heap(scrape, "blocks") + heap(scrape, "emptying")
}

/// Waits until the metrics of a server have this property, and returns them.
pub(crate) fn wait_for(server: &ServerProcess, mut holds: impl FnMut(&Scrape) -> bool) -> Scrape {
    let mut scrape = Scrape::of(server);
    wait_until("the metrics show it", TEST_TIMEOUT, || {
        scrape = Scrape::of(server);
        holds(&scrape)
    });
    scrape
}

/// An index of more subtables than a sample has.
#[on(shm)]
fn the_estimate_of_the_keys_in_a_large_index_is_within_five_percent() {
    let server = ServerProcess::start(&format!("--memory 128MiB {METRICS}"));
    let mut session = server.session();
    let keys = scaled(100_000);
    fill(&mut session, 0..keys, |_| b"");
    // Some of them are deleted, which the server does not notice either.
    for key in (0..keys).step_by(4) {
        assert!(session.delete(key.to_le_bytes()).unwrap());
    }
    let expected = (keys - keys.div_ceil(4)) as f64;
    let scrape = Scrape::of(&server);
    let estimate = scrape.value("farside_keys");
    assert!((estimate / expected - 1.0).abs() < 0.05, "{estimate} for {expected}");
}

#[on(any, rdma_in_soak)]
fn a_lost_client_a_refused_one_and_an_expired_value_are_counted() {
    let config = "secret = \"right\"\nclients_max = 9\n";
    let server = ServerProcess::start_with_config(config, &format!("--memory 16MiB {METRICS}"));
    let builder = || server.client_builder().secret("right");
    server.client_builder().secret("wrong").connect().unwrap_err();
    let client = builder().connect().unwrap();
    let mut session = client.session().unwrap();
    session.put_with_ttl(b"key", b"value", Duration::from_millis(5)).unwrap();
    // A client that ends in the middle of an operation says no goodbye.
    let lost = builder().connect().unwrap();
    let mut session_of_lost = lost.session().unwrap();
    let mut pipeline = session_of_lost.pipeline().unwrap();
    pipeline.insert(b"new", b"value").unwrap();
    assert!(pipeline.poll().is_none());
    wait_for(&server, |now| now.labelled("farside_clients", ("role", "writer")) == 2.0);
    std::mem::forget(pipeline);
    drop((session_of_lost, lost));
    let now = wait_for(&server, |now| {
        now.labelled("farside_fences_total", ("reason", "disconnected")) == 1.0
            && now.value("farside_expired_keys_total") == 1.0
    });
    assert_eq!(now.labelled("farside_refusals_total", ("reason", "credentials")), 1.0);
    assert_eq!(now.value("farside_clients_max"), 9.0);
    assert!(now.labelled("farside_control_messages_total", ("kind", "expires")) >= 1.0);
    let fences = &now.samples["farside_fences_total"];
    assert_eq!(fences.iter().map(|(_, count)| count).sum::<f64>(), 1.0, "{fences:?}");
}

// On shared memory only: it is about the region file.
#[on(shm)]
fn metrics_of_the_next_server_on_a_region_begin_anew() {
    let mut server = ServerProcess::start_with_file(&format!("--memory 32MiB {METRICS}"));
    fill(&mut server.session(), 0..1000, |_| b"value");
    assert!(Scrape::of(&server).value("farside_index_splits_total") > 0.0);
    server.kill();
    server.restart();
    let now = Scrape::of(&server);
    assert_eq!((now.value("farside_incarnation"), now.value("farside_keys")), (2.0, 1000.0));
    assert_eq!(now.value("farside_index_splits_total"), 0.0);
    // It waited for GRACE.
    let recovery = now.value("farside_recovery_seconds");
    assert!((0.1..60.0).contains(&recovery), "{recovery}");
}
