//! Proves that kv-bench writes the documented JSON for every workload, with a server that it starts
//! itself. Its recorded histories are linearizable, and complete enough to show a wrong answer. It
//! reports each mistake and each failure in one line, with the exit code that kv-cli has for it.
//!
//! A browser shows the page of `kv-bench report`, made from results of real runs: screenshots by
//! headless Chromium, in the light and the dark scheme, have content in every quarter. Guards
//! against a page that is well-formed and blank. Without a browser the test is left out.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use farside_bench::workload::{Kind, Price};
use farside_linearizability::{HistoryOperation, Record, Violation};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{binary, left_out};
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

/// Returns an installed browser that starts. Ubuntu's package is a stub that only names another
/// package, and does not start.
fn browser() -> Option<&'static str> {
    let starts = |name: &&str| {
        let version = Command::new(name).arg("--version").stderr(Stdio::null()).output();
        version.is_ok_and(|output| output.status.success())
    };
    ["chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(starts)
}

/// The width and height of a screenshot, in pixels.
const SIZE: (usize, usize) = (1400, 1600);
/// Timeout of a screenshot, for a busy machine.
const SCREENSHOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Returns a browser's screenshot of a page: rows of pixels of red, green and blue.
fn screenshot(browser: &str, page: &Path, is_dark: bool) -> Vec<Vec<[u8; 3]>> {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("page.png");
    let scheme = if is_dark { 0 } else { 1 };
    let mut child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--window-size={},{}", SIZE.0, SIZE.1))
        .arg(format!("--screenshot={}", image.display()))
        .arg(format!("file://{}", page.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + SCREENSHOT_TIMEOUT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let file = std::fs::File::open(image).expect("a screenshot, in time");
    let file = std::io::BufReader::new(file);
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    assert_eq!(info.bit_depth, png::BitDepth::Eight);
    let samples = info.color_type.samples();
    let rows = bytes[..info.buffer_size()].chunks(info.line_size);
    rows.map(|row| row.chunks_exact(samples).map(|p| [p[0], p[1], p[2]]).collect()).collect()
}

/// Checks that every quarter has more than the background, in several colours.
fn expect_quarters(rows: &[Vec<[u8; 3]>]) {
    let (height, width) = (rows.len(), rows[0].len());
    assert_eq!((width, height), SIZE);
    for (top, left) in [(0, 0), (0, width / 2), (height / 2, 0), (height / 2, width / 2)] {
        let quarter =
            rows[top..top + height / 2].iter().flat_map(|row| &row[left..left + width / 2]);
        let colours: BTreeSet<[u8; 3]> = quarter.clone().copied().collect();
        let background = rows[height - 1][0];
        let drawn = quarter.filter(|pixel| **pixel != background).count();
        assert!(colours.len() > 20, "{} colours at {top}, {left}", colours.len());
        assert!(drawn > 2000, "{drawn} pixels drawn at {top}, {left}");
    }
}

#[on(shm)]
fn a_browser_shows_the_page_in_both_schemes() {
    let Some(browser) = browser() else {
        left_out("without Chromium", "a browser has to show the report of kv-bench");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results");
    std::fs::create_dir(&results).unwrap();
    for (workload, depth) in [("a", 1), ("a", 8), ("c", 1), ("c", 8)] {
        let json = results.join(format!("{workload}{depth}.json"));
        let line = format!(
            "ycsb --workload {workload} --depth {depth} --records 1000 --warmup-seconds 0 \
             --seconds 0.2 --limit-seconds 0.1 --json {}",
            json.display()
        );
        bench(&words(&line)).succeeded();
    }
    let page = folder.path().join("page.html");
    let (from, to) = (results.to_str().unwrap(), page.to_str().unwrap());
    bench(&["report", from, "-o", to]).succeeded();
    let [light, dark] = [false, true].map(|is_dark| screenshot(browser, &page, is_dark));
    expect_quarters(&light);
    expect_quarters(&dark);
    let brightness = |rows: &[Vec<[u8; 3]>]| u32::from(rows[0][0][1]);
    assert!(brightness(&light) > 200 && brightness(&dark) < 60);
}

#[on(shm)]
fn a_file_that_is_no_result_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (page, file) = (folder.path().join("page.html"), folder.path().join("cut.json"));
    std::fs::write(&file, "{\"workload\":").unwrap();
    let (from, to) = (file.to_str().unwrap(), page.to_str().unwrap());
    bench(&["report", from, "-o", to]).expect_line(5, &["cut.json", "EOF while parsing"]);
    assert!(!page.exists());
    bench(&["report", "-o", to]).expect_line(2, &["RESULTS"]);
}

/// Returns the exit code: 3 without a server, 5 for another failure, and 2 for a mistake in the
/// arguments.
pub(crate) fn expected_code(parts: &[&str]) -> i32 {
    let failures = ["did not start", "out of space", "history", "No space", "no operation"];
    if parts.iter().any(|part| part.contains("no server answers")) {
        return 3;
    }
    let is_failure = failures.iter().any(|failure| parts[0].contains(failure));
    if is_failure { 5 } else { 2 }
}

#[on(shm)]
fn each_mistake_and_failure_is_reported_in_one_line() {
    const C: &str = "ycsb --workload c";
    const FEW: &str = "--records 50 --warmup-seconds 0 --seconds 0.1";
    let nowhere = "shm:///nowhere/kv.sock";
    for (line, parts) in [
        ("ycsb --workload e", &["workload e needs range scans"][..]),
        ("ycsb", &["--workload", "--help"]),
        ("ycsb -p scanproportion=1", &["scanproportion=1", "range scans"]),
        ("ycsb -P /nowhere/a", &["/nowhere/a: No such file"]),
        ("ycsb --wrkload a", &["'--wrkload'", "'--workload'"]),
        (&format!("{C} --memory 1GiB --server {nowhere}"), &["--memory"]),
        (&format!("{C} --server {nowhere}"), &["no server answers at", nowhere]),
        (&format!("{C} --memory 250GiB"), &["did not start", "of memory available"]),
        (
            &format!("{C} --records 10000000000"),
            &["this run needs", "--memory", "--operations", "--target-rate"],
        ),
        (
            "ycsb -p insertproportion=1 --memory 16MiB",
            &["out of space", "--memory", "--operations", "--target-rate"],
        ),
        (
            &format!("{C} --history /nowhere/h"),
            &["cannot write the history /nowhere/h: No such file"],
        ),
        (&format!("{C} --history /dev/full {FEW}"), &["/dev/full: No space left"]),
        (
            &format!("{C} {FEW} --target-rate 0.001 --arrivals poisson"),
            &["no operation ended", "--seconds"],
        ),
        (&format!("{C} --history h --value-size 7"), &["--value-size of 8"]),
        (
            &format!("{C} --json /nowhere/x.json"),
            &["cannot write /nowhere/x.json: /nowhere is no folder"],
        ),
        (&format!("verbs --server {nowhere}"), &["no server answers at", nowhere]),
        ("verbs --server kv.sock", &["no scheme"]),
        ("verbs --config /nowhere/client.toml", &["/nowhere/client.toml"]),
        ("verbs --config /dev/null", &["names no server"]),
    ] {
        let output = bench(&words(line));
        output.expect_line(expected_code(parts), parts);
        assert!(output.stderr.starts_with("kv-bench: "), "{}", output.stderr);
    }
}
