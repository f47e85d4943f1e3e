//! The page is well-formed, has every result, and lets none of them write markup.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use roxmltree::{Document, ParsingOptions};
use serde_json::{Value, json};

use super::*;

/// A result, as `kv-bench ycsb --json` writes it.
fn result(workload: &str, threads: u32, depth: u16, ops_s: f64) -> Value {
    let scale = u64::from(depth);
    let operation = json!({
        "count": 1000, "p50_ns": 300 * scale, "p99_ns": 900 * scale, "p999_ns": 2000 * scale,
        "max_ns": 5000 * scale, "round_trips": 1050,
        "verbs": { "read": 1050, "write": 0, "cas": 0 }, "bytes": 140_000,
        "latencies": [[0.0, 200 * scale], [50.0, 300 * scale], [99.0, 900 * scale], [100.0, 5000]],
    });
    json!({
        "command": "kv-bench ycsb", "commit": "0123abcd", "date": "2026-11-21T00:00:00Z",
        "machine": { "processor": "A processor", "cores": 2, "kernel": "6.1", "pages": "any" },
        "fabric": "shm", "workload": workload, "threads": threads, "depth": depth,
        "clients": 1, "records": 1_000_000, "value_size": 64, "seconds": 2.0,
        "throughput_ops_s": ops_s,
        "pattern": {
            "mix": { "get": 0.5, "put": 0.5 }, "distribution": { "name": "zipfian", "theta": 0.99 },
            "value_size": { "name": "64", "min": 64, "mean": 64.0, "max": 64 },
        },
        "operations": { "get": operation, "put": operation },
        "cache": { "hits": 990, "misses": 10 },
        "cpu_s": 2.0, "server": { "cpu_s": 0.5, "wakeups": 3 }, "allocations": 0,
        "limit": {
            "read_ops_s": 7e6, "write_ops_s": 7e6, "cas_ops_s": 7e6, "update_ops_s": 3e6,
            "mix_ops_s": 5e6, "mix_ratio": 0.6,
        },
    })
}

fn write(folder: &Path, name: &str, json: &Value) {
    fs::write(folder.join(name), json.to_string()).unwrap();
}

/// Writes the page of a folder's results, and returns it.
fn page_of(folder: &Path) -> String {
    let output = folder.join("page.html");
    let results = vec![folder.to_owned()];
    report(&Report { results, output: output.clone() }, |_| ()).unwrap();
    fs::read_to_string(output).unwrap()
}

fn parsed(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..Default::default() };
    Document::parse_with_options(page, options).unwrap()
}

/// All texts of charts.
fn texts(page: &Document<'_>) -> Vec<String> {
    let texts = page.descendants().filter(|node| node.has_tag_name("text"));
    // Within SVG's name space.
    let svg = page.descendants().filter(|node| node.tag_name().name() == "text");
    texts.chain(svg).filter_map(|node| Some(node.text()?.to_owned())).collect()
}

#[test]
fn the_page_has_every_result_and_every_kind_of_chart() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("deeper");
    fs::create_dir(&below).unwrap();
    write(folder.path(), "c1.json", &result("c", 1, 1, 2.5e6));
    write(folder.path(), "c2.json", &result("c", 2, 1, 4.5e6));
    write(&below, "c16.json", &result("c", 1, 16, 3.5e6));
    write(&below, "a1.json", &result("a", 1, 1, 1.5e6));
    let mut larger = result("a", 1, 1, 1.0e6);
    larger["records"] = 100_000_000.into();
    write(&below, "larger.json", &larger);
    for target in [100_000, 200_000] {
        let mut offered = result("b", 1, 16, f64::from(target));
        offered["open_loop"] = json!({
            "target_ops_s": target, "arrivals": "poisson", "behind_s": 0.0, "reached": true,
        });
        write(&below, &format!("b{target}.json"), &offered);
    }
    for servers in [1, 4, 16] {
        let mut several = result("c", 8, 64, 2.0e4 * f64::from(servers));
        several["servers"] = servers.into();
        write(&below, &format!("s{servers}.json"), &several);
    }
    let rate = json!({ "rate_per_s": 7e6, "p50_ns": 120, "p99_ns": 200 });
    let mut verbs = result("", 1, 1, 0.0);
    verbs.as_object_mut().unwrap().remove("workload");
    verbs["bytes"] = 128.into();
    for verb in ["read", "write", "cas", "update"] {
        verbs[verb] = rate.clone();
    }
    write(&below, "verbs.json", &verbs);
    fs::write(folder.path().join("README.md"), "not a result").unwrap();
    let page = page_of(folder.path());
    let document = parsed(&page);
    for name in ["c1.json", "c2.json", "deeper/c16.json", "deeper/a1.json", "deeper/verbs.json"] {
        assert!(page.contains(name), "{name}");
    }
    for number in ["2,500,000", "4,500,000", "3,500,000", "1,500,000", "7,000,000"] {
        assert!(page.contains(&format!("<td>{number}</td>")), "{number}");
    }
    let texts = texts(&document);
    for title in [
        "Throughput by threads",
        "Throughput by servers",
        "c linear",
        "Throughput by operations in flight",
        "Time of an operation by records",
        "Latency against load: workload b",
        "Latency against load: workload c",
        "Latency distribution",
    ] {
        assert!(texts.iter().any(|text| text == title), "{title}");
    }
    // A GET of a cached location, by README's price list.
    for cost in ["1.05 / 1", "0 / 0", "140 / 128"] {
        assert!(page.contains(&format!("<td>{cost}</td>")), "{cost}");
    }
    // The page loads nothing and runs no script.
    for attribute in ["src", "href", "onload", "action"] {
        let has = document.descendants().any(|node| node.has_attribute(attribute));
        assert!(!has, "{attribute}");
    }
    assert!(!page.contains("<script") && !page.contains("url("));
}

#[test]
fn runs_that_differ_in_more_than_a_chart_shows_are_on_no_common_line() {
    let changed_result = |threads: u32, change: &dyn Fn(&mut Value)| {
        let mut run = result("c", threads, 1, 1e6);
        change(&mut run);
        run
    };
    let custom = |get: f64| {
        move |run: &mut Value| {
            run["workload"] = "custom".into();
            run["pattern"]["mix"] = json!({ "get": get, "put": 1.0 - get });
            run["pattern"]["distribution"] = json!({ "name": "uniform" });
        }
    };
    let hot = |hot_set: f64| {
        move |run: &mut Value| {
            custom(1.0)(run);
            run["pattern"]["distribution"] =
                json!({ "name": "hotspot", "hot_set": hot_set, "hot_operations": 0.8 });
        }
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(Change<'_>, Change<'_>); 5] = [
        (&custom(0.7), &custom(0.5)),
        (&hot(0.1), &hot(0.2)),
        (&|_| {}, &|run| run["clients"] = 2.into()),
        (&|_| {}, &|run| run["commit"] = "4567cdef".into()),
        (&|_| {}, &|run| run["machine"]["processor"] = "Another".into()),
    ];
    for (number, (first, second)) in changes.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let lines = |runs: [Value; 2]| {
            for (name, run) in ["1.json", "2.json"].into_iter().zip(runs) {
                write(folder.path(), name, &run);
            }
            let page = page_of(folder.path());
            texts(&parsed(&page)).iter().any(|text| text == "Throughput by threads")
        };
        assert!(lines([changed_result(1, first), changed_result(2, first)]), "{number}");
        assert!(!lines([changed_result(1, first), changed_result(2, second)]), "{number}");
    }
}

#[test]
fn open_loops_have_a_distribution_for_each_rate() {
    let folder = tempfile::tempdir().unwrap();
    for (rate, arrivals) in [(1000, "fixed"), (1000, "poisson"), (2000, "poisson")] {
        let mut run = result("b", 1, 16, 1e3);
        run["open_loop"] = json!({
            "target_ops_s": rate, "arrivals": arrivals, "behind_s": 0.0, "reached": true,
        });
        write(folder.path(), &format!("{rate}{arrivals}.json"), &run);
    }
    let page = page_of(folder.path());
    let texts: BTreeSet<String> = texts(&parsed(&page)).into_iter().collect();
    let count = |part: &str| texts.iter().filter(|text| text.contains(part)).count();
    assert_eq!(count(" operations/s offered, "), 3);
    assert_eq!(count("1,000 operations/s offered, poisson"), 1);
    // Of the two arrivals only one has two rates.
    assert_eq!((count("at offered rates, poisson"), count("at offered rates, fixed")), (1, 0));
}

#[test]
fn results_are_text_and_never_markup() {
    let folder = tempfile::tempdir().unwrap();
    let evil = "</style><script>alert('\"x\"')</script>&\u{1}\u{ffff}";
    let mut json = result(evil, 1, 1, 2.5e6);
    for field in ["command", "commit", "date", "fabric"] {
        json[field] = evil.into();
    }
    json["machine"]["processor"] = evil.into();
    let operation = json["operations"]["get"].take();
    json["operations"] = json!({ evil: operation });
    write(folder.path(), "x.json", &json);
    let page = page_of(folder.path());
    let document = parsed(&page);
    assert!(!document.descendants().any(|node| node.tag_name().name() == "script"));
    assert!(!page.contains("<script"));
    assert!(texts(&document).iter().any(|text| text.contains("alert('\"x\"')")));
}

#[test]
fn a_ratio_above_1_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let note = "A ratio above 1 is no mistake.";
    let mut run = result("c", 1, 16, 3e6);
    write(folder.path(), "run.json", &run);
    assert!(!page_of(folder.path()).contains(note));
    run["limit"]["mix_ratio"] = json!(1.31);
    write(folder.path(), "run.json", &run);
    assert!(page_of(folder.path()).contains(note));
}

#[test]
fn results_of_older_versions_are_read() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/2026-11-22-epyc-zen5-2core");
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("page.html");
    let args = Report { results: vec![results], output: output.clone() };
    let message = report(&args, |_| ()).unwrap();
    assert!(message.ends_with("a page of 31 result(s)\n"), "{message}");
    let page = fs::read_to_string(output).unwrap();
    assert!(texts(&parsed(&page)).iter().any(|text| text == "Latency against load: workload c"));
}

#[test]
fn a_file_that_is_no_result_is_named_and_the_old_page_stays() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("page.html");
    fs::write(&output, "before").unwrap();
    let mut idle = result("c", 1, 1, 2.5e6);
    idle["operations"] = json!({});
    let mut missing = result("c", 1, 1, 2.5e6);
    missing.as_object_mut().unwrap().remove("threads");
    for (name, content, expected) in [
        ("cut.json", "{\"workload\": \"c\"", "EOF while parsing"),
        ("other.json", "{}", "neither a result of"),
        ("list.json", "[1]", "neither a result of"),
        ("idle.json", &idle.to_string(), "this run has no operations"),
        ("missing.json", &missing.to_string(), "missing field `threads`"),
        ("bytes.json", "\u{fffd}", "expected value"),
    ] {
        let inside = folder.path().join("in");
        fs::create_dir(&inside).unwrap();
        fs::write(inside.join(name), content).unwrap();
        let args = Report { results: vec![inside.join(name)], output: output.clone() };
        let error = report(&args, |_| ()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{name}: {error}");
        fs::remove_dir_all(&inside).unwrap();
    }
    let nothing = Report { results: vec!["/nowhere/x.json".into()], output: output.clone() };
    let error = report(&nothing, |_| ()).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/x.json: No such file"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    let empty = Report { results: vec![empty.path().to_owned()], output: output.clone() };
    assert!(matches!(report(&empty, |_| ()), Err(Error::Input { .. })));
    assert_eq!(fs::read_to_string(output).unwrap(), "before");
}

#[test]
fn folders_may_hold_other_json_but_no_broken_results() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "c.json", &result("c", 1, 1, 2.5e6));
    write(folder.path(), "compared.json", &json!({ "workloads": [] }));
    let output = folder.path().join("page.html");
    let args = Report { results: vec![folder.path().to_owned()], output };
    let skipped = std::cell::RefCell::new(Vec::new());
    let message = report(&args, |line| skipped.borrow_mut().push(line.to_owned())).unwrap();
    assert!(message.ends_with("a page of 1 result(s)\n"), "{message}");
    let skipped = skipped.into_inner();
    assert!(skipped.len() == 1 && skipped[0].contains("compared.json"), "{skipped:?}");
    fs::write(folder.path().join("cut.json"), "{").unwrap();
    let error = report(&args, |_| ()).unwrap_err().to_string();
    assert!(error.contains("cut.json"), "{error}");
    // A folder without results makes no page.
    fs::remove_file(folder.path().join("cut.json")).unwrap();
    fs::remove_file(folder.path().join("c.json")).unwrap();
    let error = report(&args, |_| ()).unwrap_err().to_string();
    assert!(error.ends_with("no .json in this folder is a result"), "{error}");
}

#[test]
fn a_page_that_would_replace_a_result_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "c.json", &result("c", 1, 1, 2.5e6));
    let page = |output: &Path| {
        let args = Report { results: vec![folder.path().to_owned()], output: output.to_owned() };
        report(&args, |_| ()).map_err(|error| error.to_string())
    };
    let error = page(&folder.path().join("c.json")).unwrap_err();
    assert!(error.starts_with("the page would replace the result "), "{error}");
    assert!(page(Path::new("-")).unwrap_err().contains("./-"));
}
