//! Which subtables a session asked the server to split, and what it answered.

use farside_layout::{SplitOutcome, prefix_of};

/// A subtable, by the leading bits of the hashes of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    bits: u32,
    /// How many bits.
    pub local_depth: u8,
}

impl Prefix {
    /// The subtable of keys with this directory hash, which goes by so many bits.
    pub fn of(directory_hash: u32, local_depth: u8) -> Self {
        Self { bits: prefix_of(directory_hash, local_depth), local_depth }
    }

    /// A directory hash that leads to the subtable.
    pub fn directory_hash(self) -> u32 {
        self.bits.checked_shl(32 - u32::from(self.local_depth)).unwrap_or(0)
    }
}

struct SplitRequest {
    prefix: Prefix,
    /// Lanes that wait for the answer; the last one to leave takes this away.
    lanes: u16,
    answer: Option<SplitOutcome>,
}

/// The splits that lanes wait for: one request for all lanes of a subtable.
#[derive(Default)]
pub(crate) struct SplitRequests {
    asked: Vec<SplitRequest>,
}

impl SplitRequests {
    fn find(&mut self, prefix: Prefix) -> Option<usize> {
        self.asked.iter().position(|asked| asked.prefix == prefix)
    }

    /// One more lane waits for this; true if the server was not asked yet.
    pub(crate) fn join(&mut self, prefix: Prefix) -> bool {
        if let Some(at) = self.find(prefix) {
            self.asked[at].lanes += 1;
            return false;
        }
        self.asked.push(SplitRequest { prefix, lanes: 1, answer: None });
        true
    }

    /// The server's answer, once there is one.
    pub(crate) fn answer(&mut self, prefix: Prefix) -> Option<SplitOutcome> {
        self.find(prefix).and_then(|at| self.asked[at].answer)
    }

    pub(crate) fn answered(&mut self, prefix: Prefix, outcome: SplitOutcome) {
        if let Some(at) = self.find(prefix) {
            self.asked[at].answer = Some(outcome);
        }
    }

    /// A lane waits no longer.
    pub(crate) fn leave(&mut self, prefix: Prefix) {
        let Some(at) = self.find(prefix) else { return };
        self.asked[at].lanes -= 1;
        if self.asked[at].lanes == 0 {
            self.asked.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_a_subtable_share_one_request() {
        let mut growth = SplitRequests::default();
        let (one, other) = (Prefix::of(0xf000_0000, 3), Prefix::of(0, 3));
        assert!(growth.join(one) && !growth.join(one) && growth.join(other));
        assert_eq!(growth.answer(one), None);
        growth.answered(one, SplitOutcome::Done);
        assert_eq!(growth.answer(one), Some(SplitOutcome::Done));
        assert_eq!(growth.answer(other), None);
        growth.leave(one);
        assert_eq!(growth.answer(one), Some(SplitOutcome::Done));
        growth.leave(one);
        assert!(growth.join(one), "the next one asks again");
    }

    #[test]
    fn a_prefix_leads_back_to_its_subtable() {
        for depth in [0, 1, 7, 32] {
            let prefix = Prefix::of(0xdead_beef, depth);
            assert_eq!(Prefix::of(prefix.directory_hash(), depth), prefix);
        }
    }
}
