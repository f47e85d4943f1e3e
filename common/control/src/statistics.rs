//! What a server tells about its region and its clients.

use zerocopy::{FromBytes, little_endian as le};

use farside_layout::SizeClass;

use super::ControlError;

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
    /// Subtables that hold nothing: for splits to come, or resting after one.
    pub subtables_free: u64,
    /// How many bits of a hash the directory goes by.
    pub directory_depth: u64,
    /// Subtables split since the server started.
    pub splits: u64,
    /// Splits that were begun and cannot go on: an entry is damaged.
    pub splits_stuck: u64,
    /// Blocks handed out to clients since the server started.
    pub blocks_taken: u64,
    /// Blocks clients gave back since the server started.
    pub blocks_given: u64,
    /// Requests for blocks that were refused: there was none, and none to come soon.
    pub requests_denied: u64,
    /// Clients that vanished without a goodbye since the server started.
    pub clients_lost: u64,
    /// Chunks all of whose blocks are free, which wait until no client can name one of them.
    pub chunks_resting: u64,
    /// Chunks that changed from a class to no use since the server started.
    pub chunks_emptied: u64,
    /// How often the server asked all clients for the blocks they do not need.
    pub recalls: u64,
    /// Collections of lost blocks that ended since the server started.
    pub collections: u64,
    /// How many will have ended once there was one that began after now: `collections`, plus one,
    /// or plus two while one is under way.
    pub collections_next: u64,
    /// What the collection under way is doing: 0 for none, 1 walking the index, 2 waiting for
    /// clients to say what they hold.
    pub collecting: u64,
    /// Lost blocks that were found since the server started.
    pub blocks_collected: u64,
    /// Keys removed since the server started because their values had ended.
    pub keys_expired: u64,
    /// Keys removed since the server started to make room for others.
    pub keys_evicted: u64,
    /// Clients that are taking a snapshot.
    pub snapshots: u64,
    /// How far the one is that is least far, in thousandths; 0 without any.
    pub snapshot_permille: u64,
    /// Snapshots that were completed since the server started.
    pub snapshots_taken: u64,
    /// How much of the region has 2 MiB pages, in bytes: from the pool, or made by the server.
    pub huge_page_bytes: u64,
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
    /// Those of `blocks_free` that still rest.
    pub blocks_resting: u64,
}

/// The numbers of [`ServerStatistics`] before its classes.
const NUMBERS: usize = 28;
/// The numbers of a [`ClassStatistics`].
const CLASS_NUMBERS: usize = 4;

impl ServerStatistics {
    /// The numbers before the classes, as they stand in a message.
    fn numbers(&mut self) -> [&mut u64; NUMBERS] {
        [
            &mut self.incarnation,
            &mut self.uptime_ms,
            &mut self.clients,
            &mut self.chunks,
            &mut self.chunks_free,
            &mut self.chunks_index,
            &mut self.subtables,
            &mut self.subtables_free,
            &mut self.directory_depth,
            &mut self.splits,
            &mut self.splits_stuck,
            &mut self.blocks_taken,
            &mut self.blocks_given,
            &mut self.requests_denied,
            &mut self.clients_lost,
            &mut self.chunks_resting,
            &mut self.chunks_emptied,
            &mut self.recalls,
            &mut self.collections,
            &mut self.collections_next,
            &mut self.collecting,
            &mut self.blocks_collected,
            &mut self.keys_expired,
            &mut self.keys_evicted,
            &mut self.snapshots,
            &mut self.snapshot_permille,
            &mut self.snapshots_taken,
            &mut self.huge_page_bytes,
        ]
    }

    /// Appends all numbers to a message.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let first = self.clone().numbers().map(|number| *number);
        let class = |of: &ClassStatistics| {
            [of.class.index().into(), of.blocks, of.blocks_free, of.blocks_resting]
        };
        for number in first.into_iter().chain(self.classes.iter().flat_map(class)) {
            into.extend_from_slice(&number.to_le_bytes());
        }
    }

    /// The numbers in a message.
    pub(super) fn decode(payload: &[u8]) -> Result<Self, ControlError> {
        let length = ControlError::Length { bytes: payload.len() };
        let Ok(numbers) = <[le::U64]>::ref_from_bytes(payload) else { return Err(length) };
        let Some((first, classes)) = numbers.split_first_chunk::<NUMBERS>() else {
            return Err(length);
        };
        let (classes, []) = classes.as_chunks::<CLASS_NUMBERS>() else { return Err(length) };
        let class = |numbers: &[le::U64; CLASS_NUMBERS]| {
            let [value, blocks, blocks_free, blocks_resting] = numbers.map(le::U64::get);
            let unknown = ControlError::Unknown { field: "size class", value };
            let index = u8::try_from(value).map_err(|_| unknown.clone())?;
            let class = SizeClass::from_index(index).map_err(|_| unknown)?;
            Ok(ClassStatistics { class, blocks, blocks_free, blocks_resting })
        };
        let classes = classes.iter().map(class).collect::<Result<_, _>>()?;
        let mut statistics = Self { classes, ..Self::default() };
        for (into, number) in statistics.numbers().into_iter().zip(first) {
            *into = number.get();
        }
        Ok(statistics)
    }
}
