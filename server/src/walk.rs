//! Walks through the index, a step at a time, so that no client waits for a chore for long.
//!
//! A step is over when its [`Budget`] is spent; the walk's [`Cursor`] says where the next one goes
//! on. What to do with a slot is the chore's own judgement.

use farside_fabric::ChainError;
use farside_layout::Slot;

use crate::index::{Index, SubtableImage};

/// How many bytes of blocks a step of a chore reads: some milliseconds.
const STEP_BYTES: u64 = 8 << 20;

/// What a step may still read.
///
/// The number of slots says nothing about how long a step takes: a slot can lead to 4 MiB, and a
/// million slots to the same 4 MiB. So bytes of blocks count, too. The block that is read last may
/// be longer than what was left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    subtables: usize,
    bytes: u64,
}

impl Budget {
    /// For a walk without clients that would wait.
    pub(crate) const UNLIMITED: Self = Self::new(usize::MAX, u64::MAX);

    pub(crate) const fn new(subtables: usize, bytes: u64) -> Self {
        Self { subtables, bytes }
    }

    /// For a step of a chore.
    pub(crate) const fn of_step(subtables: usize) -> Self {
        Self::new(subtables, STEP_BYTES)
    }

    /// Notes that so many bytes of blocks were read.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// The place and the slot in it that a walk looks at next.
///
/// An index only ever gets more places, so a walk by their numbers misses none. But a split moves
/// entries to places where the walk has been: see [`Index::moves`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    place: usize,
    slot: usize,
}

impl Cursor {
    /// A step from here on, to the end of the index at most.
    pub(crate) fn walk<'w>(&'w mut self, index: &'w Index, budget: Budget) -> Walk<'w> {
        Walk { index, cursor: self, budget, image: None, goes_round: false }
    }

    /// A step from here on that goes on at the start of the index when it comes to the end.
    pub(crate) fn walk_round<'w>(&'w mut self, index: &'w Index, budget: Budget) -> Walk<'w> {
        Walk { goes_round: true, ..self.walk(index, budget) }
    }
}

/// A step of a walk.
pub(crate) struct Walk<'w> {
    index: &'w Index,
    cursor: &'w mut Cursor,
    pub(crate) budget: Budget,
    /// The subtable that the cursor is in, read in this step.
    image: Option<SubtableImage>,
    goes_round: bool,
}

impl Walk<'_> {
    /// The next slot, with its offset in the region. `None` at the end of the step.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Slot)>, ChainError> {
        if self.budget.bytes == 0 {
            return Ok(None);
        }
        if self.goes_round && self.is_over() {
            *self.cursor = Cursor::default();
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
        match image.slot(self.cursor.slot) {
            Some(_) => self.image = Some(image),
            None => *self.cursor = Cursor { place: self.cursor.place + 1, slot: 0 },
        }
        Ok(found)
    }

    /// Whether the next slot takes another READ of the index.
    pub(crate) fn is_between_subtables(&self) -> bool {
        self.image.is_none()
    }

    /// Whether the walk, not only this step of it, has come to the end of the index.
    pub(crate) fn is_over(&self) -> bool {
        self.cursor.place >= self.index.places.len()
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::shm::{HugePages, RegionMemory};
    use farside_layout::{ROWS_PER_SUBTABLE, SLOTS_PER_ROW, slot_in_subtable};

    use super::*;
    use crate::recovery::{self, Opened};

    /// Also those of places that a split adds meanwhile.
    #[test]
    fn every_slot_comes_once_whatever_the_steps() {
        let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
        let Opened { mut index, .. } = recovery::open(&memory, &ServerConfig::default()).unwrap();
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
        let slots = |row| (0..SLOTS_PER_ROW).map(move |slot| slot_in_subtable(row, slot));
        let all = index.places.iter().flat_map(|place| {
            (0..ROWS_PER_SUBTABLE).flat_map(slots).map(move |offset| place + offset)
        });
        assert!(offsets.iter().copied().eq(all), "{} slots", offsets.len());
    }
}
