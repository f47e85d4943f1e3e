//! An emulated network between the clients of a run and the servers of its cluster, for machines on
//! which all of them share a few cores.
//!
//! Each server has a device, which all sessions of the run share. It executes one chain after
//! another. A chain takes as long as the rate of chains says, or longer if the device's bandwidth
//! needs longer for its payload. The completion is reported one round trip after the device is
//! done. So a server that is asked for more than its device can do has a queue, as over a network.
//!
//! The fabric of this machine executes the verbs at the doorbell. Only completions are held back.
//! The devices of clients, packet headers and the difference between verbs are not emulated.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside_control::cluster::Id;
use farside_fabric::{
    Buffer, Completion, Counters, Fabric, Intercept, Intercepted, Interceptor, LaneId, Nanos,
    RegionIndex, Verb,
};
use farside_layout::Superblock;
use serde::{Deserialize, Serialize};

/// The time from when a device is done with a chain until its completion is reported.
const ROUND_TRIP_NS: u64 = 2_000;
/// The default bandwidth of a device, in bytes a second: 100 Gb/s.
const BANDWIDTH: u64 = 12_500_000_000;
const PS_PER_S: u64 = 1_000_000_000_000;
/// GRACE is as long as this many times the longest queue.
const GRACE_QUEUES: u64 = 4;
/// A server's default GRACE.
const GRACE_MS_DEFAULT: u64 = 100;
/// The longest GRACE that a server accepts.
const GRACE_MS_MAX: u64 = 60_000;
/// A thread that has nothing to do sleeps for at most so long. Then it looks at the lanes that wait
/// in the fabric.
const SLEEP_MAX: Duration = Duration::from_micros(200);
/// Below this a thread yields instead: a sleep takes longer.
const SLEEP_MIN: Duration = Duration::from_micros(20);

/// The rates of each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    /// Chains a second.
    pub chains_per_s: u64,
    /// Bytes of payload a second.
    pub bytes_per_s: u64,
    /// The time from when a device is done with a chain until its completion is reported.
    pub round_trip_ns: u64,
}

impl Rates {
    /// The rates of a device that executes so many chains a second.
    pub fn of_chains(chains_per_s: u64) -> Self {
        Self { chains_per_s, bytes_per_s: BANDWIDTH, round_trip_ns: ROUND_TRIP_NS }
    }
}

/// The devices that a run emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// The rates of each.
    pub rates: Rates,
    /// Limit on the chains in flight of all sessions together.
    pub in_flight_max: u64,
}

impl Emulation {
    /// The GRACE of the servers, in milliseconds. What a GET finds counts for most of GRACE after
    /// its post, and all chains in flight may be in the queue of one device.
    pub fn grace_ms(&self) -> u64 {
        let queue_ms = self.in_flight_max * 1000 / self.rates.chains_per_s;
        (queue_ms * GRACE_QUEUES).clamp(GRACE_MS_DEFAULT, GRACE_MS_MAX)
    }
}

/// The devices of all servers.
pub struct Devices {
    rates: Rates,
    /// In the order of the shards.
    devices: Box<[Device]>,
    region_bytes: u64,
    epoch: Instant,
    is_started: AtomicBool,
}

/// The device of a server, and the region that leads to it.
struct Device {
    region_id: Id,
    /// When it is done with all chains so far, in picoseconds since the epoch.
    free_at_ps: AtomicU64,
    chains: AtomicU64,
}

impl Device {
    /// Executes a chain that arrives now. Returns when it is done.
    fn execute(&self, now_ps: u64, service_ps: u64) -> u64 {
        self.chains.fetch_add(1, Ordering::Relaxed);
        let done = |free_at_ps: u64| free_at_ps.max(now_ps) + service_ps;
        let before =
            self.free_at_ps.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| Some(done(at)));
        before.map_or(now_ps, done)
    }
}

impl Devices {
    /// A device for each of these regions, which have this length. They do not delay anything
    /// before [`Devices::start`].
    pub fn new(rates: Rates, region_bytes: u64, regions: impl Iterator<Item = Id>) -> Self {
        let device = |region_id| Device {
            region_id,
            free_at_ps: AtomicU64::new(0),
            chains: AtomicU64::new(0),
        };
        Self {
            rates,
            devices: regions.map(device).collect(),
            region_bytes,
            epoch: Instant::now(),
            is_started: AtomicBool::new(false),
        }
    }

    /// The rates of each device.
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// Starts to delay chains.
    pub fn start(&self) {
        self.is_started.store(true, Ordering::Relaxed);
    }

    /// The number of chains that each device was asked for since the start.
    pub fn chains(&self) -> Vec<u64> {
        self.devices.iter().map(|device| device.chains.load(Ordering::Relaxed)).collect()
    }

    /// Puts the network around the fabric of each session of a client.
    pub fn around(self: &Arc<Self>) -> Intercept {
        let devices = self.clone();
        Arc::new(move |fabric, lanes| {
            let interceptor = Network::new(devices.clone(), lanes);
            Box::new(Intercepted { interceptor, fabric })
        })
    }

    fn now_ps(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64 * 1000
    }

    /// How long a device takes for a chain.
    fn service_ps(&self, chain: &[Verb]) -> u64 {
        let bytes = Counters::default().count(chain);
        let chain_ps = PS_PER_S / self.rates.chains_per_s;
        let bytes_ps =
            u128::from(bytes) * u128::from(PS_PER_S) / u128::from(self.rates.bytes_per_s);
        chain_ps.max(bytes_ps as u64)
    }

    /// The device that leads to the region with this superblock.
    fn of_region(&self, superblock: &[u8]) -> Option<usize> {
        let (_, format) = Superblock::decode(superblock, self.region_bytes).ok()?;
        self.devices.iter().position(|device| device.region_id == Id(format.region_id))
    }
}

/// The network of one session.
struct Network {
    devices: Arc<Devices>,
    /// By index of the region. `None` until the session has READ the superblock, which it does
    /// first.
    regions: Vec<Option<usize>>,
    /// By lane, the chain that it has posted.
    chains: Vec<Option<Posted>>,
    /// The lanes whose chains wait for the doorbell.
    waiting: Vec<LaneId>,
    /// Completions that are not reported yet, with when they are due, the first one first.
    unreported: VecDeque<(u64, Completion)>,
}

#[derive(Clone, Copy)]
struct Posted {
    region: RegionIndex,
    service_ps: u64,
    /// Whether it READs the superblock.
    identifies: bool,
    due_ps: u64,
}

impl Network {
    fn new(devices: Arc<Devices>, lanes: u16) -> Self {
        let lanes = usize::from(lanes);
        Self {
            devices,
            regions: Vec::new(),
            chains: vec![None; lanes],
            waiting: Vec::with_capacity(lanes),
            unreported: VecDeque::with_capacity(lanes),
        }
    }

    fn identify<F: Fabric + ?Sized>(&mut self, fabric: &F, lane: LaneId, region: RegionIndex) {
        let index = region.index();
        if self.regions.len() <= index {
            self.regions.resize(index + 1, None);
        }
        self.regions[index] = self.devices.of_region(fabric.buffer(lane, Buffer::ReadBlock));
    }
}

impl<F: Fabric + ?Sized> Interceptor<F> for Network {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        let identifies =
            matches!(chain, [Verb::Read { remote: 0, into: Buffer::ReadBlock, .. }, ..]);
        let service_ps = self.devices.service_ps(chain);
        let posted = Posted { region, service_ps, identifies, due_ps: 0 };
        self.chains[usize::from(lane.0)] = Some(posted);
        self.waiting.push(lane);
        fabric.post(lane, region, chain, deadline);
    }

    fn ring(&mut self, fabric: &mut F) {
        let is_started = self.devices.is_started.load(Ordering::Relaxed);
        let now_ps = if is_started { self.devices.now_ps() } else { 0 };
        for lane in self.waiting.drain(..) {
            let Some(posted) = &mut self.chains[usize::from(lane.0)] else { continue };
            let device = self.regions.get(posted.region.index()).copied().flatten();
            if let Some(device) = device.filter(|_| is_started) {
                let done_ps = self.devices.devices[device].execute(now_ps, posted.service_ps);
                posted.due_ps = done_ps + self.devices.rates.round_trip_ns * 1000;
            }
        }
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        while let Some(completion) = fabric.poll() {
            // A lane without a chain has waited for a time.
            let chain = self.chains[usize::from(completion.lane.0)].take();
            let Some(Posted { region, identifies, due_ps, .. }) = chain else {
                return Some(completion);
            };
            if identifies && completion.result.is_ok() {
                self.identify(fabric, completion.lane, region);
            }
            let at = self.unreported.partition_point(|(earlier, _)| *earlier <= due_ps);
            self.unreported.insert(at, (due_ps, completion));
        }
        let (due_ps, _) = *self.unreported.front()?;
        if due_ps > self.devices.now_ps() {
            return None;
        }
        self.unreported.pop_front().map(|(_, completion)| completion)
    }

    fn relax(&mut self, fabric: &mut F) {
        let Some((due_ps, _)) = self.unreported.front() else { return fabric.relax() };
        let left_ps = due_ps.saturating_sub(self.devices.now_ps());
        match Duration::from_nanos(left_ps / 1000) {
            left if left >= SLEEP_MIN => std::thread::sleep(left.min(SLEEP_MAX)),
            _ => std::thread::yield_now(),
        }
    }

    fn replaced(&mut self, fabric: &mut F, region: RegionIndex) {
        if let Some(device) = self.regions.get_mut(region.index()) {
            *device = None;
        }
        fabric.replaced(region);
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::Region;
    use farside_fabric::shm::ShmFabric;
    use farside_layout::{Format, REGION_BYTES_MIN};
    use zerocopy::IntoBytes;

    use super::*;

    const LANES: u16 = 8;
    const FIRST: RegionIndex = RegionIndex::FIRST;
    const RATES: Rates = Rates { chains_per_s: 2000, bytes_per_s: 1_000_000, round_trip_ns: 2000 };

    fn format() -> Format {
        Format {
            region_bytes: REGION_BYTES_MIN,
            region_id: [7; 16],
            hash_key: [9; 16],
            grace_ms: 100,
            key_bytes_max: 64,
            value_bytes_max: 1024,
        }
    }

    /// Two sessions on a region whose superblock they have READ, and its device.
    fn sessions() -> (Vec<Box<dyn Fabric + Send>>, Arc<Devices>) {
        let format = format();
        let superblock = Superblock::new(&format, 0).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(format.region_bytes).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let words = superblock.as_bytes().chunks(8);
        let words: Vec<u64> =
            words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        region.write(0, &words).unwrap();
        let ids = [Id([1; 16]), Id(format.region_id)];
        let devices = Arc::new(Devices::new(RATES, format.region_bytes, ids.into_iter()));
        let session = |_| {
            let fabric = Box::new(ShmFabric::new(region.clone(), None, LANES));
            let mut fabric = devices.around()(fabric, LANES);
            let read = Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes: 4096 };
            fabric.post(LaneId(0), FIRST, &[read], Nanos::MAX);
            fabric.ring();
            next(&mut *fabric);
            fabric
        };
        ((0..2).map(session).collect(), devices)
    }

    fn next(fabric: &mut dyn Fabric) -> Completion {
        loop {
            if let Some(completion) = fabric.poll() {
                return completion;
            }
            fabric.relax();
        }
    }

    fn read(bytes: u32) -> Verb {
        Verb::Read { remote: 0, into: Buffer::Window, bytes }
    }

    #[test]
    fn sessions_share_the_device_of_a_region() {
        let (mut sessions, devices) = sessions();
        assert_eq!(devices.chains(), [0, 0], "nothing is delayed before the start");
        devices.start();
        let started = Instant::now();
        for session in &mut sessions {
            for lane in 0..LANES {
                session.post(LaneId(lane), FIRST, &[read(64)], Nanos::MAX);
            }
            session.ring();
        }
        for session in &mut sessions {
            (0..LANES).for_each(|lane| assert_eq!(next(&mut **session).lane, LaneId(lane)));
        }
        // Sixteen chains of 500 us each.
        assert!(started.elapsed() >= Duration::from_millis(8), "{:?}", started.elapsed());
        assert_eq!(devices.chains(), [0, 16]);
    }

    #[test]
    fn a_chain_takes_as_long_as_a_chain_or_its_bytes() {
        let (_, devices) = sessions();
        assert_eq!(devices.service_ps(&[read(64), read(64)]), PS_PER_S / 2000);
        assert_eq!(devices.service_ps(&[read(4096)]), 4096 * 1_000_000);
    }

    #[test]
    fn grace_is_longer_than_the_longest_queue() {
        let grace_ms = |chains_per_s, in_flight_max| {
            Emulation { rates: Rates::of_chains(chains_per_s), in_flight_max }.grace_ms()
        };
        assert_eq!((grace_ms(2000, 512), grace_ms(1_000_000, 512)), (1024, 100));
        assert_eq!(grace_ms(1, 1 << 20), GRACE_MS_MAX);
    }

    #[test]
    fn a_wait_for_a_time_ends_before_a_later_completion() {
        let (mut sessions, devices) = sessions();
        devices.start();
        let session = &mut *sessions[0];
        session.post(LaneId(0), FIRST, &[read(64)], Nanos::MAX);
        let until = session.now();
        session.wait(LaneId(1), until);
        session.ring();
        assert_eq!(next(session).lane, LaneId(1));
        assert_eq!(next(session).lane, LaneId(0));
    }
}
