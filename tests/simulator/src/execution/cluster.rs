//! The events of a shard that changes its region: heartbeats and their answers, maps, the server
//! that stands still, and the operator.
//!
//! Events are left out if others allow the clients more. The owner stands still only from the
//! moment of the revocation on: from an earlier moment on it would answer less. For the same reason
//! it answers heartbeats only after the revocation, and at once, unless the scenario says
//! otherwise.

use std::rc::Rc;

use farside_fabric::{LaneId, Nanos};

use crate::cluster::{
    ClusterClient, ClusterEvent, ClusterState, FORMER, Heartbeat, OWNED, OwnerState, REASSIGNED,
    REVOKED, TRUST_NS, moving_keys,
};
use crate::execution::Execution;
use crate::fabric::Phase;
use crate::monitor::Violation;
use crate::mutant::Mutant;
use crate::process::{SchedulerAction, State};
use crate::session::{Reply, TestSession};

impl Execution<'_> {
    fn cluster(&self) -> Option<ClusterState> {
        self.world.borrow().cluster
    }

    /// Checks that no verb has changed the former region of a shard.
    pub(super) fn check_former(&self) -> Result<(), Violation> {
        match self.cluster() {
            Some(cluster) if cluster.is_former_changed => Err(Violation::Cluster(
                "a verb changed the region that was the shard before".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Checks that the value which a GET returns was not read in the former region of the shard.
    pub(super) fn check_used(&self, session: &TestSession, is_get: bool) -> Result<(), Violation> {
        let is_former = session.cluster.as_ref().is_some_and(|client| client.used.get() == FORMER);
        if is_get && is_former && self.cluster().is_some_and(|cluster| cluster.is_reassigned()) {
            let what = "a GET returned what it read in the region that was the shard before";
            return Err(Violation::Cluster(what.to_owned()));
        }
        Ok(())
    }

    /// Whether a process waits for a connection to the owner of the moving shard.
    pub(super) fn has_offline_process(&self) -> bool {
        self.processes.iter().any(|process| process.state == State::Offline)
    }

    /// Whether the clock may jump now: in a cluster, only while the operator waits.
    pub(super) fn is_time_of_interest(&self) -> bool {
        self.cluster().is_none_or(|cluster| cluster.number == REVOKED)
    }

    /// Adds the events of the cluster that are possible now.
    pub(super) fn add_cluster_events(&self, actions: &mut Vec<SchedulerAction>) {
        use ClusterEvent::{Claim, Confirm, Freeze, Reassign, Revoke, Tell, Thaw};
        let Some(cluster) = self.cluster() else { return };
        let scenario = self.prepared.scenario;
        let is_revoked = cluster.number != OWNED;
        let is_running = cluster.owner == OwnerState::Running;
        let is_at_revocation = is_revoked && self.world.borrow().now == cluster.revoked_at;
        let may_freeze = is_running && self.events.freezes < scenario.limits.freezes;
        let may_answer = scenario.limits.heartbeats + scenario.limits.reconnects > 0;
        for (is_possible, event) in [
            // Later the owner would have learned from the operator, which asks again and again,
            // that it lost the shard.
            (may_freeze && is_at_revocation, Freeze),
            (may_answer && matches!(cluster.owner, OwnerState::Frozen(_)), Thaw),
            (matches!(cluster.owner, OwnerState::Unconfirmed | OwnerState::Claimed(_)), Confirm),
            (!is_revoked, Revoke),
            (is_running && is_revoked, Tell),
            (is_running && is_revoked && scenario.records_fail, Claim),
            (cluster.may_reassign_at(scenario.server).is_some(), Reassign),
        ] {
            if is_possible {
                actions.push(SchedulerAction::Cluster(event));
            }
        }
        for client in 0..scenario.clients.len() {
            self.add_client_events(client, &cluster, actions);
        }
    }

    fn add_client_events(
        &self,
        client: usize,
        cluster: &ClusterState,
        actions: &mut Vec<SchedulerAction>,
    ) {
        let scenario = self.prepared.scenario;
        let mut add = |event| actions.push(SchedulerAction::Cluster(event));
        let Some(process) = self.processes.iter().find(|process| process.client == client) else {
            return;
        };
        let Some(known) = &self.sessions[client].cluster else { return };
        if matches!(process.state, State::Finished | State::Gone) {
            return;
        }
        let (number, limits) = (known.number(), &scenario.limits);
        let answers = cluster.answers(scenario.server, self.world.borrow().now);
        let (in_flight, changes) = self.in_flight(client);
        if let Some(connection) = &*known.connection.borrow()
            && connection.number == OWNED
        {
            let now = self.sessions[client].endpoint().fabric().clock_shows();
            let until = now + TRUST_NS + Nanos::from(scenario.late_answers);
            let extends = cluster.number != OWNED && until > connection.until;
            let has_left = self.events.heartbeats < limits.heartbeats;
            let comes_back = answers || scenario.late_answers;
            match connection.heartbeat {
                None if extends && has_left && comes_back => {
                    add(ClusterEvent::Heartbeat(client));
                }
                Some(Heartbeat::Sent(_)) if answers => add(ClusterEvent::Answer(client)),
                Some(Heartbeat::Answered(_)) => add(ClusterEvent::Extend(client)),
                _ => {}
            }
            let ignores = scenario.clients[client].mutant == Some(Mutant::TrustIgnored);
            if in_flight && !ignores && !connection.trust.holds_at(now) {
                add(ClusterEvent::Lapse(client, false));
                if changes {
                    add(ClusterEvent::Lapse(client, true));
                }
            }
        }
        for other in OWNED..=cluster.number {
            let is_old = other < number && self.events.old_maps < limits.old_maps;
            let is_new = other > number && (other == REASSIGNED || limits.old_maps > 0);
            if is_old || is_new {
                add(ClusterEvent::Map(client, other, false));
                if in_flight && changes {
                    add(ClusterEvent::Map(client, other, true));
                }
            }
        }
        let welcomes = match number {
            OWNED => answers && self.events.reconnects < limits.reconnects,
            REASSIGNED => true,
            _ => false,
        };
        if process.state == State::Offline && welcomes {
            add(ClusterEvent::Connect(client));
        }
    }

    /// Whether a client has a chain at the former region in flight, and whether the chain may still
    /// change something.
    fn in_flight(&self, client: usize) -> (bool, bool) {
        let fabric = self.sessions[client].endpoint().fabric();
        let lane = fabric.lane(LaneId(0));
        let is_posted = lane.phase == Phase::Posted;
        let in_flight = lane.region == FORMER && (is_posted || lane.phase == Phase::Complete);
        (in_flight && !lane.is_cut, in_flight && !lane.is_cut && is_posted && lane.changes())
    }

    fn update_cluster(&self, what: &str, update: impl FnOnce(&mut ClusterState)) {
        let mut world = self.world.borrow_mut();
        world.note_event(|| what.to_owned());
        if let Some(cluster) = &mut world.cluster {
            update(cluster);
        }
    }

    pub(super) fn act_in_cluster(&mut self, event: ClusterEvent) -> Result<(), Violation> {
        self.last = None;
        let now = self.world.borrow().now;
        let server = self.prepared.scenario.server;
        let Some(cluster) = self.cluster() else { return Ok(()) };
        match event {
            ClusterEvent::Freeze => {
                self.events.freezes += 1;
                self.update_cluster("the owner stands still", |cluster| {
                    cluster.owner = OwnerState::Frozen(now);
                });
            }
            ClusterEvent::Thaw => {
                let owner = cluster.thawed(now);
                self.update_cluster("the owner continues", |cluster| cluster.owner = owner);
            }
            ClusterEvent::Confirm if cluster.number == OWNED => {
                self.update_cluster("the owner reads the records", |cluster| {
                    cluster.owner = OwnerState::Running;
                });
            }
            ClusterEvent::Confirm => self.give_up("the owner reads the records and gives up")?,
            ClusterEvent::Revoke => self.update_cluster("the shard is revoked", |cluster| {
                (cluster.number, cluster.revoked_at) = (REVOKED, now);
            }),
            ClusterEvent::Claim => self.update_cluster("the owner is told", |cluster| {
                (cluster.owner, cluster.answered_at) = (OwnerState::Claimed(now), Some(now));
            }),
            ClusterEvent::Tell => {
                self.give_up("the owner is told and gives up")?;
                self.update_cluster("the operator has an answer", |cluster| {
                    cluster.told_at = Some(now);
                });
            }
            ClusterEvent::Reassign => self.reassign(&cluster, server)?,
            ClusterEvent::Heartbeat(client)
            | ClusterEvent::Answer(client)
            | ClusterEvent::Extend(client)
            | ClusterEvent::Lapse(client, _)
            | ClusterEvent::Map(client, ..)
            | ClusterEvent::Connect(client) => self.act_of_client(client, event)?,
        }
        Ok(())
    }

    fn act_of_client(&mut self, client: usize, event: ClusterEvent) -> Result<(), Violation> {
        let actor = self.actor_of(client);
        let session = self.sessions[client].clone();
        let Some(known) = &session.cluster else { return Ok(()) };
        let now = self.world.borrow().now;
        let is_wrong = self.cluster().is_some_and(|cluster| !cluster.answers(None, now));
        let asks_owner = matches!(event, ClusterEvent::Answer(_))
            || matches!(event, ClusterEvent::Connect(_)) && known.number() == OWNED;
        if is_wrong && asks_owner {
            self.world.borrow_mut().note_fired(Mutant::UnconfirmedAnswers);
        }
        self.world.borrow_mut().note(actor, || format!("{event:?}"));
        match event {
            ClusterEvent::Lapse(_, executes) => self.end_connection(client, executes),
            ClusterEvent::Map(_, number, executes) => {
                let is_outdated = self.take_map(known, number, client)?;
                if is_outdated { self.end_connection(client, executes) } else { Ok(()) }
            }
            ClusterEvent::Connect(_) => self.connect_again(client, &session),
            _ => {
                self.trust(client, &session, event);
                if matches!(event, ClusterEvent::Heartbeat(_))
                    && !self.prepared.scenario.late_answers
                {
                    self.act_of_client(client, ClusterEvent::Answer(client))?;
                    self.act_of_client(client, ClusterEvent::Extend(client))?;
                }
                Ok(())
            }
        }
    }

    /// Sends a heartbeat, answers it, or lets the answer arrive.
    fn trust(&mut self, client: usize, session: &TestSession, event: ClusterEvent) {
        let now = session.endpoint().fabric().clock_shows();
        let connection = session.cluster.as_ref().map(|known| known.connection.borrow_mut());
        let Some(mut connection) = connection else { return };
        let Some(connection) = &mut *connection else { return };
        match (event, connection.heartbeat) {
            (ClusterEvent::Heartbeat(_), _) => {
                self.events.heartbeats += 1;
                connection.heartbeat = Some(Heartbeat::Sent(now));
            }
            (ClusterEvent::Answer(_), Some(Heartbeat::Sent(at))) => {
                connection.heartbeat = Some(Heartbeat::Answered(at));
            }
            (ClusterEvent::Extend(_), Some(Heartbeat::Answered(at))) => {
                connection.heartbeat = None;
                let mutant = self.prepared.scenario.clients[client].mutant;
                let is_late = mutant == Some(Mutant::TrustFromAnswer) && now > at;
                if is_late {
                    self.world.borrow_mut().note_fired(Mutant::TrustFromAnswer);
                }
                let until = if is_late { now } else { at } + TRUST_NS;
                connection.trust.extend(until);
                connection.until = connection.until.max(until);
            }
            _ => {}
        }
    }

    /// Gives a client the map with this view. Returns whether its connection is for an earlier one.
    fn take_map(
        &mut self,
        known: &ClusterClient,
        number: u64,
        client: usize,
    ) -> Result<bool, Violation> {
        let before = known.number();
        self.events.old_maps += u32::from(number < before);
        let is_outdated = known.take_map(number, self.prepared.scenario.clients[client].mutant);
        let after = known.number();
        if after < before {
            self.world.borrow_mut().note_fired(Mutant::OlderViewTaken);
            let what = format!("the number of a view fell from {before} to {after}");
            return Err(Violation::Cluster(what));
        }
        Ok(is_outdated)
    }

    fn actor_of(&self, client: usize) -> usize {
        let actor = self.processes.iter().position(|process| process.client == client);
        actor.expect("a client has a process")
    }

    /// Ends a client's connection to the owner of the moving shard. `executes`: the chain in flight
    /// may still be executed.
    fn end_connection(&mut self, client: usize, executes: bool) -> Result<(), Violation> {
        if let Some(known) = &self.sessions[client].cluster {
            known.disconnect();
        }
        if executes {
            self.sessions[client].endpoint().fabric_mut().lanes[0].is_cut = true;
            return Ok(());
        }
        self.cut_at_former(client)
    }

    /// Cuts off a client's chain at the former region, if one is in flight.
    fn cut_at_former(&mut self, client: usize) -> Result<(), Violation> {
        {
            let mut fabric = self.sessions[client].endpoint().fabric_mut();
            if fabric.lanes[0].region == FORMER {
                let fate = fabric.lanes[0].fate(false);
                match fabric.lanes[0].phase {
                    Phase::Posted => fabric.complete(LaneId(0), Err(fate)),
                    Phase::Complete => fabric.lanes[0].result = Err(fate),
                    _ => {}
                }
            }
        }
        self.poll_completed(self.actor_of(client), self.late_completions)
    }

    /// Lets the owner give the shard up. It destroys its clients' queue pairs.
    fn give_up(&mut self, what: &str) -> Result<(), Violation> {
        self.update_cluster(what, |cluster| cluster.owner = OwnerState::GivenUp);
        for client in 0..self.prepared.scenario.clients.len() {
            let session = self.sessions[client].clone();
            let Some(known) = &session.cluster else { continue };
            let number = known.connection.borrow().as_ref().map(|connection| connection.number);
            if number == Some(OWNED) {
                known.disconnect();
            }
            self.cut_at_former(client)?;
        }
        Ok(())
    }

    /// Lets an empty region be the shard: all its keys are deleted at this moment.
    fn reassign(
        &mut self,
        cluster: &ClusterState,
        server: Option<Mutant>,
    ) -> Result<(), Violation> {
        let Some(at) = cluster.may_reassign_at(server) else { return Ok(()) };
        let at = at.max(self.world.borrow().now);
        let is_early = cluster.may_reassign_at(None).is_none_or(|rightly| at < rightly);
        let emptied: Vec<_> = {
            let world = &mut *self.world.borrow_mut();
            world.now = at;
            if let Some(mutant) = server.filter(|_| is_early) {
                world.note_fired(mutant);
            }
            let block_of = |key| world.region.block_of(&world.memory, key);
            moving_keys().map(|key| (key, block_of(key) != 0)).collect()
        };
        self.update_cluster("an empty region becomes the shard", |cluster| {
            cluster.number = REASSIGNED;
        });
        for (key, was_present) in emptied {
            self.monitor.empty(key, Reply { done: was_present, found: None })?;
        }
        Ok(())
    }

    /// Connects a client to the server of the view that it knows. Its operation begins again.
    fn connect_again(&mut self, client: usize, session: &Rc<TestSession>) -> Result<(), Violation> {
        let actor = self.actor_of(client);
        let number = session.cluster.as_ref().map_or(OWNED, |known| known.number());
        let clients = self.prepared.scenario.clients.len();
        let mut nth = 0;
        if number == OWNED {
            // The blocks of the connection before may be in use.
            nth = clients + self.events.reconnects as usize;
            self.events.reconnects += 1;
        }
        self.prepared.connect(&self.world, session, (client + 1, nth), number);
        self.keep_observed(client);
        self.processes[actor].state = State::Working;
        self.processes[actor].chains = 0;
        self.fabric_mut(actor).noticed = false;
        self.last = Some(actor);
        self.poll(actor)?;
        self.poll_completed(actor, self.late_completions)
    }
}
