//! What an operation takes at least: README's price list, in verbs and bytes. Of one whose location
//! is cached, without contention; an INSERT has no location yet.

use farside_layout::{SizeClass, WINDOW_BYTES, block_bytes, class_for};

use crate::keys::KEY_BYTES;
use crate::workload::Kind;

/// The least an operation takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Price {
    /// Round trips.
    pub round_trips: u64,
    /// READs.
    pub reads: u64,
    /// WRITEs.
    pub writes: u64,
    /// Compare-and-swaps.
    pub swaps: u64,
    /// Bytes of all of these.
    pub bytes: u64,
}

/// The mark of an old block.
const MARK_BYTES: u64 = 4;
/// What a compare-and-swap moves.
const WORD_BYTES: u64 = 8;

impl Price {
    /// Of this kind, with values of this length.
    pub fn of(kind: Kind, value_bytes: usize) -> Self {
        let block = block_bytes(KEY_BYTES, value_bytes);
        match kind {
            Kind::Get => {
                let bytes = class_for(KEY_BYTES, value_bytes).map_or(block, SizeClass::block_bytes);
                Self { round_trips: 1, reads: 1, bytes, ..Self::default() }
            }
            Kind::Put => {
                let bytes = block + MARK_BYTES + WORD_BYTES;
                Self { round_trips: 1, reads: 0, writes: 2, swaps: 1, bytes }
            }
            Kind::Insert => {
                let bytes = WINDOW_BYTES + block + 2 * WORD_BYTES;
                Self { round_trips: 2, reads: 1, writes: 1, swaps: 2, bytes }
            }
            Kind::Delete => {
                let bytes = MARK_BYTES + WORD_BYTES;
                Self { round_trips: 1, reads: 0, writes: 1, swaps: 1, bytes }
            }
            Kind::Rmw => {
                let (get, put) =
                    (Self::of(Kind::Get, value_bytes), Self::of(Kind::Put, value_bytes));
                Self {
                    round_trips: get.round_trips + put.round_trips,
                    reads: get.reads + put.reads,
                    writes: get.writes + put.writes,
                    swaps: get.swaps + put.swaps,
                    bytes: get.bytes + put.bytes,
                }
            }
        }
    }

    /// All verbs.
    pub fn verbs(&self) -> u64 {
        self.reads + self.writes + self.swaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As tests/tests/integration/verb_counts.rs counts them.
    #[test]
    fn prices_are_those_of_the_list() {
        let price = |kind| {
            let Price { round_trips, reads, writes, swaps, bytes } = Price::of(kind, 64);
            ((round_trips, reads, writes, swaps), bytes)
        };
        assert_eq!(price(Kind::Get), ((1, 1, 0, 0), 128));
        assert_eq!(price(Kind::Put), ((1, 0, 2, 1), 132));
        assert_eq!(price(Kind::Insert), ((2, 1, 1, 2), 392));
        assert_eq!(price(Kind::Delete), ((1, 0, 1, 1), 12));
        assert_eq!(price(Kind::Rmw), ((2, 1, 2, 1), 260));
        assert_eq!(Price::of(Kind::Rmw, 64).verbs(), 4);
    }
}
