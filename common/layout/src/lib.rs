//! The bytes of a region. Every format is defined once, every offset is computed here, and all
//! bytes from remote memory are checked before they are used.
//!
//! ```text
//! superblock (4 KiB) | client table | directories | chunk table | heap: 2 MiB chunks
//! ```
//!
//! Offsets are bytes from the start of the region; only the fabric knows virtual addresses. The
//! byte tables are in `docs/memory-layout.md`.
#![deny(unsafe_code)]

mod block;
mod class;
#[cfg(test)]
mod documentation;
mod extents;
pub mod hash;
mod long_block;
mod row;
mod superblock;
mod word;

pub use block::*;
pub use class::*;
pub use extents::*;
pub use hash::prefix_of;
pub use long_block::*;
pub use row::*;
pub use superblock::*;
pub use word::*;

/// Why bytes that were read from a region, or the options for a new region, are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum LayoutError {
    #[error("this is not a Farside region (no magic at its start)")]
    NotARegion,
    #[error("the region has format version {found}; this program knows version {known}")]
    FormatVersion { found: u32, known: u32 },
    #[error(
        "the superblock says that the region has {says} bytes, but it has {is}: the region was \
         truncated or extended"
    )]
    RegionLength { says: u64, is: u64 },
    #[error("{what}: {bytes} bytes are too few")]
    Truncated { what: &'static str, bytes: u64 },
    #[error("{what} at offset {offset:#x}: the checksum does not match the content")]
    Checksum { what: &'static str, offset: u64 },
    #[error("{field} is {value}, but has to be between {min} and {max}")]
    Bound { field: &'static str, value: u64, min: u64, max: u64 },
    #[error("{field} has the impossible value {value:#x}")]
    Field { field: &'static str, value: u64 },
    #[error("{index} is not a size class")]
    SizeClass { index: u8 },
    #[error("a block of {bytes} bytes at offset {offset:#x} lies outside the heap")]
    BlockOutside { offset: u64, bytes: u64 },
    #[error("no block of {bytes} bytes can start at offset {offset:#x}")]
    BlockStride { offset: u64, bytes: u64 },
    #[error("offset {offset:#x} is no subtable's: it lies outside the heap or inside a subtable")]
    SubtableOutside { offset: u64 },
    #[error("the row at offset {offset:#x} does not belong to a subtable of this key")]
    Row { offset: u64 },
}
