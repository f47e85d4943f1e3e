//! A region with the rights of one role, and the data connections of its clients.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Event, Incoming, Listener};
use crate::memory::Region;
use crate::rdma::{
    ConnectionId, Options, ProbeState, RemoteRegion, Rkeys, SLICE_OVERLAP_BYTES, SLICES_MAX,
    VerbsError, registered_ranges, slice_count,
};
use crate::verbs::ffi::{self, ibv_access_flags, ibv_wc_status, system};
use crate::verbs::handles::{Capacity, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair};
use crate::verbs::identifier::{CmId, EventChannel};
use crate::verbs::{VerbsFabric, connect_data, preflight};
use crate::{Role, SOFTWARE_ROUND_TRIP_MIN_NS};

/// No chain through a network card is faster. Its doorbell and its completion cross PCIe at the
/// client (some 150 ns each way, posted). At the server the card READs or swaps over PCIe, and
/// waits for the answer (at least some 300 ns). The fastest measured take over 1,000 ns.
const CARD_ROUND_TRIP_MIN_NS: u32 = 500;

/// Returns the shortest round trip of the device, which depends on whether it is hardware or
/// software.
fn round_trip_min_ns(device: &str) -> u32 {
    let hardware = std::path::Path::new("/sys/class/infiniband").join(device).join("device");
    if hardware.exists() { CARD_ROUND_TRIP_MIN_NS } else { SOFTWARE_ROUND_TRIP_MIN_NS }
}

/// One probe at a time, and one entry more, so that a completion never finds the queue full.
const CAPACITY: Capacity = Capacity { sends: 2, receives: 0, inline_bytes: 0 };

/// A region with the rights of one role. It is registered with these rights only, in a protection
/// domain of the role. The device refuses a key of another role's domain.
pub struct Protection {
    /// The slices of the region. Peers know their keys.
    _slices: Vec<MemoryRegion>,
    rkeys: Rkeys,
    domain: Arc<ProtectionDomain>,
    region: Arc<Region>,
    role: Role,
    /// An address of the device.
    address: SocketAddr,
    round_trip_min_ns: u32,
}

impl Protection {
    /// Registers a region for a role, on the device that has this address. Pins all of the region's
    /// memory, which takes 20 to 30 ms a gigabyte if its pages are allocated.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`] if the system does not allow the region's memory to be pinned,
    /// [`VerbsError::NoAtomics`] if the device has no atomic verbs, [`VerbsError::NoRoute`] if no
    /// RDMA device has the address.
    pub fn at(address: SocketAddr, region: &Arc<Region>, role: Role) -> Result<Self, VerbsError> {
        Self::in_slices(address, region, role, None)
    }

    /// As [`Protection::at`]. A region that is longer than a slice is registered in slices of
    /// `slice_bytes`, which is not 0.
    ///
    /// # Errors
    /// [`VerbsError::TooManySlices`] if the slices are too short, and those of [`Protection::at`].
    pub fn in_slices(
        address: SocketAddr,
        region: &Arc<Region>,
        role: Role,
        slice_bytes: Option<u64>,
    ) -> Result<Self, VerbsError> {
        let region_bytes = region.bytes();
        let slice_bytes = slice_bytes.filter(|slice| *slice < region_bytes);
        let part_bytes = slice_bytes.unwrap_or(region_bytes);
        let slices = slice_count(region_bytes, part_bytes);
        if slices > SLICES_MAX as u64 {
            return Err(VerbsError::TooManySlices { region_bytes, slices });
        }
        // With an identifier of its own the device stays open when all clients disconnect.
        let id = CmId::new(&EventChannel::new()?).map_err(system("making an identifier"))?;
        let address = SocketAddr::new(address.ip(), 0);
        id.bind(address).map_err(|source| VerbsError::NoRoute { address, source })?;
        let id = Arc::new(id);
        let limits = preflight::query(&id)?;
        if limits.atomic_cap == ffi::ibv_atomic_cap::IBV_ATOMIC_NONE {
            return Err(VerbsError::NoAtomics { device: id.device_name() });
        }
        let needed = region_bytes.min(part_bytes + SLICE_OVERLAP_BYTES);
        if limits.max_mr_size < needed {
            let offered = limits.max_mr_size;
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
        let mut rkeys = Rkeys { slice_bytes: slice_bytes.unwrap_or(0), ..Rkeys::default() };
        let mut slices = Vec::new();
        for (range, key) in registered_ranges(region_bytes, part_bytes).zip(&mut rkeys.keys) {
            let start = region.start().wrapping_add(range.start as usize);
            let bytes = (range.end - range.start) as usize;
            // SAFETY: `self` holds the region, and the range is in it. All code accesses its memory
            // as atomics, and expects changes by a device as by another process.
            let slice = unsafe { MemoryRegion::register(&domain, start, bytes, access)? };
            *key = slice.rkey();
            slices.push(slice);
        }
        let round_trip_min_ns = round_trip_min_ns(&id.device_name());
        let region = region.clone();
        Ok(Self { _slices: slices, rkeys, domain, region, role, address, round_trip_min_ns })
    }

    /// The region's description for clients of this role.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            base_address: self.region.start() as u64,
            region_bytes: self.region.bytes(),
            rkeys: self.rkeys,
            writable: self.role == Role::Writer,
            round_trip_min_ns: self.round_trip_min_ns,
        }
    }

    /// Whether a connection request came through this device.
    pub fn serves(&self, incoming: &Incoming) -> bool {
        incoming.id.device() == self.domain.id.device()
    }

    /// Connects the server to its own region through the device, because only the device may change
    /// words that clients compare-and-swap (invariant I11).
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn loopback(&self, lanes: u16, options: &Options) -> Result<Loopback, VerbsError> {
        self.loopback_over(Listener::bind(self.address, options)?, lanes, options)
    }

    /// As [`Protection::loopback`], over a listener of this device. Strangers may connect to it.
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
        // Anyone can connect to the listener. Only this process knows the nonce.
        let nonce = random_nonce().map_err(system("finding a random number"))?;
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connect_data(address, &nonce, lanes, options));
            let accepted = self.accept_own(&mut listener, &nonce, options.connect_timeout);
            let failed = || system("connecting to the own device")(std::io::Error::other("panic"));
            let link = connecting.join().map_err(|_| failed())?;
            let connection = accepted?;
            let fabric = link?.into_fabric(self.remote())?;
            Ok(Loopback { fabric, peer: (connection, listener) })
        })
    }

    fn accept_own(
        &self,
        listener: &mut Listener,
        nonce: &[u8; NONCE_BYTES],
        timeout: Duration,
    ) -> Result<DataConnection, VerbsError> {
        let until = Instant::now() + timeout;
        // The time is checked after each event, because strangers could connect all the time.
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
        Err(VerbsError::TimedOut { address: self.address, after: timeout })
    }
}

/// The length of the random number by which a server recognises its own connection request.
const NONCE_BYTES: usize = 16;

fn random_nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

/// A server's connection to its own region.
pub struct Loopback {
    /// The fabric.
    pub fabric: VerbsFabric,
    /// The accepting end, to be dropped after the fabric.
    pub peer: (DataConnection, Listener),
}

/// The server's end of a client's data connection. The server's processor does not take part in the
/// client's verbs.
///
/// **Dropping it fences the client**: the queue pair is destroyed, and after that no verb that the
/// client has posted or will post takes effect.
pub struct DataConnection {
    queue_pair: QueuePair,
    number: ConnectionId,
    role: Role,
    probed_at: Option<Instant>,
    state: ProbeState,
    patience: Duration,
}

impl DataConnection {
    pub(super) fn new(
        id: &Arc<CmId>,
        protection: &Protection,
        number: ConnectionId,
        options: &Options,
    ) -> Result<Self, VerbsError> {
        if id.device() != protection.domain.id.device() {
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
        })
    }

    /// Removes from a reader's accepted queue pair the rights that RDMA-CM gives to all. They had
    /// no effect, because the memory's key is read-only; this is a second protection.
    pub(super) fn restrict(&self) -> Result<(), VerbsError> {
        if self.role == Role::Writer {
            return Ok(());
        }
        // SAFETY: a structure of numbers.
        let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_qp_attr>() };
        attributes.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        self.queue_pair.modify(&mut attributes, ffi::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS)
    }

    /// The number of the connection in events.
    pub fn id(&self) -> ConnectionId {
        self.number
    }

    /// Asks the peer's device for an acknowledgement. The peer's processor does not notice it. Does
    /// nothing while another probe is in flight.
    ///
    /// # Errors
    /// The system's error.
    pub fn probe(&mut self) -> std::io::Result<()> {
        if self.probe_state()? == ProbeState::Pending {
            return Ok(());
        }
        self.queue_pair.post_probe(0)?;
        (self.probed_at, self.state) = (Some(Instant::now()), ProbeState::Pending);
        Ok(())
    }

    /// The state of the last probe. The descriptor becomes readable when the probe completes. A
    /// device may also take too long, so ask again after some seconds.
    ///
    /// # Errors
    /// The system's error.
    pub fn probe_state(&mut self) -> std::io::Result<ProbeState> {
        let completions = &self.queue_pair.completions;
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
        self.queue_pair.completions.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_nonces_are_equal() {
        let nonces: Vec<_> = (0..3).map(|_| random_nonce().unwrap()).collect();
        assert!(nonces[0] != nonces[1] && nonces[1] != nonces[2] && nonces[2] != nonces[0]);
    }
}
