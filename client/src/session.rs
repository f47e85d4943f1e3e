//! Synchronous calls on one session: where every operation of the library starts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_control::Role;
use farside_fabric::{Buffer, Counters};

use farside_layout::hash::KeyHash;
use farside_protocol::{
    Action, Answer, Failure, Found, LANE, Lifetime, OperationKind, RetryReason, Version,
};
use serde::Serialize;

use crate::batch::BatchMemory;
use crate::client_inner::ClientInner;
use crate::connection::SessionRegion;
use crate::metrics::ClientMetrics;
use crate::pipeline::PipelineMemory;
use crate::reconnecting::ReconnectBudget;
use crate::session_regions::{OpenShard, SessionRegions};
use crate::{CacheStatistics, Error, OperationError, Outcome, ReadValue, Result, Store, Value};

/// The limits of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: usize,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
    /// The length of the region, in bytes.
    pub region_bytes: u64,
    /// How long an unlinked block stays untouched: GRACE.
    pub grace: Duration,
}

/// One thread's access to the store, with its own lanes and free blocks. All sessions of a client
/// share one location cache. `Send`, but not `Sync`.
///
/// In a cluster the session connects to a shard when an operation first needs it. If a shard cannot
/// be reached, its keys fail with [`Error::Unavailable`](crate::Error::Unavailable), within the
/// timeout for connecting or at once if it is known to be down. All other keys go on.
///
/// Every call returns when its operation has completed. To have many operations in flight, see
/// [`Session::pipeline`] and [`Session::batch`]. Tests count the round trips and verbs that the
/// descriptions state.
pub struct Session {
    pub(crate) shared: Arc<ClientInner>,
    pub(crate) regions: SessionRegions,
    pub(crate) batch_memory: BatchMemory,
    pub(crate) pipeline_memory: PipelineMemory,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = self.shared.server();
        f.debug_struct("Session").field("server", &server).finish_non_exhaustive()
    }
}

impl Session {
    pub(crate) fn open(shared: Arc<ClientInner>) -> Result<Self> {
        let metrics = shared.metrics.as_ref().map(ClientMetrics::add_session);
        let regions = SessionRegions::new(&shared, metrics.as_ref())?;
        let (batch_memory, pipeline_memory) = Default::default();
        Ok(Self { shared, regions, batch_memory, pipeline_memory })
    }

    /// The number of shards.
    pub(crate) fn shards(&self) -> usize {
        self.regions.shards()
    }

    /// Opens the region of a shard, after reconnecting if the connection was lost.
    #[cold]
    fn connect(&mut self, shard: usize) -> Result<()> {
        let is_leaked = self.regions.engine.pipelined.get();
        if is_leaked || self.shared.cluster.is_none() {
            self.regions.give_up_if_leaked();
            let metrics = self.regions.metrics.clone();
            self.regions.count_traffic();
            self.regions = SessionRegions::new(&self.shared, metrics.as_ref())?;
        }
        if self.regions.live(shard).is_none() {
            self.regions.open(&self.shared, shard)?;
        }
        Ok(())
    }

    /// Returns the region of a shard and the engine, after reconnecting if the connection was lost.
    pub(crate) fn handle(&mut self, shard: usize) -> Result<SessionRegion<'_>> {
        loop {
            let is_leaked = self.regions.engine.pipelined.get();
            if !is_leaked && self.regions.live(shard).is_some() {
                break;
            }
            self.connect(shard)?;
        }
        // It is live, or was a moment ago.
        let open = self.regions.latest(shard);
        let open = open.ok_or_else(|| self.shared.disconnected(shard))?;
        Ok(self.regions.at(open))
    }

    /// Runs an operation on a key, which gets its hash. If the connection was lost before the
    /// operation took effect, runs it again on a new one.
    #[inline]
    pub(crate) fn run<T>(
        &mut self,
        kind: OperationKind,
        key: &[u8],
        mut operation: impl FnMut(
            SessionRegion<'_>,
            (KeyHash, &[u8]),
        ) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let (hash, shard) = self.regions.route(key);
        let mut hashed = (hash, key);
        let mut budget = ReconnectBudget::default();
        // One call of `operation`, so that it is inlined.
        loop {
            // If the connection is lost, the trust has ended, and the operation fails.
            let failure = match self.regions.latest(shard) {
                Some(open) if !self.regions.engine.pipelined.get() => {
                    match operation(self.regions.at(open), hashed) {
                        Ok(result) => return Ok(result),
                        Err(failure) => Some(failure),
                    }
                }
                _ => None,
            };
            hashed = self.recover_and_hash(kind, key, shard, failure, &mut budget)?;
        }
    }

    /// As [`Session::run`], for an operation on all keys of a shard.
    pub(crate) fn run_on_shard<T>(
        &mut self,
        shard: usize,
        mut operation: impl FnMut(SessionRegion<'_>) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let mut budget = ReconnectBudget::default();
        loop {
            let handle = self.handle(shard)?;
            let begun = handle.begin_measuring(LANE.0..LANE.0 + 1, || 0);
            let result = operation(handle);
            if let Some(begun) = begun {
                handle.end_measuring(&begun, LANE.0..LANE.0 + 1);
            }
            match result {
                Ok(result) => return Ok(result),
                Err(failure) => self.recover(shard, Some(failure), &mut budget)?,
            }
        }
    }

    /// Handles the failure of an operation, if it has one. Reconnects if the connection was lost.
    #[cold]
    fn recover(
        &mut self,
        shard: usize,
        failure: Option<Failure>,
        budget: &mut ReconnectBudget,
    ) -> Result<()> {
        if let Some(failure) = failure {
            let open = self.regions.latest(shard);
            let connection = &open.ok_or_else(|| self.shared.disconnected(shard))?.connection;
            let error = self.shared.handle_failure(shard, connection, failure);
            error.map_or(Ok(()), Err)?;
            self.shared.count_loss(shard, budget)?;
        }
        self.handle(shard).map(drop)
    }

    /// As [`Session::recover`]. Returns the key with its hash, because another region may have
    /// another one. Counts the failure or the retry.
    #[cold]
    fn recover_and_hash<'k>(
        &mut self,
        kind: OperationKind,
        key: &'k [u8],
        shard: usize,
        failure: Option<Failure>,
        budget: &mut ReconnectBudget,
    ) -> Result<(KeyHash, &'k [u8])> {
        let is_retry = failure.is_some();
        let recovered = self.recover(shard, failure, budget);
        if let Some(metrics) = &self.regions.metrics {
            match &recovered {
                Ok(()) if is_retry => metrics.operations.add_retry(RetryReason::Connection),
                Ok(()) => {}
                Err(error) => metrics.add_error(kind, error),
            }
        }
        recovered?;
        Ok((self.regions.route(key).0, key))
    }

    /// Runs an operation that may change the region.
    #[inline]
    pub(crate) fn change(
        &mut self,
        action: Action<'_>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Answer> {
        let kind = OperationKind::of(action);
        self.check_role(kind)?;
        self.run(kind, key, |handle, key| handle.perform(action, key, value))
    }

    /// Refuses an operation of this kind, which changes the region, if the client is a reader.
    #[inline]
    pub(crate) fn check_role(&self, kind: OperationKind) -> Result<()> {
        match self.shared.role() {
            Role::Reader => Err(self.denied(kind)),
            Role::Writer => Ok(()),
        }
    }

    #[cold]
    fn denied(&self, kind: OperationKind) -> Error {
        let error = OperationError::Denied.into();
        self.count_error(kind, &error);
        error
    }

    /// Counts an operation that failed.
    pub(crate) fn count_error(&self, kind: OperationKind, error: &Error) {
        if let Some(metrics) = &self.regions.metrics {
            metrics.add_error(kind, error);
        }
    }

    /// Appends the value that a GET left in the lane's [`Buffer::ReadBlock`].
    #[inline]
    pub(crate) fn copy(&self, found: &Found, into: &mut Vec<u8>) {
        into.extend_from_slice(
            found.value_in(&self.regions.engine.endpoint.buffer(LANE, Buffer::ReadBlock)),
        );
    }

    pub(crate) fn outcome(&self, Answer { applied, version, number, found }: Answer) -> Outcome {
        Outcome { applied, version, value: found.map(|found| self.value(&found)), number }
    }

    fn value(&self, found: &Found) -> Value {
        let mut data = Vec::with_capacity(found.value_bytes as usize);
        self.copy(found, &mut data);
        Value { data, version: found.version }
    }

    /// Returns the value of a key; `None` if the key is absent.
    ///
    /// One READ and one round trip if the key's location is cached; two of each if not; one of each
    /// if the key is absent. If another session replaced the value since its location was cached:
    /// two round trips with three READs, or three round trips.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// assert_eq!(session.get("greeting")?.expect("it was just put"), "hello");
    /// assert!(session.get("absent")?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation): `KeyEmpty`, `KeyTooLong`, `Contended`;
    /// `Layout` if the block is damaged, and `Unregistered` if the system refuses memory for RDMA.
    /// [`Error::Connect`](crate::Error::Connect): `Unreachable`. If the call reconnects, also the
    /// errors of [`Client::session`](crate::Client::session).
    pub fn get(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        let mut data = Vec::new();
        let read = self.get_bytes(key.as_ref(), &mut data)?;
        Ok(read.map(|ReadValue { version, .. }| Value { data, version }))
    }

    /// [`Session::get_into`] a vector.
    // Not inlined, because tools/scripts/instructions.sh counts the instructions of the call.
    #[inline(never)]
    pub(crate) fn get_bytes(
        &mut self,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<Option<ReadValue>> {
        let read = self.run(OperationKind::Get, key, |handle, key| handle.get_into(key, value));
        read.inspect_err(|_| value.clear())
    }

    /// As [`Session::get_into`], but only if a READ of the cached location answers it. Does not
    /// reconnect. Never waits if [`Session::executes_at_once`].
    #[inline]
    pub(crate) fn get_at_once(&self, key: &[u8], value: &mut Vec<u8>) -> Option<Version> {
        self.get_cached(key, u32::MAX, value)
    }

    /// Whether chains are executed as soon as they are posted: on shared memory.
    pub(crate) fn executes_at_once(&self) -> bool {
        self.regions.engine.endpoint.fabric().executes_at_once()
    }

    /// Whether a connection was lost, so that the next operation on its shard reconnects.
    pub(crate) fn is_lost(&self) -> bool {
        self.regions.all().any(OpenShard::is_lost)
    }

    /// Stores a value, whether or not the key is present.
    ///
    /// One round trip if the key's location is cached (`[WRITE][WRITE][CAS]`, one doorbell), two if
    /// it is not, three if the key is absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// session.put([0x00, 0xff], vec![7; 1000])?; // any bytes
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation): `KeyEmpty`, `KeyTooLong`, `ValueTooLong`,
    /// `OutOfSpace`, `Denied`, `Contended`, and `Indeterminate` if the connection broke during the
    /// operation; otherwise as [`Session::get`].
    #[inline]
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        self.put_bytes(key.as_ref(), value.as_ref())
    }

    // Not inlined, because tools/scripts/instructions.sh counts the instructions of the call.
    #[inline(never)]
    fn put_bytes(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.check_role(OperationKind::Put)?;
        self.run(OperationKind::Put, key, |handle, key| handle.put(Lifetime::FOREVER, key, value))
            .map(drop)
    }

    /// Stores a value that expires after `ttl`, as [`Store::ttl`] describes. Then the key is
    /// absent.
    ///
    /// Takes as many round trips as [`Session::put`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_with_ttl("session:42", "alice", std::time::Duration::from_secs(15 * 60))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn put_with_ttl(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> Result<()> {
        self.store(key, value, Store::always().ttl(ttl)).map(|_| ())
    }

    /// Stores a value with a condition, a TTL, or both. [`Outcome::applied`] is false if the
    /// condition did not hold.
    ///
    /// Takes as many round trips as [`Session::put`], [`Session::insert`], [`Session::update`] or
    /// [`Session::compare_exchange`] with this condition.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// assert!(session.store("leader", "first", Store::if_absent().returning())?.applied);
    /// let outcome = session.store("leader", "second", Store::if_absent().returning())?;
    /// assert!(!outcome.applied);
    /// assert_eq!(outcome.value.expect("the key is present"), "first");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn store(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        store: Store<'_>,
    ) -> Result<Outcome> {
        let answer = self.change(store.action(), key.as_ref(), value.as_ref())?;
        Ok(self.outcome(answer))
    }

    /// Stores a value only if the key is absent. Returns false if it was present.
    ///
    /// Three round trips, or two where the index has much room. If the key was present: one, or two
    /// if its word leaves open whether the value has expired, as after a store with a TTL or a
    /// condition.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert!(session.insert("owner", "first")?);
    /// assert!(!session.insert("owner", "second")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn insert(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<bool> {
        let action = Action::Insert(Lifetime::FOREVER);
        Ok(self.change(action, key.as_ref(), value.as_ref())?.applied)
    }

    /// Stores a value only if the key is present. Returns false if it was absent.
    ///
    /// One round trip if the key's location is cached, two if not; one if the key was absent. One
    /// more if the old value may have expired: it was stored with a TTL, or, if the location is not
    /// cached, with a condition.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert!(!session.update("owner", "first")?);
    /// session.put("owner", "first")?;
    /// assert!(session.update("owner", "second")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn update(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<bool> {
        let action = Action::Update(Lifetime::FOREVER);
        Ok(self.change(action, key.as_ref(), value.as_ref())?.applied)
    }

    /// Removes a key. Returns false if it was absent.
    ///
    /// One round trip if the key's location is cached, two if not; one if the key was absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// assert!(session.delete("greeting")?);
    /// assert!(!session.delete("greeting")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation): `KeyEmpty`, `KeyTooLong`, `Denied`,
    /// `Contended`, `Indeterminate`; otherwise as [`Session::get`].
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.change(Action::Delete, key.as_ref(), &[])?.applied)
    }

    /// Counts of the verbs of this session. Without a cluster they start again when it reconnects.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// let before = session.counters();
    /// session.get("greeting")?;
    /// assert_eq!(session.counters().round_trips - before.round_trips, 1);
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn counters(&self) -> Counters {
        self.regions.engine.counters()
    }

    /// This session's hits and misses in the location cache, on its present connections.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// session.get("greeting")?;
    /// assert_eq!(session.cache_statistics().hits, 1);
    /// # Ok(()) }
    /// ```
    pub fn cache_statistics(&self) -> CacheStatistics {
        self.regions.cache_statistics()
    }

    /// Forgets all cached locations of the client, except those that other sessions are caching
    /// meanwhile.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// session.clear_cache();
    /// session.get("greeting")?; // two round trips instead of one
    /// # Ok(()) }
    /// ```
    pub fn clear_cache(&mut self) {
        self.regions.all().for_each(|open| open.region.cache.clear());
    }

    /// Returns the limits of the region; in a cluster those that hold for all shards that the
    /// session has used.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let value = vec![0; session.limits().value_bytes_max];
    /// session.put("largest", value)?;
    /// # Ok(()) }
    /// ```
    pub fn limits(&self) -> Limits {
        let limits = self.regions.all().map(|open| {
            let format = &open.region.format;
            Limits {
                key_bytes_max: format.key_bytes_max as usize,
                value_bytes_max: format.value_bytes_max as usize,
                region_bytes: format.region_bytes,
                grace: Duration::from_millis(format.grace_ms.into()),
            }
        });
        // A session has opened at least one region.
        let least = limits.reduce(|least, other| Limits {
            key_bytes_max: least.key_bytes_max.min(other.key_bytes_max),
            value_bytes_max: least.value_bytes_max.min(other.value_bytes_max),
            region_bytes: least.region_bytes.min(other.region_bytes),
            grace: least.grace.max(other.grace),
        });
        least.unwrap_or_default()
    }
}
