//! What operations return, in calls that wait, in pipelines and in batches.

use farside_protocol::{Value, Version};

/// What an operation did, and what it found. `V` is [`Value`], or [`ValueRef`] in a
/// [`Pipeline`](crate::Pipeline).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome<V = Value> {
    /// Whether the operation took effect: its condition held, or the key to be removed was present.
    /// Of a GET: whether the key is present.
    pub applied: bool,
    /// The version of the key's present value: the one stored, or the one that was found and left.
    ///
    /// `None` if the key is absent now, if another PUT has already overwritten the value, or if the
    /// operation did not have to read it: an INSERT that found the key present, an UPDATE or DELETE
    /// that did not apply.
    pub version: Option<Version>,
    /// The value that a GET or [`take`](crate::Session::take) found. For a store with
    /// [`Store::returning`](crate::Store::returning), the value before it: the replaced one, or the
    /// one that made its condition fail.
    pub value: Option<V>,
    /// The number that an increment stored; 0 for other operations.
    pub number: i64,
}

impl<V> Outcome<V> {
    /// Converts the value.
    pub(crate) fn map<W>(self, convert: impl FnOnce(V) -> W) -> Outcome<W> {
        let Self { applied, version, value, number } = self;
        Outcome { applied, version, value: value.map(convert), number }
    }
}

/// A value in the memory of a pipeline, and its version. It derefs to the value's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueRef<'p> {
    /// The bytes.
    pub data: &'p [u8],
    /// The write that they come from.
    pub version: Version,
}

impl std::ops::Deref for ValueRef<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.data
    }
}

impl From<ValueRef<'_>> for Value {
    fn from(ValueRef { data, version }: ValueRef<'_>) -> Self {
        Self { data: data.to_vec(), version }
    }
}
