//! Names of hosts: a name server that does not answer costs a client no more than its timeout, and
//! a host that lacks one of a name's addresses uses the others. Both need a machine of their own,
//! so commands run in namespaces with other files in /etc.

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use farside_tests::command::CommandOutput;
use farside_tests::{TEST_TIMEOUT, binary, left_out, left_out_without_root};
use tempfile::TempDir;

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
