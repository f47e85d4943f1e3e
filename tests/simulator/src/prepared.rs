//! A scenario with its region, from which each execution starts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::mem;
use std::rc::Rc;

use farside_fabric::{LaneId, Nanos, RegionIndex, Trust};
use farside_protocol::{Action, ConnectionCache, Lifetime, RegionOptions};

use crate::cluster::{
    ClusterClient, ClusterState, Connection, FORMER, LATTER, OTHER, OWNED, REASSIGNED, TRUST_NS,
};
use crate::fabric::{SimFabric, WatchedBlocks};
use crate::memory::{EXPIRES_AT_MS, Memory, PACE, local, mix};
use crate::mutant::Mutant;
use crate::mutant_fabric::MutantFabric;
use crate::process::{Events, Process, State};
use crate::region::{KEYS, Key, SHAPE, SimRegion, keys};
use crate::scenario::{Chore, EventCounts, Scenario};
use crate::script::{Op, Script};
use crate::server::{ServerAnswers, run_chores};
use crate::session::{Reply, TestSession};
use crate::world::World;

/// The size of a client's location cache.
const CACHE_BYTES: usize = 512;

/// A scenario with its region.
pub(crate) struct Prepared<'s> {
    pub(crate) scenario: &'s Scenario,
    pub(crate) region: Rc<SimRegion>,
    pub(crate) memory: Memory,
    /// Whether each word can change.
    pub(crate) can_change: Vec<bool>,
    /// Whether a script changes the two further regions; see [`crate::process`].
    pub(crate) changes_two_regions: bool,
    /// Whether there may be values that expire.
    pub(crate) has_expiries: bool,
}

/// The options of a client's session.
struct SessionOptions {
    /// The client's number, from 1. Number 0 stores the first values.
    number: usize,
    process: usize,
    lanes: u16,
    mutant: Option<Mutant>,
    /// The number of the client whose first blocks the session gets, and the number of blocks.
    owner: u64,
    blocks: u64,
    cache_bytes: usize,
    locations: Rc<ConnectionCache>,
}

/// Returns the client id of the client with this number.
pub(crate) fn client_id(number: usize) -> u16 {
    number as u16 + 1
}

impl<'s> Prepared<'s> {
    pub(crate) fn new(scenario: &'s Scenario) -> Self {
        let blocks_max = scenario.clients.iter().map(|script| script.blocks).max();
        let clients = scenario.clients.len() as u64;
        let is_split = |chore: &&Chore| matches!(chore, Chore::Split | Chore::Reuse { .. });
        let splits = scenario.chores().iter().filter(is_split).count();
        let limits = &scenario.limits;
        let reopened = u64::from(limits.losses + limits.pauses + limits.reconnects)
            + clients * u64::from(limits.server_restarts);
        let slots = (scenario.slots, scenario.used);
        let parts = (scenario.has_depot, scenario.has_extents);
        let blocks_max = blocks_max.unwrap_or(0);
        let region = SimRegion::new(blocks_max, clients + reopened, slots, splits, parts);
        let region = Rc::new(region);
        let depth = scenario.split.map_or(0, |split| split.depth);
        let memory = region.memory(depth, scenario.regions());
        let can_change = |index| region.can_change(local(memory.offset(index)).1);
        let can_change: Vec<bool> = (0..memory.len()).map(can_change).collect();
        let unnoticed = vec![false; memory.len()];
        let mut world = World::new(region.clone(), memory.clone(), unnoticed, false, 0);
        world.cluster = scenario.moves.then(ClusterState::new);
        let world = Rc::new(RefCell::new(world));
        let ops = || scenario.clients.iter().flat_map(|script| script.lanes.concat());
        let changes_two_regions = ops().any(|op| op == Op::RaiseBoth);
        let has_expiries = !scenario.expiring.is_empty()
            || ops().any(|op| matches!(op, Op::PutTtl(_) | Op::InsertTtl(_)));
        let mut prepared =
            Self { scenario, region, memory, can_change, changes_two_regions, has_expiries };
        let session = prepared.open(&world, 0, 0, 1, None);
        for key in scenario.removed.iter().chain(&scenario.stored) {
            let expires = scenario.expiring.contains(key);
            let lifetime =
                if expires { Lifetime::until_ms(EXPIRES_AT_MS) } else { Lifetime::FOREVER };
            drive(&session, Action::Insert(lifetime), *key, &format!("i{key}"));
            if scenario.removed.contains(key) {
                drive(&session, Action::Delete, *key, "");
            }
        }
        prepared.memory = world.borrow().memory.clone();
        for key in &scenario.marked {
            let block = prepared.region.block_of(&prepared.memory, *key);
            let index = prepared.memory.index(block, 8).expect("its block exists");
            let header = prepared.memory.load(index);
            prepared.memory.store(index, header | 1);
        }
        prepared
    }

    /// Returns the words that are preemptible from the start. If connections can break, these are
    /// the slots: a client that repeats an operation finds its own former writes.
    pub(crate) fn first_preemptible_words(&self) -> BTreeSet<usize> {
        let EventCounts { losses, pauses, server_restarts, .. } = self.scenario.limits;
        let breaks = losses + pauses + server_restarts > 0 || self.scenario.moves;
        let is_slot = |index: &usize| {
            let (_, offset) = local(self.memory.offset(*index));
            self.region.slot_at(offset).is_some() && self.region.can_change(offset)
        };
        (0..self.memory.len()).filter(|_| breaks).filter(is_slot).collect()
    }

    /// Opens a client's session. Its chains execute in one step until `SimFabric::immediate` is
    /// unset.
    pub(crate) fn open(
        &self,
        world: &Rc<RefCell<World>>,
        client: usize,
        process: usize,
        lanes: u16,
        mutant: Option<Mutant>,
    ) -> TestSession {
        let script = client.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let (owner, blocks) = match client {
            0 => (0, KEYS as u64),
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
        let options = SessionOptions {
            number: client,
            process,
            lanes,
            mutant,
            owner,
            blocks,
            cache_bytes,
            locations,
        };
        let session = self.open_with(world, options);
        if let Some(slot) = script.and_then(|script| script.guess) {
            session.expect_unused_slot(&keys()[0], slot);
        }
        session
    }

    fn open_with(&self, world: &Rc<RefCell<World>>, options: SessionOptions) -> TestSession {
        let SessionOptions { number, process, lanes, mutant, owner, blocks, .. } = options;
        let now = world.borrow().now;
        let mutant_fabric = mutant.map(|mutant| Box::new(MutantFabric::new(mutant, now)));
        let script = number.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let pace = script.map_or(PACE, |script| script.pace);
        let uses_depot = script.is_some_and(|script| script.takes);
        let free_blocks = self.region.free_blocks(owner, blocks);
        let extents = self.region.free_extents(owner);
        let held_blocks = WatchedBlocks::default();
        let answers =
            ServerAnswers::new((free_blocks, extents), world, held_blocks.clone(), uses_depot);
        let fabric =
            SimFabric::new(world.clone(), process, lanes, mutant_fabric, held_blocks, pace);
        let trust = Trust::forever();
        let region_options = self.region_options(client_id(number), options.cache_bytes, trust);
        let seed = mix(self.scenario.seed, number as u64);
        let answers = Box::new(answers);
        let locations = &options.locations;
        let index = if self.scenario.moves { OTHER } else { RegionIndex::FIRST };
        let session =
            TestSession::open((fabric, lanes), index, answers, region_options, locations, seed);
        let mut session = session.expect("the region is valid");
        if self.scenario.has_extents {
            session.region.extent_shape = SHAPE;
        }
        if let Some(mutant) = mutant
            && mutant.change_constants(&mut session.region)
        {
            world.borrow_mut().note_fired(mutant);
        }
        if blocks > 0 {
            let fetched = session.fetch_blocks(&session.region, self.region.class);
            fetched.expect("the session has been given blocks");
        }
        let cluster = world.borrow().cluster;
        if let Some(cluster) = cluster {
            // A session that reads all keys at the end knows where they are.
            let view = if cluster.is_reassigned() { REASSIGNED } else { OWNED };
            session.cluster = Some(ClusterClient::new(view));
            self.connect(world, &session, (number, 0), view);
        }
        session
    }

    fn region_options(&self, client_id: u16, cache_bytes: usize, trust: Trust) -> RegionOptions {
        RegionOptions {
            trust,
            region_id: self.region.format.region_id,
            region_bytes: self.region.format.region_bytes,
            client_id,
            cache_bytes,
        }
    }

    /// Connects a client to the owner of the moving shard in the view with this number. `number` is
    /// the client's number, or `nth` if it has been connected to this owner before.
    pub(crate) fn connect(
        &self,
        world: &Rc<RefCell<World>>,
        session: &TestSession,
        (number, nth): (usize, usize),
        view: u64,
    ) {
        let script = number.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let owner = if nth > 0 { nth + 1 } else { number };
        let blocks = match (number, script) {
            (0, _) => KEYS as u64,
            (_, script) => script.map_or(0, |script| script.blocks),
        };
        let (region, until) = match (view, script) {
            (OWNED, Some(_)) => (FORMER, session.endpoint().fabric().clock_shows() + TRUST_NS),
            (OWNED, None) => (FORMER, Nanos::MAX),
            _ => (LATTER, Nanos::MAX),
        };
        let free_blocks = self.region.free_blocks(owner as u64, blocks);
        // In a cluster no value has extents, so nothing is checked about what a session holds.
        let blocks_of_both = (free_blocks, Default::default());
        let answers =
            Box::new(ServerAnswers::new(blocks_of_both, world, WatchedBlocks::default(), false));
        let trust = Trust::until(until);
        let client_id = client_id(if nth > 0 { nth + 4 } else { number });
        let cache_bytes = if script.is_some() { CACHE_BYTES } else { 0 };
        let options = self.region_options(client_id, cache_bytes, trust.clone());
        let was_immediate = mem::replace(&mut session.endpoint().fabric_mut().immediate, true);
        let opened = session.open_further(region, answers, options);
        let mut opened = opened.expect("the region is valid");
        if let Some(mutant) = script.and_then(|script| script.mutant)
            && mutant.change_constants(&mut opened)
        {
            world.borrow_mut().note_fired(mutant);
        }
        if blocks > 0 {
            let fetched = session.fetch_blocks(&opened, self.region.class);
            fetched.expect("the session has been given blocks");
        }
        session.endpoint().fabric_mut().immediate = was_immediate;
        if let Some(cluster) = &session.cluster {
            let region = Rc::new(opened);
            let connection = Connection { number: view, region, trust, until, heartbeat: None };
            cluster.connection.replace(Some(connection));
        }
    }

    /// Opens a new connection of a client with one lane: the nth (from 0) of all new connections.
    pub(crate) fn reopen(
        &self,
        world: &Rc<RefCell<World>>,
        (client, process): (usize, usize),
        nth: usize,
    ) -> TestSession {
        let script = &self.scenario.clients[client];
        // Smaller numbers belong to the clients, the server and the readers at the end.
        let number = self.scenario.clients.len() + 4 + nth;
        let owner = (self.scenario.clients.len() + 1 + nth) as u64;
        let session = self.open_with(
            world,
            SessionOptions {
                number,
                process,
                lanes: 1,
                mutant: script.mutant,
                owner,
                blocks: script.blocks,
                cache_bytes: CACHE_BYTES,
                locations: Rc::default(),
            },
        );
        session.endpoint().fabric_mut().immediate = script.in_one_step;
        session
    }

    /// Starts the server, at this chore. For the scheduler it is one more client with one process.
    pub(crate) fn server(
        &self,
        world: &Rc<RefCell<World>>,
        (client, process): (usize, usize),
        chore: u32,
    ) -> (Rc<TestSession>, Process) {
        let split = self.scenario.split;
        let lanes = split.map_or(1, |split| split.lanes);
        let mutant = split.and_then(|split| split.mutant).or(self.scenario.server);
        let session = Rc::new(self.open(world, client + 1, process, lanes, mutant));
        session.endpoint().fabric_mut().immediate = false;
        let events = Events::default();
        let chores = self.scenario.chores().split_off(chore as usize);
        let task = run_chores(session.clone(), world.clone(), (chores, lanes), events.clone());
        let mut process = Process::new(client, (LaneId(0), lanes), Box::pin(task), events);
        process.operations_begun = chore;
        if chore as usize == self.scenario.chores().len() {
            process.state = State::Finished;
        }
        (session, process)
    }
}

/// Returns the name of a process.
pub(crate) fn name(process: usize) -> String {
    char::from(b'A' + process as u8).to_string()
}

/// Performs an operation on a key while no other process acts.
pub(crate) fn drive(session: &TestSession, action: Action<'_>, key: Key, value: &str) -> Reply {
    let operation = session.run(LaneId(0), action, (&keys()[key], value.as_bytes()));
    session.endpoint().drive(operation).expect("nothing disturbs the operation")
}
