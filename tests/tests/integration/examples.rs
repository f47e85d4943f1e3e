//! Runs the programs in `client/examples` against a server, and checks what they print.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, TEST_TIMEOUT, example};

/// Runs an example against a new server. Returns what it printed.
fn run(name: &str) -> String {
    let server = ServerProcess::start("--memory 32MiB");
    let output = CommandOutput::of(Command::new(example(name)).arg(server.address())).succeeded();
    assert_eq!(output.stderr, "");
    server.assert_verifies();
    output.text().to_owned()
}

#[on(any)]
fn cache_aside_loads_what_is_not_cached() {
    assert_eq!(
        run("cache_aside"),
        "user 7: Ada (loaded)\nuser 7: Ada (cached)\nuser 7: Grace (loaded)\n\
         user 7: Grace (cached)\nuser 7: Grace (loaded)\n"
    );
}

#[on(any)]
fn the_counter_loses_no_increment() {
    assert_eq!(run("counter"), "home: 1000 visits\nabout: 2 visits\nhelp: 3 visits\n");
}

#[on(any)]
fn the_lock_has_one_holder() {
    assert_eq!(
        run("lock"),
        "first acquires: true\nsecond acquires: false\nfirst renews: true\nfirst releases: true\n\
         second acquires, for 50ms: true\nfirst acquires after that\nsecond renews: false\n\
         first releases: true\n"
    );
}

#[on(any)]
fn the_feature_store_reads_rows_and_defaults() {
    let printed = run("feature_store");
    let (rows, cost) = printed.split_once("9 GETs in ").unwrap();
    assert_eq!(
        rows,
        "user 1: age_days 400, orders 12, rating 3.5\nuser 2: age_days 0, orders 0, rating 4.5\n\
         user 3: age_days 0, orders 0, rating 2.5\n"
    );
    let doorbells: u64 = cost.trim_end_matches(" doorbells\n").parse().unwrap();
    assert!((1..9).contains(&doorbells), "{cost}");
}

#[on(any)]
fn the_web_handler_counts_visits() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut command = Command::new(example("web_handler"));
    let mut running = command.arg(server.address()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(running.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().trim_start_matches("listening at http://").trim_end_matches('/');
    let visit = |page: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        write!(stream, "GET {page} HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let visits = [visit("/a"), visit("/a"), visit("/b")];
    running.kill().unwrap();
    running.wait().unwrap();
    for (answer, body) in visits.iter().zip(["/a: 1 visits\n", "/a: 2 visits\n", "/b: 1 visits\n"])
    {
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with(body), "{answer}");
    }
}

#[on(any)]
fn an_example_without_an_address_says_what_it_needs() {
    for name in ["cache_aside", "counter", "lock", "feature_store", "web_handler"] {
        let mut command = Command::new(example(name));
        let output = CommandOutput::of(command.stdin(Stdio::null()));
        assert_eq!(output.code, Some(1));
        assert!(output.stderr.contains(&format!("usage: {name} ADDRESS")), "{}", output.stderr);
    }
}
