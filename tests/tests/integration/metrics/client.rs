//! Proves that the metrics of a client count each operation once, by kind and result, and all that
//! it transfers, also after a session has ended and after a reconnect. A client without the option
//! has none. The names are those of docs/operations.md, and no key is among them.

use std::collections::BTreeSet;
use std::time::Duration;

use farside::{Client, Error, MetricsFormat, OperationError, Role, Session, Store};
use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, short_timeout};

use super::Scrape;
use super::files::{documented_in, promtool};

/// A part of all keys here, which nothing else has.
const KEY: &str = "kEy";

fn key(number: u32) -> String {
    format!("{KEY}{number}")
}

fn measured(server: &ServerProcess) -> Client {
    server.client_builder().metrics(true).connect().unwrap()
}

fn text(client: &Client) -> String {
    client.render_metrics(MetricsFormat::Prometheus).unwrap()
}

fn scrape(client: &Client) -> Scrape {
    Scrape::parse(&text(client))
}

impl Scrape {
    /// The operations of each kind with each result, without those of which there were none.
    fn operations(&self) -> BTreeSet<(String, String, u64)> {
        let samples = self.samples["farside_client_operations_total"].iter();
        let used = samples.filter(|(_, count)| *count > 0.0);
        used.map(|(labels, count)| {
            (labels["operation"].clone(), labels["result"].clone(), *count as u64)
        })
        .collect()
    }

    fn of_kind(&self, kind: &str) -> f64 {
        self.labelled("farside_client_operations_total", ("operation", kind))
    }

    fn retries(&self, reason: &str) -> f64 {
        self.labelled("farside_client_retries_total", ("reason", reason))
    }

    fn errors(&self, cause: &str) -> f64 {
        self.labelled("farside_client_errors_total", ("cause", cause))
    }
}

/// The traffic in the metrics has to be that of the sessions' own counters.
fn expect_traffic(scrape: &Scrape, sessions: &[&Session]) {
    let mut expected = farside::Counters::default();
    sessions.iter().for_each(|session| expected += session.counters());
    let verbs = |verb| scrape.labelled("farside_client_verbs_total", ("verb", verb)) as u64;
    let value = |name: &str| scrape.value(&format!("farside_client_{name}_total")) as u64;
    assert_eq!(value("round_trips"), expected.round_trips);
    assert_eq!(verbs("read"), expected.reads);
    assert_eq!(verbs("write"), expected.writes);
    assert_eq!(verbs("compare_swap"), expected.compare_swaps);
    assert_eq!(value("read_bytes"), expected.read_bytes);
    assert_eq!(value("written_bytes"), expected.written_bytes);
}

fn expect_operations(scrape: &Scrape, expected: &[(&str, &str, u64)]) {
    let owned = |(kind, result, count): &(&str, &str, u64)| {
        ((*kind).to_owned(), (*result).to_owned(), *count)
    };
    assert_eq!(scrape.operations(), expected.iter().map(owned).collect());
    // Those that did not fail have a latency.
    for (kind, ..) in expected {
        let succeeded = expected.iter().filter(|(of, result, _)| of == kind && *result != "error");
        let succeeded: u64 = succeeded.map(|(.., count)| count).sum();
        if succeeded == 0 {
            continue;
        }
        let name = "farside_client_operation_duration_seconds";
        let label = ("operation", *kind);
        assert_eq!(scrape.labelled(&format!("{name}_count"), label), succeeded as f64, "{kind}");
        assert!(scrape.labelled(&format!("{name}_sum"), label) > 0.0, "{kind}");
        let buckets = &scrape.samples[&format!("{name}_bucket")];
        let of_kind = buckets.iter().filter(|(labels, _)| labels["operation"] == *kind);
        let counts: Vec<f64> = of_kind.map(|(_, count)| *count).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&(succeeded as f64)), "{counts:?}");
    }
}

#[on(shm, tcp_in_soak)]
fn each_kind_of_operation_counts_once_with_what_it_transfers() {
    let server = ServerProcess::start("--memory 256MiB");
    let client = measured(&server);
    let mut session = client.session().unwrap();
    expect_operations(&scrape(&client), &[]);
    expect_traffic(&scrape(&client), &[&session]);
    let (long, longest) = (vec![7; 10_000], vec![9; 5 << 20]);
    // PUTs of a new key, of a cached one, of a long value, and of one with extents.
    for value in [&b"1"[..], b"2", &long, &long, &longest, b"3"] {
        session.put(key(1), value).unwrap();
    }
    session.put_with_ttl(key(2), "expires", Duration::from_millis(1)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // GETs of a cached, an absent and an expired value, and of a location that is not cached.
    assert_eq!(session.get(key(1)).unwrap().unwrap(), "3");
    assert!(session.get(key(0)).unwrap().is_none() && session.get(key(2)).unwrap().is_none());
    session.clear_cache();
    session.get(key(1)).unwrap().unwrap();
    // A value that another client has replaced, long ones, and one that is longer than the buffer.
    let mut other = server.session();
    other.put(key(1), "4").unwrap();
    assert_eq!(session.get(key(1)).unwrap().unwrap(), "4");
    other.put(key(1), "5").unwrap();
    session.put(key(1), "6").unwrap();
    for value in [&long, &longest] {
        session.put(key(3), value).unwrap();
        assert_eq!(session.get(key(3)).unwrap().unwrap(), value.as_slice());
        session.clear_cache();
        session.get(key(3)).unwrap().unwrap();
    }
    session.put(key(4), [1; 100]).unwrap();
    for _ in 0..2 {
        let error = session.get_into(key(4), &mut [0; 10]).unwrap_err();
        assert!(matches!(error, Error::Operation(OperationError::TargetTooShort { .. })));
        session.clear_cache();
    }
    assert!(session.ttl(key(4)).unwrap().is_some());
    session.get_range(key(4), 1, &mut [0; 10]).unwrap().unwrap();
    let mut writer = session.writer(key(5));
    writer.add(&longest).unwrap();
    writer.finish().unwrap();
    let expected = [("get", "found", 10), ("get", "absent", 2), ("get_range", "found", 1)];
    expect_operations(&scrape(&client), &[&expected[..], &[("put", "applied", 12)]].concat());
    expect_traffic(&scrape(&client), &[&session]);
    assert_eq!(session.scan().unwrap().count(), 4);
    expect_traffic(&scrape(&client), &[&session]);
}

#[on(shm, tcp_in_soak)]
fn changes_count_by_whether_they_were_applied() {
    let server = ServerProcess::start("--memory 32MiB");
    let client = measured(&server);
    let mut session = client.session().unwrap();
    assert!(session.insert(key(1), "a").unwrap() && !session.insert(key(1), "b").unwrap());
    assert!(session.update(key(1), "b").unwrap() && !session.update(key(0), "b").unwrap());
    session.store(key(1), "c", Store::always().returning()).unwrap();
    session.store(key(1), "c", Store::if_absent().returning()).unwrap();
    session.store(key(1), "c", Store::if_present().returning()).unwrap();
    assert!(session.compare_exchange(key(1), Some(b"c"), "d").unwrap().applied);
    assert!(!session.compare_exchange(key(1), Some(b"c"), "d").unwrap().applied);
    let version = session.version(key(1)).unwrap().unwrap();
    assert!(session.compare_exchange_version(key(1), version, "e").unwrap().applied);
    assert!(!session.delete_if_version(key(1), version).unwrap());
    assert!(!session.exists(key(0)).unwrap());
    session.increment(key(2), 5).unwrap();
    session.increment(key(1), 5).unwrap_err();
    session.append(key(2), "0").unwrap();
    session.get_or_insert(key(2), "").unwrap();
    session.get_or_insert(key(3), "").unwrap();
    assert!(session.touch(key(3), Duration::from_secs(60)).unwrap());
    assert!(!session.persist(key(0)).unwrap());
    assert!(session.take(key(3)).unwrap().is_some() && session.take(key(3)).unwrap().is_none());
    assert!(session.delete(key(2)).unwrap() && !session.delete(key(2)).unwrap());
    session.get("").unwrap_err();
    let expected = [
        ("insert", "applied", 1),
        ("insert", "not_applied", 2),
        ("update", "applied", 2),
        ("update", "not_applied", 1),
        ("put", "applied", 1),
        ("compare_exchange", "applied", 2),
        ("compare_exchange", "not_applied", 1),
        ("version", "found", 1),
        ("version", "absent", 1),
        ("delete_if_version", "not_applied", 1),
        ("increment", "applied", 1),
        ("increment", "error", 1),
        ("append", "applied", 1),
        ("get_or_insert", "applied", 1),
        ("get_or_insert", "not_applied", 1),
        ("touch", "applied", 1),
        ("touch", "not_applied", 1),
        ("take", "applied", 1),
        ("take", "not_applied", 1),
        ("delete", "applied", 1),
        ("delete", "not_applied", 1),
        ("get", "error", 1),
    ];
    let now = scrape(&client);
    expect_operations(&now, &expected);
    expect_traffic(&now, &[&session]);
    assert_eq!((now.errors("invalid"), now.errors("contended")), (2.0, 0.0));
    let statistics = session.cache_statistics();
    let lookups = |result| now.labelled("farside_client_cache_lookups_total", ("result", result));
    assert_eq!(lookups("hit"), statistics.hits as f64);
    assert_eq!(lookups("miss"), statistics.misses as f64);
    assert!(statistics.hits > 0 && statistics.misses > 0);
}

#[on(shm, tcp_in_soak)]
fn pipelines_and_batches_count_like_calls_that_wait() {
    const ROUNDS: u64 = 20;
    let server = ServerProcess::start("--memory 32MiB");
    let client = measured(&server);
    let (mut session, mut other) = (client.session().unwrap(), server.session());
    for _ in 0..ROUNDS {
        // Combined operations count one by one. Of the other ones some are in a task.
        let mut batch = session.batch();
        for _ in 0..3 {
            batch = batch.put(key(1), "a").get(key(1)).get(key(0)).put(key(2), "b");
        }
        batch = batch.increment(key(3), 1).version(key(0)).delete(key(4)).get("");
        let outcomes = batch.run().unwrap();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 1);
        other.put(key(1), "c").unwrap();
        other.put(key(2), "c").unwrap();
        let mut pipeline = session.pipeline().unwrap();
        pipeline.get(key(1)).unwrap();
        pipeline.put(key(2), "d").unwrap();
        while let Some(completed) = pipeline.wait() {
            completed.result.unwrap();
        }
    }
    let now = scrape(&client);
    assert_eq!(now.of_kind("get"), (6 + 1 + 1) as f64 * ROUNDS as f64);
    let operations = now.operations();
    let expected = [
        ("get", "error", ROUNDS),
        ("put", "applied", 7 * ROUNDS),
        ("increment", "applied", ROUNDS),
        ("version", "absent", ROUNDS),
        ("delete", "not_applied", ROUNDS),
    ];
    for (kind, result, count) in expected {
        let expected = (kind.to_owned(), result.to_owned(), count);
        assert!(operations.contains(&expected), "{expected:?}: {operations:?}");
    }
    // Key 1 is absent at most in the first batch, in which a GET may come before the PUT.
    let absent = now.samples["farside_client_operations_total"]
        .iter()
        .find(|(labels, _)| labels["operation"] == "get" && labels["result"] == "absent");
    let (_, absent) = absent.unwrap();
    assert!((3 * ROUNDS..=3 * ROUNDS + 3).contains(&(*absent as u64)), "{absent}");
    expect_traffic(&now, &[&session]);
    // Long values of several keys share doorbells over networks.
    let long = vec![5; 20_000];
    for _ in 0..2 {
        session.put_many([(key(5), &long), (key(6), &long)]).unwrap();
    }
    let mut targets = [vec![0; long.len()], vec![0; long.len()]];
    let entries = [5, 6].into_iter().map(key).zip(targets.iter_mut().map(|it| &mut it[..]));
    assert!(session.get_many_into(entries).unwrap().iter().all(Option::is_some));
    let later = scrape(&client);
    assert_eq!(later.of_kind("put") - now.of_kind("put"), 4.0);
    assert_eq!(later.of_kind("get") - now.of_kind("get"), 2.0);
    expect_traffic(&later, &[&session]);
}

#[on(shm, tcp_in_soak)]
fn counts_outlive_their_sessions_and_a_lost_connection() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let client = measured(&server);
    let (mut first, mut second) = (client.session().unwrap(), client.session().unwrap());
    first.put(key(1), "a").unwrap();
    second.get(key(1)).unwrap().unwrap();
    expect_traffic(&scrape(&client), &[&first, &second]);
    assert_eq!(scrape(&client).value("farside_client_sessions"), 2.0);
    drop(first);
    let before = scrape(&client);
    assert_eq!(before.value("farside_client_sessions"), 1.0);
    expect_operations(&before, &[("put", "applied", 1), ("get", "found", 1)]);
    server.kill();
    server.restart();
    // The region is a new one. Until the client notices the loss, it may find the old one.
    while second.get(key(1)).unwrap().is_some() {}
    let after = scrape(&client);
    assert_eq!(after.value("farside_client_reconnects_total"), 1.0);
    assert_eq!(after.value("farside_client_regions_replaced_total"), 1.0);
    for name in ["round_trips", "read_bytes", "written_bytes"] {
        let name = format!("farside_client_{name}_total");
        assert!(after.value(&name) >= before.value(&name), "{name}");
    }
    let absent = ("get".to_owned(), "absent".to_owned(), 1);
    assert!(after.operations().contains(&absent), "{:?}", after.operations());
    assert_eq!(after.of_kind("put"), 1.0);
    // A batch of which the connection is lost runs again, and fails if the server stays away.
    server.kill();
    let builder = server.client_builder().metrics(true).connect_timeout(short_timeout());
    builder.connect().unwrap_err();
    server.restart();
    second.batch().get(key(1)).run().unwrap().remove(0).unwrap();
    drop(second);
    let last = scrape(&client);
    assert_eq!(last.value("farside_client_reconnects_total"), 2.0);
    assert!(last.of_kind("get") > after.of_kind("get"));
    assert_eq!(last.labelled("farside_client_operations_total", ("result", "error")), 0.0);
}

#[on(shm, tcp_in_soak)]
fn an_operation_that_a_reader_may_not_do_and_one_without_a_server_are_errors() {
    let mut server = ServerProcess::start("--memory 16MiB");
    let builder = server.client_builder().metrics(true).connect_timeout(short_timeout());
    let client = builder.role(Role::Reader).connect().unwrap();
    let mut session = client.session().unwrap();
    session.put(key(1), "a").unwrap_err();
    session.delete(key(1)).unwrap_err();
    session.batch().put(key(1), "a").run().unwrap().remove(0).unwrap_err();
    assert_eq!(scrape(&client).errors("denied"), 3.0);
    server.kill();
    while session.get(key(1)).is_ok() {}
    let now = scrape(&client);
    assert_eq!(now.errors("unreachable"), 1.0);
    let errors = now.operations();
    let errors = errors.iter().filter(|(_, result, _)| result == "error");
    let errors: Vec<_> = errors.map(|(kind, _, count)| (kind.as_str(), *count)).collect();
    assert_eq!(errors, [("delete", 1), ("get", 1), ("put", 2)]);
    assert_eq!(now.retries("conflict"), 0.0);
}

#[on(shm, tcp_in_soak)]
fn a_client_without_the_option_has_no_metrics() {
    let server = ServerProcess::start("--memory 16MiB");
    let client = server.client();
    client.session().unwrap().put(key(1), "a").unwrap();
    for format in [MetricsFormat::Prometheus, MetricsFormat::OpenMetrics] {
        assert_eq!(client.render_metrics(format), None);
    }
}

// On shared memory only: the text is the same.
#[on(shm)]
fn promtool_accepts_the_text_and_it_has_no_key() {
    let server = ServerProcess::start("--memory 16MiB");
    let client = measured(&server);
    let mut session = client.session().unwrap();
    for number in 0..100 {
        session.put(key(number), "value").unwrap();
        session.get(key(number)).unwrap().unwrap();
    }
    session.increment(key(1), 1).unwrap_err();
    let (text, open) = (text(&client), client.render_metrics(MetricsFormat::OpenMetrics).unwrap());
    assert!(!text.contains(KEY) && !open.contains(KEY));
    assert!(open.ends_with("# EOF\n") && !text.contains("# EOF"));
    let Some(mut command) = promtool(&["check", "metrics"]) else { return };
    CommandOutput::with_stdin(&mut command, text.as_bytes()).expect(0, "");
}

// On shared memory only: the names are the same.
#[on(shm)]
fn the_documented_metrics_are_those_of_a_client() {
    let server = ServerProcess::start("--memory 16MiB");
    let client = measured(&server);
    client.session().unwrap().put(key(1), "a").unwrap();
    let now = scrape(&client);
    // A histogram has its samples under other names.
    let labels = |name: &str, kind: &str| {
        let suffix = if kind == "histogram" { "_count" } else { "" };
        let labels = now.labels(&format!("{name}{suffix}")).into_iter().map(str::to_owned);
        labels.collect::<BTreeSet<_>>()
    };
    let exported: BTreeSet<_> = now
        .types
        .iter()
        .map(|(name, kind)| (name.clone(), kind.clone(), labels(name, kind)))
        .collect();
    let documented: BTreeSet<_> =
        documented_in("\n### Metrics of a client\n").into_iter().collect();
    assert_eq!(exported, documented);
    let page = crate::tidy::read("docs/operations.md");
    for (name, label) in [
        ("farside_client_operations_total", "operation"),
        ("farside_client_operations_total", "result"),
        ("farside_client_retries_total", "reason"),
        ("farside_client_errors_total", "cause"),
    ] {
        for (labels, _) in &now.samples[name] {
            let value = format!("`{}`", labels[label]);
            assert!(page.contains(&value), "docs/operations.md does not explain {value}");
        }
    }
}
