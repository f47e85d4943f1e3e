//! Walks through the index in short steps, so that no client waits long for a chore.
//!
//! A step ends when its [`Budget`] is spent. The next step continues at the walk's [`Cursor`]. The
//! chore, which calls [`Walk::next`], decides what it does with each slot.

use farside_fabric::ChainError;
use farside_layout::{SLOTS_PER_SUBTABLE, Slot};

use crate::budget::Budget;
use crate::index::{Index, SubtableImage};

/// The next slot of a walk: the number of its place, and of the slot in the place.
///
/// An index only gains places, so a walk by the numbers of places misses none of them. A split can
/// move entries to places that the walk has passed: see [`Index::moves`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    place: usize,
    slot: usize,
}

impl Cursor {
    /// Begins a step that ends at the end of the index at the latest.
    pub(crate) fn walk<'w>(&'w mut self, index: &'w Index, budget: Budget) -> Walk<'w> {
        Walk { index, cursor: self, budget, image: None }
    }
}

/// A step of a walk.
pub(crate) struct Walk<'w> {
    index: &'w Index,
    cursor: &'w mut Cursor,
    pub(crate) budget: Budget,
    /// The subtable of the cursor, if this step has read it.
    image: Option<SubtableImage>,
}

impl Walk<'_> {
    /// Returns the next slot, with its offset in the region; `None` at the end of the step.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Slot)>, ChainError> {
        if self.budget.bytes == 0 {
            return Ok(None);
        }
        let image = match self.image.take() {
            Some(image) => image,
            None if self.budget.subtables == 0 => return Ok(None),
            None => {
                let Some(place) = self.index.places.get(self.cursor.place) else { return Ok(None) };
                self.budget.subtables -= 1;
                SubtableImage::read(&self.index.region, *place)?
            }
        };
        let found = image.slot(self.cursor.slot).map(|(offset, slot)| (offset, *slot));
        self.cursor.slot += 1;
        if self.cursor.slot < SLOTS_PER_SUBTABLE {
            self.image = Some(image);
        } else {
            *self.cursor = Cursor { place: self.cursor.place + 1, slot: 0 };
        }
        Ok(found)
    }

    /// Whether the next slot is in a subtable that this step has not read yet.
    pub(crate) fn is_between_subtables(&self) -> bool {
        self.image.is_none()
    }

    /// Whether the walk, not only this step, has reached the end of the index.
    pub(crate) fn is_over(&self) -> bool {
        self.cursor.place >= self.index.places.len()
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_layout::slot_offset;

    use super::*;
    use crate::recovery::{self, ServedRegion};

    /// The walk also visits the slots of places that a split adds meanwhile.
    #[test]
    fn a_walk_in_steps_visits_every_slot_once() {
        let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
        let ServedRegion { mut index, .. } =
            recovery::open(&memory, &ServerConfig::default()).unwrap();
        let (mut cursor, mut offsets) = (Cursor::default(), Vec::new());
        for step in 0.. {
            let mut walk = cursor.walk(&index, Budget::of_step(7));
            while let Some((offset, _)) = walk.next().unwrap() {
                offsets.push(offset);
                if offsets.len() % 1000 == 0 {
                    walk.budget.spend(u64::MAX);
                }
            }
            if walk.is_over() {
                break;
            }
            if step == 3 {
                index.add_chunk(1);
            }
        }
        let all = index.places.iter().flat_map(|place| {
            (0..SLOTS_PER_SUBTABLE).map(move |number| place + slot_offset(number))
        });
        assert!(offsets.iter().copied().eq(all), "{} slots", offsets.len());
    }
}
