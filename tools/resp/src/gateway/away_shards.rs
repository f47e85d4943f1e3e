//! The log lines about shards of a cluster that do not answer: one when a shard goes away, and one
//! when it is back. The sessions go on meanwhile with the other shards.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use farside::Error;

use super::Gateway;

/// How often a shard that is away is asked.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

/// The shards that are away, each with a thread that asks for it.
#[derive(Debug, Default)]
pub(crate) struct AwayShards(Mutex<BTreeSet<u16>>);

impl AwayShards {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes that an operation has failed. Logs it if a shard is away that was not away before.
pub(crate) fn note(gateway: &Arc<Gateway>, error: &Error) {
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
