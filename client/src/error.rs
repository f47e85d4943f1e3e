//! The errors of the library.

use std::sync::Arc;

use farside_config::PIPELINE_DEPTH_RANGE;
use farside_config::command_line::exit_code;
use farside_control::attach::ConnectError;
use farside_protocol::OperationError;

use crate::AddressError;

/// The pipeline has no free lane: take a [`Completed`](crate::Completed) first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all lanes of the pipeline are busy: take a completed operation first")]
pub struct PipelineFull;

/// Why an operation or a connection failed.
///
/// Unless the variant says otherwise, a failed operation changed nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
    /// There is no connection to the server, or the server does not answer.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A shard of the cluster cannot be reached: its server is down, or it has none. The operation
    /// had no effect. The other shards are not concerned, and the client continues to try this one.
    #[error("shard {shard} is not available: {source}")]
    Unavailable {
        /// The number of the shard.
        shard: u16,
        /// The address of its server, if it has one.
        server: String,
        /// Why it cannot be reached.
        #[source]
        source: Arc<ConnectError>,
    },
    /// The connection was lost before an operation of a pipeline took effect, or the region of a
    /// scan is gone. Drop the pipeline or scan, which stays disconnected, and create another one
    /// from the session, which reconnects.
    #[error(
        "the connection to {server} was lost and the operation was not executed: repeat it in a \
         new pipeline or scan"
    )]
    Disconnected {
        /// The server's address.
        server: String,
    },
    /// The client's RDMA retry settings are too slow for the region's GRACE: its writes could take
    /// effect so late that no update would be safe. A reader may have such settings.
    #[error(
        "with this rdma.retry_count and rdma.ack_timeout a write can take effect {lateness_ms} ms \
         late. That requires a region with grace_ms >= {grace_ms_min}, but this one has \
         {grace_ms}: lower the two settings"
    )]
    Lateness {
        /// The longest time after its post at which a write can take effect, in milliseconds.
        lateness_ms: u64,
        /// The region's GRACE, in milliseconds.
        grace_ms: u32,
        /// The shortest GRACE that these settings allow, in milliseconds.
        grace_ms_min: u64,
    },
    /// Another session of the client was fetching the value for
    /// [`Session::get_or_fetch`](crate::Session::get_or_fetch), and failed.
    #[error("another session failed to fetch the value: {reason}")]
    Fetch {
        /// The error of its fetch.
        reason: Arc<str>,
    },
    /// All lanes of a pipeline are busy.
    #[error(transparent)]
    PipelineFull(#[from] PipelineFull),
    /// A defect of the library: the thread of an [`AsyncClient`](crate::AsyncClient) has panicked.
    /// The operation had no effect, and all further ones fail. Make another `AsyncClient`.
    #[error("a thread of the client has panicked, which is a defect of farside: see stderr")]
    Defect,
}

/// Why a client could not be made: an error of
/// [`ClientBuilder::connect`](crate::ClientBuilder::connect).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The pipeline depth is out of range. The client has not tried to connect.
    #[error(
        "pipeline_depth = {depth}: write a number from {} to {}",
        PIPELINE_DEPTH_RANGE.start(),
        PIPELINE_DEPTH_RANGE.end()
    )]
    PipelineDepth {
        /// The depth that the builder was given.
        depth: u16,
    },
    /// The server's address is missing or malformed.
    #[error("{0}")]
    Address(#[from] AddressError),
    /// There is no connection to the server.
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

impl SetupError {
    /// Returns the exit code of a command that fails with this error.
    #[doc(hidden)]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::PipelineDepth { .. } | Self::Address(_) => exit_code::USAGE,
            Self::Connect(error) => exit_code::of_connect(error),
        }
    }
}

impl Error {
    /// Whether the same call may succeed later without any change: the operation had no effect, and
    /// the cause passes.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Operation(OperationError::Contended { .. })
                | Self::Connect(ConnectError::Unreachable { .. })
                | Self::Unavailable { .. }
                | Self::Disconnected { .. }
                | Self::Fetch { .. }
                | Self::PipelineFull(_)
        )
    }

    /// Whether the operation may have taken effect. It has, or it never will: a GET tells.
    pub fn is_indeterminate(&self) -> bool {
        matches!(self, Self::Operation(OperationError::Indeterminate))
    }

    /// Returns the exit code of a command that fails with this error.
    #[doc(hidden)]
    pub fn exit_code(&self) -> u8 {
        use OperationError::{Denied, ExpiryTooLate, KeyEmpty, KeyTooLong, Layout, ValueTooLong};
        match self {
            Self::Operation(
                KeyEmpty | KeyTooLong { .. } | ValueTooLong { .. } | ExpiryTooLate | Denied,
            )
            | Self::Lateness { .. } => exit_code::USAGE,
            Self::Operation(Layout(_)) => exit_code::DAMAGE,
            Self::Operation(_) | Self::Fetch { .. } | Self::PipelineFull(_) | Self::Defect => {
                exit_code::FAILED
            }
            Self::Connect(error) => exit_code::of_connect(error),
            Self::Unavailable { .. } | Self::Disconnected { .. } => exit_code::NO_SERVER,
        }
    }
}

/// The result of the library's functions.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use farside_control::attach::Contact;

    use super::*;

    #[test]
    fn errors_say_whether_to_try_again() {
        let server = "shm:///run/kv.sock".to_owned();
        let (tried, contact) = (Duration::from_secs(1), Contact::Lost);
        let unreachable = ConnectError::Unreachable { server, tried, contact, source: None };
        let full = Error::from(PipelineFull);
        let [lost, denied, unknown] = [
            unreachable.clone().into(),
            OperationError::Denied.into(),
            OperationError::Indeterminate.into(),
        ]
        .map(|error: Error| (error.is_retryable(), error.is_indeterminate()));
        assert_eq!([lost, denied, unknown], [(true, false), (false, false), (false, true)]);
        assert!(full.is_retryable());
        assert_eq!(SetupError::from(unreachable.clone()).to_string(), unreachable.to_string());
    }
}
