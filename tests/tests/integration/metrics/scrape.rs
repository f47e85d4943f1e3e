//! Requests for metrics, and what a response has.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

use farside_tests::{ServerProcess, TEST_TIMEOUT};

/// The arguments of a server with metrics.
pub(crate) const METRICS: &str = "--metrics 127.0.0.1:0";
/// What a request for OpenMetrics has, as Prometheus sends it.
pub(super) const OPEN_METRICS: &str =
    "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";

/// Returns the address of a server's metrics, from its log.
pub(super) fn address(server: &ServerProcess) -> String {
    const BEFORE: &str = "metrics are at http://";
    server.wait_for_log("/metrics\n");
    let log = server.log();
    let (_, rest) = log.rsplit_once(BEFORE).unwrap();
    rest.split('/').next().unwrap().to_owned()
}

/// Connects to a server's metrics. Nothing on this connection waits without end.
pub(super) fn connect(server: &ServerProcess) -> TcpStream {
    let stream = TcpStream::connect(address(server)).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
}

/// Sends a request of these bytes, and returns the status, the headers and the text.
pub(super) fn ask(server: &ServerProcess, request: impl AsRef<[u8]>) -> (u16, String, String) {
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
pub(super) fn metrics(server: &ServerProcess, headers: &str) -> String {
    let request = format!("GET /metrics HTTP/1.1\r\nHost: kv\r\n{headers}\r\n");
    let (status, head, text) = ask(server, request);
    assert_eq!(status, 200, "{text}");
    let kind = if headers.contains("openmetrics") { "application/openmetrics" } else { "text/p" };
    assert!(head.contains(&format!("\r\nContent-Type: {kind}")), "{head}");
    text
}

/// The labels of a sample, by their names.
pub(super) type Labels = BTreeMap<String, String>;

/// The metrics of a server in the text format of Prometheus.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    /// The type of each metric.
    pub(super) types: BTreeMap<String, String>,
    /// The samples of each metric, with their labels.
    pub(super) samples: BTreeMap<String, Vec<(Labels, f64)>>,
}

impl Scrape {
    pub(super) fn of(server: &ServerProcess) -> Self {
        Self::parse(&metrics(server, ""))
    }

    pub(super) fn parse(text: &str) -> Self {
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
    pub(super) fn value(&self, name: &str) -> f64 {
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
    pub(super) fn labels(&self, name: &str) -> BTreeSet<&str> {
        let samples = self.samples.get(name).into_iter().flatten();
        samples.flat_map(|(labels, _)| labels.keys().map(String::as_str)).collect()
    }

    /// Adds the samples of another server.
    pub(super) fn merge(&mut self, other: Self) {
        self.types.extend(other.types);
        for (name, samples) in other.samples {
            self.samples.entry(name).or_default().extend(samples);
        }
    }
}
