//! Clients on any host: they connect to a port, and say in their first message what they want.
//! Threads of this process execute their verbs.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_control::listening::bind_each;
use farside_control::{FabricKind, Role};
use farside_fabric::memory::{Lease, Region, RegionMemory};
use farside_fabric::rdma::{ConnectionId, RemoteRegion, Rkeys};
use farside_fabric::shm;
use farside_fabric::tcp::{
    self, Arrivals, Event, ExecutorOptions, Executors, Incoming, Listener, TlsServer,
};
use farside_layout::Geometry;

use super::acceptor::{
    AcceptError, Acceptor, Arrival, BoundListener, ConnectionRequest, DataConnection,
    IdentifiedChannel, RegionDevice,
};
use crate::error::{ServerError, system};
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::served::ServedRegion;

/// Limit on the arrivals of one turn of the serving thread.
const ARRIVALS_MAX: usize = 64;

/// The arrivals at a port, and the executors of its sessions.
struct TcpAcceptor {
    arrivals: Arrivals,
    shared: Arc<SharedRegion>,
}

/// What the sessions' connections use.
struct SharedRegion {
    executors: Executors,
    for_writers: Arc<Region>,
    /// Mapped for reading, so that the memory itself refuses a reader's changes.
    for_readers: Arc<Region>,
    geometry: Geometry,
    /// No chain of any client takes less time, on whatever fabric.
    round_trip_min_ns: u32,
}

/// Binds a listener to those of these addresses that this host has.
pub(crate) fn bind(
    addresses: &[SocketAddr],
    listen: &Address,
    tls: Option<&Arc<TlsServer>>,
) -> Result<Listener, ServerError> {
    let sockets = bind_each(addresses, TcpListener::bind).map_err(|source| {
        let listen = listen.to_string();
        match source.kind() {
            io::ErrorKind::AddrInUse => ServerError::PortInUse { listen, source },
            io::ErrorKind::AddrNotAvailable => ServerError::OtherHost { listen, source },
            io::ErrorKind::PermissionDenied => ServerError::ListenForbidden { listen, source },
            _ => ServerError::ListenAt { listen, source },
        }
    })?;
    let mut listener = Listener::over(sockets).map_err(system("listen"))?;
    if let Some(tls) = tls {
        listener.require_tls(Arc::clone(tls));
    }
    Ok(listener)
}

impl BoundListener for Listener {
    fn open(
        self: Box<Self>,
        config: &ServerConfig,
        memory: &RegionMemory,
        opened: &ServedRegion,
        device: Option<&dyn RegionDevice>,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError> {
        let failed = || system("start the threads that execute verbs");
        let for_readers = memory.reader_descriptor()?;
        let threads = config.tcp.threads();
        let kept_bytes_max = config.tcp.buffers_bytes(opened.format.region_bytes) as usize;
        let options = ExecutorOptions { spin: config.tcp.spin(), kept_bytes_max };
        let executors = match device {
            None => self.start_executors(threads, options),
            Some(device) => {
                let devices = (0..threads).map(|_| device.atomics());
                self.start_executors_beside_device(devices.collect::<Result<_, _>>()?, options)
            }
        };
        let shared = SharedRegion {
            executors: executors.map_err(failed())?,
            for_writers: opened.region.clone(),
            for_readers: Arc::new(Region::map_read_only(&for_readers).map_err(failed())?),
            geometry: opened.geometry,
            round_trip_min_ns: match config.listens_at(Address::is_shm) {
                true => shm::ROUND_TRIP_MIN_NS as u32,
                false => device.map_or(tcp::ROUND_TRIP_MIN_NS, |device| {
                    device.round_trip_min_ns().min(tcp::ROUND_TRIP_MIN_NS)
                }),
            },
        };
        let arrivals = self.start().map_err(system("start the thread that accepts clients"))?;
        let acceptor = TcpAcceptor { arrivals, shared: Arc::new(shared) };
        Ok((Box::new(acceptor), OwnEndpoint::over_memory(&opened.region)))
    }
}

impl Acceptor for TcpAcceptor {
    fn fabric(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn arrivals_max(&self) -> usize {
        ARRIVALS_MAX
    }

    fn remote(&self, role: Role) -> Option<RemoteRegion> {
        Some(RemoteRegion {
            base_address: 0,
            region_bytes: self.shared.for_writers.bytes(),
            rkeys: Rkeys::default(),
            writable: role == Role::Writer,
            round_trip_min_ns: self.shared.round_trip_min_ns,
        })
    }

    fn next(&mut self) -> io::Result<Option<Arrival>> {
        Ok(self.arrivals.next_event()?.map(|event| match event {
            Event::Request(incoming) => {
                let shared = self.shared.clone();
                Arrival::Request(Box::new(TcpRequest { incoming, shared }))
            }
            Event::Ended(id) => Arrival::Ended(id),
        }))
    }
}

impl AsFd for TcpAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrivals.as_fd()
    }
}

struct TcpRequest {
    incoming: Incoming,
    shared: Arc<SharedRegion>,
}

impl ConnectionRequest for TcpRequest {
    fn connect_request(&self) -> &[u8] {
        self.incoming.request()
    }

    fn host(&self) -> Option<IpAddr> {
        Some(self.incoming.host())
    }

    fn reject(self: Box<Self>, reason: &[u8]) {
        self.incoming.reject(reason);
    }

    fn accept_control(self: Box<Self>, reply: &[u8]) -> Result<IdentifiedChannel, AcceptError> {
        let channel = self.incoming.accept_control(reply)?;
        let id = channel.id();
        Ok((Box::new(channel), id))
    }

    fn accept_data(
        self: Box<Self>,
        role: Role,
        (client_id, lease): (u16, u64),
        reply: &[u8],
    ) -> Result<Box<dyn DataConnection>, AcceptError> {
        let Self { incoming, shared } = *self;
        let offset = shared.geometry.client_entry(client_id);
        let lease = Lease { offset: offset.ok_or("no such client")?, number: lease };
        let region = match role {
            Role::Writer => &shared.for_writers,
            Role::Reader => &shared.for_readers,
        };
        Ok(Box::new(incoming.accept_data(&shared.executors, region, lease, reply)?))
    }
}

impl DataConnection for tcp::DataConnection {
    fn id(&self) -> ConnectionId {
        Self::id(self)
    }
}
