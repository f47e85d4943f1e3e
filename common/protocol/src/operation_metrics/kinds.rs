//! The kinds of operations in metrics, and the reasons for retries.

use crate::{Action, Change, Modification};

/// A kind of operation, as the metrics of a client name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named after the methods of sessions")]
pub enum OperationKind {
    Get,
    GetRange,
    Version,
    Put,
    Insert,
    Update,
    Delete,
    CompareExchange,
    Increment,
    Append,
    GetOrInsert,
    Touch,
    Take,
    DeleteIfVersion,
}

impl OperationKind {
    /// All kinds with their labels, in their order.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Get, "get"),
        (Self::GetRange, "get_range"),
        (Self::Version, "version"),
        (Self::Put, "put"),
        (Self::Insert, "insert"),
        (Self::Update, "update"),
        (Self::Delete, "delete"),
        (Self::CompareExchange, "compare_exchange"),
        (Self::Increment, "increment"),
        (Self::Append, "append"),
        (Self::GetOrInsert, "get_or_insert"),
        (Self::Touch, "touch"),
        (Self::Take, "take"),
        (Self::DeleteIfVersion, "delete_if_version"),
    ];

    /// The kind of this action. A store that returns or keeps something counts as the store that it
    /// is otherwise.
    pub fn of(action: Action<'_>) -> Self {
        match action {
            Action::Get => Self::Get,
            Action::Version => Self::Version,
            Action::Put(_) => Self::Put,
            Action::Insert(_) => Self::Insert,
            Action::Update(_) => Self::Update,
            Action::Delete => Self::Delete,
            Action::Exchange(..) => Self::CompareExchange,
            Action::Modify(Modification { change, creates, .. }) => match change {
                Change::Store(Some(_)) => Self::CompareExchange,
                Change::Store(None) if creates => Self::Put,
                Change::Store(None) => Self::Update,
                Change::Add(_) => Self::Increment,
                Change::Append => Self::Append,
                Change::Retain => Self::Touch,
                Change::Remove(None) => Self::Take,
                Change::Remove(Some(_)) => Self::DeleteIfVersion,
                Change::Leave => Self::GetOrInsert,
                Change::Refuse => Self::Insert,
            },
        }
    }

    /// The labels of a positive and a negative result.
    pub fn results(self) -> [&'static str; 2] {
        match self {
            Self::Get | Self::GetRange | Self::Version => ["found", "absent"],
            _ => ["applied", "not_applied"],
        }
    }
}

/// Why an operation was tried again, or had to wait before it could go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryReason {
    /// Other operations changed the same slots.
    Conflict,
    /// A split was moving the key, or had to make room for it.
    Split,
    /// No block was free.
    Memory,
    /// The connection was lost.
    Connection,
}

impl RetryReason {
    /// All reasons with their labels, in their order.
    pub const ALL: [(Self, &'static str); 4] = [
        (Self::Conflict, "conflict"),
        (Self::Split, "split"),
        (Self::Memory, "memory"),
        (Self::Connection, "connection"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_in_the_order_of_the_numbers() {
        assert!(OperationKind::ALL.iter().enumerate().all(|(at, (kind, _))| *kind as usize == at));
        assert!(RetryReason::ALL.iter().enumerate().all(|(at, (it, _))| *it as usize == at));
    }
}
