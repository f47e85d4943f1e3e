//! Proves that kv-bench writes the documented JSON for every workload, with a server that it starts
//! itself. Its recorded histories are linearizable, and complete enough to show a wrong answer.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use farside_bench::price::Price;
use farside_bench::workload::Kind;
use farside_linearizability::{HistoryOperation, Record, Violation};
use farside_tests::binary;
use farside_tests::command::{CommandOutput, command};
use serde_json::Value as Json;

pub(crate) fn bench(arguments: &[impl AsRef<OsStr>]) -> CommandOutput {
    measuring("kv-bench", arguments)
}

/// Returns the arguments in a line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Runs kv-bench or kv-compare.
pub(crate) fn measuring(program: &str, arguments: &[impl AsRef<OsStr>]) -> CommandOutput {
    // Both commands expect kv-server in their own folder.
    binary("kv-server");
    CommandOutput::of(command(program).args(arguments))
}

#[track_caller]
pub(crate) fn expect_fields(object: &Json, fields: &[&str]) {
    let has: BTreeSet<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(has, fields.iter().copied().collect(), "{object}");
}

/// Checks one kind of operation in all files; returns the number of operations.
#[track_caller]
fn expect_kind(kind: &str, figures: &Json, hdr: &str, depth: u64) -> u64 {
    let latencies = ["p50_ns", "p99_ns", "p999_ns", "max_ns", "latencies"];
    let rest = ["count", "round_trips", "verbs", "bytes"];
    expect_fields(figures, &[&latencies[..], &rest[..]].concat());
    expect_fields(&figures["verbs"], &["read", "write", "cas"]);
    let number = |name: &str| figures[name].as_u64().unwrap();
    let count = number("count");
    assert!(count > 0 && number("round_trips") > 0);
    assert!(number("p50_ns") <= number("p99_ns") && number("p99_ns") <= number("p999_ns"));
    assert!(hdr.contains(&format!("\nTag={kind},")), "{hdr}");
    let price = Price::of(Kind::ALL.into_iter().find(|known| known.name() == kind).unwrap(), 64);
    // Fewer than half of the operations in flight share the chain of another.
    let chains_min = if depth == 1 { count } else { count / 2 };
    assert!(number("bytes") >= price.bytes * chains_min, "{figures} for less than {price:?}");
    count
}

#[on(shm)]
fn the_json_of_every_workload_has_the_documented_fields() {
    let folder = tempfile::tempdir().unwrap();
    let [file, hdr] = ["json", "hdr"].map(|name| folder.path().join(name));
    let workloads = [
        ("a", &["get", "put"][..]),
        ("b", &["get", "put"]),
        ("c", &["get"]),
        ("d", &["get", "insert"]),
        ("f", &["get", "rmw"]),
    ];
    for ((workload, operations), depth) in
        workloads.iter().flat_map(|workload| [(*workload, 1), (*workload, 16)])
    {
        let [json, log] = [&file, &hdr].map(|path| path.display());
        let line = format!(
            "ycsb --workload {workload} --records 1000 --threads 2 --depth {depth} \
             --warmup-seconds 0.1 --seconds 1 --limit-seconds 0.1 \
             --json {json} --hdr {log}"
        );
        bench(&words(&line)).succeeded();
        let json: Json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        expect_fields(
            &json,
            &[
                "command",
                "commit",
                "date",
                "machine",
                "fabric",
                "workload",
                "threads",
                "clients",
                "servers",
                "sockets",
                "depth",
                "records",
                "value_size",
                "pattern",
                "seconds",
                "throughput_ops_s",
                "open_loop",
                "operations",
                "cache",
                "cpu_s",
                "server",
                // Not documented: operations must not allocate.
                "allocations",
                "unexpected",
                "limit",
                "emulated",
            ],
        );
        let raw = ["read_ops_s", "write_ops_s", "cas_ops_s", "update_ops_s"];
        expect_fields(&json["limit"], &[&raw[..], &["mix_ops_s", "mix_ratio"]].concat());
        expect_fields(&json["machine"], &["processor", "cores", "kernel", "pages"]);
        assert_eq!((&json["fabric"], &json["workload"]), (&"shm".into(), &workload.into()));
        assert_eq!((&json["threads"], &json["records"]), (&2.into(), &1000.into()));
        expect_fields(&json["cache"], &["hits", "misses"]);
        expect_fields(&json["server"], &["cpu_s", "wakeups"]);
        expect_fields(&json["operations"], operations);
        assert_eq!(json["unexpected"], 0);
        let log = std::fs::read_to_string(&hdr).unwrap();
        let kinds = json["operations"].as_object().unwrap();
        let total: u64 =
            kinds.iter().map(|(kind, figures)| expect_kind(kind, figures, &log, depth)).sum();
        let rate = total as f64 / json["seconds"].as_f64().unwrap();
        let reported = json["throughput_ops_s"].as_f64().unwrap();
        assert!((rate / reported - 1.0).abs() < 0.01, "{rate} {reported}");
    }
}

/// Returns the JSON of a short run.
pub(crate) fn measured(line: &str) -> Json {
    let short = "--records 500 --warmup-seconds 0 --limit-seconds 0 --json -";
    let output = bench(&words(&format!("ycsb {line} {short}"))).succeeded();
    assert!(!output.stderr.contains("WARNING"), "{}", output.stderr);
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the number of operations of all kinds.
pub(crate) fn count(json: &Json) -> u64 {
    let kinds = json["operations"].as_object().unwrap().values();
    kinds.map(|figures| figures["count"].as_u64().unwrap()).sum()
}

#[on(shm)]
fn a_run_makes_exactly_the_given_number_of_operations() {
    for (line, expected) in [
        ("--workload a --operations 1001 --threads 3", 1001),
        ("--workload d --operations 77 --depth 1 --value-size facebook", 77),
        ("-p operationcount=5 -p insertproportion=1 -p fieldlengthdistribution=constant", 5),
        ("--workload f --operations 333 --distribution hotspot --target-rate 1e6", 333),
    ] {
        let json = measured(line);
        assert_eq!(count(&json), expected, "{line}");
    }
}

#[on(shm)]
fn arguments_may_be_any_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join(OsStr::from_bytes(b"\xff.json"));
    let line = "ycsb --workload c --records 50 --operations 50 --limit-seconds 0 --json";
    let words = line.split(' ').map(OsStr::new);
    bench(&words.chain([json.as_os_str()]).collect::<Vec<_>>()).succeeded();
    let json: Json = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert!(json["command"].as_str().unwrap().ends_with("\u{fffd}.json'"), "{json}");
}

#[on(shm)]
fn a_property_file_configures_the_run_and_unknown_properties_are_reported() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "recordcount=100\noperationcount=200\nworkload=site.ycsb.workloads.CoreWorkload\n\
                readproportion=0.7\nupdateproportion=0.2\nreadmodifywriteproportion=0.1\n\
                fieldcount=2\nfieldlength=8\nrequestdistribution=hotspot\nredis.host=here\n";
    std::fs::write(file.path(), text).unwrap();
    let name = file.path().to_str().unwrap();
    let line = format!("ycsb -P {name} --warmup-seconds 0 --limit-seconds 0 --json -");
    let output = bench(&words(&line)).succeeded();
    assert!(output.stderr.ends_with("these properties are not known here: redis.host\n"));
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((count(&json), &json["records"]), (200, &100.into()));
    assert_eq!((&json["workload"], &json["value_size"]), (&"custom".into(), &16.into()));
    assert_eq!(json["pattern"]["distribution"]["name"], "hotspot");
    expect_fields(&json["pattern"]["mix"], &["get", "put", "rmw"]);
}

#[on(shm)]
fn a_target_rate_is_not_exceeded_and_an_unreachable_one_is_reported() {
    for depth in [1, 8] {
        let line = format!("--workload b --seconds 0.2 --threads 2 --depth {depth}");
        let slow = measured(&format!("{line} --target-rate 1000"));
        let operations = count(&slow) as f64;
        let due = slow["seconds"].as_f64().unwrap() * 1000.0;
        assert!(operations > 0.0 && operations <= due + 2.0, "{operations} of {due}");
        expect_fields(&slow["open_loop"], &["target_ops_s", "arrivals", "behind_s", "reached"]);
        expect_fields(&slow["operations"]["get"]["service"], &["p50_ns", "p99_ns", "p999_ns"]);
        let fast = measured(&format!("{line} --target-rate 1e9 --arrivals poisson"));
        assert_eq!((&fast["open_loop"]["reached"], count(&fast) > 0), (&false.into(), true));
        let get = &fast["operations"]["get"];
        assert!(get["p50_ns"].as_u64() > get["service"]["p50_ns"].as_u64(), "{get}");
    }
}

#[on(shm)]
fn several_clients_make_one_run() {
    for workload in ["a", "d"] {
        let line = format!("--workload {workload} --operations 1000 --clients 3 --threads 2");
        let json = measured(&line);
        assert_eq!(count(&json), 1000, "{workload}");
        assert_eq!((&json["threads"], &json["clients"]), (&6.into(), &3.into()));
        assert!(json["server"].is_object() && json["machine"]["cores"].as_u64() > Some(0));
    }
    let json = measured("--workload b --seconds 0.2 --clients 2 --target-rate 500 --depth 1");
    let operations = count(&json) as f64;
    let due = json["seconds"].as_f64().unwrap() * 500.0;
    assert!(operations > 0.0 && operations <= due + 2.0, "{operations} of {due}");
}

/// Returns the history that a short run on few records wrote.
fn recorded(workload: &str, depth: &str) -> Vec<Record> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.jsonl");
    let line = format!(
        "ycsb --workload {workload} --records 50 --threads 3 --depth {depth} --warmup-seconds 0 \
         --seconds 0.2 --history {}",
        file.display()
    );
    bench(&words(&line)).succeeded();
    farside_linearizability::read(std::io::BufReader::new(std::fs::File::open(file).unwrap()))
        .unwrap()
}

#[on(shm)]
fn histories_are_linearizable_and_with_one_wrong_answer_are_not() {
    for (workload, depth) in [("a", "8"), ("a", "1"), ("d", "8"), ("f", "8"), ("f", "1")] {
        let history = recorded(workload, depth);
        let records =
            |operation| history.iter().filter(move |record| record.operation == operation);
        assert_eq!(farside_linearizability::check(&history), Ok(()), "{workload} {depth}");
        assert!(records(HistoryOperation::Get).count() > 0, "{workload} {depth}");
        assert!(
            records(HistoryOperation::Insert).count() >= 50,
            "{workload} {depth}: the load is missing"
        );
        // No value is stored twice.
        let stored: BTreeSet<_> =
            history.iter().filter_map(|record| record.argument.as_ref()).collect();
        assert_eq!(stored.len() + records(HistoryOperation::Get).count(), history.len());
        let last_get = records(HistoryOperation::Get).max_by_key(|get| get.invoke).unwrap();
        let loaded =
            records(HistoryOperation::Insert).find(|insert| insert.key != last_get.key).unwrap();
        let mut wrong = history.clone();
        let answer = wrong.iter_mut().find(|record| *record == last_get).unwrap();
        answer.found.clone_from(&loaded.argument);
        answer.version = None;
        let verdict = farside_linearizability::check(&wrong);
        assert!(matches!(verdict, Err(Violation::NotLinearizable { .. })), "{verdict:?}");
    }
}
