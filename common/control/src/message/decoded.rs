//! The parts of a message, each of which may be anything.

use zerocopy::{FromBytes, little_endian as le};

use farside_layout::{BlockAddress, SizeClass};

use super::{
    BLOCKS_PER_MESSAGE_MAX, BlockBytes, ControlError, DEPTH_MAX, FreeBlock, HELD_PER_MESSAGE_MAX,
    Header, RESTED, SOON, ServerStatistics,
};
use crate::MESSAGE_BYTES_MAX;

/// A message whose header is in order.
pub(super) struct Decoded<'a> {
    pub(super) kind: u8,
    pub(super) class: u8,
    pub(super) flags: u8,
    pub(super) count: u32,
    pub(super) payload: &'a [u8],
}

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded<'_>, ControlError> {
    let length = ControlError::Length { bytes: bytes.len() };
    let Ok((header, payload)) = Header::ref_from_prefix(bytes) else { return Err(length) };
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(length);
    }
    unused("reserved byte", header.reserved)?;
    let count = header.count.get();
    Ok(Decoded { kind: header.kind, class: header.class, flags: header.flags, count, payload })
}

/// What this kind of message has no use for is 0.
pub(super) fn unused(field: &'static str, value: impl Into<u64>) -> Result<(), ControlError> {
    match value.into() {
        0 => Ok(()),
        value => Err(ControlError::Unknown { field, value }),
    }
}

impl Decoded<'_> {
    /// A message that says nothing but what it is.
    pub(super) fn bare(&self) -> Result<(), ControlError> {
        unused("size class", self.class)?;
        unused("flags", self.flags)?;
        unused("count", self.count)?;
        self.no_payload()
    }

    /// Whether the one flag of this kind of message is set.
    pub(super) fn flag(&self) -> Result<bool, ControlError> {
        unused("flags", self.flags & !1)?;
        Ok(self.flags == 1)
    }

    /// Which of the flags of [`Reply::Blocks`] are set: `rested`, `soon`.
    pub(super) fn rested_and_soon(&self) -> Result<(bool, bool), ControlError> {
        unused("flags", self.flags & !(RESTED | SOON))?;
        Ok((self.flags & RESTED != 0, self.flags & SOON != 0))
    }

    pub(super) fn class(&self) -> Result<SizeClass, ControlError> {
        let value = self.class.into();
        SizeClass::from_index(self.class)
            .map_err(|_| ControlError::Unknown { field: "size class", value })
    }

    /// The local depth in a split's message.
    pub(super) fn depth(&self) -> Result<u8, ControlError> {
        let value = self.class.into();
        let depth = (self.class <= DEPTH_MAX).then_some(self.class);
        depth.ok_or(ControlError::Unknown { field: "local depth", value })
    }

    /// The progress in a snapshot's message.
    pub(super) fn permille(&self) -> Result<u32, ControlError> {
        unused("size class", self.class)?;
        unused("flags", self.flags)?;
        self.no_payload()?;
        let (field, value) = ("permille", self.count.into());
        if self.count > 1000 { Err(ControlError::Unknown { field, value }) } else { Ok(self.count) }
    }

    /// The clock in a sign of life.
    pub(super) fn clock(&self) -> Result<u64, ControlError> {
        unused("size class", self.class)?;
        unused("flags", self.flags)?;
        unused("count", self.count)?;
        let length = ControlError::Length { bytes: self.payload.len() };
        le::U64::read_from_bytes(self.payload).map(le::U64::get).map_err(|_| length)
    }

    pub(super) fn blocks(&self) -> Result<Vec<FreeBlock>, ControlError> {
        let length = ControlError::Length { bytes: self.payload.len() };
        let Ok(blocks) = <[BlockBytes]>::ref_from_bytes(self.payload) else { return Err(length) };
        if blocks.len() != self.count as usize || blocks.len() > BLOCKS_PER_MESSAGE_MAX {
            return Err(length);
        }
        let block = |bytes: &BlockBytes| FreeBlock {
            address: BlockAddress(bytes.address.get()),
            generation: bytes.generation.get(),
        };
        Ok(blocks.iter().map(block).collect())
    }

    pub(super) fn addresses(&self) -> Result<Vec<BlockAddress>, ControlError> {
        let length = ControlError::Length { bytes: self.payload.len() };
        match <[le::U32]>::ref_from_bytes(self.payload) {
            Ok(units) if units.len() <= HELD_PER_MESSAGE_MAX => {
                Ok(units.iter().map(|units| BlockAddress(units.get())).collect())
            }
            _ => Err(length),
        }
    }

    pub(super) fn no_payload(&self) -> Result<(), ControlError> {
        match self.payload.len() {
            0 => Ok(()),
            bytes => Err(ControlError::Length { bytes }),
        }
    }

    pub(super) fn statistics(&self) -> Result<ServerStatistics, ControlError> {
        unused("size class", self.class)?;
        unused("flags", self.flags)?;
        let statistics = ServerStatistics::decode(self.payload)?;
        match statistics.classes.len() == self.count as usize {
            true => Ok(statistics),
            false => Err(ControlError::Length { bytes: self.payload.len() }),
        }
    }
}
