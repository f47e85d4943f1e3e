//! The ends of connections: deaths, lost queue pairs and restarts of the server. Then the server
//! fences the client, and clears its slots, and the client reconnects. Also pauses of clients: a
//! paused client's clock stands still, while its device continues.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex};
use farside_protocol::sweep::clear;

use crate::execution::Execution;
use crate::fabric::Phase;
use crate::monitor::{Monitor, Violation};
use crate::mutant::Mutant;
use crate::prepared::{client_id, name};
use crate::process::{Events, Process, Reading, SchedulerAction, Seen, State, run_script};
use crate::scenario::Chore;

impl Execution<'_> {
    /// Adds the connections that can break now, and the restart of the server. A connection without
    /// a chain in flight is left out: no process could tell its break from a later break.
    pub(super) fn add_losses(&self, actions: &mut Vec<SchedulerAction>) {
        let scenario = self.prepared.scenario;
        for client in 0..scenario.clients.len() {
            let fabric = self.sessions[client].endpoint().fabric();
            let busy = |lane: &Phase| matches!(lane, Phase::Posted | Phase::Complete);
            let mut lanes = fabric.lanes.iter().filter(|lane| busy(&lane.phase));
            if self.events.losses < scenario.limits.losses
                && !fabric.is_lost
                && self.is_working(client)
                && let Some(lane) = lanes.next()
            {
                actions.push(SchedulerAction::Lose(client, false));
                if lane.phase == Phase::Posted && lane.changes() {
                    actions.push(SchedulerAction::Lose(client, true));
                }
            }
        }
        let mut clients = 0..scenario.clients.len();
        if self.events.server_restarts < scenario.limits.server_restarts
            && clients.any(|client| self.is_working(client))
        {
            actions.push(SchedulerAction::RestartServer);
        }
    }

    /// Returns the server's present chore, or its next one between chores. `None` for a client.
    pub(super) fn chore(&self, actor: usize) -> Option<Chore> {
        let process = &self.processes[actor];
        let scenario = self.prepared.scenario;
        let next = match process.state {
            State::Between => process.operations_begun as usize,
            _ => (process.operations_begun as usize).wrapping_sub(1),
        };
        let is_server = process.client == scenario.clients.len();
        is_server.then(|| scenario.chores().get(next).copied()).flatten()
    }

    pub(super) fn is_splitting(&self) -> bool {
        let last = self.processes.len() - 1;
        let chore = self.chore(last);
        self.processes[last].state == State::Working && chore == Some(Chore::Split)
    }

    /// Whether this process is the server, about to sweep, and no client is lost.
    pub(super) fn has_nothing_to_do(&self, actor: usize) -> bool {
        self.lost_clients.is_empty() && self.chore(actor) == Some(Chore::Sweep)
    }

    /// Kills the server in the middle of a split, and restarts it. It continues the split.
    pub(super) fn restart_split(&mut self) {
        self.events.split_restarts += 1;
        self.last = None;
        let actor = self.processes.len() - 1;
        self.world.borrow_mut().note(actor, || "is killed and restarted".to_owned());
        self.restart_chores(self.processes[actor].operations_begun - 1);
    }

    /// Starts the server's process anew, at this chore.
    fn restart_chores(&mut self, chore: u32) {
        let (client, actor) = (self.prepared.scenario.clients.len(), self.processes.len() - 1);
        let (session, process) = self.prepared.server(&self.world, (client, actor), chore);
        self.sessions[client] = session;
        self.processes[actor] = process;
    }

    /// Lets a client die. If the scenario has `sweeps`, the client's chains in flight may be
    /// executed until the server fences it.
    pub(super) fn die(&mut self, client: usize) {
        self.events.deaths += 1;
        let swept = self.prepared.scenario.sweeps;
        if swept {
            self.lost_clients.push(self.ids[client]);
        }
        for actor in 0..self.processes.len() {
            if self.processes[actor].client == client {
                self.processes[actor].state = if swept { State::Dying } else { State::Gone };
                self.world.borrow_mut().note(actor, || "dies".to_owned());
            }
        }
    }

    /// Breaks a client's connection. `executes`: the chains in flight may still be executed.
    pub(super) fn lose(&mut self, client: usize, executes: bool) -> Result<(), Violation> {
        self.events.losses += 1;
        self.lost_clients.push(self.ids[client]);
        let actor = self.processes.iter().position(|process| process.client == client);
        let actor = actor.expect("a client has a process");
        self.world.borrow_mut().note(actor, || "loses its connection".to_owned());
        self.sessions[client].endpoint().fabric_mut().is_lost = true;
        if executes {
            return Ok(());
        }
        self.cut(client, false);
        self.poll_completed(actor, self.late_completions)
    }

    /// Cuts off a client's chains in flight, so that no more of their verbs are executed.
    fn cut(&mut self, client: usize, fenced: bool) {
        let mut fabric = self.sessions[client].endpoint().fabric_mut();
        for lane in 0..fabric.lanes.len() {
            let fate = fabric.lanes[lane].fate(fenced);
            match fabric.lanes[lane].phase {
                Phase::Posted => fabric.complete(LaneId(lane as u16), Err(fate)),
                Phase::Complete if !fenced => fabric.lanes[lane].result = Err(fate),
                _ => {}
            }
        }
    }

    /// Lets the server fence the lost clients, which cuts off their chains in flight.
    pub(super) fn fence(&mut self) -> Result<(), Violation> {
        let mutant = self.prepared.scenario.server;
        let mut lost = std::mem::take(&mut self.lost_clients);
        let mut world = self.world.borrow_mut();
        if mutant == Some(Mutant::SweepsTheLiving) && lost != self.ids {
            lost.clone_from(&self.ids);
            world.note_fired(Mutant::SweepsTheLiving);
        }
        world.fenced = lost;
        if mutant == Some(Mutant::Unfenced) {
            world.note_fired(Mutant::Unfenced);
            return Ok(());
        }
        drop(world);
        self.end_lost()
    }

    fn end_lost(&mut self) -> Result<(), Violation> {
        for actor in 0..self.processes.len() {
            if self.processes[actor].state == State::Dying {
                self.processes[actor].state = State::Gone;
                let id = Monitor::id(actor, self.processes[actor].operations_begun);
                self.monitor.end_unanswered(id)?;
            }
        }
        for client in 0..self.prepared.scenario.clients.len() {
            let is_lost = self.sessions[client].endpoint().fabric().is_lost;
            if is_lost && self.is_working(client) {
                self.cut(client, false);
            }
        }
        Ok(())
    }

    /// Kills and restarts the server. It fences all clients that were connected before, and clears
    /// every unfinished INSERT before it accepts a client.
    pub(super) fn restart_server(&mut self) -> Result<(), Violation> {
        self.events.server_restarts += 1;
        self.last = None;
        self.lost_clients.clear();
        self.world.borrow_mut().fenced.clear();
        let clients = self.prepared.scenario.clients.len();
        self.world.borrow_mut().note(0, || "the server is killed and restarted".to_owned());
        if self.prepared.scenario.server != Some(Mutant::FormerClientsNotFenced) {
            self.end_lost()?;
            let open: Vec<usize> = (0..clients).filter(|client| self.is_open(*client)).collect();
            for client in open {
                self.cut(client, true);
                self.sessions[client].endpoint().fabric_mut().is_lost = true;
            }
        } else {
            self.world.borrow_mut().note_fired(Mutant::FormerClientsNotFenced);
        }
        let unfinished: Vec<_> = {
            let world = self.world.borrow();
            world.region.unfinished(&world.memory).collect()
        };
        let server = self.prepared.open(&self.world, clients + 3, self.processes.len(), 1, None);
        for (slot, word, _) in unfinished {
            let cleared =
                server.endpoint().drive(clear(server.endpoint(), RegionIndex::FIRST, slot, word));
            cleared.expect("the fabric reaches all of it");
        }
        let last = self.processes.len() - 1;
        if self.chore(last) == Some(Chore::Sweep) && self.processes[last].state == State::Working {
            self.restart_chores(self.processes[last].operations_begun);
        }
        for actor in 0..self.processes.len() {
            self.poll_completed(actor, self.late_completions)?;
        }
        Ok(())
    }

    fn is_open(&self, client: usize) -> bool {
        let mut processes = self.processes.iter().filter(|process| process.client == client);
        processes.any(|process| matches!(process.state, State::Between | State::Working))
    }

    /// Continues a process's script on a new connection with an empty location cache. `is_invoked`:
    /// its operation `next` was invoked on the old connection, and is run again from the buffers of
    /// its lane.
    pub(super) fn reopen(&mut self, actor: usize, next: usize, is_invoked: bool, seen: Seen) {
        let client = self.processes[actor].client;
        let [script] = &self.prepared.scenario.clients[client].lanes[..] else {
            panic!("a client whose connection breaks has one lane");
        };
        let nth = self.reopened;
        self.reopened += 1;
        self.world.borrow_mut().note(actor, || "reconnects".to_owned());
        let session = Rc::new(self.prepared.reopen(&self.world, (client, actor), nth));
        {
            let mut old = self.sessions[client].endpoint().fabric_mut();
            session.endpoint().fabric_mut().take_buffers(&mut old);
        }
        let mut hasher = DefaultHasher::new();
        session.hash_state(&mut hasher);
        if is_invoked {
            session.endpoint().buffer(LaneId(0), Buffer::NewBlock).hash(&mut hasher);
        }
        session.endpoint().fabric_mut().observed = hasher.finish();
        self.ids[client] = client_id(self.prepared.scenario.clients.len() + 4 + nth);
        let old = &self.processes[actor];
        let (began, known) = (old.operations_begun - u32::from(is_invoked), old.seen);
        let is_finished = next == script.len();
        let reading = Reading { script: script.clone(), name: name(actor), next, is_invoked, seen };
        let events = Events::default();
        let task = run_script(session.clone(), LaneId(0), reading, events.clone());
        let mut process = Process::new(client, (LaneId(0), 1), Box::pin(task), events);
        (process.operations_begun, process.seen) = (began, known);
        if is_finished {
            process.state = State::Finished;
        }
        self.sessions[client] = session;
        self.processes[actor] = process;
    }

    /// Checks that swept clients left no unfinished INSERT.
    pub(super) fn check_swept(&self, actor: usize, clients: &[u16]) -> Result<(), Violation> {
        let mut world = self.world.borrow_mut();
        world.note(actor, || format!("has cleared the slots of {clients:?}"));
        let is_left = |writer: Option<u16>| writer.is_some_and(|writer| clients.contains(&writer));
        let mut unfinished = world.region.unfinished(&world.memory);
        match unfinished.find(|(_, _, writer)| is_left(*writer)) {
            Some((_, word, _)) => {
                Err(Violation::Damaged(format!("{word:?}: its client was swept")))
            }
            None => Ok(()),
        }
    }
}

impl Execution<'_> {
    pub(super) fn is_paused(&self, client: usize) -> bool {
        self.sessions[client].endpoint().fabric().clock.stopped_at.is_some()
    }

    /// Returns the clients that can be paused now.
    pub(super) fn pausable(&self) -> impl Iterator<Item = usize> {
        let scenario = self.prepared.scenario;
        let left = self.events.pauses < scenario.limits.pauses;
        let clients = 0..if left { scenario.clients.len() } else { 0 };
        clients.filter(|client| {
            let acts = |state| matches!(state, State::Between | State::Working);
            let mut processes = self.processes.iter().filter(|process| process.client == *client);
            scenario.clients[*client].pauses
                && !self.is_paused(*client)
                && processes.any(|process| acts(process.state))
        })
    }

    /// Pauses a client. Its device continues.
    pub(super) fn pause(&mut self, client: usize) {
        self.events.pauses += 1;
        self.last = None;
        let mut world = self.world.borrow_mut();
        self.sessions[client].endpoint().fabric_mut().clock.stopped_at = Some(world.now);
        world.note(client, || "is paused, with its clock".to_owned());
    }

    /// Ends a client's pause. If the pause was too long, the server fences the client now. No
    /// process can tell this fence from an earlier fence: during the pause only posted chains were
    /// executed.
    pub(super) fn resume(&mut self, client: usize) -> Result<(), Violation> {
        self.last = None;
        let paused_for = {
            let mut world = self.world.borrow_mut();
            let clock = &mut self.sessions[client].endpoint().fabric_mut().clock;
            let paused_for = clock.stopped_at.take().map_or(0, |actor| world.now - actor);
            clock.stood_still += paused_for;
            world.note(client, || format!("continues after {paused_for} ns"));
            paused_for
        };
        let scenario = self.prepared.scenario;
        let timeout = scenario.answer_timeout_ns;
        let limit = match scenario.server {
            Some(Mutant::NeverFenced) => None,
            Some(Mutant::FencedLate) => timeout.map(|timeout| 4 * timeout),
            _ => timeout,
        };
        let is_longer_than = |limit: Option<Nanos>| limit.is_some_and(|limit| paused_for > limit);
        let is_lost = self.sessions[client].endpoint().fabric().is_lost;
        if is_longer_than(limit) && !is_lost {
            return self.lose(client, false);
        }
        if let Some(mutant) = scenario.server.filter(|_| is_longer_than(timeout)) {
            self.world.borrow_mut().note_fired(mutant);
        }
        for actor in 0..self.processes.len() {
            if self.processes[actor].client == client {
                self.poll_completed(actor, self.late_completions)?;
            }
        }
        Ok(())
    }
}
