//! The reasons why operations fail, before the caller decides whether to try again.

use farside_fabric::{ChainError, Nanos, RegionIndex};
use farside_layout::LayoutError;

/// Why an operation failed. Unless the variant says otherwise, nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// Keys have at least one byte. Nothing was sent.
    #[error("the key is empty: keys have at least one byte")]
    KeyEmpty,
    /// The key is longer than the region allows. Nothing was sent.
    #[error("the key is {bytes} bytes long; this region allows at most {max}")]
    KeyTooLong {
        /// The key's length, in bytes.
        bytes: usize,
        /// The region's limit, in bytes.
        max: usize,
    },
    /// The value is longer than the region allows. Nothing was sent.
    #[error("the value is {bytes} bytes long; this region allows at most {max}")]
    ValueTooLong {
        /// The value's length, in bytes.
        bytes: usize,
        /// The region's limit, in bytes.
        max: usize,
    },
    /// The caller's memory is too short for the value. Its content is undefined.
    #[error("the value is {needed} bytes long, and the memory for it {bytes}: pass a longer one")]
    TargetTooShort {
        /// The value's length, in bytes.
        needed: usize,
        /// The length of the memory, in bytes.
        bytes: usize,
    },
    /// The value would expire after the year 10889, the latest possible. Nothing was sent.
    #[error(
        "the value would expire after the year 10889, which is the latest: give it less time, or \
         no expiry"
    )]
    ExpiryTooLate,
    /// An increment found a value that is not a number: an integer of 64 bits with a sign, in
    /// decimal digits without a plus sign or leading zeros.
    #[error("the value is not a decimal integer of 64 bits: delete the key or store a number")]
    NotANumber,
    /// The sum of an increment does not fit in 64 bits with a sign.
    #[error("the sum does not fit in a signed integer of 64 bits")]
    NumberOverflow,
    /// There is no room for another block of this size, or for another key in its part of the
    /// index. Everything stored stays readable and can be deleted, which makes room.
    #[error("out of space: {what}")]
    OutOfSpace {
        /// What ran out.
        what: Exhausted,
    },
    /// Other clients, or a split, changed the key's slots under every attempt, or READs took longer
    /// than 7/8 GRACE. Try again later.
    #[error(
        "gave up after {attempts} attempts: other operations kept changing the same slots, or \
         READs took longer than the region's grace_ms (slow links with large values need a larger \
         one)"
    )]
    Contended {
        /// The number of attempts.
        attempts: u32,
    },
    /// The outcome of a write is unknown, because the connection broke while it was on its way. It
    /// has taken effect, or never will. Read the key to find out.
    #[error(
        "the connection broke while the write was on its way: it may or may not have taken effect"
    )]
    Indeterminate,
    /// A server has not ended its collection of lost blocks. It goes on without this client.
    #[error(
        "the server still collects lost blocks after {waited_s} s, because writers do not answer \
         it or died meanwhile; it goes on by itself"
    )]
    Collecting {
        /// For how long the caller has waited, in seconds.
        waited_s: u64,
    },
    /// The client connected as a reader. Nothing was sent.
    #[error("this client is a reader: connect as a writer to change anything")]
    Denied,
    /// The region has content that the format does not allow.
    #[error("the region is damaged: {0}; run `kv-cli verify`")]
    Layout(LayoutError),
    /// The system refused to register memory for RDMA.
    #[error("cannot register memory for RDMA: {0}")]
    Unregistered(ChainError),
}

/// The resource that ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exhausted {
    /// Blocks: none of this size is free, and no chunk is free to carve some from.
    Blocks {
        /// The size, in bytes.
        bytes: u64,
    },
    /// The same, but memory of other sizes has become free, which can serve this size later.
    BlocksUntil {
        /// The size, in bytes.
        bytes: u64,
        /// When the server expects to have room, in milliseconds from now.
        room_in_ms: u64,
    },
    /// The same at a server that evicts keys: the values that could make room are pinned.
    Pinned {
        /// The size, in bytes.
        bytes: u64,
    },
    /// The index: all slots of the key's window are in use, and the server could not split its
    /// subtable.
    Index,
}

impl std::fmt::Display for Exhausted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blocks { bytes } => write!(
                f,
                "no free block of {bytes} bytes; delete keys, or start a server with more --memory"
            ),
            Self::BlocksUntil { bytes, room_in_ms } => write!(
                f,
                "no free block of {bytes} bytes; room comes in {} s, when memory that held values \
                 of other sizes can serve this one: try again then, or start a server with more \
                 --memory",
                room_in_ms.div_ceil(1000)
            ),
            Self::Pinned { bytes } => write!(
                f,
                "no free block of {bytes} bytes, and the values that the server could evict are \
                 pinned; delete some of them, or start a server with more --memory"
            ),
            Self::Index => write!(
                f,
                "the key's part of the index is full and there is no memory for more; delete keys, \
                 or start a server with more --memory (kv-cli verify says whether damage is why)"
            ),
        }
    }
}

/// The result of a step of an operation.
pub(crate) type ProtocolResult<T> = Result<T, Failure>;

/// Why an operation ended without an answer.
#[derive(Debug)]
pub enum Failure {
    /// An error for the caller. Boxed: it is rare, and results are moved often.
    Error(Box<OperationError>),
    /// The server of this region closed the connection or exited, before the operation took effect:
    /// it can be tried again.
    Lost(RegionIndex),
    /// The server has not answered for this time, although the connection is not known to be lost.
    /// The operation has not taken effect.
    NoAnswer(Nanos),
}

impl From<OperationError> for Failure {
    fn from(error: OperationError) -> Self {
        Self::Error(Box::new(error))
    }
}

impl From<LayoutError> for Failure {
    fn from(error: LayoutError) -> Self {
        OperationError::Layout(error).into()
    }
}

impl Failure {
    /// Returns the failure of an operation whose chain at this region failed with `error`. No chain
    /// before it has taken effect at any region.
    pub fn at(region: RegionIndex, error: ChainError) -> Self {
        match error {
            ChainError::Outside { remote: offset, bytes } => {
                LayoutError::BlockOutside { offset, bytes }.into()
            }
            ChainError::Denied => OperationError::Denied.into(),
            ChainError::Unknown => OperationError::Indeterminate.into(),
            ChainError::Unregistered { .. } => OperationError::Unregistered(error).into(),
            // `Late` is handled where a chain with a deadline is posted; READs have no deadline.
            _ => Self::Lost(region),
        }
    }
}
