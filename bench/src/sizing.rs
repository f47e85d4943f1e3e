//! How much memory a server needs for a run.

use farside_common::layout::{
    CHUNK_BYTES, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SUBTABLE_BYTES, class_for,
};

use crate::keys::KEY_BYTES;
use crate::{Error, Result};

/// What decides it.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Records loaded.
    pub records: u64,
    /// The length of their values, in bytes.
    pub value_bytes: u64,
    /// Threads, each a session with free blocks of its own.
    pub threads: u64,
    /// How many of a hundred operations overwrite a value.
    pub percent_writes: u64,
    /// How many of a hundred operations insert a new record.
    pub percent_inserts: u64,
    /// How long operations go on, warm-up included, in seconds.
    pub seconds: f64,
}

/// What a server is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The region, in bytes.
    pub region_bytes: u64,
    /// Of which index, in bytes.
    pub index_bytes: u64,
    /// The longest value, in bytes.
    pub value_bytes_max: u64,
}

/// What a server allows without being told, in bytes.
pub const VALUE_BYTES_MAX_DEFAULT: u64 = 1 << 20;
/// No thread does more operations a second than this.
const OPERATIONS_PER_S_MAX: u64 = 4_000_000;
/// No thread writes faster than this, in bytes a second.
const WRITE_BYTES_PER_S_MAX: u64 = 6 << 30;
/// Twice the default GRACE, in milliseconds: how long overwritten blocks wait, and some time to
/// come back into use.
const QUARANTINE_MS: u64 = 200;
const HEADROOM_BYTES: u64 = 256 << 20;
/// Free blocks a session keeps in store.
const SESSION_BYTES: u64 = 16 << 20;
const SESSION_BLOCKS: u64 = 64;
/// The index starts with room for this load, in percent, so that no run has to wait for a split.
/// The first window of many is full, simulated, at 0.30 to 0.37 with 2^13 subtables, at 0.27 to
/// 0.29 with 2^17.
const INDEX_LOAD_PERCENT_MAX: u64 = 25;

impl Demand {
    fn inserts(&self) -> u64 {
        let per_s = OPERATIONS_PER_S_MAX / 100 * self.percent_inserts * self.threads;
        (per_s as f64 * self.seconds) as u64
    }

    /// The memory for this.
    ///
    /// # Errors
    /// [`Error::Usage`] if no block is large enough for the values.
    pub fn memory(&self) -> Result<Memory> {
        let class = class_for(KEY_BYTES, self.value_bytes as usize).ok_or_else(|| {
            Error::Usage(format!("no block holds a value of {} bytes", self.value_bytes))
        })?;
        let block_bytes = class.block_bytes();
        let records = self.records + self.inserts();
        let slots = (SLOTS_PER_ROW * ROWS_PER_SUBTABLE) as u64;
        let subtables = (records * 100).div_ceil(slots * INDEX_LOAD_PERCENT_MAX);
        let index_bytes = subtables.next_power_of_two() * SUBTABLE_BYTES;
        let blocks = records.div_ceil(class.blocks_per_span());
        let heap_bytes = blocks * class.chunks_per_span() * CHUNK_BYTES;
        let rate = (OPERATIONS_PER_S_MAX * block_bytes).min(WRITE_BYTES_PER_S_MAX);
        let quarantine = match self.percent_writes {
            0 => 0,
            _ => rate / 1000 * QUARANTINE_MS,
        };
        let per_session = quarantine + SESSION_BYTES.max(SESSION_BLOCKS * block_bytes);
        let tables = index_bytes / 64 + 4 * CHUNK_BYTES;
        let region_bytes =
            index_bytes + heap_bytes + HEADROOM_BYTES + tables + self.threads * per_session;
        Ok(Memory {
            region_bytes: region_bytes.next_multiple_of(CHUNK_BYTES),
            index_bytes,
            value_bytes_max: self.value_bytes.max(VALUE_BYTES_MAX_DEFAULT),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand() -> Demand {
        Demand {
            records: 1_000_000,
            value_bytes: 64,
            threads: 1,
            percent_writes: 0,
            percent_inserts: 0,
            seconds: 10.0,
        }
    }

    #[test]
    fn a_million_small_records_fit_in_an_index_that_does_not_overflow() {
        let memory = demand().memory().unwrap();
        let slots = memory.index_bytes / SUBTABLE_BYTES * 448;
        let load = 1_000_000.0 / slots as f64;
        assert!((0.1..0.26).contains(&load), "{load}");
        let blocks = 1_000_000 * 128;
        assert!(memory.region_bytes > blocks + memory.index_bytes + HEADROOM_BYTES);
        assert!(memory.region_bytes < 700 << 20, "{memory:?}");
    }

    #[test]
    fn writes_and_inserts_need_more() {
        let reads = demand().memory().unwrap();
        let writes = Demand { percent_writes: 50, ..demand() }.memory().unwrap();
        let inserts = Demand { percent_inserts: 5, ..demand() }.memory().unwrap();
        assert!(writes.region_bytes > reads.region_bytes);
        assert!(inserts.region_bytes > reads.region_bytes);
        assert!(inserts.index_bytes > reads.index_bytes);
        assert!(Demand { value_bytes: 5 << 20, ..demand() }.memory().is_err());
    }
}
