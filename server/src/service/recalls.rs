//! Recalls: decides when the server asks all clients for the blocks that they do not need.
//!
//! Each kind of memory has recalls of its own: each class of blocks, and chunks for the index. A
//! client whose request found no memory of one kind cannot use memory of another kind.

use farside_fabric::Nanos;
use farside_layout::SizeClass;

use crate::depot::ReturnCounts;

/// How long after a recall clients may still return blocks. Until then the server tells a client
/// whose request finds no block to ask again.
const RETURN_NS_MAX: Nanos = 100_000_000;
/// Pause between two recalls of one kind of memory.
const PAUSE_NS: Nanos = 20_000_000;
/// Pause after a recall in vain, after which nothing was returned. The server recalls again,
/// because a client may unlink blocks meanwhile.
const IN_VAIN_PAUSE_NS: Nanos = 50_000_000;
/// After more recalls in vain than this in a row, the pause is [`HOPELESS_PAUSE_NS`].
const IN_VAIN_MAX: u32 = 8;
const HOPELESS_PAUSE_NS: Nanos = 500_000_000;

/// The last recall of one kind of memory.
#[derive(Clone, Copy, Default)]
struct Recall {
    at: Option<Nanos>,
    /// The memory that had been returned when the recall was made.
    returned: ReturnCounts,
    /// The number of recalls in vain in a row.
    in_vain: u32,
}

impl Recall {
    /// Returns the recall to make now; `None` if it is too early.
    fn next(&self, returned: ReturnCounts, now: Nanos) -> Option<Self> {
        let next = Self { at: Some(now), returned, in_vain: 0 };
        let Some(at) = self.at else { return Some(next) };
        let in_vain = if self.returned == returned { self.in_vain + 1 } else { 0 };
        let pause = match in_vain {
            0 => PAUSE_NS,
            1..=IN_VAIN_MAX => IN_VAIN_PAUSE_NS,
            _ => HOPELESS_PAUSE_NS,
        };
        (now.saturating_sub(at) >= pause).then_some(Self { in_vain, ..next })
    }
}

/// The last recall of each class of blocks, then that of chunks.
pub(super) struct Recalls([Recall; SizeClass::COUNT + 1]);

impl Recalls {
    pub(super) fn new() -> Self {
        Self([Recall::default(); _])
    }

    fn of(&mut self, class: Option<SizeClass>) -> &mut Recall {
        &mut self.0[class.map_or(SizeClass::COUNT, |class| class.index().into())]
    }

    /// Returns whether a recall is due now, for a request for blocks of this class, or for a chunk.
    /// If it is due, notes that it is made. `returned` counts the memory that has been returned
    /// until now.
    pub(super) fn note_if_due(
        &mut self,
        class: Option<SizeClass>,
        returned: ReturnCounts,
        now: Nanos,
    ) -> bool {
        let recall = self.of(class);
        let next = recall.next(returned, now);
        *recall = next.unwrap_or(*recall);
        next.is_some()
    }

    /// Whether clients may still return blocks of this class because of the last recall.
    pub(super) fn is_recent(&mut self, class: SizeClass, now: Nanos) -> bool {
        self.of(Some(class)).at.is_some_and(|at| now.saturating_sub(at) < RETURN_NS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recalls_in_vain_become_rare_without_effect_on_another_kind() {
        let mut recalls = Recalls::new();
        let class = SizeClass::for_bytes(64).unwrap();
        let nothing = ReturnCounts::default();
        let mut at = 5;
        assert!(recalls.note_if_due(Some(class), nothing, at));
        let pauses = (0..10).map(|_| {
            let before = at;
            while !recalls.note_if_due(Some(class), nothing, at) {
                at += 10_000_000;
            }
            at - before
        });
        let pauses: Vec<_> = pauses.collect();
        assert_eq!(pauses[..8], [IN_VAIN_PAUSE_NS; 8]);
        assert_eq!(pauses[8..], [HOPELESS_PAUSE_NS; 2]);
        assert!(recalls.is_recent(class, at) && !recalls.is_recent(class, at + RETURN_NS_MAX));
        assert!(recalls.note_if_due(None, nothing, at));
        let more = ReturnCounts { blocks: 1, ..nothing };
        assert!(recalls.note_if_due(Some(class), more, at + PAUSE_NS));
    }
}
