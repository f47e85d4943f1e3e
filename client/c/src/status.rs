//! What functions return.

use client::{ConnectError, Error, OperationError, SetupError};

/// What a function returns: 0 for success, a positive number for another answer, a negative one for
/// an error. After an error nothing was changed, except where the text says so.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum farside_status {
    /// Done.
    FARSIDE_OK = 0,
    /// The key is absent.
    FARSIDE_ABSENT = 1,
    /// The condition of the store did not hold, and nothing was stored.
    FARSIDE_NOT_APPLIED = 2,
    /// The buffer is too short. The value's length was returned.
    FARSIDE_TOO_SHORT = 3,
    /// The pipeline has no free lane: take a completed operation first.
    FARSIDE_BUSY = 4,
    /// From farside_pipeline_poll(): no operation has completed yet. From both that and
    /// farside_pipeline_wait(): none is in flight.
    FARSIDE_NONE = 5,
    /// An argument is NULL, or out of its range.
    FARSIDE_ERROR_ARGUMENT = -1,
    /// The key is empty or too long, or the value too long.
    FARSIDE_ERROR_LENGTH = -2,
    /// There is no room for the value or the key.
    FARSIDE_ERROR_OUT_OF_SPACE = -3,
    /// The client is a reader.
    FARSIDE_ERROR_DENIED = -4,
    /// Other clients changed the key under every attempt. Try again later.
    FARSIDE_ERROR_CONTENDED = -5,
    /// The connection broke during a change. The change has taken effect, or never will. A get
    /// shows which.
    FARSIDE_ERROR_INDETERMINATE = -6,
    /// The value is not a number, or the sum does not fit.
    FARSIDE_ERROR_NUMBER = -7,
    /// The region has content that the format does not allow.
    FARSIDE_ERROR_DAMAGED = -8,
    /// The server cannot be reached, or does not answer.
    FARSIDE_ERROR_UNAVAILABLE = -9,
    /// The server refused the client: its version, secret, role or number.
    FARSIDE_ERROR_REFUSED = -10,
    /// The system refused memory, a thread or a descriptor.
    FARSIDE_ERROR_SYSTEM = -11,
    /// The pipeline has lost its connection. Close it and open another one.
    FARSIDE_ERROR_DISCONNECTED = -12,
    /// A defect of the library. A change may have taken effect. Close the session or pipeline: it
    /// cannot be used any more.
    FARSIDE_ERROR_INTERNAL = -13,
}

use farside_status::*;

impl From<&Error> for farside_status {
    fn from(error: &Error) -> Self {
        match error {
            Error::Operation(error) => of_operation(error),
            Error::Connect(error) => of_connect(error),
            Error::Unavailable { .. } => FARSIDE_ERROR_UNAVAILABLE,
            Error::Disconnected { .. } => FARSIDE_ERROR_DISCONNECTED,
            Error::Lateness { .. } => FARSIDE_ERROR_ARGUMENT,
            Error::PipelineFull(_) => FARSIDE_BUSY,
            _ => FARSIDE_ERROR_INTERNAL,
        }
    }
}

impl From<&SetupError> for farside_status {
    fn from(error: &SetupError) -> Self {
        match error {
            SetupError::Connect(error) => of_connect(error),
            _ => FARSIDE_ERROR_ARGUMENT,
        }
    }
}

fn of_operation(error: &OperationError) -> farside_status {
    match error {
        OperationError::KeyEmpty
        | OperationError::KeyTooLong { .. }
        | OperationError::ValueTooLong { .. } => FARSIDE_ERROR_LENGTH,
        OperationError::TargetTooShort { .. } => FARSIDE_TOO_SHORT,
        OperationError::ExpiryTooLate => FARSIDE_ERROR_ARGUMENT,
        OperationError::NotANumber | OperationError::NumberOverflow => FARSIDE_ERROR_NUMBER,
        OperationError::OutOfSpace { .. } => FARSIDE_ERROR_OUT_OF_SPACE,
        OperationError::Contended { .. } => FARSIDE_ERROR_CONTENDED,
        OperationError::Indeterminate => FARSIDE_ERROR_INDETERMINATE,
        OperationError::Denied => FARSIDE_ERROR_DENIED,
        OperationError::Layout(_) => FARSIDE_ERROR_DAMAGED,
        OperationError::Unregistered(_) => FARSIDE_ERROR_SYSTEM,
        _ => FARSIDE_ERROR_INTERNAL,
    }
}

fn of_connect(error: &ConnectError) -> farside_status {
    match error {
        ConnectError::Unreachable { .. }
        | ConnectError::NoServer { .. }
        | ConnectError::Control(_) => FARSIDE_ERROR_UNAVAILABLE,
        ConnectError::Refused { .. }
        | ConnectError::Untrusted { .. }
        | ConnectError::Unproven { .. }
        | ConnectError::Forbidden { .. }
        | ConnectError::Tls { .. } => FARSIDE_ERROR_REFUSED,
        ConnectError::Layout(_) => FARSIDE_ERROR_DAMAGED,
        ConnectError::OtherFabric | ConnectError::SeveralClusters { .. } => FARSIDE_ERROR_ARGUMENT,
        _ => FARSIDE_ERROR_SYSTEM,
    }
}
