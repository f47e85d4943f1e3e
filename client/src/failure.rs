//! Why operations end early, before anybody decided whether to try them again.

use farside_control::attach::AttachError;
use farside_fabric::{ChainError, Nanos};
use farside_layout::LayoutError;

use crate::Error;

/// Why an operation ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// For the caller. Boxed: it is rare, and what operations return is moved often.
    Error(Box<Error>),
    /// The server gave this connection up, or is gone. The operation has not happened.
    Disconnected,
    /// The server has not answered for so long, though the connection is not known to be lost. The
    /// operation has not happened.
    NoAnswer(Nanos),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(Box::new(error))
    }
}

impl From<LayoutError> for Failure {
    fn from(error: LayoutError) -> Self {
        Error::from(error).into()
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Absent { .. } => Self::Disconnected,
            error => Error::from(error).into(),
        }
    }
}

impl From<ChainError> for Failure {
    fn from(error: ChainError) -> Self {
        match error {
            ChainError::Outside { remote: offset, bytes } => {
                LayoutError::BlockOutside { offset, bytes }.into()
            }
            ChainError::Denied => Error::Denied.into(),
            ChainError::Unknown => Error::Indeterminate.into(),
            ChainError::Unregistered { .. } => {
                let doing = "registering memory for RDMA";
                Error::System { doing, source: std::io::Error::other(error) }.into()
            }
            // Chains that can be late are looked at where they are posted; READs have no deadline.
            _ => Self::Disconnected,
        }
    }
}
