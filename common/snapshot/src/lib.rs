//! Snapshot files: keys, values and their times of expiry, compressed and checksummed.
//!
//! `kv-cli snapshot` writes them, `kv-cli restore` and `kv-server --restore` read them. They are
//! independent of the size and the format of the region that they came from.
//!
//! # The bytes
//! All integers are little-endian.
//! ```text
//! file          magic "farsnap\0", version u32, one zstd frame with a checksum of its content
//! frame         frame header, records
//! frame header  time of the snapshot u64 in seconds since 1970, the region's limits:
//!               key_bytes_max u32 and value_bytes_max u32, both 0 if unknown
//! record        key_bytes u16, flags u8, 1 reserved byte, value_bytes u32, expires_at_ms u64 in
//!               milliseconds since 1970 or 0 for never, key, value
//! flags         1 if the value is pinned
//! ```
//! The first programs with format 3 know no flags, and refuse a record that has one.
//!
//! zstd's checksum covers every byte of the content. It is at the end of the file, so a reader must
//! not trust any record before it has read the last one.
#![deny(unsafe_code)]

mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

pub use reader::{Reader, stored_checksum};
pub use writer::Writer;

const MAGIC: [u8; 8] = *b"farsnap\0";
const VERSION: u32 = 4;
/// The oldest version that this program reads. It differs in the length of the longest record only.
const VERSION_MIN: u32 = 3;
/// The length of zstd's checksum, at the end of the file.
const CHECKSUM_BYTES: usize = 4;
/// Limit on the length of a key and its value together, in bytes. A region holds no longer ones.
const RECORD_BYTES_MAX: usize = 257 << 20;
/// The base 2 logarithm of zstd's window, in bytes. A reader allocates the window, and refuses a
/// file with a larger one.
const WINDOW_LOG: u32 = 21;
/// The flag of a record whose value is pinned.
const PINNED: u8 = 1;

/// The start of the file; the frame follows.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileHeader {
    magic: [u8; 8],
    version: le::U32,
}
const _: () = assert!(size_of::<FileHeader>() == 12);

/// The start of the frame; records follow.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FrameHeader {
    created_at_s: le::U64,
    key_bytes_max: le::U32,
    value_bytes_max: le::U32,
}
const _: () = assert!(size_of::<FrameHeader>() == 16);

/// The start of a record; key and value follow.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RecordHeader {
    key_bytes: le::U16,
    flags: u8,
    reserved: u8,
    value_bytes: le::U32,
    expires_at_ms: le::U64,
}
const _: () = assert!(size_of::<RecordHeader>() == 16);

/// The limits of the region from which a snapshot was taken.
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
    /// When the value expires, in milliseconds since 1970; 0 for never.
    pub expires_at_ms: u64,
    /// Whether the value is pinned: a server never evicts it.
    pub is_pinned: bool,
}

impl Record<'_> {
    /// Returns when the value expires; `None` for never.
    pub fn expires_at(&self) -> Option<SystemTime> {
        let after_epoch = Duration::from_millis(self.expires_at_ms);
        (self.expires_at_ms > 0).then(|| UNIX_EPOCH + after_epoch)
    }
}

/// Why a snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file cannot be opened.
    #[error("the file cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// It is a folder, a pipe or a device.
    #[error("it is no regular file: name a file that `kv-cli snapshot` wrote")]
    NotAFile,
    /// The file does not start like a snapshot.
    #[error("it is no snapshot: make one with `kv-cli snapshot FILE`")]
    NotASnapshot,
    /// The file was made by a version of Farside with another format.
    #[error(
        "it has snapshot format {found}, and this program reads formats {known_min} to {known}: \
         restore it with the version that made it"
    )]
    Version {
        /// The number of the file's format.
        found: u32,
        /// The oldest format that this program reads.
        known_min: u32,
        /// The latest one.
        known: u32,
    },
    /// The file is incomplete.
    #[error("it is truncated after {records} records: take the snapshot again, or another copy")]
    Truncated {
        /// How many records are complete.
        records: u64,
    },
    /// The file's bytes are not those that were written.
    #[error("it is corrupted ({what}, after {records} records): take another copy of it")]
    Corrupt {
        /// The part that is invalid, or the decoder's error.
        what: String,
        /// How many records were read before it.
        records: u64,
    },
    /// The key is empty or too long, or the record is too long for a snapshot.
    #[error("a key of {key_bytes} and a value of {value_bytes} bytes do not fit into a snapshot")]
    TooLarge {
        /// The key's length, in bytes.
        key_bytes: usize,
        /// The value's length, in bytes.
        value_bytes: usize,
    },
}
