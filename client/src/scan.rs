//! Iterating over everything.

use std::time::Duration;

use farside_common::fabric::Fabric;

use crate::any_engine::{AnyEngine, over};
use crate::client::Shared;
use crate::connection::Connection;
use crate::engine::{Engine, Failure, LANE};
use crate::protocol::{ScannedSlot, read_entry, read_subtable};
use crate::remote_depot::ControlDepot;
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
    /// The subtables not read yet, last first.
    subtables: Vec<u64>,
    slots: Vec<ScannedSlot>,
}

impl<'s> Scan<'s> {
    pub(crate) fn new(
        engine: &'s AnyEngine,
        connection: &'s Connection,
        shared: &'s Shared,
    ) -> Self {
        let subtables = over!(engine, engine => engine.directory().subtables().rev().collect());
        Self { engine, connection, shared, subtables, slots: Vec::new() }
    }

    fn step(&mut self) -> std::result::Result<Option<Entry>, Failure> {
        if self.connection.control.is_lost() {
            return Err(Failure::Disconnected);
        }
        over!(self.engine, engine => advance(engine, &mut self.subtables, &mut self.slots))
    }
}

/// The next entry of these slots and subtables.
fn advance<F: Fabric>(
    engine: &Engine<F, ControlDepot>,
    subtables: &mut Vec<u64>,
    slots: &mut Vec<ScannedSlot>,
) -> std::result::Result<Option<Entry>, Failure> {
    loop {
        while let Some(slot) = slots.pop() {
            if let Some(entry) = engine.endpoint.drive(read_entry(engine, LANE, slot))? {
                return Ok(Some(entry));
            }
        }
        let Some(subtable) = subtables.pop() else { return Ok(None) };
        engine.endpoint.drive(read_subtable(engine, LANE, subtable, slots))?;
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Entry>;

    /// The next entry. After an error about one entry the scan goes on with the others.
    fn next(&mut self) -> Option<Self::Item> {
        match self.step() {
            Ok(entry) => entry.map(Ok),
            Err(Failure::Error(error)) => Some(Err(*error)),
            Err(Failure::Disconnected) => {
                self.subtables.clear();
                self.slots.clear();
                self.connection.control.give_up();
                Some(Err(self.shared.unreachable(Duration::ZERO)))
            }
        }
    }
}
