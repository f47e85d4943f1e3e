//! `kv-cli cluster`: what an operator does, from making the records to the loss of a server.
//! Records which went back are noticed, and `kv-cli cluster repair` makes them right: servers
//! follow them, and clients recover by themselves.

use std::fs;

use farside_cluster::ShardRecord;
use farside_tests::cluster::{MapConnection, TestCluster, attach, view_of};
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, TEST_TIMEOUT, wait_until};
use rustix::process::Signal;

fn cluster(arguments: &[&str]) -> CommandOutput {
    CommandOutput::of(command("kv-cli").arg("cluster").args(arguments))
}

#[on(any)]
fn an_operator_makes_shows_checks_and_removes_a_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("file://{}", folder.path().join("records").display());
    let missing = cluster(&["show", &uri]);
    assert_eq!(missing.code, Some(5), "{missing:?}");
    assert!(missing.stderr.contains("kv-cli cluster create"), "{missing:?}");
    for shards in ["0", "129"] {
        assert_eq!(cluster(&["create", &uri, "--shards", shards]).code, Some(2));
    }
    assert_eq!(cluster(&["create", "http://a/b", "--shards", "1"]).code, Some(2));
    let made = cluster(&["create", &uri, "--shards", "2"]);
    assert!(made.code == Some(0) && made.text().contains("2 shards"), "{made:?}");
    let again = cluster(&["create", &uri, "--shards", "2"]);
    assert!(again.code == Some(5) && again.stderr.contains("already"), "{again:?}");
    let checked = cluster(&["check", &uri]);
    assert_eq!(checked.code, Some(5));
    assert!(checked.text().contains("shard 1 is vacant"), "{checked:?}");
    let shown = cluster(&["show", &uri, "--json"]);
    let json: serde_json::Value = serde_json::from_str(shown.text()).unwrap();
    assert_eq!(json["shards"][1]["state"], "vacant");
    assert_eq!(cluster(&["assign", &uri, "2", "--empty"]).code, Some(2));
    assert_eq!(cluster(&["assign", &uri, "0"]).code, Some(2), "only with --empty");
    assert_eq!(cluster(&["destroy", &uri]).code, Some(0));
    assert_eq!(cluster(&["check", &uri]).code, Some(5));
}

#[on(any)]
fn a_cluster_with_servers_is_shown_and_not_destroyed() {
    let (test_cluster, servers) = TestCluster::with_servers(2);
    let uri = test_cluster.uri();
    let session = &mut servers[0].session();
    (0..100_u32).for_each(|number| session.put(number.to_le_bytes(), "value").unwrap());
    let json: serde_json::Value =
        serde_json::from_str(cluster(&["show", &uri, "--json"]).text()).unwrap();
    let keys = |shard: usize| json["shards"][shard]["keys"].as_u64().unwrap();
    assert_eq!(keys(0) + keys(1), 100, "{json}");
    // Clients report their operations with the heartbeats.
    wait_until("the servers know of all operations", TEST_TIMEOUT, || {
        let shown = cluster(&["show", &uri, "--json"]);
        let json: serde_json::Value = serde_json::from_str(shown.text()).unwrap();
        let operations = |shard: usize| json["shards"][shard]["operations"].as_u64().unwrap();
        operations(0) > 0 && operations(1) > 0 && operations(0) + operations(1) == 100
    });
    assert!(cluster(&["show", &uri]).text().contains("serving"));
    let checked = cluster(&["check", &uri]);
    assert!(checked.code == Some(0) && checked.text().contains("no problem"), "{checked:?}");
    let refused = cluster(&["destroy", &uri]);
    assert!(refused.code == Some(5) && refused.stderr.contains("still run"), "{refused:?}");
    // Statistics and the check go over all shards.
    let verified = servers[0].cli(&["verify"]);
    assert!(verified.code == Some(0) && verified.text().contains("shard       1"), "{verified:?}");
    let statistics = servers[1].cli(&["stat", "--json"]);
    assert_eq!(statistics.text().lines().count(), 2, "{statistics:?}");
    // Commands with one address find out that it is of a cluster. Nothing is wrong with that.
    for server in &servers {
        assert!(!server.log().contains("refused a client"), "{}", server.log());
    }
}

#[on(any)]
fn verify_and_stat_wait_for_a_shard_without_a_server_and_say_why_it_is_missing() {
    let test_cluster = TestCluster::create(2);
    let first = test_cluster.start("");
    test_cluster.wait_for_owner(0, &first);
    let run = |what: &str, timeout_ms: u32| {
        let config = test_cluster.folder().join(format!("{timeout_ms}.toml"));
        std::fs::write(&config, format!("connect_timeout_ms = {timeout_ms}\n")).unwrap();
        let mut run = command("kv-cli");
        run.arg("--config").arg(config).args(["--server", &first.address(), what]);
        run
    };
    for what in ["verify", "stat"] {
        let failed = CommandOutput::of(&mut run(what, 2000));
        assert_eq!(failed.code, Some(3), "{failed:?}");
        assert!(failed.stderr.contains("shard 1 is not available: "), "{failed:?}");
        assert!(failed.stderr.contains("has no server at present"), "{failed:?}");
    }
    let waiting = ["verify", "stat"].map(|what| run(what, 60_000).spawn().unwrap());
    let second = test_cluster.start("");
    test_cluster.wait_for_owner(1, &second);
    for child in waiting {
        CommandOutput::new(child.wait_with_output().unwrap()).succeeded();
    }
}

/// Frozen servers delay the others by nothing, and are named.
#[on(any)]
fn gc_collects_beside_frozen_servers_and_names_them() {
    let (_cluster, mut servers) = TestCluster::with_servers(3);
    let client = servers[0].client();
    servers[1..].iter().for_each(ServerProcess::pause);
    let collected = servers[0].cli(&["gc"]);
    assert_eq!(collected.code, Some(3), "{collected:?}");
    assert!(collected.text().contains("0 lost blocks found in"), "{collected:?}");
    let lines = collected.stderr.lines().filter(|line| line.contains("was not collected"));
    assert_eq!(lines.count(), 2, "{collected:?}");
    servers[1..].iter().for_each(|server| server.signal(Signal::CONT));
    wait_until("all servers answer", TEST_TIMEOUT, || client.admin().statistics().is_ok());
    servers[2].cli(&["gc"]).succeeded();
    servers.clear();
}

/// The server is frozen when its shard is given up, and thawed afterwards.
#[on(any)]
fn a_shard_whose_server_is_frozen_is_given_up_and_a_spare_takes_it() {
    let (test_cluster, mut servers) = TestCluster::with_servers(1);
    let uri = test_cluster.uri();
    let spare = test_cluster.start("");
    let mut session = servers[0].session();
    session.put("key", "of the former owner").unwrap();
    servers[0].pause();
    let checked = cluster(&["check", &uri]);
    assert!(checked.text().contains("cannot be used"), "{checked:?}");
    let assigned = cluster(&["assign", &uri, "0", "--empty"]);
    assert!(assigned.code == Some(0) && assigned.text().contains("is silent"), "{assigned:?}");
    assert!(assigned.stderr.contains("turn it off"), "{assigned:?}");
    test_cluster.wait_for_owner(0, &spare);
    let mut other = spare.session();
    assert_eq!(other.get("key").unwrap(), None);
    other.put("key", "of the new owner").unwrap();
    servers[0].signal(Signal::CONT);
    assert_eq!(servers[0].wait().code(), Some(1), "{}", servers[0].log());
    wait_until("the client of the former owner finds the new one", TEST_TIMEOUT, || {
        // Its only seed has ended, so that it learns of no map.
        !matches!(session.get("key"), Ok(Some(value)) if value == "of the former owner")
    });
    assert_eq!(other.get("key").unwrap().unwrap(), "of the new owner");
}

/// A server that runs is told, and ends by itself.
#[on(any)]
fn a_shard_is_taken_from_a_server_that_runs() {
    let (test_cluster, mut servers) = TestCluster::with_servers(1);
    let assigned = cluster(&["assign", &test_cluster.uri(), "0", "--empty"]);
    // It ends so soon that the command may find nothing at its address.
    assert!(assigned.code == Some(0) && assigned.text().contains("is vacant"), "{assigned:?}");
    assert_eq!(servers[0].wait().code(), Some(1), "{}", servers[0].log());
    let again = cluster(&["assign", &test_cluster.uri(), "0", "--empty"]);
    assert!(again.code == Some(0) && again.text().contains("vacant already"), "{again:?}");
}

/// The server that gives the map does not reach the records, and another one was restarted since.
#[on(any)]
fn verify_and_stat_reach_a_server_that_is_newer_than_the_map() {
    let test_cluster = TestCluster::create(2);
    let link = test_cluster.folder().join("link");
    std::os::unix::fs::symlink(test_cluster.records_folder(), &link).unwrap();
    let folder = test_cluster.folder().join("cut-off");
    std::fs::create_dir(&folder).unwrap();
    let arguments = format!("--cluster file://{} --memory 16MiB --grace-ms 20", link.display());
    let cut_off = ServerProcess::spawn_in(&folder, &arguments, |command| command);
    test_cluster.wait_for_owner(0, &cut_off);
    let mut restarted = test_cluster.start_with_file(&test_cluster.folder().join("region"));
    test_cluster.wait_for_owner(1, &restarted);
    let mut connection = MapConnection::open(&cut_off);
    let before = test_cluster.shard(1).number;
    connection.wait_for_map("both servers", |map| map.shards[1].number == before);
    std::fs::remove_file(link).unwrap();
    restarted.kill();
    restarted.start_again();
    test_cluster.wait_for(1, "a newer view", |record| record.number > before);
    wait_until("the server serves its newer view", TEST_TIMEOUT, || {
        attach(&restarted, Some(view_of(1, &test_cluster.shard(1)))).is_ok()
    });
    cut_off.assert_verifies();
    assert_eq!(cut_off.cli(&["stat", "--json"]).succeeded().text().lines().count(), 2);
    assert_eq!(connection.map.shards[1].number, before);
}

const KEYS: u32 = 40;

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
        let output = cluster(&["check", &test_cluster.uri()]);
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
    let checked = cluster(&["check", &test_cluster.uri()]);
    assert_eq!(checked.code, Some(5), "{checked:?}");
    let told = checked.text().split_once("knows view ").and_then(|(_, rest)| {
        let (number, _) = rest.split_once(" of shard 1, and the records have view ")?;
        number.parse().ok()
    });
    // The server may have committed once more before the backup came back.
    assert!(told.is_some_and(|told: u64| told >= newest), "{newest}: {checked:?}");
    assert!(checked.text().contains("kv-cli cluster repair file:///"), "{checked:?}");
    let repaired = cluster(&["repair", &test_cluster.uri()]);
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
    let checked = cluster(&["check", &test_cluster.uri()]);
    let is_told = checked.text().contains("the record shards/0001 is damaged");
    assert!(checked.code == Some(5) && is_told, "{checked:?}");
    let repaired = cluster(&["repair", &test_cluster.uri()]);
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
    let repaired = cluster(&["repair", &test_cluster.uri()]);
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
    let repaired = cluster(&["repair", &test_cluster.uri()]);
    assert!(repaired.text().contains("shard 0: view ") && repaired.code == Some(0));
    assert!(repaired.text().contains("with the file that was served last"), "{repaired:?}");
    let log = refusal(&stale);
    assert!(log.contains("is an older copy of the region of shard 0"), "{log}");
    serve(&file);
    let is_known = |record: &ShardRecord| record.copies[0].serving.is_some();
    assert!(is_known(&test_cluster.shard(0)));
}
