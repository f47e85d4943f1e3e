//! What ends connections: deaths, lost queue pairs, a server that starts anew. And what follows:
//! the server's fence, and new connections.

use std::hash::{DefaultHasher, Hasher};
use std::rc::Rc;

use farside_fabric::{LaneId, RegionIndex};
use farside_protocol::sweep::clear;

use super::execution::Execution;
use super::lane::Phase;
use super::monitor::{Monitor, Violation};
use super::mutant::Mutant;
use super::prepared::{client_id, name};
use super::process::{Action, Process, State};
use super::server::Chore;
use super::task::{Events, Reading, Seen, run_script};

impl Execution<'_> {
    /// Which connections can break now: where nothing is under way, to break later is the same.
    pub(super) fn losses(&self, actions: &mut Vec<Action>) {
        let scenario = self.prepared.scenario;
        for client in 0..scenario.clients.len() {
            let fabric = self.sessions[client].endpoint().fabric();
            let busy = |lane: &Phase| matches!(lane, Phase::Posted | Phase::Complete);
            let mut lanes = fabric.lanes.iter().filter(|lane| busy(&lane.phase));
            if self.losses < scenario.losses_max
                && !fabric.is_lost
                && self.is_working(client)
                && let Some(lane) = lanes.next()
            {
                actions.push(Action::Lose(client, false));
                if lane.phase == Phase::Posted && lane.changes() {
                    actions.push(Action::Lose(client, true));
                }
            }
        }
        let is_open = |client: &usize| self.is_working(*client);
        if self.renewals < scenario.renewals_max && (0..scenario.clients.len()).any(|c| is_open(&c))
        {
            actions.push(Action::Renew);
        }
    }

    /// What the server does next, or does.
    pub(super) fn chore(&self, at: usize) -> Option<Chore> {
        let process = &self.processes[at];
        let scenario = self.prepared.scenario;
        let next = match process.state {
            State::Between => process.began as usize,
            _ => (process.began as usize).wrapping_sub(1),
        };
        let is_server = process.client == scenario.clients.len();
        is_server.then(|| scenario.chores().get(next).copied()).flatten()
    }

    pub(super) fn is_splitting(&self) -> bool {
        let last = self.processes.len() - 1;
        let chore = self.chore(last);
        self.processes[last].state == State::Working && chore == Some(Chore::Split)
    }

    /// No client is lost that the server would have to clear up after.
    pub(super) fn has_nothing_to_do(&self, at: usize) -> bool {
        self.lost_clients.is_empty() && self.chore(at) == Some(Chore::Sweep)
    }

    /// A client dies. What it has under way is executed until the server fences it.
    pub(super) fn die(&mut self, client: usize) {
        self.deaths += 1;
        let swept = self.prepared.scenario.sweeps;
        if swept {
            self.lost_clients.push(self.ids[client]);
        }
        for at in 0..self.processes.len() {
            if self.processes[at].client == client {
                self.processes[at].state = if swept { State::Dying } else { State::Gone };
                self.world.borrow_mut().note(at, || "dies".to_owned());
            }
        }
    }

    /// A client's connection breaks.
    pub(super) fn lose(&mut self, client: usize, whole: bool) -> Result<(), Violation> {
        self.losses += 1;
        self.lost_clients.push(self.ids[client]);
        let at = self.processes.iter().position(|process| process.client == client);
        let at = at.expect("a client has a process");
        self.world.borrow_mut().note(at, || "loses its connection".to_owned());
        self.sessions[client].endpoint().fabric_mut().is_lost = true;
        if whole {
            return Ok(());
        }
        self.cut(client, false);
        self.poll_completed(at, self.lazy)
    }

    /// Nothing more of what a client has under way is executed.
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

    /// The server fences the clients that are lost: what they have under way ends here.
    pub(super) fn fence(&mut self) -> Result<(), Violation> {
        let mutant = self.prepared.scenario.server;
        let mut left = std::mem::take(&mut self.lost_clients);
        let mut world = self.world.borrow_mut();
        if mutant == Some(Mutant::SweepsTheLiving) && left != self.ids {
            left.clone_from(&self.ids);
            world.note_fired(Mutant::SweepsTheLiving);
        }
        world.fenced = left;
        if mutant == Some(Mutant::Unfenced) {
            world.note_fired(Mutant::Unfenced);
            return Ok(());
        }
        drop(world);
        self.end_lost()
    }

    fn end_lost(&mut self) -> Result<(), Violation> {
        for at in 0..self.processes.len() {
            if self.processes[at].state == State::Dying {
                self.processes[at].state = State::Gone;
                let id = Monitor::id(at, self.processes[at].began);
                self.monitor.bury(id)?;
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

    /// The server is killed and started again: it accepts no client from before, and clears
    /// whatever is in the middle of an INSERT before it accepts any.
    pub(super) fn renew(&mut self) -> Result<(), Violation> {
        self.renewals += 1;
        self.last = None;
        self.lost_clients.clear();
        self.world.borrow_mut().fenced.clear();
        let clients = self.prepared.scenario.clients.len();
        self.world.borrow_mut().note(0, || "the server is started anew".to_owned());
        if self.prepared.scenario.server != Some(Mutant::Unrefused) {
            self.end_lost()?;
            let open: Vec<usize> = (0..clients).filter(|client| self.is_open(*client)).collect();
            for client in open {
                self.cut(client, true);
                self.sessions[client].endpoint().fabric_mut().is_lost = true;
            }
        } else {
            self.world.borrow_mut().note_fired(Mutant::Unrefused);
        }
        let unfinished: Vec<_> = {
            let world = self.world.borrow();
            world.region.unfinished(&world.memory).collect()
        };
        let own = self.prepared.open(&self.world, clients + 3, self.processes.len(), 1, None);
        for (slot, word, _) in unfinished {
            let cleared =
                own.endpoint().drive(clear(own.endpoint(), RegionIndex::FIRST, slot, word));
            cleared.expect("the fabric reaches all of it");
        }
        let last = self.processes.len() - 1;
        if self.chore(last) == Some(Chore::Sweep) && self.processes[last].state == State::Working {
            let server = (clients, last);
            let next = self.processes[last].began;
            let (session, process) = self.prepared.server(&self.world, server, next);
            self.sessions[clients] = session;
            self.processes[last] = process;
        }
        for at in 0..self.processes.len() {
            self.poll_completed(at, self.lazy)?;
        }
        Ok(())
    }

    fn is_open(&self, client: usize) -> bool {
        let mut of = self.processes.iter().filter(|process| process.client == client);
        of.any(|process| matches!(process.state, State::Between | State::Working))
    }

    /// A process goes on with its script on a new connection, which knows nothing.
    pub(super) fn reopen(&mut self, at: usize, next: usize, again: bool, seen: Seen) {
        let client = self.processes[at].client;
        let [script] = &self.prepared.scenario.clients[client].lanes[..] else {
            panic!("whose connections break has one lane");
        };
        let nth = self.reopened;
        self.reopened += 1;
        self.world.borrow_mut().note(at, || "connects anew".to_owned());
        let session = Rc::new(self.prepared.reopen(&self.world, (client, at), nth));
        let mut hasher = DefaultHasher::new();
        session.hash_state(&mut hasher);
        session.endpoint().fabric_mut().observed = hasher.finish();
        self.ids[client] = client_id(self.prepared.scenario.clients.len() + 4 + nth);
        let old = &self.processes[at];
        let (began, known) = (old.began - u32::from(again), old.seen);
        let left = next < script.len();
        let reading = Reading { script: script.clone(), name: name(at), next, again, seen };
        let events = Events::default();
        let task = run_script(session.clone(), LaneId(0), reading, events.clone());
        let mut process = Process::new(client, (LaneId(0), 1), Box::pin(task), events);
        (process.began, process.seen) = (began, known);
        if !left {
            process.state = State::Over;
        }
        self.sessions[client] = session;
        self.processes[at] = process;
    }

    /// That nothing is left of clients that the server has cleared up after.
    pub(super) fn check_swept(&self, at: usize, clients: &[u16]) -> Result<(), Violation> {
        let mut world = self.world.borrow_mut();
        world.note(at, || format!("has cleared up after {clients:?}"));
        let is_left = |writer: Option<u16>| writer.is_some_and(|writer| clients.contains(&writer));
        let mut unfinished = world.region.unfinished(&world.memory);
        match unfinished.find(|(_, _, writer)| is_left(*writer)) {
            Some((_, word, _)) => {
                Err(Violation::Damaged(format!("{word:?}: its owner is gone and cleared up after")))
            }
            None => Ok(()),
        }
    }
}
