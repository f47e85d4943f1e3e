//! A scenario with its region, and how an execution of it begins.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};

use farside_fabric::{LaneId, Timing};
use farside_layout::{FreeBlock, SizeClass, SplitOutcome};
use farside_protocol::RegionOptions;
use farside_protocol::split::SplitProgress;

use super::clock::PACE;
use super::depot::SimDepot;
use super::execution::Execution;
use super::fabric::SimFabric;
use super::memory::{Memory, mix};
use super::monitor::{Asked, Monitor};
use super::mutant::Mutant;
use super::mutant_fabric::MutantFabric;
use super::process::{Process, State};
use super::region::{SimRegion, keys};
use super::scenario::{Op, Scenario};
use super::script::Script;
use super::server::{Chore, run_chores};
use super::session::{Blocks, Call, Locations, Reply, TestSession};
use super::task::{Events, Reading, run_script};
use super::world::World;

/// How much memory a client's location cache has.
const CACHE_BYTES: usize = 512;
/// The client that is said to have stored the first values.
const STORER: usize = 99;
/// A scenario with its region.
pub(super) struct Prepared<'s> {
    pub(super) scenario: &'s Scenario,
    region: Rc<SimRegion>,
    memory: Memory,
    /// Words that can change at all.
    can_change: Vec<bool>,
}

/// Which client opens a rig, and what with.
struct SessionOptions {
    /// Counts from 1; 0 is the one that stores the first values.
    number: usize,
    process: usize,
    lanes: u16,
    /// Whose blocks it is given, and how many.
    owner: u64,
    blocks: u64,
}

/// The id that a client with this number is welcomed with.
pub(super) fn client_id(number: usize) -> u16 {
    number as u16 + 1
}

/// Blocks, where to see how a split went, and whether the depot has more.
struct Given(Vec<FreeBlock>, Weak<RefCell<World>>, bool);

type SharedDepot = (Rc<RefCell<World>>, Rc<RefCell<SimDepot>>);

impl Given {
    fn depot(&self) -> Option<SharedDepot> {
        let world = self.1.upgrade().filter(|world| self.2 && world.borrow().began)?;
        let depot = world.borrow().depot.clone()?;
        Some((world, depot))
    }
}

impl Blocks for Given {
    fn take(&mut self, class: SizeClass, count: u32) -> Vec<FreeBlock> {
        if let Some((world, depot)) = self.depot().filter(|_| self.0.is_empty()) {
            return depot.borrow_mut().take(class, &world);
        }
        let rest = self.0.len().saturating_sub(count as usize);
        self.0.split_off(rest)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        if let Some((world, depot)) = self.depot() {
            depot.borrow_mut().give((class, rested), blocks, &world);
        }
    }

    fn split_outcome(&mut self, local_depth: u8) -> Option<SplitOutcome> {
        let world = self.1.upgrade()?;
        let world = world.borrow();
        match world.split {
            // There is one split and no more.
            _ if !world.region.splits() || local_depth > 0 => Some(SplitOutcome::Impossible),
            Some(SplitProgress::Done) => Some(SplitOutcome::Done),
            Some(SplitProgress::Busy) => Some(SplitOutcome::Later),
            Some(SplitProgress::Stuck { .. }) => Some(SplitOutcome::Impossible),
            None => None,
        }
    }
}

impl<'s> Prepared<'s> {
    pub(super) fn new(scenario: &'s Scenario) -> Self {
        let most = scenario.clients.iter().map(|script| script.blocks).max();
        let clients = scenario.clients.len() as u64;
        let splits = scenario.chores().iter().filter(|chore| **chore != Chore::Sweep).count();
        let reopened = u64::from(scenario.losses_max + scenario.pauses_max)
            + clients * u64::from(scenario.renewals_max);
        let slots = (scenario.slots, scenario.used);
        let most = most.unwrap_or(0);
        let region = SimRegion::new(most, clients + reopened, slots, splits, scenario.has_depot);
        let region = Rc::new(region);
        let memory = region.memory(scenario.split.map_or(0, |split| split.depth));
        let can_change = |place| region.can_change(memory.offset(place));
        let can_change: Vec<bool> = (0..memory.len()).map(can_change).collect();
        let unnoticed = vec![false; memory.len()];
        let world = World::new(region.clone(), memory.clone(), unnoticed, false, 0);
        let world = Rc::new(RefCell::new(world));
        let mut prepared = Self { scenario, region, memory, can_change };
        let session = prepared.open(&world, 0, 0, 1, None);
        for key in scenario.removed.iter().chain(&scenario.stored) {
            drive(&session, Call::Insert(format!("i{key}").as_bytes()), *key);
            if scenario.removed.contains(key) {
                drive(&session, Call::Delete, *key);
            }
        }
        prepared.memory = world.borrow().memory.clone();
        for key in &scenario.marked {
            let block = prepared.region.block_of(&prepared.memory, *key);
            let place = prepared.memory.place(block, 8).expect("its block exists");
            let header = prepared.memory.load(place);
            prepared.memory.store(place, header | 1);
        }
        prepared
    }

    /// Words that get steps of their own from the start: where connections break, the slots, even
    /// if no other client accesses them, for one that tries again meets what it did before.
    pub(super) fn first_preemptible_words(&self) -> BTreeSet<usize> {
        let breaks = self.scenario.losses_max + self.scenario.pauses_max > 0
            || self.scenario.renewals_max > 0;
        let is_slot = |place: &usize| {
            let offset = self.memory.offset(*place);
            self.region.slot_at(offset).is_some() && self.region.can_change(offset)
        };
        (0..self.memory.len()).filter(|_| breaks).filter(is_slot).collect()
    }

    /// A client with its blocks; chains execute at once until the fabric is told otherwise.
    pub(super) fn open(
        &self,
        world: &Rc<RefCell<World>>,
        client: usize,
        process: usize,
        lanes: u16,
        mutant: Option<Mutant>,
    ) -> TestSession<SimFabric> {
        let script = client.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let (owner, blocks) = match client {
            0 => (0, super::KEYS as u64),
            _ => script.map_or((0, 0), |script| {
                let is_first = mutant == Some(Mutant::BlocksOfTwoOwners);
                (if is_first { 1 } else { client as u64 }, script.blocks)
            }),
        };
        // A client that does only one thing needs no cache.
        let once = |script: &Script| script.known.is_empty() && script.operations() == 1;
        let shares = script.is_some_and(|script| script.shares);
        let cache_bytes = if script.is_none_or(once) && !shares { 0 } else { CACHE_BYTES };
        let locations = if shares { world.borrow().locations.clone() } else { Rc::default() };
        let session_options = SessionOptions { number: client, process, lanes, owner, blocks };
        let session = self.open_at(world, session_options, mutant, (cache_bytes, &locations));
        if let Some(slot) = script.and_then(|script| script.guess) {
            session.expect_room(&keys()[0], slot);
        }
        session
    }

    fn open_at(
        &self,
        world: &Rc<RefCell<World>>,
        session_options: SessionOptions,
        mutant: Option<Mutant>,
        cache: (usize, &Locations),
    ) -> TestSession<SimFabric> {
        let SessionOptions { number, process, lanes, owner, blocks } = session_options;
        let timing = Timing {
            round_trip_min_ns: self.scenario.round_trip_min_ns,
            lateness_max_ns: self.scenario.lateness_max_ns,
        };
        let now = world.borrow().now;
        let mutant_fabric = mutant.map(|mutant| Box::new(MutantFabric::new(mutant, now)));
        let script = number.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let pace = script.map_or(PACE, |script| script.pace);
        let takes = script.is_some_and(|script| script.takes);
        let given = self.region.free_blocks(owner, blocks);
        let given = Given(given, Rc::downgrade(world), takes);
        let fabric = SimFabric::new(world.clone(), timing, process, lanes, mutant_fabric, pace);
        let (cache_bytes, locations) = cache;
        let (region_id, region_bytes) =
            (self.region.format.region_id, self.region.format.region_bytes);
        let client_id = client_id(number);
        let options = RegionOptions { region_id, region_bytes, client_id, cache_bytes };
        let seed = mix(self.scenario.seed, number as u64);
        let session = TestSession::open((fabric, lanes), Box::new(given), options, locations, seed);
        let mut session = session.expect("the region is in order");
        if let Some(mutant) = mutant {
            let right = session.constants();
            let reported = mutant.constants(right, self.scenario.lateness_max_ns);
            session.set_constants(reported);
            if reported != right {
                world.borrow_mut().note_fired(mutant);
            }
        }
        if blocks > 0 {
            session.fetch_blocks(self.region.class).expect("it was given blocks");
        }
        session
    }

    /// A new connection of a client with one lane, the nth of all that are made.
    pub(super) fn reopen(
        &self,
        world: &Rc<RefCell<World>>,
        (client, process): (usize, usize),
        nth: usize,
    ) -> TestSession<SimFabric> {
        let script = &self.scenario.clients[client];
        // The numbers behind those that look at everything at the end.
        let number = self.scenario.clients.len() + 4 + nth;
        let owner = (self.scenario.clients.len() + 1 + nth) as u64;
        let session_options =
            SessionOptions { number, process, lanes: 1, owner, blocks: script.blocks };
        let cache = (CACHE_BYTES, &Locations::default());
        let session = self.open_at(world, session_options, script.mutant, cache);
        session.endpoint().fabric_mut().immediate = script.in_one_step;
        session
    }

    /// The server, from this chore on: for the scheduler a client, whose number this is, with one
    /// process.
    pub(super) fn server(
        &self,
        world: &Rc<RefCell<World>>,
        (client, process): (usize, usize),
        chore: u32,
    ) -> (Rc<TestSession<SimFabric>>, Process) {
        let split = self.scenario.split;
        let lanes = split.map_or(1, |split| split.lanes);
        let mutant = split.and_then(|split| split.mutant).or(self.scenario.server);
        let session = Rc::new(self.open(world, client + 1, process, lanes, mutant));
        session.endpoint().fabric_mut().immediate = false;
        let events = Events::default();
        let chores = self.scenario.chores().split_off(chore as usize);
        let task = run_chores(session.clone(), world.clone(), (chores, lanes), events.clone());
        let mut process = Process::new(client, (LaneId(0), lanes), Box::pin(task), events);
        process.began = chore;
        if chore as usize == self.scenario.chores().len() {
            process.state = State::Over;
        }
        (session, process)
    }

    /// The start of an execution: every client has connected and looked up what it knows.
    pub(super) fn begin(
        &'s self,
        preemptible_words: Option<Rc<BTreeSet<usize>>>,
        trace: bool,
    ) -> Execution<'s> {
        let scenario = self.scenario;
        let lazy = preemptible_words.is_none();
        let is_preemptible = match preemptible_words {
            None => self.can_change.clone(),
            Some(preemptible_words) => {
                let mut is_preemptible = vec![false; self.memory.len()];
                preemptible_words.iter().for_each(|place| is_preemptible[*place] = true);
                is_preemptible
            }
        };
        let (region, memory) = (self.region.clone(), self.memory.clone());
        let world = World::new(region, memory, is_preemptible, lazy, scenario.round_trip_ns);
        let world = Rc::new(RefCell::new(world));
        let mut execution = Execution {
            prepared: self,
            world,
            sessions: Vec::new(),
            processes: Vec::new(),
            monitor: Monitor::new(),
            last: None,
            bound: false,
            jumps: 0,
            deaths: 0,
            restarts: 0,
            losses: 0,
            renewals: 0,
            pauses: 0,
            ids: Vec::new(),
            lost_clients: Vec::new(),
            reopened: 0,
            lazy,
            observer: None,
        };
        for key in &scenario.stored {
            let asked = Asked { op: Op::Put(*key), value: format!("i{key}"), expected: None };
            let id = execution.monitor.invoke(STORER, *key as u32, &asked);
            let stored = Ok(Reply { done: true, found: None });
            execution.monitor.respond(id, *key, &stored).expect("the first values");
        }
        for (at, script) in scenario.clients.iter().enumerate() {
            let lanes = script.lanes.len() as u16;
            let first = execution.processes.len();
            let session = self.open(&execution.world, at + 1, first, lanes, script.mutant);
            for key in &script.known {
                drive(&session, Call::Get, *key);
            }
            session.endpoint().fabric_mut().immediate = script.in_one_step;
            let session = Rc::new(session);
            for (lane, script) in script.lanes.iter().enumerate() {
                let name = name(first + lane);
                let events = Events::default();
                let lane = LaneId(lane as u16);
                let reading = Reading::new(script.clone(), name);
                let task = run_script(session.clone(), lane, reading, events.clone());
                execution.processes.push(Process::new(at, (lane, 1), Box::pin(task), events));
            }
            execution.sessions.push(session);
            execution.ids.push(client_id(at + 1));
        }
        let (client, at) = (execution.sessions.len(), execution.processes.len());
        if scenario.split.is_some() {
            let observer = self.open(&execution.world, client + 2, at + 1, 1, None);
            execution.observer = Some(Rc::new(observer));
        }
        if !scenario.chores().is_empty() {
            let (session, process) = self.server(&execution.world, (client, at), 0);
            execution.sessions.push(session);
            execution.processes.push(process);
        }
        let mut shared = execution.world.borrow_mut();
        if scenario.has_depot {
            let depot = SimDepot::new(&self.region, scenario.server, shared.now);
            shared.depot = Some(Rc::new(RefCell::new(depot)));
        }
        shared.began = true;
        shared.places_rest = scenario.server != Some(Mutant::ReusedAtOnce);
        shared.trace = trace.then(Vec::new);
        drop(shared);
        execution
    }
}

/// What a process is called.
pub(super) fn name(process: usize) -> String {
    char::from(b'A' + process as u8).to_string()
}

fn drive(session: &TestSession<SimFabric>, call: Call<'_>, key: usize) -> Reply {
    let reply = session.endpoint().drive(session.run(LaneId(0), call, &keys()[key]));
    reply.expect("nothing disturbs it")
}
