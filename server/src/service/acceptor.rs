//! Where clients come in: what the server asks of either fabric.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_control::{ControlChannel, Role};
use farside_fabric::rdma::{ConnectionId, ProbeState, RemoteRegion, VerbsError};
use farside_fabric::shm::RegionMemory;

use crate::error::{ServerError, system};
use crate::own_endpoint::OwnEndpoint;
use crate::recovery::Opened;

/// Where clients will connect, before there is a region to serve: binding is quick, and the
/// likeliest to fail. Those that connect already wait for their answer.
pub(crate) trait BoundListener: AsFd + Send {
    /// Begins to accept clients of a region; returns the server's own endpoint of it, too.
    fn open(
        self: Box<Self>,
        config: &ServerConfig,
        memory: &RegionMemory,
        opened: &Opened,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError>;
}

/// Listens at an address.
pub(crate) fn listen(
    address: &Address,
    config: &ServerConfig,
) -> Result<Box<dyn BoundListener>, ServerError> {
    match address {
        Address::Shm(path) => Ok(Box::new(super::socket::bind(path, config)?)),
        #[cfg(feature = "verbs")]
        Address::Rdma { .. } => {
            let addresses = address.resolve().map_err(system("find the address to listen at"))?;
            Ok(Box::new(super::device::bind(&addresses, config)?))
        }
        #[cfg(not(feature = "verbs"))]
        Address::Rdma { .. } => Err(VerbsError::NotBuilt.into()),
        _ => Err(system("listen")(io::Error::from(io::ErrorKind::Unsupported))),
    }
}

/// Accepts the clients of one fabric. Its descriptor is readable when something has arrived.
pub(crate) trait Acceptor: AsFd + Send {
    /// How many arrivals one turn takes.
    fn arrivals_max(&self) -> usize;

    /// The next arrival; `None` if there is none just now.
    ///
    /// # Errors
    /// None can be accepted for a while: the system is out of descriptors, most likely.
    fn next(&mut self) -> io::Result<Option<Arrival>>;

    /// The region's descriptor for clients of this role, if they get the region so.
    fn descriptor(&self, _: Role) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Where clients of this role find the region, if they reach it through a device.
    fn remote(&self, _: Role) -> Option<RemoteRegion> {
        None
    }
}

/// What happened where clients come in.
#[cfg_attr(not(feature = "verbs"), expect(dead_code, reason = "most need a device"))]
pub(crate) enum Arrival {
    /// A connection of a user of this host, which has not identified itself; or why it is lost.
    Stranger(io::Result<(Box<dyn ControlChannel>, u32)>),
    /// A request for a connection, which says what it is for.
    Request(Box<dyn ConnectionRequest>),
    /// The peer of an accepted connection knows that it was accepted.
    Established,
    /// The other end of a connection is gone.
    Ended(ConnectionId),
}

/// A request for a connection, until it is accepted or refused.
pub(crate) trait ConnectionRequest {
    /// The hello, with zeros behind it.
    fn hello(&self) -> &[u8];

    /// Whether it came in through the device that the region is registered with.
    fn reaches_region(&self) -> bool;

    /// Refuses. If the peer does not get the reason, it learns less.
    fn reject(self: Box<Self>, reason: &[u8]);

    /// Accepts it as a control channel, which events call by this identifier.
    ///
    /// # Errors
    /// [`VerbsError`]; the peer is refused without a reason.
    fn accept_control(self: Box<Self>, reply: &[u8]) -> Result<IdentifiedChannel, VerbsError>;

    /// Accepts it as a session's connection to the region.
    ///
    /// # Errors
    /// [`VerbsError`]; the peer is refused without a reason.
    fn accept_data(
        self: Box<Self>,
        role: Role,
        reply: &[u8],
    ) -> Result<Box<dyn DataConnection>, VerbsError>;
}

/// A control channel, and what events call it.
pub(crate) type IdentifiedChannel = (Box<dyn ControlChannel>, ConnectionId);

/// The server's end of a session's connection to the region. Dropping it is the fence: its queue
/// pair is gone then.
pub(crate) trait DataConnection: Send {
    /// What events of the device call it.
    fn id(&self) -> ConnectionId;

    /// What the last probe found out.
    fn probe_state(&mut self) -> io::Result<ProbeState>;

    /// Asks the peer's device for a sign of life.
    fn probe(&mut self) -> io::Result<()>;
}
