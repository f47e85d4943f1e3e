//! A cluster of server processes, with its records in a folder or in etcd.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_cluster::{
    ClusterRecord, Commit, RecordStore, Records, ShardRecord, StoreOptions, random_id,
};
use farside_control::attach::{Attached, ConnectError, ConnectOptions};
use farside_control::cluster::{ClusterMap, Id};
use farside_control::{
    ControlChannel, KnownView, MESSAGE_BYTES_MAX, Request, Role, SecretKey, ServerMessage,
};
use tempfile::TempDir;

use crate::engine::connect_options;
use crate::network::Network;
use crate::{ServerProcess, TEST_TIMEOUT, device, wait_until};

/// How long clients trust a server, in milliseconds: half the default, for a busy machine.
const TRUST_MS: u32 = 1000;

/// The same in tests in which servers are away. Over RDMA a server in emulation may answer late.
fn short_trust_ms() -> u32 {
    if device().is_some() { TRUST_MS } else { 200 }
}

/// The arguments of all servers, unless others are given.
const ARGUMENTS: &str = "--memory 16MiB --grace-ms 20";

/// A cluster, and a folder on tmpfs for its records and servers.
pub struct TestCluster {
    folder: TempDir,
    /// The records.
    pub store: Arc<dyn RecordStore>,
    uri: String,
    /// The arguments of all servers.
    arguments: &'static str,
    servers_started: Cell<u32>,
}

impl TestCluster {
    /// Writes the records of a new cluster without servers.
    pub fn create(shards: u16) -> Self {
        Self::create_with_key(shards, random_id().unwrap())
    }

    /// As [`TestCluster::create`], with this hash key.
    pub fn create_with_key(shards: u16, hash_key: Id) -> Self {
        Self::create_at(None, shards, hash_key, ARGUMENTS)
    }

    /// As [`TestCluster::create`], with its records at this URI or in its folder, and these
    /// arguments of all servers.
    pub fn create_at(
        uri: Option<String>,
        shards: u16,
        hash_key: Id,
        arguments: &'static str,
    ) -> Self {
        Self::create_trusting(short_trust_ms(), uri, shards, hash_key, arguments)
    }

    fn create_trusting(
        trust_ms: u32,
        uri: Option<String>,
        shards: u16,
        hash_key: Id,
        arguments: &'static str,
    ) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let in_folder = || format!("file://{}", folder.path().join("records").display());
        let uri = uri.unwrap_or_else(in_folder);
        let store = farside_cluster::open(&uri, &StoreOptions::default()).unwrap();
        write_cluster(&*store, shards, hash_key, trust_ms);
        Self { folder, store, uri, arguments, servers_started: Cell::new(0) }
    }

    /// A cluster in which each shard has a server with an anonymous region.
    pub fn with_servers(shards: u16) -> (Self, Vec<ServerProcess>) {
        let key = random_id().unwrap();
        let cluster = Self::create_trusting(TRUST_MS, None, shards, key, ARGUMENTS);
        let servers = (0..shards).map(|_| cluster.start("")).collect();
        cluster.wait_for_servers();
        (cluster, servers)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of the records.
    pub fn records_folder(&self) -> PathBuf {
        self.folder.path().join("records")
    }

    /// The URI of the records.
    pub fn uri(&self) -> String {
        self.uri.clone()
    }

    /// Makes a folder for the next server.
    pub fn new_folder(&self) -> PathBuf {
        let number = self.servers_started.get();
        self.servers_started.set(number + 1);
        let folder = self.folder.path().join(format!("server{number}"));
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    /// Starts a server of the cluster in a folder of its own, and does not wait for it.
    pub fn start(&self, arguments: &str) -> ServerProcess {
        let arguments = format!("--cluster {} {} {arguments}", self.uri, self.arguments);
        ServerProcess::spawn_in(&self.new_folder(), &arguments, |command| command)
    }

    /// Starts a server with a region file on the server's host of a network. It reaches the records
    /// at this URI.
    pub fn start_behind(&self, network: &Network, uri: &str, file: &Path) -> ServerProcess {
        let (folder, file) = (self.new_folder(), file.display());
        // No two servers of the host listen at the same port.
        let port = 7400 + self.servers_started.get() as u16;
        let arguments = format!("--cluster {uri} {} --region-file {file}", self.arguments);
        ServerProcess::spawn_behind(network, port, &folder, &arguments)
    }

    /// Starts a server with this region file, at an address of TCP. Its clocks are so far ahead.
    pub fn start_ahead(&self, ahead: Duration, file: &Path) -> ServerProcess {
        let (uri, file) = (self.uri(), file.display());
        let arguments = format!("--cluster {uri} {} --region-file {file}", self.arguments);
        ServerProcess::spawn_ahead(ahead, &self.new_folder(), &arguments)
    }

    /// Starts a server with this region file.
    pub fn start_with_file(&self, file: &Path) -> ServerProcess {
        self.start(&format!("--region-file {}", file.display()))
    }

    /// Reads the record of a shard.
    pub fn shard(&self, shard: u16) -> ShardRecord {
        self.store.read().unwrap().shard(shard).unwrap().0
    }

    /// Waits until the record of a shard is as described.
    pub fn wait_for(
        &self,
        shard: u16,
        what: &str,
        holds: impl Fn(&ShardRecord) -> bool,
    ) -> ShardRecord {
        wait_until(what, TEST_TIMEOUT, || holds(&self.shard(shard)));
        self.shard(shard)
    }

    /// Waits until this server serves the shard, and returns the record.
    pub fn wait_for_owner(&self, shard: u16, server: &ServerProcess) -> ShardRecord {
        let address = server.address().parse().unwrap();
        let mut record = self.wait_for(shard, &format!("an owner: {}", server.log()), |record| {
            let copy = record.copies.first().filter(|served| !served.is_stopped);
            copy.is_some_and(|served| served.copy.addresses.contains(&address))
        });
        wait_until("the server knows its shard", TEST_TIMEOUT, || {
            // A server may commit a second time after its start, which makes another view.
            record = self.shard(shard);
            !matches!(
                attach(server, Some(view_of(shard, &record))),
                Err(ConnectError::Refused { .. })
            )
        });
        record
    }

    /// Waits until each shard has a server.
    pub fn wait_for_servers(&self) {
        let has_server = |records: &Records| {
            let map = records.map().unwrap();
            map.shards.iter().all(|view| !view.copies.is_empty())
        };
        wait_until("each shard has a server", TEST_TIMEOUT, || {
            has_server(&self.store.read().unwrap())
        });
    }

    /// Changes the record of a shard as another program does.
    pub fn change(&self, shard: u16, change: impl FnOnce(&mut ShardRecord)) -> ShardRecord {
        let (mut record, revision) = self.store.read().unwrap().shard(shard).unwrap();
        record.number += 1;
        change(&mut record);
        let conditions = [(ShardRecord::key(shard), Some(revision))];
        let committed = self.store.commit(&conditions, &[record.change(shard)]).unwrap();
        assert_eq!(committed, Commit::Done);
        record
    }
}

/// Writes the records of a new cluster, whose clients trust a server for so long.
pub fn write_cluster(store: &dyn RecordStore, shards: u16, hash_key: Id, trust_ms: u32) {
    let cluster = ClusterRecord::new(random_id().unwrap(), hash_key, shards, trust_ms);
    let shards = (0..shards).map(|shard| ShardRecord::default().change(shard));
    let changes: Vec<_> = shards.chain([cluster.change()]).collect();
    assert_eq!(store.commit(&[], &changes).unwrap(), Commit::Done);
}

/// The view in this record, as a client states it.
pub fn view_of(shard: u16, record: &ShardRecord) -> KnownView {
    KnownView { shard, number: record.number as u32 }
}

fn options(server: &ServerProcess) -> ConnectOptions {
    connect_options(&server.address(), Role::Writer, SecretKey::NONE)
}

/// Makes one attempt to connect to a server as a client that knows this view.
pub fn attach(server: &ServerProcess, view: Option<KnownView>) -> Result<Attached, ConnectError> {
    ConnectOptions { view, ..options(server) }.attach(TEST_TIMEOUT)
}

/// A connection for the map of a server's cluster.
pub struct MapConnection {
    /// The last map that came.
    pub map: ClusterMap,
    channel: Box<dyn ControlChannel>,
    buffer: Vec<u8>,
}

impl MapConnection {
    /// Fetches the map, as soon as the server listens.
    pub fn open(server: &ServerProcess) -> Self {
        Self::open_as(server, Role::Writer)
    }

    /// As [`MapConnection::open`], in this role.
    pub fn open_as(server: &ServerProcess, role: Role) -> Self {
        let started = Instant::now();
        let options = ConnectOptions { role, ..options(server) };
        loop {
            match options.fetch_map(TEST_TIMEOUT) {
                Ok((map, channel)) => {
                    return Self { map, channel, buffer: vec![0; MESSAGE_BYTES_MAX] };
                }
                Err(ConnectError::Unreachable { .. }) if started.elapsed() < TEST_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}; the server's log: {}", server.log()),
            }
        }
    }

    /// Sends a request.
    pub fn send(&mut self, request: &Request) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        self.channel.send(&bytes).unwrap();
    }

    /// Receives a message if one has come. An error is the end of the connection.
    pub fn try_receive(&mut self) -> io::Result<Option<ServerMessage>> {
        let bytes = match self.channel.receive(&mut self.buffer)? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(bytes) => bytes,
            None => return Ok(None),
        };
        let message = ServerMessage::decode(&self.buffer[..bytes]).unwrap();
        if let ServerMessage::Map { map } = &message {
            self.map = ClusterMap::decode(map).unwrap();
        }
        Ok(Some(message))
    }

    /// Receives a message if one has come. Fails if the server has disconnected.
    pub fn receive(&mut self) -> Option<ServerMessage> {
        self.try_receive().unwrap()
    }

    /// Waits until the map is as described.
    pub fn wait_for_map(&mut self, what: &str, holds: impl Fn(&ClusterMap) -> bool) {
        wait_until(what, TEST_TIMEOUT, || {
            while self.receive().is_some() {}
            holds(&self.map)
        });
    }

    /// Sends a heartbeat. Returns whether an answer comes within this time.
    pub fn is_answered(&mut self, clock_ns: u64, timeout: Duration) -> bool {
        self.send(&Request::Heartbeat { clock_ns, operations: 0 });
        let started = Instant::now();
        while started.elapsed() < timeout {
            match self.receive() {
                Some(ServerMessage::Heartbeat { clock_ns: answer }) if answer == clock_ns => {
                    return true;
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        false
    }

    /// Whether the server has ended the connection.
    pub fn has_ended(&mut self) -> bool {
        loop {
            match self.try_receive() {
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }
}
