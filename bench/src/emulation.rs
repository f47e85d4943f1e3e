//! A network that is not there: around a fabric of this machine, so that round trips cost what they
//! cost elsewhere. Verbs are executed at the doorbell; what became of a chain is told one round
//! trip after the device would have been done with it.
//!
//! The device takes one chain after another, each for as long as its verbs take at the published
//! rates of a ConnectX-5, or its payload takes on 100 Gb/s if that is longer. Not emulated: the
//! server's device as a bottleneck for several clients (each session has a device of its own),
//! packet headers, PCIe, doorbells, and that atomic verbs slow down READs beside them.

use std::collections::VecDeque;
use std::sync::Arc;

use clap::ValueEnum;
use farside::around::{Around, Rule, Wrap};
use farside_common::attach::AnyFabric;
use farside_common::fabric::{Completion, Fabric, LaneId, Nanos, Verb};

/// A network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetworkName {
    /// Round trips of 2 us and the verb rates of a ConnectX-5, around the fabric
    Emulated,
}

impl NetworkName {
    /// What every output says that it touched.
    pub const fn label(self) -> &'static str {
        "emulated network (2 us, ConnectX-5 rates)"
    }
}

/// From the device's being done with a chain to its completion.
const ROUND_TRIP_NS: Nanos = 2_000;
/// 88 million READs a second, in picoseconds each.
const READ_PS: u64 = 1_000_000 / 88;
/// 107 million WRITEs.
const WRITE_PS: u64 = 1_000_000 / 107;
/// 20 million atomic verbs.
const ATOMIC_PS: u64 = 1_000_000 / 20;
/// 100 Gb/s.
const BYTE_PS: u64 = 80;

/// A fabric behind the emulated network.
pub type Emulated<F> = Around<F, Network>;

/// Puts the network around a fabric that has so many lanes.
pub fn around<F: Fabric + ?Sized>(fabric: Box<F>, lanes: u16) -> Emulated<F> {
    let lanes = usize::from(lanes);
    let rule = Network {
        free_at_ps: 0,
        posted: Vec::with_capacity(lanes),
        due: vec![None; lanes],
        told: VecDeque::with_capacity(lanes),
    };
    Around { rule, fabric }
}

/// The same where the fabric is known only now.
pub fn around_any(fabric: AnyFabric, lanes: u16) -> Emulated<dyn Fabric + Send> {
    let fabric: Box<dyn Fabric + Send> = match fabric {
        AnyFabric::Shm(fabric) => Box::new(fabric),
        AnyFabric::Verbs(fabric) => Box::new(fabric),
    };
    around(fabric, lanes)
}

/// The same for the sessions of a client.
pub fn wrap() -> Wrap {
    Arc::new(|fabric, lanes| Box::new(around(fabric, lanes)))
}

/// What is on its way.
pub struct Network {
    /// When the device is done with all chains so far.
    free_at_ps: u64,
    /// Chains since the last doorbell, and how long the device will take for each.
    posted: Vec<(LaneId, u64)>,
    /// By lane, when its chain's completion is due; none for a lane that waits for a time.
    due: Vec<Option<Nanos>>,
    /// Executed, and not told yet; the first due comes first.
    told: VecDeque<(Nanos, Completion)>,
}

/// How long the device takes.
fn service_ps(chain: &[Verb]) -> u64 {
    let cost = |verb: &Verb| match *verb {
        Verb::Read { bytes, .. } => (READ_PS, bytes),
        Verb::Write { bytes, .. } => (WRITE_PS, bytes),
        Verb::WriteHalf { .. } => (WRITE_PS, 4),
        Verb::WriteWord { .. } => (WRITE_PS, 8),
        Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => (ATOMIC_PS, 8),
    };
    let (mut verbs_ps, mut bytes_ps) = (0, 0);
    for (verb_ps, bytes) in chain.iter().map(cost) {
        verbs_ps += verb_ps;
        bytes_ps += BYTE_PS * u64::from(bytes);
    }
    verbs_ps.max(bytes_ps)
}

impl<F: Fabric + ?Sized> Rule<F> for Network {
    fn post(&mut self, fabric: &mut F, lane: LaneId, chain: &[Verb], deadline: Nanos) {
        self.posted.push((lane, service_ps(chain)));
        fabric.post(lane, chain, deadline);
    }

    fn ring(&mut self, fabric: &mut F) {
        if !self.posted.is_empty() {
            self.free_at_ps = self.free_at_ps.max(fabric.now() * 1000);
        }
        for (lane, service_ps) in self.posted.drain(..) {
            self.free_at_ps += service_ps;
            self.due[usize::from(lane.0)] = Some(self.free_at_ps.div_ceil(1000) + ROUND_TRIP_NS);
        }
        fabric.ring();
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        while let Some(completion) = fabric.poll() {
            let Some(due) = self.due[usize::from(completion.lane.0)].take() else {
                return Some(completion);
            };
            let at = self.told.partition_point(|(other, _)| *other <= due);
            self.told.insert(at, (due, completion));
        }
        let (due, _) = self.told.front()?;
        if *due > fabric.now() {
            return None;
        }
        self.told.pop_front().map(|(_, completion)| completion)
    }

    fn relax(&mut self, fabric: &mut F) {
        if self.told.is_empty() {
            fabric.relax();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_common::fabric::shm::{Region, ShmFabric};
    use farside_common::fabric::{Buffer, Counters};

    use super::*;

    const LANES: u16 = 64;

    fn fabric() -> (Emulated<ShmFabric>, Arc<Region>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        (around(Box::new(ShmFabric::new(region.clone(), None, LANES)), LANES), region)
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
    fn nothing_is_told_before_its_time_or_out_of_order() {
        let (mut fabric, region) = fabric();
        for lane in 0..LANES {
            let expected = lane.into();
            let swap = Verb::CompareSwap { remote: 0, expected, desired: expected + 1 };
            fabric.post(LaneId(lane), &[swap], Nanos::MAX);
        }
        let posted = fabric.now();
        while fabric.now() < posted + 2 * ROUND_TRIP_NS {}
        let begun = fabric.now();
        fabric.ring();
        assert_eq!(region.load(0).unwrap(), u64::from(LANES), "they are executed at the doorbell");
        for lane in 0..LANES {
            let completion = next(&mut fabric);
            assert_eq!(completion, Completion { lane: LaneId(lane), result: Ok(lane.into()) });
            let told = fabric.now() - begun;
            assert!(told >= ROUND_TRIP_NS + 50 * (u64::from(lane) + 1), "{lane} after {told} ns");
        }
        assert_eq!(fabric.poll(), None);
        let expected = u64::from(LANES);
        let Counters { round_trips, compare_swaps, .. } = fabric.counters();
        assert_eq!([round_trips, compare_swaps], [expected; 2]);
    }

    #[test]
    fn waits_are_not_late() {
        let (mut fabric, _) = fabric();
        let read = Verb::Read { remote: 0, into: Buffer::Block, bytes: 64 };
        fabric.post(LaneId(0), &[read], Nanos::MAX);
        let until = fabric.now();
        fabric.wait(LaneId(1), until);
        fabric.ring();
        assert_eq!(next(&mut fabric).lane, LaneId(1));
        assert_eq!(next(&mut fabric).lane, LaneId(0));
    }

    #[test]
    fn the_device_takes_what_verbs_or_bytes_take() {
        let read = |bytes| Verb::Read { remote: 0, into: Buffer::Block, bytes };
        let swap = Verb::CompareSwap { remote: 0, expected: 0, desired: 0 };
        assert_eq!(service_ps(&[read(64)]), READ_PS);
        assert_eq!(service_ps(&[read(4096)]), 4096 * BYTE_PS);
        assert_eq!(service_ps(&[read(64), swap]), READ_PS + ATOMIC_PS);
    }
}
