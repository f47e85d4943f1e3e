//! When to ask all clients for the blocks that they can spare.
//!
//! There is a recall for each kind of memory: a class of blocks, or chunks for the index. What has
//! come back of another kind does not help a client that wants this one.

use farside_fabric::Nanos;
use farside_layout::SizeClass;

use crate::depot::Returned;

/// How long after a recall the server waits for what comes back before it says that there is
/// nothing.
const ANSWER_NS: Nanos = 100_000_000;
/// Pause between two recalls of one kind of memory.
const PAUSE_NS: Nanos = 20_000_000;
/// Pause after a recall in vain, which brought nothing back: a client may be about to unlink some.
const IN_VAIN_PAUSE_NS: Nanos = 50_000_000;
/// After more recalls in vain than this in a row, the pause is [`HOPELESS_PAUSE_NS`].
const IN_VAIN_MAX: u32 = 8;
const HOPELESS_PAUSE_NS: Nanos = 500_000_000;

/// The last recall of one kind of memory.
#[derive(Clone, Copy, Default)]
struct Recall {
    at: Option<Nanos>,
    /// What had come back until then.
    returned: Returned,
    /// How many in a row have brought nothing.
    in_vain: u32,
}

impl Recall {
    /// The recall to make now; `None` if it is too early.
    fn next(&self, returned: Returned, now: Nanos) -> Option<Self> {
        let again = Self { at: Some(now), returned, in_vain: 0 };
        let Some(at) = self.at else { return Some(again) };
        let in_vain = if self.returned == returned { self.in_vain + 1 } else { 0 };
        let pause = match in_vain {
            0 => PAUSE_NS,
            1..=IN_VAIN_MAX => IN_VAIN_PAUSE_NS,
            _ => HOPELESS_PAUSE_NS,
        };
        (now.saturating_sub(at) >= pause).then_some(Self { in_vain, ..again })
    }
}

/// The recalls of each class of blocks, and behind them those of chunks.
pub(super) struct Recalls([Recall; SizeClass::COUNT + 1]);

impl Recalls {
    pub(super) fn new() -> Self {
        Self([Recall::default(); _])
    }

    fn of(&mut self, class: Option<SizeClass>) -> &mut Recall {
        &mut self.0[class.map_or(SizeClass::COUNT, |class| class.index().into())]
    }

    /// Whether to recall blocks now for a client that wants one of this class, or a chunk; so much
    /// has come back.
    pub(super) fn begin(
        &mut self,
        class: Option<SizeClass>,
        returned: Returned,
        now: Nanos,
    ) -> bool {
        let recall = self.of(class);
        let next = recall.next(returned, now);
        *recall = next.unwrap_or(*recall);
        next.is_some()
    }

    /// Whether something may still come back.
    pub(super) fn is_recent(&mut self, class: SizeClass, now: Nanos) -> bool {
        self.of(Some(class)).at.is_some_and(|at| now.saturating_sub(at) < ANSWER_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recalls_in_vain_become_rare_and_those_of_another_kind_do_not() {
        let mut recalls = Recalls::new();
        let class = SizeClass::for_bytes(64).unwrap();
        let nothing = Returned::default();
        let mut at = 5;
        assert!(recalls.begin(Some(class), nothing, at));
        let pauses = (0..10).map(|_| {
            let before = at;
            while !recalls.begin(Some(class), nothing, at) {
                at += 10_000_000;
            }
            at - before
        });
        let pauses: Vec<_> = pauses.collect();
        assert_eq!(pauses[..8], [IN_VAIN_PAUSE_NS; 8]);
        assert_eq!(pauses[8..], [HOPELESS_PAUSE_NS; 2]);
        assert!(recalls.is_recent(class, at) && !recalls.is_recent(class, at + ANSWER_NS));
        assert!(recalls.begin(None, nothing, at));
        let more = Returned { blocks: 1, ..nothing };
        assert!(recalls.begin(Some(class), more, at + PAUSE_NS));
    }
}
