//! The chain of a PUT.

use crate::{Buffer, Verb};

/// The chain of a PUT at a known location, by far the most frequent one that changes a region.
/// Without loops over its verbs it takes fewer instructions.
pub(super) struct PutChain<'c> {
    pub(super) verbs: &'c [Verb; 3],
    pub(super) block: u64,
    pub(super) from: Buffer,
    pub(super) bytes: u32,
    pub(super) mark: u64,
    pub(super) mark_value: u32,
    pub(super) slot: u64,
    pub(super) expected: u64,
    pub(super) desired: u64,
}

impl<'c> PutChain<'c> {
    #[inline(always)]
    pub(super) fn of(chain: &'c [Verb]) -> Option<Self> {
        let verbs: &[Verb; 3] = chain.try_into().ok()?;
        let [
            Verb::Write { remote: block, from, bytes },
            Verb::WriteU32 { remote: mark, value: mark_value },
            Verb::CompareSwap { remote: slot, expected, desired },
        ] = *verbs
        else {
            return None;
        };
        Some(Self { verbs, block, from, bytes, mark, mark_value, slot, expected, desired })
    }
}
