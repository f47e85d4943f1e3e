//! `kv-cli cluster`: what an operator does, from making the records to the loss of a server.

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
