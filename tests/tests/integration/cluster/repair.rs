//! Proves that records which went back are noticed, and that `kv-cli cluster repair` makes them
//! right: servers follow them, and clients recover by themselves.

use std::fs;

use farside_cluster::ShardRecord;
use farside_tests::cluster::{MapConnection, TestCluster};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, TEST_TIMEOUT, wait_until};

const KEYS: u32 = 40;

fn cluster(test_cluster: &TestCluster, what: &str) -> CommandOutput {
    CommandOutput::of(command("kv-cli").args(["cluster", what, &test_cluster.uri()]))
}

/// A cluster of two shards, its servers with region files, and a client of the first server.
fn two_shards() -> (TestCluster, [ServerProcess; 2], farside::Session) {
    let test_cluster = TestCluster::create(2);
    let file = |shard: u16| test_cluster.folder().join(format!("region{shard}"));
    let servers = [0, 1].map(|shard| {
        let server = test_cluster.start_with_file(&file(shard));
        test_cluster.wait_for_owner(shard, &server);
        server
    });
    let mut session = servers[0].session();
    (0..KEYS).for_each(|key| session.put(key.to_le_bytes(), "value").unwrap());
    (test_cluster, servers, session)
}

/// All keys can be read and written, through this session.
fn wait_for_all_keys(session: &mut farside::Session) {
    wait_until("all keys are there", TEST_TIMEOUT, || {
        (0..KEYS).all(|key| {
            matches!(session.get(key.to_le_bytes()), Ok(Some(value)) if value == "value")
                && session.put(key.to_le_bytes(), "value").is_ok()
        })
    });
}

/// The records have no problem any more, and all files are known by their numbers again.
fn wait_for_no_problem(test_cluster: &TestCluster) {
    let mut checked = String::new();
    wait_until("no problem", TEST_TIMEOUT, || {
        let output = cluster(test_cluster, "check");
        checked = format!("{output:?}");
        output.code == Some(0)
    });
    let has_number =
        |shard| test_cluster.shard(shard).copies.iter().all(|served| served.serving.is_some());
    assert!(has_number(0) && has_number(1), "{checked}");
}

fn restart(test_cluster: &TestCluster, server: &mut ServerProcess) {
    server.kill();
    server.start_again();
    test_cluster.wait_for_owner(1, server);
}

#[on(any, rdma_in_soak)]
fn records_from_a_backup_are_noticed_and_repaired() {
    let (test_cluster, mut servers, mut session) = two_shards();
    let records = test_cluster.records_folder().join("records.json");
    let backup = fs::read(&records).unwrap();
    for _ in 0..10 {
        test_cluster.change(1, |_| {});
    }
    restart(&test_cluster, &mut servers[1]);
    let mut connection = MapConnection::open(&servers[0]);
    // The server of the shard may have another commit to make, of its serving number.
    let newest = loop {
        let number = test_cluster.shard(1).number;
        connection.wait_for_map("the newest view", |map| map.shards[1].number >= number);
        if test_cluster.shard(1).number == number {
            break number;
        }
    };
    // Locked, so that no commit that is under way brings the newer records back.
    let lock = fs::File::open(test_cluster.records_folder().join("lock")).unwrap();
    lock.lock().unwrap();
    fs::write(&records, backup).unwrap();
    drop(lock);
    servers[0].wait_for_log("are older than this server: they have view");
    // It knows nothing of the newer views.
    restart(&test_cluster, &mut servers[1]);
    assert!(test_cluster.shard(1).number < newest);
    let checked = cluster(&test_cluster, "check");
    assert_eq!(checked.code, Some(5), "{checked:?}");
    let told = checked.text().split_once("knows view ").and_then(|(_, rest)| {
        let (number, _) = rest.split_once(" of shard 1, and the records have view ")?;
        number.parse().ok()
    });
    // The server may have committed once more before the backup came back.
    assert!(told.is_some_and(|told: u64| told >= newest), "{newest}: {checked:?}");
    assert!(checked.text().contains("kv-cli cluster repair file:///"), "{checked:?}");
    let repaired = cluster(&test_cluster, "repair");
    assert!(repaired.code == Some(0), "{repaired:?}");
    assert_eq!(repaired.text().matches(" runs\n").count(), 2, "{repaired:?}");
    wait_for_all_keys(&mut session);
    wait_for_all_keys(&mut servers[0].session());
    wait_for_no_problem(&test_cluster);
    assert!(test_cluster.shard(1).number > newest + 1000);
    restart(&test_cluster, &mut servers[1]);
    wait_for_all_keys(&mut session);
}

#[on(any, rdma_in_soak)]
fn a_record_with_an_absurd_number_is_damage_and_is_repaired() {
    let (test_cluster, mut servers, mut session) = two_shards();
    test_cluster.change(1, |record| record.number = u64::MAX);
    servers[0].wait_for_log("its number 18446744073709551615 is beyond");
    wait_for_all_keys(&mut session);
    let checked = cluster(&test_cluster, "check");
    let is_told = checked.text().contains("the record shards/0001 is damaged");
    assert!(checked.code == Some(5) && is_told, "{checked:?}");
    let repaired = cluster(&test_cluster, "repair");
    assert!(repaired.code == Some(0), "{repaired:?}");
    wait_for_no_problem(&test_cluster);
    restart(&test_cluster, &mut servers[1]);
    wait_for_all_keys(&mut session);
}

#[on(any, rdma_in_soak)]
fn an_absurd_number_is_repaired_without_any_server() {
    let test_cluster = TestCluster::create(1);
    let file = test_cluster.folder().join("region");
    let mut server = test_cluster.start_with_file(&file);
    let before = test_cluster.wait_for_owner(0, &server);
    server.kill();
    test_cluster.change(0, |record| record.number = u64::MAX);
    assert!(test_cluster.store.read().unwrap().shard(0).is_err());
    let repaired = cluster(&test_cluster, "repair");
    assert!(repaired.code == Some(0), "{repaired:?}");
    assert_eq!(test_cluster.shard(0).copies[0].copy, before.copies[0].copy);
    server.start_again();
    test_cluster.wait_for_owner(0, &server);
}

/// Without a server that runs, only the operator knows which file is the newest.
#[on(any, rdma_in_soak)]
fn after_a_repair_any_file_continues_that_was_not_served_before_the_backup() {
    let test_cluster = TestCluster::create(1);
    let [file, stale] = ["region", "stale"].map(|name| test_cluster.folder().join(name));
    let serve = |file| {
        let mut server = test_cluster.start_with_file(file);
        test_cluster.wait_for_owner(0, &server);
        assert_eq!(server.terminate(), Some(0), "{}", server.log());
    };
    let refusal = |file| {
        let mut server = test_cluster.start_with_file(file);
        assert_eq!(server.wait().code(), Some(1));
        server.log()
    };
    serve(&file);
    fs::copy(&file, &stale).unwrap();
    serve(&file);
    let records = test_cluster.records_folder().join("records.json");
    let backup = fs::read(&records).unwrap();
    serve(&file);
    fs::write(&records, backup).unwrap();
    let log = refusal(&file);
    assert!(log.contains("run `kv-cli cluster repair` first"), "{log}");
    let repaired = cluster(&test_cluster, "repair");
    assert!(repaired.text().contains("shard 0: view ") && repaired.code == Some(0));
    assert!(repaired.text().contains("with the file that was served last"), "{repaired:?}");
    let log = refusal(&stale);
    assert!(log.contains("is an older copy of the region of shard 0"), "{log}");
    serve(&file);
    let is_known = |record: &ShardRecord| record.copies[0].serving.is_some();
    assert!(is_known(&test_cluster.shard(0)));
}
