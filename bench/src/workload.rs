//! YCSB's standard workloads as mixes of operations, and the least that an operation costs, in
//! verbs and bytes: README's price list. There the location is cached, except for an INSERT, and
//! there is no contention.

use std::fmt;
use std::str::FromStr;

use farside_layout::{SizeClass, WINDOW_BYTES, block_bytes, class_for};

use crate::distribution::Shape;
use crate::records::KEY_BYTES;
use crate::store::Action;

/// A kind of operation, which is counted and timed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Reads a value.
    Get,
    /// Stores a value, over an old one if there is one.
    Put,
    /// Stores the value of a new key.
    Insert,
    /// A GET, then a PUT of the same key; timed as one.
    Rmw,
}

impl Kind {
    /// How many kinds there are.
    pub const COUNT: usize = 4;
    /// All of them, in the order of [`Kind::index`].
    pub const ALL: [Self; Self::COUNT] = [Self::Get, Self::Put, Self::Insert, Self::Rmw];

    /// A number below [`Kind::COUNT`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Returns its first action, and its second if it has one.
    pub const fn actions(self) -> (Action, Option<Action>) {
        match self {
            Self::Get => (Action::Get, None),
            Self::Put => (Action::Put, None),
            Self::Insert => (Action::Insert, None),
            Self::Rmw => (Action::Get, Some(Action::Put)),
        }
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Insert => "insert",
            Self::Rmw => "rmw",
        }
    }
}

/// The share of each kind among the operations, by [`Kind::index`]. The shares add up to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix([f64; Kind::COUNT]);

impl Mix {
    /// No operations at all.
    pub const NOTHING: Self = Self([0.0; Kind::COUNT]);

    /// Shares in proportion to these weights, whatever they add up to. Returns `None` if a weight
    /// is negative, or if the sum is 0 or not finite.
    pub fn new(weights: &[(Kind, f64)]) -> Option<Self> {
        let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let are_weights = weights.iter().all(|(_, weight)| *weight >= 0.0);
        if !are_weights || !sum.is_finite() || sum <= 0.0 {
            return None;
        }
        let mut shares = [0.0; Kind::COUNT];
        for (kind, weight) in weights {
            shares[kind.index()] += weight / sum;
        }
        Some(Self(shares))
    }

    /// The share of a kind.
    pub const fn share(&self, kind: Kind) -> f64 {
        self.0[kind.index()]
    }

    /// The kinds with a share above 0, each with its share.
    pub fn kinds(&self) -> impl Iterator<Item = (Kind, f64)> {
        Kind::ALL.into_iter().zip(self.0).filter(|(_, share)| *share > 0.0)
    }

    /// The standard workload that has these shares, if one does.
    pub fn standard(&self) -> Option<Workload> {
        // Shares that were written in decimals may differ by a rounding error.
        let same = |a: f64, b: f64| (a - b).abs() < 1e-9;
        Workload::ALL.into_iter().find(|workload| {
            let Self(shares) = workload.mix();
            shares.into_iter().zip(self.0).all(|(a, b)| same(a, b))
        })
    }
}

/// A standard workload of YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Half reads, half updates.
    A,
    /// Mostly reads, some updates.
    B,
    /// Only reads.
    C,
    /// Reads of the newest records, and inserts.
    D,
    /// Half reads, half read-modify-writes.
    F,
}

/// The reason why there are no scans.
pub const NEEDS_RANGES: &str = "needs range scans, and a hash index has no order to scan in";

impl Workload {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::A, Self::B, Self::C, Self::D, Self::F];

    /// The operations it consists of.
    pub const fn mix(self) -> Mix {
        // GET, PUT, INSERT, RMW.
        Mix(match self {
            Self::A => [0.5, 0.5, 0.0, 0.0],
            Self::B => [0.95, 0.05, 0.0, 0.0],
            Self::C => [1.0, 0.0, 0.0, 0.0],
            Self::D => [0.95, 0.0, 0.05, 0.0],
            Self::F => [0.5, 0.0, 0.0, 0.5],
        })
    }

    /// The shape of popularity that YCSB gives this workload.
    pub const fn default_shape(self) -> Shape {
        match self {
            Self::D => Shape::Latest,
            _ => Shape::Zipfian,
        }
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        if text == "e" {
            return Err(format!("workload e {NEEDS_RANGES}"));
        }
        let found = Self::ALL.into_iter().find(|workload| workload.to_string() == text);
        found.ok_or_else(|| "there are the workloads a, b, c, d and f".to_owned())
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "a",
            Self::B => "b",
            Self::C => "c",
            Self::D => "d",
            Self::F => "f",
        })
    }
}

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

    #[test]
    fn workloads_are_parsed_from_their_names_and_e_is_refused_with_the_reason() {
        for name in ["a", "b", "c", "d", "f"] {
            let workload: Workload = name.parse().unwrap();
            assert_eq!(workload.to_string(), name);
            assert_eq!(name.to_uppercase().parse(), Ok(workload));
            let sum: f64 = workload.mix().kinds().map(|(_, share)| share).sum();
            assert!((sum - 1.0).abs() < 1e-12);
            assert_eq!(workload.mix().standard(), Some(workload));
        }
        let error = "e".parse::<Workload>().unwrap_err();
        assert!(error.contains("range scans"), "{error}");
        for text in ["", "g", "aa"] {
            assert!(text.parse::<Workload>().unwrap_err().contains("a, b, c, d and f"));
        }
    }

    #[test]
    fn the_index_of_a_kind_is_its_position_in_all() {
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), index);
        }
        assert_eq!(Workload::D.mix().share(Kind::Insert), 0.05);
        assert_eq!(Workload::C.mix().share(Kind::Put), 0.0);
        assert_eq!(Workload::F.mix().share(Kind::Rmw), 0.5);
    }

    #[test]
    fn weights_become_shares() {
        let mix = Mix::new(&[(Kind::Get, 3.0), (Kind::Put, 1.0)]).unwrap();
        assert_eq!((mix.share(Kind::Get), mix.share(Kind::Put)), (0.75, 0.25));
        assert_eq!(mix.standard(), None);
        assert_eq!(mix.kinds().count(), 2);
        let b = Mix::new(&[(Kind::Get, 0.95), (Kind::Put, 0.05)]).unwrap();
        assert_eq!(b.standard(), Some(Workload::B));
        for weights in [&[][..], &[(Kind::Get, 0.0)], &[(Kind::Get, f64::NAN)]] {
            assert_eq!(Mix::new(weights), None);
        }
        assert_eq!(Mix::new(&[(Kind::Get, 2.0), (Kind::Put, -1.0)]), None);
    }

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
