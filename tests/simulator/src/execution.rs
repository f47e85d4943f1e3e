//! One execution of a scenario: its start, the possible next actions and their effects, the hash by
//! which the search recognizes equal states, and the checks at the end.

mod cluster;
mod losses;

use std::cell::{RefCell, RefMut};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::task::{Context, Waker};

use farside_fabric::{Buffer, LaneId, Nanos};
use farside_linearizability::HistoryOperation;
use farside_protocol::Action;
use farside_protocol::split::SplitProgress;

use crate::cluster::{ClusterClient, ClusterState};
use crate::fabric::{PAUSE_NS_MAX, Phase, SimFabric};
use crate::memory::mix;
use crate::monitor::{Monitor, RequestedOperation, Violation};
use crate::mutant::Mutant;
use crate::prepared::{Prepared, client_id, drive, name};
use crate::process::{
    Event, Events, Process, Reading, SchedulerAction, State, check_two_regions, run_script,
};
use crate::region::{KEYS, keys};
use crate::scenario::{Chore, EventCounts};
use crate::script::{Op, Script};
use crate::session::{Reply, TestSession};
use crate::world::{Line, SimDepot, World};

/// The state of an execution. `actor` is the index of the process that a method acts for.
pub(crate) struct Execution<'s> {
    prepared: &'s Prepared<'s>,
    pub(crate) world: Rc<RefCell<World>>,
    sessions: Vec<Rc<TestSession>>,
    processes: Vec<Process>,
    pub(crate) monitor: Monitor,
    /// The index of the process that acted last.
    last: Option<usize>,
    /// Whether only `last` may act, because no other process can notice its present step.
    last_continues: bool,
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
    /// Collects all possible next actions. The actions of the process that acted last come first.
    pub(crate) fn actions(&self, actions: &mut Vec<SchedulerAction>) {
        actions.clear();
        if let Some(last) = self.last {
            self.actions_of(last, actions);
            if self.last_continues {
                return;
            }
        }
        for process in (0..self.processes.len()).filter(|process| Some(*process) != self.last) {
            self.actions_of(process, actions);
        }
        let clients = 0..self.prepared.scenario.clients.len();
        actions.extend(clients.filter(|c| self.is_paused(*c)).map(SchedulerAction::Resume));
        if actions.is_empty() && !self.has_offline_process() {
            return;
        }
        self.add_cluster_events(actions);
        let scenario = self.prepared.scenario;
        if self.events.jumps < scenario.limits.jumps && self.is_time_of_interest() {
            actions.extend(scenario.jumps.iter().map(|time| SchedulerAction::Jump(*time)));
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
        let is_busy = |state| matches!(state, State::Working | State::Offline);
        let mut processes = self.processes.iter();
        processes.any(|process| process.client == client && is_busy(process.state))
    }

    fn actions_of(&self, actor: usize, actions: &mut Vec<SchedulerAction>) {
        let process = &self.processes[actor];
        match process.state {
            State::Finished | State::Gone | State::Offline => {}
            State::Between if self.has_nothing_to_do(actor) => {}
            State::Between if self.is_paused(process.client) => {}
            State::Between => actions.push(SchedulerAction::Begin(actor)),
            State::Working | State::Dying => {
                let fabric = self.sessions[process.client].endpoint().fabric();
                for id in process.lanes() {
                    let lane = fabric.lane(id);
                    match lane.phase {
                        Phase::Posted => {
                            let access = |unit| SchedulerAction::Access(actor, id, unit);
                            actions.extend((0..lane.units.len()).map(access));
                        }
                        _ if process.state == State::Dying || fabric.clock.stopped_at.is_some() => {
                        }
                        Phase::Waiting(until) if self.is_in_vain(process, until) => {}
                        Phase::Waiting(_) => actions.push(SchedulerAction::Wake(actor, id)),
                        Phase::Complete => actions.push(SchedulerAction::Complete(actor, id)),
                        Phase::Idle => {}
                    }
                }
            }
        }
    }

    /// Whether nothing has changed since the process began its previous wait.
    fn is_in_vain(&self, process: &Process, until: Nanos) -> bool {
        let pause = until.saturating_sub(self.world.borrow().now);
        pause <= PAUSE_NS_MAX && process.waits[0] == Some(self.visible_state())
    }

    /// Returns a hash of the state that a waiting process could see.
    fn visible_state(&self) -> u64 {
        let world = self.world.borrow();
        mix(world.memory.hash(), world.now << 1 | u64::from(world.split.is_some()))
    }

    /// Whether the action preempts the process that acted last: that process has a chain in flight,
    /// and another process acts, or something happens in the cluster.
    pub(crate) fn preempts(&self, action: SchedulerAction) -> bool {
        let actor = action.process();
        // Other events have bounds of their own.
        if actor.is_none() && !matches!(action, SchedulerAction::Cluster(_)) {
            return false;
        }
        let Some(last) = self.last.filter(|last| Some(*last) != actor) else { return false };
        let process = &self.processes[last];
        process.state == State::Working && {
            let fabric = self.sessions[process.client].endpoint().fabric();
            let busy = |lane| matches!(fabric.lane(lane).phase, Phase::Posted | Phase::Complete);
            process.lanes().any(busy)
        }
    }

    /// Executes an action.
    pub(crate) fn act(&mut self, action: SchedulerAction) -> Result<(), Violation> {
        self.last_continues = false;
        match action {
            SchedulerAction::Begin(actor) => self.start_operation(actor)?,
            SchedulerAction::Access(actor, lane, unit) => {
                self.last = Some(actor);
                self.fabric_mut(actor).advance(lane, unit);
                self.poll_completed(actor, self.late_completions)?;
                self.let_unnoticed_continue(actor);
            }
            SchedulerAction::Wake(actor, lane) => {
                self.last = Some(actor);
                self.fabric_mut(actor).noticed = true;
                self.fabric_mut(actor).wake(lane);
                self.poll_lane(actor, lane)?;
                self.poll_completed(actor, self.late_completions)?;
            }
            SchedulerAction::Complete(actor, lane) => {
                self.last = Some(actor);
                self.poll_lane(actor, lane)?;
                self.poll_completed(actor, self.late_completions)?;
            }
            SchedulerAction::RestartSplit => self.restart_split(),
            SchedulerAction::Jump(time) => {
                self.events.jumps += 1;
                // After a jump any process may act next without a preemption.
                self.last = None;
                let mut world = self.world.borrow_mut();
                world.now += time;
                let now = world.now;
                if let Some(trace) = &mut world.trace {
                    trace.push(Line { now, process: None, text: format!("{time} ns pass") });
                }
            }
            SchedulerAction::Pause(client) => self.pause(client),
            SchedulerAction::Resume(client) => self.resume(client)?,
            SchedulerAction::Die(client) => self.die(client),
            SchedulerAction::Lose(client, whole) => self.lose(client, whole)?,
            SchedulerAction::RestartServer => self.restart_server()?,
            SchedulerAction::Cluster(event) => self.act_in_cluster(event)?,
        }
        self.check_former()?;
        if let Some(extent) = self.world.borrow().unheld_extent {
            return Err(Violation::Unheld(extent.claimed_offset()));
        }
        if self.prepared.changes_two_regions {
            check_two_regions(&self.world.borrow().memory).map_err(Violation::Damaged)?;
        }
        Ok(())
    }

    /// Lets a process begin its next operation or chore.
    fn start_operation(&mut self, actor: usize) -> Result<(), Violation> {
        self.last = Some(actor);
        self.fabric_mut(actor).noticed = self.is_entangled(actor);
        if self.chore(actor) == Some(Chore::Sweep) {
            self.fence()?;
        }
        self.poll(actor)?;
        if self.acts_in_one_step(actor) {
            self.poll_completed(actor, false)?;
            while self.processes[actor].state == State::Between && !self.is_yielding(actor) {
                self.poll(actor)?;
                self.poll_completed(actor, false)?;
            }
        }
        if self.prepared.scenario.clients.len() == self.processes[actor].client {
            // No client notices most of the splitter's steps.
            self.poll_completed(actor, self.late_completions)?;
        }
        self.let_unnoticed_continue(actor);
        Ok(())
    }

    fn fabric_mut(&self, actor: usize) -> RefMut<'_, SimFabric> {
        self.sessions[self.processes[actor].client].endpoint().fabric_mut()
    }

    /// Lets only this process act next if no other process could notice its steps yet. If others
    /// acted first, the execution would be one in which this process begins later.
    fn let_unnoticed_continue(&mut self, actor: usize) {
        let process = &self.processes[actor];
        let fabric = self.sessions[process.client].endpoint().fabric();
        let posted = |lane| fabric.lane(lane).phase == Phase::Posted;
        // The times at which a chain is posted and executed matter to a cluster.
        self.last_continues = !self.prepared.scenario.moves
            && process.state == State::Working
            && !fabric.noticed
            && process.lanes().any(posted);
    }

    fn acts_in_one_step(&self, actor: usize) -> bool {
        let script = self.prepared.scenario.clients.get(self.processes[actor].client);
        script.is_some_and(|script| script.in_one_step)
    }

    /// Whether other sessions of the client, or other users of the depot, notice the process
    /// between its chains.
    fn is_entangled(&self, actor: usize) -> bool {
        let script = self.prepared.scenario.clients.get(self.processes[actor].client);
        script.is_some_and(Script::is_entangled)
    }

    fn is_yielding(&self, actor: usize) -> bool {
        let process = &self.processes[actor];
        let script = &self.prepared.scenario.clients[process.client];
        matches!(script.lanes[0].get(process.operations_begun as usize), Some(Op::Yield))
    }

    /// Polls a process while it has completions that no other process could notice.
    fn poll_completed(&mut self, actor: usize, late_completions: bool) -> Result<(), Violation> {
        if self.is_paused(self.processes[actor].client) {
            return Ok(());
        }
        let late_completions =
            late_completions || self.is_entangled(actor) && !self.acts_in_one_step(actor);
        while self.processes[actor].state == State::Working && !late_completions {
            let process = &self.processes[actor];
            let complete = {
                let fabric = self.sessions[process.client].endpoint().fabric();
                process.lanes().find(|lane| fabric.lane(*lane).phase == Phase::Complete)
            };
            let Some(lane) = complete else { break };
            self.poll_lane(actor, lane)?;
        }
        Ok(())
    }

    fn poll(&mut self, actor: usize) -> Result<(), Violation> {
        self.poll_lane(actor, self.processes[actor].lane)
    }

    /// Polls a process with this lane's completion.
    fn poll_lane(&mut self, actor: usize, lane: LaneId) -> Result<(), Violation> {
        let process = &mut self.processes[actor];
        let session = self.sessions[process.client].clone();
        session.endpoint().fabric_mut().polled_lane = lane;
        session.endpoint().try_step(|_| ());
        session.endpoint().tick();
        if process.state == State::Between {
            // The first poll of an operation begins it.
            process.chains = 0;
            process.waits = [None; 2];
            process.operations_begun += 1;
            process.state = State::Working;
        }
        self.note_shared(actor);
        let process = &mut self.processes[actor];
        let mut context = Context::from_waker(Waker::noop());
        let _ = process.task.as_mut().poll(&mut context);
        process.chains += 1;
        loop {
            let event = self.processes[actor].events.borrow_mut().pop_front();
            let Some(event) = event else { break };
            self.handle(actor, event)?;
        }
        let process = &mut self.processes[actor];
        let is_client = process.client < self.prepared.scenario.clients.len();
        let too_many = is_client && process.chains > self.prepared.scenario.chains_max;
        if process.state == State::Working && too_many {
            process.state = State::Gone;
            self.world.borrow_mut().note(actor, || "has used up its chains".to_owned());
        }
        let visible_state = self.visible_state();
        let process = &mut self.processes[actor];
        let fabric = session.endpoint().fabric();
        let phase = |lane| fabric.lane(lane).phase;
        if let Phase::Waiting(_) = phase(process.lane) {
            process.waits = [process.waits[1], Some(visible_state)];
        }
        let idle = process.lanes().all(|lane| phase(lane) == Phase::Idle);
        if process.state == State::Working && idle { Err(Violation::Stuck(actor)) } else { Ok(()) }
    }

    /// Tells the checker which values have expired.
    fn note_time(&mut self) -> Result<(), Violation> {
        let now_ms = self.world.borrow().now / 1_000_000;
        if self.prepared.has_expiries && self.monitor.advance(now_ms)? {
            self.world.borrow_mut().note_event(|| "values have expired".to_owned());
        }
        Ok(())
    }

    fn handle(&mut self, actor: usize, event: Event) -> Result<(), Violation> {
        self.note_time()?;
        match event {
            Event::Invoke(requested) => {
                let id =
                    self.monitor.invoke(actor, self.processes[actor].operations_begun, &requested);
                let record = self.monitor.record(id);
                let text = || format!("{:?} {}", record.operation, record.key).to_uppercase();
                self.world.borrow_mut().note(actor, text);
            }
            Event::Respond(key, reply) => {
                let id = Monitor::id(actor, self.processes[actor].operations_begun);
                let outcome = self.monitor.respond(id, key, &reply);
                let record = self.monitor.record(id);
                if let Ok(Reply { found: Some(found), .. }) = &reply {
                    let key = u64::from(found.region.0) << 8 | key as u64;
                    self.processes[actor].seen ^= mix(key, found.version.to_u64());
                }
                self.world.borrow_mut().note(actor, || format!("ends: {record}"));
                let is_get = record.operation == HistoryOperation::Get;
                outcome?;
                self.check_used(&self.sessions[self.processes[actor].client], is_get)?;
                self.processes[actor].state = State::Between;
                self.keep_session_state(actor);
            }
            Event::Removed(key, reply) => {
                let id = Monitor::id(actor, self.processes[actor].operations_begun);
                let outcome = self.monitor.respond(id, key, &reply);
                let record = self.monitor.record(id);
                self.world.borrow_mut().note(actor, || format!("ends: {record}"));
                outcome?;
            }
            Event::Skip => self.processes[actor].state = State::Between,
            Event::Split(progress) => {
                let mut world = self.world.borrow_mut();
                world.split = Some(progress);
                world.note(actor, || format!("ends the split: {progress:?}"));
                if progress != SplitProgress::Done {
                    return Err(Violation::Failed(format!("the split is {progress:?}")));
                }
            }
            Event::Swept(clients) => self.check_swept(actor, &clients)?,
            Event::Lost { next, is_invoked, seen } => self.reopen(actor, next, is_invoked, seen),
            Event::Offline => {
                self.processes[actor].state = State::Offline;
                self.world.borrow_mut().note(actor, || "has no connection to the shard".to_owned());
                self.keep_observed(self.processes[actor].client);
            }
            Event::Finished => self.processes[actor].state = State::Finished,
        }
        Ok(())
    }

    /// Replaces a client's observations by the state of its session, once all its lanes are between
    /// operations. Nothing else that the client observed affects its later operations.
    fn keep_session_state(&mut self, actor: usize) {
        if self.world.borrow().word_by_word {
            return;
        }
        let client = self.processes[actor].client;
        let idle = |process: &Process| {
            process.client != client || matches!(process.state, State::Between | State::Finished)
        };
        if self.processes.iter().all(idle) {
            self.keep_observed(client);
        }
    }

    /// Replaces a client's observations by the state of its session, with the buffer from which an
    /// operation is run again.
    fn keep_observed(&self, client: usize) {
        let mut hasher = std::hash::DefaultHasher::new();
        self.sessions[client].hash_state(&mut hasher);
        for process in self.processes.iter().filter(|process| process.client == client) {
            if process.state == State::Offline {
                let endpoint = self.sessions[client].endpoint();
                endpoint.buffer(process.lane, Buffer::NewBlock).hash(&mut hasher);
            }
        }
        let mut fabric = self.sessions[client].endpoint().fabric_mut();
        fabric.observed = hasher.finish();
        fabric.lanes.iter_mut().for_each(|lane| lane.posted_times = 0);
    }
}

/// The process that the history names as the writer of the first values.
const STORER: usize = 99;

impl<'s> Execution<'s> {
    /// Starts an execution. Every client has connected, and has cached the keys that it knows.
    /// Without `preemptible_words`, every word that can change is preemptible.
    pub(crate) fn begin(
        prepared: &'s Prepared<'s>,
        preemptible_words: Option<Rc<BTreeSet<usize>>>,
        trace: bool,
    ) -> Self {
        let scenario = prepared.scenario;
        let late_completions = preemptible_words.is_none();
        let is_preemptible = match preemptible_words {
            None => prepared.can_change.clone(),
            Some(words) => {
                let mut is_preemptible = vec![false; prepared.memory.len()];
                words.iter().for_each(|word| is_preemptible[*word] = true);
                is_preemptible
            }
        };
        let (region, memory) = (prepared.region.clone(), prepared.memory.clone());
        let mut world =
            World::new(region, memory, is_preemptible, late_completions, scenario.round_trip_ns);
        world.cluster = scenario.moves.then(ClusterState::new);
        let mut execution = Self {
            prepared,
            world: Rc::new(RefCell::new(world)),
            sessions: Vec::new(),
            processes: Vec::new(),
            monitor: Monitor::new(),
            last: None,
            last_continues: false,
            events: EventCounts::default(),
            ids: Vec::new(),
            lost_clients: Vec::new(),
            reopened: 0,
            late_completions,
            observer: None,
        };
        for key in &scenario.stored {
            let expires = scenario.expiring.contains(key);
            let op = if expires { Op::PutTtl(*key) } else { Op::Put(*key) };
            let requested = RequestedOperation::of(op, format!("i{key}"), None);
            let id = execution.monitor.invoke(STORER, *key as u32, &requested);
            let stored = Ok(Reply { done: true, found: None });
            execution.monitor.respond(id, *key, &stored).expect("the first values");
        }
        for (client, script) in scenario.clients.iter().enumerate() {
            execution.connect(client, script);
        }
        let (client, actor) = (execution.sessions.len(), execution.processes.len());
        if scenario.split.is_some() {
            let observer = prepared.open(&execution.world, client + 2, actor + 1, 1, None);
            execution.observer = Some(Rc::new(observer));
        }
        if !scenario.chores().is_empty() {
            let (session, process) = prepared.server(&execution.world, (client, actor), 0);
            execution.sessions.push(session);
            execution.processes.push(process);
        }
        {
            let world = &mut *execution.world.borrow_mut();
            if scenario.has_depot {
                let depot = SimDepot::new(&prepared.region, scenario.server, world.now);
                world.depot = Some(Rc::new(RefCell::new(depot)));
            }
            world.began = true;
            world.places_rest = scenario.server != Some(Mutant::ReusedAtOnce);
            world.trace = trace.then(Vec::new);
        }
        execution
    }

    /// Connects a client, which caches the keys that it knows, and starts a process for each lane.
    fn connect(&mut self, client: usize, script: &Script) {
        let lanes = script.lanes.len() as u16;
        let first = self.processes.len();
        let session = self.prepared.open(&self.world, client + 1, first, lanes, script.mutant);
        for key in &script.known {
            drive(&session, Action::Get, *key, "");
        }
        session.endpoint().fabric_mut().immediate = script.in_one_step;
        let session = Rc::new(session);
        for (lane, ops) in script.lanes.iter().enumerate() {
            let events = Events::default();
            let reading = Reading::new(ops.clone(), name(first + lane));
            let lane = LaneId(lane as u16);
            let task = run_script(session.clone(), lane, reading, events.clone());
            self.processes.push(Process::new(client, (lane, 1), Box::pin(task), events));
        }
        self.sessions.push(session);
        self.ids.push(client_id(client + 1));
    }
}

impl Execution<'_> {
    /// Returns a hash of all state on which the rest of the execution depends.
    /// `bounded`: whether the search limits preemptions. If so, the process that acted last always
    /// belongs to the state.
    pub(crate) fn state(&self, bounded: bool) -> u64 {
        let visible_state = self.visible_state();
        let world = self.world.borrow();
        let mut hasher = DefaultHasher::new();
        (world.cluster, &world.tombs).hash(&mut hasher);
        (world.memory.hash(), world.now, self.monitor.state()).hash(&mut hasher);
        for session in &self.sessions {
            let fabric = session.endpoint().fabric();
            session.cluster.as_ref().map(ClusterClient::state).hash(&mut hasher);
            (fabric.observed, fabric.clock.stood_still, fabric.clock.stopped_at).hash(&mut hasher);
        }
        for process in &self.processes {
            let fabric = self.sessions[process.client].endpoint().fabric();
            for lane in process.lanes() {
                let lane = fabric.lane(lane);
                (lane.progress, lane.posted_times, lane.is_cut).hash(&mut hasher);
            }
            // The state at the start of a wait matters only if it is equal to the present state.
            let waits = process.waits.map(|wait| wait == Some(visible_state));
            (process.state, process.chains, process.operations_begun, process.seen, waits)
                .hash(&mut hasher);
        }
        let last = self.last.filter(|_| bounded || self.last_continues);
        (last, self.last_continues, self.events, &self.ids, &self.lost_clients).hash(&mut hasher);
        (self.locations(), self.depot()).hash(&mut hasher);
        hasher.finish()
    }

    /// Mixes what a process can learn without a chain into its client's observations. Several
    /// lanes learn the order in which they are polled. A client with a shared cache or a depot
    /// learns its content.
    fn note_shared(&self, actor: usize) {
        let process = &self.processes[actor];
        let script = self.prepared.scenario.clients.get(process.client);
        let Some(script) = script.filter(|script| script.is_entangled()) else { return };
        let mut fabric = self.sessions[process.client].endpoint().fabric_mut();
        fabric.observed = mix(mix(fabric.observed, 3), actor as u64);
        if script.shares {
            fabric.observed = mix(fabric.observed, self.locations());
        }
        if script.takes {
            fabric.observed = mix(fabric.observed, self.depot());
        }
    }

    /// Returns a hash of the depot's history, if there is a depot.
    fn depot(&self) -> u64 {
        self.world.borrow().depot.as_ref().map_or(0, |depot| depot.borrow().state)
    }

    /// Returns a hash of the clients' shared location cache, if there is one.
    fn locations(&self) -> u64 {
        let scripts = self.prepared.scenario.clients.iter();
        let sharing = scripts.zip(&self.sessions).find(|(script, _)| script.shares);
        sharing.map_or(0, |(_, session)| {
            let mut hasher = DefaultHasher::new();
            session.region.cache.hash_state(&mut hasher);
            hasher.finish()
        })
    }

    /// Checks the end of an execution. Every process must have ended. A new client reads every key.
    /// If there is a split, so does a session with the directory of the start. The region must be
    /// consistent.
    pub(crate) fn finish(&mut self) -> Result<(), Violation> {
        // The server may have chores left, such as a sweep for a client that never died.
        let is_unfinished = |process: &Process| match process.state {
            State::Between => process.client < self.prepared.scenario.clients.len(),
            State::Working => true,
            State::Finished | State::Dying | State::Gone | State::Offline => false,
        };
        // Beside a dead process, another one may wait until the server clears a slot.
        let mut processes = self.processes.iter();
        let has_dead_process = processes
            .any(|process| matches!(process.state, State::Dying | State::Gone | State::Offline));
        if let Some(actor) =
            self.processes.iter().position(is_unfinished).filter(|_| !has_dead_process)
        {
            return Err(Violation::Stuck(actor));
        }
        self.note_time()?;
        let first = self.processes.len();
        let new = self.prepared.open(&self.world, self.sessions.len() + 1, first, 1, None);
        for (session, actor) in self.observer.iter().chain([&Rc::new(new)]).zip(first..) {
            self.world.borrow_mut().note(actor, || "reads all keys".to_owned());
            for key in 0..KEYS {
                let requested = RequestedOperation::plain(Op::Get(key));
                let id = self.monitor.invoke(actor, key as u32, &requested);
                let read = session.run(LaneId(0), Action::Get, (&keys()[key], b""));
                let reply = session.endpoint().drive(read);
                if let Err(Some(error)) = &reply {
                    return Err(Violation::Failed(error.to_string()));
                }
                self.monitor.respond(id, key, &reply)?;
            }
        }
        let world = self.world.borrow();
        let mut regions = self.prepared.scenario.regions().iter();
        regions.try_for_each(|index| {
            world.region.at(*index).inspect(&world.memory).map_err(Violation::Damaged)
        })
    }
}
