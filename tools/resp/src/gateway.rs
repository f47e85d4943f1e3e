//! What all threads of the gateway share: the client, the settings, the list of connections, the
//! figures of the store, and which shards of a cluster do not answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farside::{Client, Error, Limits, ServerStatistics, Session};
use farside_fabric::tcp::TlsServer;
use farside_layout::CHUNK_BYTES;

use crate::listen::Accepted;

/// The input that may wait in all connections, in bytes.
const WAITING_BYTES_MAX: usize = 512 << 20;

/// A connection's part of the input that waits because clients do not take their replies.
pub(crate) struct WaitingInput {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl WaitingInput {
    /// Notes how many bytes of this connection wait.
    pub(crate) fn set(&mut self, bytes: usize) {
        // Wraps around if it is less than before.
        self.all.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::Relaxed);
        self.bytes = bytes;
    }

    pub(crate) fn is_some(&self) -> bool {
        self.bytes > 0
    }

    /// Whether more may wait in all connections.
    pub(crate) fn has_room(&self) -> bool {
        self.all.load(Ordering::Relaxed) < WAITING_BYTES_MAX
    }
}

impl Drop for WaitingInput {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Limit on the connections that have not logged in, if clients have to.
const STRANGERS_MAX: usize = 256;

/// All connections.
#[derive(Default)]
struct Clients {
    /// By their numbers.
    all: BTreeMap<u64, Arc<ClientRecord>>,
    /// The numbers of those that have not logged in or have no request yet, by their hosts; `None`
    /// for Unix sockets.
    strangers: HashMap<Option<IpAddr>, BTreeSet<u64>>,
    strangers_count: usize,
}

impl Clients {
    /// Removes the oldest stranger of the host with most strangers, if there is any. So strangers
    /// lock no client out, and one host does not lock out the others.
    fn remove_stranger(&mut self) -> Option<Arc<ClientRecord>> {
        let most = self.strangers.values().max_by_key(|numbers| numbers.len())?;
        self.remove(*most.first()?)
    }

    fn remove(&mut self, id: u64) -> Option<Arc<ClientRecord>> {
        let record = self.all.remove(&id)?;
        self.note_known(&record);
        record.has_ended.store(true, Ordering::Relaxed);
        Some(record)
    }

    /// Notes that a connection belongs to no stranger.
    fn note_known(&mut self, record: &ClientRecord) {
        if let Some(numbers) = self.strangers.get_mut(&record.host)
            && numbers.remove(&record.id)
        {
            self.strangers_count -= 1;
            if numbers.is_empty() {
                self.strangers.remove(&record.host);
            }
        }
    }
}

/// The gateway, for all of its threads.
pub(crate) struct Gateway {
    pub(crate) client: Client,
    /// The address of the store, for INFO.
    pub(crate) server: String,
    /// The password that clients need, if they do.
    pub(crate) password: Option<Vec<u8>>,
    pub(crate) limits: Limits,
    pub(crate) tls: Option<TlsServer>,
    pub(crate) threads: usize,
    pub(crate) clients_max: usize,
    /// A connection that was idle for so many seconds is closed; 0 for never.
    pub(crate) idle_s_max: u32,
    pub(crate) started: Instant,
    pub(crate) is_stopping: AtomicBool,
    pub(crate) counts: Counts,
    /// The input that waits in all connections, in bytes.
    waiting: Arc<AtomicUsize>,
    clients: Mutex<Clients>,
    /// What the store has told last.
    figures: Mutex<StoreFigures>,
    /// The wrong passwords that were not logged yet, and the address of the last client.
    wrong_passwords: Mutex<(u64, String)>,
    /// The shards of a cluster that do not answer.
    away_shards: AwayShards,
    /// The number of the next connection.
    next_id: AtomicU64,
}

/// Counts for INFO.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) connections: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) commands: AtomicU64,
}

/// What CLIENT LIST says about a connection.
#[derive(Debug)]
pub(crate) struct ClientRecord {
    pub(crate) id: u64,
    pub(crate) address: String,
    pub(crate) local_address: String,
    /// The client's host, for TCP.
    pub(crate) host: Option<IpAddr>,
    pub(crate) descriptor: i32,
    /// The number of the worker that serves it.
    pub(crate) worker: usize,
    /// Its place in the worker, once it has one.
    pub(crate) place: AtomicUsize,
    pub(crate) since: Instant,
    pub(crate) name: Mutex<String>,
    /// 2 or 3.
    pub(crate) protocol: AtomicU8,
    /// The number of the last command in the table.
    pub(crate) command: AtomicU8,
    /// When the last request came, in milliseconds after `since`.
    pub(crate) active_ms: AtomicU64,
    /// Whether the connection has ended.
    pub(crate) has_ended: AtomicBool,
}

impl ClientRecord {
    pub(crate) fn name(&self) -> MutexGuard<'_, String> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time since the connection began, in milliseconds.
    pub(crate) fn age_ms(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }
}

/// The gateway's settings.
pub(crate) struct Settings {
    pub(crate) server: String,
    pub(crate) password: Option<Vec<u8>>,
    pub(crate) tls: Option<TlsServer>,
    pub(crate) threads: usize,
    pub(crate) clients_max: usize,
    pub(crate) idle_s_max: u32,
}

impl Gateway {
    pub(crate) fn new(client: Client, limits: Limits, settings: Settings) -> Self {
        let Settings { server, password, tls, threads, clients_max, idle_s_max } = settings;
        Self {
            client,
            server,
            password,
            limits,
            tls,
            threads,
            clients_max,
            idle_s_max,
            started: Instant::now(),
            is_stopping: AtomicBool::new(false),
            counts: Counts::default(),
            waiting: Arc::default(),
            away_shards: AwayShards::default(),
            clients: Mutex::default(),
            figures: Mutex::default(),
            wrong_passwords: Mutex::default(),
            next_id: AtomicU64::new(1),
        }
    }

    /// The part of a new connection in the input that waits.
    pub(crate) fn waiting_input(&self) -> WaitingInput {
        WaitingInput { all: self.waiting.clone(), bytes: 0 }
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, which `worker` is to serve; `None` if there are as many as there may be.
    /// Also returns the one whose place it takes, if it takes one: that has to be closed.
    pub(crate) fn admit(
        &self,
        accepted: &Accepted,
        worker: usize,
    ) -> Option<(Arc<ClientRecord>, Option<Arc<ClientRecord>>)> {
        let mut clients = self.clients();
        let must_log_in = self.password.is_some() || self.tls.is_some();
        let strangers_max = if must_log_in { STRANGERS_MAX } else { usize::MAX };
        let is_full = clients.all.len() >= self.clients_max;
        let stranger = (is_full || clients.strangers_count >= strangers_max)
            .then(|| clients.remove_stranger())
            .flatten();
        if is_full && stranger.is_none() {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.counts.connections.fetch_add(1, Ordering::Relaxed);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let record = Arc::new(ClientRecord {
            id,
            address: accepted.peer.clone(),
            local_address: accepted.local.clone(),
            host: accepted.host,
            descriptor: accepted.socket.as_raw_fd(),
            worker,
            place: AtomicUsize::new(usize::MAX),
            since: Instant::now(),
            name: Mutex::default(),
            protocol: AtomicU8::new(2),
            command: AtomicU8::new(0),
            active_ms: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
        });
        clients.all.insert(id, Arc::clone(&record));
        clients.strangers.entry(record.host).or_default().insert(id);
        clients.strangers_count += 1;
        Some((record, stranger))
    }

    /// Notes that the client of a connection has logged in, if it has to, and sent a request.
    pub(crate) fn note_known(&self, record: &ClientRecord) {
        self.clients().note_known(record);
    }

    /// Asks the store for its figures. If it does not tell, the former ones stay.
    pub(crate) fn look_at_store(&self, session: &mut Option<Session>) {
        let mut figures = self.figures();
        let asked = figures.ask(&self.client, session);
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = figures;
        if let Err(error) = asked {
            tracing::debug!("the store tells no figures: {error}");
        }
    }

    /// The figures that the store has told last.
    pub(crate) fn figures(&self) -> StoreFigures {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that a client has given a wrong password.
    pub(crate) fn note_wrong_password(&self, record: &ClientRecord) {
        let mut wrong = self.wrong_passwords.lock().unwrap_or_else(PoisonError::into_inner);
        (wrong.0, wrong.1) = (wrong.0 + 1, record.address.clone());
    }

    /// How many wrong passwords there were since the last call, and the last client's address.
    pub(crate) fn take_wrong_passwords(&self) -> (u64, String) {
        let mut wrong = self.wrong_passwords.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *wrong)
    }

    /// Removes a connection that has ended.
    pub(crate) fn dismiss(&self, id: u64) {
        self.clients().remove(id);
    }

    /// All connections, in the order of their numbers.
    pub(crate) fn records(&self) -> Vec<Arc<ClientRecord>> {
        self.clients().all.values().cloned().collect()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Whether this is the password. The time depends on the length of the given one only.
    pub(crate) fn accepts(&self, password: &[u8]) -> bool {
        let Some(right) = &self.password else { return true };
        let pairs = password.iter().zip(right.iter().cycle());
        let differences = pairs.fold(0, |sum, (a, b)| sum | (a ^ b));
        right.len() == password.len() && differences == 0
    }
}

/// A count of all keys waits for so many times as long as the last one took. So questions of many
/// clients do not make the gateway count all the time.
const COUNT_PAUSES: u32 = 19;

/// Figures of the store, for INFO and CONFIG.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreFigures {
    /// The memory of the index and of the blocks that clients have.
    pub(crate) used_bytes: u64,
    pub(crate) keys: u64,
    pub(crate) keys_evicted: u64,
    pub(crate) keys_expired: u64,
    /// Whether a server evicts keys to make room.
    pub(crate) is_cache: bool,
    /// When the keys were counted last, and how long that took.
    counted: Option<(Instant, Duration)>,
}

impl StoreFigures {
    /// Asks the store for the figures. After an error those that it did not tell are as before.
    fn ask(&mut self, client: &Client, opened: &mut Option<Session>) -> farside::Result<()> {
        let statistics = client.admin().statistics()?;
        self.used_bytes = used_bytes(&statistics);
        self.keys_evicted = statistics.keys_evicted;
        self.keys_expired = statistics.keys_expired;
        self.is_cache = statistics.servers_evicting > 0;
        if self.counted.is_some_and(|(at, took)| at.elapsed() < took * COUNT_PAUSES) {
            return Ok(());
        }
        let session = match opened {
            Some(session) => session,
            None => opened.insert(client.session()?),
        };
        let began = Instant::now();
        self.keys = session.count_keys()?;
        self.counted = Some((Instant::now(), began.elapsed()));
        Ok(())
    }
}

fn used_bytes(statistics: &ServerStatistics) -> u64 {
    let of_blocks = statistics.classes.iter().map(|class| {
        class.blocks.saturating_sub(class.blocks_free).saturating_mul(class.class.block_bytes())
    });
    of_blocks.fold(statistics.chunks_index.saturating_mul(CHUNK_BYTES), u64::saturating_add)
}

/// How often a shard that is away is asked.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

/// The shards that are away, each with a thread that asks for it.
#[derive(Debug, Default)]
struct AwayShards(Mutex<BTreeSet<u16>>);

impl AwayShards {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes that an operation has failed. Logs it if a shard of a cluster is away that was not away
/// before. Another line tells when it is back. The sessions go on meanwhile with the other shards.
pub(crate) fn note_away_shard(gateway: &Arc<Gateway>, error: &Error) {
    let Error::Unavailable { shard, server, .. } = error else { return };
    let shard = *shard;
    if !gateway.away_shards.lock().insert(shard) {
        return;
    }
    tracing::warn!(
        shard,
        "FS-061 lost the connection to a shard of the store, which was at {server}; clients get \
         errors for its keys until it is back"
    );
    let gateway = gateway.clone();
    let ask = move || {
        while gateway.client.admin().shard(shard).statistics().is_err() {
            if gateway.is_stopping() {
                return;
            }
            thread::sleep(ASK_INTERVAL);
        }
        gateway.away_shards.lock().remove(&shard);
        tracing::info!(shard, "FS-062 the shard of the store answers again");
    };
    if let Err(error) = thread::Builder::new().name("resp-shard".into()).spawn(ask) {
        // It stays in the set: otherwise each failed operation would log it again.
        tracing::debug!(shard, "cannot start a thread that waits for the shard: {error}");
    }
}
