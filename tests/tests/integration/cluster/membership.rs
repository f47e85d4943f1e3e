//! Proves that a shard has a server with its data, or an empty one when the data is certainly lost.
//! A server continues with its region file. Of all copies of that file only the one that was served
//! last continues the shard, whatever was stopped, killed, moved or copied. A spare waits until a
//! shard is vacant.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use farside_cluster::{Memory, ShardRecord};
use farside_control::attach::ConnectError;
use farside_control::cluster::Id;
use farside_control::{KnownView, Refusal, Role, SecretKey};
use farside_layout::{SERVINGS_OFFSET, SUPERBLOCK_BYTES, Superblock};
use farside_tests::cluster::{MapConnection, TestCluster, attach, view_of};
use farside_tests::engine::connect_options;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, left_out_without_time_namespaces, raise_descriptor_limit,
    wait_until,
};
use rustix::process::Signal;

/// The reason for which the server refuses a client that knows this view.
fn refusal(server: &ServerProcess, view: Option<KnownView>) -> Refusal {
    match attach(server, view) {
        Err(ConnectError::Refused { source, .. }) => source,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the server has accepted the client"),
    }
}

/// The server ends by itself. Returns its exit code and its log.
fn ended(server: &mut ServerProcess) -> (Option<i32>, String) {
    let code = server.wait().code();
    (code, server.log())
}

#[on(any)]
fn the_first_servers_take_the_shards_and_further_ones_wait() {
    let (cluster, servers) = TestCluster::with_servers(2);
    let spare = cluster.start("--label rack7");
    let mut connection = MapConnection::open(&spare);
    let map = cluster.store.read().unwrap().map().unwrap();
    connection.wait_for_map("the spare has the map of the records", |known| *known == map);
    assert_eq!(refusal(&spare, None), Refusal::Clustered);
    let some_view = Some(KnownView { shard: 0, number: 1 });
    assert_eq!(refusal(&spare, some_view), Refusal::Spare);
    for server in &servers {
        let owns = |shard: &u16| {
            let copies = cluster.shard(*shard).copies;
            copies[0].copy.addresses == [server.address().parse().unwrap()]
        };
        let shard = (0..2).find(owns).unwrap();
        let record = cluster.wait_for_owner(shard, server);
        let view = view_of(shard, &record);
        let attached = attach(server, Some(view)).unwrap();
        let welcome = attached.welcome;
        assert_eq!((welcome.cluster, welcome.shard), (map.cluster, shard));
        assert_eq!(welcome.view_number, record.number);
        assert_eq!(welcome.region_id, record.copies[0].copy.region_id.0);
        assert_eq!(welcome.incarnation, record.copies[0].copy.incarnation);
        attached.factory.fabric(1).unwrap();
        let other = Refusal::OtherView { shard: shard.into(), number: record.number };
        let older = KnownView { number: view.number - 1, ..view };
        let other_shard = KnownView { shard: 1 - shard, ..view };
        assert_eq!(refusal(server, Some(older)), other);
        assert_eq!(refusal(server, Some(other_shard)), other);
        assert_eq!(refusal(server, None), Refusal::Clustered);
        assert!(MapConnection::open(server).is_answered(7, TEST_TIMEOUT));
    }
    assert!(!connection.is_answered(8, Duration::from_millis(50)), "a spare serves no shard");
    wait_until("all servers are announced", TEST_TIMEOUT, || {
        let records = cluster.store.read().unwrap();
        let servers: Vec<_> = records.servers().map(|server| server.unwrap()).collect();
        let mut shards: Vec<_> = servers.iter().map(|server| server.shard).collect();
        shards.sort();
        let is_labelled = |shard: &Option<u16>, label: &Option<String>| {
            (*label == Some("rack7".to_owned())) == shard.is_none()
        };
        shards == [None, Some(0), Some(1)]
            && servers.iter().all(|server| is_labelled(&server.shard, &server.label))
    });
}

#[on(any)]
fn a_server_without_a_cluster_knows_of_none() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 20");
    let view = Some(KnownView { shard: 0, number: 1 });
    assert_eq!(refusal(&server, view), Refusal::NoCluster);
    let options = connect_options(&server.address(), Role::Reader, SecretKey::NONE);
    match options.fetch_map(TEST_TIMEOUT) {
        Err(ConnectError::Refused { source, .. }) => assert_eq!(source, Refusal::NoCluster),
        other => panic!("{:?}", other.map(|(map, _)| map)),
    }
    // Clients ask before they know, so nothing is wrong.
    assert!(!server.log().contains("refused a client"), "{}", server.log());
}

/// Servers on hosts whose clocks differ by hours. A server that starts again on another host finds
/// times in its region that lie in its future.
#[on(any)]
fn clocks_of_hosts_may_differ_by_hours() {
    if left_out_without_time_namespaces() {
        return;
    }
    const HOUR: Duration = Duration::from_secs(3600);
    let cluster = TestCluster::create(3);
    let file = |number: u32| cluster.folder().join(format!("region{number}"));
    let start = |number: u32, ahead: u32| cluster.start_ahead(ahead * HOUR, &file(number));
    let mut servers = [start(0, 0), start(1, 1), start(2, 5)];
    cluster.wait_for_servers();
    let mut session = servers[0].session();
    let key = |number: u32| number.to_le_bytes();
    (0..300).for_each(|number| session.put(key(number), "first").unwrap());
    for number in 0..300 {
        assert_eq!(session.get(key(number)).unwrap().unwrap(), "first");
    }
    assert_eq!(servers[2].terminate(), Some(0), "{}", servers[2].log());
    servers[2] = start(2, 0);
    wait_until("all shards are back", TEST_TIMEOUT, || {
        (0..300).all(|number| session.put(key(number), "second").is_ok())
    });
    assert_eq!(session.scan().unwrap().map(Result::unwrap).count(), 300);
    for number in 0..300 {
        assert_eq!(session.get(key(number)).unwrap().unwrap(), "second");
    }
    servers[0].assert_verifies();
}

#[on(any)]
fn a_server_continues_its_shard_at_another_address() {
    let cluster = TestCluster::create(2);
    let file = cluster.folder().join("region");
    let mut server = cluster.start_with_file(&file);
    let mut record = cluster.wait_for_owner(0, &server);
    let mut connection = MapConnection::open(&server);
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        server.signal(signal);
        server.wait();
        assert!(connection.has_ended());
        let stopped = cluster.shard(0);
        match signal {
            Signal::TERM => {
                assert!(stopped.copies[0].is_stopped && stopped.view().copies.is_empty());
                assert_eq!(stopped.number, record.number + 1);
            }
            _ => assert_eq!(stopped, record, "a killed server says nothing"),
        }
        server = cluster.start_with_file(&file);
        let continued = cluster.wait_for_owner(0, &server);
        assert_eq!(continued.number, stopped.number + 1);
        let (before, now) = (&record.copies[0], &continued.copies[0]);
        assert_ne!(before.copy.server, now.copy.server);
        assert_eq!(before.copy.region_id, now.copy.region_id);
        assert_eq!(before.copy.incarnation + 1, now.copy.incarnation);
        assert!(before.memory == now.memory && !now.is_stopped);
        connection = MapConnection::open(&server);
        record = continued;
    }
    assert!(cluster.shard(1).is_vacant());
}

#[on(any)]
fn a_region_file_of_no_shard_is_refused_unless_it_is_empty() {
    let cluster = TestCluster::create(1);
    let owner = cluster.start("");
    cluster.wait_for_owner(0, &owner);
    let file = cluster.folder().join("region");
    let mut spare = cluster.start_with_file(&file);
    MapConnection::open(&spare);
    assert_eq!(spare.terminate(), Some(0));
    // It has never served a shard.
    let mut spare = cluster.start_with_file(&file);
    MapConnection::open(&spare);
    spare.kill();

    let mut store = ServerProcess::start_with_file("--memory 16MiB --grace-ms 20");
    store.session().put("key", "value").unwrap();
    store.kill();
    let region = fs::read(store.region_file()).unwrap();
    let superblock = &region[..SUPERBLOCK_BYTES as usize];
    let (_, format) = Superblock::decode(superblock, region.len() as u64).unwrap();
    let with_its_key = TestCluster::create_with_key(1, Id(format.hash_key));
    for (cluster, expected) in [
        (&cluster, "has another hash key than the cluster at file:///"),
        (&with_its_key, "no shard of the cluster at file:///"),
    ] {
        let mut server = cluster.start_with_file(&store.region_file());
        let (code, log) = ended(&mut server);
        assert_eq!(code, Some(1));
        assert!(log.contains(expected) && log.contains("delete this one"), "{log}");
    }
}

// Not over RDMA: each connection registers much memory.
#[on(any)]
fn connections_for_the_map_are_bounded() {
    raise_descriptor_limit();
    let cluster = TestCluster::create(1);
    let server = cluster.start("");
    let record = cluster.wait_for_owner(0, &server);
    let mut connections: Vec<_> = (0..1030).map(|_| MapConnection::open(&server)).collect();
    wait_until("the oldest are closed", TEST_TIMEOUT, || connections[5].has_ended());
    assert!(connections[20..].iter_mut().all(|connection| !connection.has_ended()));
    attach(&server, Some(view_of(0, &record))).unwrap();
}

/// The name of a process that has ended.
fn is_of_process(record: &ShardRecord) -> bool {
    record.copies.first().is_some_and(|served| matches!(served.memory, Memory::Process { .. }))
}

#[on(any)]
fn a_spare_takes_a_shard_only_when_its_data_is_lost() {
    let cluster = TestCluster::create(1);
    let mut first = cluster.start("");
    let record = cluster.wait_for_owner(0, &first);
    assert!(is_of_process(&record));
    let mut second = cluster.start("");
    let mut connection = MapConnection::open(&second);
    // A server that stops says that its data has ended with it.
    assert_eq!(first.terminate(), Some(0));
    let record = cluster.wait_for_owner(0, &second);
    connection.wait_for_map("the new owner", |map| map.shards[0].number == record.number);
    // A server that was killed cannot say so, but another one on this host sees it.
    let third = cluster.start("");
    MapConnection::open(&third);
    second.kill();
    let record = cluster.wait_for_owner(0, &third);
    assert!(is_of_process(&record));
    drop(third);
    // The data of a region file may come back.
    let file = cluster.folder().join("region");
    let mut with_file = cluster.start_with_file(&file);
    let record = cluster.wait_for_owner(0, &with_file);
    assert!(!is_of_process(&record));
    let spare = cluster.start("");
    let mut connection = MapConnection::open(&spare);
    assert_eq!(with_file.terminate(), Some(0));
    connection.wait_for_map("no server", |map| map.shards[0].copies.is_empty());
    std::thread::sleep(Duration::from_millis(1000));
    assert_eq!(cluster.shard(0).copies.len(), 1, "it is not vacant");
    let _with_file = restarted(&cluster, &file);
}

/// Starts a server with a region file again, and waits until it serves its shard.
fn restarted(cluster: &TestCluster, file: &Path) -> ServerProcess {
    let server = cluster.start_with_file(file);
    cluster.wait_for_owner(0, &server);
    server
}

/// A cluster of one shard, and paths in its folder.
fn cluster_and_paths() -> (TestCluster, PathBuf, PathBuf) {
    let cluster = TestCluster::create(1);
    let [file, copy] = ["region", "copy"].map(|name| cluster.folder().join(name));
    (cluster, file, copy)
}

/// A server that serves the shard with this file.
fn serve(cluster: &TestCluster, file: &Path) -> ServerProcess {
    let server = cluster.start_with_file(file);
    cluster.wait_for_owner(0, &server);
    server
}

/// As [`serve`]. The server stores a value, and stops cleanly.
fn serve_and_put(cluster: &TestCluster, file: &Path, value: &str) {
    let mut server = serve(cluster, file);
    server.session().put("key", value).unwrap();
    assert_eq!(server.terminate(), Some(0), "{}", server.log());
}

/// A server with this file ends, says why, and leaves file and record as they are.
fn is_refused(cluster: &TestCluster, file: &Path, why: &str) {
    let (bytes, record) = (fs::read(file).unwrap(), cluster.shard(0));
    let mut server = cluster.start_with_file(file);
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
    assert!(server.log().contains(why), "{}", server.log());
    assert!(fs::read(file).unwrap() == bytes, "the file was touched");
    assert_eq!(cluster.shard(0), record);
}

fn value(server: &ServerProcess) -> Vec<u8> {
    server.session().get("key").unwrap().unwrap().data
}

/// The two numbers in the superblock.
fn numbers(file: &Path) -> [Id; 2] {
    let mut numbers = [[0; 16]; 2];
    let opened = fs::File::open(file).unwrap();
    opened.read_exact_at(numbers.as_flattened_mut(), SERVINGS_OFFSET).unwrap();
    numbers.map(Id)
}

fn number_of(record: &ShardRecord) -> Id {
    record.copies[0].serving.unwrap()
}

const STALE: &str = "is an older copy of the region of shard 0";
const COPY: &str = "is a copy of the region file of shard 0";

#[on(any, rdma_in_soak)]
fn a_file_whose_copy_was_served_since_is_refused() {
    let (cluster, file, copy) = cluster_and_paths();
    serve_and_put(&cluster, &file, "old");
    fs::copy(&file, &copy).unwrap();
    serve_and_put(&cluster, &copy, "new");
    is_refused(&cluster, &file, STALE);
    let mut server = serve(&cluster, &copy);
    assert_eq!(value(&server), b"new");
    server.kill();
    is_refused(&cluster, &file, STALE);
    assert_eq!(value(&serve(&cluster, &copy)), b"new");
}

#[on(any, rdma_in_soak)]
fn a_copy_that_was_made_while_the_server_ran_is_refused() {
    let (cluster, file, copy) = cluster_and_paths();
    let mut server = serve(&cluster, &file);
    fs::copy(&file, &copy).unwrap();
    server.session().put("key", "new").unwrap();
    server.kill();
    is_refused(&cluster, &copy, COPY);
    let mut server = serve(&cluster, &file);
    assert_eq!(server.terminate(), Some(0));
    is_refused(&cluster, &copy, STALE);
    assert_eq!(value(&serve(&cluster, &file)), b"new");
}

#[on(any, rdma_in_soak)]
fn a_moved_file_continues() {
    let (cluster, file, moved) = cluster_and_paths();
    let mut server = serve(&cluster, &file);
    server.session().put("key", "value").unwrap();
    server.kill();
    // The same file, which had no chance to say that it stopped.
    fs::rename(&file, &moved).unwrap();
    serve_and_put(&cluster, &moved, "value");
    // The same bytes, for example in another file system, after a clean stop.
    fs::copy(&moved, &file).unwrap();
    fs::remove_file(&moved).unwrap();
    assert_eq!(value(&serve(&cluster, &file)), b"value");
}

#[on(any, rdma_in_soak)]
fn a_server_that_was_killed_before_its_commit_does_not_lock_its_file_out() {
    let (cluster, file, _) = cluster_and_paths();
    let mut server = serve(&cluster, &file);
    server.session().put("key", "value").unwrap();
    server.kill();
    let record = cluster.shard(0);
    assert_eq!(numbers(&file)[1], number_of(&record));
    // Killed before the commit of another number.
    let uncommitted = [number_of(&record), Id([5; 16])];
    let opened = OpenOptions::new().write(true).open(&file).unwrap();
    opened.write_all_at(uncommitted.map(|id| id.0).as_flattened(), SERVINGS_OFFSET).unwrap();
    let mut server = serve(&cluster, &file);
    assert_eq!(value(&server), b"value");
    let settled = cluster.shard(0);
    assert_eq!(settled.number, record.number + 2, "the commit of the other number can be late");
    assert_eq!(numbers(&file), [number_of(&record), number_of(&settled)]);
    server.kill();
    // Killed after the commit of another number.
    let committed = [number_of(&settled), Id([6; 16])];
    opened.write_all_at(committed.map(|id| id.0).as_flattened(), SERVINGS_OFFSET).unwrap();
    cluster.change(0, |record| record.copies[0].serving = Some(Id([6; 16])));
    assert_eq!(value(&serve(&cluster, &file)), b"value");
    assert_eq!(cluster.shard(0).number, settled.number + 2);
    assert_eq!(numbers(&file)[0], Id([6; 16]));
}

#[on(any, rdma_in_soak)]
fn of_two_servers_with_copies_one_continues() {
    let (cluster, file, copy) = cluster_and_paths();
    serve_and_put(&cluster, &file, "value");
    fs::copy(&file, &copy).unwrap();
    let mut servers = [&file, &copy].map(|file| cluster.start_with_file(file));
    let record = cluster.wait_for(0, "an owner", |record| !record.copies[0].is_stopped);
    let is_owner = |server: &ServerProcess| {
        record.copies[0].copy.addresses.contains(&server.address().parse().unwrap())
    };
    let loser = servers.iter().position(|server| !is_owner(server)).unwrap();
    assert_eq!(servers[loser].wait().code(), Some(1));
    assert!(servers[loser].log().contains(STALE), "{}", servers[loser].log());
    cluster.wait_for_owner(0, &servers[1 - loser]);
}

#[on(any, rdma_in_soak)]
fn without_a_cluster_a_region_has_no_numbers() {
    let mut server = ServerProcess::start_with_file("--memory 16MiB --grace-ms 20");
    server.session().put("key", "value").unwrap();
    assert_eq!(server.terminate(), Some(0));
    assert_eq!(numbers(&server.region_file()), [Id::default(); 2]);
    // Copies cannot be told apart then.
    server.start_again();
    assert_eq!(value(&server), b"value");
}
