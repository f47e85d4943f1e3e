//! Proves that kv-server's metrics are right: what clients and the server do is counted. They come
//! in two formats, only requests for them are answered, and no client of HTTP can stop the server
//! or use much of it. Guards against connections that say nothing, too much, or garbage.
//! `metrics/files.rs` is about the files that name metrics, `metrics/client.rs` about the metrics
//! of clients.

mod client;
mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, TEST_TIMEOUT, device, fill, is_over_shm, scaled, wait_until};
use rustix::process::Signal;

use crate::server_cli;

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

/// The arguments of a server with metrics.
pub(crate) const METRICS: &str = "--metrics 127.0.0.1:0";
/// What a request for OpenMetrics has, as Prometheus sends it.
const OPEN_METRICS: &str =
    "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";

/// Returns the address of a server's metrics, from its log.
fn address(server: &ServerProcess) -> String {
    const BEFORE: &str = "metrics are at http://";
    server.wait_for_log("/metrics\n");
    let log = server.log();
    let (_, rest) = log.rsplit_once(BEFORE).unwrap();
    rest.split('/').next().unwrap().to_owned()
}

/// Connects to a server's metrics. Nothing on this connection waits without end.
fn connect(server: &ServerProcess) -> TcpStream {
    let stream = TcpStream::connect(address(server)).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
}

/// Sends a request of these bytes, and returns the status, the headers and the text.
fn ask(server: &ServerProcess, request: impl AsRef<[u8]>) -> (u16, String, String) {
    let mut stream = connect(server);
    stream.write_all(request.as_ref()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, text) = response.split_once("\r\n\r\n").expect(&response);
    let status = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    let length = format!("\r\nContent-Length: {}\r\n", text.len());
    assert!(head.contains(&length), "{head}");
    (status, head.to_owned(), text.to_owned())
}

/// Returns the metrics, in the format that the server prefers for these headers.
fn metrics(server: &ServerProcess, headers: &str) -> String {
    let request = format!("GET /metrics HTTP/1.1\r\nHost: kv\r\n{headers}\r\n");
    let (status, head, text) = ask(server, request);
    assert_eq!(status, 200, "{text}");
    let kind = if headers.contains("openmetrics") { "application/openmetrics" } else { "text/p" };
    assert!(head.contains(&format!("\r\nContent-Type: {kind}")), "{head}");
    text
}

/// The labels of a sample, by their names.
type Labels = BTreeMap<String, String>;

/// The metrics of a server in the text format of Prometheus.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    /// The type of each metric.
    types: BTreeMap<String, String>,
    /// The samples of each metric, with their labels.
    samples: BTreeMap<String, Vec<(Labels, f64)>>,
}

impl Scrape {
    fn of(server: &ServerProcess) -> Self {
        Self::parse(&metrics(server, ""))
    }

    fn parse(text: &str) -> Self {
        let mut scrape = Self::default();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                let before = scrape.types.insert(name.to_owned(), kind.to_owned());
                assert_eq!(before, None, "{name} is there twice");
            }
            if line.starts_with('#') {
                continue;
            }
            let (name, value) = line.rsplit_once(' ').expect(line);
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
            let labels = labels.map(|label| {
                let (name, value) = label.split_once('=').expect(line);
                (name.to_owned(), value.trim_matches('"').to_owned())
            });
            let sample = (labels.collect(), value.parse().expect(line));
            scrape.samples.entry(name.to_owned()).or_default().push(sample);
        }
        scrape
    }

    /// Returns the only sample of this metric.
    fn value(&self, name: &str) -> f64 {
        match self.samples.get(name).map(Vec::as_slice) {
            Some([(labels, value)]) if labels.is_empty() => *value,
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Returns the sum of the samples of this metric that have this label.
    pub(crate) fn labelled(&self, name: &str, label: (&str, &str)) -> f64 {
        let samples = self.samples.get(name).map(Vec::as_slice).unwrap_or_default();
        let has_label = |labels: &Labels| labels.get(label.0).is_some_and(|is| is == label.1);
        let found: Vec<f64> = samples
            .iter()
            .filter(|(labels, _)| has_label(labels))
            .map(|(_, value)| *value)
            .collect();
        assert!(!found.is_empty(), "{name} has no sample with {label:?}: {samples:?}");
        found.iter().sum()
    }

    /// Returns the names of the labels of this metric.
    fn labels(&self, name: &str) -> BTreeSet<&str> {
        let samples = self.samples.get(name).into_iter().flatten();
        samples.flat_map(|(labels, _)| labels.keys().map(String::as_str)).collect()
    }

    /// Adds the samples of another server.
    fn merge(&mut self, other: Self) {
        self.types.extend(other.types);
        for (name, samples) in other.samples {
            self.samples.entry(name).or_default().extend(samples);
        }
    }
}

#[on(shm)]
fn both_formats_have_the_same_samples() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let mut session = server.session();
    session.put(b"key", b"value").unwrap();
    let (plain, open) = (metrics(&server, ""), metrics(&server, OPEN_METRICS));
    assert!(open.ends_with("\n# EOF\n") && !plain.contains("# EOF") && !plain.contains("# UNIT"));
    assert!(open.contains("\n# TYPE farside_fences counter\n"), "{open}");
    assert!(open.contains("\n# UNIT farside_class_bytes bytes\n"), "{open}");
    assert!(plain.contains("\n# TYPE farside_fences_total counter\n"), "{plain}");
    let names = |text: &str| -> Vec<String> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
    };
    assert_eq!(names(&plain), names(&open));
}

#[on(shm)]
fn only_get_of_metrics_is_answered() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    for (request, status, text) in [
        ("GET / HTTP/1.1\r\n\r\n", 404, "the metrics are at /metrics\n"),
        ("GET /metrics/x HTTP/1.1\r\n\r\n", 404, "the metrics are at /metrics\n"),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", 405, ""),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 405, ""),
        ("\x16\x03\x01\r\n\r\n", 400, "this is no request of HTTP/1.1\n"),
    ] {
        let (got, head, said) = ask(&server, request);
        assert_eq!(got, status, "{request:?}: {head}");
        assert!(said.starts_with(text) && head.contains("\r\nConnection: close"), "{said}{head}");
    }
    let long = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(1 << 20));
    let mut stream = connect(&server);
    // The server closes before it has read all.
    let _ = stream.write_all(long.as_bytes());
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    assert!(response.is_empty() || response.starts_with(b"HTTP/1.1 431 "), "{response:?}");
    assert!(Scrape::of(&server).value("farside_incarnation") == 1.0);
}

/// A request that comes byte by byte, and several at once.
#[on(shm)]
fn a_request_may_come_in_parts() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let mut streams: Vec<_> = (0..8).map(|_| connect(&server)).collect();
    for byte in b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n" {
        streams.iter_mut().for_each(|stream| stream.write_all(&[*byte]).unwrap());
    }
    for mut stream in streams {
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }
}

/// How many silent connections there are at a time: far more than the server keeps.
const SILENT: usize = 200;
/// The connections that the server keeps, and some descriptors more.
const DESCRIPTORS_MAX: usize = 32 + 8;
/// The memory that these connections may take.
const BYTES_MAX: u64 = 4 << 20;

#[on(shm)]
fn silent_slow_and_garbage_connections_keep_no_one_out() {
    let server = ServerProcess::start(&format!("--memory 32MiB {METRICS}"));
    let mut session = server.session();
    session.put(b"key", b"value").unwrap();
    Scrape::of(&server);
    let (before, bytes_before) = (server.descriptors().len(), server.own_bytes());
    let garbage = vec![b'x'; 4 << 10];
    for sent in [&b""[..], b"GET /met", &garbage, b"\0", b"GET /metrics HTTP/1.1\r\n\r\n"] {
        // The last ones send a request, and do not read the response.
        let silent: Vec<TcpStream> = (0..SILENT)
            .map(|_| {
                let mut stream = connect(&server);
                let _ = stream.write_all(sent);
                stream
            })
            .collect();
        for _ in 0..20 {
            assert_eq!(Scrape::of(&server).value("farside_incarnation"), 1.0);
            assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
            session.put(b"key", b"value").unwrap();
        }
        let descriptors = server.descriptors().len();
        assert!(descriptors <= before + DESCRIPTORS_MAX, "{descriptors}, {before} before");
        let more = server.own_bytes().saturating_sub(bytes_before);
        assert!(more <= BYTES_MAX, "{more} bytes more");
        drop(silent);
    }
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count();
    assert!(threads < 16, "{threads}");
    // A silent connection is closed although no other comes.
    let started = Instant::now();
    let mut silent = connect(&server);
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0, "the server closes it");
    assert!(started.elapsed() >= Duration::from_secs(10), "{:?}", started.elapsed());
    wait_until("the descriptors are back", TEST_TIMEOUT, || server.descriptors().len() <= before);
}

#[on(shm)]
fn a_server_stops_although_requests_are_pending() {
    let mut server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let pending: Vec<_> = (0..10).map(|_| connect(&server)).collect();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    drop(pending);
}

/// Runs a server that must not start.
fn refused(arguments: &str) -> CommandOutput {
    let folder = tempfile::tempdir().unwrap();
    let address = server_cli::address(folder.path());
    server_cli::server(&format!("--listen {address} --memory 16MiB {arguments}"))
}

#[on(shm)]
fn an_address_that_cannot_be_used_is_reported_in_one_line() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let in_use = other.local_addr().unwrap();
    refused(&format!("--metrics {in_use}"))
        .expect_line(1, &["cannot serve metrics at ", &in_use.to_string(), "another program"]);
    // An address for documentation, which no host has.
    refused("--metrics 192.0.2.1:9400")
        .expect_line(1, &["cannot serve metrics at 192.0.2.1:9400", "no address of this host"]);
    for malformed in ["9400", ":9400", "localhost:9400", "127.0.0.1", "127.0.0.1:99999", "[::1]"] {
        let parts = ["--metrics", malformed, "write an IP address and a port, such as"];
        refused(&format!("--metrics {malformed}")).expect_line(2, &parts);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    std::fs::write(&file, "metrics = \"here\"\n").unwrap();
    refused(&format!("--config {}", file.display()))
        .expect_line(1, &["server.toml:1: `here` is no address for metrics; write an IP address"]);
}

/// The flag overrides the file, and IPv6 works.
#[on(shm)]
fn the_config_file_has_the_address_too() {
    let config = "metrics = \"[::1]:0\"\n";
    if TcpListener::bind("[::1]:0").is_err() {
        farside_tests::left_out("without IPv6", "it listens at [::1]");
        return;
    }
    let server = ServerProcess::start_with_config(config, "--memory 16MiB");
    assert!(address(&server).starts_with("[::1]:"), "{}", address(&server));
    assert_eq!(Scrape::of(&server).value("farside_incarnation"), 1.0);
    let server = ServerProcess::start_with_config(config, &format!("--memory 16MiB {METRICS}"));
    assert!(address(&server).starts_with("127.0.0.1:"), "{}", address(&server));
}
