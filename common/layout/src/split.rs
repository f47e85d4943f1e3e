//! What a server answers to a client that asked for a split.

/// What came of a request to split a subtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SplitOutcome {
    /// There are two now: look again.
    Done = 0,
    /// There is no memory for another subtable just now, but some is about to come free.
    Later = 1,
    /// It cannot be split: no memory is left, or an entry of it is damaged.
    Impossible = 2,
}

impl SplitOutcome {
    /// The outcome with this number; `None` if none has.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Done),
            1 => Some(Self::Later),
            2 => Some(Self::Impossible),
            _ => None,
        }
    }
}
