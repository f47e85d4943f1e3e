//! The new block of an operation, from its sealing to the compare-and-swap that links it.

use std::cell::Cell;

use farside_fabric::{Buffer, Verb};
use farside_layout::{BlockRef, FreeBlock};

use crate::Version;
use crate::location_cache::PackedLocation;

/// The sealed new block of this operation, in [`Buffer::NewBlock`].
pub(super) struct NewBlock {
    pub(super) free: FreeBlock,
    pub(super) block: BlockRef,
    /// When its value expires, in milliseconds since 1970; 0 for never.
    pub(super) expires_at_ms: u64,
    /// Where it begins in the buffer, and the length of its WRITE, in bytes.
    pub(super) at: u32,
    pub(super) write_bytes: u32,
    /// Whether the region has its bytes already.
    pub(super) written: Cell<bool>,
}

/// Whether a new block is linked now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockFate {
    /// A slot leads to it.
    Linked,
    /// No slot leads to it: it is free again.
    Unused,
}

impl NewBlock {
    /// The version of its value.
    #[inline]
    pub(super) fn version(&self) -> Version {
        Version::of(self.free.address, self.free.generation)
    }

    /// Whether its value expires. Then its word is conditional (invariant I19).
    #[inline]
    pub(super) fn expires(&self) -> bool {
        self.expires_at_ms != 0
    }

    /// The cached location of the key, which was `replaced`, after a PUT has linked this block.
    #[inline]
    pub(super) fn replacement(&self, replaced: PackedLocation) -> PackedLocation {
        let padding = self.block.class.padding(self.write_bytes.into());
        let block = (self.block, self.free.generation);
        replaced.replaced_by(block, (self.expires(), padding))
    }

    /// The length of its WRITE, in bytes.
    #[inline]
    pub(super) fn write_bytes(&self) -> u64 {
        self.write_bytes.into()
    }

    /// The WRITE of its bytes, of which only the first, so many, are in the buffer.
    pub(super) fn write_split(&self, head_bytes: u32) -> Verb {
        let (remote, bytes) = (self.block.offset(), self.write_bytes);
        Verb::WriteSplit { remote, from: Buffer::NewBlock, head_bytes, bytes }
    }

    /// The WRITE of its bytes.
    #[inline]
    pub(super) fn write(&self) -> Verb {
        let (remote, bytes) = (self.block.offset(), self.write_bytes);
        match self.at {
            0 => Verb::Write { remote, from: Buffer::NewBlock, bytes },
            at => Verb::WritePart { remote, from: Buffer::NewBlock, at, bytes },
        }
    }
}
