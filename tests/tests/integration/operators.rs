//! Proves that an operator sees the clients of a server and what is hot, and can disconnect one
//! client: `kv-cli clients`, `kick`, `hot` and `top`. A client that is stopped is listed, and makes
//! no command hang. A kicked client is fenced, others are not, and it comes back under a new id.

use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farside::{Client, ConnectedClient, Error, FabricKind, OperationError, Role, Store};
use farside_control::{CLIENTS_PER_MESSAGE_MAX, Request, SecretKey};
use farside_tests::cluster::TestCluster;
use farside_tests::engine::connect_options;
use farside_tests::{
    ServerProcess, StopOnDrop, TEST_TIMEOUT, device, fill, is_over_tcp, send_signal, wait_until,
};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value as Json;

use crate::metrics::{METRICS, wait_for};

/// A process that is killed when dropped.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn listed(server: &ServerProcess) -> Vec<Json> {
    let output = server.cli(&["clients", "--json"]).succeeded();
    output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(client: &Client) -> Vec<u16> {
    client.admin().clients().unwrap().iter().map(|client| client.id).collect()
}

/// Returns the id that a client has now.
fn own_id(client: &Client) -> u16 {
    let clients = client.admin().clients().unwrap();
    clients.iter().find(|client| client.is_asking).unwrap().id
}

#[on(each, rdma_in_soak)]
fn clients_are_listed_with_what_they_say_of_themselves() {
    let server = ServerProcess::start("--memory 32MiB");
    let (writer, reader) = (server.client(), server.client_builder().role(Role::Reader));
    let reader = reader.connect().unwrap();
    let mut sessions = [writer.session().unwrap(), writer.session().unwrap()];
    fill(&mut sessions[0], 0..1000, |_| b"value");
    let mut reading = reader.session().unwrap();
    (0..100u64).for_each(|n| assert!(reading.get(n.to_le_bytes()).unwrap().is_some()));
    assert!(reading.get("absent").unwrap().is_none());
    let clients = listed(&server);
    let [first, second] = &clients[..] else { panic!("{clients:?}") };
    assert!(first["id"].as_u64() < second["id"].as_u64(), "{clients:?}");
    assert_eq!((&first["role"], &second["role"]), (&"writer".into(), &"reader".into()));
    let (fabric, user) = match (device(), is_over_tcp()) {
        (None, false) => ("shm", rustix::process::geteuid().as_raw().into()),
        (None, true) => ("tcp", Json::Null),
        (Some(_), _) => ("rdma", Json::Null),
    };
    let program = std::env::current_exe().unwrap();
    let program = program.file_name().unwrap().to_str().unwrap().to_owned();
    for client in &clients {
        assert_eq!((&client["fabric"], &client["user"]), (&fabric.into(), &user));
        let said = &client["description"];
        assert_eq!(said["pid"], std::process::id());
        assert_eq!(said["host"], rustix::system::uname().nodename().to_str().unwrap());
        assert!(program.starts_with(said["program"].as_str().unwrap()), "{said}");
    }
    let (wrote, read) = (&first["description"], &second["description"]);
    assert_eq!((&wrote["sessions"], &read["sessions"]), (&2.into(), &1.into()));
    assert_eq!((&read["reads_found"], &read["reads_absent"]), (&100.into(), &1.into()));
    assert!(wrote["operations"].as_u64().unwrap() >= 1000, "{wrote}");
    assert!(wrote["blocks_held"].as_u64().unwrap() > 0, "{wrote}");
    let table = server.cli(&["clients"]).succeeded();
    let lines: Vec<_> = table.text().lines().collect();
    assert_eq!(lines.len(), 3, "{}", table.text());
    let pid = format!(" {} ", std::process::id());
    assert!(lines[1].contains("writer") && lines[1].contains(&pid), "{}", table.text());
    assert!(lines[2].contains("reader") && lines[2].ends_with("now"), "{}", table.text());
    // In the library, the list has the client that asks.
    let asking = |client: &ConnectedClient| client.is_asking && client.role == Role::Reader;
    let all = reader.admin().clients().unwrap();
    assert_eq!((all.len(), all.iter().filter(|client| asking(client)).count()), (2, 1));
    assert!(all.iter().all(|client| client.fabric != FabricKind::Rdma || device().is_some()));
}

/// One message has room for 256 clients.
#[on(each)]
fn a_long_list_comes_in_several_messages() {
    let server = ServerProcess::start("--memory 32MiB");
    let clients: Vec<_> = (0..CLIENTS_PER_MESSAGE_MAX + 2).map(|_| server.client()).collect();
    let mut expected: Vec<u16> = clients.iter().map(own_id).collect();
    expected.sort_unstable();
    assert_eq!(ids(&clients[0]), expected);
    assert_eq!(listed(&server).len(), clients.len());
}

#[on(each, rdma_in_soak)]
fn a_stopped_client_is_listed_and_nothing_hangs() {
    let server = ServerProcess::start(&format!("--memory 32MiB {METRICS}"));
    let _client = server.client();
    let mut command = server.command("kv-cli");
    let command = command.args(["hot", "--seconds", "600"]).stdout(Stdio::null());
    let stopped = KilledChild(command.spawn().unwrap());
    // Over RDMA a client that is stopped before its connection is complete is lost.
    wait_for(&server, |now| now.labelled("farside_control_messages_total", ("kind", "hot")) >= 1.0);
    send_signal(&stopped.0, Signal::STOP);
    waitid(WaitId::Pid(Pid::from_child(&stopped.0)), WaitIdOptions::STOPPED).unwrap();
    let clients = listed(&server);
    let roles: Vec<_> = clients.iter().map(|client| &client["role"]).collect();
    assert_eq!(roles, ["writer", "reader"]);
    assert!(!clients[0]["description"].is_null() && clients[1]["description"].is_null());
    let table = server.cli(&["clients"]).succeeded();
    let line = table.text().lines().last().unwrap();
    assert!(line.contains("reader") && line.contains(" - ") && line.ends_with("never"), "{line}");
    send_signal(&stopped.0, Signal::CONT);
    wait_until("the command describes itself", TEST_TIMEOUT, || {
        listed(&server)[1]["description"]["pid"] == stopped.0.id()
    });
    assert_eq!(listed(&server)[1]["description"]["program"], "kv-cli");
}

#[on(each, rdma)]
fn a_kick_fences_one_client_which_comes_back_under_a_new_id() {
    let server = ServerProcess::start("--memory 32MiB");
    let (kicked, other) = (server.client(), server.client());
    let (mut session, mut other_session) = (kicked.session().unwrap(), other.session().unwrap());
    session.put("key", "before").unwrap();
    other_session.put("other", "before").unwrap();
    let (id, other_id) = (own_id(&kicked), own_id(&other));
    let argument = id.to_string();
    server.cli(&["kick", &argument]).expect(0, "");
    let lost = other.admin().statistics().unwrap().clients_lost;
    assert_eq!((ids(&other), lost), (vec![other_id], 1));
    server.wait_for_log("lost a client and fenced it: an operator disconnected it");
    server.cli(&["kick", &argument]).expect_line(1, &["no client has the id"]);
    server.cli(&["kick", &argument, "--shard", "1"]).expect_line(2, &["no shard 1"]);
    // Over RDMA a write that was on its way may be indeterminate; none was.
    session.put("key", "after").unwrap();
    assert_eq!(*session.get("key").unwrap().unwrap(), *b"after");
    other_session.put("other", "after").unwrap();
    let new_id = own_id(&kicked);
    assert_ne!(new_id, id);
    let mut expected = [other_id, new_id];
    expected.sort_unstable();
    assert_eq!(ids(&other), expected);
    // A client may kick itself. It loses its connection instead of an answer.
    kicked.admin().kick(new_id).unwrap_err();
    assert_eq!(other.admin().statistics().unwrap().clients_lost, 2);
    session.put("key", "again").unwrap();
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_reader_cannot_kick() {
    let server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let denied = reader.admin().kick(own_id(&client));
    assert!(matches!(denied, Err(Error::Operation(OperationError::Denied))), "{denied:?}");
    // A reader that asks the server nevertheless is disconnected itself.
    let options = connect_options(&server.address(), Role::Reader, SecretKey::NONE);
    let mut channel = options.connect().unwrap().channel;
    let mut bytes = Vec::new();
    Request::Kick { client_id: own_id(&client) }.encode(&mut bytes);
    channel.send(&bytes).unwrap();
    server.wait_for_log("a reader sent a request that only a writer may send");
    assert_eq!(client.admin().statistics().unwrap().clients, 2);
}

/// Reads one key a hundred times as often as fifty others while a command runs, and returns the
/// lines of its output.
fn hot_keys(server: &ServerProcess, client: &Client, arguments: &[&str]) -> Vec<String> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut session = client.session().unwrap();
            for round in 0u64.. {
                (0..50u64).for_each(|n| drop(session.get(n.to_le_bytes()).unwrap().unwrap()));
                (0..100).for_each(|_| drop(session.get("the hot\tkey").unwrap().unwrap()));
                // An update moves the key to another block.
                if round % 64 == 0 {
                    session.put("the hot\tkey", "value").unwrap();
                }
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let arguments: Vec<&str> = ["hot"].iter().chain(arguments).copied().collect();
        let output = server.cli(&arguments);
        is_over.store(true, Ordering::Relaxed);
        output.succeeded().text().lines().map(str::to_owned).collect()
    })
}

fn assert_finds_the_hot_key(lines: &[String]) {
    let cells: Vec<_> = lines[0].split('\t').collect();
    let [share, _, key] = cells[..] else { panic!("{lines:?}") };
    assert_eq!(key, "the hot\\tkey", "{lines:?}");
    let percent: f64 = share.strip_suffix(" %").unwrap().parse().unwrap();
    // Two thirds of all reads.
    assert!(percent > 50.0, "{lines:?}");
}

#[on(each, rdma_in_soak)]
fn hot_finds_a_key_that_is_read_more_than_others() {
    let server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..1000, |_| b"value");
    session.put("the hot\tkey", "value").unwrap();
    let nothing = server.cli(&["hot", "--seconds", "1"]);
    assert_eq!((nothing.code, nothing.text()), (Some(0), ""));
    assert!(nothing.stderr.contains("no reads"), "{}", nothing.stderr);
    let lines = hot_keys(&server, &client, &["--seconds", "2", "--count", "7"]);
    assert_eq!(lines.len(), 7, "{lines:?}");
    assert_finds_the_hot_key(&lines);
    // Without a location cache, reads take another path through the client.
    let uncached = server.client_builder().cache_bytes(0).connect().unwrap();
    assert_finds_the_hot_key(&hot_keys(&server, &uncached, &["--seconds", "2"]));
    // What a session read between two samples is in none.
    (0..1000).for_each(|_| drop(session.get("the hot\tkey").unwrap().unwrap()));
    let nothing = server.cli(&["hot", "--seconds", "1"]);
    assert!(nothing.text().is_empty() && nothing.stderr.contains("no reads"), "{nothing:?}");
    server.cli(&["hot", "--seconds", "0"]).expect_line(2, &["--seconds"]);
}

/// The server asks for both kinds of reports, and each has its own use.
#[on(each, rdma_in_soak)]
fn hot_works_while_the_server_evicts() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..40_000, |_| [1; 1000]);
    // Pinned, because the cache turns over faster than clients report what they read.
    session.store("the hot\tkey", [1; 1000], Store::always().pinned()).unwrap();
    let before = client.admin().statistics().unwrap();
    let is_over = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (40_000..u64::MAX).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                session.put(n.to_le_bytes(), [1; 1000]).unwrap();
                session.get((n - 10).to_le_bytes()).unwrap();
                (0..10).for_each(|_| drop(session.get("the hot\tkey").unwrap()));
            }
        });
        let _over = StopOnDrop(&is_over);
        let output = server.cli(&["hot", "--seconds", "2", "--count", "1"]);
        wait_until("keys are evicted, and the server hears of reads", TEST_TIMEOUT, || {
            let after = client.admin().statistics().unwrap();
            after.keys_evicted > before.keys_evicted && after.reads_found > before.reads_found
        });
        output.succeeded()
    });
    assert!(output.text().ends_with("\tthe hot\\tkey\n"), "{}", output.text());
}

#[on(each, rdma_in_soak)]
fn in_a_cluster_each_shard_has_clients_of_its_own() {
    let (cluster, servers) = TestCluster::with_servers(2);
    let client = servers[0].client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..100, |_| b"value");
    let id = client.admin().shard(1).clients().unwrap().iter().find(|it| it.is_asking).unwrap().id;
    let id = id.to_string();
    servers[0].cli(&["kick", &id]).expect_line(2, &["2 shards", "--shard"]);
    servers[0].cli(&["kick", &id, "--shard", "1"]).expect(0, "");
    servers[0].cli(&["kick", &id, "--shard", "1"]).expect_line(1, &["no client has the id"]);
    fill(&mut session, 0..100, |_| b"after");
    let shards: Vec<_> = listed(&servers[0]).iter().map(|client| client["shard"].clone()).collect();
    assert_eq!(shards, [0, 1]);
    let table = servers[0].cli(&["clients"]).succeeded();
    assert!(table.text().contains("shard 0\n") && table.text().contains("shard 1\n"));
    let lines = hot_keys_of(&servers[0], &mut session);
    assert!(!lines.is_empty());
    let top = servers[0].cli(&["top", "--once", "--interval", "200ms"]).succeeded();
    for shard in ["shard 0 of 0-1", "shard 1 of 0-1"] {
        assert!(top.text().contains(shard), "{}", top.text());
    }
    drop(cluster);
}

/// Returns what `hot` prints while a session reads keys of all shards.
fn hot_keys_of(server: &ServerProcess, session: &mut farside::Session) -> Vec<String> {
    let mut command = server.command("kv-cli");
    let mut child = KilledChild(command.args(["hot", "--seconds", "1"]).spawn().unwrap());
    while child.0.try_wait().unwrap().is_none() {
        (0..100u64).for_each(|n| drop(session.get(n.to_le_bytes()).unwrap()));
    }
    let output = std::io::read_to_string(child.0.stdout.take().unwrap()).unwrap();
    output.lines().map(str::to_owned).collect()
}

#[on(each, rdma_in_soak)]
fn top_shows_memory_rates_and_clients_once() {
    let server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..1000, |_| [7; 1000]);
    let is_over = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                (0..1000u64).for_each(|n| drop(session.get(n.to_le_bytes()).unwrap()));
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let output = server.cli(&["top", "--once", "--interval", "500ms"]);
        is_over.store(true, Ordering::Relaxed);
        output.succeeded()
    });
    let text = output.text();
    assert!(!text.contains('\x1b'), "{text}");
    for part in [&server.address()[..], "clients 1, lost 0", "1.2 KiB", "writer", " integration"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let after = |name: &str| {
        let rest = text.split_once(name).unwrap().1.split_whitespace().next().unwrap();
        rest.trim_end_matches(['k', 'M', 'n', 'u', 'm', 's']).parse::<f64>().unwrap()
    };
    assert!(after("operations") > 0.0 && after("found") > 0.0 && after("GET min") > 0.0, "{text}");
    assert_eq!((after("absent"), after("evicted")), (0.0, 0.0), "{text}");
    server.cli(&["top"]).expect_line(2, &["no terminal", "--once"]);
    server.cli(&["top", "--interval", "0s"]).expect_line(2, &["--interval"]);
}

/// A terminal in which a command runs.
struct TestTerminal {
    /// What the command writes can be read here, and what is written here is what a user types.
    user: OwnedFd,
    command: OwnedFd,
    shown: String,
}

impl TestTerminal {
    fn open() -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let user = openpt(flags).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let name = ptsname(&user, Vec::new()).unwrap();
        let command = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&command, size).unwrap();
        rustix::fs::fcntl_setfl(&user, OFlags::NONBLOCK).unwrap();
        Self { user, command, shown: String::new() }
    }

    fn stream(&self) -> Stdio {
        self.command.try_clone().unwrap().into()
    }

    fn wait_for(&mut self, text: &str) {
        wait_until(text, TEST_TIMEOUT, || {
            let mut buffer = [0; 4096];
            while let Ok(bytes @ 1..) = rustix::io::read(&self.user, &mut buffer) {
                self.shown += &String::from_utf8_lossy(&buffer[..bytes]);
            }
            self.shown.contains(text)
        });
    }

    /// Whether what is typed is shown, and read line by line: not so while `top` runs.
    fn is_as_before(&self) -> bool {
        tcgetattr(&self.command)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON | LocalModes::ECHO)
    }
}

#[on(each, rdma_in_soak)]
fn top_gives_the_terminal_back_as_it_was() {
    let server = ServerProcess::start("--memory 32MiB");
    let ends: [(&str, &[u8], Option<Signal>, i32); 3] = [
        ("q", b"q", None, 0),
        ("Ctrl-C", &[3], None, 0),
        ("SIGTERM", b"", Some(Signal::TERM), 143),
    ];
    for (end, typed, signal, code) in ends {
        let mut terminal = TestTerminal::open();
        let mut command = server.command("kv-cli");
        command.args(["top", "--interval", "100ms"]).env("TERM", "xterm");
        command.stdin(terminal.stream()).stdout(terminal.stream());
        let mut top = KilledChild(command.spawn().unwrap());
        terminal.wait_for("memory");
        assert!(!terminal.is_as_before(), "{end}");
        rustix::io::write(&terminal.user, typed).unwrap();
        if let Some(signal) = signal {
            send_signal(&top.0, signal);
        }
        assert_eq!(top.0.wait().unwrap().code(), Some(code), "{end}");
        assert!(terminal.is_as_before(), "{end}");
        // It leaves the alternate screen.
        terminal.wait_for("\x1b[?1049l");
    }
    wait_until("all clients have left", TEST_TIMEOUT, || {
        server.client().admin().statistics().unwrap().clients == 1
    });
    assert_eq!(server.client().admin().statistics().unwrap().clients_lost, 0);
}
