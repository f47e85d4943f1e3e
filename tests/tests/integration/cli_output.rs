//! Proves that kv-cli reports an error if stdin or stdout is closed, or the disk of stdout is full.
//! Its output is readable and has no control characters. Every kind of failure has its own exit
//! code.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, binary};

/// Runs `kv-cli <line>` in a shell; the line can redirect streams.
fn shell(server: &ServerProcess, line: &str) -> CommandOutput {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec \"$0\" {line}")]).arg(binary("kv-cli"));
    command.env("FARSIDE_SERVER", server.address()).current_dir(server.folder());
    CommandOutput::of(command.stdin(Stdio::null()))
}

#[on(any)]
fn closed_and_full_streams_are_errors() {
    let server = ServerProcess::start("--memory 32MiB");
    server.session().put(b"key", b"value").unwrap();
    shell(&server, "put new - <&-").expect_line(5, &["stdin is closed"]);
    shell(&server, "get new").expect_line(1, &["absent"]);
    for command in ["get key", "scan", "stat", "stat --json", "verify", "gc", "doctor"] {
        shell(&server, &format!("{command} >&-")).expect_line(5, &["stdout is closed"]);
        let full = shell(&server, &format!("{command} >/dev/full"));
        full.expect_line(5, &["cannot write to stdout", "No space left"]);
    }
    shell(&server, "--help >/dev/full").expect_line(5, &["No space left"]);
    // These commands do not use the stream that is closed or empty.
    for fine in ["put new value <&- >&-", "get key </dev/null >/dev/null", "put new - </dev/null"] {
        let output = shell(&server, fine);
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{fine}");
    }
}

#[on(any)]
fn failures_with_files_have_their_exit_codes() {
    let server = ServerProcess::start("--memory 32MiB");
    fs::write(server.folder().join("none.jsonl"), "").unwrap();
    for (line, code) in [
        ("load README", 5),
        ("dump none.jsonl", 2),
        ("--server shm:///nonexistent/s load none.jsonl", 3),
        ("verify --region none.jsonl", 5),
        ("verify --region /dev/null", 5),
    ] {
        let output = shell(&server, line);
        assert_eq!(output.code, Some(code), "{line}: {}", output.stderr);
    }
    // A file that is long enough for a region, but holds none, counts as damage.
    fs::write(server.folder().join("region"), vec![7; 8 << 20]).unwrap();
    shell(&server, "verify --region region").expect_line(4, &["not a Farside region"]);
    let help = shell(&server, "--help");
    for code in 0..=5 {
        assert!(help.text().contains(&format!("\n  {code}  ")), "{}", help.text());
    }
}

#[on(any)]
fn the_output_has_no_control_characters() {
    let server = ServerProcess::start("--memory 32MiB --value-bytes-max 100");
    let mut session = server.session();
    let text = "a\u{9b}31m\u{202e}\x1b[31m";
    session.put(text.as_bytes(), text.as_bytes()).unwrap();
    let is_harmless = |text: &str| {
        !text.replace(['\n', '\t'], "").contains(farside_config::command_line::is_unprintable)
    };
    for command in ["scan", "scan --json", "scan --keys-only", "dump dump"] {
        let output = shell(&server, command);
        assert!(
            output.code == Some(0) && is_harmless(output.text()),
            "{command}: {}",
            output.text()
        );
        assert!(is_harmless(&output.stderr), "{command}: {}", output.stderr);
    }
    let from = server.folder().join("from");
    fs::create_dir(&from).unwrap();
    fs::write(from.join(OsStr::from_bytes(text.as_bytes())), [0; 101]).unwrap();
    let output = shell(&server, "load from");
    assert!(
        output.stderr.contains("101 bytes long") && is_harmless(&output.stderr),
        "{}",
        output.stderr
    );
    assert_eq!(output.code, Some(5));
}

#[on(any)]
fn huge_keys_are_abbreviated_in_messages_and_left_out_of_a_dump() {
    let server = ServerProcess::start("--memory 32MiB --key-bytes-max 65535");
    let mut session = server.session();
    let deep = vec!["a"; 32_768].join("/");
    session.put(deep.as_bytes(), b"value").unwrap();
    session.put(b"good", b"value").unwrap();
    let absent = "k".repeat(60_000);
    let output = server.cli(&["get", &absent]);
    output.expect_line(1, &["kkk... (60000 bytes)` is absent"]);
    assert!(output.stderr.len() < 200, "{}", output.stderr);
    let output = server.cli(&["get", "key", &absent]);
    assert!(output.code == Some(2) && output.stderr.len() < 600, "{}", output.stderr);
    let output = shell(&server, "dump out");
    assert_eq!(output.code, Some(5), "{}", output.stderr);
    assert!(output.stderr.contains("(65535 bytes)` is left out: it has 65535 bytes"));
    assert!(output.stderr.len() < 500, "{}", output.stderr);
    assert_eq!(fs::read_dir(server.folder().join("out")).unwrap().count(), 1);
}

#[on(any)]
fn a_byte_order_mark_before_the_first_record_is_ignored() {
    let server = ServerProcess::start("--memory 32MiB");
    let line = "\u{feff}{\"key\":\"key\",\"value\":\"value\"}\n";
    fs::write(server.folder().join("marked.jsonl"), line).unwrap();
    shell(&server, "load marked.jsonl").expect_line(0, &["1 key loaded"]);
    assert_eq!(shell(&server, "get key").text(), "value");
}
