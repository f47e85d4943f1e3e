//! The server's answer to a client that requested a split.

/// The result of a request to split a subtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SplitOutcome {
    /// The subtable was split, or has room by now: read the window again.
    Done = 0,
    /// There is no memory for another subtable now, but there may be soon: ask again.
    Later = 1,
    /// The subtable cannot be split: no memory is left, or one of its entries is damaged.
    Impossible = 2,
}

impl SplitOutcome {
    /// The outcome with this number, if there is one.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Done),
            1 => Some(Self::Later),
            2 => Some(Self::Impossible),
            _ => None,
        }
    }
}
