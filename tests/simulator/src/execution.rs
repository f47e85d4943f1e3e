//! One execution of a scenario: the possible next actions, and their effects.

mod losses;
mod pauses;
mod start;
mod verdict;

use std::cell::{RefCell, RefMut};
use std::hash::Hasher;
use std::rc::Rc;
use std::task::{Context, Waker};

use farside_fabric::{LaneId, Nanos};
use farside_protocol::split::SplitProgress;

use crate::fabric::{PAUSE_NS_MAX, SimFabric};
use crate::lane::Phase;
use crate::memory::mix;
use crate::monitor::{Monitor, Violation};
use crate::prepared::Prepared;
use crate::process::{Process, SchedulerAction, State};
use crate::scenario::{Chore, EventCounts};
use crate::script::{Op, Script};
use crate::session::TestSession;
use crate::task::Event;
use crate::trace::Line;
use crate::turns;
use crate::world::World;

/// The state of an execution.
pub(crate) struct Execution<'s> {
    prepared: &'s Prepared<'s>,
    pub(crate) world: Rc<RefCell<World>>,
    sessions: Vec<Rc<TestSession>>,
    processes: Vec<Process>,
    pub(crate) monitor: Monitor,
    /// The process that acted last.
    last: Option<usize>,
    /// Only `last` may act, because no other process can notice its present step.
    bound: bool,
    /// The events that have happened.
    events: EventCounts,
    /// Each client's id on its present connection.
    ids: Vec<u16>,
    /// The clients that died or lost their connection, and that the server has not fenced yet.
    lost_clients: Vec<u16>,
    /// The number of connections besides each client's first.
    reopened: usize,
    /// Whether a completion is a step of its own, so that other processes can act before it.
    late_completions: bool,
    /// A session with the directory of the start, which reads all keys at the end.
    observer: Option<Rc<TestSession>>,
}

impl Execution<'_> {
    /// Collects all possible next actions. Those of the process that acted last come first.
    pub(crate) fn actions(&self, actions: &mut Vec<SchedulerAction>) {
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
        let clients = 0..self.prepared.scenario.clients.len();
        actions.extend(clients.filter(|c| self.is_paused(*c)).map(SchedulerAction::Resume));
        if actions.is_empty() {
            return;
        }
        let scenario = self.prepared.scenario;
        if self.events.jumps < scenario.limits.jumps {
            actions.extend(scenario.jumps.iter().map(|by| SchedulerAction::Jump(*by)));
        }
        if self.events.deaths < scenario.limits.deaths {
            let alive = |client: &usize| self.is_working(*client);
            actions.extend((0..scenario.clients.len()).filter(alive).map(SchedulerAction::Die));
        }
        self.add_losses(actions);
        actions.extend(self.pausable().map(SchedulerAction::Pause));
        if self.events.split_restarts < scenario.limits.split_restarts && self.is_splitting() {
            actions.push(SchedulerAction::RestartSplit);
        }
    }

    fn is_working(&self, client: usize) -> bool {
        let mut processes = self.processes.iter();
        processes.any(|process| process.client == client && process.state == State::Working)
    }

    fn actions_of(&self, at: usize, actions: &mut Vec<SchedulerAction>) {
        let process = &self.processes[at];
        match process.state {
            State::Finished | State::Gone => {}
            State::Between if self.has_nothing_to_do(at) => {}
            State::Between if self.is_paused(process.client) => {}
            State::Between => actions.push(SchedulerAction::Begin(at)),
            State::Working | State::Dying => {
                let fabric = self.sessions[process.client].endpoint().fabric();
                for id in process.lanes() {
                    let lane = fabric.lane(id);
                    match lane.phase {
                        Phase::Posted => {
                            let access = |unit| SchedulerAction::Access(at, id, unit);
                            actions.extend((0..lane.units.len()).map(access));
                        }
                        _ if process.state == State::Dying || fabric.clock.stopped_at.is_some() => {
                        }
                        Phase::Waiting(until) if self.is_in_vain(process, until) => {}
                        Phase::Waiting(_) => actions.push(SchedulerAction::Wake(at, id)),
                        Phase::Complete => actions.push(SchedulerAction::Complete(at, id)),
                        Phase::Idle => {}
                    }
                }
            }
        }
    }

    /// Whether nothing has changed since the process began the wait before this one.
    fn is_in_vain(&self, process: &Process, until: Nanos) -> bool {
        let pause = until.saturating_sub(self.world.borrow().now);
        pause <= PAUSE_NS_MAX && process.waits[0] == Some(self.moment())
    }

    /// A hash of the state that a waiting process could see.
    fn moment(&self) -> u64 {
        let world = self.world.borrow();
        mix(world.memory.hash(), world.now << 1 | u64::from(world.split.is_some()))
    }

    /// Whether the action preempts the process that acted last: that process has a chain in flight,
    /// and another process acts.
    pub(crate) fn preempts(&self, action: SchedulerAction) -> bool {
        // Events have bounds of their own.
        let Some(actor) = action.process() else { return false };
        let Some(last) = self.last.filter(|last| *last != actor) else { return false };
        let process = &self.processes[last];
        process.state == State::Working && {
            let fabric = self.sessions[process.client].endpoint().fabric();
            let busy = |lane| matches!(fabric.lane(lane).phase, Phase::Posted | Phase::Complete);
            process.lanes().any(busy)
        }
    }

    /// Executes an action.
    pub(crate) fn act(&mut self, action: SchedulerAction) -> Result<(), Violation> {
        self.bound = false;
        match action {
            SchedulerAction::Begin(at) => self.start_operation(at)?,
            SchedulerAction::Access(at, lane, unit) => {
                self.last = Some(at);
                self.fabric_mut(at).advance(lane, unit);
                self.poll_completed(at, self.late_completions)?;
                self.bind(at);
            }
            SchedulerAction::Wake(at, lane) => {
                self.last = Some(at);
                self.fabric_mut(at).noticed = true;
                self.fabric_mut(at).wake(lane);
                self.poll_lane(at, lane)?;
                self.poll_completed(at, self.late_completions)?;
            }
            SchedulerAction::Complete(at, lane) => {
                self.last = Some(at);
                self.poll_lane(at, lane)?;
                self.poll_completed(at, self.late_completions)?;
            }
            SchedulerAction::RestartSplit => self.restart_split(),
            SchedulerAction::Jump(by) => {
                self.events.jumps += 1;
                // After a jump any process may act next without a preemption.
                self.last = None;
                let mut world = self.world.borrow_mut();
                world.now += by;
                let now = world.now;
                if let Some(trace) = &mut world.trace {
                    trace.push(Line { now, process: None, text: format!("{by} ns pass") });
                }
            }
            SchedulerAction::Pause(client) => self.pause(client),
            SchedulerAction::Resume(client) => self.resume(client)?,
            SchedulerAction::Die(client) => self.die(client),
            SchedulerAction::Lose(client, whole) => self.lose(client, whole)?,
            SchedulerAction::RestartServer => self.renew()?,
        }
        if self.prepared.raises_counts {
            turns::check(&self.world.borrow().memory).map_err(Violation::Damaged)?;
        }
        Ok(())
    }

    /// Lets a process begin its next operation or chore.
    fn start_operation(&mut self, at: usize) -> Result<(), Violation> {
        self.last = Some(at);
        self.fabric_mut(at).noticed = self.is_entangled(at);
        if self.chore(at) == Some(Chore::Sweep) {
            self.fence()?;
        }
        self.poll(at)?;
        if self.acts_in_one_step(at) {
            self.poll_completed(at, false)?;
            while self.processes[at].state == State::Between && !self.is_yielding(at) {
                self.poll(at)?;
                self.poll_completed(at, false)?;
            }
        }
        if self.prepared.scenario.clients.len() == self.processes[at].client {
            // No client notices most of the splitter's steps.
            self.poll_completed(at, self.late_completions)?;
        }
        self.bind(at);
        Ok(())
    }

    fn fabric_mut(&self, at: usize) -> RefMut<'_, SimFabric> {
        self.sessions[self.processes[at].client].endpoint().fabric_mut()
    }

    /// Binds the next step to a process whose steps no other process could notice yet. To let
    /// others act first would be the same as to begin later.
    fn bind(&mut self, at: usize) {
        let process = &self.processes[at];
        let fabric = self.sessions[process.client].endpoint().fabric();
        let posted = |lane| fabric.lane(lane).phase == Phase::Posted;
        self.bound =
            process.state == State::Working && !fabric.noticed && process.lanes().any(posted);
    }

    fn acts_in_one_step(&self, at: usize) -> bool {
        let script = self.prepared.scenario.clients.get(self.processes[at].client);
        script.is_some_and(|script| script.in_one_step)
    }

    /// Whether other sessions of the client, or other users of the depot, notice the process
    /// between its chains.
    fn is_entangled(&self, at: usize) -> bool {
        let script = self.prepared.scenario.clients.get(self.processes[at].client);
        script.is_some_and(Script::is_entangled)
    }

    fn is_yielding(&self, at: usize) -> bool {
        let process = &self.processes[at];
        let script = &self.prepared.scenario.clients[process.client];
        matches!(script.lanes[0].get(process.operations_begun as usize), Some(Op::Yield))
    }

    /// Polls a process as long as it has completions that no other process could notice.
    fn poll_completed(&mut self, at: usize, late_completions: bool) -> Result<(), Violation> {
        if self.is_paused(self.processes[at].client) {
            return Ok(());
        }
        let late_completions =
            late_completions || self.is_entangled(at) && !self.acts_in_one_step(at);
        while self.processes[at].state == State::Working && !late_completions {
            let process = &self.processes[at];
            let complete = {
                let fabric = self.sessions[process.client].endpoint().fabric();
                process.lanes().find(|lane| fabric.lane(*lane).phase == Phase::Complete)
            };
            let Some(lane) = complete else { break };
            self.poll_lane(at, lane)?;
        }
        Ok(())
    }

    fn poll(&mut self, at: usize) -> Result<(), Violation> {
        self.poll_lane(at, self.processes[at].lane)
    }

    /// Polls a process with this lane's completion.
    fn poll_lane(&mut self, at: usize, lane: LaneId) -> Result<(), Violation> {
        let process = &mut self.processes[at];
        let session = self.sessions[process.client].clone();
        session.endpoint().fabric_mut().turn = lane;
        session.endpoint().try_step(|_| ());
        session.endpoint().tick();
        if process.state == State::Between {
            // The first poll of an operation begins it.
            process.chains = 0;
            process.waits = [None; 2];
            process.operations_begun += 1;
            process.state = State::Working;
        }
        self.note_shared(at);
        let process = &mut self.processes[at];
        let mut context = Context::from_waker(Waker::noop());
        let _ = process.task.as_mut().poll(&mut context);
        process.chains += 1;
        loop {
            let event = self.processes[at].events.borrow_mut().pop_front();
            let Some(event) = event else { break };
            self.handle(at, event)?;
        }
        let process = &mut self.processes[at];
        let is_client = process.client < self.prepared.scenario.clients.len();
        let too_many = is_client && process.chains > self.prepared.scenario.chains_max;
        if process.state == State::Working && too_many {
            process.state = State::Gone;
            self.world.borrow_mut().note(at, || "has used up its chains".to_owned());
        }
        let moment = self.moment();
        let process = &mut self.processes[at];
        let fabric = session.endpoint().fabric();
        let phase = |lane| fabric.lane(lane).phase;
        if let Phase::Waiting(_) = phase(process.lane) {
            process.waits = [process.waits[1], Some(moment)];
        }
        let idle = process.lanes().all(|lane| phase(lane) == Phase::Idle);
        if process.state == State::Working && idle { Err(Violation::Stuck(at)) } else { Ok(()) }
    }

    fn handle(&mut self, at: usize, event: Event) -> Result<(), Violation> {
        match event {
            Event::Invoke(asked) => {
                let id = self.monitor.invoke(at, self.processes[at].operations_begun, &asked);
                let record = self.monitor.record(id);
                let text = || format!("{:?} {}", record.operation, record.key).to_uppercase();
                self.world.borrow_mut().note(at, text);
            }
            Event::Respond(key, reply) => {
                let id = Monitor::id(at, self.processes[at].operations_begun);
                let outcome = self.monitor.respond(id, key, &reply);
                let record = self.monitor.record(id);
                if let Some(version) = &record.version {
                    let number = u64::from_str_radix(version, 16).unwrap_or(0);
                    self.processes[at].seen ^= mix(key as u64, number);
                }
                self.world.borrow_mut().note(at, || format!("ends: {record}"));
                outcome?;
                self.processes[at].state = State::Between;
                self.forget_the_past(at);
            }
            Event::Skip => self.processes[at].state = State::Between,
            Event::Split(progress) => {
                let mut world = self.world.borrow_mut();
                world.split = Some(progress);
                world.note(at, || format!("ends the split: {progress:?}"));
                if progress != SplitProgress::Done {
                    return Err(Violation::Failed(format!("the split is {progress:?}")));
                }
            }
            Event::Swept(clients) => self.check_swept(at, &clients)?,
            Event::Lost { next, again, seen } => self.reopen(at, next, again, seen),
            Event::Finished => self.processes[at].state = State::Finished,
        }
        Ok(())
    }

    /// Once all lanes of a client are between operations, only what the session remembers matters
    /// when states are compared.
    fn forget_the_past(&mut self, at: usize) {
        if self.world.borrow().word_by_word {
            return;
        }
        let client = self.processes[at].client;
        let idle = |process: &Process| {
            process.client != client || matches!(process.state, State::Between | State::Finished)
        };
        if self.processes.iter().all(idle) {
            let mut hasher = std::hash::DefaultHasher::new();
            self.sessions[client].hash_state(&mut hasher);
            self.sessions[client].endpoint().fabric_mut().observed = hasher.finish();
        }
    }
}
