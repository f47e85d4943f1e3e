//! Why a session cannot be opened, or an operation ended early.

use farside_control::attach::AttachError;
use farside_fabric::Nanos;

use crate::Error;

/// Why a session cannot be opened, or an operation ended early, before anything decided whether to
/// try again.
#[derive(Debug)]
pub(crate) enum Failure {
    /// For the caller.
    Error(Error),
    /// The server gave this connection up, or is gone. Nothing has happened.
    Disconnected,
    /// The server has not answered for so long, though the connection is not known to be lost.
    /// Nothing has happened.
    NoAnswer(Nanos),
}

impl From<farside_protocol::Failure> for Failure {
    fn from(failure: farside_protocol::Failure) -> Self {
        use farside_protocol::Failure as Of;
        match failure {
            Of::Error(error) => Self::Error((*error).into()),
            Of::Disconnected => Self::Disconnected,
            Of::NoAnswer(waited) => Self::NoAnswer(waited),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Absent { .. } => Self::Disconnected,
            error => Self::Error(error.into()),
        }
    }
}
