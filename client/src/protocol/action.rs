//! What an operation is to do.

use super::Expected;
use crate::store::Lifetime;

/// What to do with a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action<'v> {
    Get,
    Put(Lifetime),
    Insert(Lifetime),
    Update(Lifetime),
    Delete,
    Exchange(Expected<'v>, Lifetime),
}

impl Action<'_> {
    /// Whether it may change the region.
    pub(crate) fn changes(self) -> bool {
        !matches!(self, Self::Get)
    }

    /// How long what it stores stays.
    pub(crate) fn lifetime(self) -> Lifetime {
        match self {
            Self::Get | Self::Delete => Lifetime::Forever,
            Self::Put(of) | Self::Insert(of) | Self::Update(of) | Self::Exchange(_, of) => of,
        }
    }
}
