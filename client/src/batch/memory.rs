//! The memory that a session keeps from one batch to the next.

use farside_protocol::Action;

/// An operation, and where its key and value are in the bytes of the batch.
pub(super) struct BatchOperation<'d> {
    pub(super) action: Action<'d>,
    pub(super) start: usize,
    pub(super) key_end: usize,
    pub(super) end: usize,
}

/// The memory of a session's batches.
#[derive(Default)]
pub(crate) struct BatchMemory {
    pub(super) operations: Vec<BatchOperation<'static>>,
    pub(super) bytes: Vec<u8>,
    pub(super) remaining: Vec<usize>,
}
