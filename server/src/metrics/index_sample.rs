//! Estimates how many keys the index has, from a sample of its subtables.
//!
//! Clients insert and delete keys without the server, so the server cannot count them. The metrics
//! thread reads some subtables from the region instead. Hashes are uniform, so equal shares of the
//! directory have nearly the same number of keys. A subtable to which several entries of the
//! directory lead counts as much less in each of them.

use farside_fabric::ChainError;
use farside_fabric::memory::Region;
use farside_layout::{DirectoryEntry, Geometry, SlotState};

use crate::index::SubtableImage;

/// Limit on the entries of a sample, a power of two. The subtables of 64 entries are 512 KiB.
const ENTRIES_MAX: u64 = 64;

/// Returns an estimate of the number of keys in the index, whose directory has this depth. It is
/// exact if the directory has at most [`ENTRIES_MAX`] entries and no client changes the index.
pub(super) fn estimate_keys(
    region: &Region,
    geometry: &Geometry,
    depth: u8,
) -> Result<u64, ChainError> {
    let Some(directory) = geometry.directory_offset(depth) else { return Ok(0) };
    let entries = 1u64 << depth;
    let step = entries.div_ceil(ENTRIES_MAX);
    let (mut keys, mut last) = (0.0, None);
    for entry in (0..entries).step_by(step as usize) {
        let entry = DirectoryEntry::from_bits(region.load(directory + entry * 8)?);
        // No subtable: the directory has changed since, or is damaged.
        let Ok(offset) = entry.subtable(geometry) else { continue };
        let live = match last {
            Some((place, live)) if place == offset => live,
            _ => live_slots(region, offset)?,
        };
        last = Some((offset, live));
        let sharing = depth.saturating_sub(entry.local_depth());
        keys += live as f64 / (1u64 << sharing) as f64;
    }
    Ok((keys * step as f64).round() as u64)
}

fn live_slots(region: &Region, offset: u64) -> Result<usize, ChainError> {
    let image = SubtableImage::read(region, offset)?;
    Ok(image.slots().filter(|(_, slot)| slot.word().state() == SlotState::Live).count())
}
