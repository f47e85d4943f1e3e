//! Proves that kv-bench writes the JSON that its readers were promised, for every workload, from a
//! server that it starts by itself, and that every mistake is one line. Also that what it records
//! is linearizable, and a record of it, so that a wrong answer would show.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use farside_tests::binary;
use farside_tests::linearizability::{self, Operation, Record, Violation};
use serde_json::Value as Json;

use crate::cli::Said;

fn bench(arguments: &[&str]) -> Said {
    // kv-bench looks for it beside itself.
    binary("kv-server");
    let mut command = Command::new(binary("kv-bench"));
    // Where nobody's own config file is.
    command.env("HOME", "/nowhere");
    Said::new(command.args(arguments).stdin(Stdio::null()).output().unwrap())
}

#[track_caller]
fn expect_fields(object: &Json, fields: &[&str]) {
    let has: BTreeSet<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(has, fields.iter().copied().collect(), "{object}");
}

#[test]
fn every_workload_has_the_promised_fields() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    for (workload, operations) in [
        ("a", &["get", "put"][..]),
        ("b", &["get", "put"]),
        ("c", &["get"]),
        ("d", &["get", "insert"]),
        ("f", &["get", "rmw"]),
    ] {
        let said = bench(&[
            "ycsb",
            "--workload",
            workload,
            "--records",
            "1000",
            "--threads",
            "2",
            "--warmup-seconds",
            "0.1",
            "--seconds",
            "1",
            "--limit-seconds",
            "0.1",
            "--json",
            file.to_str().unwrap(),
        ]);
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let json: Json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        expect_fields(
            &json,
            &[
                "fabric",
                "workload",
                "threads",
                "depth",
                "records",
                "value_size",
                "seconds",
                "throughput_ops_s",
                "operations",
                "cache",
                "server",
                // Besides what was promised: a GET has to have none.
                "allocations",
                "limit",
            ],
        );
        expect_fields(&json["limit"], &["map_ops_s", "ratio"]);
        assert_eq!((&json["fabric"], &json["workload"]), (&"shm".into(), &workload.into()));
        assert_eq!((&json["threads"], &json["records"]), (&2.into(), &1000.into()));
        expect_fields(&json["cache"], &["hits", "misses"]);
        expect_fields(&json["server"], &["cpu_s", "wakeups"]);
        expect_fields(&json["operations"], operations);
        let mut total = 0;
        for of in json["operations"].as_object().unwrap().values() {
            let fields = ["count", "p50_ns", "p99_ns", "p999_ns", "round_trips", "verbs", "bytes"];
            expect_fields(of, &fields);
            expect_fields(&of["verbs"], &["read", "write", "cas", "faa"]);
            let number = |name: &str| of[name].as_u64().unwrap();
            assert!(number("count") > 0 && number("round_trips") > 0 && number("bytes") > 0);
            assert!(number("p50_ns") <= number("p99_ns") && number("p99_ns") <= number("p999_ns"));
            total += number("count");
        }
        let rate = total as f64 / json["seconds"].as_f64().unwrap();
        let told = json["throughput_ops_s"].as_f64().unwrap();
        assert!((rate / told - 1.0).abs() < 0.01, "{rate} {told}");
    }
}

/// The stores of a comparison, on few records, for a moment.
fn compared(arguments: &[&str]) -> Json {
    let few = ["compare", "--records", "1000", "--seconds", "0.1", "--warmup-seconds", "0.02"];
    let said = bench(&[&few[..], &["--rounds", "2", "--json", "-"], arguments].concat());
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    serde_json::from_slice(&said.stdout).unwrap()
}

#[test]
fn stores_are_compared_on_the_same_fabric() {
    let json = compared(&["--depth", "4"]);
    let stores = ["farside", "fusee", "race", "smart", "swarm", "rpc"];
    expect_fields(&json["stores"], &stores);
    assert_eq!((&json["network"], &json["left_out"]), (&Json::Null, &Json::Array(vec![])));
    expect_fields(&json["limit"], &["bytes", "read", "write", "cas"]);
    let workloads = json["workloads"].as_array().unwrap();
    let names: Vec<&Json> = workloads.iter().map(|workload| &workload["workload"]).collect();
    assert_eq!(names, ["a", "b", "c", "d", "f"]);
    for workload in workloads {
        let of: Vec<&Json> = workload["stores"].as_array().unwrap().iter().collect();
        assert_eq!(of.iter().map(|of| &of["store"]).collect::<Vec<_>>(), stores);
        for of in of {
            assert!(of["throughput_ops_s"].as_f64().unwrap() > 0.0, "{of}");
            assert!(of["round_trips_per_op"].as_f64().unwrap() >= 1.0, "{of}");
            assert!(of["farside_ratio"].as_f64().unwrap() > 0.0, "{of}");
            assert_eq!(of["unexpected"], 0, "{of}");
        }
    }
    // Reads of cached locations: what counts explain.
    let c = workloads[2]["stores"].as_array().unwrap();
    let verbs: Vec<f64> = c.iter().map(|of| of["verbs_per_op"].as_f64().unwrap()).collect();
    assert!((verbs[0] - 1.0).abs() < 0.1, "{verbs:?}");
    assert!((verbs[1] - 3.0).abs() < 0.1 && (verbs[2] - 3.0).abs() < 0.1, "{verbs:?}");
}

#[test]
fn what_an_emulated_network_touched_says_so() {
    let emulated = ["--network", "emulated", "--depth", "1", "--workloads", "c"];
    let json = compared(&[&emulated[..], &["--stores", "farside,race"]].concat());
    assert!(json["network"].as_str().unwrap().contains("emulated network"));
    let stores = json["workloads"][0]["stores"].as_array().unwrap();
    for (of, round_trips) in stores.iter().zip([1, 2]) {
        let p50_ns = of["operations"]["get"]["p50_ns"].as_u64().unwrap();
        assert!(p50_ns >= 1900 * round_trips, "{of}");
    }
}

/// What a short run on few records put on file.
fn recorded(workload: &str, depth: &str) -> Vec<Record> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.jsonl");
    let name = file.to_str().unwrap();
    let ycsb = ["ycsb", "--workload", workload, "--records", "50", "--threads", "3"];
    let short = ["--depth", depth, "--warmup-seconds", "0", "--seconds", "0.2", "--history", name];
    let said = bench(&[&ycsb[..], &short].concat());
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    linearizability::read(std::io::BufReader::new(std::fs::File::open(file).unwrap())).unwrap()
}

#[test]
fn histories_are_linearizable_and_those_with_one_wrong_answer_are_not() {
    for (workload, depth) in [("a", "8"), ("a", "1"), ("d", "8"), ("f", "8"), ("f", "1")] {
        let history = recorded(workload, depth);
        let of = |operation| history.iter().filter(move |record| record.operation == operation);
        assert_eq!(linearizability::check(&history), Ok(()), "{workload} {depth}");
        assert!(of(Operation::Get).count() > 0, "{workload} {depth}");
        assert!(of(Operation::Insert).count() >= 50, "{workload} {depth}: the load is missing");
        // No value is stored twice.
        let stored: BTreeSet<_> = history.iter().filter_map(|to| to.argument.as_ref()).collect();
        assert_eq!(stored.len() + of(Operation::Get).count(), history.len());
        let last = of(Operation::Get).max_by_key(|get| get.invoke).unwrap();
        let loaded = of(Operation::Insert).find(|insert| insert.key != last.key).unwrap();
        let mut wrong = history.clone();
        let answer = wrong.iter_mut().find(|record| *record == last).unwrap();
        answer.found.clone_from(&loaded.argument);
        answer.version = None;
        let verdict = linearizability::check(&wrong);
        assert!(matches!(verdict, Err(Violation::NotLinearizable { .. })), "{verdict:?}");
    }
}

#[test]
fn mistakes_and_errors_are_one_line() {
    let nowhere = "shm:///nowhere/kv.sock";
    let c = &["ycsb", "--workload", "c"];
    let few = ["--records", "50", "--warmup-seconds", "0", "--seconds", "0.1"];
    for (arguments, parts) in [
        (&["ycsb", "--workload", "e"][..], &["workload e needs range scans"][..]),
        (&["ycsb"], &["--workload", "--help"]),
        (&["ycsb", "--wrkload", "a"], &["'--wrkload'", "'--workload'"]),
        (&[c, &["--memory", "1GiB", "--server", nowhere][..]].concat(), &["--memory"]),
        (&[c, &["--server", nowhere][..]].concat(), &["no server answers at", nowhere]),
        (&[c, &["--memory", "250GiB"][..]].concat(), &["did not start", "of memory available"]),
        (
            &[c, &["--history", "/nowhere/h"][..]].concat(),
            &["the history /nowhere/h: No such file"],
        ),
        (&[c, &["--history", "/dev/full"][..], &few[..]].concat(), &["/dev/full: No space left"]),
        (&[c, &["--history", "h", "--value-size", "7"][..]].concat(), &["--value-size of 8"]),
        (&["compare", "--stores", "farside,redis"], &["'redis'", "farside, fusee"]),
        (&["compare", "--stores", "race,race"], &["--stores has race twice"]),
        (&["compare", "--workloads", "c,e"], &["workload e needs range scans"]),
        (&["compare", "--network", "real"], &["emulated"]),
        (&["compare", "--server", nowhere], &["no server answers at", nowhere]),
        (&["verbs", "--server", nowhere], &["no server answers at", nowhere]),
        (&["verbs", "--server", "kv.sock"], &["no scheme"]),
        (&["verbs", "--config", "/nowhere/client.toml"], &["/nowhere/client.toml"]),
        (&["verbs", "--config", "/dev/null"], &["names no server"]),
    ] {
        let said = bench(arguments);
        said.expect_line(2, parts);
        assert!(said.stderr.starts_with("kv-bench: "), "{}", said.stderr);
    }
}
