//! The statistics that a server sends about its region and its clients.

use serde::Serialize;
use zerocopy::{FromBytes, little_endian as le};

use farside_layout::SizeClass;

use super::ControlError;

/// A server's statistics about its region and its clients. Counts of events start with the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerStatistics {
    /// How many times a server has started on the region.
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
    /// Empty subtables: available for splits, or resting after one.
    pub subtables_free: u64,
    /// The depth of the directory: the number of hash bits that index it.
    pub directory_depth: u64,
    /// Subtables that were split.
    pub splits: u64,
    /// Splits that have begun but cannot continue, because an entry is damaged.
    pub splits_stuck: u64,
    /// How often the server skipped a slot because its word is damaged. Each walk through the index
    /// skips it again.
    pub slots_skipped: u64,
    /// Blocks that clients took.
    pub blocks_taken: u64,
    /// Blocks that clients gave back.
    pub blocks_returned: u64,
    /// Requests for blocks that were refused: there were none, and none were expected soon.
    pub requests_denied: u64,
    /// Clients that disconnected without a goodbye.
    pub clients_lost: u64,
    /// Chunks all of whose blocks are free. They wait until no client can name one of the blocks.
    pub chunks_emptying: u64,
    /// How many chunks have lost their class and become free.
    pub chunks_emptied: u64,
    /// How often the server asked all clients for the blocks that they do not need.
    pub recalls: u64,
    /// Collections of lost blocks that have ended.
    pub collections: u64,
    /// The value that `collections` will have when a collection that begins after this moment has
    /// ended: one more than now, or two more while a collection is under way.
    pub collections_next: u64,
    /// The step of the collection under way: 0 for none, 1 for a walk through the index, 2 for the
    /// wait for clients' reports.
    pub collecting: u64,
    /// Lost blocks that were found.
    pub blocks_collected: u64,
    /// Keys that the server removed because their values had expired.
    pub keys_expired: u64,
    /// Keys that the server removed to make room for others.
    pub keys_evicted: u64,
    /// Reads of keys that found the key, as clients have counted and reported them. The server asks
    /// for reports only while it evicts keys.
    pub reads_found: u64,
    /// Reads of keys that did not find the key, reported as `reads_found`.
    pub reads_absent: u64,
    /// Clients that are taking a snapshot.
    pub snapshots: u64,
    /// The progress of the snapshot that is least advanced, in thousandths; 0 if there is none.
    pub snapshot_permille: u64,
    /// Snapshots that were completed.
    pub snapshots_taken: u64,
    /// The bytes of the region that are in 2 MiB pages: from the pool, or made by the server.
    pub huge_page_bytes: u64,
    /// Operations on keys, as the clients have counted and reported them. 0 without a cluster.
    pub operations: u64,
    /// Servers that evict keys to make room for others: 1 or 0, in a cluster up to all.
    pub servers_evicting: u64,
    /// The classes that have chunks.
    pub classes: Vec<ClassStatistics>,
}

/// A server's statistics about the blocks of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ClassStatistics {
    /// The class. Serialized as the size of its blocks, in bytes.
    #[serde(rename = "block_bytes", serialize_with = "block_bytes")]
    pub class: SizeClass,
    /// All blocks of the class.
    pub blocks: u64,
    /// Blocks in the depot, including the blocks that still rest for GRACE. All other blocks are
    /// linked or held by clients.
    pub blocks_free: u64,
    /// Blocks in the depot that still rest.
    pub blocks_resting: u64,
    /// Keys that the server removed to make room for others.
    pub evicted: u64,
    /// The mean time from a key's write to its removal, in milliseconds, of the keys that were
    /// evicted lately; 0 if none was.
    pub evicted_after_ms: u64,
}

fn block_bytes<S: serde::Serializer>(class: &SizeClass, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(class.block_bytes())
}

/// The number of fields of [`ServerStatistics`] before its classes.
const NUMBERS: usize = 33;
/// The number of fields of a [`ClassStatistics`].
const CLASS_NUMBERS: usize = 6;

impl ServerStatistics {
    /// Returns the fields before the classes, in the order of a message.
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
            &mut self.slots_skipped,
            &mut self.blocks_taken,
            &mut self.blocks_returned,
            &mut self.requests_denied,
            &mut self.clients_lost,
            &mut self.chunks_emptying,
            &mut self.chunks_emptied,
            &mut self.recalls,
            &mut self.collections,
            &mut self.collections_next,
            &mut self.collecting,
            &mut self.blocks_collected,
            &mut self.keys_expired,
            &mut self.keys_evicted,
            &mut self.reads_found,
            &mut self.reads_absent,
            &mut self.snapshots,
            &mut self.snapshot_permille,
            &mut self.snapshots_taken,
            &mut self.huge_page_bytes,
            &mut self.operations,
            &mut self.servers_evicting,
        ]
    }

    /// Returns the statistics of two servers together: the sums, of the incarnation and the uptime
    /// the lesser, of the directory's depth the greater, and of the ages at eviction the mean.
    pub fn plus(mut self, other: &Self) -> Self {
        let mut other = other.clone();
        let least = |of: fn(&Self) -> u64| of(&self).min(of(&other));
        let (incarnation, uptime_ms) = (least(|it| it.incarnation), least(|it| it.uptime_ms));
        let directory_depth = self.directory_depth.max(other.directory_depth);
        for (sum, number) in self.numbers().into_iter().zip(other.numbers()) {
            *sum = sum.saturating_add(*number);
        }
        for class in other.classes {
            match self.classes.iter_mut().find(|sum| sum.class == class.class) {
                Some(sum) => {
                    sum.blocks += class.blocks;
                    sum.blocks_free += class.blocks_free;
                    sum.blocks_resting += class.blocks_resting;
                    let ages = [&*sum, &class]
                        .map(|of| u128::from(of.evicted) * u128::from(of.evicted_after_ms));
                    sum.evicted = sum.evicted.saturating_add(class.evicted);
                    sum.evicted_after_ms =
                        (ages.iter().sum::<u128>() / u128::from(sum.evicted.max(1))) as u64;
                }
                None => self.classes.push(class),
            }
        }
        self.classes.sort_by_key(|class| class.class.block_bytes());
        Self { incarnation, uptime_ms, directory_depth, ..self }
    }

    /// Appends all numbers to a message.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let numbers = self.clone().numbers().map(|number| *number);
        let class_numbers = |it: &ClassStatistics| {
            let [class, evicted] = [it.class.index().into(), it.evicted];
            [class, it.blocks, it.blocks_free, it.blocks_resting, evicted, it.evicted_after_ms]
        };
        for number in numbers.into_iter().chain(self.classes.iter().flat_map(class_numbers)) {
            into.extend_from_slice(&number.to_le_bytes());
        }
    }

    /// Returns the statistics in the payload of a message.
    pub(super) fn decode(payload: &[u8]) -> Result<Self, ControlError> {
        let length = ControlError::Length { bytes: payload.len() };
        let Ok(numbers) = <[le::U64]>::ref_from_bytes(payload) else { return Err(length) };
        let Some((first, classes)) = numbers.split_first_chunk::<NUMBERS>() else {
            return Err(length);
        };
        let (classes, []) = classes.as_chunks::<CLASS_NUMBERS>() else { return Err(length) };
        let class = |numbers: &[le::U64; CLASS_NUMBERS]| {
            let [value, blocks, blocks_free, blocks_resting, evicted, evicted_after_ms] =
                numbers.map(le::U64::get);
            let unknown = ControlError::Unknown { field: "size class", value };
            let index = u8::try_from(value).map_err(|_| unknown.clone())?;
            let class = SizeClass::from_index(index).map_err(|_| unknown)?;
            Ok(ClassStatistics {
                class,
                blocks,
                blocks_free,
                blocks_resting,
                evicted,
                evicted_after_ms,
            })
        };
        let classes = classes.iter().map(class).collect::<Result<_, _>>()?;
        let mut statistics = Self { classes, ..Self::default() };
        for (into, number) in statistics.numbers().into_iter().zip(first) {
            *into = number.get();
        }
        Ok(statistics)
    }
}
