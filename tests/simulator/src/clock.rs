//! The clocks of clients. They run slower or faster than the world's clock, and stand still while
//! the client is paused.

use farside_fabric::Nanos;

use super::execution::Execution;
use super::monitor::Violation;
use super::mutant::Mutant;
use super::process::State;

/// The pace of a clock that runs like the world's: it counts 16 sixteenths of a second in a second.
pub(super) const PACE: u8 = 16;

/// The clock of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pace: Nanos,
    /// The time at which the clock was right.
    origin: Nanos,
    /// How long the clock has stood still in ended pauses, and when the present pause began. Both
    /// by the world's clock.
    pub(super) stood_still: Nanos,
    pub(super) stopped_at: Option<Nanos>,
}

impl Clock {
    pub(super) fn new(pace: u8, origin: Nanos) -> Self {
        Self { pace: pace.into(), origin, stood_still: 0, stopped_at: None }
    }

    /// Returns what the clock shows when the world's clock shows `now`.
    pub(super) fn shows(&self, now: Nanos) -> Nanos {
        let ran = self.stopped_at.unwrap_or(now) - self.stood_still - self.origin;
        self.origin + ran * self.pace / Nanos::from(PACE)
    }

    /// Returns the world's time at which the clock will show `shown`, unless it is paused before.
    pub(super) fn when(&self, shown: Nanos) -> Nanos {
        let Some(left) = shown.checked_sub(self.origin) else { return shown };
        let left = u128::from(left) * u128::from(PACE);
        let ran = left.div_ceil(self.pace.into()).try_into().unwrap_or(Nanos::MAX);
        self.origin.saturating_add(ran).saturating_add(self.stood_still)
    }
}

impl Execution<'_> {
    pub(super) fn is_paused(&self, client: usize) -> bool {
        self.sessions[client].endpoint().fabric().clock.stopped_at.is_some()
    }

    /// The clients that can be paused now.
    pub(super) fn pausable(&self) -> impl Iterator<Item = usize> {
        let scenario = self.prepared.scenario;
        let left = self.pauses < scenario.pauses_max;
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
        self.pauses += 1;
        self.last = None;
        let mut world = self.world.borrow_mut();
        self.sessions[client].endpoint().fabric_mut().clock.stopped_at = Some(world.now);
        world.note(client, || "is paused, with its clock".to_owned());
    }

    /// Ends a client's pause. If the pause was too long, the server fences the client now. No
    /// process can tell this from an earlier fence: during the pause only posted chains were
    /// executed.
    pub(super) fn resume(&mut self, client: usize) -> Result<(), Violation> {
        self.last = None;
        let paused_for = {
            let mut world = self.world.borrow_mut();
            let clock = &mut self.sessions[client].endpoint().fabric_mut().clock;
            let paused_for = clock.stopped_at.take().map_or(0, |at| world.now - at);
            clock.stood_still += paused_for;
            world.note(client, || format!("continues after {paused_for} ns"));
            paused_for
        };
        let scenario = self.prepared.scenario;
        let within = scenario.answer_timeout_ns;
        let allowed = match scenario.server {
            Some(Mutant::NeverFenced) => None,
            Some(Mutant::FencedLate) => within.map(|within| 4 * within),
            _ => within,
        };
        let is_late = |within: Option<Nanos>| within.is_some_and(|within| paused_for > within);
        let is_lost = self.sessions[client].endpoint().fabric().is_lost;
        if is_late(allowed) && !is_lost {
            return self.lose(client, false);
        }
        if let Some(mutant) = scenario.server.filter(|_| is_late(within)) {
            self.world.borrow_mut().note_fired(mutant);
        }
        for at in 0..self.processes.len() {
            if self.processes[at].client == client {
                self.poll_completed(at, self.late_completions)?;
            }
        }
        Ok(())
    }
}
