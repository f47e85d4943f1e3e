//! Snapshot files: keys, values and when these end, compressed and checksummed.
//!
//! `kv-cli snapshot` writes them, `kv-server --restore` reads them. They do not depend on the
//! region they came from: neither on its size nor on its format.
//!
//! # The bytes
//! All integers are little-endian.
//! ```text
//! file    header, chunks, an end
//! header  32 bytes: magic "farsnap\0", version u32, crc32 u32 over what follows, time of the
//!         snapshot u64 in seconds since 1970, the region's limits: key_bytes_max u32 and
//!         value_bytes_max u32, both 0 in older files, which say nothing of them
//! chunk   packed_bytes u32, raw_bytes u32, records u32, crc32 u32, then packed_bytes of zstd,
//!         which become raw_bytes: so many records
//! end     a chunk without raw bytes and records; its 8 packed bytes, not compressed, are the
//!         number of records in the file, u64. Nothing follows it
//! record  key_bytes u16, 2 reserved bytes, value_bytes u32, expires_at_ms u64 in milliseconds
//!         since 1970 (in version 1: u32 in seconds) or 0 for never, key, value
//! ```
//! Each crc32 covers the one before it and its own chunk, so that chunks cannot be missing or
//! change places.
#![deny(unsafe_code)]

mod format;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::io;

pub use reader::Reader;
pub use writer::Writer;

/// The longest key and value of the region that a snapshot was taken of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
}

/// A key with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The key, 1 to 65535 bytes.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// When the value ends, milliseconds since 1970; 0 for never.
    pub expires_at_ms: u64,
}

/// What is wrong with a snapshot file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It starts like something else.
    #[error("it is no snapshot: make one with `kv-cli snapshot FILE`")]
    NotASnapshot,
    /// It was made by a version with another format.
    #[error(
        "it has snapshot format {found}, this program reads {known} and before: use the version \
         that made it"
    )]
    Version {
        /// The format's number.
        found: u32,
        /// The newest one that this program knows.
        known: u32,
    },
    /// It ends before its end.
    #[error("it is truncated after {records} records: take the snapshot again, or another copy")]
    Truncated {
        /// How many records are whole.
        records: u64,
    },
    /// Its bytes are not those that were written.
    #[error("it is corrupted ({what}, after {records} records): take another copy of it")]
    Corrupt {
        /// What does not check out.
        what: &'static str,
        /// How many records before that are whole.
        records: u64,
    },
    /// No snapshot can hold such a record.
    #[error("a key of {key_bytes} and a value of {value_bytes} bytes do not fit into a snapshot")]
    TooLarge {
        /// The key's length, in bytes.
        key_bytes: usize,
        /// The value's length, in bytes.
        value_bytes: usize,
    },
}
