//! The start of an execution.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use farside_fabric::LaneId;
use farside_protocol::Action;

use crate::cluster::ClusterState;
use crate::execution::Execution;
use crate::monitor::{Monitor, RequestedOperation};
use crate::mutant::Mutant;
use crate::prepared::{Prepared, client_id, drive, name};
use crate::process::Process;
use crate::scenario::EventCounts;
use crate::script::{Op, Script};
use crate::session::Reply;
use crate::task::{Events, Reading, run_script};
use crate::world::World;
use crate::world::depot::SimDepot;

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
