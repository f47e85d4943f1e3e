//! An emulated network around a fabric of this machine, so that round trips take as long as over a
//! real network. Verbs are executed at the doorbell. A chain's completion is reported one
//! round trip after the emulated device would have been done with it.
//!
//! The device takes one chain after another. A chain takes as long as its verbs do at the published
//! rates of a ConnectX-5, or longer if the link needs longer for its payload. The link carries 100
//! Gb/s, or what the caller sets. As over verbs, the link bounds how much is in flight.
//!
//! Each session has a device of its own, so the server's device is no bottleneck for several
//! clients. Packet headers, PCIe and doorbells are not emulated, and neither is the effect that
//! atomic verbs slow down READs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside_fabric::{
    CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, Flight, Intercept, Intercepted,
    Interceptor, LaneId, Nanos, RegionIndex, Verb,
};

/// The description of the emulated network in results.
pub const LABEL: &str = "emulated network (2 us, ConnectX-5 rates)";

/// The time from when the device is done with a chain until its completion is reported.
const ROUND_TRIP_NS: Nanos = 2_000;
/// How long the device takes for a READ, in picoseconds: 88 million a second.
const READ_PS: u64 = 1_000_000 / 88;
/// How long the device takes for a WRITE, in picoseconds: 107 million a second.
const WRITE_PS: u64 = 1_000_000 / 107;
/// How long the device takes for an atomic verb, in picoseconds: 20 million a second.
const ATOMIC_PS: u64 = 1_000_000 / 20;
/// The default bandwidth of the link, in bytes a second: 100 Gb/s.
const BANDWIDTH: u64 = 12_500_000_000;
const PS_PER_S: u64 = 1_000_000_000_000;

/// A fabric behind the emulated network.
pub type Emulated<F> = Intercepted<F, Network>;

/// Puts the emulated network around a fabric that has `lanes` lanes.
pub fn around<F: Fabric + ?Sized>(fabric: Box<F>, lanes: u16, link: Link) -> Emulated<F> {
    let count = usize::from(lanes);
    let interceptor = Network {
        byte_ps: PS_PER_S / link.bytes_per_s.max(1),
        free_at_ps: 0,
        queue: VecDeque::with_capacity(count),
        queued_bytes: 0,
        flight: Flight::new(lanes),
        due: vec![None; count],
        unreported: VecDeque::with_capacity(count),
        time: link.simulated_clock.map(|now| SimulatedClock { now, waits: Vec::new() }),
    };
    Intercepted { interceptor, fabric }
}

/// Puts an emulated network around the fabric of each session of a client.
pub fn wrap(link: Link) -> Intercept {
    Arc::new(move |fabric, lanes| Box::new(around(fabric, lanes, link.clone())))
}

/// The link of the emulated network.
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

/// The state of an emulated network: its chains and their completions.
pub struct Network {
    /// How long the link takes for a byte, in picoseconds.
    byte_ps: u64,
    /// When the device is done with all chains so far, in picoseconds.
    free_at_ps: u64,
    /// Chains that are posted and not yet passed to the fabric.
    queue: VecDeque<Queued>,
    queued_bytes: u64,
    flight: Flight,
    /// By lane, when the completion of its chain is due; `None` for a lane without a chain.
    due: Vec<Option<Due>>,
    /// Completions that are not reported yet, in the order in which they are due.
    unreported: VecDeque<(Nanos, Completion)>,
    time: Option<SimulatedClock>,
}

/// A chain that is posted and not yet passed to the fabric.
struct Queued {
    lane: LaneId,
    region: RegionIndex,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    bytes: u64,
    deadline: Nanos,
}

/// When a chain's completion is due.
#[derive(Clone, Copy)]
struct Due {
    at: Nanos,
    bytes: u64,
    changes: bool,
}

/// The simulated clock, and the lanes that wait for a time on it.
struct SimulatedClock {
    now: Arc<AtomicU64>,
    waits: Vec<(Nanos, LaneId)>,
}

impl Network {
    /// How long the device takes for a chain, in picoseconds.
    fn service_ps(&self, chain: &[Verb]) -> u64 {
        let cost = |verb: &Verb| match *verb {
            Verb::Read { bytes, .. } | Verb::ReadPart { bytes, .. } => (READ_PS, bytes),
            Verb::Write { bytes, .. } | Verb::WritePart { bytes, .. } => (WRITE_PS, bytes),
            Verb::WriteU32 { .. } => (WRITE_PS, 4),
            Verb::WriteWord { .. } => (WRITE_PS, 8),
            Verb::CompareSwap { .. } => (ATOMIC_PS, 8),
        };
        let (mut verbs_ps, mut bytes_ps) = (0, 0);
        for (verb_ps, bytes) in chain.iter().map(cost) {
            verbs_ps += verb_ps;
            bytes_ps += self.byte_ps * u64::from(bytes);
        }
        verbs_ps.max(bytes_ps)
    }

    /// Passes posted chains to the fabric until the link has no more room.
    fn release<F: Fabric + ?Sized>(&mut self, fabric: &mut F) {
        let now = self.now(fabric);
        self.free_at_ps = self.free_at_ps.max(now * 1000);
        while self.flight.admits(0)
            && let Some(queued) = self.queue.pop_front()
        {
            let Queued { lane, region, chain, verbs, bytes, deadline } = queued;
            let chain = &chain[..verbs];
            self.queued_bytes -= bytes;
            let changes = chain.iter().any(|verb| !matches!(verb, Verb::Read { .. }));
            if changes && self.time.is_some() && now > deadline {
                self.unreported
                    .push_front((now, Completion { lane, result: Err(ChainError::Late) }));
                continue;
            }
            self.free_at_ps += self.service_ps(chain);
            let at = self.free_at_ps.div_ceil(1000) + ROUND_TRIP_NS;
            self.due[usize::from(lane.0)] = Some(Due { at, bytes, changes });
            self.flight.leave(lane, bytes, changes, || now);
            // A deadline of the simulated clock means nothing on the fabric's clock.
            let deadline = if self.time.is_some() { Nanos::MAX } else { deadline };
            fabric.post(lane, region, chain, deadline);
        }
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
        self.queued_bytes += bytes;
        self.queue.push_back(Queued { lane, region, chain: copy, verbs, bytes, deadline });
    }

    fn has_room(&self, fabric: &F, region: RegionIndex, under_way_bytes: u64) -> bool {
        fabric.has_room(region, under_way_bytes)
            && self.flight.admits(self.queued_bytes)
            && self.flight.admits_all(under_way_bytes)
    }

    fn set_patience(&mut self, fabric: &mut F, region: RegionIndex, patience: Nanos) {
        fabric.set_patience(region, patience);
        self.flight.set_patience(patience);
    }

    fn wait(&mut self, fabric: &mut F, lane: LaneId, until: Nanos) {
        match &mut self.time {
            Some(time) => time.waits.push((until, lane)),
            None => fabric.wait(lane, until),
        }
    }

    fn ring(&mut self, fabric: &mut F) {
        if !self.queue.is_empty() {
            self.release(fabric);
        }
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        while let Some(completion) = fabric.poll() {
            let Some(Due { at: due, .. }) = self.due[usize::from(completion.lane.0)] else {
                return Some(completion);
            };
            let at = self.unreported.partition_point(|(earlier, _)| *earlier <= due);
            self.unreported.insert(at, (due, completion));
        }
        let now = self.now(fabric);
        if let Some(time) = &mut self.time
            && let Some(at) = time.waits.iter().position(|(until, _)| *until <= now)
        {
            let (_, lane) = time.waits.swap_remove(at);
            return Some(Completion { lane, result: Ok(0) });
        }
        let (_, completion) = self.unreported.pop_front_if(|(due, _)| *due <= now)?;
        if let Some(due) = self.due[usize::from(completion.lane.0)].take() {
            self.flight.arrive(completion.lane, due.bytes, due.changes, || now);
        }
        Some(completion)
    }

    fn relax(&mut self, fabric: &mut F) {
        let first_due = self.unreported.front().map(|(due, _)| *due);
        match &self.time {
            Some(time) => {
                let next = time.waits.iter().map(|(until, _)| *until).chain(first_due).min();
                match next {
                    Some(next) => {
                        time.now.fetch_max(next, Ordering::Relaxed);
                    }
                    None => fabric.relax(),
                }
            }
            None if first_due.is_none() => fabric.relax(),
            None => std::hint::spin_loop(),
        }
    }

    fn replaced(&mut self, fabric: &mut F, region: RegionIndex) {
        fabric.replaced(region);
        let now = self.now(fabric);
        let queued = std::mem::take(&mut self.queue);
        let (lost, kept): (Vec<_>, _) =
            queued.into_iter().partition(|queued| queued.region == region);
        self.queue = kept.into();
        for Queued { lane, bytes, .. } in lost {
            self.queued_bytes -= bytes;
            self.unreported.push_front((now, Completion { lane, result: Err(ChainError::Fenced) }));
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::Region;
    use farside_fabric::shm::ShmFabric;
    use farside_fabric::{Buffer, Counters};

    use super::*;

    const LANES: u16 = 64;

    fn fabric() -> (Emulated<ShmFabric>, Arc<Region>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        (
            around(Box::new(ShmFabric::new(region.clone(), None, LANES)), LANES, Link::default()),
            region,
        )
    }

    fn next(fabric: &mut Emulated<ShmFabric>) -> Completion {
        loop {
            if let Some(completion) = fabric.poll() {
                return completion;
            }
            fabric.relax();
        }
    }

    #[test]
    fn no_completion_is_reported_early_or_out_of_order() {
        let (mut fabric, region) = fabric();
        for lane in 0..LANES {
            let expected = lane.into();
            let swap = Verb::CompareSwap { remote: 0, expected, desired: expected + 1 };
            fabric.post(LaneId(lane), RegionIndex::FIRST, &[swap], Nanos::MAX);
        }
        let posted = fabric.now();
        while fabric.now() < posted + 2 * ROUND_TRIP_NS {}
        let begun = fabric.now();
        fabric.ring();
        assert_eq!(
            region.load(0).unwrap(),
            u64::from(LANES),
            "the chains are executed at the doorbell"
        );
        for lane in 0..LANES {
            let completion = next(&mut fabric);
            assert_eq!(completion, Completion { lane: LaneId(lane), result: Ok(lane.into()) });
            let elapsed = fabric.now() - begun;
            assert!(
                elapsed >= ROUND_TRIP_NS + 50 * (u64::from(lane) + 1),
                "{lane} after {elapsed} ns"
            );
        }
        assert_eq!(fabric.poll(), None);
        let expected = u64::from(LANES);
        let Counters { round_trips, compare_swaps, .. } = fabric.counters();
        assert_eq!([round_trips, compare_swaps], [expected; 2]);
    }

    #[test]
    fn a_wait_for_a_time_ends_before_a_later_completion() {
        let (mut fabric, _) = fabric();
        let read = Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes: 64 };
        fabric.post(LaneId(0), RegionIndex::FIRST, &[read], Nanos::MAX);
        let until = fabric.now();
        fabric.wait(LaneId(1), until);
        fabric.ring();
        assert_eq!(next(&mut fabric).lane, LaneId(1));
        assert_eq!(next(&mut fabric).lane, LaneId(0));
    }

    #[test]
    fn a_chain_takes_as_long_as_its_verbs_or_its_bytes() {
        let read = |bytes| Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes };
        let swap = Verb::CompareSwap { remote: 0, expected: 0, desired: 0 };
        let (fabric, _) = fabric();
        let service_ps = |chain: &[Verb]| fabric.interceptor.service_ps(chain);
        assert_eq!(service_ps(&[read(64)]), READ_PS);
        // At 100 Gb/s a byte takes 80 ps.
        assert_eq!(service_ps(&[read(4096)]), 4096 * 80);
        assert_eq!(service_ps(&[read(64), swap]), READ_PS + ATOMIC_PS);
    }
}
