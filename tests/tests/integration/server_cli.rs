//! Proves that a kv-server that cannot start prints one clear line, has an exit code, and changes
//! no existing file. Also proves that a log without a reader stops no program. Guards against
//! threads that wait until stderr takes a line.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    OTHER_USER, ServerProcess, TEST_TIMEOUT, binary, free_tcp_address, left_out,
    left_out_without_root, send_signal, wait_until,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

/// Runs `kv-server <arguments>`, which must end by itself.
pub(crate) fn server(arguments: &str) -> CommandOutput {
    run(Command::new(binary("kv-server")).args(arguments.split_whitespace()))
}

/// Runs `kv-server` with this socket and 16 MiB of memory.
fn listen(address: &str) -> CommandOutput {
    server(&format!("--listen {address} --memory 16MiB"))
}

/// Runs the command under `timeout`, because a server that starts after all would run forever.
fn run(command: &mut Command) -> CommandOutput {
    let mut timed = Command::new("timeout");
    timed.arg("20").arg(command.get_program()).args(command.get_args());
    CommandOutput::of(timed.stdin(Stdio::null()))
}

pub(crate) fn address(folder: &Path) -> String {
    format!("shm://{}", folder.join("kv.sock").display())
}

#[on(any)]
fn a_socket_in_use_is_reported() {
    let running = ServerProcess::start("--memory 16MiB");
    running.session().put(b"key", b"value").unwrap();
    let in_use = running.address();
    let place = in_use.strip_prefix("shm://").unwrap_or(&in_use);
    listen(&in_use).expect_line(1, &["kv-server: ", "listens at", place]);
    let value = running.session().get(b"key").unwrap().unwrap();
    assert_eq!(*value, *b"value");
    // A socket in use by another program.
    let folder = tempfile::tempdir().unwrap();
    let _other = std::os::unix::net::UnixListener::bind(folder.path().join("kv.sock")).unwrap();
    let output = listen(&address(folder.path()));
    output.expect_line(1, &["listens at"]);
}

#[on(any)]
fn a_path_that_cannot_be_a_socket_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kv.sock");
    fs::write(&file, "precious").unwrap();
    let output = listen(&address(folder.path()));
    output.expect_line(1, &["is not a socket"]);
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    let none = address(&folder.path().join("none"));
    listen(&none).expect_line(1, &["none/kv.sock", "create it first"]);
    let long = address(&folder.path().join("x".repeat(200)));
    listen(&long).expect_line(2, &["xxx/kv.sock", "over 107 bytes"]);
}

fn permit(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs `kv-server <arguments>` as a user without special rights. Root becomes another user, who
/// needs an own copy of the binary.
fn server_of_a_user(folder: &Path, arguments: &str) -> CommandOutput {
    let program = folder.join("kv-server");
    fs::copy(binary("kv-server"), &program).unwrap();
    permit(&program, 0o755);
    permit(folder, 0o755);
    let mut command = Command::new("timeout");
    command.arg("20").arg(&program).args(arguments.split_whitespace());
    if rustix::process::geteuid().is_root() {
        command.uid(OTHER_USER).gid(OTHER_USER);
    }
    CommandOutput::of(command.stdin(Stdio::null()))
}

#[on(any)]
fn a_socket_in_a_write_protected_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    permit(&closed, 0o555);
    let line = format!("--listen {} --memory 16MiB", address(&closed));
    let output = server_of_a_user(folder.path(), &line);
    output.expect_line(1, &["closed/kv.sock", "may not write there"]);
}

#[on(any)]
fn a_port_that_the_user_may_not_take_is_refused() {
    let first = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap();
    if first.trim().parse::<u16>().unwrap() <= 81 {
        left_out("where ports are reserved for root", "here all users may take them");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = server_of_a_user(folder.path(), "--listen tcp://127.0.0.1:81 --memory 16MiB");
    assert_eq!(
        (output.code, &*output.stderr),
        (
            Some(1),
            "kv-server: this user may not listen at tcp://127.0.0.1:81 (127.0.0.1:81: Permission \
             denied (os error 13)): take a port from 1024 on, or give the program \
             CAP_NET_BIND_SERVICE\n"
        )
    );
}

/// A cgroup of version 1 or 2 with this limit of memory; `None`, with the reason printed, if none
/// can be made here. Its drop removes it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with_memory(bytes: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let of = |controller: &str| {
            let line = own.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
            line.splitn(3, ':').nth(2)
        };
        let name = format!("farside-test-{}", std::process::id());
        for (root, path, file) in [
            ("/sys/fs/cgroup/memory", of("memory"), "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", of(""), "memory.max"),
        ] {
            let Some(path) = path else { continue };
            for above in [path.trim_start_matches('/'), ""] {
                let cgroup = Self(Path::new(root).join(above).join(&name));
                if fs::create_dir(&cgroup.0).is_ok()
                    && fs::write(cgroup.0.join(file), bytes.to_string()).is_ok()
                {
                    return Some(cgroup);
                }
            }
        }
        left_out("where cgroups can be made", "the limit of a real cgroup is not tested");
        None
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // It fails if it was not made.
        let _ = fs::remove_dir(&self.0);
    }
}

#[on(any)]
fn more_memory_than_the_cgroup_allows_is_refused() {
    let Some(cgroup) = Cgroup::with_memory(128 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = |command: &str| {
        let line = format!("echo 0 >{}/cgroup.procs && exec {command}", cgroup.0.display());
        let output = CommandOutput::of(Command::new("bash").args(["-c", &line]));
        print!("{}", output.text());
        output
    };
    let server = binary("kv-server").display().to_string();
    let listen = address(folder.path());
    let line = format!("timeout 60 {server} --listen {listen} --huge-pages never --memory 120MiB");
    let limit = cgroup.0.display().to_string();
    run(&line).expect_line(
        1,
        &["kv-server: 120.0 MiB, and ", " for the server itself, are more than", &limit, "ask"],
    );
    let doctor = run(&format!("{} doctor", binary("kv-cli").display()));
    let memory = doctor.text().lines().find(|line| line.contains("memory   ")).unwrap();
    assert!(memory.contains(&limit) && memory.contains("MiB available"), "{memory}");
}

#[on(any)]
fn files_of_another_user_are_refused() {
    if left_out_without_root("only root can create files of another user") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    permit(&open, 0o777);
    let (lock, region) = (open.join("kv.sock.lock"), open.join("region"));
    fs::write(&lock, "").unwrap();
    permit(&lock, 0o600);
    let listen = address(&open);
    let start = |more: &str| {
        server_of_a_user(folder.path(), &format!("--listen {listen} --memory 16MiB {more}"))
    };
    start("")
        .expect_line(1, &["open/kv.sock.lock: it belongs to user 0", "or root remove the file"]);
    fs::remove_file(&lock).unwrap();
    for content in [&b""[..], b"region"] {
        fs::write(&region, content).unwrap();
        permit(&region, 0o666);
        let output = start(&format!("--region-file {}", region.display()));
        output.expect_line(1, &["open/region belongs to another user: chown it"]);
        assert_eq!(fs::read(&region).unwrap(), content);
    }
}

#[on(any)]
fn more_memory_than_is_available_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    // 1.5 times this machine's memory, in whole GiB.
    let memory = format!("{}GiB", (total >> 19) * 3 / 4 + 1);
    let output = server(&format!("--listen {} --memory {memory}", address(folder.path())));
    output.expect_line(
        1,
        &["kv-server: ", "GiB are more than the ", "of memory available", "ask for less"],
    );
}

/// Returns a region file with one key, whose server has stopped.
fn region_file() -> ServerProcess {
    let mut run = ServerProcess::start_with_file("--memory 16MiB");
    run.session().put(b"key", b"value").unwrap();
    assert_eq!(run.terminate(), Some(0));
    run
}

fn start_on(file: &Path, more: &str) -> CommandOutput {
    let folder = tempfile::tempdir().unwrap();
    let listen = address(folder.path());
    server(&format!("--listen {listen} --region-file {} {more}", file.display()))
}

/// Reading a hole through a mapping would fill it, or kill the process if the disk is full.
#[on(any)]
fn the_holes_of_a_file_that_is_no_region_are_not_filled() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = folder.path().join("file");
    fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let output = start_on(&file, "");
    output.expect_line(1, &["/file", "holds no region", "no magic"]);
    assert_eq!(output.stderr.matches("no magic").count(), 1, "{}", output.stderr);
    let found = fs::metadata(&file).unwrap();
    assert_eq!((found.len(), found.blocks()), (16 << 20, 0));
}

#[on(any)]
fn a_new_region_that_cannot_be_created_leaves_no_zeros() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = folder.path().join("region");
    let output = start_on(&file, "--memory 8MiB --index 1GiB");
    output.expect_line(1, &["index = 1GiB", "at most \"2MiB\""]);
    assert_eq!(fs::metadata(&file).map_or(0, |metadata| metadata.len()), 0);
}

#[on(any)]
fn a_region_file_beyond_the_file_size_limit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("region");
    let mut limited = Command::new("sh");
    // At most 8 MiB: shells count in units of 512 or 1024 bytes.
    limited.args(["-c", "ulimit -f 8192; exec \"$0\" \"$@\""]).arg(binary("kv-server"));
    limited.args(["--listen", &address(folder.path()), "--memory", "16MiB", "--region-file"]);
    run(limited.arg(&file)).expect_line(1, &["kv-server: ", "File too large"]);
    assert!(!file.exists());
}

#[on(any)]
fn a_region_file_in_use_by_a_server_is_refused() {
    let running = ServerProcess::start_with_file("--memory 16MiB");
    running.session().put(b"key", b"value").unwrap();
    start_on(&running.region_file(), "").expect_line(1, &["/region", "another"]);
    assert_eq!(running.client().admin().statistics().unwrap().incarnation, 1);
    let value = running.session().get(b"key").unwrap().unwrap();
    assert_eq!(*value, *b"value");
    running.assert_verifies();
}

#[on(any)]
fn each_mistake_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("server.toml");
    let path = config.to_str().unwrap();
    let listen = address(folder.path());
    let absent = folder.path().join("no/region").display().to_string();
    for (line, code, parts) in [
        ("--bogus", 2, &["unexpected argument '--bogus'", "--help"][..]),
        ("--memory 1GB", 2, &["`1GB` is no size; write", "1GiB"]),
        ("--secret x", 2, &["unexpected argument '--secret'"]),
        ("--huge-pages yes", 2, &["write auto, never or require"]),
        ("--listen kv.sock", 2, &["write for example shm:///"]),
        ("--listen tcp://x", 2, &["tcp://x", "shm://"]),
        ("", 1, &["listen is missing: write for example", "--listen"]),
        ("--config /nonexistent/x.toml", 1, &["cannot read the config file /nonexistent/x"]),
        (&format!("--listen {listen} --memory 9MiB"), 1, &["9MiB: write a multiple of 2MiB"]),
        (
            &format!("--listen {listen} --memory 100TiB"),
            1,
            &["memory = 100TiB: write a size from 8MiB to 256GiB"],
        ),
        (&format!("--listen {listen} --region-file {absent}"), 1, &["not exist: create it first"]),
    ] {
        let output = server(line);
        output.expect_line(code, parts);
        let last = output.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("kv-server: "), "{}", output.stderr);
    }
    assert!(!folder.path().join("kv.sock").exists(), "there is no socket after a refused start");
    for (text, parts) in [
        ("memory = \"16MiB\"\nbogus = 3\n", &["server.toml:2", "`bogus`", "`memory`"][..]),
        ("memory = 16\n", &["server.toml:1: memory: ", "a string"]),
        ("memory = \n", &["server.toml:1"]),
    ] {
        fs::write(&config, text).unwrap();
        server(&format!("--config {path}")).expect_line(1, parts);
    }
}

#[on(any)]
fn settings_are_checked_without_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let listen = address(folder.path());
    server(&format!("--check-config --listen {listen} --memory 16MiB")).expect(0, "");
    assert!(!folder.path().join("kv.sock").exists(), "nothing listens");
    let few = server(&format!("--check-config --listen {listen} --memory 1MiB"));
    few.expect_line(1, &["kv-server: ", "memory"]);
    let config = folder.path().join("server.toml");
    fs::write(&config, "memory = \"16MiB\"\nlog_level = \"loud\"\n").unwrap();
    let unknown = server(&format!("--check-config --config {}", config.display()));
    unknown.expect_line(1, &["server.toml:2", "log_level"]);
}

#[on(any)]
fn a_config_file_with_a_secret_that_others_can_read_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("server.toml");
    fs::write(&config, "secret = \"hush\"\n").unwrap();
    let path = config.to_str().unwrap();
    let line = format!("--config {path} --strict-config --listen shm:///none/kv.sock");
    let strict = || server(&line);
    for mode in [0o644, 0o666, 0o604] {
        permit(&config, mode);
        strict().expect_line(1, &["server.toml has a secret", &format!("{mode:04o}"), "chmod 600"]);
    }
    let arguments = format!("--memory 16MiB --config {path}");
    let running = ServerProcess::spawn_in(folder.path(), &arguments, |command| command);
    running.wait_for_log("serving");
    let log = running.log();
    assert!(log.contains("WARN") && log.contains("server.toml has a secret in it"), "{log}");
    // The same for a client's config file.
    let scan = |more: &[&str]| running.cli(&[&["scan", "--config", path], more].concat()).stderr;
    assert!(scan(&[]).contains("kv-cli: warning: ") && scan(&[]).lines().count() == 1);
    assert!(
        scan(&["--strict-config"]).contains("kv-cli: ")
            && !scan(&["--strict-config"]).contains("warning")
    );
    permit(&config, 0o600);
    assert_eq!([scan(&[]), scan(&["--strict-config"])], ["", ""]);
    strict().expect_line(1, &["none/kv.sock", "create it first"]);
}

#[on(any)]
fn an_address_at_which_everybody_may_write_is_reported() {
    let loopback = free_tcp_address();
    let open = free_tcp_address().replace("127.0.0.1", "0.0.0.0");
    for (config, listen, warns) in
        [("", &open, true), ("", &loopback, false), ("secret = \"hush\"", &open, false)]
    {
        let arguments = format!("--memory 16MiB --listen {listen}");
        let mut server = ServerProcess::start_with_config(config, &arguments);
        // The warning comes after the line for which the start waits.
        assert_eq!(server.terminate(), Some(0));
        let log = server.log();
        let warning = format!("FS-018 every host that reaches {listen} can read");
        assert_eq!(log.contains(&warning), warns, "{log}");
    }
}

#[on(any)]
fn an_index_size_for_an_existing_region_is_reported_as_unused() {
    let mut running = region_file();
    running.restart();
    assert!(!running.log().contains("index = "));
    running.terminate();
    let file = running.region_file();
    let arguments = format!("--index 64KiB --region-file {}", file.display());
    let restarted = ServerProcess::start(&arguments);
    assert!(restarted.log().contains("index = 64KiB is for new regions"), "{}", restarted.log());
}

/// A pipe without room for another byte: its end for reading, and that for writing.
fn full_pipe() -> (std::fs::File, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    for part in [&[b'.'; 4096][..], b"."] {
        while rustix::io::write(&writer, part).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader.into(), writer)
}

#[on(each, rdma_in_soak)]
fn a_log_without_a_reader_stops_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reader, writer) = full_pipe();
    let start = |writer: OwnedFd| {
        ServerProcess::spawn_in(folder.path(), "--memory 16MiB", |command| command.stderr(writer))
    };
    let mut server = start(writer.try_clone().unwrap());
    let client = server.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap();
    client.session().unwrap().put("key", "value").unwrap();
    drop(client);
    assert_eq!(server.terminate(), Some(0));
    // Nothing was read. The lines of the next server are read after a while.
    let mut server = start(writer);
    let client = server.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap();
    let log = std::thread::spawn(move || {
        let mut log = String::new();
        reader.read_to_string(&mut log).unwrap();
        log
    });
    drop(client);
    assert_eq!(server.terminate(), Some(0));
    let log = log.join().unwrap();
    for line in ["serving", "a client connected", "stopped"] {
        assert_eq!(log.matches(line).count(), 1, "{line}: {log}");
    }
}

#[on(each, rdma_in_soak)]
fn a_log_without_a_reader_stops_no_gateway() {
    let server = ServerProcess::start("--memory 16MiB");
    let listen = free_tcp_address();
    let (_reader, writer) = full_pipe();
    let mut gateway = command("kv-resp");
    gateway.args(["--server", &server.address(), "--listen", &listen]).stderr(writer);
    let mut gateway = gateway.spawn().unwrap();
    let address = listen.strip_prefix("tcp://").unwrap();
    let mut connection = None;
    wait_until("it listens", TEST_TIMEOUT, || {
        connection = TcpStream::connect(address).ok();
        connection.is_some()
    });
    let mut connection = connection.unwrap();
    connection.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    connection.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    connection.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
    send_signal(&gateway, Signal::TERM);
    wait_until("it has ended", TEST_TIMEOUT, || gateway.try_wait().unwrap().is_some());
}
