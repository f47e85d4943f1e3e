//! One execution of a scenario: who can do what next, and what it leads to.

use std::cell::RefCell;
use std::hash::Hasher;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};

use farside::testing::{Call, Rig};
use farside_common::fabric::{LaneId, Nanos};

use super::fabric::{Phase, SimFabric};
use super::ground::keys;
use super::memory::mix;
use super::monitor::{Asked, Monitor, Violation};
use super::prepared::Prepared;
use super::scenario::Op;
use super::task::{Event, Events};
use super::trace::Line;
use super::world::World;

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
pub(super) enum State {
    /// Between two operations.
    Between,
    Working,
    Over,
    /// It died, or has used up its chains.
    Gone,
}

pub(super) struct Process {
    pub(super) client: usize,
    pub(super) lane: LaneId,
    pub(super) task: Pin<Box<dyn Future<Output = ()>>>,
    pub(super) events: Events,
    pub(super) state: State,
    pub(super) chains: u32,
    /// How many operations it began.
    pub(super) began: u32,
    /// A hash of what its script remembers.
    pub(super) seen: u64,
}

/// An execution so far.
pub(super) struct Execution<'s> {
    pub(super) prepared: &'s Prepared<'s>,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) rigs: Vec<Rc<Rig<SimFabric>>>,
    pub(super) processes: Vec<Process>,
    pub(super) monitor: Monitor,
    /// Who acted last, and must go on because nothing happened yet since it began.
    pub(super) last: Option<usize>,
    pub(super) bound: bool,
    pub(super) jumps: u32,
    pub(super) deaths: u32,
    /// Completions are events of their own.
    pub(super) lazy: bool,
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
                if self.prepared.scenario.clients[self.processes[at].client].swift {
                    self.poll_completed(at, false)?;
                    while self.processes[at].state == State::Between {
                        self.poll(at)?;
                        self.poll_completed(at, false)?;
                    }
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
