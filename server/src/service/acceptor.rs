//! The listener and the connection requests of a fabric, as the control service uses them.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use farside_config::ServerConfig;
use farside_control::{ControlChannel, FabricKind, Role};
use farside_fabric::memory::RegionMemory;
use farside_fabric::rdma::{ConnectionId, ProbeState, RemoteRegion};
use farside_fabric::tcp::DeviceAtomics;

use crate::error::ServerError;
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::served::ServedRegion;

/// A bound listener that does not accept yet. Clients that connect to it wait. The server binds it
/// before it opens the region, because binding is quick and fails more often.
pub(crate) trait BoundListener: AsFd + Send {
    /// Begins to accept clients of a region. Returns the server's own endpoint of the region, too.
    /// If a device serves the region, it executes the atomic verbs of all clients.
    fn open(
        self: Box<Self>,
        config: &ServerConfig,
        memory: &RegionMemory,
        opened: &ServedRegion,
        device: Option<&dyn RegionDevice>,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError>;
}

/// An RDMA device that serves the region.
pub(crate) trait RegionDevice {
    /// No chain through the device takes less time, in nanoseconds.
    fn round_trip_min_ns(&self) -> u32;

    /// Connects the server to its own region, for one thread that executes the verbs of clients.
    ///
    /// # Errors
    /// [`ServerError::Rdma`].
    fn atomics(&self) -> Result<Box<dyn DeviceAtomics>, ServerError>;
}

/// Accepts the clients of one fabric. Its descriptor is readable when there is an [`Arrival`].
pub(crate) trait Acceptor: AsFd + Send {
    /// Returns its fabric.
    fn fabric(&self) -> FabricKind;

    /// Returns the limit on the arrivals that one turn of the serving thread takes.
    fn arrivals_max(&self) -> usize;

    /// Returns the next arrival; `None` if there is none at present.
    ///
    /// # Errors
    /// The system cannot accept a connection at present. Most likely it is out of descriptors.
    fn next(&mut self) -> io::Result<Option<Arrival>>;

    /// Whether the hosts of clients have to be probed, because the system does not do it.
    fn needs_probes(&self) -> bool {
        false
    }

    /// Returns the device that executes the verbs of the clients, if one does.
    fn device(&self) -> Option<&dyn RegionDevice> {
        None
    }

    /// Returns the region as clients of this role reach it; `None` if they map it.
    fn remote(&self, _: Role) -> Option<RemoteRegion> {
        None
    }

    /// Returns the region's descriptor for clients of this role, if they map the region.
    fn descriptor(&self, _: Role) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// An event of a listener.
#[cfg_attr(not(feature = "verbs"), expect(dead_code, reason = "one needs a device"))]
pub(crate) enum Arrival {
    /// A connection from this host that has not identified itself, and its user; or why it failed.
    Unidentified(io::Result<(Box<dyn ControlChannel>, u32)>),
    /// A request for a connection from any host. Its `ConnectRequest` states its purpose.
    Request(Box<dyn ConnectionRequest>),
    /// The peer of an accepted connection knows that it was accepted.
    Established,
    /// The peer has closed this connection.
    Ended(ConnectionId),
}

/// Why a connection cannot be accepted: an error of the system or of RDMA.
pub(crate) type AcceptError = Box<dyn std::error::Error + Send + Sync>;

/// A request for a connection, until it is accepted or refused.
pub(crate) trait ConnectionRequest {
    /// Returns the encoded `ConnectRequest`, with zeros after it.
    fn connect_request(&self) -> &[u8];

    /// Whether the request arrived at the device with which the region is registered.
    fn reaches_region(&self) -> bool {
        true
    }

    /// Returns the host that it comes from, if the fabric tells.
    fn host(&self) -> Option<IpAddr> {
        None
    }

    /// Refuses the request. If the reason does not reach the peer, it sees only the refusal.
    fn reject(self: Box<Self>, reason: &[u8]);

    /// Accepts the request as a control channel.
    ///
    /// # Errors
    /// [`AcceptError`]; the peer is refused without a reason.
    fn accept_control(self: Box<Self>, reply: &[u8]) -> Result<IdentifiedChannel, AcceptError>;

    /// Accepts the request as a session's connection to the region. Its client has this id and this
    /// lease.
    ///
    /// # Errors
    /// [`AcceptError`]; the peer is refused without a reason.
    fn accept_data(
        self: Box<Self>,
        role: Role,
        client: (u16, u64),
        reply: &[u8],
    ) -> Result<Box<dyn DataConnection>, AcceptError>;
}

/// A control channel, and the identifier of its connection in events.
pub(crate) type IdentifiedChannel = (Box<dyn ControlChannel>, ConnectionId);

/// The server's end of a session's connection to the region. Over RDMA, dropping it destroys its
/// queue pair, which fences the session.
pub(crate) trait DataConnection: Send {
    /// Returns the identifier of this connection in events of the device.
    fn id(&self) -> ConnectionId;

    /// Returns the state of the last probe. Where the system probes, there is none.
    fn probe_state(&mut self) -> io::Result<ProbeState> {
        Ok(ProbeState::Idle)
    }

    /// Posts a verb that completes only if the peer's device is alive. Where the system probes, it
    /// does nothing.
    fn probe(&mut self) -> io::Result<()> {
        Ok(())
    }
}
