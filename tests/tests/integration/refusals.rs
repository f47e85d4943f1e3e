//! Proves that a failed connection is explained in one line of kv-cli, kv-bench or kv-server, which
//! says why it failed and what to do, over either fabric.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use farside_fabric::rdma::preflight;
use farside_tests::command::CommandOutput;
use farside_tests::{
    OTHER_USER, RDMA_GRACE_MS, ServerProcess, binary, left_out, left_out_without_root, new_address,
};

/// Runs `program <arguments>` without a user's config file, and prints its stderr. `timeout` ends a
/// server that starts, which would run forever.
fn run(program: &str, arguments: &[&str]) -> CommandOutput {
    let mut command = Command::new("timeout");
    command.arg("60").arg(binary(program)).args(arguments);
    run_command(&mut command)
}

fn run_command(command: &mut Command) -> CommandOutput {
    command.env("HOME", "/nowhere").env_remove("FARSIDE_SERVER").stdin(Stdio::null());
    let output = CommandOutput::of(command);
    print!("{}", output.stderr);
    output
}

/// Writes a config file with this text, which only its owner can read.
fn config(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

/// A command for each way in which programs connect.
const COMMANDS: [(&str, &[&str]); 4] = [
    ("kv-cli", &["put", "key", "value"]),
    ("kv-cli", &["verify"]),
    ("kv-bench", &["verbs", "--span", "1MiB", "--seconds", "0.1"]),
    ("kv-bench", &["ycsb", "--workload", "c", "--records", "10", "--seconds", "0.1"]),
];

#[on(each, rdma_in_soak)]
fn a_wrong_secret_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server_config = "secret = 'open sesame'\n";
    let server = ServerProcess::start_with_config(server_config, "--memory 64MiB");
    let address = server.address();
    for (program, arguments) in COMMANDS {
        for (secret, is_right) in [("open barley", false), ("open sesame", true)] {
            let text = format!("server = '{address}'\nsecret = '{secret}'\n");
            let file = config(folder.path(), "client.toml", &text);
            let output = run(program, &[arguments, &["--config", file.to_str().unwrap()]].concat());
            if is_right {
                output.succeeded();
            } else {
                output.expect_line(3, &[&address, "refused the connection", "wrong secret"]);
            }
        }
    }
    let log = server.log();
    let warning = log.lines().find(|line| line.contains("refused a client: wrong secret"));
    assert!(warning.is_some_and(|line| line.contains("WARN")), "{log}");
}

#[on(each, rdma_in_soak)]
fn an_address_at_which_no_server_listens_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let unused = new_address(folder.path());
    for (program, arguments) in COMMANDS {
        let output = run(program, &[arguments, &["--server", &unused]].concat());
        output.expect_line(3, &["no server answers at", &unused, "is kv-server running there?"]);
    }
}

/// Words that users of other programs try, and mistakes in arguments.
#[on(each, rdma_in_soak)]
fn a_command_line_that_is_nearly_right_is_explained() {
    const NONE: &str = "shm:///nowhere/kv.sock";
    let more = "(kv-cli --help tells more)";
    for (arguments, text) in [
        (&["set", "key", "value"][..], format!("there is no command 'set': use 'put' {more}")),
        (&["SETNX", "key", "value"], format!("there is no command 'SETNX': use 'insert' {more}")),
        (&["del", "key"], format!("there is no command 'del': use 'delete' {more}")),
        (&["rm", "key"], format!("there is no command 'rm': use 'delete' {more}")),
        (&["ls"], format!("there is no command 'ls': use 'scan' {more}")),
        (&["keys"], format!("there is no command 'keys': use 'scan' {more}")),
        (&["info"], format!("there is no command 'info': use 'stat' {more}")),
        (&["expire", "key"], format!("there is no command 'expire': use 'put --ttl' {more}")),
        (
            &["put", "key", "value", "--ttl", "-5s"],
            format!(
                "invalid value '-5s' for '--ttl <TIME>': write a number above 0 and ms, s, m, h or \
                 d, as in 500ms, 90s or 1.5h {more}"
            ),
        ),
        (
            &["delete", "--prefix", "", "--server", NONE],
            "the prefix is empty, and all keys start with that: to remove all keys, start the \
             server anew, or give the prefixes one by one"
                .into(),
        ),
        (
            &["get", "key", "--server", "localhost:7400"],
            "`localhost:7400` is no server address (it has no scheme); write tcp://localhost:7400"
                .into(),
        ),
        (
            &["get", "key", "--server", "/run/kv.sock"],
            "`/run/kv.sock` is no server address (it has no scheme); write shm:///run/kv.sock"
                .into(),
        ),
        (
            &["get", "key", "--server", "http://kv"],
            "`http://kv` is no server address (the scheme is unknown); write for example \
             shm:///run/farside/kv.sock or tcp://kv-1:7400"
                .into(),
        ),
    ] {
        let output = run("kv-cli", arguments);
        assert_eq!((output.code, output.stderr), (Some(2), format!("kv-cli: {text}\n")));
    }
}

/// A program that speaks another protocol answers once it has read a line, as kv-resp does.
#[on(each, rdma_in_soak)]
fn a_program_that_is_no_server_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    for (answer, text) in [
        (
            "-ERR unknown command\r\n",
            "the protocol of redis; give the address of the kv-server behind a kv-resp, or use \
             redis-cli there",
        ),
        (
            "HTTP/1.1 400 Bad Request\r\n\r\n",
            "HTTP; give the address at which kv-server listens, not that of its metrics",
        ),
        (
            "220 mail.example ESMTP\r\n",
            "another protocol; give the address at which kv-server listens (--listen)",
        ),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        // The last one speaks first.
        let waits = !answer.starts_with('2');
        let serving = std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            let mut read = Vec::new();
            while waits && !read.ends_with(b"\n") {
                let mut some = [0; 512];
                let bytes = connection.read(&mut some).unwrap();
                read.extend_from_slice(&some[..bytes]);
            }
            connection.write_all(answer.as_bytes()).unwrap();
            // Until the client has read it.
            let _ = connection.read_to_end(&mut read);
        });
        let text_of_file = format!("server = '{address}'\nconnect_timeout_ms = 300\n");
        let file = config(folder.path(), "client.toml", &text_of_file);
        let output = run("kv-cli", &["get", "key", "--config", file.to_str().unwrap()]);
        serving.join().unwrap();
        let line = format!("kv-cli: {address} is no kv-server: the program there speaks {text}\n");
        assert_eq!((output.code, output.stderr), (Some(3), line));
    }
}

#[on(each, rdma_in_soak)]
fn a_socket_that_the_user_may_not_use_is_reported() {
    if left_out_without_root("only root can become another user") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("kv-cli");
    std::fs::copy(binary("kv-cli"), &program).unwrap();
    let address = format!("shm://{}/kv.sock", closed.display());
    let mut command = Command::new(&program);
    command.args(["get", "key", "--server", &address]).uid(OTHER_USER).gid(OTHER_USER);
    let output = run_command(&mut command);
    let line = format!(
        "kv-cli: this user may not connect to {address} (Permission denied (os error 13)): run the \
         program as the server's user, or set socket_group or socket_mode in the server's config \
         file, and let both users enter the folder\n"
    );
    assert_eq!((output.code, output.stderr), (Some(3), line));
}

/// Either the machine has no RDMA device, or the program was built without RDMA.
#[on(each, rdma_in_soak)]
fn a_missing_device_is_reported() {
    if !preflight().devices.is_empty() {
        left_out("where there is RDMA", "it is about a machine without");
        return;
    }
    let address = "rdma://127.0.0.1:7400";
    let advice: &[&str] = match cfg!(feature = "verbs") {
        true => &["there is no RDMA device here", "modprobe rdma_rxe"],
        false => &["built without RDMA", "--features verbs"],
    };
    for (program, arguments) in COMMANDS {
        let output = run(program, &[arguments, &["--server", address]].concat());
        output.expect_line(5, advice);
    }
    let output = run("kv-server", &["--listen", address, "--memory", "16MiB"]);
    output.expect_line(1, &[&["kv-server: "], advice].concat());
}

#[on(rdma_in_soak)]
fn an_address_without_a_device_is_refused() {
    let listen = |address: &str| run("kv-server", &["--listen", address, "--memory", "16MiB"]);
    let route = &["cannot be reached through an RDMA device", "rdma link"];
    listen("rdma://203.0.113.1:7400").expect_line(1, route);
    let all = &["0.0.0.0", "is no address of an RDMA device"];
    listen("rdma://0.0.0.0:7400").expect_line(1, all);
    let running = ServerProcess::start("--memory 16MiB");
    listen(&running.address()).expect_line(1, &["binding the address", "in use"]);
    running.session().put(b"key", b"value").unwrap();
}

/// Needs `setpriv`, and root's right to drop capabilities.
#[on(rdma)]
fn a_low_limit_on_pinned_memory_is_reported() {
    let limited = |program: &str, arguments: &[&str]| {
        let script = "ulimit -l 64; exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \
                      timeout 60 \"$0\" \"$@\"";
        run_command(Command::new("sh").args(["-c", script]).arg(binary(program)).args(arguments))
    };
    let parts = &["does not let this process pin", "65536 bytes", "ulimit -l", "LimitMEMLOCK"];
    let folder = tempfile::tempdir().unwrap();
    let listen = new_address(folder.path());
    let small = ["--listen", &listen, "--memory", "16MiB", "--huge-pages", "never"];
    limited("kv-server", &small).expect_line(1, parts);
    let server = ServerProcess::start("--memory 16MiB");
    let address = server.address();
    for (program, arguments) in COMMANDS {
        let arguments = [arguments, &["--server", &address]].concat();
        limited(program, &arguments).expect_line(5, parts);
    }
    server.assert_verifies();
}

/// T_word would be 0 (docs/protocol.md), so the client could not update any key. It may still read.
#[on(rdma_in_soak)]
fn a_client_whose_writes_may_arrive_too_late_can_only_read() {
    let server = ServerProcess::start("--memory 16MiB");
    server.cli(&["put", "key", "value"]).succeeded();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("server = '{}'\n[rdma]\nack_timeout = 19\n", server.address());
    let config = config(folder.path(), "client.toml", &text);
    let with = |arguments: &[&str]| {
        run("kv-cli", &[arguments, &["--config", config.to_str().unwrap()]].concat())
    };
    let has = format!("this one has {RDMA_GRACE_MS}");
    let late = &["60829 ms late", "rdma.ack_timeout", "grace_ms >= 382", &has];
    with(&["put", "key", "other"]).expect_line(2, late);
    assert_eq!(with(&["get", "key"]).succeeded().text(), "value");
}
