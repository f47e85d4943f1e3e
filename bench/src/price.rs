//! The least that an operation costs, in verbs and bytes: README's price list. The location is
//! cached, except for an INSERT, and there is no contention.

use farside_layout::{SizeClass, WINDOW_BYTES, block_bytes, class_for};

use crate::keys::KEY_BYTES;
use crate::workload::Kind;

/// The least that an operation costs.
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
    /// The bytes that these verbs transfer.
    pub bytes: u64,
}

/// The length of the mark on an old block.
const MARK_BYTES: u64 = 4;
/// The length of the word that a compare-and-swap transfers.
const WORD_BYTES: u64 = 8;

impl Price {
    /// The price of an operation of this kind, with a value of this length.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// tests/tests/integration/verb_counts.rs checks the same numbers against the fabric's
    /// counters.
    #[test]
    fn prices_are_those_of_readmes_list() {
        let price = |kind| {
            let Price { round_trips, reads, writes, swaps, bytes } = Price::of(kind, 64);
            ((round_trips, reads, writes, swaps), bytes)
        };
        assert_eq!(price(Kind::Get), ((1, 1, 0, 0), 128));
        assert_eq!(price(Kind::Put), ((1, 0, 2, 1), 132));
        assert_eq!(price(Kind::Insert), ((2, 1, 1, 2), 392));
        assert_eq!(price(Kind::Rmw), ((2, 1, 2, 1), 260));
    }
}
