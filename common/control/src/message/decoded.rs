//! A message whose header is valid, and the checks of the fields that its kind uses.

use zerocopy::{FromBytes, little_endian as le};

use farside_layout::{BlockAddress, SizeClass};

use super::{
    BLOCKS_PER_MESSAGE_MAX, BlockBytes, DEPTH_MAX, HOT_PER_MESSAGE_MAX, Header, HotBlock,
    HotBlockBytes, READS_PER_MESSAGE_MAX, Request, ServerMessage,
};
use crate::{
    CLIENTS_PER_MESSAGE_MAX, ClientDescription, ConnectedClient, ControlError, FreeBlock,
    MESSAGE_BYTES_MAX, ServerStatistics,
};

/// A message whose header is valid.
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

/// Checks that a field that this kind of message does not use is 0.
pub(super) fn unused(field: &'static str, value: impl Into<u64>) -> Result<(), ControlError> {
    match value.into() {
        0 => Ok(()),
        value => Err(ControlError::Unknown { field, value }),
    }
}

impl Decoded<'_> {
    /// Checks that the kind of the message is its only content.
    pub(super) fn bare(&self) -> Result<(), ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        self.no_payload()
    }

    pub(super) fn no_class_or_flags(&self) -> Result<(), ControlError> {
        unused("size class", self.class)?;
        unused("flags", self.flags)
    }

    /// Whether the one flag of this kind of message is set.
    pub(super) fn flag(&self) -> Result<bool, ControlError> {
        unused("flags", self.flags & !1)?;
        Ok(self.flags == 1)
    }

    pub(super) fn class(&self) -> Result<SizeClass, ControlError> {
        let value = self.class.into();
        SizeClass::from_index(self.class)
            .map_err(|_| ControlError::Unknown { field: "size class", value })
    }

    /// Returns the local depth in a message about a split.
    pub(super) fn depth(&self) -> Result<u8, ControlError> {
        let value = self.class.into();
        let depth = (self.class <= DEPTH_MAX).then_some(self.class);
        depth.ok_or(ControlError::Unknown { field: "local depth", value })
    }

    /// Returns the progress in a message about a snapshot.
    pub(super) fn permille(&self) -> Result<u32, ControlError> {
        self.no_class_or_flags()?;
        self.no_payload()?;
        let (field, value) = ("permille", self.count.into());
        if self.count > 1000 { Err(ControlError::Unknown { field, value }) } else { Ok(self.count) }
    }

    /// Returns the bytes of a message that has no other content.
    pub(super) fn only_bytes(&self) -> Result<Vec<u8>, ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        Ok(self.payload.to_vec())
    }

    /// Returns the only content of a message, a reading of a clock.
    pub(super) fn clock(&self) -> Result<u64, ControlError> {
        self.numbers().map(|[clock_ns]| clock_ns)
    }

    pub(super) fn numbers<const COUNT: usize>(&self) -> Result<[u64; COUNT], ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        let numbers = <[le::U64; COUNT]>::read_from_bytes(self.payload);
        let length = ControlError::Length { bytes: self.payload.len() };
        numbers.map(|numbers| numbers.map(le::U64::get)).map_err(|_| length)
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

    /// Returns the addresses in a part of the payload, at most `max` of them.
    pub(super) fn addresses(
        &self,
        part: &[u8],
        max: usize,
    ) -> Result<Vec<BlockAddress>, ControlError> {
        match <[le::U32]>::ref_from_bytes(part) {
            Ok(units) if units.len() <= max => {
                Ok(units.iter().map(|units| BlockAddress(units.get())).collect())
            }
            _ => Err(ControlError::Length { bytes: self.payload.len() }),
        }
    }

    /// Returns the report of reads in this message.
    pub(super) fn reads(&self) -> Result<Request, ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        let Ok(([found, absent], part)) = <[le::U64; 2]>::ref_from_prefix(self.payload) else {
            return Err(ControlError::Length { bytes: self.payload.len() });
        };
        let blocks = self.addresses(part, READS_PER_MESSAGE_MAX)?;
        Ok(Request::Reads { found: found.get(), absent: absent.get(), blocks })
    }

    /// Returns the client's id that is the only content of a message.
    pub(super) fn client_id(&self) -> Result<u16, ControlError> {
        self.no_class_or_flags()?;
        self.no_payload()?;
        let (field, value) = ("client id", self.count.into());
        u16::try_from(self.count).map_err(|_| ControlError::Unknown { field, value })
    }

    /// Returns the description that is the only content of a message.
    pub(super) fn description(&self) -> Result<ClientDescription, ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        let mut rest = self.payload;
        let description = ClientDescription::take(&mut rest)?;
        Decoded { payload: rest, ..*self }.no_payload()?;
        Ok(description)
    }

    /// Returns the list of clients in this message.
    pub(super) fn clients(&self) -> Result<ServerMessage, ControlError> {
        unused("size class", self.class)?;
        let last = self.flag()?;
        if self.count as usize > CLIENTS_PER_MESSAGE_MAX {
            return Err(ControlError::Length { bytes: self.payload.len() });
        }
        let mut rest = self.payload;
        let clients = (0..self.count).map(|_| ConnectedClient::take(&mut rest));
        let clients = clients.collect::<Result<_, _>>()?;
        Decoded { payload: rest, ..*self }.no_payload()?;
        Ok(ServerMessage::Clients { last, clients })
    }

    /// Returns the list of hot blocks in this message.
    pub(super) fn hot(&self) -> Result<ServerMessage, ControlError> {
        self.no_class_or_flags()?;
        unused("count", self.count)?;
        let length = ControlError::Length { bytes: self.payload.len() };
        let Ok((samples, part)) = le::U64::ref_from_prefix(self.payload) else {
            return Err(length);
        };
        let blocks = match <[HotBlockBytes]>::ref_from_bytes(part) {
            Ok(blocks) if blocks.len() <= HOT_PER_MESSAGE_MAX => blocks,
            _ => return Err(length),
        };
        let block = |bytes: &HotBlockBytes| {
            let (field, value) = ("size class", bytes.class.get().into());
            let unknown = ControlError::Unknown { field, value };
            let index = u8::try_from(bytes.class.get()).map_err(|_| unknown.clone())?;
            let class = SizeClass::from_index(index).map_err(|_| unknown)?;
            let address = BlockAddress(bytes.address.get());
            Ok(HotBlock { address, class, reads: bytes.reads.get() })
        };
        let blocks = blocks.iter().map(block).collect::<Result<_, _>>()?;
        Ok(ServerMessage::Hot { samples: samples.get(), blocks })
    }

    pub(super) fn no_payload(&self) -> Result<(), ControlError> {
        match self.payload.len() {
            0 => Ok(()),
            bytes => Err(ControlError::Length { bytes }),
        }
    }

    pub(super) fn statistics(&self) -> Result<ServerStatistics, ControlError> {
        self.no_class_or_flags()?;
        let statistics = ServerStatistics::decode(self.payload)?;
        match statistics.classes.len() == self.count as usize {
            true => Ok(statistics),
            false => Err(ControlError::Length { bytes: self.payload.len() }),
        }
    }
}
