//! Proves that a server needs the records only to take or to leave a shard. Without them, or with
//! unusable ones, it goes on and says so once. An idle cluster writes nothing.
//!
//! A server gives its shard up when the records say so, and never on a client's word: then it
//! disconnects its clients and ends. A server that was stopped for long first reads the records,
//! before it answers a heartbeat.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use farside_cluster::{ClusterRecord, ShardRecord, random_id};
use farside_control::attach::{ConnectError, ConnectOptions};
use farside_control::cluster::{ClusterMap, Id, VIEW_NUMBER_MAX};
use farside_control::{Refusal, Request, Role, SecretKey};
use farside_fabric::tcp::TlsFiles;
use farside_tests::cluster::{MapConnection, TestCluster, attach, view_of, write_cluster};
use farside_tests::command::{CommandOutput, command};
use farside_tests::engine::connect_options;
use farside_tests::etcd_process::{self, Etcd};
use farside_tests::network::Traffic;
use farside_tests::{ServerProcess, TEST_TIMEOUT, network_or_left_out, wait_until};
use rustix::process::Signal;

/// Longer than a server goes on without a read of the records.
const SEVERAL_READS: Duration = Duration::from_millis(3500);

#[on(any)]
fn an_idle_cluster_writes_nothing() {
    let (cluster, _servers) = TestCluster::with_servers(2);
    let spare = cluster.start("");
    let settled = || {
        let records = cluster.store.read().unwrap();
        let is_announced = |shard| {
            let servers = records.servers().filter_map(Result::ok);
            servers.filter(|server| server.shard == shard).count() == 1
        };
        [None, Some(0), Some(1)].into_iter().all(is_announced).then_some(records.revision)
    };
    farside_tests::wait_until("all are announced", TEST_TIMEOUT, || settled().is_some());
    let mut connection = MapConnection::open(&spare);
    let revision = settled();
    std::thread::sleep(SEVERAL_READS);
    assert_eq!(settled(), revision);
    assert!(connection.receive().is_none(), "the map was not sent again");
}

#[on(any)]
fn servers_go_on_without_the_records() {
    let (cluster, mut servers) = TestCluster::with_servers(1);
    let server = &mut servers[0];
    let record = cluster.wait_for_owner(0, server);
    let mut connection = MapConnection::open(server);
    let away = cluster.folder().join("away");
    fs::rename(cluster.records_folder(), &away).unwrap();
    server.wait_for_log("are gone: restore them from a backup");
    std::thread::sleep(SEVERAL_READS);
    assert!(connection.is_answered(5, TEST_TIMEOUT));
    assert_eq!(MapConnection::open(server).map.shards[0], record.view());
    attach(server, Some(view_of(0, &record))).unwrap();
    assert_eq!(server.log().matches("are gone").count(), 1, "{}", server.log());
    assert!(!cluster.records_folder().exists(), "nothing was written");
    fs::rename(&away, cluster.records_folder()).unwrap();
    server.wait_for_log("the records can be read again");
    assert_eq!(server.terminate(), Some(0));
    assert!(cluster.shard(0).is_vacant());
}

#[on(any)]
fn a_server_that_cannot_say_that_it_stops_stops_anyway() {
    let (cluster, mut servers) = TestCluster::with_servers(1);
    cluster.wait_for_owner(0, &servers[0]);
    fs::rename(cluster.records_folder(), cluster.folder().join("away")).unwrap();
    assert_eq!(servers[0].terminate(), Some(0));
}

#[on(any)]
fn a_server_waits_for_records_that_cannot_be_read() {
    let cluster = TestCluster::create(1);
    let records = cluster.records_folder().join("records.json");
    let good = fs::read(&records).unwrap();
    fs::write(&records, "not JSON").unwrap();
    let mut server = cluster.start("");
    server.wait_for_log("the server waits for them");
    fs::write(&records, good).unwrap();
    cluster.wait_for_owner(0, &server);
    // And a server that waits can be stopped.
    fs::write(&records, "not JSON").unwrap();
    let mut waiting = cluster.start("");
    waiting.wait_for_log("the server waits for them");
    assert_eq!(waiting.terminate(), Some(1));
    assert!(waiting.log().contains("told to stop before it could read the records"));
    assert!(!server.has_exited());
}

#[on(any)]
fn a_server_without_usable_records_does_not_start_and_says_why() {
    let cluster = TestCluster::create(1);
    let ends_with = |expected: &str| {
        let mut server = cluster.start("");
        assert_eq!(server.wait().code(), Some(1));
        let log = server.log();
        assert!(log.contains(expected), "{log}");
        assert_eq!(log.lines().count(), 1, "{log}");
    };
    let put = |key: &str, text: &str| {
        let change = (key.to_owned(), Some(text.as_bytes().to_vec()));
        cluster.store.commit(&[], &[change]).unwrap();
    };
    let shard = ShardRecord::key(0);
    put(&shard, "{\"version\": 2, \"number\": -5}");
    ends_with("the record shards/0000 is damaged");
    put(&shard, "{\"version\": 9}");
    ends_with("the record shards/0000 has version 9, and this program reads 2: upgrade it");
    cluster.store.commit(&[], &[(shard, None)]).unwrap();
    ends_with("the record shards/0000 is missing");
    cluster.store.commit(&[], &[(ClusterRecord::KEY.to_owned(), None)]).unwrap();
    ends_with("there is no cluster at file:///");
}

#[on(any)]
fn a_server_goes_on_if_the_records_become_those_of_another_cluster() {
    let (cluster, mut servers) = TestCluster::with_servers(1);
    let server = &mut servers[0];
    let record = cluster.wait_for_owner(0, server);
    write_cluster(&*cluster.store, 2, Id([3; 16]), 1000);
    server.wait_for_log("are now those of the cluster ");
    attach(server, Some(view_of(0, &record))).unwrap();
    assert!(cluster.shard(0).is_vacant() && cluster.shard(1).is_vacant());
    assert!(!server.has_exited());
    // A record that cannot be read any more.
    let change = (ClusterRecord::KEY.to_owned(), Some(b"{\"version\": 3}".to_vec()));
    cluster.store.commit(&[], &[change]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(!server.has_exited());
    assert!(MapConnection::open(server).is_answered(1, TEST_TIMEOUT));
}

#[on(any)]
fn records_from_an_old_backup_change_nothing() {
    let (cluster, mut servers) = TestCluster::with_servers(1);
    let server = &mut servers[0];
    let record = cluster.wait_for_owner(0, server);
    cluster.change(0, |record| {
        record.number = 0;
        record.copies.clear();
    });
    server.wait_for_log("are older than this server");
    attach(server, Some(view_of(0, &record))).unwrap();
    assert!(MapConnection::open(server).is_answered(1, TEST_TIMEOUT));
    assert!(!server.has_exited());
}

#[on(any)]
fn an_address_of_no_host_is_refused() {
    let cluster = TestCluster::create(1);
    let mut server = cluster.start("--listen tcp://0.0.0.0:17400");
    assert_eq!(server.wait().code(), Some(1));
    let log = server.log();
    assert!(log.contains("listen = tcp://0.0.0.0:17400: the cluster tells clients"), "{log}");
}

/// Longer than the time for which a server may be stopped and still know that it owns its view.
const LONG: Duration = Duration::from_millis(5500);

/// A cluster of one shard, and its server with a region file.
fn one_shard() -> (TestCluster, ServerProcess) {
    let cluster = TestCluster::create(1);
    let server = cluster.start_with_file(&cluster.folder().join("region"));
    cluster.wait_for_owner(0, &server);
    (cluster, server)
}

/// Gives the shard to another server in the records.
fn give_away(cluster: &TestCluster) {
    cluster.change(0, |record| record.copies[0].copy.server = Id([9; 16]));
}

#[on(any, rdma_in_soak)]
fn a_server_whose_shard_was_given_away_ends_and_says_which_file_can_be_deleted() {
    let (cluster, mut server) = one_shard();
    let mut client = attach(&server, Some(view_of(0, &cluster.shard(0)))).unwrap();
    give_away(&cluster);
    assert_eq!(server.wait().code(), Some(1));
    let log = server.log();
    let server_id = "09".repeat(16);
    assert!(log.contains(&format!("shard 0 was given to the server {server_id} at ")), "{log}");
    assert!(log.contains("region can be deleted"), "{log}");
    assert!(cluster.folder().join("region").exists());
    // The map may have been sent before.
    let mut receive = || client.channel.receive(&mut vec![0; 1 << 16]);
    let ended = std::iter::repeat_with(&mut receive).find(|got| !matches!(got, Ok(Some(1..))));
    assert!(matches!(ended, Some(Ok(Some(0)) | Err(_))), "{ended:?}");
}

#[on(any, rdma_in_soak)]
fn a_shard_that_is_taken_away_ends_its_server() {
    let (cluster, mut server) = one_shard();
    cluster.change(0, |record| record.revoked = record.copies.pop());
    assert_eq!(server.wait().code(), Some(1));
    let log = server.log();
    assert!(log.contains("shard 0 was taken from this server, and has no server"), "{log}");
    let mut again = cluster.start_with_file(&cluster.folder().join("region"));
    assert_eq!(again.wait().code(), Some(1));
    let log = again.log();
    assert!(log.contains("an operator has given up the region in "), "{log}");
}

#[on(any, rdma_in_soak)]
fn a_server_that_was_stopped_for_long_answers_no_heartbeat_before_it_has_read_the_records() {
    let (cluster, mut server) = one_shard();
    let mut connection = MapConnection::open(&server);
    assert!(connection.is_answered(1, TEST_TIMEOUT));
    server.pause();
    give_away(&cluster);
    // Sent while it is stopped, so that it is there when the server goes on.
    connection.send(&Request::Heartbeat { clock_ns: 2, operations: 0 });
    std::thread::sleep(LONG);
    server.signal(Signal::CONT);
    assert_eq!(server.wait().code(), Some(1));
    let answer = "Heartbeat";
    while let Some(message) = received(&mut connection) {
        assert!(!message.starts_with(answer), "{message}");
    }
}

#[on(any, rdma_in_soak)]
fn a_server_that_was_stopped_for_long_goes_on_if_it_still_owns_its_shard() {
    let (cluster, server) = one_shard();
    let mut connection = MapConnection::open(&server);
    server.pause();
    std::thread::sleep(LONG);
    server.signal(Signal::CONT);
    wait_until("an answer", TEST_TIMEOUT, || connection.is_answered(3, Duration::from_millis(100)));
    server.wait_for_log("asks the cluster's records whether it still serves");
    attach(&server, Some(view_of(0, &cluster.shard(0)))).unwrap();
}

#[on(any, rdma_in_soak)]
fn a_client_with_a_false_map_does_not_end_a_server() {
    let (cluster, mut server) = one_shard();
    let mut connection = MapConnection::open(&server);
    let mut map: ClusterMap = connection.map.clone();
    map.shards[0].number = VIEW_NUMBER_MAX;
    map.shards[0].copies.clear();
    for clock_ns in 0..200 {
        connection.send(&Request::NewerMap { map: map.encode() });
        assert!(connection.is_answered(clock_ns, TEST_TIMEOUT));
    }
    connection.send(&Request::Map);
    let number = cluster.shard(0).number;
    connection.wait_for_map("the map of the records", |map| map.shards[0].number == number);
    assert!(!server.has_exited());
}

#[on(any, rdma_in_soak)]
fn a_server_that_cannot_examine_a_claim_answers_no_heartbeat() {
    let (cluster, server) = one_shard();
    let view = view_of(0, &cluster.shard(0));
    let mut connection = MapConnection::open(&server);
    let mut map = connection.map.clone();
    map.shards[0].number += 1;
    let away = cluster.folder().join("away");
    fs::rename(cluster.records_folder(), &away).unwrap();
    connection.send(&Request::NewerMap { map: map.encode() });
    assert!(connection.is_answered(1, TEST_TIMEOUT));
    std::thread::sleep(Duration::from_millis(2100));
    assert!(!connection.is_answered(2, Duration::from_millis(100)));
    match attach(&server, Some(view)) {
        Err(ConnectError::Refused { source, .. }) => assert_eq!(source, Refusal::Unconfirmed),
        other => panic!("{:?}", other.err()),
    }
    fs::rename(&away, cluster.records_folder()).unwrap();
    wait_until("an answer", TEST_TIMEOUT, || connection.is_answered(3, Duration::from_millis(100)));
}

#[on(any, rdma_in_soak)]
fn a_claim_of_a_reader_does_not_stop_a_server_while_the_records_are_away() {
    let (cluster, server) = one_shard();
    let view = view_of(0, &cluster.shard(0));
    let mut reader = MapConnection::open_as(&server, Role::Reader);
    let mut map = reader.map.clone();
    map.shards[0].number += 1;
    let away = cluster.folder().join("away");
    fs::rename(cluster.records_folder(), &away).unwrap();
    reader.send(&Request::NewerMap { map: map.encode() });
    std::thread::sleep(Duration::from_millis(2100));
    assert!(reader.is_answered(1, TEST_TIMEOUT));
    attach(&server, Some(view)).unwrap();
}

/// `assign` reaches the records, and the server does not.
#[on(any, rdma_in_soak)]
fn assign_tells_a_server_that_is_cut_off_from_the_records_alone() {
    let cluster = TestCluster::create(1);
    let link = cluster.folder().join("link");
    std::os::unix::fs::symlink(cluster.records_folder(), &link).unwrap();
    let server = start_with_secrets(&cluster, &format!("file://{}", link.display()), |options| {
        ServerProcess::spawn_in(&cluster.new_folder(), options, |command| command)
    });
    only_a_writer_assigns(&cluster, &server, || fs::remove_file(link).unwrap());
}

/// As above, with packets between the server and etcd that are lost.
#[on(any)]
fn assign_tells_a_server_that_is_cut_off_from_etcd_alone() {
    if etcd_process::is_left_out() {
        return;
    }
    let Some(network) = network_or_left_out() else { return };
    let host = network.records_host();
    let etcd = Etcd::start_at(std::slice::from_ref(&host), 1, &[], &TlsFiles::default());
    let at_home = etcd.uri("127.0.0.1");
    let cluster = TestCluster::create_at(Some(at_home), 1, random_id().unwrap(), "");
    let server = start_with_secrets(&cluster, &etcd.uri(&host), |options| {
        ServerProcess::spawn_behind(&network, 7400, &cluster.new_folder(), options)
    });
    only_a_writer_assigns(&cluster, &server, || network.lose_packets_of(Traffic::Records));
}

/// Starts a server with the secrets of writers and readers, which finds the records at this URI.
fn start_with_secrets(
    cluster: &TestCluster,
    uri: &str,
    start: impl FnOnce(&str) -> ServerProcess,
) -> ServerProcess {
    let config = cluster.folder().join("server.toml");
    fs::write(&config, "secret = \"of writers\"\nreader_secret = \"of readers\"\n").unwrap();
    let config = config.display();
    let server = start(&format!("--config {config} --cluster {uri} --memory 16MiB --grace-ms 20"));
    server.wait_for_log("the server serves a shard");
    server
}

/// Cuts the server off. Then a writer can take its shard away, and a reader cannot.
fn only_a_writer_assigns(cluster: &TestCluster, server: &ServerProcess, cut_off: impl FnOnce()) {
    let record = cluster.shard(0);
    let client = |secret: &str, role| {
        let options = connect_options(&server.address(), role, SecretKey::of(secret));
        ConnectOptions { view: Some(view_of(0, &record)), ..options }
    };
    client("of writers", Role::Writer).attach(TEST_TIMEOUT).unwrap();
    cut_off();
    let assign = |secret: &str| {
        let config = cluster.folder().join("client.toml");
        fs::write(&config, format!("secret = \"{secret}\"\n")).unwrap();
        fs::set_permissions(&config, fs::Permissions::from_mode(0o600)).unwrap();
        let mut assign = command("kv-cli");
        assign.arg("--config").arg(config);
        CommandOutput::of(assign.args(["cluster", "assign", &cluster.uri(), "0", "--empty"]))
    };
    let refused = assign("of readers");
    assert!(refused.code != Some(0) && refused.stderr.contains("told by a writer"), "{refused:?}");
    client("of writers", Role::Writer).attach(TEST_TIMEOUT).unwrap();
    let assigned = assign("of writers");
    assert!(assigned.code == Some(0), "{assigned:?}");
    assert!(cluster.shard(0).is_vacant());
    match client("of writers", Role::Writer).attach(TEST_TIMEOUT) {
        Err(ConnectError::Refused { source, .. }) => assert_eq!(source, Refusal::Unconfirmed),
        other => panic!("{:?}", other.err()),
    }
}

/// The next message, in a form to compare; `None` at the end of the connection.
fn received(connection: &mut MapConnection) -> Option<String> {
    loop {
        match connection.try_receive() {
            Ok(Some(message)) => return Some(format!("{message:?}")),
            Ok(None) => std::thread::yield_now(),
            Err(_) => return None,
        }
    }
}
