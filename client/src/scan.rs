//! Iterating over everything.

use crate::any_engine::{AnyEngine, over};
use crate::client::Shared;
use crate::connection::Connection;
use crate::engine::{Failure, LANE};
use crate::protocol::{ScanProgress, next_entry};
use crate::{Result, Value};

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value and its version.
    pub value: Value,
    /// When it ends, seconds since 1970; `None` for never.
    pub expires_at_s: Option<u32>,
}

/// Iterates over all entries; see [`Session::scan`](crate::Session::scan).
pub struct Scan<'s> {
    engine: &'s AnyEngine,
    connection: &'s Connection,
    shared: &'s Shared,
    progress: ScanProgress,
}

impl<'s> Scan<'s> {
    pub(crate) fn new(
        engine: &'s AnyEngine,
        connection: &'s Connection,
        shared: &'s Shared,
    ) -> Self {
        Self { engine, connection, shared, progress: ScanProgress::default() }
    }

    fn step(&mut self) -> std::result::Result<Option<Entry>, Failure> {
        if self.connection.control.is_lost() {
            return Err(Failure::Disconnected);
        }
        let progress = &mut self.progress;
        over!(self.engine, engine => engine.endpoint.drive(next_entry(engine, LANE, progress)))
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Entry>;

    /// The next entry. After an error about one entry the scan goes on with the others.
    fn next(&mut self) -> Option<Self::Item> {
        match self.step() {
            Ok(entry) => entry.map(Ok),
            Err(failure) => {
                if matches!(failure, Failure::Disconnected) {
                    self.progress.end();
                }
                Some(Err(self.shared.told(self.connection, failure)))
            }
        }
    }
}
