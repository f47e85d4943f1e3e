//! Faults between the library and a fabric: chains are late or slow, connections break before,
//! within or after a chain, and the process ends at some verb. For tests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farside_fabric::{
    CHAIN_VERBS_MAX, ChainError, Completion, Fabric, Intercepted, Interceptor, LaneId, Nanos,
    RegionIndex, Verb,
};
use rustix::process::{Signal, getpid, kill_process};

/// The rates of the faults: the number of chains in a million that have each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    /// A chain is handed to the fabric late, with its deadline unchanged.
    pub delayed: u32,
    /// A chain's completion is reported late.
    pub reported_late: u32,
    /// The connection breaks, with none, some or all of the chain executed.
    pub broken: u32,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A chain was delayed.
    Delayed,
    /// A delayed chain had passed its deadline.
    Late,
    /// A completion was reported late.
    ReportedLate,
    /// The connection broke, and nothing of the chain was executed.
    BrokenBefore,
    /// The connection broke after some verbs of the chain were executed.
    BrokenWithin,
    /// The connection broke after the whole chain was executed.
    BrokenAfter,
}

impl Fault {
    /// The names of the variants, in their order.
    pub const NAMES: [&str; 6] =
        ["delayed", "late", "reported late", "broken before", "broken within", "broken after"];
}

/// The faults of one process, which all its faulty fabrics share.
#[derive(Debug)]
pub struct Faults {
    seed: u64,
    rates: Rates,
    fabrics: AtomicU64,
    /// The number of verbs that are executed before the process ends.
    verbs_left: AtomicU64,
    counts: [AtomicU64; Fault::NAMES.len()],
}

impl Faults {
    /// Returns random faults. The seed and a fabric's number decide that fabric's random numbers.
    pub fn new(seed: u64, rates: Rates) -> Arc<Self> {
        Arc::new(Self {
            seed,
            rates,
            fabrics: AtomicU64::new(0),
            verbs_left: AtomicU64::new(u64::MAX),
            counts: Default::default(),
        })
    }

    /// Makes the process kill itself with SIGKILL after `verbs` more verbs.
    pub fn die_after(&self, verbs: u64) {
        self.verbs_left.store(verbs, Ordering::SeqCst);
    }

    /// Returns the number of faults of each kind, in the order of [`Fault::NAMES`].
    pub fn counts(&self) -> [u64; Fault::NAMES.len()] {
        std::array::from_fn(|fault| self.counts[fault].load(Ordering::Relaxed))
    }

    /// Puts the faults into a fabric with `lanes` lanes.
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
            held_chains: Vec::with_capacity(lanes),
            held_completions: Vec::with_capacity(lanes),
            broken: Vec::new(),
        };
        Intercepted { interceptor, fabric }
    }

    fn count(&self, fault: Fault) {
        self.counts[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the process if this chain has the verb at which it must die.
    fn survive<F: Fabric + ?Sized>(
        &self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        let less_chain = |left: u64| left.checked_sub(chain.len() as u64);
        let survived = self.verbs_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less_chain);
        let Err(left) = survived else { return };
        let last_verbs = &chain[..left as usize];
        if !last_verbs.is_empty() {
            let _ = fabric.run(lane, region, last_verbs, deadline);
        }
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// Refuses chains as a fenced connection does.
pub struct Fence<A> {
    admits: A,
    refused: VecDeque<LaneId>,
}

impl<A: FnMut() -> bool> Fence<A> {
    /// Puts a fence into a fabric, which executes a chain only if `admits` then returns true.
    pub fn around<F: Fabric + ?Sized>(fabric: Box<F>, admits: A) -> Intercepted<F, Self> {
        Intercepted { interceptor: Self { admits, refused: VecDeque::new() }, fabric }
    }
}

impl<F: Fabric + ?Sized, A: FnMut() -> bool> Interceptor<F> for Fence<A> {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        match (self.admits)() {
            true => fabric.post(lane, region, chain, deadline),
            false => self.refused.push_back(lane),
        }
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        let refused = |lane| Completion { lane, result: Err(ChainError::Fenced) };
        self.refused.pop_front().map(refused).or_else(|| fabric.poll())
    }
}

/// A chain between its post and its completion.
#[derive(Clone, Copy)]
struct Flight {
    region: RegionIndex,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    /// The number of verbs that are executed: fewer than `verbs` only if the connection breaks.
    executed: usize,
    deadline: Nanos,
    breaks: bool,
    is_delayed: bool,
}

impl Flight {
    /// Returns the error that a broken queue pair reports for this chain, as `classify_failure` in
    /// `common/fabric/src/verbs/work.rs` does for a chain without an acknowledgement.
    fn error_when_lost(&self) -> ChainError {
        let changes = self.chain[..self.verbs].iter().any(|verb| verb.changes_region());
        if changes { ChainError::Unknown } else { ChainError::Fenced }
    }

    fn fault(&self) -> Fault {
        match self.executed {
            0 => Fault::BrokenBefore,
            executed if executed < self.verbs => Fault::BrokenWithin,
            _ => Fault::BrokenAfter,
        }
    }
}

/// The faults of one fabric.
pub struct Injector {
    faults: Arc<Faults>,
    random: u64,
    /// The chain of each lane; `None` for a lane that waits for a time.
    flights: Vec<Option<Flight>>,
    /// Lanes whose chains are held back, each with the time of its release.
    held_chains: Vec<(Nanos, LaneId)>,
    /// Completions that are held back, each with the time of its release.
    held_completions: Vec<(Nanos, Completion)>,
    /// The regions whose connections have broken. No chain is executed there, as with a broken
    /// queue pair.
    broken: Vec<RegionIndex>,
}

/// A delay is shorter than two to this power microseconds, a limit beyond the deadlines of `shm`.
/// Each magnitude is equally frequent.
const MAGNITUDES: u64 = 17;
/// The pause between two polls while a chain or a completion is held back.
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

    fn report(&mut self, until: Nanos, lane: LaneId, result: Result<u64, ChainError>) {
        self.held_completions.push((until, Completion { lane, result }));
    }

    /// Posts those verbs of a lane's chain that the fault lets through.
    fn release<F: Fabric + ?Sized>(&mut self, fabric: &mut F, lane: LaneId) {
        let Some(flight) = &self.flights[usize::from(lane.0)] else { return };
        if flight.executed > 0 {
            let chain = &flight.chain[..flight.executed];
            fabric.post(lane, flight.region, chain, flight.deadline);
        } else if let Some(completion) = self.complete(fabric.now(), lane, Ok(0)) {
            self.held_completions.push((0, completion));
        }
    }

    /// Hands the chains whose delay has passed to the fabric.
    fn release_due<F: Fabric + ?Sized>(&mut self, fabric: &mut F) {
        let now = fabric.now();
        while let Some(at) = self.held_chains.iter().position(|(until, _)| *until <= now) {
            let (_, lane) = self.held_chains.swap_remove(at);
            self.release(fabric, lane);
        }
        fabric.ring();
    }

    /// Returns the completion to report for a chain that the fabric has completed; `None` if it is
    /// reported later.
    fn complete(
        &mut self,
        now: Nanos,
        lane: LaneId,
        result: Result<u64, ChainError>,
    ) -> Option<Completion> {
        let Some(flight) = self.flights[usize::from(lane.0)].take() else {
            return Some(Completion { lane, result });
        };
        if flight.breaks || self.broken.contains(&flight.region) {
            self.faults.count(flight.fault());
            self.break_connection(flight.region);
            return Some(Completion { lane, result: Err(flight.error_when_lost()) });
        }
        if flight.is_delayed && result == Err(ChainError::Late) {
            self.faults.count(Fault::Late);
        }
        if self.happens(self.faults.rates.reported_late) {
            self.faults.count(Fault::ReportedLate);
            let until = now + self.delay();
            self.report(until, lane, result);
            return None;
        }
        Some(Completion { lane, result })
    }

    /// Breaks the connection to a region: the chains that are held back are never executed.
    fn break_connection(&mut self, region: RegionIndex) {
        if !self.broken.contains(&region) {
            self.broken.push(region);
        }
        self.lose_held(region);
    }

    /// Fails the chains that are held back and for this region.
    fn lose_held(&mut self, region: RegionIndex) {
        let flights = &self.flights;
        let is_for_it = |lane: LaneId| {
            let flight = &flights[usize::from(lane.0)];
            flight.as_ref().is_some_and(|flight| flight.region == region)
        };
        let (lost, kept) = self.held_chains.drain(..).partition(|(_, lane)| is_for_it(*lane));
        self.held_chains = kept;
        self.fail(lost);
    }

    /// Reports that these chains are lost.
    fn fail(&mut self, held_chains: Vec<(Nanos, LaneId)>) {
        for (_, lane) in held_chains {
            if let Some(flight) = self.flights[usize::from(lane.0)].take() {
                self.report(0, lane, Err(flight.error_when_lost()));
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
        if self.broken.contains(&region) {
            return self.report(0, lane, Err(ChainError::Fenced));
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
            self.held_chains.push((until, lane));
        } else {
            self.release(fabric, lane);
        }
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        if !self.held_chains.is_empty() {
            self.release_due(fabric);
        }
        if !self.held_completions.is_empty() {
            let now = fabric.now();
            if let Some(at) = self.held_completions.iter().position(|(until, _)| *until <= now) {
                return Some(self.held_completions.swap_remove(at).1);
            }
        }
        while let Some(Completion { lane, result }) = fabric.poll() {
            let completion = self.complete(fabric.now(), lane, result);
            if completion.is_some() {
                return completion;
            }
        }
        None
    }

    fn relax(&mut self, fabric: &mut F) {
        if self.held_chains.is_empty() && self.held_completions.is_empty() {
            fabric.relax();
        } else {
            std::thread::sleep(PAUSE);
        }
    }

    fn replaced(&mut self, fabric: &mut F, region: RegionIndex) {
        fabric.replaced(region);
        self.lose_held(region);
        self.broken.retain(|broken| *broken != region);
    }
}
