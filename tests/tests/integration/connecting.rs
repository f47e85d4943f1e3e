//! Proves that all commands and calls connect in the same way. They try until the timeout,
//! reconnect after a loss where that is harmless, and report what happened. Guards against a
//! `verify` that tries once, and a `gc` that fails when its server restarts. Also against errors
//! that say "Resource temporarily unavailable".

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use farside_fabric::shm;
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, device, new_address};

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
