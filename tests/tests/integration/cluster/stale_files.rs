//! Proves that of all copies of a region file only the one that was served last continues its
//! shard, whatever was stopped, killed, moved or copied.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use farside_cluster::ShardRecord;
use farside_control::cluster::Id;
use farside_layout::SERVINGS_OFFSET;
use farside_tests::ServerProcess;
use farside_tests::cluster::TestCluster;

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
