use std::time::Duration;

use farside_config::PIPELINE_DEPTH;
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
    /// There is no connection to the server, or it does not answer any more.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection was lost before an operation of a pipeline happened, or the region of a scan
    /// is gone. A pipeline stays disconnected: drop it, or the scan, and start again with another
    /// one from the session, which reconnects.
    #[error(
        "the connection to {server} was lost and the operation was not executed: repeat it in a \
         new pipeline or scan"
    )]
    Disconnected {
        /// The address.
        server: String,
    },
    /// The client's own RDMA settings let a write come so late that nothing the client knows of the
    /// region could be relied on for an update. A reader may have such settings.
    #[error(
        "with this rdma.retry_count and rdma.ack_timeout a write can take effect {lateness_ms} ms \
         late, which takes a region with grace_ms = {grace_ms_min}, and this one has {grace_ms}: \
         lower the two settings"
    )]
    Lateness {
        /// How late, in milliseconds.
        lateness_ms: u64,
        /// The region's GRACE, in milliseconds.
        grace_ms: u32,
        /// The shortest that would do, in milliseconds.
        grace_ms_min: u64,
    },
    /// A session cannot have so many operations in flight. No server was asked.
    #[error(
        "pipeline_depth = {depth}: write a number from {} to {}",
        PIPELINE_DEPTH.start(),
        PIPELINE_DEPTH.end()
    )]
    PipelineDepth {
        /// How many the builder was told.
        depth: u16,
    },
    /// The address names no server.
    #[error("{0}")]
    Address(#[from] AddressError),
}

impl Error {
    /// Why connecting failed, for another thread that waited for it and has tried for this long.
    pub(crate) fn for_another(&self, tried: Duration) -> Option<Self> {
        use ConnectError::{
            Control, Layout, OtherFabric, Rdma, Refused, System, Unreachable, Untrusted,
        };
        let Self::Connect(error) = self else { return None };
        Some(Self::Connect(match error {
            Unreachable { server, contact, source, .. } => {
                let (server, source) = (server.clone(), source.as_ref().map(copy_of));
                Unreachable { server, tried, contact: *contact, source }
            }
            Refused { server, source } => Refused { server: server.clone(), source: *source },
            Untrusted { server, user } => Untrusted { server: server.clone(), user: *user },
            Layout(error) => Layout(error.clone()),
            Control(error) => Control(error.clone()),
            OtherFabric => OtherFabric,
            System { doing, source } => System { doing, source: copy_of(source) },
            // It is not to be had twice; the text is.
            Rdma(error) => {
                let source = std::io::Error::other(error.to_string());
                System { doing: "connecting over RDMA", source }
            }
        }))
    }

    /// What a command ends with after this error.
    #[doc(hidden)]
    pub fn exit_code(&self) -> u8 {
        use OperationError::{Denied, EndTooLate, KeyEmpty, KeyTooLong, Layout, ValueTooLong};
        match self {
            Self::Operation(
                KeyEmpty | KeyTooLong { .. } | ValueTooLong { .. } | EndTooLate | Denied,
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

fn copy_of(error: &std::io::Error) -> std::io::Error {
    let made = || std::io::Error::new(error.kind(), error.to_string());
    error.raw_os_error().map_or_else(made, std::io::Error::from_raw_os_error)
}

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use farside_control::attach::Contact;

    use super::*;
    use crate::{ControlError, LayoutError, Refusal, VerbsError};

    #[test]
    fn a_session_that_waited_is_told_what_failed() {
        let doing = "starting the control thread";
        let system = |source| ConnectError::System { doing, source };
        let server = "shm:///run/kv.sock".to_owned();
        let tried = Duration::from_secs(3);
        let told = |error| {
            let error = Error::Connect(error);
            (error.for_another(tried).map(|error| error.to_string()), error.to_string())
        };
        for error in [
            system(std::io::Error::from_raw_os_error(11)),
            system(std::io::Error::other("why")),
            ConnectError::Refused { server: server.clone(), source: Refusal::ShuttingDown },
            LayoutError::NotARegion.into(),
            ControlError::NotFarside.into(),
        ] {
            let (told, error) = told(error);
            assert_eq!(told, Some(error));
        }
        let (rdma, error) = told(ConnectError::Rdma(VerbsError::OtherDevice));
        assert!(rdma.unwrap().contains(&error), "{error}");
        let (tried, contact) = (Duration::from_secs(2), Contact::Lost);
        let (lost, _) = told(ConnectError::Unreachable { server, tried, contact, source: None });
        assert!(lost.is_some_and(|told| told.contains("went away (tried for 3000 ms)")));
    }
}
