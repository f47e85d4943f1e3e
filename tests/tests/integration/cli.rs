//! Proves that kv-cli does what its help says, against a real server: exit codes, data on stdout,
//! messages on stderr, any bytes in and out. Every mistake is reported in one clear line, and every
//! kind of failure has its own exit code. It is an error if stdin or stdout is closed, or the disk
//! of stdout is full. The output is readable and has no control characters.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, binary};
use serde_json::Value as Json;

/// Runs kv-cli with arguments of any bytes, and with `stdin`.
fn cli_with<A: AsRef<OsStr>>(
    server: &ServerProcess,
    arguments: &[A],
    stdin: &[u8],
) -> CommandOutput {
    CommandOutput::with_stdin(server.command("kv-cli").args(arguments), stdin)
}

/// Runs kv-cli without a configured server.
fn cli_alone(arguments: &[&str]) -> CommandOutput {
    CommandOutput::of(command("kv-cli").args(arguments))
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[on(any)]
fn numbers_times_and_several_keys_have_commands() {
    let server = ServerProcess::start("--memory 32MiB");
    server.cli(&["incr", "n"]).expect(0, "1\n");
    server.cli(&["incr", "n", "41"]).expect(0, "42\n");
    server.cli(&["incr", "n", "-50"]).expect(0, "-8\n");
    server.cli(&["incr", "n", "x"]).expect_line(2, &["x"]);
    server.cli(&["ttl", "n"]).expect(0, "never\n");
    server.cli(&["ttl", "absent"]).expect_line(1, &["`absent` is absent"]);
    server.cli(&["put", "key", "a\tb", "--ttl", "1h"]).expect(0, "");
    let ttl: f64 = server.cli(&["ttl", "key"]).succeeded().text().trim().parse().unwrap();
    assert!(ttl > 1800.0 && ttl < 7200.0, "{ttl}");
    server.cli(&["incr", "key"]).expect_line(5, &["not a decimal integer"]);
    server.cli(&["exists", "key"]).expect(0, "");
    server.cli(&["exists", "absent"]).expect_line(1, &["absent"]);
    server.cli(&["mget", "key", "n"]).expect(0, "key\ta\\tb\nn\t-8\n");
    let some = server.cli(&["mget", "n", "absent"]);
    some.expect(1, "n\t-8\n");
    assert!(some.stderr.contains("`absent` is absent"), "{}", some.stderr);
    server.cli(&["delete"]).expect_line(2, &["<KEY>"]);
    server.cli(&["delete", "--prefix", ""]).expect_line(2, &["empty"]);
    server.cli(&["put", "kept", "v"]).expect(0, "");
    server.cli(&["delete", "--prefix", "ke"]).expect(0, "2\n");
    server.cli(&["scan", "--keys-only"]).expect(0, "n\n");
    server.assert_verifies();
}

#[on(any)]
fn every_command_on_a_key_returns_its_exit_codes() {
    let server = ServerProcess::start("--memory 32MiB");
    server.cli(&["get", "key"]).expect_line(1, &["`key` is absent"]);
    server.cli(&["update", "key", "v"]).expect_line(1, &["absent", "nothing was changed"]);
    server.cli(&["delete", "key"]).expect_line(1, &["absent"]);
    server.cli(&["cas", "key", "--expect", "v", "w"]).expect_line(1, &["absent"]);
    server.cli(&["insert", "key", "one"]).expect(0, "");
    server.cli(&["get", "key"]).expect(0, "one");
    server.cli(&["insert", "key", "two"]).expect_line(1, &["is present"]);
    server.cli(&["cas", "key", "--absent", "two"]).expect(1, "one");
    server.cli(&["cas", "key", "--expect", "zero", "two"]).expect(1, "one");
    server.cli(&["get", "key"]).expect(0, "one");
    server.cli(&["cas", "key", "--expect", "one", "two"]).expect(0, "");
    server.cli(&["get", "key"]).expect(0, "two");
    server.cli(&["update", "key", "three"]).expect(0, "");
    server.cli(&["put", "key", "-4"]).expect(0, "");
    server.cli(&["get", "key"]).expect(0, "-4");
    server.cli(&["delete", "key"]).expect(0, "");
    server.cli(&["cas", "key", "--absent", "five"]).expect(0, "");
    server.cli(&["get", "key"]).expect(0, "five");
    server.assert_verifies();
}

#[on(any)]
fn any_bytes_go_in_and_out() {
    let server = ServerProcess::start("--memory 32MiB");
    let every_byte: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let file = server.folder().join("value");
    fs::write(&file, &every_byte).unwrap();
    server.cli(&["put", "file", "--file", path(&file)]).expect(0, "");
    server.cli(&["get", "file"]).expect(0, &every_byte);
    cli_with(&server, &["put", "stdin", "-"], &every_byte).expect(0, "");
    server.cli(&["get", "stdin"]).expect(0, &every_byte);
    cli_with(&server, &["put", "empty", "-"], b"").expect(0, "");
    server.cli(&["get", "empty"]).expect(0, "");
    let binary_key = OsString::from_vec(vec![0xff, 0x01, 0x0a]);
    let arguments = [OsStr::new("put"), &binary_key, OsStr::from_bytes(b"\xfe")];
    cli_with(&server, &arguments, b"").expect(0, "");
    server.cli(&["--key-encoding", "hex", "get", "ff010a"]).expect(0, b"\xfe");
    let base64 = ["get", "/wEK", "--key-encoding", "base64", "--value-encoding", "base64"];
    server.cli(&base64).expect(0, "/g==\n");
    let hex = ["put", "hexed", "00fF", "--value-encoding", "hex"];
    server.cli(&hex).expect(0, "");
    server.cli(&["get", "hexed"]).expect(0, b"\x00\xff");
    server.cli(&["get", "hexed", "--value-encoding", "hex"]).expect(0, "00ff\n");
    let not_hex = ["get", "zz", "--key-encoding", "hex"];
    server.cli(&not_hex).expect_line(2, &["kv-cli: the key", "not hexadecimal"]);
}

#[on(any)]
fn scan_prints_lines() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    for (key, value) in [(&b"a/1"[..], &b"x"[..]), (b"a/2", b"two\nlines\t"), (b"b\xff", b"")] {
        session.put(key, value).unwrap();
    }
    let sorted = |arguments: &[&str]| {
        let output = server.cli(arguments);
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
        let mut lines: Vec<String> = output.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&["scan"]), ["a/1\tx", "a/2\ttwo\\nlines\\t", "b\\xff\t"]);
    assert_eq!(sorted(&["scan", "--keys-only", "--prefix", "a/"]), ["a/1", "a/2"]);
    assert_eq!(sorted(&["scan", "--prefix", "c"]).len(), 0);
    assert_eq!(sorted(&["scan", "--limit", "2"]).len(), 2);
    assert_eq!(sorted(&["scan", "--limit", "0"]).len(), 0);
    let hex = ["scan", "--keys-only", "--key-encoding", "hex", "--prefix", "62"];
    assert_eq!(sorted(&hex), ["62ff"]);
    let json = sorted(&["scan", "--json"]);
    assert_eq!(json[0], r#"{"key":"a/1","value":"x"}"#);
    let records: Vec<Json> = json.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records[2]["key_base64"], "Yv8=");
}

#[on(any, rdma_in_soak)]
fn bigkeys_prints_the_longest_values() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    for (key, bytes) in [("short", 3), ("long", 70_000), ("b\t", 500), ("a", 500), ("empty", 0)] {
        session.put(key, vec![b'x'; bytes]).unwrap();
    }
    server.cli(&["bigkeys", "--count", "3"]).expect(0, "70000\tlong\n500\ta\n500\tb\\t\n");
    server.cli(&["bigkeys"]).expect(0, "70000\tlong\n500\ta\n500\tb\\t\n3\tshort\n0\tempty\n");
    server.cli(&["bigkeys", "--count", "0"]).expect_line(2, &["--count"]);
}

#[on(any, rdma_in_soak)]
fn stat_reports_keys_clients_and_memory() {
    let server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    client.session().unwrap().put(b"key", [7; 1000]).unwrap();
    let output = server.cli(&["stat", "--json"]);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    let stat: Json = serde_json::from_str(output.text()).unwrap();
    assert_eq!((&stat["keys"], &stat["problems"]), (&Json::from(1), &Json::from(0)));
    assert_eq!(stat["clients"], 1, "the test's own");
    assert_eq!(stat["memory"]["region_bytes"], 32 << 20);
    assert_eq!(stat["server"], server.address());
    for field in ["uptime_ms", "incarnation", "slots", "value_bytes_max", "grace_ms"] {
        assert!(stat[field].is_u64(), "{field}: {stat}");
    }
    assert!(stat["load_factor"].as_f64().unwrap() > 0.0);
    let class = &stat["classes"].as_array().unwrap()[0];
    assert_eq!((&class["block_bytes"], &class["linked"]), (&Json::from(1280), &Json::from(1)));
    assert_eq!(class["content"], "value");
    let table = server.cli(&["stat"]);
    assert!(table.text().contains("keys        1\n"), "{}", table.text());
}

/// Heads of 4 KiB are not those of values with 4 KiB, and extents not those of values with 1 MiB.
#[on(any, rdma_in_soak)]
fn stat_distinguishes_blocks_of_one_size_by_what_they_hold() {
    let server = ServerProcess::start("--memory 64MiB --value-bytes-max 8388608");
    let mut session = server.session();
    for (key, bytes) in [("short", 4000), ("long", 1_000_000), ("with extents", 5_000_000)] {
        session.put(key, vec![7; bytes]).unwrap();
    }
    let stat: Json = serde_json::from_str(server.cli(&["stat", "--json"]).text()).unwrap();
    let linked = |content: &str, block_bytes: u64| {
        let is_wanted =
            |class: &&Json| class["content"] == content && class["block_bytes"] == block_bytes;
        let mut found = stat["classes"].as_array().unwrap().iter().filter(is_wanted);
        let linked = found.next().map(|class| class["linked"].as_u64().unwrap());
        assert!(found.next().is_none(), "{stat}");
        linked
    };
    assert_eq!([linked("value", 4 << 10), linked("head", 4 << 10)], [Some(1), Some(1)]);
    assert_eq!([linked("value", 1 << 20), linked("extent", 1 << 20)], [Some(1), Some(5)]);
    let table = server.cli(&["stat"]);
    for block in ["4.0 KiB", "head 4.0 KiB", "1.0 MiB", "extent 1.0 MiB"] {
        let row = format!("\n{block:>14} ");
        assert!(table.text().contains(&row), "{row:?} in {}", table.text());
    }
}

/// Returns the relative paths and contents of all files below a folder.
fn tree(root: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let (mut files, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                let path = entry.path();
                let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes();
                files.push((name.to_vec(), fs::read(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[on(any)]
fn a_loaded_folder_is_dumped_unchanged() {
    let server = ServerProcess::start("--memory 32MiB --value-bytes-max 50000");
    let (from, to) = (server.folder().join("from"), server.folder().join("to"));
    fs::create_dir_all(from.join("nested/deep er")).unwrap();
    let every_byte: Vec<u8> = (0..=255).cycle().take(50_000).collect();
    let files = [
        (&b"empty"[..], &b""[..]),
        (b"nested/binary", &every_byte),
        (b"nested/deep er/new\nline", b"text\n"),
        (b"-dash", b"1"),
        (b"\xff\xfe", b"2"),
    ];
    for (name, content) in files {
        fs::write(from.join(OsStr::from_bytes(name)), content).unwrap();
    }
    std::os::unix::fs::symlink("empty", from.join("link")).unwrap();
    let output = server.cli(&["load", path(&from)]).succeeded();
    assert!(output.stderr.contains("5 keys loaded") && output.stderr.contains("1 symbolic link"));
    server.cli(&["dump", path(&to)]).succeeded();
    assert!(tree(&from) == tree(&to) && tree(&to).len() == 5);
    server.cli(&["dump", path(&to)]).expect_line(2, &["not empty", "--force"]);
    // A value that is too large for this region: an error at the end, unless it is skipped.
    fs::write(from.join("large"), [0; 50_001]).unwrap();
    let output = server.cli(&["load", path(&from)]);
    assert_eq!(output.code, Some(5));
    for part in ["large: it is 50001 bytes long", "5 keys loaded", "1 failed"] {
        assert!(output.stderr.contains(part), "{}", output.stderr);
    }
    let output = server.cli(&["load", "--skip-too-large", path(&from)]);
    output.expect_line(0, &["5 keys loaded", "1 value over 50000 bytes skipped"]);
    server.assert_verifies();
}

#[on(any)]
fn records_loaded_from_jsonl_are_dumped_unchanged() {
    let server = ServerProcess::start("--memory 32MiB");
    let file = |name: &str| path(&server.folder().join(name)).to_owned();
    let records = r#"{"key":"a","value":"1"}
{"key":"b,\"c","value_base64":"//4="}
{"key":"two\nlines","value":""}
"#;
    fs::write(file("in.jsonl"), records).unwrap();
    server.cli(&["load", &file("in.jsonl")]).succeeded();
    server.cli(&["get", "a"]).expect(0, "1");
    server.cli(&["get", "b,\"c"]).expect(0, b"\xff\xfe");
    server.cli(&["get", "two\nlines"]).expect(0, "");
    server.cli(&["dump", &file("out.jsonl")]).succeeded();
    let second_server = ServerProcess::start("--memory 32MiB");
    second_server.cli(&["load", &file("out.jsonl")]).succeeded();
    second_server.cli(&["dump", &file("again.jsonl")]).succeeded();
    let lines = |name: &str| {
        let text = fs::read_to_string(file(name)).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines("out.jsonl"), lines("again.jsonl"));
    assert_eq!(lines("out.jsonl").len(), 3);
    fs::write(file("bad.jsonl"), "{\"key\":\"good\",\"value\":\"\"}\n\nnonsense\n").unwrap();
    let output = second_server.cli(&["load", &file("bad.jsonl")]);
    assert_eq!(output.code, Some(5));
    assert!(output.stderr.contains("kv-cli: line 3: "), "{}", output.stderr);
    assert!(output.stderr.contains("1 key loaded") && output.stderr.contains("1 failed"));
    second_server.cli(&["get", "good"]).expect(0, "");
    second_server.cli(&["load", &file("none")]).expect_line(5, &["cannot load", "none"]);
}

#[on(any)]
fn dump_writes_nothing_outside_its_folder() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    let outside = server.folder().join("absolute");
    for key in ["../escaped", "a/../../escaped", path(&outside), "a//b", "nul\0", "good"] {
        session.put(key.as_bytes(), b"value").unwrap();
    }
    let to = server.folder().join("to");
    let output = server.cli(&["dump", path(&to)]);
    assert_eq!(output.code, Some(5));
    assert_eq!(output.stderr.matches("is left out").count(), 5, "{}", output.stderr);
    assert!(output.stderr.contains("`../escaped` is left out"), "{}", output.stderr);
    assert_eq!(tree(&to), [(b"good".to_vec(), b"value".to_vec())]);
    assert!(!outside.exists() && !server.folder().join("escaped").exists());
}

#[on(any, rdma_in_soak)]
fn verify_finds_a_flipped_bit() {
    let server = ServerProcess::start_with_file("--memory 32MiB");
    let value = b"a value that is in the region only once, long enough to be found";
    let mut session = server.session();
    session.put(b"damaged", value).unwrap();
    session.put(b"sound", b"still here").unwrap();
    let output = server.cli(&["verify"]);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    assert!(output.text().contains("keys        2,"), "{}", output.text());
    assert!(output.text().ends_with("verdict     no damage\n"), "{}", output.text());
    let region = fs::OpenOptions::new().read(true).write(true).open(server.region_file()).unwrap();
    let content = fs::read(server.region_file()).unwrap();
    let offset = content.windows(value.len()).position(|part| part == value).unwrap();
    region.write_all_at(&[value[10] ^ 1], offset as u64 + 10).unwrap();
    let output = server.cli(&["verify"]);
    assert_eq!(output.code, Some(4));
    assert!(
        output.text().contains("DAMAGE") && output.text().contains("1 problem"),
        "{}",
        output.text()
    );
    server.cli(&["get", "damaged"]).expect_line(4, &["checksum", "verify"]);
    server.cli(&["get", "sound"]).expect(0, "still here");
    let scanned = server.cli(&["scan"]);
    assert_eq!((scanned.code, scanned.text()), (Some(4), "sound\tstill here\n"));
}

#[on(any)]
fn each_mistake_is_reported_in_one_line() {
    let server = ServerProcess::start("--memory 32MiB");
    for (arguments, parts) in [
        (&["get", "key", "--bogus"][..], &["unexpected argument '--bogus'"][..]),
        (&["stat", "--jsn"], &["--jsn", "'--json'"]),
        (&["put"], &["<KEY>", "<VALUE>"]),
        (&["gett", "key"], &["'gett'", "'get'"]),
        (&["get", "key", "--key-encoding", "octal"], &["octal", "base64"]),
        (&["put", "key", "value", "--file", "f"], &["--file", "cannot be used with"]),
        (&["get", ""], &["the key is empty"]),
        (&["scan", "--limit", "x"], &["--limit", "x"]),
    ] {
        let output = server.cli(arguments);
        output.expect_line(2, parts);
        assert!(output.stderr.starts_with("kv-cli: "), "{}", output.stderr);
    }
    let absent = server.cli(&["put", "key", "--file", "/nonexistent/f"]);
    absent.expect_line(5, &["cannot open /nonexistent/f"]);
    let long = "k".repeat(70_000);
    for arguments in [&["get", &long][..], &["put", &long, "v"], &["delete", &long]] {
        let output = server.cli(arguments);
        output.expect_line(2, &["70000 bytes", "1024"]);
        assert!(output.stderr.len() < 200, "{}", output.stderr);
    }
    let limit = server.session().limits().value_bytes_max;
    let zeros = vec![0; limit + 1];
    cli_with(&server, &["put", "key", "-"], &zeros).expect_line(2, &["stdin", &limit.to_string()]);
}

#[on(any, rdma_in_soak)]
fn ping_tells_whether_a_server_answers() {
    let server = ServerProcess::start("--memory 16MiB");
    let output = server.cli(&["ping"]).succeeded();
    let answer = output.text();
    let numbers: Vec<u64> = answer.split_whitespace().flat_map(str::parse).collect();
    assert!(matches!(numbers[..], [took_us, _up_s] if took_us > 0), "{answer}");
    assert!(answer.starts_with("answered in ") && answer.ends_with(" s\n"), "{answer}");
}

#[on(any)]
fn no_server_is_reported_in_one_line() {
    let nowhere = "shm:///nonexistent/kv.sock";
    for command in ["get key", "put key v", "scan", "stat", "ping", "verify"] {
        let command: &[_] = &command.split(' ').collect::<Vec<_>>();
        let arguments = [&["--server", nowhere], command].concat();
        cli_alone(&arguments).expect_line(3, &["/nonexistent/kv.sock"]);
        cli_alone(command).expect_line(2, &["which server?", "--server", "FARSIDE_SERVER"]);
    }
    cli_alone(&["--server", "http://x", "get", "key"]).expect_line(2, &["http://x", "shm://"]);
    let config = ["--config", "/nonexistent/client.toml", "get", "key"];
    cli_alone(&config).expect_line(2, &["/nonexistent/client.toml"]);
}

#[on(any)]
fn help_and_doctor_need_no_server() {
    let doctor = cli_alone(&["doctor"]).succeeded();
    for what in ["processors", "huge pages", "locked memory", "RDMA", "server"] {
        assert!(doctor.text().contains(what), "{}", doctor.text());
    }
    let nowhere = "shm:///nonexistent/kv.sock";
    for (arguments, code, line) in [
        (["--config", "/nonexistent/x.toml"], 2, "warn  config file   /nonexistent/x.toml"),
        (["--server", nowhere], 3, "warn  server        shm:///nonexistent/kv.sock"),
    ] {
        let doctor = cli_alone(&[&["doctor"], &arguments[..]].concat());
        let has_line = doctor.text().contains(line);
        assert!(doctor.code == Some(code) && has_line, "{}", doctor.text());
    }
    let help = cli_alone(&["--help"]);
    assert!(help.code == Some(0) && help.text().contains("Exit codes"));
}

#[on(any)]
fn every_command_generates_its_manual_and_completions() {
    for name in ["kv-bench", "kv-cli", "kv-resp", "kv-server"] {
        for kind in ["man", "complete-bash", "complete-fish", "complete-zsh"] {
            let document = CommandOutput::of(command(name).args(["--generate", kind])).succeeded();
            let part = if kind == "man" { ".SH SEE ALSO" } else { name };
            assert!(document.text().contains(part), "{name} {kind}");
        }
        let wrong = CommandOutput::of(command(name).args(["--generate", "html"]));
        wrong.expect_line(2, &["takes man or complete-bash"]);
    }
}

#[on(any)]
fn a_closed_stdout_is_no_error() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    (0..2000u32).for_each(|n| session.put(n.to_le_bytes(), [b'x'; 1000]).unwrap());
    let mut child = server.command("kv-cli").arg("scan").spawn().unwrap();
    drop(child.stdout.take());
    let output = CommandOutput::new(child.wait_with_output().unwrap());
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
}

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
