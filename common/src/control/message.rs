use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{ControlError, ServerStatistics};
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
    /// A subtable of the index has no room for a key: split it, please. Answered by
    /// [`Reply::Split`] once that is done, or cannot be.
    Split {
        /// The leading bits of the key's hash, which lead to the subtable.
        directory_hash: u32,
        /// How many of them its keys share. A deeper one by now needs no split.
        local_depth: u8,
    },
    /// Answered by [`Reply::Statistics`].
    Statistics,
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
        /// Which; none when there are none.
        blocks: Vec<FreeBlock>,
    },
    /// To [`Request::Split`], whose numbers come back.
    Split {
        /// As in the request.
        directory_hash: u32,
        /// As in the request.
        local_depth: u8,
        /// What came of it.
        outcome: SplitOutcome,
    },
    /// To [`Request::Statistics`].
    Statistics(ServerStatistics),
}

/// What came of a request to split a subtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SplitOutcome {
    /// There are two now: look again.
    Done = 0,
    /// There is no memory for another subtable just now, but some is about to come free.
    Later = 1,
    /// It cannot be split: no memory is left, or an entry of it is damaged.
    Impossible = 2,
}

impl SplitOutcome {
    fn from_bits(bits: u8) -> Result<Self, ControlError> {
        match bits {
            0 => Ok(Self::Done),
            1 => Ok(Self::Later),
            2 => Ok(Self::Impossible),
            _ => Err(ControlError::Unknown { field: "split outcome", value: bits.into() }),
        }
    }
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
const SPLIT: u8 = 7;
const SPLIT_REPLY: u8 = 8;

/// The most bits of a hash a directory could go by.
const DEPTH_MAX: u8 = 32;
/// The header of a message, in place of what `into` held.
fn encode_header(kind: u8, class: u8, flag: bool, count: u32, into: &mut Vec<u8>) {
    put_header(Header { kind, class, flag: flag.into(), reserved: 0, count: count.into() }, into);
}

fn put_header(header: Header, into: &mut Vec<u8>) {
    into.clear();
    into.extend_from_slice(header.as_bytes());
}

/// A split's messages have the depth for a class, the outcome for a flag, the hash for a count.
fn encode_split(kind: u8, directory_hash: u32, local_depth: u8, flag: u8, into: &mut Vec<u8>) {
    let (class, count) = (local_depth, directory_hash.into());
    put_header(Header { kind, class, flag, reserved: 0, count }, into);
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
    let count = header.count.get();
    Ok(Decoded { kind: header.kind, class: header.class, flag: header.flag, count, payload })
}

impl Decoded<'_> {
    fn class(&self) -> Result<SizeClass, ControlError> {
        let value = self.class.into();
        SizeClass::from_index(self.class)
            .map_err(|_| ControlError::Unknown { field: "size class", value })
    }

    /// The local depth in a split's message.
    fn depth(&self) -> Result<u8, ControlError> {
        let value = self.class.into();
        let depth = (self.class <= DEPTH_MAX).then_some(self.class);
        depth.ok_or(ControlError::Unknown { field: "local depth", value })
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
            Self::Split { directory_hash, local_depth } => {
                encode_split(SPLIT, *directory_hash, *local_depth, 0, into);
            }
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
                Ok(Self::TakeBlocks { class: message.class()?, count: message.count })
            }
            GIVE => Ok(Self::GiveBlocks {
                class: message.class()?,
                rested: message.flag != 0,
                blocks: message.blocks()?,
            }),
            SPLIT => {
                message.no_payload()?;
                Ok(Self::Split { directory_hash: message.count, local_depth: message.depth()? })
            }
            STATISTICS => message.no_payload().map(|()| Self::Statistics),
            GOODBYE => message.no_payload().map(|()| Self::Goodbye),
            kind => Err(ControlError::Unknown { field: "request", value: kind.into() }),
        }
    }
}

impl Reply {
    /// The reply as bytes, in place of what `into` held.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Blocks { class, blocks } => encode_blocks(BLOCKS, *class, false, blocks, into),
            Self::Split { directory_hash, local_depth, outcome } => {
                encode_split(SPLIT_REPLY, *directory_hash, *local_depth, *outcome as u8, into);
            }
            Self::Statistics(statistics) => {
                let classes = statistics.classes.len() as u32;
                encode_header(STATISTICS_REPLY, 0, false, classes, into);
                statistics.encode(into);
            }
        }
    }

    /// The reply in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let message = decode(bytes)?;
        match message.kind {
            BLOCKS => Ok(Self::Blocks { class: message.class()?, blocks: message.blocks()? }),
            SPLIT_REPLY => {
                message.no_payload()?;
                Ok(Self::Split {
                    directory_hash: message.count,
                    local_depth: message.depth()?,
                    outcome: SplitOutcome::from_bits(message.flag)?,
                })
            }
            STATISTICS_REPLY => Ok(Self::Statistics(ServerStatistics::decode(message.payload)?)),
            kind => Err(ControlError::Unknown { field: "reply", value: kind.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::control::ClassStatistics;

    fn some_blocks(count: u32) -> Vec<FreeBlock> {
        let block = |n| FreeBlock { address: BlockAddress(n), generation: n * 3 };
        (1..=count).map(block).collect()
    }

    fn class(index: u8) -> SizeClass {
        SizeClass::from_index(index).unwrap()
    }

    #[test]
    fn messages_come_back() {
        let mut bytes = Vec::new();
        let full = some_blocks(BLOCKS_PER_MESSAGE_MAX as u32);
        for request in [
            Request::TakeBlocks { class: class(59), count: 512 },
            Request::GiveBlocks { class: class(0), rested: true, blocks: full.clone() },
            Request::GiveBlocks { class: class(1), rested: false, blocks: Vec::new() },
            Request::Split { directory_hash: 0xdead_beef, local_depth: 32 },
            Request::Statistics,
            Request::Goodbye,
        ] {
            request.encode(&mut bytes);
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(Request::decode(&bytes).unwrap(), request);
            assert!(Request::decode(&bytes[..bytes.len() - 1]).is_err());
        }
        let classes = SizeClass::all()
            .map(|class| ClassStatistics { class, blocks: 9, blocks_free: 4 })
            .collect();
        let statistics =
            ServerStatistics { clients: 3, clients_lost: 8, classes, ..Default::default() };
        for reply in [
            Reply::Blocks { class: class(3), blocks: full },
            Reply::Split { directory_hash: 7, local_depth: 3, outcome: SplitOutcome::Impossible },
            Reply::Statistics(statistics),
            Reply::Statistics(ServerStatistics::default()),
        ] {
            reply.encode(&mut bytes);
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(Reply::decode(&bytes).unwrap(), reply);
            assert!(Reply::decode(&bytes[..bytes.len() - 1]).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
            let _ = Request::decode(&bytes);
            let _ = Reply::decode(&bytes);
        }

        #[test]
        fn damaged_messages_do_not_panic(at in 0usize..32, value: u8) {
            let mut bytes = Vec::new();
            let blocks = some_blocks(3);
            Request::GiveBlocks { class: class(0), rested: true, blocks }.encode(&mut bytes);
            bytes[at] = value;
            let _ = Request::decode(&bytes);
            let _ = Reply::decode(&bytes);
        }
    }
}
