//! Proves that documentation, dashboard and alerts name the metrics that a server has, with their
//! labels, and that promtool accepts metrics, alerts and queries. Without promtool the tests that
//! need it are left out.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use farside_tests::cluster::TestCluster;
use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, fill, left_out};
use serde_json::Value;

use super::{METRICS, OPEN_METRICS, Scrape, metrics};
use crate::tidy::{read, root};

/// A cache that has evicted keys, so that it has all metrics except those of a cluster.
fn full_cache() -> ServerProcess {
    let server = ServerProcess::start(&format!("--memory 16MiB --grace-ms 10 --evict {METRICS}"));
    fill(&mut server.session(), 0..30_000, |_| [1; 1000]);
    server
}

/// The metrics of a cache, and of a server of a cluster.
fn all_metrics() -> Scrape {
    let mut all = Scrape::of(&full_cache());
    let cluster = TestCluster::create(1);
    let server = cluster.start(METRICS);
    cluster.wait_for_servers();
    all.merge(Scrape::of(&server));
    all
}

/// The rows of the first table of metrics behind this heading in docs/operations.md: name, type and
/// labels.
pub(super) fn documented_in(heading: &str) -> Vec<(String, String, BTreeSet<String>)> {
    let page = read("docs/operations.md");
    let (_, section) = page.split_once(heading).unwrap();
    let (_, table) = section.split_once("| metric | type | labels |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let labels = cells[2].split(", ").filter(|label| !label.is_empty());
        let labels = labels.map(|label| label.trim_matches('`').to_owned()).collect();
        (cells[0].trim_matches('`').to_owned(), cells[1].to_owned(), labels)
    };
    rows.map(row).collect()
}

#[on(shm)]
fn the_documented_metrics_are_those_of_a_server() {
    let all = all_metrics();
    let documented = documented_in("\n## Metrics\n");
    assert!(documented.len() > 40, "{documented:?}");
    let exported: Vec<_> = all
        .types
        .iter()
        .map(|(name, kind)| {
            let labels = all.labels(name).into_iter().map(str::to_owned).collect();
            (name.clone(), kind.clone(), labels)
        })
        .collect();
    let known: BTreeSet<_> = documented.into_iter().collect();
    let exported: BTreeSet<_> = exported.into_iter().collect();
    let missing: Vec<_> = exported.difference(&known).collect();
    let absent: Vec<_> = known.difference(&exported).collect();
    assert!(
        missing.is_empty() && absent.is_empty(),
        "not in docs/operations.md: {missing:#?}\nnot exported: {absent:#?}"
    );
    // Each value of `reason` has a row.
    let page = read("docs/operations.md");
    for name in ["farside_fences_total", "farside_refusals_total"] {
        for (labels, _) in &all.samples[name] {
            let reason = format!("`{}`", labels["reason"]);
            assert!(page.contains(&reason), "docs/operations.md does not explain {reason}");
        }
    }
}

/// The `expr` of each query and the `query` of each variable in the dashboard.
fn dashboard_queries() -> Vec<String> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(query) if ["expr", "definition"].contains(&name.as_str()) => {
                            found.push(query.clone());
                        }
                        other => collect(other, found),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    let dashboard: Value = serde_json::from_str(&read("config/grafana/farside.json")).unwrap();
    collect(&dashboard, &mut found);
    found
}

/// A metric in a query, and the matchers in braces behind it: label, operator and value.
type Selected = (String, Vec<(String, String, String)>);

/// The metrics of this server that a text names.
fn selected(text: &str) -> Vec<Selected> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find(is_word) {
        let word = &rest[start..];
        let end = word.find(|c| !is_word(c)).unwrap_or(word.len());
        let (name, behind) = word.split_at(end);
        rest = behind;
        if !name.starts_with("farside_") && !name.starts_with("process_") {
            continue;
        }
        let inside = behind.strip_prefix('{').and_then(|inside| inside.split_once('}'));
        let (inside, behind) = inside.unwrap_or(("", behind));
        rest = behind;
        let matchers = inside.split(',').map(str::trim);
        let matchers = matchers.filter(|matcher| !matcher.is_empty()).map(|matcher| {
            let (label, value) = matcher.split_once('"').expect(matcher);
            let (value, label) = (value.trim_end_matches('"'), label.trim());
            let name = label.trim_end_matches(['=', '!', '~']);
            (name.to_owned(), label[name.len()..].to_owned(), value.to_owned())
        });
        found.push((name.to_owned(), matchers.collect()));
    }
    found
}

/// The labels that Prometheus adds.
const OF_PROMETHEUS: [&str; 2] = ["job", "instance"];

#[on(shm)]
fn dashboard_and_alerts_name_only_metrics_that_exist() {
    let all = all_metrics();
    let queries = dashboard_queries();
    assert!(queries.len() > 40, "{queries:?}");
    let alerts = read("config/prometheus/alerts.yml");
    let tests = read("config/prometheus/alerts_test.yml");
    let tests = tests.lines().filter(|line| line.contains("- series: "));
    let tests = tests.collect::<Vec<_>>().join("\n");
    for query in queries.iter().chain([&alerts, &tests]) {
        for (name, matchers) in selected(query) {
            assert!(all.samples.contains_key(&name), "there is no metric {name}: {query}");
            for (label, operator, value) in matchers {
                if OF_PROMETHEUS.contains(&label.as_str()) {
                    continue;
                }
                assert!(all.labels(&name).contains(label.as_str()), "{name} has no label {label}");
                let has_value = ["state", "reason", "role", "result", "kind"].contains(&&*label);
                if has_value && ["=", "!="].contains(&&*operator) {
                    all.labelled(&name, (&label, &value));
                }
            }
        }
    }
    let of_dashboard: BTreeSet<_> =
        queries.iter().flat_map(|query| selected(query)).map(|(name, _)| name).collect();
    let unused: Vec<_> = all.types.keys().filter(|name| !of_dashboard.contains(*name)).collect();
    assert!(unused.is_empty(), "the dashboard shows none of these: {unused:?}");
}

#[on(shm)]
fn metrics_in_queries_are_found() {
    let query = r#"sum by (state) (farside_a{x="1", y!~"$z"}) / farside_b[5m] > process_c"#;
    let (x, y) = (("x", "=", "1"), ("y", "!~", "$z"));
    let owned = |(a, b, c): (&str, &str, &str)| (a.to_owned(), b.to_owned(), c.to_owned());
    let expected = [
        ("farside_a".to_owned(), vec![owned(x), owned(y)]),
        ("farside_b".to_owned(), vec![]),
        ("process_c".to_owned(), vec![]),
    ];
    assert_eq!(selected(query), expected);
}

/// Returns a command of promtool. Without it, prints that the test is left out.
pub(super) fn promtool(arguments: &[&str]) -> Option<Command> {
    let found = Command::new("promtool").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        left_out("without promtool", "it comes with Prometheus: apt-get install prometheus");
        return None;
    }
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(root());
    Some(command)
}

/// `promtool check metrics` also checks names against the conventions.
#[on(shm)]
fn promtool_accepts_the_text_of_prometheus() {
    let Some(mut command) = promtool(&["check", "metrics"]) else { return };
    let cache = full_cache();
    let checked = CommandOutput::with_stdin(&mut command, metrics(&cache, "").as_bytes());
    checked.expect(0, "");
    // Canaries: it has no eye for what is wrong otherwise.
    for wrong in ["# TYPE a counter\na 1\n", "# HELP a A.\n# TYPE a info\na_info 1\n", "a{b} 1\n"] {
        let checked = CommandOutput::with_stdin(
            &mut promtool(&["check", "metrics"]).unwrap(),
            wrong.as_bytes(),
        );
        assert_ne!(checked.code, Some(0), "{wrong}");
    }
}

/// promtool reads OpenMetrics only to make blocks of them, and then every sample needs a time.
#[on(shm)]
fn promtool_accepts_open_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("metrics");
    let (from, into) = (input.to_str().unwrap(), folder.path().join("blocks"));
    let arguments = ["tsdb", "create-blocks-from", "openmetrics", from, into.to_str().unwrap()];
    let Some(mut command) = promtool(&arguments) else { return };
    let cache = full_cache();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let timed = |text: &str| -> String {
        let timed = |line: &str| match line.starts_with('#') {
            true => format!("{line}\n"),
            false => format!("{line} {now}\n"),
        };
        text.lines().map(timed).collect()
    };
    let open = timed(&metrics(&cache, OPEN_METRICS));
    std::fs::write(&input, &open).unwrap();
    let checked = CommandOutput::of(&mut command);
    assert_eq!(checked.code, Some(0), "{}", checked.stderr);
    // Canaries.
    let no_end = open.replace("# EOF\n", "");
    let other_unit = open.replace("# UNIT farside_region_bytes bytes", "# UNIT farside_keys bytes");
    let other_type = open.replace("# TYPE farside_keys gauge", "# TYPE farside_keys untyped");
    for wrong in [no_end, other_unit, other_type] {
        assert_ne!(wrong, open);
        std::fs::write(&input, wrong).unwrap();
        let checked = CommandOutput::of(&mut promtool(&arguments).unwrap());
        assert_ne!(checked.code, Some(0), "{}", checked.text());
    }
}

#[on(shm)]
fn promtool_accepts_the_alerts_and_their_tests_pass() {
    const ALERTS: &str = "config/prometheus/alerts.yml";
    const TESTS: &str = "config/prometheus/alerts_test.yml";
    let Some(mut command) = promtool(&["check", "rules", ALERTS]) else { return };
    CommandOutput::of(&mut command).succeeded();
    CommandOutput::of(&mut promtool(&["test", "rules", TESTS]).unwrap()).succeeded();
    let (alerts, tests) = (read(ALERTS), read(TESTS));
    let names = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let untested: Vec<_> =
        names.filter(|name| !tests.contains(&format!("alertname: {name}\n"))).collect();
    assert!(untested.is_empty(), "no test has these alerts: {untested:?}");
}

/// Makes a rule of each query.
#[on(shm)]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yml");
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    let queries = dashboard_queries();
    let queries = queries.iter().filter(|query| !query.starts_with("label_values("));
    for (number, query) in queries.enumerate() {
        let query = query.replace("$__rate_interval", "1m");
        assert!(query.contains("$instance"), "{query}");
        let query = serde_json::to_string(&query).unwrap();
        rules += &format!("      - record: query:{number}\n        expr: {query}\n");
    }
    std::fs::write(&file, rules).unwrap();
    let Some(mut command) = promtool(&["check", "rules", file.to_str().unwrap()]) else { return };
    CommandOutput::of(&mut command).succeeded();
}
