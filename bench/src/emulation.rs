//! An emulated network around fabrics of this machine, so that round trips take as long as over a
//! real network, and devices have a rate.
//!
//! A device takes one chain after another. A chain takes as long as the device's rates say, or
//! longer if its link needs longer for the payload. The completion is reported one round trip after
//! the device is done. The fabric of this machine executes the verbs when their chain leaves; only
//! completions are held back. As over verbs, the link bounds how much is in flight ([`Flight`]).
//!
//! The device belongs to a session ([`wrap`]), at the published rates of a ConnectX-5, or to the
//! server of a cluster ([`Devices`]). Then all sessions of a run share it, and a server that is
//! asked for more than its device can do has a queue. Packet headers, PCIe and doorbells are not
//! emulated, and neither is the effect that atomic verbs slow down READs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use farside_control::cluster::Id;
use farside_fabric::{
    Buffer, CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, Flight, Intercept,
    Intercepted, Interceptor, LaneId, Nanos, RegionIndex, Verb,
};
use farside_layout::Superblock;
use serde::{Deserialize, Serialize};

/// The description of a network whose devices have the rates of a ConnectX-5, in results.
pub const LABEL: &str = "emulated network (2 us, ConnectX-5 rates)";

/// The time from when a device is done with a chain until its completion is reported.
const ROUND_TRIP_NS: Nanos = 2_000;
/// How long a ConnectX-5 takes for a READ, in picoseconds: 88 million a second.
const READ_PS: u64 = 1_000_000 / 88;
/// How long it takes for a WRITE, in picoseconds: 107 million a second.
const WRITE_PS: u64 = 1_000_000 / 107;
/// How long it takes for an atomic verb, in picoseconds: 20 million a second.
const ATOMIC_PS: u64 = 1_000_000 / 20;
/// The default bandwidth of a link, in bytes a second: 100 Gb/s.
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

/// The rates of each device of a cluster.
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

/// A device.
#[derive(Default)]
struct Device {
    /// When it is done with all chains so far, in picoseconds on the clock of the fabrics.
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

/// The devices of all servers of a cluster.
pub struct Devices {
    rates: Rates,
    /// In the order of the shards, with the region that each leads to.
    devices: Box<[(Id, Device)]>,
    region_bytes: u64,
    is_started: AtomicBool,
}

impl Devices {
    /// A device for each of these regions, which have this length. They do not delay anything
    /// before [`Devices::start`].
    pub fn new(rates: Rates, region_bytes: u64, regions: impl Iterator<Item = Id>) -> Self {
        let devices = regions.map(|region_id| (region_id, Device::default())).collect();
        Self { rates, devices, region_bytes, is_started: AtomicBool::new(false) }
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
        self.devices.iter().map(|(_, device)| device.chains.load(Ordering::Relaxed)).collect()
    }

    /// Puts the network around the fabric of each session of a client.
    pub fn around(self: &Arc<Self>) -> Intercept {
        let devices = self.clone();
        Arc::new(move |fabric, lanes| {
            let route = Route::Servers { devices: devices.clone(), of_regions: Vec::new() };
            let interceptor = Network::new(route, lanes, None);
            Box::new(Intercepted { interceptor, fabric })
        })
    }

    /// The device that leads to the region with this superblock.
    fn of_region(&self, superblock: &[u8]) -> Option<usize> {
        let (_, format) = Superblock::decode(superblock, self.region_bytes).ok()?;
        self.devices.iter().position(|(region_id, _)| *region_id == Id(format.region_id))
    }
}

/// Puts a network with a device of its own around the fabric of each session of a client.
pub fn wrap(link: Link) -> Intercept {
    Arc::new(move |fabric, lanes| {
        let route = Route::Own { device: Device::default(), bytes_per_s: link.bytes_per_s.max(1) };
        let interceptor = Network::new(route, lanes, link.simulated_clock.clone());
        Box::new(Intercepted { interceptor, fabric })
    })
}

/// The link of a device that belongs to a session.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its bandwidth, in bytes of payload a second.
    pub bytes_per_s: u64,
    /// A simulated clock, in nanoseconds. It advances only while a session waits, to the end
    /// of the wait, so results do not depend on this machine's speed. It is for one session only,
    /// which must not wait for its server.
    pub simulated_clock: Option<Arc<AtomicU64>>,
}

impl Default for Link {
    fn default() -> Self {
        Self { bytes_per_s: BANDWIDTH, simulated_clock: None }
    }
}

/// The device that a chain goes through.
enum Route {
    Own {
        device: Device,
        bytes_per_s: u64,
    },
    /// The device of the server. `None` until the session has READ the region's superblock, which
    /// it does first.
    Servers {
        devices: Arc<Devices>,
        of_regions: Vec<Option<usize>>,
    },
}

impl Route {
    /// Has the device execute a chain that arrives now. Returns when it completes; `None` if no
    /// device delays it.
    fn execute(&self, region: RegionIndex, chain: &[Verb], now: Nanos) -> Option<Nanos> {
        let (device, chain_ps, bytes_per_s, round_trip_ns) = match self {
            Self::Own { device, bytes_per_s } => {
                (device, chain.iter().map(verb_ps).sum(), *bytes_per_s, ROUND_TRIP_NS)
            }
            Self::Servers { devices, of_regions } => {
                let number = of_regions.get(region.index()).copied().flatten()?;
                let device = devices.devices.get(number)?;
                let Rates { chains_per_s, bytes_per_s, round_trip_ns } = devices.rates;
                if !devices.is_started.load(Ordering::Relaxed) {
                    return None;
                }
                (&device.1, PS_PER_S / chains_per_s, bytes_per_s, round_trip_ns)
            }
        };
        let service_ps = service_ps(chain, chain_ps, bytes_per_s);
        Some(device.execute(now * 1000, service_ps).div_ceil(1000) + round_trip_ns)
    }
}

/// How long a ConnectX-5 takes for a verb, in picoseconds.
fn verb_ps(verb: &Verb) -> u64 {
    match verb {
        Verb::Read { .. } | Verb::ReadPart { .. } | Verb::ReadSplit { .. } => READ_PS,
        Verb::Write { .. }
        | Verb::WritePart { .. }
        | Verb::WriteSplit { .. }
        | Verb::WriteU32 { .. }
        | Verb::WriteWord { .. } => WRITE_PS,
        Verb::CompareSwap { .. } => ATOMIC_PS,
    }
}

/// How long a device takes for a chain, in picoseconds, if `chain_ps` without its payload.
fn service_ps(chain: &[Verb], chain_ps: u64, bytes_per_s: u64) -> u64 {
    let bytes = Counters::default().count(chain);
    let bytes_ps = u128::from(bytes) * u128::from(PS_PER_S) / u128::from(bytes_per_s);
    chain_ps.max(bytes_ps as u64)
}

/// The network of one session: its chains and their completions.
struct Network {
    route: Route,
    lanes: u16,
    /// By index of the region.
    links: Vec<LinkState>,
    /// By lane, the chain that has left; `None` for a lane without a chain.
    left: Vec<Option<Left>>,
    /// Completions that are not reported yet, in the order in which they are due.
    unreported: VecDeque<(Nanos, Completion)>,
    time: Option<SimulatedClock>,
}

/// The chains of a session to one region.
struct LinkState {
    flight: Flight,
    /// Those that are posted and have not left.
    queue: VecDeque<Queued>,
    queued_bytes: u64,
}

/// A chain that is posted and not yet passed to the fabric.
struct Queued {
    lane: LaneId,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    bytes: u64,
    deadline: Nanos,
}

/// A chain that was passed to the fabric.
#[derive(Clone, Copy)]
struct Left {
    region: RegionIndex,
    /// When its completion is due; 0 if no device delays it.
    due: Nanos,
    bytes: u64,
    changes: bool,
    /// Whether it READs the superblock.
    identifies: bool,
}

/// The simulated clock, and the lanes that wait for a time on it.
struct SimulatedClock {
    now: Arc<AtomicU64>,
    waits: Vec<(Nanos, LaneId)>,
}

impl Network {
    fn new(route: Route, lanes: u16, simulated_clock: Option<Arc<AtomicU64>>) -> Self {
        let count = usize::from(lanes);
        Self {
            route,
            lanes,
            links: Vec::new(),
            left: vec![None; count],
            unreported: VecDeque::with_capacity(count),
            time: simulated_clock.map(|now| SimulatedClock { now, waits: Vec::new() }),
        }
    }

    fn link(&mut self, region: RegionIndex) -> &mut LinkState {
        let (lanes, index) = (self.lanes, region.index());
        if self.links.len() <= index {
            self.links.resize_with(index + 1, || LinkState {
                flight: Flight::new(lanes),
                queue: VecDeque::with_capacity(lanes.into()),
                queued_bytes: 0,
            });
        }
        &mut self.links[index]
    }

    /// Passes the posted chains of a region to the fabric until its link has no more room.
    fn release<F: Fabric + ?Sized>(&mut self, fabric: &mut F, region: RegionIndex) {
        let now = self.now(fabric);
        let link = &mut self.links[region.index()];
        while link.flight.admits(0)
            && let Some(queued) = link.queue.pop_front()
        {
            let Queued { lane, chain, verbs, bytes, deadline } = queued;
            let chain = &chain[..verbs];
            link.queued_bytes -= bytes;
            let changes = chain.iter().any(|verb| verb.changes_region());
            if changes && self.time.is_some() && now > deadline {
                let late = Completion { lane, result: Err(ChainError::Late) };
                self.unreported.push_front((now, late));
                continue;
            }
            let identifies =
                matches!(chain, [Verb::Read { remote: 0, into: Buffer::ReadBlock, .. }, ..]);
            let due = self.route.execute(region, chain, now).unwrap_or(0);
            let left = Left { region, due, bytes, changes, identifies };
            self.left[usize::from(lane.0)] = Some(left);
            link.flight.leave(lane, bytes, changes, || now);
            // A deadline of the simulated clock means nothing on the fabric's clock.
            let deadline = if self.time.is_some() { Nanos::MAX } else { deadline };
            fabric.post(lane, region, chain, deadline);
        }
    }

    /// Notes the region whose superblock a lane has READ.
    fn identify<F: Fabric + ?Sized>(&mut self, fabric: &F, lane: LaneId, region: RegionIndex) {
        let Route::Servers { devices, of_regions } = &mut self.route else { return };
        let index = region.index();
        if of_regions.len() <= index {
            of_regions.resize(index + 1, None);
        }
        of_regions[index] = devices.of_region(fabric.buffer(lane, Buffer::ReadBlock));
    }
}

impl<F: Fabric + ?Sized> Interceptor<F> for Network {
    fn now(&self, fabric: &F) -> Nanos {
        self.time.as_ref().map_or_else(|| fabric.now(), |time| time.now.load(Ordering::Relaxed))
    }

    fn post(
        &mut self,
        _: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        let bytes = Counters::default().count(chain);
        let verbs = chain.len();
        let mut copy = [chain[0]; CHAIN_VERBS_MAX];
        copy[..verbs].copy_from_slice(chain);
        let link = self.link(region);
        link.queued_bytes += bytes;
        link.queue.push_back(Queued { lane, chain: copy, verbs, bytes, deadline });
    }

    fn has_room(&self, fabric: &F, region: RegionIndex, under_way_bytes: u64) -> bool {
        fabric.has_room(region, under_way_bytes)
            && self.links.get(region.index()).is_none_or(|link| {
                link.flight.admits(link.queued_bytes) && link.flight.admits_all(under_way_bytes)
            })
    }

    fn set_patience(&mut self, fabric: &mut F, region: RegionIndex, patience: Nanos) {
        fabric.set_patience(region, patience);
        self.link(region).flight.set_patience(patience);
    }

    fn wait(&mut self, fabric: &mut F, lane: LaneId, until: Nanos) {
        match &mut self.time {
            Some(time) => time.waits.push((until, lane)),
            None => fabric.wait(lane, until),
        }
    }

    fn ring(&mut self, fabric: &mut F) {
        for index in 0..self.links.len() {
            if !self.links[index].queue.is_empty() {
                self.release(fabric, RegionIndex(index as u16));
            }
        }
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        while let Some(completion) = fabric.poll() {
            // A lane without a chain has waited for a time.
            let Some(left) = self.left[usize::from(completion.lane.0)] else {
                return Some(completion);
            };
            if left.identifies && completion.result.is_ok() {
                self.identify(fabric, completion.lane, left.region);
            }
            let at = self.unreported.partition_point(|(earlier, _)| *earlier <= left.due);
            self.unreported.insert(at, (left.due, completion));
        }
        let now = self.now(fabric);
        if let Some(time) = &mut self.time
            && let Some(at) = time.waits.iter().position(|(until, _)| *until <= now)
        {
            let (_, lane) = time.waits.swap_remove(at);
            return Some(Completion { lane, result: Ok(0) });
        }
        let (_, completion) = self.unreported.pop_front_if(|(due, _)| *due <= now)?;
        if let Some(left) = self.left[usize::from(completion.lane.0)].take() {
            let flight = &mut self.link(left.region).flight;
            flight.arrive(completion.lane, left.bytes, left.changes, || now);
        }
        Some(completion)
    }

    fn relax(&mut self, fabric: &mut F) {
        let first_due = self.unreported.front().map(|(due, _)| *due);
        if let Some(time) = &self.time {
            let next = time.waits.iter().map(|(until, _)| *until).chain(first_due).min();
            match next {
                Some(next) => drop(time.now.fetch_max(next, Ordering::Relaxed)),
                None => fabric.relax(),
            }
            return;
        }
        let Some(due) = first_due else { return fabric.relax() };
        match (&self.route, Duration::from_nanos(due.saturating_sub(fabric.now()))) {
            // Such a run has the processor for itself.
            (Route::Own { .. }, _) => std::hint::spin_loop(),
            (_, left) if left >= SLEEP_MIN => std::thread::sleep(left.min(SLEEP_MAX)),
            _ => std::thread::yield_now(),
        }
    }

    fn replaced(&mut self, fabric: &mut F, region: RegionIndex) {
        fabric.replaced(region);
        let now = self.now(fabric);
        if let Route::Servers { of_regions, .. } = &mut self.route
            && let Some(device) = of_regions.get_mut(region.index())
        {
            *device = None;
        }
        let link = self.link(region);
        link.queued_bytes = 0;
        for Queued { lane, .. } in std::mem::take(&mut link.queue) {
            self.unreported.push_front((now, Completion { lane, result: Err(ChainError::Fenced) }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use farside_fabric::memory::Region;
    use farside_fabric::shm::ShmFabric;
    use farside_layout::{Format, REGION_BYTES_MIN};
    use zerocopy::IntoBytes;

    use super::*;

    const LANES: u16 = 64;
    const FIRST: RegionIndex = RegionIndex::FIRST;
    const RATES: Rates = Rates { chains_per_s: 2000, bytes_per_s: 1_000_000, round_trip_ns: 2000 };

    type Session = Box<dyn Fabric + Send>;

    fn region(bytes: u64) -> Arc<Region> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        Arc::new(Region::map(&file).unwrap())
    }

    /// A session with a device of its own.
    fn session() -> (Session, Arc<Region>) {
        let region = region(1 << 16);
        let fabric = Box::new(ShmFabric::new(region.clone(), None, LANES));
        (wrap(Link::default())(fabric, LANES), region)
    }

    /// Two sessions on a region whose superblock they have READ, and its device.
    fn sessions_of_a_cluster() -> (Vec<Session>, Arc<Devices>) {
        let format = Format {
            region_bytes: REGION_BYTES_MIN,
            region_id: [7; 16],
            hash_key: [9; 16],
            grace_ms: 100,
            key_bytes_max: 64,
            value_bytes_max: 1024,
        };
        let superblock = Superblock::new(&format, 0).unwrap();
        let region = region(format.region_bytes);
        let words = superblock.as_bytes().chunks(8);
        let words: Vec<u64> =
            words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        region.write(0, &words).unwrap();
        let ids = [Id([1; 16]), Id(format.region_id)];
        let devices = Arc::new(Devices::new(RATES, format.region_bytes, ids.into_iter()));
        let session = |_| {
            let fabric = Box::new(ShmFabric::new(region.clone(), None, LANES));
            let mut fabric = devices.around()(fabric, LANES);
            let superblock = Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes: 4096 };
            fabric.post(LaneId(0), FIRST, &[superblock], Nanos::MAX);
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
    fn no_completion_is_reported_early_or_out_of_order() {
        let (mut fabric, region) = session();
        for lane in 0..LANES {
            let expected = lane.into();
            let swap = Verb::CompareSwap { remote: 0, expected, desired: expected + 1 };
            fabric.post(LaneId(lane), FIRST, &[swap], Nanos::MAX);
        }
        let posted = fabric.now();
        while fabric.now() < posted + 2 * ROUND_TRIP_NS {}
        let begun = fabric.now();
        fabric.ring();
        assert_eq!(region.load(0).unwrap(), u64::from(LANES), "the doorbell executes the chains");
        for lane in 0..LANES {
            let completion = next(&mut *fabric);
            assert_eq!(completion, Completion { lane: LaneId(lane), result: Ok(lane.into()) });
            let elapsed = fabric.now() - begun;
            let least = ROUND_TRIP_NS + 50 * (u64::from(lane) + 1);
            assert!(elapsed >= least, "{lane} after {elapsed} ns");
        }
        assert_eq!(fabric.poll(), None);
        let Counters { round_trips, compare_swaps, .. } = fabric.counters();
        assert_eq!([round_trips, compare_swaps], [u64::from(LANES); 2]);
    }

    #[test]
    fn a_device_is_shared_by_sessions_and_idle_before_the_start() {
        const CHAINS: u16 = 8;
        let (mut sessions, devices) = sessions_of_a_cluster();
        assert_eq!(devices.chains(), [0, 0]);
        devices.start();
        let started = Instant::now();
        for session in &mut sessions {
            (0..CHAINS).for_each(|lane| session.post(LaneId(lane), FIRST, &[read(64)], Nanos::MAX));
            session.ring();
        }
        for session in &mut sessions {
            (0..CHAINS).for_each(|lane| assert_eq!(next(&mut **session).lane, LaneId(lane)));
        }
        // Sixteen chains of 500 us each.
        assert!(started.elapsed() >= Duration::from_millis(8), "{:?}", started.elapsed());
        assert_eq!(devices.chains(), [0, 16]);
    }

    #[test]
    fn a_chain_takes_as_long_as_its_verbs_or_its_bytes() {
        let swap = Verb::CompareSwap { remote: 0, expected: 0, desired: 0 };
        let of_verbs =
            |chain: &[Verb]| service_ps(chain, chain.iter().map(verb_ps).sum(), BANDWIDTH);
        assert_eq!(of_verbs(&[read(64)]), READ_PS);
        // At 100 Gb/s a byte takes 80 ps.
        assert_eq!(of_verbs(&[read(4096)]), 4096 * 80);
        assert_eq!(of_verbs(&[read(64), swap]), READ_PS + ATOMIC_PS);
        assert_eq!(service_ps(&[read(4096)], PS_PER_S / 2000, 1_000_000), 4096 * 1_000_000);
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
        let (mut sessions, devices) = sessions_of_a_cluster();
        devices.start();
        for session in [&mut *sessions[0], &mut *session().0] {
            session.post(LaneId(0), FIRST, &[read(64)], Nanos::MAX);
            let until = session.now();
            session.wait(LaneId(1), until);
            session.ring();
            assert_eq!(next(session).lane, LaneId(1));
            assert_eq!(next(session).lane, LaneId(0));
        }
    }
}
