//! Faults between the library and a fabric: chains are late or slow, connections break before,
//! within or behind a chain, and the process ends at some verb. For tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farside_fabric::{
    CHAIN_VERBS_MAX, ChainError, Completion, Fabric, Intercepted, Interceptor, LaneId, Nanos,
    RegionIndex, Verb,
};
use rustix::process::{Signal, getpid, kill_process};

/// How often something goes wrong: in a million chains.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    /// A chain is handed to the fabric late; its deadline stays what it was.
    pub delayed: u32,
    /// A chain's completion is told late.
    pub told_late: u32,
    /// The connection breaks, with none, some or all of the chain executed.
    pub broken: u32,
}

/// What has gone wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A chain was delayed.
    Delayed,
    /// Of these, one whose deadline had passed.
    Late,
    /// A completion was told late.
    ToldLate,
    /// The connection broke, and nothing of the chain was executed.
    BrokenBefore,
    /// It broke when some verbs of the chain were executed.
    BrokenWithin,
    /// It broke when all of the chain was executed.
    BrokenBehind,
}

impl Fault {
    /// What to call each.
    pub const NAMES: [&str; 6] =
        ["delayed", "late", "told late", "broken before", "broken within", "broken behind"];
}

/// The faults of one process: what all its faulty fabrics share.
#[derive(Debug)]
pub struct Faults {
    seed: u64,
    rates: Rates,
    fabrics: AtomicU64,
    /// How many more verbs are executed before the process ends.
    verbs_left: AtomicU64,
    counts: [AtomicU64; Fault::NAMES.len()],
}

impl Faults {
    /// Random ones; the same seed makes the same in a fabric that is asked for the same.
    pub fn new(seed: u64, rates: Rates) -> Arc<Self> {
        Arc::new(Self {
            seed,
            rates,
            fabrics: AtomicU64::new(0),
            verbs_left: AtomicU64::new(u64::MAX),
            counts: Default::default(),
        })
    }

    /// The process kills itself, with SIGKILL, instead of executing one verb more than these.
    pub fn die_after(&self, verbs: u64) {
        self.verbs_left.store(verbs, Ordering::SeqCst);
    }

    /// How often each has happened, in the order of [`Fault::NAMES`].
    pub fn counts(&self) -> [u64; Fault::NAMES.len()] {
        std::array::from_fn(|at| self.counts[at].load(Ordering::Relaxed))
    }

    /// Puts them into a fabric that has so many lanes.
    pub fn around<F: Fabric + ?Sized>(
        self: &Arc<Self>,
        fabric: Box<F>,
        lanes: u16,
    ) -> Intercepted<F, Injector> {
        let number = self.fabrics.fetch_add(1, Ordering::Relaxed) + 1;
        let seed = (self.seed + number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let lanes = usize::from(lanes);
        let interceptor = Injector {
            faults: self.clone(),
            random: seed | 1,
            flights: vec![None; lanes],
            held: Vec::with_capacity(lanes),
            told: Vec::with_capacity(lanes),
            is_broken: false,
        };
        Intercepted { interceptor, fabric }
    }

    fn count(&self, fault: Fault) {
        self.counts[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the process if this chain has the verb that it does not survive.
    fn survive<F: Fabric + ?Sized>(
        &self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        let verbs = |left: u64| left.checked_sub(chain.len() as u64);
        let survived = self.verbs_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, verbs);
        let Err(left) = survived else { return };
        let last = &chain[..left as usize];
        if !last.is_empty() {
            let _ = fabric.run(lane, region, last, deadline);
        }
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// A chain between its post and its completion.
#[derive(Clone, Copy)]
struct Flight {
    region: RegionIndex,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    /// How many of them are executed: all, but where the connection breaks.
    executed: usize,
    deadline: Nanos,
    breaks: bool,
    is_delayed: bool,
}

impl Flight {
    /// What a broken queue pair says of it: as `meaning` in `common/fabric/src/verbs/work.rs` does
    /// of one whose acknowledgement is missing.
    fn lost(&self) -> ChainError {
        let reads = |verb: &Verb| matches!(verb, Verb::Read { .. });
        let chain = &self.chain[..self.verbs];
        if chain.iter().all(reads) { ChainError::Fenced } else { ChainError::Unknown }
    }

    fn fault(&self) -> Fault {
        match self.executed {
            0 => Fault::BrokenBefore,
            executed if executed < self.verbs => Fault::BrokenWithin,
            _ => Fault::BrokenBehind,
        }
    }
}

/// The faults of one fabric.
pub struct Injector {
    faults: Arc<Faults>,
    random: u64,
    /// By lane; none for a lane that waits for a time.
    flights: Vec<Option<Flight>>,
    /// Until when which lanes' chains are held back.
    held: Vec<(Nanos, LaneId)>,
    /// From when on which completions are told.
    told: Vec<(Nanos, Completion)>,
    /// As a broken queue pair: nothing is executed any more.
    is_broken: bool,
}

/// A delay is up to two to this power microseconds, and of each magnitude equally often: beyond
/// what `shm` allows a chain.
const MAGNITUDES: u64 = 17;
/// How long to pause while something is held back.
const PAUSE: Duration = Duration::from_micros(20);

impl Injector {
    fn below(&mut self, bound: u64) -> u64 {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % bound
    }

    fn happens(&mut self, rate: u32) -> bool {
        self.below(1_000_000) < rate.into()
    }

    fn delay(&mut self) -> Nanos {
        let magnitude = 1000 << self.below(MAGNITUDES);
        magnitude + self.below(magnitude)
    }

    fn tell(&mut self, at: Nanos, lane: LaneId, result: Result<u64, ChainError>) {
        self.told.push((at, Completion { lane, result }));
    }

    /// Hands a lane's chain to the fabric, as much of it as is to be executed.
    fn release<F: Fabric + ?Sized>(&mut self, fabric: &mut F, lane: LaneId) {
        let Some(flight) = &self.flights[usize::from(lane.0)] else { return };
        if flight.executed > 0 {
            let chain = &flight.chain[..flight.executed];
            fabric.post(lane, flight.region, chain, flight.deadline);
        } else if let Some(completion) = self.land(fabric.now(), lane, Ok(0)) {
            self.told.push((0, completion));
        }
    }

    /// Hands over what was held back for long enough.
    fn release_due<F: Fabric + ?Sized>(&mut self, fabric: &mut F) {
        let now = fabric.now();
        while let Some(at) = self.held.iter().position(|(until, _)| *until <= now) {
            let (_, lane) = self.held.swap_remove(at);
            self.release(fabric, lane);
        }
        fabric.ring();
    }

    /// What to tell of a chain that the fabric is done with; none if it is told later.
    fn land(
        &mut self,
        now: Nanos,
        lane: LaneId,
        result: Result<u64, ChainError>,
    ) -> Option<Completion> {
        let Some(flight) = self.flights[usize::from(lane.0)].take() else {
            return Some(Completion { lane, result });
        };
        if flight.breaks || self.is_broken {
            self.faults.count(flight.fault());
            self.break_off();
            return Some(Completion { lane, result: Err(flight.lost()) });
        }
        if flight.is_delayed && result == Err(ChainError::Late) {
            self.faults.count(Fault::Late);
        }
        if self.happens(self.faults.rates.told_late) {
            self.faults.count(Fault::ToldLate);
            let at = now + self.delay();
            self.tell(at, lane, result);
            return None;
        }
        Some(Completion { lane, result })
    }

    /// What is held back will not be executed.
    fn break_off(&mut self) {
        self.is_broken = true;
        while let Some((_, lane)) = self.held.pop() {
            if let Some(flight) = self.flights[usize::from(lane.0)].take() {
                self.tell(0, lane, Err(flight.lost()));
            }
        }
    }
}

impl<F: Fabric + ?Sized> Interceptor<F> for Injector {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        if self.is_broken {
            return self.tell(0, lane, Err(ChainError::Fenced));
        }
        self.faults.survive(fabric, lane, region, chain, deadline);
        let mut flight = Flight {
            region,
            chain: [chain[0]; CHAIN_VERBS_MAX],
            verbs: chain.len(),
            executed: chain.len(),
            deadline,
            breaks: self.happens(self.faults.rates.broken),
            is_delayed: self.happens(self.faults.rates.delayed),
        };
        flight.chain[..chain.len()].copy_from_slice(chain);
        if flight.breaks {
            flight.executed = self.below(chain.len() as u64 + 1) as usize;
        }
        self.flights[usize::from(lane.0)] = Some(flight);
        if flight.is_delayed {
            self.faults.count(Fault::Delayed);
            let until = fabric.now() + self.delay();
            self.held.push((until, lane));
        } else {
            self.release(fabric, lane);
        }
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        if !self.held.is_empty() {
            self.release_due(fabric);
        }
        if !self.told.is_empty() {
            let now = fabric.now();
            if let Some(at) = self.told.iter().position(|(from, _)| *from <= now) {
                return Some(self.told.swap_remove(at).1);
            }
        }
        while let Some(Completion { lane, result }) = fabric.poll() {
            let landed = self.land(fabric.now(), lane, result);
            if landed.is_some() {
                return landed;
            }
        }
        None
    }

    fn relax(&mut self, fabric: &mut F) {
        if self.held.is_empty() && self.told.is_empty() {
            fabric.relax();
        } else {
            std::thread::sleep(PAUSE);
        }
    }
}
