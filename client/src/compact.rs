//! Compaction: moves blocks together, so that chunks become free for another size.

use std::collections::{HashMap, HashSet};

use farside_layout::SizeClass;
use serde::Serialize;

use farside_protocol::{HASHES, LANE, ScannedSlot, read_part, read_slot};

use crate::{Entry, Error, OperationError, Result, Session, Store};

/// The bytes of blocks that are moved before the old blocks go back to the server. Until then no
/// other client can use the old blocks.
const GIVE_BACK_BYTES: u64 = 4 << 20;

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Compaction {
    /// The number of thin chunks, which are mostly free and should be emptied.
    pub chunks_thin: u64,
    /// The number of blocks moved.
    pub blocks_moved: u64,
    /// The length of their keys and values together, in bytes.
    pub bytes_moved: u64,
}

/// The size class of a chunk, and how many of its blocks are linked.
#[derive(Clone, Copy)]
struct Occupancy {
    class: SizeClass,
    linked: u64,
}

/// Compacts the region of a shard, as [`Admin::compact`](crate::Admin::compact).
pub(crate) fn compact(session: &mut Session, shard: usize) -> Result<Compaction> {
    let mut chunks: HashMap<u32, Occupancy> = HashMap::new();
    let mut from = 0;
    while from < HASHES {
        let (slots, end) = slots_of_part(session, shard, from)?;
        for (chunk, slot) in slots {
            let Some(block) = slot.block() else { continue };
            let new = Occupancy { class: block.class, linked: 0 };
            chunks.entry(chunk).or_insert(new).linked += 1;
        }
        from = end;
    }
    let thin = thin_chunks(&chunks);
    let mut compaction = Compaction { chunks_thin: thin.len() as u64, ..Default::default() };
    if thin.is_empty() {
        return Ok(compaction);
    }
    let (mut held_bytes, mut from) = (0, 0);
    while from < HASHES {
        let (slots, end) = slots_of_part(session, shard, from)?;
        for (chunk, slot) in slots {
            if !thin.contains(&chunk) {
                continue;
            }
            let Some(entry) = read_entry(session, shard, slot)? else { continue };
            let store = Store::if_version(entry.value.version).keep_ttl();
            match session.store(&entry.key, &entry.value, store) {
                Ok(outcome) if outcome.applied => {
                    compaction.blocks_moved += 1;
                    compaction.bytes_moved += (entry.key.len() + entry.value.len()) as u64;
                }
                Ok(_) | Err(Error::Operation(OperationError::Contended { .. })) => {}
                Err(Error::Operation(OperationError::OutOfSpace { .. })) => {
                    return Ok(compaction);
                }
                Err(error) => return Err(error),
            }
            held_bytes += slot.block().map_or(0, |block| block.class.block_bytes());
            if held_bytes > GIVE_BACK_BYTES {
                // Otherwise this session would move the next blocks into the memory of the old
                // ones.
                session.handle(shard)?.region.allocator().give_all();
                held_bytes = 0;
            }
        }
        from = end;
    }
    Ok(compaction)
}

/// Reads one part of the range of hashes, which begins at `from`. Returns the slots that link a
/// block, each with the block's chunk, and the end of the part. One round trip for each subtable.
fn slots_of_part(
    session: &mut Session,
    shard: usize,
    from: u64,
) -> Result<(Vec<(u32, ScannedSlot)>, u64)> {
    let (geometry, found, end) = session.run_on_shard(shard, |handle| {
        let mut found = Vec::new();
        let end = handle.engine.endpoint.drive(read_part(handle, LANE, from as u32, &mut found))?;
        Ok((handle.region.format.geometry(), found, end))
    })?;
    let chunk = |slot: &ScannedSlot| geometry.chunk_of_block(slot.block()?.address);
    Ok((found.into_iter().filter_map(|slot| Some((chunk(&slot)?, slot))).collect(), end))
}

/// Reads the entry of a slot; `None` if it is gone, damaged, or changed too often meanwhile. Then
/// the block is not moved.
fn read_entry(session: &mut Session, shard: usize, slot: ScannedSlot) -> Result<Option<Entry>> {
    let entry = session
        .run_on_shard(shard, |handle| handle.engine.endpoint.drive(read_slot(handle, LANE, slot)));
    match entry {
        Err(Error::Operation(OperationError::Layout(_) | OperationError::Contended { .. })) => {
            Ok(None)
        }
        entry => entry,
    }
}

/// Returns the thinnest chunks of each class: as many as the other chunks have room for.
fn thin_chunks(chunks: &HashMap<u32, Occupancy>) -> HashSet<u32> {
    let mut thin = HashSet::new();
    for class in SizeClass::all() {
        let capacity = class.blocks_per_span();
        let class_chunks = chunks.iter().filter(|(_, occupancy)| occupancy.class == class);
        let mut class_chunks: Vec<(u64, u32)> =
            class_chunks.map(|(chunk, occupancy)| (occupancy.linked, *chunk)).collect();
        class_chunks.sort_unstable();
        let free = |linked: u64| capacity.saturating_sub(linked);
        let mut free_elsewhere: u64 = class_chunks.iter().map(|(linked, _)| free(*linked)).sum();
        let mut moving = 0;
        for (linked, chunk) in class_chunks {
            free_elsewhere -= free(linked);
            moving += linked;
            if moving > free_elsewhere {
                break;
            }
            thin.insert(chunk);
        }
    }
    thin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_thin_only_if_their_blocks_fit_elsewhere() {
        let class = SizeClass::for_bytes(512 << 10).unwrap();
        assert_eq!(class.blocks_per_span(), 4);
        let thin = |linked: &[u64]| {
            let occupancy = |linked: &u64| Occupancy { class, linked: *linked };
            let chunks = (0..).zip(linked.iter().map(occupancy));
            let mut thin: Vec<u32> = thin_chunks(&chunks.collect()).into_iter().collect();
            thin.sort_unstable();
            thin
        };
        assert_eq!(thin(&[4, 4, 4]), [0; 0]);
        assert_eq!(thin(&[1]), [0; 0]);
        assert_eq!(thin(&[3, 3, 3]), [0; 0]);
        assert_eq!(thin(&[1, 4, 3]), [0]);
        assert_eq!(thin(&[3, 1, 2, 2]), [1, 2]);
        assert_eq!(thin(&[3, 3, 3, 3]), [0]);
    }
}
