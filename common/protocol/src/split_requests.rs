//! A session's requests to split subtables, and the server's answers.

use farside_layout::{SplitOutcome, prefix_of};

/// A subtable, by the leading bits of the hashes of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    bits: u32,
    /// The number of bits.
    pub local_depth: u8,
}

impl Prefix {
    /// The subtable of this local depth for keys with this directory hash.
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
    /// The number of lanes that wait for the answer. The last one to leave removes the request.
    lanes: u16,
    answer: Option<SplitOutcome>,
}

/// The splits that lanes wait for. Lanes that need the same split share one request.
#[derive(Default)]
pub(crate) struct SplitRequests {
    requests: Vec<SplitRequest>,
}

impl SplitRequests {
    fn find(&mut self, prefix: Prefix) -> Option<usize> {
        self.requests.iter().position(|request| request.prefix == prefix)
    }

    /// Adds a lane to those that wait for this split. Returns true if it is the first one, which
    /// has to send the request.
    pub(crate) fn join(&mut self, prefix: Prefix) -> bool {
        if let Some(at) = self.find(prefix) {
            self.requests[at].lanes += 1;
            return false;
        }
        self.requests.push(SplitRequest { prefix, lanes: 1, answer: None });
        true
    }

    /// The server's answer, if it has arrived.
    pub(crate) fn answer(&mut self, prefix: Prefix) -> Option<SplitOutcome> {
        self.find(prefix).and_then(|at| self.requests[at].answer)
    }

    /// Notes the server's answer.
    pub(crate) fn answered(&mut self, prefix: Prefix, outcome: SplitOutcome) {
        if let Some(at) = self.find(prefix) {
            self.requests[at].answer = Some(outcome);
        }
    }

    /// Removes a lane from those that wait for this split.
    pub(crate) fn leave(&mut self, prefix: Prefix) {
        let Some(at) = self.find(prefix) else { return };
        self.requests[at].lanes -= 1;
        if self.requests[at].lanes == 0 {
            self.requests.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_wait_for_one_subtable_share_one_request() {
        let mut splits = SplitRequests::default();
        let (one, other) = (Prefix::of(0xf000_0000, 3), Prefix::of(0, 3));
        assert!(splits.join(one) && !splits.join(one) && splits.join(other));
        assert_eq!(splits.answer(one), None);
        splits.answered(one, SplitOutcome::Done);
        assert_eq!(splits.answer(one), Some(SplitOutcome::Done));
        assert_eq!(splits.answer(other), None);
        splits.leave(one);
        assert_eq!(splits.answer(one), Some(SplitOutcome::Done));
        splits.leave(one);
        assert!(splits.join(one), "the next lane sends a new request");
    }

    #[test]
    fn a_prefix_leads_back_to_its_subtable() {
        for depth in [0, 1, 7, 32] {
            let prefix = Prefix::of(0xdead_beef, depth);
            assert_eq!(Prefix::of(prefix.directory_hash(), depth), prefix);
        }
    }
}
