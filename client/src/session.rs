//! The session skeleton: signatures first.
#![allow(unused_variables, clippy::todo)]
use farside_common::fabric::Counters;

use crate::{Exchange, Result, Value, Version};

/// A connection of one thread to the region.
pub struct Session(());

/// What the location cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Lookups that found the key's location.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
}

impl Session {
    /// The value of a key.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Value>> {
        todo!()
    }
    /// The value of a key, into a buffer that is overwritten (and emptied when the key is absent).
    pub fn get_into(&mut self, key: &[u8], value: &mut Vec<u8>) -> Result<Option<Version>> {
        todo!()
    }
    /// Stores a value, whether or not the key is there.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        todo!()
    }
    /// Stores a value only if the key is absent; false if it was there.
    pub fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Stores a value only if the key is there; false if it was absent.
    pub fn update(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Removes a key; false if it was absent.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool> {
        todo!()
    }
    /// Stores `new` only if the key's value is `expected` (`None`: absent).
    pub fn compare_exchange(
        &mut self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: &[u8],
    ) -> Result<Exchange> {
        todo!()
    }
    /// Stores `new` only if the key's value comes from this write.
    pub fn compare_exchange_version(
        &mut self,
        key: &[u8],
        expected: Version,
        new: &[u8],
    ) -> Result<Exchange> {
        todo!()
    }
    /// Operations in flight side by side on this thread.
    pub fn pipeline(&mut self) -> Pipeline<'_> {
        todo!()
    }
    /// Many operations, one doorbell.
    pub fn batch<'s, 'd>(&'s mut self) -> Batch<'s, 'd> {
        todo!()
    }
    /// All keys and values, weakly consistent.
    pub fn scan(&mut self) -> Scan<'_> {
        todo!()
    }
    /// What this session asked of the fabric so far.
    pub fn counters(&self) -> Counters {
        todo!()
    }
    /// What the location cache did so far.
    pub fn cache_statistics(&self) -> CacheStatistics {
        todo!()
    }
    /// Forgets all cached locations.
    pub fn clear_cache(&mut self) {
        todo!()
    }
}

/// Names an operation in a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The pipeline has no free lane: take a completion first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineFull;

/// Up to `pipeline_depth` operations in flight. Never blocks silently: starting an operation fails
/// with [`PipelineFull`] when all lanes are busy; only [`Pipeline::wait`] waits.
pub struct Pipeline<'s>(&'s ());

impl Pipeline<'_> {
    /// Starts a GET.
    pub fn get(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        todo!()
    }
    /// Starts a PUT. Key and value are copied.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        todo!()
    }
    /// Starts an insert-only PUT.
    pub fn insert(
        &mut self,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        todo!()
    }
    /// Starts an update-only PUT.
    pub fn update(
        &mut self,
        key: &[u8],
        value: &[u8],
    ) -> std::result::Result<Ticket, PipelineFull> {
        todo!()
    }
    /// Starts a DELETE.
    pub fn delete(&mut self, key: &[u8]) -> std::result::Result<Ticket, PipelineFull> {
        todo!()
    }
    /// How many operations are in flight or finished and not taken yet.
    pub fn in_flight(&self) -> usize {
        todo!()
    }
    /// How many can be in flight.
    pub fn depth(&self) -> usize {
        todo!()
    }
    /// A finished operation, if there is one; does not wait.
    pub fn poll(&mut self) -> Option<Completed<'_>> {
        todo!()
    }
    /// The next finished operation; `None` when nothing is in flight.
    pub fn wait(&mut self) -> Option<Completed<'_>> {
        todo!()
    }
    /// What the session asked of the fabric so far.
    pub fn counters(&self) -> Counters {
        todo!()
    }
}

/// A finished operation of a pipeline.
pub struct Completed<'p> {
    /// Which.
    pub ticket: Ticket,
    /// Its outcome. The bytes live until the pipeline is used again.
    pub result: Result<Outcome<'p>>,
}

/// What an operation of a pipeline came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'p> {
    /// GET: the value and its version, `None` when the key is absent.
    Value(Option<(&'p [u8], Version)>),
    /// PUT: stored.
    Stored,
    /// INSERT, UPDATE, DELETE: whether the key was as required, and so the change made.
    Applied(bool),
}

/// Collects operations, then runs them together.
pub struct Batch<'s, 'd>(&'s (), &'d ());

impl<'d> Batch<'_, 'd> {
    /// Adds a GET.
    pub fn get(&mut self, key: &'d [u8]) -> &mut Self {
        todo!()
    }
    /// Adds a PUT.
    pub fn put(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        todo!()
    }
    /// Adds an insert-only PUT.
    pub fn insert(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        todo!()
    }
    /// Adds an update-only PUT.
    pub fn update(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        todo!()
    }
    /// Adds a DELETE.
    pub fn delete(&mut self, key: &'d [u8]) -> &mut Self {
        todo!()
    }
    /// Runs all of them; results in the order of the calls. They are concurrent with each other.
    pub fn run(self) -> Vec<Result<BatchOutcome>> {
        todo!()
    }
}

/// What an operation of a batch came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// GET.
    Value(Option<Value>),
    /// PUT.
    Stored,
    /// INSERT, UPDATE, DELETE: whether the change was made.
    Applied(bool),
}

/// An entry of a scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// Its value and version.
    pub value: Value,
}

/// Iterates over all entries.
pub struct Scan<'s>(&'s ());

impl Iterator for Scan<'_> {
    type Item = Result<Entry>;
    fn next(&mut self) -> Option<Self::Item> {
        todo!()
    }
}
