//! Attaching to a server, over either fabric: the hello, the control channel, and from then on
//! fabrics that reach the region. The client library, kv-cli's checker and kv-bench all do it here.
//!
//! Each fabric has a file: [`ConnectOptions::attach`] chooses it by the server's address, and what
//! comes back does not tell them apart.

mod retry;
mod shm;
#[cfg(feature = "verbs")]
mod verbs;

use std::io;
use std::time::Duration;

use farside_fabric::rdma::{Options, VerbsError};
use farside_fabric::{AnyFabric, RegionIndex};
use farside_layout::LayoutError;

use crate::address::Address;
use crate::{
    ConnectRequest, ControlChannel, ControlError, Purpose, REQUEST_BYTES_MAX, Refusal, Role, Token,
    Welcome, decode_reply,
};
pub use retry::{Attempts, Contact};

/// How to connect to a server.
#[derive(Clone)]
pub struct ConnectOptions {
    /// Where it is.
    pub address: Address,
    /// What to do there.
    pub role: Role,
    /// The proof that one may.
    pub token: Token,
    /// How long connecting may take.
    pub timeout: Duration,
    /// How to use RDMA, for an `rdma://` address; its own timeout is not looked at.
    pub rdma: Options,
}

/// A connection to one life of a server.
pub struct Attached {
    /// What the server said.
    pub welcome: Welcome,
    /// What makes fabrics for sessions.
    pub factory: Box<dyn FabricFactory>,
    /// The control channel.
    pub channel: Box<dyn ControlChannel>,
}

/// Makes fabrics that reach the region of a server, until its control channel ends.
pub trait FabricFactory: Send + Sync {
    /// A fabric of so many lanes, for one session. Over RDMA it connects a queue pair.
    ///
    /// # Errors
    /// [`ConnectError`]; [`ConnectError::Unreachable`] when the server does not know this client
    /// any more, [`ConnectError::Rdma`] when it does not answer, which says nothing of other
    /// sessions.
    fn fabric(&self, lanes: u16) -> Result<AnyFabric>;

    /// Makes the server's region one more of those that a session's fabric reaches.
    ///
    /// # Errors
    /// As [`FabricFactory::fabric`]; [`ConnectError::OtherFabric`] if that fabric is of another
    /// kind. It stays as it is then.
    fn add_to(&self, fabric: &mut AnyFabric) -> Result<RegionIndex>;
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No server answers, or it went away and did not come back, or it is connected and does not
    /// answer: `contact` says which. A later attempt may succeed.
    #[error("{}", .contact.message(.server, *.tried))]
    Unreachable {
        /// The address tried.
        server: String,
        /// How far the last attempt came.
        contact: Contact,
        /// For how long.
        tried: Duration,
        /// What the system said, where that tells more.
        #[source]
        source: Option<io::Error>,
    },
    /// The server refused the connection.
    #[error("{server} refused the connection: {source}")]
    Refused {
        /// The address.
        server: String,
        /// Why.
        #[source]
        source: Refusal,
    },
    /// The server's socket belongs to another user, and any user could have made it: nothing was
    /// sent there. Only root, this process's user and the owner of the socket's folder are trusted
    /// with a secret.
    #[error(
        "{server} is served by user {user}, which is not root, this user or the owner of the \
         socket's folder: let that user's server listen in a folder that only root or that \
         user could have made, such as /run/farside"
    )]
    Untrusted {
        /// The address.
        server: String,
        /// The user's number.
        user: u32,
    },
    /// The other end does not speak the control protocol.
    #[error("the control channel broke: {0}")]
    Control(#[from] ControlError),
    /// What the server passed is not a region.
    #[error("the region is damaged: {0}; run `kv-cli verify`")]
    Layout(#[from] LayoutError),
    /// A session goes to all its servers in one way.
    #[error(
        "a session reaches all its servers over one fabric: either all of them have shm:// \
         addresses, or all have rdma:// addresses"
    )]
    OtherFabric,
    /// RDMA does not do what was asked.
    #[error(transparent)]
    Rdma(VerbsError),
    /// The system refused something that connecting needs.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl ConnectError {
    /// The same for a client that the server had answered before.
    pub fn after_an_answer(mut self) -> Self {
        if let Self::Unreachable { contact, source, .. } = &mut self {
            *contact = contact.after_an_answer();
            // "Connection refused" says no more than "went away".
            *source = None;
        }
        self
    }
}

type Result<T> = std::result::Result<T, ConnectError>;

impl ConnectOptions {
    /// One attempt to connect, which may take this long; [`ConnectOptions::connect`] makes several.
    ///
    /// # Errors
    /// [`ConnectError`]; after [`ConnectError::Unreachable`] another attempt may succeed.
    pub fn attach(&self, most: Duration) -> Result<Attached> {
        match &self.address {
            Address::Shm(path) => shm::attach(self, path, most),
            #[cfg(feature = "verbs")]
            Address::Rdma { .. } => verbs::attach(self, most),
            #[cfg(not(feature = "verbs"))]
            Address::Rdma { .. } => Err(ConnectError::Rdma(VerbsError::NotBuilt)),
        }
    }

    /// What the server answered, if it is for this fabric.
    fn welcome(&self, reply: &[u8], over_rdma: bool) -> Result<Welcome> {
        let welcome = decode_reply(reply)?.map_err(|why| self.refused(why))?;
        let (field, value) = ("base address", welcome.base_address);
        if (value != 0) != over_rdma {
            return Err(ControlError::Unknown { field, value }.into());
        }
        Ok(welcome)
    }

    fn request(&self, purpose: Purpose) -> [u8; REQUEST_BYTES_MAX] {
        ConnectRequest { role: self.role, purpose, token: self.token }.encode()
    }

    fn absent(&self, contact: Contact, tried: Duration, source: Option<io::Error>) -> ConnectError {
        ConnectError::Unreachable { server: self.address.to_string(), contact, tried, source }
    }

    fn refused(&self, source: Refusal) -> ConnectError {
        refused(&self.address.to_string(), source)
    }
}

fn refused(server: &str, source: Refusal) -> ConnectError {
    let server = server.to_owned();
    match source {
        // This server goes, or does not know this client any more. Another connection may be had.
        Refusal::ShuttingDown | Refusal::UnknownClient { .. } => {
            absent_now(server, Contact::Lost, io::Error::other(source))
        }
        source => ConnectError::Refused { server, source },
    }
}

/// For a caller that knows how long it has tried.
fn absent_now(server: String, contact: Contact, source: io::Error) -> ConnectError {
    ConnectError::Unreachable { server, contact, tried: Duration::ZERO, source: Some(source) }
}

fn system(doing: &'static str) -> impl FnOnce(io::Error) -> ConnectError {
    move |source| ConnectError::System { doing, source }
}

#[cfg(all(test, not(feature = "verbs")))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_rdma_connects_to_no_device() {
        let options = ConnectOptions {
            address: "rdma://127.0.0.1:7400".parse().unwrap(),
            role: Role::Writer,
            token: Token::NONE,
            timeout: Duration::from_secs(1),
            rdma: Options::default(),
        };
        let Err(error) = options.connect() else { panic!("connected without RDMA") };
        assert!(matches!(error, ConnectError::Rdma(VerbsError::NotBuilt)), "{error}");
    }
}
