mod decoded;
#[cfg(test)]
mod tests;

use farside_layout::{BlockAddress, SizeClass};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use self::decoded::{Decoded, decode, unused};
use super::{
    CLIENTS_PER_MESSAGE_MAX, ClientDescription, ConnectedClient, ControlError, FreeBlock,
    MESSAGE_BYTES_MAX, ServerStatistics, SplitOutcome,
};

/// The maximum number of blocks in one message.
pub const BLOCKS_PER_MESSAGE_MAX: usize = 4096;
/// The maximum number of addresses in one message.
pub const HELD_PER_MESSAGE_MAX: usize = 16_000;
/// The maximum number of blocks in a report of reads.
pub const READS_PER_MESSAGE_MAX: usize = 16_000;
/// The maximum number of blocks in a list of the hottest ones.
pub const HOT_PER_MESSAGE_MAX: usize = 4000;

/// A message from a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Requests blocks. The answer is [`ServerMessage::Blocks`], with fewer or no blocks if the
    /// server has fewer, or [`ServerMessage::AllPinned`].
    TakeBlocks {
        /// The size class.
        class: SizeClass,
        /// The number of blocks, at most [`BLOCKS_PER_MESSAGE_MAX`].
        count: u32,
    },
    /// Gives back blocks that the client does not need. No answer.
    GiveBlocks {
        /// The size class.
        class: SizeClass,
        /// Whether all of them were unlinked GRACE ago. If not, the server lets them rest.
        rested: bool,
        /// The blocks.
        blocks: Vec<FreeBlock>,
    },
    /// Gives heads that the client has just unlinked. The server frees the extents that are theirs,
    /// which the client does not know for certain. No answer.
    GiveHeads {
        /// The size class.
        class: SizeClass,
        /// The heads.
        blocks: Vec<FreeBlock>,
    },
    /// Reports the blocks that all sessions of the client hold, in lists and in operations. One or
    /// several such messages answer a [`ServerRequest::Report`]. No answer.
    Held {
        /// The number of the collection.
        collection: u32,
        /// Whether this is the last message of the report.
        last: bool,
        /// The addresses, at most [`HELD_PER_MESSAGE_MAX`].
        blocks: Vec<BlockAddress>,
    },
    /// Requests a collection of lost blocks. The answer is [`ServerMessage::Statistics`], at once.
    Collect,
    /// Requests a split of a subtable that has no room for a key. The answer is
    /// [`ServerMessage::Split`], after the split or when it is impossible.
    Split {
        /// The leading bits of the key's hash, which lead to the subtable.
        directory_hash: u32,
        /// The subtable's local depth. If the key's subtable is deeper by now, no split is needed.
        local_depth: u8,
    },
    /// Requests statistics. The answer is [`ServerMessage::Statistics`].
    Statistics,
    /// Announces that the client is about to store values with an expiry, which the server has to
    /// remove. No answer.
    Expires,
    /// Reports the progress of a snapshot that the client takes, for the statistics. No answer.
    Snapshot {
        /// The progress in thousandths; 1000 when the snapshot has ended.
        permille: u32,
    },
    /// Answers [`ServerRequest::Alive`]: the client's process is running. No answer.
    Alive {
        /// The client's clock, which dates its proofs of words, in nanoseconds.
        clock_ns: u64,
    },
    /// Answers [`ServerRequest::Reads`]. The counts are those of the client, and the blocks are
    /// guesses: the server relies on neither. No answer.
    Reads {
        /// The reads of keys that found the key, since the last report.
        found: u64,
        /// The reads of keys that did not find the key, since the last report.
        absent: u64,
        /// Blocks that were read since the last report, at most [`READS_PER_MESSAGE_MAX`]: a
        /// sample. A block that is read often may be there several times.
        blocks: Vec<BlockAddress>,
    },
    /// Answers [`ServerRequest::Samples`]. The server relies on nothing of it. No answer.
    Samples {
        /// The blocks of a sample of the reads since the last answer, at most
        /// [`READS_PER_MESSAGE_MAX`]. A block is there once for each read of the sample.
        blocks: Vec<BlockAddress>,
    },
    /// Answers [`ServerRequest::Describe`]. No answer.
    Description(ClientDescription),
    /// Requests the clients whose id is not lower. The answer is [`ServerMessage::Clients`]. The
    /// server also asks its clients to describe themselves, so a later list has newer descriptions.
    Clients {
        /// The lowest id.
        from_id: u16,
    },
    /// Has the server disconnect and fence a client. The answer is [`ServerMessage::Kicked`]. Only
    /// a writer may send it.
    Kick {
        /// The client's id.
        client_id: u16,
    },
    /// Requests the blocks that were read most. The answer is [`ServerMessage::Hot`], with what the
    /// server knows now. Then the server asks its clients for samples of their reads for this time.
    Hot {
        /// The time in milliseconds. If it is above 0 and the server was not sampling, the counts
        /// start anew.
        for_ms: u32,
    },
    /// Asks whether the server's process runs and still serves the shard. The answer is
    /// [`ServerMessage::Heartbeat`], out of order. A server that does not know does not answer.
    Heartbeat {
        /// The client's clock, which the answer repeats, in nanoseconds.
        clock_ns: u64,
        /// The operations on keys since the last heartbeat, for the statistics.
        operations: u64,
    },
    /// Asks for the map of the cluster. The answer is [`ServerMessage::Map`], out of order.
    Map,
    /// Tells the server a map of its cluster, which may be newer than its own. No answer.
    NewerMap {
        /// The encoded map.
        map: Vec<u8>,
    },
    /// Signs off the client, which holds no blocks any more. No answer.
    Goodbye,
}

/// A message from a server: an answer, in the order of the requests, or a request of its own.
#[allow(clippy::large_enum_variant, reason = "few of them, and none for long")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerMessage {
    /// Answers [`Request::TakeBlocks`]. The blocks belong to the client now.
    Blocks {
        /// The size class.
        class: SizeClass,
        /// Whether all of them were unlinked GRACE ago. If not, the client lets them rest.
        rested: bool,
        /// Whether the server, which has no blocks now, may have some soon. The client then asks
        /// again.
        soon: bool,
        /// The blocks; empty if the server has none.
        blocks: Vec<FreeBlock>,
    },
    /// Answers [`Request::TakeBlocks`]. The server has no blocks. It evicts keys to make room, but
    /// the values that could make room for this class are pinned.
    AllPinned {
        /// The size class.
        class: SizeClass,
    },
    /// Answers [`Request::TakeBlocks`]. A cache has no blocks of the class, and more classes in use
    /// than chunks. The client takes a larger block.
    Larger {
        /// The size class.
        class: SizeClass,
        /// The class to ask for.
        larger: SizeClass,
    },
    /// Answers [`Request::TakeBlocks`]. The server has no blocks, and expects some only later, when
    /// a chunk can serve another size.
    RoomLater {
        /// The size class.
        class: SizeClass,
        /// In how many milliseconds.
        in_ms: u32,
    },
    /// Answers [`Request::Split`].
    Split {
        /// The same as in the request.
        directory_hash: u32,
        /// The same as in the request.
        local_depth: u8,
        /// The result.
        outcome: SplitOutcome,
    },
    /// Answers [`Request::Statistics`] and [`Request::Collect`].
    Statistics(ServerStatistics),
    /// Answers [`Request::Clients`].
    Clients {
        /// Whether no client has a higher id.
        last: bool,
        /// The clients in the order of their ids, at most [`CLIENTS_PER_MESSAGE_MAX`].
        clients: Vec<ConnectedClient>,
    },
    /// Answers [`Request::Kick`].
    Kicked {
        /// Whether a client with this id was connected.
        was_connected: bool,
    },
    /// Answers [`Request::Hot`].
    Hot {
        /// The number of reads in all samples.
        samples: u64,
        /// The blocks that were read most, at most [`HOT_PER_MESSAGE_MAX`].
        blocks: Vec<HotBlock>,
    },
    /// Answers [`Request::Heartbeat`].
    Heartbeat {
        /// The same as in the request.
        clock_ns: u64,
    },
    /// Answers [`Request::Map`]. The server also sends it when the map has changed.
    Map {
        /// The encoded map.
        map: Vec<u8>,
    },
    /// A request of the server's own.
    Request(ServerRequest),
}

/// A request from a server to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerRequest {
    /// Requests a report of the blocks that a writer holds. The answer is [`Request::Held`]. The
    /// server fences a client that does not answer in time.
    Report {
        /// The number of the collection.
        collection: u32,
    },
    /// Asks for the blocks that a writer does not need, because another client has none. The
    /// client sends them in [`Request::GiveBlocks`].
    Return,
    /// Asks what a writer's clock reads, over verbs only. The answer is [`Request::Alive`]. The
    /// server fences a client that does not answer in time, or whose clock has stood still.
    Alive,
    /// Asks a writer or reader what it has read, because the server evicts what is not read. The
    /// answer is [`Request::Reads`]. From the first such request on, the client notes its reads.
    Reads,
    /// Asks a writer or reader for a sample of its reads, because an operator asked what is hot.
    /// The answer is [`Request::Samples`]. From the first such request on, the client samples
    /// its reads.
    Samples,
    /// Asks a writer or reader what it is. The answer is [`Request::Description`].
    Describe,
}

/// A block that is read often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotBlock {
    /// Where it is.
    pub address: BlockAddress,
    /// Its class.
    pub class: SizeClass,
    /// How many reads of it the samples have. It may be too low by a small share of all samples.
    pub reads: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct HotBlockBytes {
    address: le::U32,
    class: le::U32,
    reads: le::U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    kind: u8,
    class: u8,
    flags: u8,
    reserved: u8,
    count: le::U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct BlockBytes {
    address: le::U32,
    generation: le::U32,
}

/// The flags of [`ServerMessage::Blocks`].
const RESTED: u8 = 1;
const SOON: u8 = 2;
/// The greatest local depth that a message can have, in bits of the hash.
const DEPTH_MAX: u8 = 32;

/// Replaces the content of `into` by the header of a message. In messages about splits `class` is
/// the local depth, `flags` the outcome and `count` the hash. In reports and requests for them
/// `count` is the collection, in messages about snapshots the progress, in those about clients an
/// id or a number, and in requests for hot blocks the time, as in answers about room.
fn encode_header(kind: u8, class: u8, flags: u8, count: u32, into: &mut Vec<u8>) {
    let header = Header { kind, class, flags, reserved: 0, count: count.into() };
    into.clear();
    into.extend_from_slice(header.as_bytes());
}

fn encode_blocks(kind: u8, class: SizeClass, flags: u8, blocks: &[FreeBlock], into: &mut Vec<u8>) {
    debug_assert!(blocks.len() <= BLOCKS_PER_MESSAGE_MAX);
    encode_header(kind, class.index(), flags, blocks.len() as u32, into);
    for block in blocks {
        let (address, generation) = (block.address.0.into(), block.generation.into());
        into.extend_from_slice(BlockBytes { address, generation }.as_bytes());
    }
}

/// Replaces the content of `into` by a message whose only content is these bytes.
fn encode_bytes(kind: u8, bytes: &[u8], into: &mut Vec<u8>) {
    debug_assert!(size_of::<Header>() + bytes.len() <= MESSAGE_BYTES_MAX);
    encode_header(kind, 0, 0, 0, into);
    into.extend_from_slice(bytes);
}

fn extend_with_addresses(into: &mut Vec<u8>, blocks: &[BlockAddress]) {
    for address in blocks {
        into.extend_from_slice(&address.0.to_le_bytes());
    }
}

impl Request {
    /// Returns the messages that answer a [`ServerRequest::Report`] with these blocks.
    pub fn held(collection: u32, blocks: &[BlockAddress]) -> impl Iterator<Item = Self> {
        let count = blocks.len().div_ceil(HELD_PER_MESSAGE_MAX).max(1);
        (0..count).map(move |at| {
            let from = at * HELD_PER_MESSAGE_MAX;
            let to = blocks.len().min(from + HELD_PER_MESSAGE_MAX);
            Self::Held { collection, last: at + 1 == count, blocks: blocks[from..to].to_vec() }
        })
    }

    /// Replaces the content of `into` by the encoded request.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::TakeBlocks { class, count } => {
                encode_header(TAKE, class.index(), 0, *count, into);
            }
            Self::GiveBlocks { class, rested, blocks } => {
                encode_blocks(GIVE, *class, (*rested).into(), blocks, into);
            }
            Self::GiveHeads { class, blocks } => {
                encode_blocks(GIVE_HEADS, *class, 0, blocks, into);
            }
            Self::Held { collection, last, blocks } => {
                debug_assert!(blocks.len() <= HELD_PER_MESSAGE_MAX);
                encode_header(HELD, 0, (*last).into(), *collection, into);
                extend_with_addresses(into, blocks);
            }
            Self::Reads { found, absent, blocks } => {
                debug_assert!(blocks.len() <= READS_PER_MESSAGE_MAX);
                encode_bytes(
                    READS,
                    [found, absent].map(|count| count.to_le_bytes()).as_flattened(),
                    into,
                );
                extend_with_addresses(into, blocks);
            }
            Self::Samples { blocks } => {
                debug_assert!(blocks.len() <= READS_PER_MESSAGE_MAX);
                encode_header(SAMPLES, 0, 0, 0, into);
                extend_with_addresses(into, blocks);
            }
            Self::Description(description) => {
                encode_header(DESCRIPTION, 0, 0, 0, into);
                description.encode(into);
            }
            Self::Clients { from_id } => {
                encode_header(CLIENTS, 0, 0, (*from_id).into(), into);
            }
            Self::Kick { client_id } => encode_header(KICK, 0, 0, (*client_id).into(), into),
            Self::Hot { for_ms } => encode_header(HOT, 0, 0, *for_ms, into),
            Self::Collect => encode_header(COLLECT, 0, 0, 0, into),
            Self::Split { directory_hash, local_depth } => {
                encode_header(SPLIT, *local_depth, 0, *directory_hash, into);
            }
            Self::Statistics => encode_header(STATISTICS, 0, 0, 0, into),
            Self::Expires => encode_header(EXPIRES, 0, 0, 0, into),
            Self::Snapshot { permille } => encode_header(SNAPSHOT, 0, 0, *permille, into),
            Self::Alive { clock_ns } => encode_bytes(ALIVE, &clock_ns.to_le_bytes(), into),
            Self::Heartbeat { clock_ns, operations } => {
                let numbers = [clock_ns.to_le_bytes(), operations.to_le_bytes()];
                encode_bytes(HEARTBEAT, numbers.as_flattened(), into);
            }
            Self::Map => encode_header(MAP, 0, 0, 0, into),
            Self::NewerMap { map } => encode_bytes(NEWER_MAP, map, into),
            Self::Goodbye => encode_header(GOODBYE, 0, 0, 0, into),
        }
    }

    /// Returns the request in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no request.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let message = decode(bytes)?;
        match message.kind {
            TAKE => {
                message.no_payload()?;
                unused("flags", message.flags)?;
                Ok(Self::TakeBlocks { class: message.class()?, count: message.count })
            }
            GIVE => Ok(Self::GiveBlocks {
                class: message.class()?,
                rested: message.flag()?,
                blocks: message.blocks()?,
            }),
            GIVE_HEADS => {
                unused("flags", message.flags)?;
                Ok(Self::GiveHeads { class: message.class()?, blocks: message.blocks()? })
            }
            HELD => {
                unused("size class", message.class)?;
                let (collection, last) = (message.count, message.flag()?);
                let blocks = message.addresses(message.payload, HELD_PER_MESSAGE_MAX)?;
                Ok(Self::Held { collection, last, blocks })
            }
            READS => message.reads(),
            SAMPLES => {
                message.no_class_or_flags()?;
                unused("count", message.count)?;
                let blocks = message.addresses(message.payload, READS_PER_MESSAGE_MAX)?;
                Ok(Self::Samples { blocks })
            }
            DESCRIPTION => message.description().map(Self::Description),
            CLIENTS => message.client_id().map(|from_id| Self::Clients { from_id }),
            KICK => message.client_id().map(|client_id| Self::Kick { client_id }),
            HOT => {
                let for_ms = message.count;
                Decoded { count: 0, ..message }.bare()?;
                Ok(Self::Hot { for_ms })
            }
            COLLECT => message.bare().map(|()| Self::Collect),
            SPLIT => {
                message.no_payload()?;
                unused("flags", message.flags)?;
                Ok(Self::Split { directory_hash: message.count, local_depth: message.depth()? })
            }
            STATISTICS => message.bare().map(|()| Self::Statistics),
            EXPIRES => message.bare().map(|()| Self::Expires),
            SNAPSHOT => message.permille().map(|permille| Self::Snapshot { permille }),
            ALIVE => message.clock().map(|clock_ns| Self::Alive { clock_ns }),
            HEARTBEAT => {
                let [clock_ns, operations] = message.numbers()?;
                Ok(Self::Heartbeat { clock_ns, operations })
            }
            MAP => message.bare().map(|()| Self::Map),
            NEWER_MAP => message.only_bytes().map(|map| Self::NewerMap { map }),
            GOODBYE => message.bare().map(|()| Self::Goodbye),
            kind => Err(ControlError::Unknown { field: "request", value: kind.into() }),
        }
    }
}

impl ServerMessage {
    /// Replaces the content of `into` by the encoded message.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Blocks { class, rested, soon, blocks } => {
                let rested = if *rested { RESTED } else { 0 };
                let soon = if *soon { SOON } else { 0 };
                encode_blocks(BLOCKS, *class, rested | soon, blocks, into);
            }
            Self::AllPinned { class } => encode_header(ALL_PINNED, class.index(), 0, 0, into),
            Self::Larger { class, larger } => {
                encode_header(LARGER, class.index(), 0, larger.index().into(), into);
            }
            Self::RoomLater { class, in_ms } => {
                encode_header(ROOM_LATER, class.index(), 0, *in_ms, into);
            }
            Self::Split { directory_hash, local_depth, outcome } => {
                encode_header(SPLIT_REPLY, *local_depth, *outcome as u8, *directory_hash, into);
            }
            Self::Statistics(statistics) => {
                encode_header(STATISTICS_REPLY, 0, 0, statistics.classes.len() as u32, into);
                statistics.encode(into);
            }
            Self::Clients { last, clients } => {
                debug_assert!(clients.len() <= CLIENTS_PER_MESSAGE_MAX);
                encode_header(CLIENTS_REPLY, 0, (*last).into(), clients.len() as u32, into);
                clients.iter().for_each(|client| client.encode(into));
            }
            Self::Kicked { was_connected } => {
                encode_header(KICK_REPLY, 0, (*was_connected).into(), 0, into);
            }
            Self::Hot { samples, blocks } => {
                debug_assert!(blocks.len() <= HOT_PER_MESSAGE_MAX);
                encode_bytes(HOT_REPLY, &samples.to_le_bytes(), into);
                for HotBlock { address, class, reads } in blocks {
                    let (address, class) = (address.0.into(), u32::from(class.index()).into());
                    let bytes = HotBlockBytes { address, class, reads: (*reads).into() };
                    into.extend_from_slice(bytes.as_bytes());
                }
            }
            Self::Heartbeat { clock_ns } => {
                encode_bytes(HEARTBEAT_REPLY, &clock_ns.to_le_bytes(), into);
            }
            Self::Map { map } => encode_bytes(MAP_REPLY, map, into),
            Self::Request(ServerRequest::Report { collection }) => {
                encode_header(REPORT, 0, 0, *collection, into);
            }
            Self::Request(ServerRequest::Return) => encode_header(RETURN, 0, 0, 0, into),
            Self::Request(ServerRequest::Alive) => encode_header(ASK_ALIVE, 0, 0, 0, into),
            Self::Request(ServerRequest::Reads) => encode_header(ASK_READS, 0, 0, 0, into),
            Self::Request(ServerRequest::Samples) => encode_header(ASK_SAMPLES, 0, 0, 0, into),
            Self::Request(ServerRequest::Describe) => {
                encode_header(ASK_DESCRIPTION, 0, 0, 0, into);
            }
        }
    }

    /// Returns the message in these bytes.
    ///
    /// # Errors
    /// [`ControlError`] for bytes that are no message of a server.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let message = decode(bytes)?;
        match message.kind {
            BLOCKS => {
                unused("flags", message.flags & !(RESTED | SOON))?;
                let (rested, soon) = (message.flags & RESTED != 0, message.flags & SOON != 0);
                let (class, blocks) = (message.class()?, message.blocks()?);
                Ok(Self::Blocks { class, rested, soon, blocks })
            }
            ALL_PINNED => {
                let class = message.class()?;
                Decoded { class: 0, ..message }.bare()?;
                Ok(Self::AllPinned { class })
            }
            LARGER => {
                message.no_payload()?;
                unused("flags", message.flags)?;
                let index = u8::try_from(message.count).unwrap_or(u8::MAX);
                let larger = Decoded { class: index, ..message }.class()?;
                Ok(Self::Larger { class: message.class()?, larger })
            }
            ROOM_LATER => {
                message.no_payload()?;
                unused("flags", message.flags)?;
                Ok(Self::RoomLater { class: message.class()?, in_ms: message.count })
            }
            SPLIT_REPLY => {
                message.no_payload()?;
                let (directory_hash, local_depth) = (message.count, message.depth()?);
                let (field, value) = ("split outcome", message.flags.into());
                let outcome = SplitOutcome::from_bits(message.flags)
                    .ok_or(ControlError::Unknown { field, value })?;
                Ok(Self::Split { directory_hash, local_depth, outcome })
            }
            STATISTICS_REPLY => message.statistics().map(Self::Statistics),
            CLIENTS_REPLY => message.clients(),
            KICK_REPLY => {
                let was_connected = message.flag()?;
                Decoded { flags: 0, ..message }.bare()?;
                Ok(Self::Kicked { was_connected })
            }
            HOT_REPLY => message.hot(),
            HEARTBEAT_REPLY => message.clock().map(|clock_ns| Self::Heartbeat { clock_ns }),
            MAP_REPLY => message.only_bytes().map(|map| Self::Map { map }),
            REPORT => {
                let collection = message.count;
                Decoded { count: 0, ..message }.bare()?;
                Ok(Self::Request(ServerRequest::Report { collection }))
            }
            RETURN => message.bare().map(|()| Self::Request(ServerRequest::Return)),
            ASK_ALIVE => message.bare().map(|()| Self::Request(ServerRequest::Alive)),
            ASK_READS => message.bare().map(|()| Self::Request(ServerRequest::Reads)),
            ASK_SAMPLES => message.bare().map(|()| Self::Request(ServerRequest::Samples)),
            ASK_DESCRIPTION => message.bare().map(|()| Self::Request(ServerRequest::Describe)),
            kind => Err(ControlError::Unknown { field: "reply", value: kind.into() }),
        }
    }
}

const TAKE: u8 = 1;
const GIVE: u8 = 2;
const STATISTICS: u8 = 3;
const GOODBYE: u8 = 4;
const BLOCKS: u8 = 5;
const STATISTICS_REPLY: u8 = 6;
const SPLIT: u8 = 7;
const SPLIT_REPLY: u8 = 8;
const HELD: u8 = 9;
const COLLECT: u8 = 10;
const REPORT: u8 = 11;
const RETURN: u8 = 12;
const EXPIRES: u8 = 20;
const SNAPSHOT: u8 = 21;
const ASK_ALIVE: u8 = 22;
const ALIVE: u8 = 23;
const HEARTBEAT: u8 = 24;
const HEARTBEAT_REPLY: u8 = 25;
const MAP: u8 = 26;
const MAP_REPLY: u8 = 27;
const NEWER_MAP: u8 = 28;
const ASK_READS: u8 = 29;
const READS: u8 = 30;
const ALL_PINNED: u8 = 31;
const ASK_SAMPLES: u8 = 32;
const SAMPLES: u8 = 33;
const ASK_DESCRIPTION: u8 = 34;
const DESCRIPTION: u8 = 35;
const CLIENTS: u8 = 36;
const CLIENTS_REPLY: u8 = 37;
const KICK: u8 = 38;
const KICK_REPLY: u8 = 39;
const HOT: u8 = 40;
const HOT_REPLY: u8 = 41;
const GIVE_HEADS: u8 = 42;
const ROOM_LATER: u8 = 43;
const LARGER: u8 = 44;
