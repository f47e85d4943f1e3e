//! The connection to a shard, and the state of the thread that makes it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::Error;
use crate::connection::ServerConnection;
use crate::reconnecting::Reconnecting;

/// The connection to one shard.
pub(crate) struct ShardLink {
    pub(crate) connections: Reconnecting<ServerConnection>,
    /// How often a new connection led to another region than the one before.
    pub(super) regions_replaced: AtomicU64,
    /// How often a connection took the place of a lost one.
    pub(super) reconnects: AtomicU64,
    revival: Mutex<Revival>,
}

/// The thread that connects to a shard, while operations need it.
#[derive(Default)]
pub(super) struct Revival {
    pub(super) is_running: bool,
    pub(super) wanted_at: Option<Instant>,
    /// When the first attempt to connect began; `None` while no attempts are made.
    pub(super) since: Option<Instant>,
    /// Whether an attempt has failed since then.
    pub(super) has_failed: bool,
    /// The shard is down: why it could not be reached within the timeout.
    pub(super) failed: Option<Error>,
}

impl ShardLink {
    pub(crate) fn new(connection: Option<ServerConnection>) -> Self {
        let connections = Reconnecting::new(connection);
        let (regions_replaced, reconnects, revival) = Default::default();
        Self { connections, regions_replaced, reconnects, revival }
    }

    pub(crate) fn regions_replaced(&self) -> u64 {
        self.regions_replaced.load(Ordering::Relaxed)
    }

    pub(crate) fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    pub(super) fn revival(&self) -> MutexGuard<'_, Revival> {
        // Poisoning is ignored: each critical section leaves a valid state.
        self.revival.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
