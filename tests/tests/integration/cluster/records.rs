//! Proves that a server needs the records only to take or to leave a shard. Without them, or with
//! unusable ones, it goes on and says so once. An idle cluster writes nothing.

use std::fs;
use std::time::Duration;

use farside_cluster::{ClusterRecord, ShardRecord};
use farside_control::cluster::Id;
use farside_tests::TEST_TIMEOUT;
use farside_tests::cluster::{MapConnection, TestCluster, attach, view_of, write_cluster};

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
