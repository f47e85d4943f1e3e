use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{ControlError, ServerStatistics};
use crate::layout::{BlockAddress, SizeClass};

/// The longest message on a control channel, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The most blocks one message carries.
pub const BLOCKS_PER_MESSAGE_MAX: usize = 4096;
/// The most addresses one message carries.
pub const HELD_PER_MESSAGE_MAX: usize = 16_000;

/// A block nobody links, and the generation its next content gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FreeBlock {
    /// Where it is.
    pub address: BlockAddress,
    /// What its writer puts into the header.
    pub generation: u32,
}

/// What a client asks on its control channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Blocks of a class, please. Answered by [`Reply::Blocks`], with fewer or none when the
    /// server has no more.
    TakeBlocks {
        /// Which.
        class: SizeClass,
        /// How many would be welcome, at most [`BLOCKS_PER_MESSAGE_MAX`].
        count: u32,
    },
    /// Blocks that the client does not need. Not answered.
    GiveBlocks {
        /// Of which class.
        class: SizeClass,
        /// Whether all of them have been unlinked for GRACE already; else the server waits.
        rested: bool,
        /// Which.
        blocks: Vec<FreeBlock>,
    },
    /// What the client holds, on every session, in lists and in its hands: to [`Ask::Report`], in
    /// one message or several. Not answered.
    Held {
        /// The number of the collection.
        collection: u32,
        /// Nothing more follows.
        last: bool,
        /// At most [`HELD_PER_MESSAGE_MAX`].
        blocks: Vec<BlockAddress>,
    },
    /// Look for lost blocks, please. Answered by [`Reply::Statistics`], at once.
    Collect,
    /// Answered by [`Reply::Statistics`].
    Statistics,
    /// The client is leaving and holds nothing any more. Not answered.
    Goodbye,
}

/// What a server says on a control channel: answers in the order of the requests, and what it asks
/// by itself, in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Request::TakeBlocks`]: these belong to the client now.
    Blocks {
        /// Of which class.
        class: SizeClass,
        /// There are none just now, but soon there may be: ask again.
        soon: bool,
        /// Which; none when there are none.
        blocks: Vec<FreeBlock>,
    },
    /// To [`Request::Statistics`] and [`Request::Collect`].
    Statistics(ServerStatistics),
    /// To nothing: a server asks this by itself.
    Ask(Ask),
}

/// What a server asks a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// What do you hold? To be answered by [`Request::Held`], in time: the server fences who does
    /// not.
    Report {
        /// The number of the collection.
        collection: u32,
    },
    /// Give back the blocks you do not need, by [`Request::GiveBlocks`]: somebody has none.
    Return,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    kind: u8,
    class: u8,
    flag: u8,
    reserved: u8,
    count: le::U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct BlockBytes {
    address: le::U32,
    generation: le::U32,
}

const TAKE: u8 = 1;
const GIVE: u8 = 2;
const STATISTICS: u8 = 3;
const GOODBYE: u8 = 4;
const BLOCKS: u8 = 5;
const STATISTICS_REPLY: u8 = 6;
const HELD: u8 = 9;
const COLLECT: u8 = 10;
const REPORT: u8 = 11;
const RETURN: u8 = 12;

/// The header of a message, in place of what `into` held.
fn encode_header(kind: u8, class: u8, flag: bool, count: u32, into: &mut Vec<u8>) {
    let header = Header { kind, class, flag: flag.into(), reserved: 0, count: count.into() };
    into.clear();
    into.extend_from_slice(header.as_bytes());
}

fn encode_blocks(kind: u8, class: SizeClass, flag: bool, blocks: &[FreeBlock], into: &mut Vec<u8>) {
    debug_assert!(blocks.len() <= BLOCKS_PER_MESSAGE_MAX);
    encode_header(kind, class.index(), flag, blocks.len() as u32, into);
    for block in blocks {
        let (address, generation) = (block.address.0.into(), block.generation.into());
        into.extend_from_slice(BlockBytes { address, generation }.as_bytes());
    }
}

struct Decoded<'a> {
    kind: u8,
    class: u8,
    flag: u8,
    count: u32,
    payload: &'a [u8],
}

fn decode(bytes: &[u8]) -> Result<Decoded<'_>, ControlError> {
    let length = ControlError::Length { bytes: bytes.len() };
    let Ok((header, payload)) = Header::ref_from_prefix(bytes) else { return Err(length) };
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(length);
    }
    unused("reserved byte", header.reserved)?;
    let count = header.count.get();
    Ok(Decoded { kind: header.kind, class: header.class, flag: header.flag, count, payload })
}

/// What this kind of message has no use for is 0.
fn unused(field: &'static str, value: impl Into<u64>) -> Result<(), ControlError> {
    match value.into() {
        0 => Ok(()),
        value => Err(ControlError::Unknown { field, value }),
    }
}

impl Decoded<'_> {
    /// A message that says nothing but what it is.
    fn bare(&self) -> Result<(), ControlError> {
        unused("size class", self.class)?;
        unused("flag", self.flag)?;
        unused("count", self.count)?;
        self.no_payload()
    }

    fn flag(&self) -> Result<bool, ControlError> {
        match self.flag {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(ControlError::Unknown { field: "flag", value: value.into() }),
        }
    }

    fn class(&self) -> Result<SizeClass, ControlError> {
        let value = self.class.into();
        SizeClass::from_index(self.class)
            .map_err(|_| ControlError::Unknown { field: "size class", value })
    }

    fn blocks(&self) -> Result<Vec<FreeBlock>, ControlError> {
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

    fn addresses(&self) -> Result<Vec<BlockAddress>, ControlError> {
        let length = ControlError::Length { bytes: self.payload.len() };
        match <[le::U32]>::ref_from_bytes(self.payload) {
            Ok(units) if units.len() <= HELD_PER_MESSAGE_MAX => {
                Ok(units.iter().map(|units| BlockAddress(units.get())).collect())
            }
            _ => Err(length),
        }
    }

    fn no_payload(&self) -> Result<(), ControlError> {
        match self.payload.len() {
            0 => Ok(()),
            bytes => Err(ControlError::Length { bytes }),
        }
    }

    fn statistics(&self) -> Result<ServerStatistics, ControlError> {
        unused("size class", self.class)?;
        unused("flag", self.flag)?;
        let statistics = ServerStatistics::decode(self.payload)?;
        match statistics.classes.len() == self.count as usize {
            true => Ok(statistics),
            false => Err(ControlError::Length { bytes: self.payload.len() }),
        }
    }
}

impl Request {
    /// The request as bytes, in place of what `into` held.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::TakeBlocks { class, count } => {
                encode_header(TAKE, class.index(), false, *count, into);
            }
            Self::GiveBlocks { class, rested, blocks } => {
                encode_blocks(GIVE, *class, *rested, blocks, into);
            }
            Self::Held { collection, last, blocks } => {
                debug_assert!(blocks.len() <= HELD_PER_MESSAGE_MAX);
                encode_header(HELD, 0, *last, *collection, into);
                for address in blocks {
                    into.extend_from_slice(&address.0.to_le_bytes());
                }
            }
            Self::Collect => encode_header(COLLECT, 0, false, 0, into),
            Self::Statistics => encode_header(STATISTICS, 0, false, 0, into),
            Self::Goodbye => encode_header(GOODBYE, 0, false, 0, into),
        }
    }

    /// The request in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let message = decode(bytes)?;
        match message.kind {
            TAKE => {
                message.no_payload()?;
                unused("flag", message.flag)?;
                Ok(Self::TakeBlocks { class: message.class()?, count: message.count })
            }
            GIVE => Ok(Self::GiveBlocks {
                class: message.class()?,
                rested: message.flag()?,
                blocks: message.blocks()?,
            }),
            HELD => {
                unused("size class", message.class)?;
                let (collection, last) = (message.count, message.flag()?);
                Ok(Self::Held { collection, last, blocks: message.addresses()? })
            }
            COLLECT => message.bare().map(|()| Self::Collect),
            STATISTICS => message.bare().map(|()| Self::Statistics),
            GOODBYE => message.bare().map(|()| Self::Goodbye),
            kind => Err(ControlError::Unknown { field: "request", value: kind.into() }),
        }
    }
}

impl Reply {
    /// The reply as bytes, in place of what `into` held.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Blocks { class, soon, blocks } => {
                encode_blocks(BLOCKS, *class, *soon, blocks, into);
            }
            Self::Statistics(statistics) => {
                encode_header(STATISTICS_REPLY, 0, false, statistics.classes.len() as u32, into);
                statistics.encode(into);
            }
            Self::Ask(Ask::Report { collection }) => {
                encode_header(REPORT, 0, false, *collection, into);
            }
            Self::Ask(Ask::Return) => encode_header(RETURN, 0, false, 0, into),
        }
    }

    /// The reply in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let message = decode(bytes)?;
        match message.kind {
            BLOCKS => Ok(Self::Blocks {
                class: message.class()?,
                soon: message.flag()?,
                blocks: message.blocks()?,
            }),
            STATISTICS_REPLY => message.statistics().map(Self::Statistics),
            REPORT => {
                let collection = message.count;
                Decoded { count: 0, ..message }.bare()?;
                Ok(Self::Ask(Ask::Report { collection }))
            }
            RETURN => message.bare().map(|()| Self::Ask(Ask::Return)),
            kind => Err(ControlError::Unknown { field: "reply", value: kind.into() }),
        }
    }
}

#[cfg(test)]
mod tests;
