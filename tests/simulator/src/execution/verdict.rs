//! The hash by which the search recognizes equal states of executions, and the checks at the end of
//! an execution.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use farside_fabric::LaneId;
use farside_protocol::Action;

use crate::cluster::ClusterClient;
use crate::execution::Execution;
use crate::memory::mix;
use crate::monitor::{RequestedOperation, Violation};
use crate::process::{Process, State};
use crate::region::{KEYS, keys};
use crate::script::Op;

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
    pub(super) fn note_shared(&self, actor: usize) {
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
