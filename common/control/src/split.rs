//! What a server answers to who asked for a split.

use super::ControlError;

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
    pub(super) fn from_bits(bits: u8) -> Result<Self, ControlError> {
        match bits {
            0 => Ok(Self::Done),
            1 => Ok(Self::Later),
            2 => Ok(Self::Impossible),
            _ => Err(ControlError::Unknown { field: "split outcome", value: bits.into() }),
        }
    }
}
