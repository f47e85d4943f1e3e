use serde_json::Value;

use super::*;
use crate::args::tests::ycsb;
use crate::environment::Machine;
use crate::recorder::Recorder;
use crate::thread_measurement::{RunFacts, ThreadMeasurement};
use crate::workload::{Kind, Workload};

fn sample() -> (YcsbReport, Measured) {
    let mut recorder = Recorder::new(Workload::F.mix());
    for latency_ns in 100..200 {
        recorder.record(Kind::Get, latency_ns, latency_ns);
        recorder.record(Kind::Rmw, 3 * latency_ns, 3 * latency_ns);
        let counters = Counters { round_trips: 1, reads: 1, read_bytes: 128, ..Default::default() };
        recorder.attribute(Kind::Get, &counters);
    }
    recorder.unexpected = 3;
    let threads = ThreadMeasurement {
        recorder,
        started_ns: 0,
        ended_ns: 2_000_000_000,
        cache: farside::CacheStatistics { hits: 99, misses: 1 },
        allocations: 0,
        cpu_s: 2.0,
    };
    let server = Some(ServerUsage { cpu_s: 0.01, wakeups: 2 });
    let measured = Measured {
        fabric: "shm".into(),
        servers: 3,
        emulated: None,
        threads,
        facts: RunFacts { server, load_seconds: 1.0, chains: Vec::new() },
        machine: Machine::detect(0),
        ended: std::time::SystemTime::now(),
        raw: Some(RawLimit { read: 400.0, write: 300.0, cas: 250.0, update: 200.0 }),
        raw_missing: None,
        sockets: Some(SocketRates { read: 400.0, write: 200.0 }),
    };
    (YcsbReport::new(&args(), &measured), measured)
}

fn args() -> Ycsb {
    ycsb("ycsb --workload f --depth 1 --seconds 2")
}

#[test]
fn the_json_has_every_field() {
    let (report, _) = sample();
    let json = serde_json::to_value(&report).unwrap();
    for (pointer, expected) in [
        ("/fabric", Value::from("shm")),
        ("/workload", "f".into()),
        ("/threads", 1.into()),
        ("/servers", 3.into()),
        ("/emulated", Value::Null),
        ("/depth", 1.into()),
        ("/records", 1_000_000.into()),
        ("/value_size", 64.into()),
        ("/seconds", 2.0.into()),
        ("/throughput_ops_s", 100.0.into()),
        ("/operations/get/count", 100.into()),
        ("/operations/get/p50_ns", 149.into()),
        ("/operations/get/p99_ns", 198.into()),
        ("/operations/get/p999_ns", 199.into()),
        ("/operations/get/round_trips", 100.into()),
        ("/operations/get/verbs/read", 100.into()),
        ("/operations/get/verbs/write", 0.into()),
        ("/operations/get/verbs/cas", 0.into()),
        ("/operations/get/bytes", 12_800.into()),
        ("/operations/rmw/count", 100.into()),
        ("/cache/hits", 99.into()),
        ("/cache/misses", 1.into()),
        ("/server/cpu_s", 0.01.into()),
        ("/server/wakeups", 2.into()),
        ("/allocations", 0.into()),
        ("/unexpected", 3.into()),
        ("/limit/read_ops_s", 400.0.into()),
        ("/limit/update_ops_s", 200.0.into()),
        // 100 GETs and 100 read-modify-writes: 1 s. They took 2 s.
        ("/limit/mix_ops_s", 200.0.into()),
        ("/limit/mix_ratio", 0.5.into()),
        ("/sockets/socket_write_ops_s", 200.0.into()),
        // 100 long replies, and 100 of both.
        ("/sockets/mix_ops_s", 200.0.into()),
        ("/sockets/mix_ratio", 0.5.into()),
        ("/operations/get/max_ns", 199.into()),
        ("/machine/cores", report.origin.machine.cores.into()),
    ] {
        assert_eq!(json.pointer(pointer), Some(&expected), "{pointer}");
    }
    assert_eq!(json["operations"].as_object().unwrap().len(), 2);
}

#[test]
fn the_table_shows_rates_costs_and_warnings() {
    let (report, measured) = sample();
    let table = report.table(&measured).unwrap();
    for text in [
        "1,000,000 records",
        "; 3 servers",
        "200 ops/s by raw verbs alone; the run reached 0.50 of it",
        "200 ops/s by plain sockets; the run reached 0.50 of it",
        "allocations_per_op: 0.0",
        "p99.9",
        "WARNING: 3 operations had an unexpected result",
    ] {
        assert!(table.contains(text), "{table}");
    }
    let as_expected = YcsbReport { unexpected: 0, ..report };
    assert!(!as_expected.table(&measured).unwrap().contains("WARNING"));
}
