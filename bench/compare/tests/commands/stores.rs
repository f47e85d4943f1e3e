//! Proves that kv-compare runs every store on the same keys and operations, and that its JSON has
//! the documented fields. Each mistake is reported in one line, with the exit code of kv-cli.

use serde_json::Value as Json;

use crate::workloads::{expect_fields, expected_code, measuring, words};

/// Returns the JSON of a short comparison on few records.
fn compared(arguments: &str) -> Json {
    let few = "--records 1000 --seconds 0.1 --warmup-seconds 0.02 --rounds 2 --json -";
    let output = measuring("kv-compare", &words(&format!("{few} {arguments}"))).succeeded();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[on(shm)]
fn stores_are_compared_on_the_same_fabric() {
    let json = compared("--depth 4");
    let stores = ["farside", "fusee", "race", "smart", "swarm"];
    expect_fields(&json["stores"], &stores);
    assert_eq!((&json["network"], &json["left_out"]), (&Json::Null, &serde_json::json!({})));
    expect_fields(&json["limit"], &["bytes", "read", "write", "cas", "update"]);
    assert!(json["command"].as_str().unwrap().starts_with("kv-compare"), "{json}");
    let workloads = json["workloads"].as_array().unwrap();
    let names: Vec<&Json> = workloads.iter().map(|workload| &workload["workload"]).collect();
    assert_eq!(names, ["a", "b", "c", "d", "f"]);
    for workload in workloads {
        let rows: Vec<&Json> = workload["stores"].as_array().unwrap().iter().collect();
        assert_eq!(rows.iter().map(|row| &row["store"]).collect::<Vec<_>>(), stores);
        for row in rows {
            assert!(row["throughput_ops_s"].as_f64().unwrap() > 0.0, "{row}");
            let round_trips_min = if row["store"] == "farside" { 0.9 } else { 1.0 };
            assert!(row["round_trips_per_op"].as_f64().unwrap() >= round_trips_min, "{row}");
            assert!(row["farside_ratio"].as_f64().unwrap() > 0.0, "{row}");
            assert!(row["mix_ratio"].as_f64().unwrap() > 0.0, "{row}");
            assert_eq!(row["unexpected"], 0, "{row}");
        }
    }
    // Workload c has only GETs of cached locations. Concurrent GETs of one key share a READ.
    let c = workloads[2]["stores"].as_array().unwrap();
    let verbs: Vec<f64> = c.iter().map(|row| row["verbs_per_op"].as_f64().unwrap()).collect();
    assert!((verbs[0] - 1.0).abs() < 0.1, "{verbs:?}");
    assert!((verbs[1] - 3.0).abs() < 0.1 && (verbs[2] - 3.0).abs() < 0.1, "{verbs:?}");
}

/// The stores that are not installed are reported.
#[on(shm)]
fn stores_over_a_socket_are_compared_if_they_are_installed() {
    let services = ["redis", "valkey", "memcached"];
    for depth in [1, 4] {
        let stores = "--stores farside,redis,valkey,memcached --workloads a,d,f";
        let json = compared(&format!("{stores} --depth {depth}"));
        let left_out = json["left_out"].as_object().unwrap();
        assert!(left_out.values().all(|why| why == "it is not installed"), "{left_out:?}");
        for workload in json["workloads"].as_array().unwrap() {
            let rows = workload["stores"].as_array().unwrap();
            let names: Vec<_> = rows.iter().map(|row| row["store"].as_str().unwrap()).collect();
            for name in services {
                assert_ne!(names.contains(&name), left_out.contains_key(name), "{name}");
            }
            for row in rows {
                assert_eq!(row["unexpected"], 0, "{row}");
                assert_eq!(row["mix_ratio"].is_null(), row["store"] != "farside", "{row}");
                assert!(row["ops_per_cpu_s"].as_f64().unwrap() > 0.0, "{row}");
                assert!(row["farside_ratio_cpu"].as_f64().unwrap() > 0.0, "{row}");
            }
        }
    }
}

#[on(shm)]
fn results_on_an_emulated_network_say_so() {
    let emulated = "--network emulated --bandwidth 6GiB --depth 1";
    let json = compared(&format!("{emulated} --workloads c --stores farside,race,redis"));
    assert!(json["left_out"]["redis"].as_str().unwrap().contains("network"));
    let network = json["network"].as_str().unwrap();
    assert!(network.starts_with("emulated network") && network.ends_with(", 6GiB a second"));
    let stores = json["workloads"][0]["stores"].as_array().unwrap();
    for (row, round_trips) in stores.iter().zip([1.0, 2.0]) {
        let counted = row["round_trips_per_op"].as_f64().unwrap();
        assert!((counted - round_trips).abs() < 0.1, "{row}");
    }
}

/// Memcached is beside Farside if it is installed. Otherwise the report says that it is left out.
#[on(shm)]
fn full_caches_are_compared_on_the_same_requests() {
    let sizes = "--memory 64MiB --value-size 4096 --sizes 20 --requests 100000";
    let line = format!("cache {sizes} --only zipfian-0.99,scans");
    let output = measuring("kv-compare", &words(&format!("{line} --json -"))).succeeded();
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    let expected: &[&str] =
        if json["memcached"] == true { &["farside", "memcached"] } else { &["farside"] };
    let traces = json["traces"].as_array().unwrap();
    let names: Vec<&Json> = traces.iter().map(|trace| &trace["name"]).collect();
    assert_eq!(names, ["zipfian-0.99", "scans"]);
    let values_bytes = json["values_mib"].as_u64().unwrap() << 20;
    for trace in traces {
        let rows: Vec<&Json> = trace["stores"].as_array().unwrap().iter().collect();
        assert_eq!(rows.iter().map(|row| &row["store"]).collect::<Vec<_>>(), expected);
        for row in rows {
            // Each store is full, except for what it keeps free for the next values.
            let items = row["items"].as_u64().unwrap();
            assert!((values_bytes / 4..values_bytes).contains(&(items * 4096)), "{row}");
            let number = |value: &Json| value.as_f64().unwrap();
            let [lru, fifo, belady] =
                ["lru", "fifo", "belady"].map(|policy| number(&row["exact"][policy]));
            assert!(fifo < lru && lru < belady, "{row}");
            // Fewer than half of FIFO's hits would mean that the store loses what is stored.
            let hits = number(&row["hit_percent"]);
            assert!(hits > fifo / 2.0 && hits < belady + 1.0, "{row}");
            assert!(number(&row["requests_s"]) > 0.0, "{row}");
            assert!(number(&row["requests_per_cpu_s"]) > 0.0, "{row}");
        }
    }
}

#[on(shm)]
fn each_mistake_is_reported_in_one_line() {
    let nowhere = "shm:///nowhere/kv.sock";
    for (line, parts) in [
        ("--stores farside,rocksdb", &["'rocksdb'", "farside, fusee"][..]),
        ("--json /nowhere/x", &["cannot write /nowhere/x: /nowhere is no folder"]),
        ("--stores race,race", &["--stores has race twice"]),
        ("--workloads c,e", &["workload e needs range scans"]),
        ("--network real", &["emulated"]),
        ("--bandwidth 6GiB", &["--network"]),
        ("--network emulated --bandwidth 0B", &["--bandwidth <SIZE>", "above 0"]),
        ("cache --memory 8MiB", &["--memory 16MiB or more"]),
        ("cache --memory 1TiB", &["keys", "--sizes"]),
        ("cache --sizes 0", &["above 0 and up to 100"]),
        (&format!("--server {nowhere}"), &["no server answers at", nowhere]),
    ] {
        let output = measuring("kv-compare", &words(line));
        output.expect_line(expected_code(parts), parts);
        assert!(output.stderr.starts_with("kv-compare: "), "{}", output.stderr);
    }
}
