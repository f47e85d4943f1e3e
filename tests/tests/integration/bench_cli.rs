//! Proves that kv-bench writes the JSON that its readers were promised, for every workload, from a
//! server that it starts by itself, and that every mistake is one line.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use farside_tests::binary;
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

#[test]
fn mistakes_and_errors_are_one_line() {
    let nowhere = "shm:///nowhere/kv.sock";
    let c = &["ycsb", "--workload", "c"];
    for (arguments, parts) in [
        (&["ycsb", "--workload", "e"][..], &["workload e needs range scans"][..]),
        (&["ycsb"], &["--workload", "--help"]),
        (&["ycsb", "--wrkload", "a"], &["'--wrkload'", "'--workload'"]),
        (&[c, &["--memory", "1GiB", "--server", nowhere][..]].concat(), &["--memory"]),
        (&[c, &["--server", nowhere][..]].concat(), &["no server answers at", nowhere]),
        (&[c, &["--memory", "250GiB"][..]].concat(), &["did not start", "of memory available"]),
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
