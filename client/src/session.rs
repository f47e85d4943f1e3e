//! The door: synchronous calls on one session.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_control::Role;
use farside_fabric::{Buffer, Counters};

use farside_protocol::{Action, Answer, Expected, Failure, Found, LANE, Lifetime, OpenRegion};

use crate::client::ClientInner;
use crate::connection::{ServerConnection, SessionEngine, SessionRegion};
use crate::reconnecting::ReconnectBudget;
use crate::{
    Batch, CacheStatistics, Contact, Error, Exchange, Limits, OperationError, Pipeline, Result,
    Scan, Store, Value, Version,
};

/// How often a compare-and-exchange with an absent key starts over because the key comes and goes.
const EXCHANGE_ATTEMPTS_MAX: u32 = 64;

/// One thread's way to the region: its own lanes and free blocks; the location cache is the
/// client's. `Send`, but not `Sync`.
///
/// Every call returns when its operation is done. For many in flight see [`Session::pipeline`] and
/// [`Session::batch`]. The round trips and verbs in the descriptions are counted by tests.
pub struct Session {
    shared: Arc<ClientInner>,
    connected: ConnectedEngine,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = self.shared.server();
        f.debug_struct("Session").field("server", &server).finish_non_exhaustive()
    }
}

/// What a session has of one connection.
struct ConnectedEngine {
    /// Before the connection, so that it is dropped first and its blocks go back.
    region: OpenRegion,
    engine: SessionEngine,
    connection: Arc<ServerConnection>,
}

impl ConnectedEngine {
    fn new(shared: &ClientInner) -> Result<Self> {
        let mut losses = ReconnectBudget::default();
        loop {
            let connection = shared.connection()?;
            match shared.open(&connection)? {
                Ok((engine, region)) => return Ok(Self { region, engine, connection }),
                // A server may be killed again before it showed anything.
                Err(failure) => shared.failed(&connection, failure).map_or(Ok(()), Err)?,
            }
            losses.add(shared)?;
        }
    }

    #[inline]
    fn handle(&self) -> SessionRegion<'_> {
        self.engine.at(&self.region)
    }

    /// If a pipeline was forgotten, and with it operations that will not go on, one of them may
    /// have left a PENDING word: without a goodbye the server looks for it.
    fn leave(&self) {
        if self.engine.pipelined.get() {
            self.connection.control.give_up();
        }
    }
}

impl Drop for ConnectedEngine {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Session {
    pub(crate) fn open(shared: Arc<ClientInner>) -> Result<Self> {
        let connected = ConnectedEngine::new(&shared)?;
        Ok(Self { shared, connected })
    }

    /// The region, on a new connection if the old one was lost.
    #[inline]
    pub(crate) fn handle(&mut self) -> Result<SessionRegion<'_>> {
        if self.connected.connection.control.is_lost() || self.connected.engine.pipelined.get() {
            self.reconnect()?;
        }
        Ok(self.connected.handle())
    }

    #[cold]
    fn reconnect(&mut self) -> Result<()> {
        self.connected.leave();
        self.connected = ConnectedEngine::new(&self.shared)?;
        Ok(())
    }

    /// Runs an operation; again on a new connection if this one turned out to be lost before the
    /// operation happened.
    #[inline]
    pub(crate) fn run<T>(
        &mut self,
        mut operation: impl FnMut(SessionRegion<'_>) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let mut losses = ReconnectBudget::default();
        loop {
            match operation(self.handle()?) {
                Ok(done) => return Ok(done),
                Err(failure) => self.lose(failure, &mut losses)?,
            }
        }
    }

    /// The connection failed; the error if the operation is not to be run again.
    #[cold]
    fn lose(&self, failure: farside_protocol::Failure, losses: &mut ReconnectBudget) -> Result<()> {
        self.shared.failed(&self.connected.connection, failure).map_or(Ok(()), Err)?;
        self.lost(losses)
    }

    /// The connection was lost under operations that have not happened; the error if that is
    /// enough.
    pub(crate) fn lost(&self, losses: &mut ReconnectBudget) -> Result<()> {
        losses.add(&self.shared)
    }

    /// The error for what goes by a region that is gone.
    pub(crate) fn disconnected(&self) -> Error {
        self.shared.disconnected()
    }

    /// The error for operations that the server kept from happening for so long.
    pub(crate) fn unreachable(&self, contact: Contact, tried: Duration) -> Error {
        self.shared.unreachable(contact, tried)
    }

    /// Runs an operation that may change the region.
    #[inline]
    fn change(&mut self, action: Action<'_>, key: &[u8], value: &[u8]) -> Result<Answer> {
        if self.shared.role() == Role::Reader {
            return Err(OperationError::Denied.into());
        }
        self.run(|handle| handle.perform(action, key, value))
    }

    /// Appends a value that a GET left in the block buffer.
    #[inline]
    fn copy(&self, found: &Found, into: &mut Vec<u8>) {
        into.extend_from_slice(
            found.value_in(&self.connected.engine.endpoint.buffer(LANE, Buffer::ReadBlock)),
        );
    }

    fn value(&self, found: &Found) -> Value {
        let mut data = Vec::with_capacity(found.value_bytes as usize);
        self.copy(found, &mut data);
        Value { data, version: found.version }
    }

    /// The value of a key, `None` if it is absent.
    ///
    /// One READ and one round trip if the key's location is cached; two of each if not; one of each
    /// if the key is absent. If others replaced the value since its location was cached, two round
    /// trips with three READs, or three.
    ///
    /// # Errors
    /// [`Error::Operation`]: `KeyEmpty`, `KeyTooLong`, `Contended`; `Layout` if the block is
    /// damaged, and `Unregistered` if the system refuses memory for RDMA. [`Error::Connect`]:
    /// `Unreachable`; if it has to connect anew, also what
    /// [`Client::session`](crate::Client::session) has.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Value>> {
        let found = self.run(|handle| handle.get(key))?;
        Ok(found.map(|found| self.value(&found)))
    }

    /// [`Session::get`] into a buffer of the caller's, whose content is replaced; it is empty
    /// afterwards if the key is absent. Allocates nothing once the buffer is large enough.
    ///
    /// # Errors
    /// As [`Session::get`].
    #[inline]
    pub fn get_into(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<Option<Version>> {
        value.clear();
        let found = self.run(|handle| handle.get(key))?;
        Ok(found.map(|found| {
            self.copy(&found, value);
            found.version
        }))
    }

    /// Stores a value, whether or not the key is there.
    ///
    /// One round trip if the key is there and its location cached (`[WRITE][WRITE][CAS]`, one
    /// doorbell), two if it is there, three if it is new.
    ///
    /// # Errors
    /// [`Error::Operation`]: `KeyEmpty`, `KeyTooLong`, `ValueTooLong`, `OutOfSpace`, `Denied`,
    /// `Contended`, and `Indeterminate` if the connection broke on the way; what else
    /// [`Session::get`] has.
    #[inline]
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.change(Action::Put(Lifetime::Forever), key, value).map(|_| ())
    }

    /// Stores a value that ends after `ttl`: [`Store::ttl`] says when. Then the key is absent.
    ///
    /// Costs what [`Session::put`] costs.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn put_with_ttl(&mut self, key: &[u8], value: &[u8], ttl: Duration) -> Result<()> {
        self.store(key, value, Store::always().ttl(ttl)).map(|_| ())
    }

    /// Stores a value under a condition, for ever or for a time; false if the condition did not
    /// hold.
    ///
    /// Costs what [`Session::put`], [`Session::insert`], [`Session::update`] or
    /// [`Session::compare_exchange`] cost.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn store(&mut self, key: &[u8], value: &[u8], store: Store<'_>) -> Result<bool> {
        Ok(self.change(store.action(), key, value)?.applied)
    }

    /// Stores a value only if the key is absent; false if it was there.
    ///
    /// Three round trips, two where the index has much room; one if the key was there, two if its
    /// value may end: it was stored with a TTL, or under a condition.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        Ok(self.change(Action::Insert(Lifetime::Forever), key, value)?.applied)
    }

    /// Stores a value only if the key is there; false if it was absent.
    ///
    /// One round trip if the key's location is cached, two if not; one if the key was absent. One
    /// more if its value was stored with a TTL, or, uncached, under a condition: it may have ended.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn update(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        Ok(self.change(Action::Update(Lifetime::Forever), key, value)?.applied)
    }

    /// Removes a key; false if it was absent.
    ///
    /// One round trip if the key's location is cached, two if not; one if the key was absent.
    ///
    /// # Errors
    /// [`Error::Operation`]: `KeyEmpty`, `KeyTooLong`, `Denied`, `Contended`, `Indeterminate`; what
    /// else [`Session::get`] has.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool> {
        Ok(self.change(Action::Delete, key, &[])?.applied)
    }

    /// Stores `new` only if the key's value is `expected`; with `None`, only if it is absent.
    ///
    /// A GET and one round trip more; with `None` those of [`Session::insert`], and of a GET if the
    /// key was there. Compares whole values: for large ones [`Session::compare_exchange_version`]
    /// is cheaper.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn compare_exchange(
        &mut self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: &[u8],
    ) -> Result<Exchange> {
        if let Some(expected) = expected {
            return self.exchange(key, Expected::Value(expected), new);
        }
        for _ in 0..EXCHANGE_ATTEMPTS_MAX {
            if self.insert(key, new)? {
                return Ok(Exchange::Exchanged);
            }
            // It was there: its value, unless another client deletes it first.
            if let Some(value) = self.get(key)? {
                return Ok(Exchange::Mismatch(Some(value)));
            }
        }
        Err(OperationError::Contended { attempts: EXCHANGE_ATTEMPTS_MAX }.into())
    }

    /// Stores `new` only if the key's value still comes from the write `expected`.
    ///
    /// A GET and one round trip more.
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn compare_exchange_version(
        &mut self,
        key: &[u8],
        expected: Version,
        new: &[u8],
    ) -> Result<Exchange> {
        self.exchange(key, Expected::Version(expected), new)
    }

    fn exchange(&mut self, key: &[u8], expected: Expected<'_>, new: &[u8]) -> Result<Exchange> {
        let answer = self.change(Action::Exchange(expected, Lifetime::Forever), key, new)?;
        if answer.applied {
            return Ok(Exchange::Exchanged);
        }
        Ok(Exchange::Mismatch(answer.found.map(|found| self.value(&found))))
    }

    /// Up to `pipeline_depth` operations in flight on this thread.
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if it has to connect anew.
    pub fn pipeline(&mut self) -> Result<Pipeline<'_>> {
        self.pipeline_of(usize::MAX)
    }

    /// [`Session::pipeline`] for so many operations: making it costs as much as it has lanes.
    pub(crate) fn pipeline_of(&mut self, operations: usize) -> Result<Pipeline<'_>> {
        self.handle()?;
        let Self { connected, shared } = self;
        Ok(Pipeline::new(connected.handle(), &connected.connection, shared, operations))
    }

    /// Collects operations that then run together, with one doorbell for all of them.
    pub fn batch<'d>(&mut self) -> Batch<'_, 'd> {
        Batch::new(self)
    }

    /// Iterates over all keys and values, in no particular order.
    ///
    /// Weakly consistent: a key that is there from the first to the last step comes exactly once,
    /// also when the index grows meanwhile, with a value it had at some moment of the scan. A key
    /// that is inserted or deleted meanwhile comes at most once. When the connection is lost the
    /// scan goes on with the next one.
    ///
    /// One round trip an entry, more when its value is replaced under the scan's eyes, and one a
    /// subtable, more while it is split.
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if it has to connect anew. The scan's own
    /// end it, as does [`Error::Disconnected`] where the region is another one now, except those
    /// that are about one entry: [`Error::Operation`] with `Layout`, `Contended` or `Unregistered`.
    pub fn scan(&mut self) -> Result<Scan<'_>> {
        Scan::new(self)
    }

    /// What this session asked of the fabric on its present connection.
    #[inline]
    pub fn counters(&self) -> Counters {
        self.connected.engine.counters()
    }

    /// What the location cache did for this session on the present connection.
    pub fn cache_statistics(&self) -> CacheStatistics {
        self.connected.region.lookups.statistics()
    }

    /// Forgets all cached locations, for all sessions of the client; not what others are learning
    /// meanwhile.
    pub fn clear_cache(&mut self) {
        self.connected.region.cache.clear();
    }

    /// What the region allows.
    pub fn limits(&self) -> Limits {
        let format = &self.connected.region.format;
        Limits {
            key_bytes_max: format.key_bytes_max as usize,
            value_bytes_max: format.value_bytes_max as usize,
            region_bytes: format.region_bytes,
            grace: Duration::from_millis(format.grace_ms.into()),
        }
    }
}
