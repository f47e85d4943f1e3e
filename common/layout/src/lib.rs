//! The bytes of a region: every format once, every offset computed here, everything that comes out
//! of remote memory checked before it is believed.
//!
//! ```text
//! superblock (4 KiB) | client table | directories | chunk table | heap: 2 MiB chunks
//! ```
//!
//! Offsets are bytes from the start of the region; only the fabric knows virtual addresses. The
//! byte tables are in `docs/memory-layout.md`.

#![deny(unsafe_code)]

mod aging;
mod block;
pub mod checksum;
mod class;
#[cfg(test)]
mod documentation;
pub mod hash;
mod row;
mod split;
mod superblock;
mod tables;
mod word;

pub use aging::*;
pub use block::*;
pub use class::*;
pub use row::*;
pub use split::*;
pub use superblock::*;
pub use tables::*;
pub use word::*;

/// Why bytes found in a region, or a region asked for, cannot be what they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum LayoutError {
    #[error("this is not a Farside region (no magic at its start)")]
    NotARegion,
    #[error("the region has format version {found}; this program knows version {known}")]
    FormatVersion { found: u32, known: u32 },
    #[error(
        "the region says it is {says} bytes long, but it is {is}: it was truncated or extended"
    )]
    RegionLength { says: u64, is: u64 },
    #[error("{what}: {bytes} bytes are too few for what it says it holds")]
    Truncated { what: &'static str, bytes: u64 },
    #[error("{what} at offset {offset:#x}: the checksum does not match the content")]
    Checksum { what: &'static str, offset: u64 },
    #[error("{field} is {value}, but has to lie between {min} and {max}")]
    Bound { field: &'static str, value: u64, min: u64, max: u64 },
    #[error("{field} has the impossible value {value:#x}")]
    Field { field: &'static str, value: u64 },
    #[error("{index} is not a size class")]
    SizeClass { index: u8 },
    #[error("a block of {bytes} bytes at offset {offset:#x} lies outside the heap")]
    BlockOutside { offset: u64, bytes: u64 },
    #[error("a subtable at offset {offset:#x} lies outside the heap or between two subtables")]
    SubtableOutside { offset: u64 },
    #[error("the row at offset {offset:#x} belongs to no subtable of this key")]
    Row { offset: u64 },
}
