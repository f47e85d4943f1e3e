//! Pauses of clients. A paused client's clock stands still, while its device continues.

use farside_fabric::Nanos;

use crate::execution::Execution;
use crate::monitor::Violation;
use crate::mutant::Mutant;
use crate::process::State;

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
