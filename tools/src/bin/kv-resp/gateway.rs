//! What all threads of the gateway share: the client, the settings, and the list of connections.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use farside::{Client, Limits};
use farside_fabric::tcp::TlsServer;

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
    pub(crate) started: Instant,
    pub(crate) is_stopping: AtomicBool,
    pub(crate) counts: Counts,
    /// All connections, by their numbers.
    clients: Mutex<BTreeMap<u64, Arc<ClientRecord>>>,
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
    pub(crate) descriptor: i32,
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
}

impl Gateway {
    pub(crate) fn new(client: Client, limits: Limits, settings: Settings) -> Self {
        let Settings { server, password, tls, threads, clients_max } = settings;
        Self {
            client,
            server,
            password,
            limits,
            tls,
            threads,
            clients_max,
            started: Instant::now(),
            is_stopping: AtomicBool::new(false),
            counts: Counts::default(),
            clients: Mutex::default(),
            next_id: AtomicU64::new(1),
        }
    }

    fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<ClientRecord>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection; `None` if there are as many as there may be.
    pub(crate) fn admit(
        &self,
        address: String,
        local_address: String,
        descriptor: i32,
    ) -> Option<Arc<ClientRecord>> {
        let mut clients = self.clients();
        if clients.len() >= self.clients_max {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.counts.connections.fetch_add(1, Ordering::Relaxed);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let record = Arc::new(ClientRecord {
            id,
            address,
            local_address,
            descriptor,
            since: Instant::now(),
            name: Mutex::default(),
            protocol: AtomicU8::new(2),
            command: AtomicU8::new(0),
            active_ms: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
        });
        clients.insert(id, Arc::clone(&record));
        Some(record)
    }

    /// Removes a connection that has ended.
    pub(crate) fn dismiss(&self, id: u64) {
        if let Some(record) = self.clients().remove(&id) {
            record.has_ended.store(true, Ordering::Relaxed);
        }
    }

    /// All connections, in the order of their numbers.
    pub(crate) fn records(&self) -> Vec<Arc<ClientRecord>> {
        self.clients().values().cloned().collect()
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
