//! Moving blocks together, so that chunks become free for another size.

use std::collections::{HashMap, HashSet};

use farside_layout::SizeClass;

use farside_protocol::{HASHES, LANE, ScannedSlot, read_part, read_slot};

use crate::{Client, Entry, Error, OperationError, Result, Session, Store};

/// How much is moved before what it left goes back to the server, in bytes: at most as much is out
/// of reach of all clients.
const BATCH_BYTES: u64 = 4 << 20;

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compaction {
    /// Chunks that were thin, and from which everything was to move.
    pub chunks_thin: u64,
    /// Blocks moved.
    pub blocks_moved: u64,
    /// Their keys and values, in bytes.
    pub bytes_moved: u64,
}

/// The live blocks of a chunk.
#[derive(Clone, Copy)]
struct Occupancy {
    class: SizeClass,
    live: u64,
}

impl Client {
    /// Moves blocks out of chunks that are mostly free, as far as others of their class have room,
    /// by ordinary updates: values and their ends stay, versions change. Such a chunk is free for
    /// another size 288 x GRACE after its last block has gone.
    ///
    /// Other clients may go on meanwhile; what they change is left alone. READs the index twice,
    /// and takes a GET and a compare-and-exchange for each block that moves.
    ///
    /// # Errors
    /// As [`Session::put`](crate::Session::put). It ends without one where there is no more room.
    pub fn compact(&self) -> Result<Compaction> {
        let mut session = self.session()?;
        let mut chunks: HashMap<u32, Occupancy> = HashMap::new();
        let mut from = 0;
        while from < HASHES {
            let (slots, to) = slots(&mut session, from)?;
            for (chunk, slot) in slots {
                let Some(block) = slot.block() else { continue };
                let new = Occupancy { class: block.class, live: 0 };
                chunks.entry(chunk).or_insert(new).live += 1;
            }
            from = to;
        }
        let thin = thin_chunks(&chunks);
        let mut done = Compaction { chunks_thin: thin.len() as u64, ..Default::default() };
        if thin.is_empty() {
            return Ok(done);
        }
        let (mut batch_bytes, mut from) = (0, 0);
        while from < HASHES {
            let (slots, to) = slots(&mut session, from)?;
            for (chunk, slot) in slots {
                if !thin.contains(&chunk) {
                    continue;
                }
                let Some(entry) = entry(&mut session, slot)? else { continue };
                let mut store = Store::if_version(entry.value.version);
                if let Some(end) = entry.expires_at {
                    store = store.until(end);
                }
                match session.store(&entry.key, &entry.value, store) {
                    Ok(true) => {
                        done.blocks_moved += 1;
                        done.bytes_moved += (entry.key.len() + entry.value.len()) as u64;
                    }
                    Ok(false) | Err(Error::Operation(OperationError::Contended { .. })) => {}
                    Err(Error::Operation(OperationError::OutOfSpace { .. })) => return Ok(done),
                    Err(error) => return Err(error),
                }
                batch_bytes += slot.block().map_or(0, |block| block.class.block_bytes());
                if batch_bytes > BATCH_BYTES {
                    // Else this session would move the next blocks to where these were.
                    session.handle()?.region.allocator().give_all();
                    batch_bytes = 0;
                }
            }
            from = to;
        }
        Ok(done)
    }
}

/// The slots that link a block, with its chunk, of the part of all hashes that begins there; and
/// where that ends. One round trip a subtable.
fn slots(session: &mut Session, from: u64) -> Result<(Vec<(u32, ScannedSlot)>, u64)> {
    let (geometry, found, to) = session.run(|handle| {
        let mut found = Vec::new();
        let to = handle.engine.endpoint.drive(read_part(handle, LANE, from as u32, &mut found))?;
        Ok((handle.region.format.geometry(), found, to))
    })?;
    let chunk = |slot: &ScannedSlot| geometry.chunk_of(slot.block()?.address.offset());
    Ok((found.into_iter().filter_map(|slot| Some((chunk(&slot)?, slot))).collect(), to))
}

/// The entry of a slot; `None` if it is gone, or for others to mend.
fn entry(session: &mut Session, slot: ScannedSlot) -> Result<Option<Entry>> {
    let entry = session.run(|handle| handle.engine.endpoint.drive(read_slot(handle, LANE, slot)));
    match entry {
        Err(Error::Operation(OperationError::Layout(_) | OperationError::Contended { .. })) => {
            Ok(None)
        }
        entry => entry,
    }
}

/// The thinnest chunks of each class, as many as the others have room for.
fn thin_chunks(chunks: &HashMap<u32, Occupancy>) -> HashSet<u32> {
    let mut thin = HashSet::new();
    for class in SizeClass::all() {
        let room = class.blocks_per_span();
        let of_class = chunks.iter().filter(|(_, of)| of.class == class);
        let mut of_class: Vec<(u64, u32)> = of_class.map(|(chunk, of)| (of.live, *chunk)).collect();
        of_class.sort_unstable();
        let mut free: u64 = of_class.iter().map(|(live, _)| room.saturating_sub(*live)).sum();
        let mut moving = 0;
        for (live, chunk) in of_class {
            free -= room.saturating_sub(live).min(free);
            moving += live;
            if moving > free {
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
    fn only_what_fits_elsewhere_is_thin() {
        let class = SizeClass::for_bytes(512 << 10).unwrap();
        assert_eq!(class.blocks_per_span(), 4);
        let thin = |lives: &[u64]| {
            let chunks =
                (0..).zip(lives).map(|(chunk, live)| (chunk, Occupancy { class, live: *live }));
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
