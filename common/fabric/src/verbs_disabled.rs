//! What stands for `verbs/` in a build without RDMA: the same names and signatures, on types that
//! have no values. Whoever connects gets [`VerbsError::NotBuilt`].

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::shm::Region;
use super::{Buffer, Completion, Counters, Fabric, LaneId, Nanos, Timing, Verb};
use crate::{ControlChannel, Role};

#[path = "verbs/report.rs"]
mod report;
#[path = "verbs/types.rs"]
mod types;

pub use report::{Capabilities, Device, Finding, Gid, Port, Report};
pub use types::{
    ACK_TIMEOUT, ConnectionId, Options, ProbeState, REASON_BYTES_MAX, RemoteRegion, VerbsError,
};

/// What sysfs says about RDMA on this machine, and that this program cannot use it.
pub fn preflight() -> Report {
    let mut report = Report::from_sysfs().judge();
    let (what, mend) = ("this program was built without RDMA", "build it with --features verbs");
    report.findings.push(Finding { what: what.to_owned(), mend: mend.to_owned() });
    report
}

/// Opens a control channel.
///
/// # Errors
/// [`VerbsError::NotBuilt`].
pub fn connect_control(
    _: SocketAddr,
    private_data: &[u8],
    _: &Options,
) -> Result<(VerbsChannel, Vec<u8>), VerbsError> {
    types::check_request(private_data)?;
    Err(VerbsError::NotBuilt)
}

/// Opens a data connection for a fabric of so many lanes.
///
/// # Errors
/// [`VerbsError::NotBuilt`].
pub fn connect_data(
    _: SocketAddr,
    private_data: &[u8],
    _: u16,
    _: &Options,
) -> Result<DataLink, VerbsError> {
    types::check_request(private_data)?;
    Err(VerbsError::NotBuilt)
}

/// A data connection whose peer has answered.
pub struct DataLink(Infallible);

impl DataLink {
    /// What the server answered.
    pub fn reply(&self) -> &[u8] {
        match self.0 {}
    }

    /// The fabric.
    ///
    /// # Errors
    /// None.
    pub fn into_fabric(self, _: RemoteRegion) -> Result<VerbsFabric, VerbsError> {
        match self.0 {}
    }
}

/// The data path.
pub struct VerbsFabric(Infallible);

impl VerbsFabric {
    /// Whether the connection is finished.
    pub fn is_broken(&self) -> bool {
        match self.0 {}
    }
}

impl Fabric for VerbsFabric {
    fn timing(&self) -> Timing {
        match self.0 {}
    }

    fn now(&self) -> Nanos {
        match self.0 {}
    }

    fn post(&mut self, _: LaneId, _: &[Verb], _: Nanos) {
        match self.0 {}
    }

    fn wait(&mut self, _: LaneId, _: Nanos) {
        match self.0 {}
    }

    fn ring(&mut self) {
        match self.0 {}
    }

    fn poll(&mut self) -> Option<Completion> {
        match self.0 {}
    }

    fn relax(&mut self) {
        match self.0 {}
    }

    fn buffer(&self, _: LaneId, _: Buffer) -> &[u8] {
        match self.0 {}
    }

    fn buffer_mut(&mut self, _: LaneId, _: Buffer) -> &mut [u8] {
        match self.0 {}
    }

    fn reserve(&mut self, _: LaneId, _: Buffer, _: usize) -> bool {
        match self.0 {}
    }

    fn counters(&self) -> Counters {
        match self.0 {}
    }

    fn lane_counters(&self, _: LaneId) -> &Counters {
        match self.0 {}
    }
}

/// One end of a control channel.
pub struct VerbsChannel(Infallible);

impl VerbsChannel {
    /// The connection in a listener's events.
    pub fn id(&self) -> ConnectionId {
        match self.0 {}
    }
}

impl ControlChannel for VerbsChannel {
    fn send(&mut self, _: &[u8]) -> io::Result<()> {
        match self.0 {}
    }

    fn receive(&mut self, _: &mut [u8]) -> io::Result<Option<usize>> {
        match self.0 {}
    }

    fn is_writable_with_room(&self) -> bool {
        match self.0 {}
    }

    fn flush(&mut self, _: Duration) -> io::Result<()> {
        match self.0 {}
    }
}

impl AsFd for VerbsChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

/// What a listener has to tell.
pub enum Event {
    /// Somebody wants to connect.
    Request(Incoming),
    /// The peer of an accepted connection knows that it was accepted.
    Established(ConnectionId),
    /// The peer of an accepted connection is gone.
    Disconnected(ConnectionId),
    /// The device of an accepted connection is gone.
    DeviceRemoved(ConnectionId),
}

/// Listens at an address.
pub struct Listener(Infallible);

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    /// [`VerbsError::NotBuilt`].
    pub fn bind(_: SocketAddr, _: &Options) -> Result<Self, VerbsError> {
        Err(VerbsError::NotBuilt)
    }

    /// Where it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        match self.0 {}
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// None.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        match self.0 {}
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

/// A connection that somebody asks for.
pub struct Incoming(Infallible);

impl Incoming {
    /// What the peer said.
    pub fn private_data(&self) -> &[u8] {
        match self.0 {}
    }

    /// What events will call it.
    pub fn id(&self) -> ConnectionId {
        match self.0 {}
    }

    /// Refuses.
    ///
    /// # Errors
    /// None.
    pub fn reject(self, _: &[u8]) -> Result<(), VerbsError> {
        match self.0 {}
    }

    /// Accepts it as a control channel.
    ///
    /// # Errors
    /// None.
    pub fn accept_control(self, _: &[u8]) -> Result<VerbsChannel, VerbsError> {
        match self.0 {}
    }

    /// Accepts it as a data connection.
    ///
    /// # Errors
    /// None.
    pub fn accept_data(self, _: &Protection, _: &[u8]) -> Result<DataConnection, VerbsError> {
        match self.0 {}
    }
}

/// A region as one role may reach it.
pub struct Protection(Infallible);

impl Protection {
    /// Registers a region for a role.
    ///
    /// # Errors
    /// None.
    pub fn new(incoming: &Incoming, _: &Arc<Region>, _: Role) -> Result<Self, VerbsError> {
        match incoming.0 {}
    }

    /// The same, on the device that has this address.
    ///
    /// # Errors
    /// [`VerbsError::NotBuilt`].
    pub fn at(_: SocketAddr, _: &Arc<Region>, _: Role) -> Result<Self, VerbsError> {
        Err(VerbsError::NotBuilt)
    }

    /// What a client of this role has to know.
    pub fn remote(&self) -> RemoteRegion {
        match self.0 {}
    }

    /// Whether a connection came in through this device.
    pub fn serves(&self, _: &Incoming) -> bool {
        match self.0 {}
    }

    /// The owner's own way to the region.
    ///
    /// # Errors
    /// None.
    pub fn loopback(&self, _: u16, _: &Options) -> Result<Loopback, VerbsError> {
        match self.0 {}
    }

    /// The same over a listener at this device's address.
    ///
    /// # Errors
    /// None.
    pub fn loopback_over(&self, _: Listener, _: u16, _: &Options) -> Result<Loopback, VerbsError> {
        match self.0 {}
    }
}

/// A server's fabric over its own region.
pub struct Loopback {
    /// The fabric.
    pub fabric: VerbsFabric,
    /// Its other end.
    pub peer: LoopbackPeer,
}

/// The other end of a server's own way to its region.
pub struct LoopbackPeer(Infallible);

/// The server's end of a client's data connection.
pub struct DataConnection(Infallible);

impl DataConnection {
    /// What events call it.
    pub fn id(&self) -> ConnectionId {
        match self.0 {}
    }

    /// Asks the peer's device for a sign of life.
    ///
    /// # Errors
    /// None.
    pub fn probe(&mut self) -> io::Result<()> {
        match self.0 {}
    }

    /// What the last probe found out.
    ///
    /// # Errors
    /// None.
    pub fn probe_state(&mut self) -> io::Result<ProbeState> {
        match self.0 {}
    }
}

impl AsFd for DataConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}
