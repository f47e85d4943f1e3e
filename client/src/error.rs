//! The errors of the library.

use std::time::Duration;

use farside_config::PIPELINE_DEPTH_RANGE;
use farside_config::command_line::exit_code;
use farside_control::attach::ConnectError;
use farside_protocol::OperationError;

use crate::AddressError;

/// Why an operation or a connection failed.
///
/// Unless the variant says otherwise, a failed operation changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
    /// There is no connection to the server, or the server does not answer.
    #[error(transparent)]
    Connect(#[from] ConnectError),
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
}

impl Error {
    /// Returns the exit code of a command that fails with this error.
    #[doc(hidden)]
    pub fn exit_code(&self) -> u8 {
        use OperationError::{Denied, ExpiryTooLate, KeyEmpty, KeyTooLong, Layout, ValueTooLong};
        match self {
            Self::Operation(
                KeyEmpty | KeyTooLong { .. } | ValueTooLong { .. } | ExpiryTooLate | Denied,
            )
            | Self::Lateness { .. }
            | Self::PipelineDepth { .. }
            | Self::Address(_) => exit_code::USAGE,
            Self::Operation(Layout(_)) => exit_code::DAMAGE,
            Self::Operation(_) => exit_code::FAILED,
            Self::Connect(error) => exit_code::of_connect(error),
            Self::Disconnected { .. } => exit_code::NO_SERVER,
        }
    }
}

/// Copies an error, for another thread that waited for this attempt to connect. `tried` is how long
/// that thread has waited.
pub(crate) fn copy_connect_error(error: &ConnectError, tried: Duration) -> ConnectError {
    use ConnectError::{
        Control, Layout, OtherFabric, Rdma, Refused, System, Unreachable, Untrusted,
    };
    match error {
        Unreachable { server, contact, source, .. } => {
            let (server, source) = (server.clone(), source.as_ref().map(copy_io_error));
            Unreachable { server, tried, contact: *contact, source }
        }
        Refused { server, source } => Refused { server: server.clone(), source: *source },
        Untrusted { server, user } => Untrusted { server: server.clone(), user: *user },
        Layout(error) => Layout(error.clone()),
        Control(error) => Control(error.clone()),
        OtherFabric => OtherFabric,
        System { doing, source } => System { doing, source: copy_io_error(source) },
        // The error itself cannot be copied, but its text can.
        Rdma(error) => {
            let source = std::io::Error::other(error.to_string());
            System { doing: "connecting over RDMA", source }
        }
    }
}

/// Copies an error: its number in the system, or else its kind and text.
fn copy_io_error(error: &std::io::Error) -> std::io::Error {
    let with_text = || std::io::Error::new(error.kind(), error.to_string());
    error.raw_os_error().map_or_else(with_text, std::io::Error::from_raw_os_error)
}

/// The result of the library's functions.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use farside_control::attach::Contact;

    use super::*;
    use crate::{ControlError, LayoutError, Refusal, VerbsError};

    #[test]
    fn a_waiting_session_gets_a_copy_of_the_error() {
        let doing = "starting the control thread";
        let system = |source| ConnectError::System { doing, source };
        let server = "shm:///run/kv.sock".to_owned();
        let tried = Duration::from_secs(3);
        let copied = |error: ConnectError| {
            (copy_connect_error(&error, tried).to_string(), error.to_string())
        };
        for error in [
            system(std::io::Error::from_raw_os_error(11)),
            system(std::io::Error::other("why")),
            ConnectError::Refused { server: server.clone(), source: Refusal::ShuttingDown },
            LayoutError::NotARegion.into(),
            ControlError::NotFarside.into(),
        ] {
            let (copy, error) = copied(error);
            assert_eq!(copy, error);
        }
        let (rdma, error) = copied(ConnectError::Rdma(VerbsError::OtherDevice));
        assert!(rdma.contains(&error), "{error}");
        let (tried, contact) = (Duration::from_secs(2), Contact::Lost);
        let (lost, _) = copied(ConnectError::Unreachable { server, tried, contact, source: None });
        assert!(lost.contains("went away (tried for 3000 ms)"));
    }
}
