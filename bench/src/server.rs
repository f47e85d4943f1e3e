//! The kv-server of a run, or the servers of its cluster. A cluster that is made for one run has
//! its records in a temporary folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use farside_cluster::{ClusterRecord, Commit, RecordStore, ShardRecord, StoreOptions, random_id};
use farside_config::ClientConfig;
use farside_control::Role;
use farside_control::address::Address;
use farside_control::cluster::{ClusterMap, ShardCopy};
use tempfile::TempDir;

use crate::accounting::{self, ServerUsage};
use crate::command::Interrupt;
use crate::daemon::{Daemon, find_program};
use crate::emulation::{Devices, Emulation};
use crate::raw_connection::RawConnection;
use crate::sizing::ServerMemory;
use crate::{Error, Result};

/// How long one attempt to connect to a starting server may take before we check that it still
/// runs.
const ANSWER_TIMEOUT_MS: u64 = 250;
/// How many of the servers of an own cluster are seeds.
const SEEDS: usize = 3;

/// The server of a run: one that already ran, or one of our own that is stopped when this is
/// dropped. Of a cluster, all its servers.
pub struct Server {
    /// How to connect to it.
    pub config: ClientConfig,
    /// The map of its cluster; `None` without one.
    pub map: Option<ClusterMap>,
    /// The devices of an emulated network.
    pub devices: Option<Arc<Devices>>,
    /// The numbers of its processes; none if one of them is not known.
    pub processes: Vec<u32>,
    /// Processes of our own, which end when this is dropped.
    own: Option<Own>,
}

/// Processes that were started for the run.
#[allow(dead_code, reason = "dropping it stops them")]
enum Own {
    Single(Daemon),
    Cluster(OwnCluster),
}

impl Server {
    /// Returns the server that the configuration names, or starts one with this memory.
    pub fn connect_or_start(
        config: ClientConfig,
        memory: impl FnOnce() -> Result<ServerMemory>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        if let Some(address) = &config.server {
            let map = map_of(&config);
            let processes = match &map {
                Some(map) => processes_of(map),
                None => accounting::process_at(address).into_iter().collect(),
            };
            return Ok(Self { config, map, devices: None, processes, own: None });
        }
        Self::start_single(config, &memory()?, &[], interrupt)
    }

    /// Starts a server with this memory that evicts keys when it is full.
    pub fn start_cache(memory: &ServerMemory, interrupt: &Interrupt) -> Result<Self> {
        Self::start_single(ClientConfig::default(), memory, &["--evict"], interrupt)
    }

    /// Starts a server with this memory, and with more arguments.
    fn start_single(
        config: ClientConfig,
        memory: &ServerMemory,
        more: &[&str],
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let more = more.iter().map(|argument| (*argument).to_owned());
        let arguments = |socket: &Path| arguments(socket, memory).into_iter().chain(more).collect();
        let own = Daemon::start(program()?, arguments, is_ready, interrupt)?;
        let config = ClientConfig { server: Some(address_of(&own.socket())), ..config };
        let processes = vec![own.process()];
        Ok(Self { config, map: None, devices: None, processes, own: Some(Own::Single(own)) })
    }

    /// Starts a cluster of so many servers, each with this memory, and the devices of an emulated
    /// network with `emulation`.
    pub fn start_cluster(
        servers: u16,
        memory: &ServerMemory,
        emulation: Option<Emulation>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let program = program()?;
        let grace_ms = emulation.map(|emulation| emulation.grace_ms().to_string());
        let grace = grace_ms.as_deref().map(|grace_ms| ["--grace-ms", grace_ms]);
        let spawn = |uri: &str| {
            let more = ["--cluster", uri].into_iter().chain(grace.into_iter().flatten());
            let more = more.map(str::to_owned);
            let arguments = |socket: &Path| arguments(socket, memory).into_iter().chain(more);
            Daemon::spawn(program.clone(), |socket| arguments(socket).collect(), interrupt)
        };
        let cluster = OwnCluster::start(servers, spawn, interrupt)?;
        let seeds = cluster.servers().iter().take(SEEDS);
        let seeds: Vec<_> = seeds.map(|server| address_of(&server.socket())).collect();
        let regions = || {
            let copies = cluster.map().shards.iter().flat_map(|view| &view.copies);
            copies.map(|copy| copy.region_id)
        };
        // As `arguments` writes it.
        let region_bytes = memory.region_bytes >> 20 << 20;
        let devices = emulation.map(|it| Devices::new(it.rates, region_bytes, regions()));
        Ok(Self {
            config: ClientConfig { server: Some(seeds.join(",")), ..Default::default() },
            map: Some(cluster.map().clone()),
            devices: devices.map(Arc::new),
            processes: cluster.servers().iter().map(Daemon::process).collect(),
            own: Some(Own::Cluster(cluster)),
        })
    }

    /// Whether the server was started for this run.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The number of servers, one for each shard.
    pub fn servers(&self) -> u16 {
        self.map.as_ref().map_or(1, |map| map.shards.len() as u16)
    }

    /// The expense of its processes so far, if they are known.
    pub fn usage(&self) -> Option<ServerUsage> {
        let usages = self.processes.iter().map(|process| ServerUsage::of(*process).ok());
        usages.collect::<Option<Vec<_>>>()?.into_iter().reduce(ServerUsage::plus)
    }

    /// Connects to it without the client library; in a cluster, to the server of the first shard.
    pub fn raw_connection(&self) -> Result<RawConnection> {
        RawConnection::connect_to(&self.config, self.map.as_ref().map(|map| &map.shards[0]))
    }

    /// The name of the fabric that leads to it.
    pub fn fabric(&self) -> &str {
        self.config
            .server
            .as_deref()
            .and_then(|server| server.split("://").next())
            .unwrap_or_default()
    }
}

/// The map of the cluster that these servers are a part of. `None` without a cluster, and if they
/// do not answer: then connecting says why.
fn map_of(config: &ClientConfig) -> Option<ClusterMap> {
    let options = config.connect_options(Role::Reader).ok()?;
    let (map, _) = options.fetch_map(Duration::from_millis(ANSWER_TIMEOUT_MS)).ok()?;
    Some(map)
}

/// The processes of all servers, if they are on this host.
fn processes_of(map: &ClusterMap) -> Vec<u32> {
    let process = |copy: &ShardCopy| {
        copy.reachable().find_map(|address| accounting::process_at(&address.to_string()))
    };
    let processes = map.shards.iter().map(|view| process(view.copies.first()?));
    processes.collect::<Option<_>>().unwrap_or_default()
}

fn program() -> Result<PathBuf> {
    let this = std::env::current_exe().map_err(Error::system("finding this program"))?;
    let beside = this.parent().unwrap_or(Path::new("/")).to_owned();
    find_program("kv-server", Some(&beside)).ok_or(Error::NoServerProgram { beside })
}

fn arguments(socket: &Path, memory: &ServerMemory) -> Vec<String> {
    let with = |flag: &str, value: String| [flag.to_owned(), value];
    [
        with("--listen", address_of(socket)),
        with("--memory", format!("{}MiB", memory.region_bytes >> 20)),
        with("--index", format!("{}KiB", memory.index_bytes >> 10)),
        with("--value-bytes-max", memory.value_bytes_max.to_string()),
    ]
    .concat()
}

/// Whether the server at this socket is ready. It listens long before its memory is ready, so only
/// a connection shows that it is.
fn is_ready(socket: &Path) -> bool {
    let server = Some(address_of(socket));
    let config =
        ClientConfig { server, connect_timeout_ms: Some(ANSWER_TIMEOUT_MS), ..Default::default() };
    RawConnection::connect(&config).and_then(RawConnection::give_back).is_ok()
}

fn address_of(socket: &Path) -> String {
    Address::Shm(socket.to_owned()).to_string()
}

/// How long a client trusts a server that has answered: the default of `kv-cli cluster create`.
const TRUST_MS: u32 = 2000;

/// The cluster. Its servers are stopped when this is dropped, and its records are removed.
pub struct OwnCluster {
    /// One for each shard, not in their order. Declared before the records, which they still use.
    servers: Vec<Daemon>,
    map: ClusterMap,
    _records: TempDir,
}

impl OwnCluster {
    /// Makes a cluster of so many shards, and waits until each has a server. `spawn` starts a
    /// server for the cluster with this URI.
    pub fn start(
        shards: u16,
        spawn: impl Fn(&str) -> Result<Daemon>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let records = tempfile::Builder::new()
            .prefix("kv-bench-")
            .tempdir()
            .map_err(Error::system("making a temporary folder"))?;
        interrupt.remove_at_exit(records.path());
        let uri = format!("file://{}", records.path().join("records").display());
        let store = farside_cluster::open(&uri, &StoreOptions::default())?;
        create(&*store, shards)?;
        let mut cluster =
            Self { servers: Vec::new(), map: store.read()?.map()?, _records: records };
        for _ in 0..shards {
            cluster.servers.push(spawn(&uri)?);
        }
        let have_servers =
            || Ok(store.read()?.map()?.shards.iter().all(|view| !view.copies.is_empty()));
        Daemon::wait_for(&mut cluster.servers, have_servers, interrupt)?;
        cluster.map = store.read()?.map()?;
        Ok(cluster)
    }

    /// The servers, not in the order of their shards.
    pub fn servers(&self) -> &[Daemon] {
        &self.servers
    }

    /// The map, in which each shard has its server.
    pub fn map(&self) -> &ClusterMap {
        &self.map
    }
}

impl Drop for OwnCluster {
    fn drop(&mut self) {
        self.servers.iter().for_each(Daemon::ask_to_stop);
    }
}

fn create(store: &dyn RecordStore, shards: u16) -> Result<()> {
    let random = || random_id().map_err(Error::system("getting random numbers"));
    let record = ClusterRecord::new(random()?, random()?, shards, TRUST_MS);
    let shards = (0..shards).map(|shard| ShardRecord::default().change(shard));
    let changes: Vec<_> = std::iter::once(record.change()).chain(shards).collect();
    match store.commit(&[], &changes)? {
        Commit::Done => Ok(()),
        // The folder is new, and no other process knows it.
        Commit::Refused => Err(Error::Panicked),
    }
}
