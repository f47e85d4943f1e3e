use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::ControlError;
use crate::layout::{BlockAddress, SizeClass};

/// The longest message on a control channel, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The most blocks one message carries.
pub const BLOCKS_PER_MESSAGE_MAX: usize = 4096;

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
    /// Answered by [`Reply::Statistics`].
    Statistics,
    /// The client is about to store values with an end: somebody has to remove them. Not answered.
    Expires,
    /// The client is leaving and holds nothing any more. Not answered.
    Goodbye,
}

/// What a server answers on a control channel, in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Request::TakeBlocks`]: these belong to the client now.
    Blocks {
        /// Of which class.
        class: SizeClass,
        /// Whether all of them have been unlinked for GRACE already; else the client waits.
        rested: bool,
        /// Which; none when there are none.
        blocks: Vec<FreeBlock>,
    },
    /// To [`Request::Statistics`].
    Statistics(ServerStatistics),
}

/// What a server knows about its region and its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerStatistics {
    /// How many times a server started on the region.
    pub incarnation: u64,
    /// How long the server has been up, in milliseconds.
    pub uptime_ms: u64,
    /// Connected clients, the asking one included.
    pub clients: u64,
    /// Chunks of the heap.
    pub chunks: u64,
    /// Chunks without a use.
    pub chunks_free: u64,
    /// Chunks with subtables.
    pub chunks_index: u64,
    /// Subtables of the index.
    pub subtables: u64,
    /// Blocks handed out to clients since the server started.
    pub blocks_taken: u64,
    /// Blocks clients gave back since the server started.
    pub blocks_given: u64,
    /// Requests for blocks that found none.
    pub requests_denied: u64,
    /// Clients that vanished without a goodbye since the server started.
    pub clients_lost: u64,
    /// Keys removed since the server started because their values had ended.
    pub keys_expired: u64,
    /// Keys removed since the server started to make room for others.
    pub keys_evicted: u64,
    /// Classes that have chunks.
    pub classes: Vec<ClassStatistics>,
}

/// What a server knows about the blocks of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassStatistics {
    /// Which.
    pub class: SizeClass,
    /// All blocks of the class.
    pub blocks: u64,
    /// Those with the server, the ones still resting for GRACE included; the rest is linked or with
    /// clients.
    pub blocks_free: u64,
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
const EXPIRES: u8 = 20;

/// The numbers of [`ServerStatistics`] before its classes.
const STATISTICS_NUMBERS: usize = 13;
/// The numbers of a [`ClassStatistics`].
const CLASS_NUMBERS: usize = 3;

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
    flag: bool,
    count: u32,
    payload: &'a [u8],
}

fn decode(bytes: &[u8]) -> Result<Decoded<'_>, ControlError> {
    let length = ControlError::Length { bytes: bytes.len() };
    let Ok((header, payload)) = Header::ref_from_prefix(bytes) else { return Err(length) };
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(length);
    }
    let count = header.count.get();
    Ok(Decoded { kind: header.kind, class: header.class, flag: header.flag != 0, count, payload })
}

impl Decoded<'_> {
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

    fn no_payload(&self) -> Result<(), ControlError> {
        match self.payload.len() {
            0 => Ok(()),
            bytes => Err(ControlError::Length { bytes }),
        }
    }

    fn statistics(&self) -> Result<ServerStatistics, ControlError> {
        let length = ControlError::Length { bytes: self.payload.len() };
        let Ok(numbers) = <[le::U64]>::ref_from_bytes(self.payload) else { return Err(length) };
        let Some((first, classes)) = numbers.split_first_chunk::<STATISTICS_NUMBERS>() else {
            return Err(length);
        };
        let (classes, []) = classes.as_chunks::<CLASS_NUMBERS>() else { return Err(length) };
        let class = |[class, blocks, blocks_free]: &[le::U64; CLASS_NUMBERS]| {
            let value = class.get();
            let unknown = ControlError::Unknown { field: "size class", value };
            let index = u8::try_from(value).map_err(|_| unknown.clone())?;
            let class = SizeClass::from_index(index).map_err(|_| unknown)?;
            Ok(ClassStatistics { class, blocks: blocks.get(), blocks_free: blocks_free.get() })
        };
        let [
            incarnation,
            uptime_ms,
            clients,
            chunks,
            chunks_free,
            chunks_index,
            subtables,
            blocks_taken,
            blocks_given,
            requests_denied,
            clients_lost,
            keys_expired,
            keys_evicted,
        ] = first.map(le::U64::get);
        Ok(ServerStatistics {
            incarnation,
            uptime_ms,
            clients,
            chunks,
            chunks_free,
            chunks_index,
            subtables,
            blocks_taken,
            blocks_given,
            requests_denied,
            clients_lost,
            keys_expired,
            keys_evicted,
            classes: classes.iter().map(class).collect::<Result<_, _>>()?,
        })
    }
}

impl ServerStatistics {
    fn encode(&self, into: &mut Vec<u8>) {
        encode_header(STATISTICS_REPLY, 0, false, self.classes.len() as u32, into);
        let first: [u64; STATISTICS_NUMBERS] = [
            self.incarnation,
            self.uptime_ms,
            self.clients,
            self.chunks,
            self.chunks_free,
            self.chunks_index,
            self.subtables,
            self.blocks_taken,
            self.blocks_given,
            self.requests_denied,
            self.clients_lost,
            self.keys_expired,
            self.keys_evicted,
        ];
        let class = |of: &ClassStatistics| [of.class.index().into(), of.blocks, of.blocks_free];
        for number in first.into_iter().chain(self.classes.iter().flat_map(class)) {
            into.extend_from_slice(&number.to_le_bytes());
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
            Self::Statistics => encode_header(STATISTICS, 0, false, 0, into),
            Self::Expires => encode_header(EXPIRES, 0, false, 0, into),
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
                Ok(Self::TakeBlocks { class: message.class()?, count: message.count })
            }
            GIVE => Ok(Self::GiveBlocks {
                class: message.class()?,
                rested: message.flag,
                blocks: message.blocks()?,
            }),
            STATISTICS => message.no_payload().map(|()| Self::Statistics),
            EXPIRES => message.no_payload().map(|()| Self::Expires),
            GOODBYE => message.no_payload().map(|()| Self::Goodbye),
            kind => Err(ControlError::Unknown { field: "request", value: kind.into() }),
        }
    }
}

impl Reply {
    /// The reply as bytes, in place of what `into` held.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Blocks { class, rested, blocks } => {
                encode_blocks(BLOCKS, *class, *rested, blocks, into);
            }
            Self::Statistics(statistics) => statistics.encode(into),
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
                rested: message.flag,
                blocks: message.blocks()?,
            }),
            STATISTICS_REPLY => Ok(Self::Statistics(message.statistics()?)),
            kind => Err(ControlError::Unknown { field: "reply", value: kind.into() }),
        }
    }
}

#[cfg(test)]
mod tests;
