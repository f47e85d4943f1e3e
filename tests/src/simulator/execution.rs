//! One execution of a scenario: who can do what next, and what it leads to.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::hash::Hasher;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside::Version;
use farside::testing::{Blocks, Call, Reply, Rig};
use farside_common::control::FreeBlock;
use farside_common::fabric::{LaneId, Nanos, Timing};
use farside_common::layout::SizeClass;

use super::fabric::{Phase, SimFabric};
use super::ground::{Ground, keys};
use super::lies::{Liar, Lie, Twin};
use super::memory::{Memory, mix};
use super::monitor::{Asked, Monitor, Violation};
use super::scenario::{Op, Scenario, Script};
use super::trace::Line;
use super::world::World;

/// How much memory a client's location cache has.
const CACHE_BYTES: usize = 512;
/// Who is said to have stored the first values.
const STORER: usize = 99;
/// A scenario with its region.
pub(super) struct Prepared<'s> {
    pub(super) scenario: &'s Scenario,
    ground: Rc<Ground>,
    memory: Memory,
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    /// A process begins its next operation.
    Begin(usize),
    /// It accesses this group of words.
    Access(usize, usize),
    /// It stops waiting.
    Wake(usize),
    /// It learns that its chain is over.
    Complete(usize),
    /// The clock jumps.
    Jump(Nanos),
    /// A client dies.
    Die(usize),
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between two operations.
    Between,
    Working,
    Over,
    /// It died, or has used up its chains.
    Gone,
}

enum Event {
    Invoke(Asked),
    Respond(usize, Result<Reply, Option<farside::Error>>),
    /// Nothing to do after all.
    Skip,
    Over,
}

type Events = Rc<RefCell<VecDeque<Event>>>;

struct Process {
    client: usize,
    lane: LaneId,
    task: Pin<Box<dyn Future<Output = ()>>>,
    events: Events,
    state: State,
    chains: u32,
    /// How many operations it began.
    began: u32,
    /// A hash of what its script remembers.
    seen: u64,
}

/// An execution so far.
pub(super) struct Execution<'s> {
    prepared: &'s Prepared<'s>,
    pub(super) world: Rc<RefCell<World>>,
    rigs: Vec<Rc<Rig<SimFabric>>>,
    processes: Vec<Process>,
    pub(super) monitor: Monitor,
    /// Who acted last, and must go on because nothing happened yet since it began.
    last: Option<usize>,
    bound: bool,
    jumps: u32,
    deaths: u32,
    /// Completions are events of their own.
    lazy: bool,
}

struct Given(Vec<FreeBlock>);

impl Blocks for Given {
    fn take(&mut self, _: SizeClass, count: u32) -> Vec<FreeBlock> {
        let rest = self.0.len().saturating_sub(count as usize);
        self.0.split_off(rest)
    }

    fn give(&mut self, _: SizeClass, _: bool, _: Vec<FreeBlock>) {}
}

impl<'s> Prepared<'s> {
    pub(super) fn new(scenario: &'s Scenario) -> Self {
        let most = scenario.clients.iter().map(|script| script.blocks).max();
        let ground =
            Rc::new(Ground::new(most.unwrap_or(0), scenario.clients.len() as u64, scenario.slots));
        let memory = ground.memory();
        let world = World::new(ground.clone(), memory, Some(Rc::default()), 0);
        let world = Rc::new(RefCell::new(world));
        let mut prepared = Self { scenario, ground, memory: world.borrow().memory.clone() };
        let rig = prepared.open(&world, 0, 0, 1, None);
        for key in scenario.removed.iter().chain(&scenario.stored) {
            drive(&rig, Call::Insert(format!("i{key}").as_bytes()), *key);
            if scenario.removed.contains(key) {
                drive(&rig, Call::Delete, *key);
            }
        }
        prepared.memory = world.borrow().memory.clone();
        for key in &scenario.marked {
            let block = prepared.ground.block_of(&prepared.memory, *key);
            let place = prepared.memory.place(block, 8).expect("its block exists");
            let header = prepared.memory.load(place);
            prepared.memory.store(place, header | 1);
        }
        prepared
    }

    /// A client with its blocks; chains execute at once until the fabric is told otherwise.
    fn open(
        &self,
        world: &Rc<RefCell<World>>,
        client: usize,
        process: usize,
        lanes: u16,
        twin: Option<Twin>,
    ) -> Rig<SimFabric> {
        let timing = Timing {
            round_trip_min_ns: self.scenario.round_trip_min_ns,
            lateness_max_ns: self.scenario.lateness_max_ns,
        };
        let now = world.borrow().now;
        let lie = twin.map(|twin| Box::new(Liar::new(twin, now)) as Box<dyn Lie>);
        let fabric = SimFabric::new(world.clone(), timing, process, lanes, lie);
        let script = client.checked_sub(1).and_then(|at| self.scenario.clients.get(at));
        let (owner, count) = match client {
            0 => (0, super::KEYS as u64),
            _ => script.map_or((0, 0), |script| {
                (script.blocks_of.unwrap_or(client as u64), script.blocks)
            }),
        };
        let blocks = Given(self.ground.free_blocks(owner, count));
        let welcome = self.ground.welcome(client as u16 + 1);
        // Whoever does only one thing needs no cache.
        let once = |script: &Script| script.known.is_empty() && script.operations() == 1;
        let cache_bytes = if script.is_none_or(once) { 0 } else { CACHE_BYTES };
        let seed = mix(self.scenario.seed, client as u64);
        let rig = Rig::open(fabric, Box::new(blocks), &welcome, lanes, cache_bytes, seed);
        let rig = rig.expect("the region is in order");
        if count > 0 {
            rig.fetch_blocks(self.ground.class).expect("it was given blocks");
        }
        rig
    }

    /// The start of an execution: everybody has connected and looked up what it knows.
    pub(super) fn begin(&'s self, hot: Option<Rc<BTreeSet<usize>>>, trace: bool) -> Execution<'s> {
        let scenario = self.scenario;
        let lazy = hot.is_none();
        let world =
            World::new(self.ground.clone(), self.memory.clone(), hot, scenario.round_trip_ns);
        let world = Rc::new(RefCell::new(world));
        let mut execution = Execution {
            prepared: self,
            world,
            rigs: Vec::new(),
            processes: Vec::new(),
            monitor: Monitor::new(),
            last: None,
            bound: false,
            jumps: 0,
            deaths: 0,
            lazy,
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
            let rig = self.open(&execution.world, at + 1, first, lanes, script.twin);
            for key in &script.known {
                drive(&rig, Call::Get, *key);
            }
            rig.endpoint().fabric_mut().immediate = script.swift;
            let rig = Rc::new(rig);
            for (lane, script) in script.lanes.iter().enumerate() {
                let name = name(first + lane);
                let events = Events::default();
                let lane = LaneId(lane as u16);
                let task = run_script(rig.clone(), lane, script.clone(), name, events.clone());
                let mut task = Box::pin(task);
                // Up to where its first operation begins.
                let _ = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                execution.processes.push(Process {
                    client: at,
                    lane,
                    task,
                    events,
                    state: State::Between,
                    chains: 0,
                    began: 0,
                    seen: 0,
                });
            }
            execution.rigs.push(rig);
        }
        let mut shared = execution.world.borrow_mut();
        shared.began = true;
        shared.trace = trace.then(Vec::new);
        drop(shared);
        execution
    }
}

/// What a process is called.
pub(super) fn name(process: usize) -> String {
    char::from(b'A' + process as u8).to_string()
}

fn drive(rig: &Rig<SimFabric>, call: Call<'_>, key: usize) -> Reply {
    let reply = rig.endpoint().drive(rig.run(LaneId(0), call, &keys()[key]));
    reply.expect("nobody disturbs it")
}

async fn run_script(
    rig: Rc<Rig<SimFabric>>,
    lane: LaneId,
    script: Vec<Op>,
    name: String,
    events: Events,
) {
    let mut seen: Vec<Option<(String, Version)>> = vec![None; super::KEYS];
    for (n, op) in script.into_iter().enumerate() {
        // Begins when the scheduler says so.
        let mut began = false;
        std::future::poll_fn(|_| match std::mem::replace(&mut began, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        let value = format!("{name}{}", n + 1);
        let expected = match op {
            Op::Exchange(_, expected) => Some((expected.to_owned(), None)),
            Op::ExchangeSeen(key) => {
                let Some((value, version)) = seen[key].clone() else {
                    events.borrow_mut().push_back(Event::Skip);
                    continue;
                };
                Some((value, Some(version.to_string())))
            }
            _ => None,
        };
        let asked = Asked { op, value: value.clone(), expected: expected.clone() };
        let key = asked.key();
        events.borrow_mut().push_back(Event::Invoke(asked));
        let value = value.as_bytes();
        let call = match (&op, &expected) {
            (Op::Get(_), _) => Call::Get,
            (Op::Put(_), _) => Call::Put(value),
            (Op::Insert(_), _) => Call::Insert(value),
            (Op::Update(_), _) => Call::Update(value),
            (Op::ExchangeSeen(_), _) => match seen[key] {
                Some((_, expected)) => Call::ExchangeVersion { expected, value },
                None => continue,
            },
            (_, Some((expected, _))) => Call::Exchange { expected: expected.as_bytes(), value },
            (_, None) => Call::Delete,
        };
        let reply = rig.run(lane, call, &keys()[key]).await;
        if let (Op::Get(_), Ok(Reply { found: Some((value, version)), .. })) = (op, &reply) {
            seen[key] = Some((String::from_utf8_lossy(value).into_owned(), *version));
        }
        events.borrow_mut().push_back(Event::Respond(key, reply));
    }
    events.borrow_mut().push_back(Event::Over);
}

impl Execution<'_> {
    /// Everything that can happen next; what goes on as before comes first.
    pub(super) fn actions(&self, actions: &mut Vec<Action>) {
        actions.clear();
        if let Some(last) = self.last {
            self.actions_of(last, actions);
            if self.bound {
                return;
            }
        }
        for process in (0..self.processes.len()).filter(|process| Some(*process) != self.last) {
            self.actions_of(process, actions);
        }
        if actions.is_empty() {
            return;
        }
        let scenario = self.prepared.scenario;
        if self.jumps < scenario.jumps_max {
            actions.extend(scenario.jumps.iter().map(|by| Action::Jump(*by)));
        }
        if self.deaths < scenario.deaths_max {
            let alive = |client: &usize| {
                self.processes
                    .iter()
                    .any(|process| process.client == *client && process.state == State::Working)
            };
            actions.extend((0..self.rigs.len()).filter(alive).map(Action::Die));
        }
    }

    fn actions_of(&self, at: usize, actions: &mut Vec<Action>) {
        let process = &self.processes[at];
        match process.state {
            State::Over | State::Gone => {}
            State::Between => actions.push(Action::Begin(at)),
            State::Working => {
                let fabric = self.rigs[process.client].endpoint().fabric();
                let lane = fabric.lane(process.lane);
                match lane.phase {
                    Phase::Posted => {
                        actions.extend((0..lane.units.len()).map(|unit| Action::Access(at, unit)));
                    }
                    Phase::Waiting(_) => actions.push(Action::Wake(at)),
                    Phase::Complete => actions.push(Action::Complete(at)),
                    Phase::Idle => {}
                }
            }
        }
    }

    /// Whether the process that acted last is in the middle of something, so that to let another
    /// one act is to preempt it.
    pub(super) fn preempts(&self, action: Action) -> bool {
        let actor = match action {
            Action::Begin(process)
            | Action::Access(process, _)
            | Action::Wake(process)
            | Action::Complete(process) => Some(process),
            // Time and death have bounds of their own.
            Action::Jump(_) | Action::Die(_) => return false,
        };
        let Some(last) = self.last.filter(|last| Some(*last) != actor) else { return false };
        let process = &self.processes[last];
        process.state == State::Working && {
            let fabric = self.rigs[process.client].endpoint().fabric();
            matches!(fabric.lane(process.lane).phase, Phase::Posted | Phase::Complete)
        }
    }

    /// Lets it happen.
    pub(super) fn act(&mut self, action: Action) -> Result<(), Violation> {
        self.bound = false;
        match action {
            Action::Begin(at) => {
                self.last = Some(at);
                self.poll(at)?;
                self.poll_completed(at, self.lazy)?;
                let swift = self.prepared.scenario.clients[self.processes[at].client].swift;
                while swift && self.processes[at].state == State::Between {
                    self.poll(at)?;
                    self.poll_completed(at, false)?;
                }
                // Nothing happened yet: to begin later is the same.
                let process = &self.processes[at];
                self.bound = process.state == State::Working && {
                    let fabric = self.rigs[process.client].endpoint().fabric();
                    fabric.lane(process.lane).phase == Phase::Posted
                };
                Ok(())
            }
            Action::Access(at, unit) => {
                self.last = Some(at);
                let process = &self.processes[at];
                let rig = self.rigs[process.client].clone();
                rig.endpoint().fabric_mut().advance(process.lane, unit);
                self.poll_completed(at, self.lazy)
            }
            Action::Wake(at) => {
                self.last = Some(at);
                let process = &self.processes[at];
                let rig = self.rigs[process.client].clone();
                rig.endpoint().fabric_mut().wake(process.lane);
                self.poll_completed(at, false)
            }
            Action::Complete(at) => {
                self.last = Some(at);
                self.poll_completed(at, false)
            }
            Action::Jump(by) => {
                self.jumps += 1;
                // Whoever slept through it need not go on first.
                self.last = None;
                let mut world = self.world.borrow_mut();
                world.now += by;
                let now = world.now;
                if let Some(trace) = &mut world.trace {
                    trace.push(Line { now, process: None, text: format!("{by} ns pass") });
                }
                Ok(())
            }
            Action::Die(client) => {
                self.deaths += 1;
                for at in 0..self.processes.len() {
                    if self.processes[at].client == client {
                        self.processes[at].state = State::Gone;
                        self.world.borrow_mut().note(at, || "dies".to_owned());
                    }
                }
                Ok(())
            }
        }
    }

    /// Polls a process as long as its chains complete without anybody noticing.
    fn poll_completed(&mut self, at: usize, lazy: bool) -> Result<(), Violation> {
        while self.processes[at].state == State::Working {
            let process = &self.processes[at];
            let rig = self.rigs[process.client].clone();
            let phase = rig.endpoint().fabric().lane(process.lane).phase;
            if phase != Phase::Complete || lazy {
                break;
            }
            self.poll(at)?;
        }
        Ok(())
    }

    fn poll(&mut self, at: usize) -> Result<(), Violation> {
        let process = &mut self.processes[at];
        let rig = self.rigs[process.client].clone();
        rig.endpoint().fabric_mut().turn = process.lane;
        rig.endpoint().try_step(|_| ());
        rig.endpoint().tick();
        if process.state == State::Between {
            // Up to where the next operation begins.
            process.chains = 0;
            process.began += 1;
            process.state = State::Working;
        }
        let mut context = Context::from_waker(Waker::noop());
        let _ = process.task.as_mut().poll(&mut context);
        process.chains += 1;
        loop {
            let event = self.processes[at].events.borrow_mut().pop_front();
            let Some(event) = event else { break };
            self.handle(at, event)?;
        }
        let process = &mut self.processes[at];
        if process.state == State::Working && process.chains > self.prepared.scenario.chains_max {
            process.state = State::Gone;
            self.world.borrow_mut().note(at, || "has used up its chains".to_owned());
        }
        let process = &self.processes[at];
        let stuck = process.state == State::Working
            && rig.endpoint().fabric().lane(process.lane).phase == Phase::Idle;
        if stuck { Err(Violation::Stuck(at)) } else { Ok(()) }
    }

    fn handle(&mut self, at: usize, event: Event) -> Result<(), Violation> {
        match event {
            Event::Invoke(asked) => {
                let id = self.monitor.invoke(at, self.processes[at].began, &asked);
                let record = self.monitor.record(id);
                let text = format!("{:?} {}", record.operation, record.key).to_uppercase();
                self.world.borrow_mut().note(at, || text);
            }
            Event::Respond(key, reply) => {
                let id = Monitor::id(at, self.processes[at].began);
                let outcome = self.monitor.respond(id, key, &reply);
                let record = self.monitor.record(id);
                if let Some(version) = &record.version {
                    let number = u64::from_str_radix(version, 16).unwrap_or(0);
                    self.processes[at].seen ^= mix(key as u64, number);
                }
                let text = format!("ends: {record}");
                self.world.borrow_mut().note(at, || text);
                outcome?;
                self.processes[at].state = State::Between;
                self.forget_the_past(at);
            }
            Event::Skip => self.processes[at].state = State::Between,
            Event::Over => self.processes[at].state = State::Over,
        }
        Ok(())
    }

    /// Once all lanes of a client are between operations, only what the session remembers matters.
    fn forget_the_past(&mut self, at: usize) {
        let client = self.processes[at].client;
        let idle = |process: &Process| {
            process.client != client || matches!(process.state, State::Between | State::Over)
        };
        if self.processes.iter().all(idle) {
            let mut hasher = std::hash::DefaultHasher::new();
            self.rigs[client].hash_state(&mut hasher);
            self.rigs[client].endpoint().fabric_mut().observed = hasher.finish();
        }
    }

    /// A hash of everything that decides about the rest.
    pub(super) fn state(&self, bounded: bool) -> u64 {
        let world = self.world.borrow();
        let mut hash = mix(world.memory.hash(), mix(world.now, self.monitor.state()));
        for rig in &self.rigs {
            hash = mix(hash, rig.endpoint().fabric().observed);
        }
        for process in &self.processes {
            let fabric = self.rigs[process.client].endpoint().fabric();
            let lane = fabric.lane(process.lane);
            let state = process.state as u64 | u64::from(process.chains) << 8;
            let script = mix(process.seen, u64::from(process.began));
            hash = mix(hash, mix(lane.progress, mix(state, script)));
        }
        let last = if bounded || self.bound { self.last.map_or(0, |last| last + 1) } else { 0 };
        let counts = u64::from(self.jumps) << 8 | u64::from(self.deaths);
        mix(hash, mix(last as u64, counts << 1 | u64::from(self.bound)))
    }

    /// The end: everybody is done or gone. Somebody new looks at every key, and the region has to
    /// be whole.
    pub(super) fn finish(&mut self) -> Result<(), Violation> {
        let open = |process: &Process| matches!(process.state, State::Between | State::Working);
        if let Some(at) = self.processes.iter().position(open) {
            return Err(Violation::Stuck(at));
        }
        let observer = self.processes.len();
        let rig = self.prepared.open(&self.world, self.rigs.len() + 1, observer, 1, None);
        self.world.borrow_mut().note(observer, || "looks at everything".to_owned());
        for key in 0..super::KEYS {
            let asked = Asked { op: Op::Get(key), value: String::new(), expected: None };
            let id = self.monitor.invoke(observer, key as u32, &asked);
            let reply = rig.endpoint().drive(rig.run(LaneId(0), Call::Get, &keys()[key]));
            self.monitor.respond(id, key, &reply)?;
        }
        let world = self.world.borrow();
        world.ground.inspect(&world.memory)
    }
}
