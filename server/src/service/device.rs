//! Clients on any host: they connect through an RDMA device, and identify themselves in the private
//! data of RDMA-CM.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_control::{FabricKind, Role};
use farside_fabric::memory::RegionMemory;
use farside_fabric::rdma::{ConnectionId, Options, ProbeState, RemoteRegion, Rkeys, slice_count};
use farside_fabric::tcp::{self, DeviceAtomics};
use farside_fabric::verbs::{self, Event, Incoming, Listener, Protection};

use super::acceptor::{
    AcceptError, Acceptor, Arrival, BoundListener, ConnectionRequest, DataConnection,
    IdentifiedChannel, RegionDevice,
};
use super::connections::EVENTS_MAX;
use super::device_atomics::{LoopbackAtomics, Protections};
use crate::error::ServerError;
use crate::rate_limited_warning::{RateLimitedWarning, warn_rarely};
use crate::region::own_endpoint::{LANES, OwnEndpoint};
use crate::region::served::ServedRegion;

/// A listener at a device, and the region's registrations with the device.
struct DeviceAcceptor {
    listener: Listener,
    failed: RateLimitedWarning,
    protections: Arc<Protections>,
    options: Options,
}

/// The configured address of the device, for error messages.
fn listen_address(config: &ServerConfig) -> String {
    let address = config.listen.iter().find(|address| address.is_rdma());
    address.map_or_else(String::new, Address::to_string)
}

/// Binds a listener to the first of these addresses that belongs to an RDMA device.
pub(crate) fn bind(
    addresses: &[SocketAddr],
    config: &ServerConfig,
) -> Result<Listener, ServerError> {
    let mut failure = ServerError::NoDeviceAddress { listen: listen_address(config) };
    for address in addresses {
        if address.ip().is_unspecified() {
            continue;
        }
        match Listener::bind(*address, &config.rdma.options()) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error.into(),
        }
    }
    Err(failure)
}

impl BoundListener for Listener {
    fn open(
        self: Box<Self>,
        config: &ServerConfig,
        _: &RegionMemory,
        opened: &ServedRegion,
        _: Option<&dyn RegionDevice>,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError> {
        let address = self.local_address();
        let address =
            address.ok_or(ServerError::NoDeviceAddress { listen: listen_address(config) })?;
        let slice_bytes = config.rdma.mr_slice.map(|slice| slice.0);
        let register = |role| Protection::in_slices(address, &opened.region, role, slice_bytes);
        let (writers, readers) = (register(Role::Writer)?, register(Role::Reader)?);
        if let Rkeys { slice_bytes: slice @ 1.., .. } = writers.remote().rkeys {
            let slices = slice_count(opened.region.bytes(), slice);
            tracing::info!(slices, "registered the region in slices of {}", ByteSize(slice));
        }
        // The server changes words with verbs as well, because atomics of the CPU and of the device
        // need not exclude each other (invariant I11).
        let options = config.rdma.options();
        let loopback = writers.loopback(LANES, &options)?;
        // The fence of a client over RDMA destroys its queue pairs. That of a client over TCP stops
        // no verb that the device already has.
        let fence_delay_ns =
            if config.listens_at(Address::is_tcp) { tcp::LATENESS_MAX_NS } else { 0 };
        let own = OwnEndpoint::over(loopback, &opened.format, fence_delay_ns)?;
        let protections = Arc::new(Protections { writers, readers });
        let failed = RateLimitedWarning::default();
        Ok((Box::new(DeviceAcceptor { listener: *self, failed, protections, options }), own))
    }
}

impl Acceptor for DeviceAcceptor {
    fn fabric(&self) -> FabricKind {
        FabricKind::Rdma
    }

    fn arrivals_max(&self) -> usize {
        EVENTS_MAX
    }

    /// Events that this turn leaves in the queue keep the descriptor readable.
    fn next(&mut self) -> io::Result<Option<Arrival>> {
        Ok(match self.listener.next_event() {
            Ok(event) => event.map(|event| match event {
                Event::Request(incoming) => {
                    let protections = self.protections.clone();
                    Arrival::Request(Box::new(DeviceRequest { incoming, protections }))
                }
                Event::Disconnected(id) => Arrival::Ended(id),
                Event::Established(_) => Arrival::Established,
            }),
            Err(error) => {
                let failed = &mut self.failed;
                warn_rarely!(failed, "FS-031 cannot take an event of the RDMA device: {error}");
                None
            }
        })
    }

    fn needs_probes(&self) -> bool {
        true
    }

    fn remote(&self, role: Role) -> Option<RemoteRegion> {
        Some(self.protections.of(role).remote())
    }

    fn device(&self) -> Option<&dyn RegionDevice> {
        Some(self)
    }
}

impl RegionDevice for DeviceAcceptor {
    fn round_trip_min_ns(&self) -> u32 {
        self.protections.writers.remote().round_trip_min_ns
    }

    fn atomics(&self) -> Result<Box<dyn DeviceAtomics>, ServerError> {
        Ok(Box::new(LoopbackAtomics::connect(&self.protections, &self.options)?))
    }
}

impl AsFd for DeviceAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

struct DeviceRequest {
    incoming: Incoming,
    protections: Arc<Protections>,
}

impl ConnectionRequest for DeviceRequest {
    fn connect_request(&self) -> &[u8] {
        self.incoming.private_data()
    }

    fn reaches_region(&self) -> bool {
        self.protections.writers.serves(&self.incoming)
    }

    fn reject(self: Box<Self>, reason: &[u8]) {
        let _ = self.incoming.reject(reason);
    }

    fn accept_control(self: Box<Self>, reply: &[u8]) -> Result<IdentifiedChannel, AcceptError> {
        let channel = self.incoming.accept_control(reply)?;
        let id = channel.id();
        Ok((Box::new(channel), id))
    }

    fn accept_data(
        self: Box<Self>,
        role: Role,
        _: (u16, u64),
        reply: &[u8],
    ) -> Result<Box<dyn DataConnection>, AcceptError> {
        let connection = self.incoming.accept_data(self.protections.of(role), reply)?;
        Ok(Box::new(connection))
    }
}

impl DataConnection for verbs::DataConnection {
    fn id(&self) -> ConnectionId {
        Self::id(self)
    }

    fn probe_state(&mut self) -> io::Result<ProbeState> {
        Self::probe_state(self)
    }

    fn probe(&mut self) -> io::Result<()> {
        Self::probe(self)
    }
}
