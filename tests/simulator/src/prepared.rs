//! A scenario with its region, from which each execution starts.

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

/// The size of a client's location cache.
const CACHE_BYTES: usize = 512;
/// The process that the history names as the writer of the first values.
const STORER: usize = 99;

/// A scenario with its region.
pub(super) struct Prepared<'s> {
    pub(super) scenario: &'s Scenario,
    region: Rc<SimRegion>,
    memory: Memory,
    /// Whether each word can change.
    can_change: Vec<bool>,
    /// Whether a script raises the counts of two regions; see [`super::turns`].
    pub(super) raises_counts: bool,
}

/// The options of a client's session.
struct SessionOptions {
    /// The client's number, from 1. Number 0 stores the first values.
    number: usize,
    process: usize,
    lanes: u16,
    /// The client whose first blocks it gets, and their number.
    owner: u64,
    blocks: u64,
}

/// Returns the client id of the client with this number.
pub(super) fn client_id(number: usize) -> u16 {
    number as u16 + 1
}

/// The server's answers to one session.
struct ServerAnswers {
    free_blocks: Vec<FreeBlock>,
    world: Weak<RefCell<World>>,
    uses_depot: bool,
}

type SharedDepot = (Rc<RefCell<World>>, Rc<RefCell<SimDepot>>);

impl ServerAnswers {
    fn depot(&self) -> Option<SharedDepot> {
        let world = self.world.upgrade().filter(|world| self.uses_depot && world.borrow().began)?;
        let depot = world.borrow().depot.clone()?;
        Some((world, depot))
    }
}

impl Blocks for ServerAnswers {
    fn take(&mut self, class: SizeClass, count: u32) -> Vec<FreeBlock> {
        if let Some((world, depot)) = self.depot().filter(|_| self.free_blocks.is_empty()) {
            return depot.borrow_mut().take(class, &world);
        }
        let rest = self.free_blocks.len().saturating_sub(count as usize);
        self.free_blocks.split_off(rest)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        if let Some((world, depot)) = self.depot() {
            depot.borrow_mut().give((class, rested), blocks, &world);
        }
    }

    fn split_outcome(&mut self, local_depth: u8) -> Option<SplitOutcome> {
        let world = self.world.upgrade()?;
        let world = world.borrow();
        match world.split {
            // The subtable is split only once.
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
        let blocks_max = scenario.clients.iter().map(|script| script.blocks).max();
        let clients = scenario.clients.len() as u64;
        let splits = scenario.chores().iter().filter(|chore| **chore != Chore::Sweep).count();
        let reopened = u64::from(scenario.losses_max + scenario.pauses_max)
            + clients * u64::from(scenario.renewals_max);
        let slots = (scenario.slots, scenario.used);
        let blocks_max = blocks_max.unwrap_or(0);
        let region =
            SimRegion::new(blocks_max, clients + reopened, slots, splits, scenario.has_depot);
        let region = Rc::new(region);
        let memory = region.memory(scenario.split.map_or(0, |split| split.depth));
        let can_change = |place| region.can_change(memory.offset(place));
        let can_change: Vec<bool> = (0..memory.len()).map(can_change).collect();
        let unnoticed = vec![false; memory.len()];
        let world = World::new(region.clone(), memory.clone(), unnoticed, false, 0);
        let world = Rc::new(RefCell::new(world));
        let mut ops = scenario.clients.iter().flat_map(|script| script.lanes.concat());
        let raises_counts = ops.any(|op| op == Op::RaiseBoth);
        let mut prepared = Self { scenario, region, memory, can_change, raises_counts };
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

    /// Returns the words that are preemptible from the start. If connections can break, these are
    /// the slots: a client that repeats an operation finds its own former writes.
    pub(super) fn first_preemptible_words(&self) -> BTreeSet<usize> {
        let breaks = self.scenario.losses_max + self.scenario.pauses_max > 0
            || self.scenario.renewals_max > 0;
        let is_slot = |place: &usize| {
            let offset = self.memory.offset(*place);
            self.region.slot_at(offset).is_some() && self.region.can_change(offset)
        };
        (0..self.memory.len()).filter(|_| breaks).filter(is_slot).collect()
    }

    /// Opens a client's session. Its chains execute in one step until `SimFabric::immediate` is
    /// unset.
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
        let uses_depot = script.is_some_and(|script| script.takes);
        let free_blocks = self.region.free_blocks(owner, blocks);
        let answers = ServerAnswers { free_blocks, world: Rc::downgrade(world), uses_depot };
        let fabric = SimFabric::new(world.clone(), timing, process, lanes, mutant_fabric, pace);
        let (cache_bytes, locations) = cache;
        let (region_id, region_bytes) =
            (self.region.format.region_id, self.region.format.region_bytes);
        let client_id = client_id(number);
        let options = RegionOptions { region_id, region_bytes, client_id, cache_bytes };
        let seed = mix(self.scenario.seed, number as u64);
        let session =
            TestSession::open((fabric, lanes), Box::new(answers), options, locations, seed);
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

    /// Opens a new connection of a client with one lane. It is the nth of all new connections.
    pub(super) fn reopen(
        &self,
        world: &Rc<RefCell<World>>,
        (client, process): (usize, usize),
        nth: usize,
    ) -> TestSession<SimFabric> {
        let script = &self.scenario.clients[client];
        // The numbers before are those of the sessions that read all keys at the end.
        let number = self.scenario.clients.len() + 4 + nth;
        let owner = (self.scenario.clients.len() + 1 + nth) as u64;
        let session_options =
            SessionOptions { number, process, lanes: 1, owner, blocks: script.blocks };
        let cache = (CACHE_BYTES, &Locations::default());
        let session = self.open_at(world, session_options, script.mutant, cache);
        session.endpoint().fabric_mut().immediate = script.in_one_step;
        session
    }

    /// Starts the server, at this chore. For the scheduler it is one more client with one process.
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

    /// Starts an execution. Every client has connected, and has cached the keys that it knows.
    /// Without `preemptible_words`, every word that can change is preemptible.
    pub(super) fn begin(
        &'s self,
        preemptible_words: Option<Rc<BTreeSet<usize>>>,
        trace: bool,
    ) -> Execution<'s> {
        let scenario = self.scenario;
        let late_completions = preemptible_words.is_none();
        let is_preemptible = match preemptible_words {
            None => self.can_change.clone(),
            Some(preemptible_words) => {
                let mut is_preemptible = vec![false; self.memory.len()];
                preemptible_words.iter().for_each(|place| is_preemptible[*place] = true);
                is_preemptible
            }
        };
        let (region, memory) = (self.region.clone(), self.memory.clone());
        let world =
            World::new(region, memory, is_preemptible, late_completions, scenario.round_trip_ns);
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
            late_completions,
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

/// Returns the name of a process.
pub(super) fn name(process: usize) -> String {
    char::from(b'A' + process as u8).to_string()
}

fn drive(session: &TestSession<SimFabric>, call: Call<'_>, key: usize) -> Reply {
    let reply = session.endpoint().drive(session.run(LaneId(0), call, &keys()[key]));
    reply.expect("nothing disturbs it")
}
