//! What an operation is to do.

use super::Expected;
use crate::Lifetime;

/// What to do with a key.
#[derive(Clone, Copy, Debug)]
pub enum Action<'v> {
    /// Read the value.
    Get,
    /// Store, whatever is there.
    Put(Lifetime),
    /// Store if the key is absent.
    Insert(Lifetime),
    /// Store if the key is there.
    Update(Lifetime),
    /// Remove the key.
    Delete,
    /// Store if the value is as expected.
    Exchange(Expected<'v>, Lifetime),
}

impl Action<'_> {
    /// Whether it may change the region.
    pub fn changes(self) -> bool {
        !matches!(self, Self::Get)
    }

    /// How long what it stores stays.
    pub fn lifetime(self) -> Lifetime {
        match self {
            Self::Get | Self::Delete => Lifetime::Forever,
            Self::Put(of) | Self::Insert(of) | Self::Update(of) | Self::Exchange(_, of) => of,
        }
    }
}
