use std::time::Duration;

use farside_config::PIPELINE_DEPTH;
use farside_config::command_line::exit_code;
use farside_control::attach::{AttachError, untrusted};
use farside_protocol::{Exhausted, OperationError};

use crate::{AddressError, Contact, ControlError, LayoutError, Refusal, VerbsError};

/// Why an operation or a connection failed.
///
/// Unless the variant says otherwise, a failed operation changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key is longer than the region allows. Nothing was sent.
    #[error("{}", OperationError::KeyTooLong { bytes: *bytes, max: *max })]
    KeyTooLong {
        /// The key's length, in bytes.
        bytes: usize,
        /// The region's limit, in bytes.
        max: usize,
    },
    /// Keys have at least one byte. Nothing was sent.
    #[error("{}", OperationError::KeyEmpty)]
    KeyEmpty,
    /// The value is longer than the region allows. Nothing was sent.
    #[error("{}", OperationError::ValueTooLong { bytes: *bytes, max: *max })]
    ValueTooLong {
        /// The value's length, in bytes.
        bytes: usize,
        /// The region's limit, in bytes.
        max: usize,
    },
    /// A value is to end after the year 10889, which is later than an end can be. Nothing was sent.
    #[error("{}", OperationError::EndTooLate)]
    EndTooLate,
    /// There is no room for another block of this size, or for another key in its part of the
    /// index. Everything stored stays readable and can be deleted, which makes room.
    #[error("{}", OperationError::OutOfSpace { what: *what })]
    OutOfSpace {
        /// What ran out.
        what: Exhausted,
    },
    /// Other clients, or a split, changed the key's slots under every attempt, or READs took longer
    /// than GRACE. Try again later.
    #[error("{}", OperationError::Contended { attempts: *attempts })]
    Contended {
        /// How often it was tried.
        attempts: u32,
    },
    /// A write whose outcome is unknown, because the connection broke while it was on its way: it
    /// has happened, or will never happen. Read the key to find out.
    #[error("{}", OperationError::Indeterminate)]
    Indeterminate,
    /// The connection was lost before an operation of a pipeline happened, or the region of a scan
    /// is gone. A pipeline stays disconnected: drop it, or the scan, and start again with another
    /// one from the session, which reconnects.
    #[error(
        "the connection to {server} was lost before this happened: start it again, in another \
         pipeline or scan"
    )]
    Disconnected {
        /// The address.
        server: String,
    },
    /// No server answers, or it went away and did not come back, or it is connected and does not
    /// answer: `contact` says which.
    #[error("{}", .contact.message(.server, *.tried))]
    Unreachable {
        /// The address tried.
        server: String,
        /// For how long.
        tried: Duration,
        /// How far the last attempt came.
        contact: Contact,
        /// What the system said to the last attempt, where that tells more.
        #[source]
        source: Option<std::io::Error>,
    },
    /// The client connected as a reader. Nothing was sent.
    #[error("{}", OperationError::Denied)]
    Denied,
    /// The server refused the connection.
    #[error("{server} refused the connection: {source}")]
    Refused {
        /// The address.
        server: String,
        /// Why.
        #[source]
        source: Refusal,
    },
    /// The server's socket is another user's, who could be anybody: nothing was said there. Only
    /// root, this process's user and the owner of the socket's folder are trusted with a secret.
    #[error("{}", untrusted(.server, *.user))]
    Untrusted {
        /// The address.
        server: String,
        /// The user's number.
        user: u32,
    },
    /// What was found in the region, or at the other end of the connection, cannot be.
    #[error("the region is damaged: {0}; run `kv-cli verify`")]
    Layout(#[from] LayoutError),
    /// The other end does not speak the control protocol.
    #[error("the control channel broke: {0}")]
    Control(#[from] ControlError),
    /// The client's own RDMA settings let a write come so late that nothing the client knows of the
    /// region could be relied on for an update. A reader may have such settings.
    #[error(
        "a write of this client can come {lateness_ms} ms late with its rdma.retry_count and \
         rdma.ack_timeout, which takes a region with grace_ms = {grace_ms_min}, and this one has \
         {grace_ms}: lower those"
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
    /// RDMA does not do what was asked.
    #[error(transparent)]
    Rdma(#[from] VerbsError),
    /// The system refused something the client needs.
    #[error("{doing}: {source}")]
    System {
        /// What the client was doing.
        doing: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// Why connecting failed, for another thread that waited for it and has tried for this long.
    pub(crate) fn for_another(&self, tried: Duration) -> Option<Self> {
        Some(match self {
            Self::Unreachable { server, contact, source, .. } => Self::Unreachable {
                server: server.clone(),
                tried,
                contact: *contact,
                source: source.as_ref().map(same),
            },
            Self::Refused { server, source } => {
                Self::Refused { server: server.clone(), source: *source }
            }
            Self::Untrusted { server, user } => {
                Self::Untrusted { server: server.clone(), user: *user }
            }
            Self::Layout(error) => Self::Layout(error.clone()),
            Self::Control(error) => Self::Control(error.clone()),
            Self::System { doing, source } => Self::System { doing, source: same(source) },
            // It is not to be had twice; the text is.
            Self::Rdma(error) => {
                let source = std::io::Error::other(error.to_string());
                Self::System { doing: "connecting over RDMA", source }
            }
            _ => return None,
        })
    }

    /// The same for a client that the server had answered before.
    pub(crate) fn after_an_answer(mut self) -> Self {
        if let Self::Unreachable { contact, source, .. } = &mut self {
            *contact = contact.after_an_answer();
            // "Connection refused" says no more than "went away".
            *source = None;
        }
        self
    }

    /// What a command ends with after this error.
    #[doc(hidden)]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::KeyTooLong { .. }
            | Self::EndTooLate
            | Self::KeyEmpty
            | Self::ValueTooLong { .. }
            | Self::Denied
            | Self::Lateness { .. }
            | Self::PipelineDepth { .. }
            | Self::Address(_) => exit_code::USAGE,
            Self::Unreachable { .. } | Self::Disconnected { .. } | Self::Refused { .. } => {
                exit_code::NO_SERVER
            }
            Self::Layout(_) => exit_code::DAMAGE,
            Self::OutOfSpace { .. }
            | Self::Contended { .. }
            | Self::Indeterminate
            | Self::Control(_)
            | Self::Rdma(_)
            | Self::Untrusted { .. }
            | Self::System { .. } => exit_code::FAILED,
        }
    }
}

fn same(error: &std::io::Error) -> std::io::Error {
    let made = || std::io::Error::new(error.kind(), error.to_string());
    error.raw_os_error().map_or_else(made, std::io::Error::from_raw_os_error)
}

impl From<OperationError> for Error {
    fn from(error: OperationError) -> Self {
        match error {
            OperationError::KeyEmpty => Self::KeyEmpty,
            OperationError::KeyTooLong { bytes, max } => Self::KeyTooLong { bytes, max },
            OperationError::ValueTooLong { bytes, max } => Self::ValueTooLong { bytes, max },
            OperationError::EndTooLate => Self::EndTooLate,
            OperationError::OutOfSpace { what } => Self::OutOfSpace { what },
            OperationError::Contended { attempts } => Self::Contended { attempts },
            OperationError::Indeterminate => Self::Indeterminate,
            OperationError::Denied => Self::Denied,
            OperationError::Layout(error) => Self::Layout(error),
            OperationError::Unregistered(error) => {
                let source = std::io::Error::other(error);
                Self::System { doing: "registering memory for RDMA", source }
            }
        }
    }
}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Absent { server, contact, tried, source } => {
                Self::Unreachable { server, tried, contact, source }
            }
            AttachError::Refused { server, source } => Self::Refused { server, source },
            AttachError::Untrusted { server, user } => Self::Untrusted { server, user },
            AttachError::Control(error) => error.into(),
            AttachError::Layout(error) => error.into(),
            AttachError::OtherFabric => Self::System {
                doing: "adding a server to a session",
                source: std::io::Error::other(error),
            },
            AttachError::Rdma(error) => error.into(),
            AttachError::System { doing, source } => Self::System { doing, source },
        }
    }
}

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waited_is_told_what_failed() {
        let doing = "starting the control thread";
        let system = |source| Error::System { doing, source };
        let server = "shm:///run/kv.sock".to_owned();
        let tried = Duration::from_secs(3);
        let told = |error: &Error| error.for_another(tried).map(|error| error.to_string());
        for error in [
            system(std::io::Error::from_raw_os_error(11)),
            system(std::io::Error::other("why")),
            Error::Refused { server: server.clone(), source: Refusal::ShuttingDown },
            LayoutError::NotARegion.into(),
            ControlError::NotFarside.into(),
        ] {
            assert_eq!(told(&error), Some(error.to_string()));
        }
        let rdma = told(&VerbsError::OtherDevice.into()).unwrap();
        assert!(rdma.contains(&VerbsError::OtherDevice.to_string()), "{rdma}");
        let first = Duration::from_secs(2);
        let contact = Contact::Lost;
        let told = told(&Error::Unreachable { server, tried: first, contact, source: None });
        assert!(told.is_some_and(|told| told.contains("went away (tried for 3000 ms)")));
    }
}
