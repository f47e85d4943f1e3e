//! The server's queue pairs to itself, through which threads that execute the verbs of clients over
//! TCP hand their atomic verbs to the device (invariant I11).

use std::sync::Arc;
use std::time::Duration;

use farside_fabric::rdma::{Options, VerbsError};
use farside_fabric::tcp::DeviceAtomics;
use farside_fabric::verbs::{Loopback, Protection};
use farside_fabric::{ChainError, Fabric, LaneId, Nanos, RegionIndex, Role, Verb};

/// The only lane, and the only region.
const LANE: LaneId = LaneId(0);
const REGION: RegionIndex = RegionIndex::FIRST;
/// How long verbs may be in flight before both ends of the queue pair are destroyed. A device takes
/// microseconds for an atomic verb on its own host. A shorter time would break the queue pair on a
/// busy machine, and a longer one would leave TCP less of its second.
const IN_FLIGHT_NS_MAX: Nanos = 300_000_000;
/// The longest time until the thread notices that they are overdue, and has destroyed the ends. The
/// thread sleeps for at most half of it.
const STOP_NS_MAX: Nanos = 200_000_000;
/// How long a reconnect may take, during which the thread serves no client.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a reconnect that failed.
const RECONNECT_PAUSE_NS: Nanos = 1_000_000_000;

/// The protection domain and the registration of the region for each role.
pub(super) struct Protections {
    pub(super) writers: Protection,
    pub(super) readers: Protection,
}

impl Protections {
    pub(super) fn of(&self, role: Role) -> &Protection {
        match role {
            Role::Writer => &self.writers,
            Role::Reader => &self.readers,
        }
    }
}

/// One thread's queue pair to the own device. It connects anew after it broke.
pub(super) struct LoopbackAtomics {
    protections: Arc<Protections>,
    options: Options,
    /// `None` after it broke.
    loopback: Option<Loopback>,
    reconnects_at: Nanos,
}

impl LoopbackAtomics {
    pub(super) fn connect(
        protections: &Arc<Protections>,
        options: &Options,
    ) -> Result<Self, VerbsError> {
        let loopback = Some(protections.writers.loopback(1, options)?);
        let options = Options { connect_timeout: RECONNECT_TIMEOUT, ..*options };
        Ok(Self { protections: protections.clone(), options, loopback, reconnects_at: 0 })
    }

    #[cold]
    fn reconnect(&mut self) -> Result<(), ChainError> {
        let now = farside_fabric::boot_time_ns();
        if now < self.reconnects_at {
            return Err(ChainError::Fenced);
        }
        match self.protections.writers.loopback(1, &self.options) {
            Ok(loopback) => {
                tracing::info!("FS-034 connected to the own RDMA device again");
                self.loopback = Some(loopback);
                Ok(())
            }
            Err(error) => {
                tracing::warn!("FS-033 cannot execute atomic verbs of clients over TCP: {error}");
                self.reconnects_at = now + RECONNECT_PAUSE_NS;
                Err(ChainError::Fenced)
            }
        }
    }
}

impl DeviceAtomics for LoopbackAtomics {
    #[inline]
    fn prepare(&mut self) -> Result<(), ChainError> {
        if self.loopback.is_some() { Ok(()) } else { self.reconnect() }
    }

    fn run(&mut self, verbs: &[Verb], deadline: Nanos) -> Result<u64, ChainError> {
        let Some(Loopback { fabric, .. }) = &mut self.loopback else {
            return Err(ChainError::Fenced);
        };
        let overdue_at = fabric.now() + IN_FLIGHT_NS_MAX;
        if overdue_at + STOP_NS_MAX > deadline {
            return Err(ChainError::Late);
        }
        // The fabric's own deadlines count all repetitions of packets, of which there are none
        // within one device. So the chain gets no deadline, and this loop bounds it.
        fabric.post(LANE, REGION, verbs, Nanos::MAX);
        fabric.ring();
        let result = loop {
            let is_overdue = fabric.now() > overdue_at;
            match fabric.poll() {
                Some(completion) => break completion.result,
                None if is_overdue => break Err(ChainError::Unknown),
                None => fabric.relax(),
            }
        };
        if let Err(error @ (ChainError::Fenced | ChainError::Unknown)) = result {
            tracing::warn!("FS-032 the connection to the own RDMA device broke: {error}");
            // Afterwards the device executes nothing more of it.
            self.loopback = None;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    //! Without FARSIDE_TEST_DEVICE, the address of a device, each test prints a line and passes.
    //! `tests/vm/suite` sets it.

    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_fabric::{boot_time_ns, tcp};

    use super::*;

    /// Returns a region, and two queue pairs to its device.
    fn connected() -> Option<(RegionMemory, [LoopbackAtomics; 2])> {
        let device = std::env::var("FARSIDE_TEST_DEVICE").unwrap_or_default();
        let Ok(device) = device.parse() else {
            println!("skipped: no RDMA device");
            return None;
        };
        let address = std::net::SocketAddr::new(device, 0);
        let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
        memory.reserve().unwrap();
        let protection = |role| Protection::at(address, &memory.region, role).unwrap();
        let (writers, readers) = (protection(Role::Writer), protection(Role::Reader));
        let protections = Arc::new(Protections { writers, readers });
        let connect = || LoopbackAtomics::connect(&protections, &Options::default()).unwrap();
        Some((memory, [connect(), connect()]))
    }

    fn swap(expected: u64, desired: u64) -> Verb {
        Verb::CompareSwap { remote: 64, expected, desired }
    }

    fn deadline() -> Nanos {
        boot_time_ns() + tcp::LATENESS_MAX_NS
    }

    #[test]
    fn a_swap_that_leaves_the_device_too_little_time_is_late() {
        let Some((memory, [mut device, _])) = connected() else { return };
        let soon = boot_time_ns() + IN_FLIGHT_NS_MAX;
        assert_eq!(device.run(&[swap(0, 1)], soon), Err(ChainError::Late));
        assert_eq!(memory.region.load(64), Ok(0));
        assert_eq!(device.run(&[swap(0, 1), swap(1, 2)], deadline()), Ok(1));
        assert_eq!(memory.region.load(64), Ok(2));
    }

    #[test]
    fn a_queue_pair_that_broke_is_replaced() {
        let Some((memory, [mut device, mut other])) = connected() else { return };
        assert_eq!(device.run(&[swap(0, 1)], deadline()), Ok(0));
        let ends = [&mut device, &mut other].map(|of| &mut of.loopback.as_mut().unwrap().peer);
        let [end, other_end] = ends;
        std::mem::swap(end, other_end);
        // Destroys the other end of the queue pair that is left.
        drop(other);
        let failed = device.run(&[swap(1, 2)], deadline());
        assert!(matches!(failed, Err(ChainError::Fenced | ChainError::Unknown)), "{failed:?}");
        assert_eq!(device.run(&[swap(1, 2)], deadline()), Err(ChainError::Fenced));
        assert_eq!(memory.region.load(64), Ok(1));
        device.prepare().unwrap();
        assert_eq!(device.run(&[swap(1, 2)], deadline()), Ok(1));
    }
}
