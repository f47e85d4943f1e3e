//! Proves that all commands and calls connect in the same way. They try until the timeout,
//! reconnect after a loss where that is harmless, and report what happened. A failed connection is
//! explained in one line, which says why it failed and what to do, over either fabric. A name
//! server that does not answer costs a client no more than its timeout, and a host that lacks one
//! of a name's addresses uses the others. Both need a machine of their own, so commands run in
//! namespaces with other files in /etc.
//!
//! Guards against a `verify` that tries once, and a `gc` that fails when its server restarts. Also
//! against errors that say "Resource temporarily unavailable".

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use farside_fabric::rdma::preflight;
use farside_fabric::shm;
use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    OTHER_USER, RDMA_GRACE_MS, ServerProcess, TEST_TIMEOUT, binary, device, left_out,
    left_out_without_root, new_address,
};
use tempfile::TempDir;

/// Writes a config file with this timeout. Returns its path.
fn config(folder: &Path, server: &str, timeout_ms: u64) -> PathBuf {
    let path = folder.join("client.toml");
    let text = format!("server = '{server}'\nconnect_timeout_ms = {timeout_ms}\n");
    std::fs::write(&path, text).unwrap();
    path
}

fn cli(arguments: &[&str], config: &Path) -> Command {
    let mut command = command("kv-cli");
    command.args(arguments).arg("--config").arg(config);
    command
}

#[on(each, rdma_in_soak)]
fn every_command_waits_for_a_server_that_starts() {
    let mut server = ServerProcess::start_with_file("--memory 32MiB");
    server.session().put(b"key", b"value").unwrap();
    let config = config(server.folder(), &server.address(), 60_000);
    let snapshot = server.folder().join("snapshot").display().to_string();
    let commands: [&[&str]; 8] = [
        &["get", "key"],
        &["verify"],
        &["stat"],
        &["gc"],
        &["compact"],
        &["scan"],
        &["doctor"],
        &["snapshot", &snapshot],
    ];
    server.kill();
    let children = commands.map(|command| cli(command, &config).spawn().unwrap());
    // A command that does not wait fails within this time.
    std::thread::sleep(Duration::from_millis(200));
    server.restart();
    for child in children {
        CommandOutput::new(child.wait_with_output().unwrap()).succeeded();
    }
}

#[on(each, rdma_in_soak)]
fn a_collection_whose_server_is_restarted_starts_again() {
    let mut server = ServerProcess::start_with_file("--memory 32MiB");
    let client = server.client_builder().connect_timeout(farside_tests::TEST_TIMEOUT);
    let client = client.connect().unwrap();
    let before = client.admin().statistics().unwrap();
    // The paused server does not answer, so it is killed during the collection.
    server.pause();
    let after = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| client.admin().collect());
        std::thread::sleep(Duration::from_millis(200));
        server.kill();
        server.restart();
        collecting.join().unwrap().unwrap()
    });
    assert_eq!(after.incarnation, before.incarnation + 1);
    assert!(after.collections > 0);
}

/// A server accepts connections before it has made its region, as one that is stopped here.
#[on(each, rdma_in_soak)]
fn a_command_waits_longer_for_a_server_that_accepts_connections() {
    let server = ServerProcess::start("--memory 32MiB");
    server.session().put("key", "value").unwrap();
    server.pause();
    let child = server.command("kv-cli").args(["get", "key"]).spawn().unwrap();
    // Over RDMA no connection is accepted by a stopped server.
    let stopped = if device().is_some() { 1 } else { 4 };
    std::thread::sleep(Duration::from_secs(stopped));
    server.signal(rustix::process::Signal::CONT);
    CommandOutput::new(child.wait_with_output().unwrap()).expect(0, "value");
}

#[on(each, rdma_in_soak)]
fn a_server_says_at_once_what_it_does() {
    let server = ServerProcess::start_with_file("--memory 32MiB");
    let (log, address) = (server.log(), server.address());
    let at = |what: &str| log.lines().position(|line| line.contains(what));
    let making = at("making a region of 32MiB").expect("it says that first");
    assert!(log.lines().nth(making).unwrap().contains(&address), "{log}");
    assert!(at("serving").is_some_and(|serving| making < serving), "{log}");
}

/// Runs `kv-cli get` against a socket whose connections `accept` handles.
fn get_from(accept: impl FnOnce(&shm::Listener) + Send) -> CommandOutput {
    let folder = tempfile::tempdir().unwrap();
    let address = new_address(folder.path());
    let listener = shm::Listener::bind(&folder.path().join("kv.sock")).unwrap();
    let config = config(folder.path(), &address, 300);
    std::thread::scope(|scope| {
        scope.spawn(|| accept(&listener));
        CommandOutput::of(&mut cli(&["get", "key"], &config))
    })
}

// On shared memory only: it is about Unix sockets.
#[on(shm)]
fn a_server_that_does_not_answer_and_one_that_disconnects_are_told_apart() {
    let silent = get_from(|_| ());
    // The reported time is 300 ms or a little more.
    silent.expect_line(3, &["accepted the connection, but did not answer within 3"]);
    assert!(!silent.stderr.contains("os error"), "{}", silent.stderr);
    let disconnects = get_from(|listener| {
        rustix::io::ioctl_fionbio(listener, true).unwrap();
        let started = std::time::Instant::now();
        // Longer than the timeout of 300 ms: the last attempt is made after it.
        while started.elapsed() < Duration::from_secs(3) {
            drop(listener.accept());
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    disconnects.expect_line(3, &["closed it without an answer (tried for 3", "its log says why"]);
}

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
fn private_file(folder: &Path, name: &str, text: &str) -> PathBuf {
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
            let file = private_file(folder.path(), "client.toml", &text);
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
        let file = private_file(folder.path(), "client.toml", &text_of_file);
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
    let config = private_file(folder.path(), "client.toml", &text);
    let with = |arguments: &[&str]| {
        run("kv-cli", &[arguments, &["--config", config.to_str().unwrap()]].concat())
    };
    let has = format!("this one has {RDMA_GRACE_MS}");
    let late = &["60829 ms late", "rdma.ack_timeout", "grace_ms >= 382", &has];
    with(&["put", "key", "other"]).expect_line(2, late);
    assert_eq!(with(&["get", "key"]).succeeded().text(), "value");
}

/// Runs a script in namespaces in which a file of this text takes the place of the one in /etc.
/// `None` if the system does not make them.
fn run_with(kinds: &[&str], (name, text): (&str, &str), script: &str) -> Option<(TempDir, Child)> {
    if left_out_without_root("it makes mount namespaces") {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    std::fs::write(&file, text).unwrap();
    let unshare = |script: String| {
        let mut command = Command::new("unshare");
        command.args(kinds).args(["bash", "-e", "-c", &script]).current_dir(&folder);
        command.env("HOME", "/nowhere").env("PATH", path_with(binary("kv-cli").parent().unwrap()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mount = format!("mount --bind {} /etc/{name}", file.display());
    let made = unshare(mount.clone()).output();
    if !made.is_ok_and(|made| made.status.success()) {
        left_out("without mount namespaces", &format!("it replaces /etc/{name}"));
        return None;
    }
    let child = unshare(format!("{mount}\n{script}")).spawn().unwrap();
    Some((folder, child))
}

fn path_with(folder: &Path) -> String {
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default())
}

/// The system's lookup would take longer than this test waits.
#[on(any, rdma_in_soak)]
fn a_silent_name_server_costs_no_more_than_the_timeout() {
    // Not the address of a resolver of this machine.
    let silent = match UdpSocket::bind("127.75.0.1:53") {
        Ok(silent) => silent,
        Err(error) => return left_out("without port 53", &error.to_string()),
    };
    let resolv = format!(
        "nameserver {}\noptions timeout:30 attempts:5\n",
        silent.local_addr().unwrap().ip()
    );
    let script = "echo 'connect_timeout_ms = 300' > client.toml
        exec kv-cli --config client.toml --server tcp://kv-1.test:7400 get key";
    let Some((_folder, mut child)) = run_with(&["-m"], ("resolv.conf", &resolv), script) else {
        return;
    };
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > TEST_TIMEOUT {
            child.kill().unwrap();
            panic!("the command waits for the name server");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = CommandOutput::new(child.wait_with_output().unwrap());
    output.expect_line(3, &["no server answers at tcp://kv-1.test:7400", "no name server"]);
}

/// The namespaces have no IPv6.
#[on(any, rdma_in_soak)]
fn a_server_and_a_gateway_listen_at_those_addresses_of_a_name_that_the_host_has() {
    let hosts = "::1 both.test\n127.0.0.1 both.test\n";
    let script = "ip link set lo up
        echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
        kv-server --listen tcp://both.test:7400 --memory 16MiB 2> server.log &
        trap 'cat server.log >&2; kill $(jobs -p)' EXIT
        export FARSIDE_SERVER=tcp://both.test:7400
        kv-cli put key value
        kv-cli get key
        kv-resp --listen tcp://both.test:6379 2> resp.log &
        until exec 3<> /dev/tcp/127.0.0.1/6379; do
            sleep 0.01
            jobs %2 > /dev/null
        done 2>> resp.log
        echo PING >&3
        read -t 30 -r answer <&3
        echo \" $answer\"
        kv-server --listen tcp://both.test:7400 --memory 16MiB 2>&1 || true";
    let _ = ["kv-server", "kv-resp"].map(binary);
    let Some((_folder, child)) = run_with(&["-m", "-n"], ("hosts", hosts), script) else { return };
    let output = CommandOutput::new(child.wait_with_output().unwrap()).succeeded();
    assert!(output.text().starts_with("value +PONG"), "{}\n{}", output.text(), output.stderr);
    // The error of another server names the address that is taken.
    assert!(output.text().contains("127.0.0.1:7400: "), "{}", output.text());
}
