//! The kinds of operations.

use super::Expected;
use crate::Lifetime;

/// An operation on a key, without the key and the new value.
#[derive(Clone, Copy, Debug)]
pub enum Action<'v> {
    /// Read the value.
    Get,
    /// Store the value, whether or not the key is present.
    Put(Lifetime),
    /// Store the value if the key is absent.
    Insert(Lifetime),
    /// Store the value if the key is present.
    Update(Lifetime),
    /// Remove the key.
    Delete,
    /// Store the value if the present one is as expected.
    Exchange(Expected<'v>, Lifetime),
}

impl Action<'_> {
    /// Whether the operation may change the region.
    pub fn changes(self) -> bool {
        !matches!(self, Self::Get)
    }

    /// The lifetime of the value that the operation stores.
    pub fn lifetime(self) -> Lifetime {
        match self {
            Self::Get | Self::Delete => Lifetime::Forever,
            Self::Put(lifetime)
            | Self::Insert(lifetime)
            | Self::Update(lifetime)
            | Self::Exchange(_, lifetime) => lifetime,
        }
    }
}
