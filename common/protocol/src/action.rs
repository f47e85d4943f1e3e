//! The kinds of operations, and what they require of a key's present value.

use crate::{Lifetime, Version};

/// An operation on a key, without the key and the new value.
#[derive(Clone, Copy, Debug)]
pub enum Action<'v> {
    /// Read the value.
    Get,
    /// Find the version of the value.
    Version,
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
    /// Change the value depending on the present one, and return that.
    Modify(Modification<'v>),
}

/// The condition of an exchange.
#[derive(Clone, Copy, Debug)]
pub enum Expected<'v> {
    /// The key has this value.
    Value(&'v [u8]),
    /// The key has the value that this write stored.
    Version(Version),
}

/// What becomes of the key's present value. The staged value is the operation's own.
#[derive(Clone, Copy, Debug)]
pub enum Change<'v> {
    /// The staged value replaces it, if it is as expected. Without a condition it always does.
    Store(Option<Expected<'v>>),
    /// The sum of its decimal number and this one replaces it.
    Add(i64),
    /// The staged value is appended to it.
    Append,
    /// It stays, with the new lifetime. If it is pinned, it stays so.
    Retain,
    /// The key is removed, if its value is still the one that this write stored. Without a
    /// condition it always is.
    Remove(Option<Version>),
    /// Nothing changes.
    Leave,
    /// Nothing changes. The key is likely absent, so the operation begins with the INSERT.
    Refuse,
}

/// An operation that depends on the present value.
#[derive(Clone, Copy, Debug)]
pub struct Modification<'v> {
    /// What becomes of the present value.
    pub change: Change<'v>,
    /// Whether the operation stores a value if the key is absent.
    pub creates: bool,
    /// How long the new value stays.
    pub lifetime: Lifetime,
    /// Whether the answer has the value before the operation.
    pub returns: bool,
}

impl Action<'static> {
    /// Adds to a decimal number.
    pub fn increment(delta: i64) -> Self {
        Action::modify(Change::Add(delta), true, Lifetime::KEPT, false)
    }

    /// Appends the staged value to the present one, and returns that.
    pub fn append() -> Self {
        Action::modify(Change::Append, true, Lifetime::KEPT, true)
    }

    /// Reads the value. Stores the staged one if the key is absent.
    pub fn get_or_insert() -> Self {
        Action::modify(Change::Leave, true, Lifetime::FOREVER, true)
    }

    /// Gives the present value another lifetime. If it is pinned, it stays so.
    pub fn touch(lifetime: Lifetime) -> Self {
        Action::modify(Change::Retain, false, lifetime, false)
    }

    /// Removes the key and returns its value.
    pub fn take() -> Self {
        Action::modify(Change::Remove(None), false, Lifetime::FOREVER, true)
    }

    /// Removes the key if its value is still the one that the write `expected` stored.
    pub fn delete_if_version(expected: Version) -> Self {
        Action::modify(Change::Remove(Some(expected)), false, Lifetime::FOREVER, false)
    }
}

impl<'v> Action<'v> {
    /// A modification, from the fields of [`Modification`].
    pub fn modify(change: Change<'v>, creates: bool, lifetime: Lifetime, returns: bool) -> Self {
        Self::Modify(Modification { change, creates, lifetime, returns })
    }

    /// Whether the operation may change the region.
    pub fn changes(self) -> bool {
        !matches!(self, Self::Get | Self::Version)
    }

    /// The lifetime of the value that the operation stores.
    pub fn lifetime(self) -> Lifetime {
        match self {
            Self::Get | Self::Version | Self::Delete => Lifetime::FOREVER,
            Self::Put(lifetime)
            | Self::Insert(lifetime)
            | Self::Update(lifetime)
            | Self::Exchange(_, lifetime)
            | Self::Modify(Modification { lifetime, .. }) => lifetime,
        }
    }
}
