//! What a server lets a role reach, and the connections that may.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Event, Incoming, Listener};
use crate::Role;
use crate::rdma::{ConnectionId, Options, ProbeState, RemoteRegion, VerbsError};
use crate::shm::Region;
use crate::verbs::ffi::{
    self, ibv_access_flags, ibv_send_flags, ibv_wc_status, ibv_wr_opcode, system,
};
use crate::verbs::handles::{Capacity, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair};
use crate::verbs::identifier::{CmId, EventChannel};
use crate::verbs::{VerbsFabric, connect_data, preflight};

/// No chain through a network card is faster: its doorbell and its completion cross PCIe at the
/// client (some 150 ns each way, posted), and the server's card READs or swaps over PCIe there
/// (some 300 ns at least, for it has to wait for the answer). The fastest measured need over 1,000.
const ROUND_TRIP_MIN_NS_CARD: u32 = 500;
/// A device in software takes each packet through the network stack, and through threads or
/// interrupts of the kernel, on both sides: four passes at a microsecond at least. The fastest
/// measured, soft-RoCE without emulation, need 8,000 ns and more.
const ROUND_TRIP_MIN_NS_SOFTWARE: u32 = 4_000;

/// By what the device is: one in software has no hardware behind it.
fn round_trip_min_ns(device: &str) -> u32 {
    let hardware = std::path::Path::new("/sys/class/infiniband").join(device).join("device");
    if hardware.exists() { ROUND_TRIP_MIN_NS_CARD } else { ROUND_TRIP_MIN_NS_SOFTWARE }
}

/// A probe at a time; one more, so that its completion never finds the queue full.
const CAPACITY: Capacity = Capacity { sends: 2, receives: 0, inline_bytes: 0 };

/// A region as one role may reach it: a protection domain of its own, and the region registered
/// with no more rights than the role has. A key of another role's domain is refused by the device.
pub struct Protection {
    memory: MemoryRegion,
    domain: Arc<ProtectionDomain>,
    region: Arc<Region>,
    role: Role,
    /// An address of the device.
    address: SocketAddr,
    round_trip_min_ns: u32,
}

impl Protection {
    /// Registers a region for a role, on the device that a connection came in through. Pins all of
    /// its memory: 20 to 30 ms a gigabyte, if its pages are there.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`] when the system does not let so much be pinned,
    /// [`VerbsError::NoAtomics`] when the device is of no use.
    pub fn new(incoming: &Incoming, region: &Arc<Region>, role: Role) -> Result<Self, VerbsError> {
        let mut address = incoming.identifier().local_address().ok_or(VerbsError::OtherDevice)?;
        address.set_port(0);
        Self::at(address, region, role)
    }

    /// The same, on the device that has this address.
    ///
    /// # Errors
    /// As [`Protection::new`], and [`VerbsError::NoRoute`] for an address of no RDMA device.
    pub fn at(address: SocketAddr, region: &Arc<Region>, role: Role) -> Result<Self, VerbsError> {
        // An identifier of its own keeps the device open, whichever clients come and go.
        let id = CmId::new(&EventChannel::new()?).map_err(system("making an identifier"))?;
        let address = SocketAddr::new(address.ip(), 0);
        id.bind(address).map_err(|source| VerbsError::NoRoute { address, source })?;
        let id = Arc::new(id);
        let limits = preflight::query(&id)?;
        if limits.atomic_cap == ffi::ibv_atomic_cap::IBV_ATOMIC_NONE {
            return Err(VerbsError::NoAtomics { device: id.device_name() });
        }
        if limits.max_mr_size < region.bytes() {
            let (offered, needed) = (limits.max_mr_size, region.bytes());
            return Err(VerbsError::TooSmall { what: "bytes a region", offered, needed });
        }
        let domain = Arc::new(ProtectionDomain::new(&id)?);
        let access = match role {
            Role::Reader => ibv_access_flags::IBV_ACCESS_REMOTE_READ,
            Role::Writer => {
                ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                    | ibv_access_flags::IBV_ACCESS_REMOTE_READ
                    | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
                    | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC
            }
        };
        let (start, bytes) = (region.start(), region.bytes() as usize);
        // SAFETY: `self` holds the region, whose memory all code accesses as atomics: changes by
        // a device are as good as another process's.
        let memory = unsafe { MemoryRegion::register(&domain, start, bytes, access)? };
        let round_trip_min_ns = round_trip_min_ns(&id.device_name());
        let region = region.clone();
        Ok(Self { memory, domain, region, role, address, round_trip_min_ns })
    }

    /// What a client of this role has to know, for the answer to its request.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            base_address: self.region.start() as u64,
            region_bytes: self.region.bytes(),
            rkey: self.memory.rkey(),
            writable: self.role == Role::Writer,
            round_trip_min_ns: self.round_trip_min_ns,
        }
    }

    /// Whether a connection came in through this device.
    pub fn serves(&self, incoming: &Incoming) -> bool {
        incoming.identifier().device() == self.domain.device()
    }

    /// The owner's own way to the region: through the device and back, for words that clients
    /// compare-and-swap may only be changed by the device (invariant I11).
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn loopback(&self, lanes: u16, options: &Options) -> Result<Loopback, VerbsError> {
        self.loopback_over(Listener::bind(self.address, options)?, lanes, options)
    }

    /// The same over a listener at this device's address, which strangers may know already.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn loopback_over(
        &self,
        mut listener: Listener,
        lanes: u16,
        options: &Options,
    ) -> Result<Loopback, VerbsError> {
        let address = listener.local_address().ok_or(VerbsError::OtherDevice)?;
        // The listener is open to all: only this process knows what it says to itself.
        let nonce = random_nonce().map_err(system("finding a random number"))?;
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect_data(address, &nonce, lanes, options));
            let accepted = self.accept_own(&mut listener, &nonce, options.connect_timeout);
            let failed = || system("connecting to the own device")(std::io::Error::other("panic"));
            let link = connecting.join().map_err(|_| failed())?;
            let connection = accepted?;
            let fabric = link?.into_fabric(self.remote())?;
            let peer = LoopbackPeer { _connection: connection, _listener: listener };
            Ok(Loopback { fabric, peer })
        })
    }

    fn accept_own(
        &self,
        listener: &mut Listener,
        nonce: &[u8; NONCE_BYTES],
        most: Duration,
    ) -> Result<DataConnection, VerbsError> {
        let until = Instant::now() + most;
        // Also where strangers knock all the time.
        while Instant::now() < until {
            let doing = "connecting to the own device";
            match listener.next_event().map_err(system(doing))? {
                Some(Event::Request(incoming)) if incoming.private_data().starts_with(nonce) => {
                    return incoming.accept_data(self, &[]);
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Err(VerbsError::TimedOut { address: self.address, after: most })
    }
}

/// How much the owner says to itself, at random.
const NONCE_BYTES: usize = 16;

fn random_nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

/// A server's fabric over its own region.
pub struct Loopback {
    /// The fabric.
    pub fabric: VerbsFabric,
    /// Its other end, to be kept as long.
    pub peer: LoopbackPeer,
}

/// The other end of a server's own way to its region.
pub struct LoopbackPeer {
    _connection: DataConnection,
    _listener: Listener,
}

/// The server's end of a client's data connection. The server's processor takes no part in the
/// client's verbs.
///
/// **Dropping it is the fence**: the queue pair is destroyed, and when that returns, nothing the
/// client has posted or will post takes effect any more.
pub struct DataConnection {
    queue_pair: QueuePair,
    number: ConnectionId,
    role: Role,
    probed_at: Option<Instant>,
    state: ProbeState,
    patience: Duration,
    /// What the peer may reach, at least as long as it may reach it.
    _domain: Arc<ProtectionDomain>,
}

impl DataConnection {
    pub(super) fn new(
        id: &Arc<CmId>,
        protection: &Protection,
        number: ConnectionId,
        options: &Options,
    ) -> Result<Self, VerbsError> {
        if id.device() != protection.domain.device() {
            return Err(VerbsError::OtherDevice);
        }
        let completions = Arc::new(CompletionQueue::new(id, CAPACITY.sends)?);
        let queue_pair = QueuePair::new(id, &protection.domain, &completions, CAPACITY)?;
        Ok(Self {
            queue_pair,
            number,
            role: protection.role,
            probed_at: None,
            state: ProbeState::Idle,
            patience: Duration::from_nanos(options.delivery_max_ns()),
            _domain: protection.domain.clone(),
        })
    }

    /// Once accepted: takes from a reader's queue pair what RDMA-CM gives to every one. The memory
    /// it can name is read-only already; this is the second lock.
    pub(super) fn restrict(&self) -> Result<(), VerbsError> {
        if self.role == Role::Writer {
            return Ok(());
        }
        // SAFETY: a structure of numbers.
        let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_qp_attr>() };
        attributes.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        self.queue_pair.modify(&mut attributes, ffi::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS)
    }

    /// What events call it.
    pub fn id(&self) -> ConnectionId {
        self.number
    }

    /// Asks the peer's device for a sign of life: a WRITE of no bytes. Its processor does not
    /// notice. One at a time: while one is under way this does nothing.
    ///
    /// # Errors
    /// What the system says.
    pub fn probe(&mut self) -> std::io::Result<()> {
        if self.probe_state()? == ProbeState::Pending {
            return Ok(());
        }
        // SAFETY: a structure of numbers and pointers.
        let mut request = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
        request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: a list of one, without memory.
        unsafe { self.queue_pair.post_sends(&raw mut request) }?;
        (self.probed_at, self.state) = (Some(Instant::now()), ProbeState::Pending);
        Ok(())
    }

    /// What the last probe found out. The descriptor becomes readable when it is no longer pending,
    /// unless the device has waited too long: look again after some seconds.
    ///
    /// # Errors
    /// What the system says.
    pub fn probe_state(&mut self) -> std::io::Result<ProbeState> {
        let completions = self.queue_pair.completions();
        completions.take_wakeups()?;
        completions.request_wakeup()?;
        // SAFETY: a structure of numbers.
        let mut taken = [unsafe { ffi::zeroed::<ffi::ibv_wc>() }];
        if completions.poll(&mut taken)? > 0 {
            let is_ok = taken[0].status == ibv_wc_status::IBV_WC_SUCCESS;
            self.state = if is_ok { ProbeState::Alive } else { ProbeState::Dead };
        } else if self.state == ProbeState::Pending
            && self.probed_at.is_some_and(|at| at.elapsed() > self.patience)
        {
            self.state = ProbeState::Dead;
        }
        Ok(self.state)
    }
}

impl AsFd for DataConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue_pair.completions().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_says_something_else_to_itself() {
        let nonces: Vec<_> = (0..3).map(|_| random_nonce().unwrap()).collect();
        assert!(nonces[0] != nonces[1] && nonces[1] != nonces[2] && nonces[2] != nonces[0]);
    }
}
