//! Checks that the processes of writers run, and that their clocks do not fall behind.
//!
//! While a client's host is paused, its clock may stand still. Afterwards the client takes old
//! proofs of words for recent ones. Over verbs its device answers probes meanwhile. So the server
//! asks each client's process what its clock reads, and compares. A client is fenced if it does not
//! answer in time, or if its clock fell too far behind the server's. It then reconnects without any
//! proof.
//!
//! Four intervals add up to the lag that T_word allows for (`clock_lag_max_ns`;
//! `docs/protocol.md`, "Time"):
//!
//! - the time until the first question,
//! - the lag that an answer may show,
//! - the time until the next question,
//! - the longest wait for its answer.

use std::collections::BTreeMap;

use farside_fabric::Nanos;
use farside_fabric::wait_timer::WaitTimer;

/// A clock may run slow or fast by a sixteenth of the time that has passed, which does not count as
/// lag.
const DRIFT_DIVISOR: i128 = 16;

/// The clock of a client.
struct Client {
    /// An upper bound of how far this clock is ahead of the server's. From answer to answer it
    /// changes by a sixteenth of the time at most. `None` before the first answer.
    ahead_ns: Option<i128>,
    /// When it answered last, or connected.
    answered_at: Nanos,
    /// The question without an answer: when it was sent, and the time waited since then.
    awaited: Option<(Nanos, WaitTimer)>,
}

/// The clients to ask and to fence.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DueClients {
    /// The clients to ask.
    pub(super) ask: Vec<u64>,
    /// The clients that have not answered in time, and for how many milliseconds.
    pub(super) silent: Vec<(u64, u64)>,
}

/// All writers, by the number of their connection.
pub(super) struct RollCall {
    lag_max_ns: Nanos,
    clients: BTreeMap<u64, Client>,
    /// The number of questions without an answer.
    awaited: usize,
    asked_at: Nanos,
    stepped_at: Nanos,
}

impl RollCall {
    /// Creates a roll call without writers. It fences a client before the client's clock falls
    /// behind by more than `lag_max_ns`.
    pub(super) fn new(lag_max_ns: Nanos) -> Self {
        Self { lag_max_ns, clients: BTreeMap::new(), awaited: 0, asked_at: 0, stepped_at: 0 }
    }

    /// Returns the time between two questions to a client.
    fn period_ns(&self) -> Nanos {
        self.lag_max_ns / 8
    }

    /// Returns the largest lag that an answer may show.
    fn shown_max_ns(&self) -> Nanos {
        self.lag_max_ns / 4
    }

    /// Returns how long a client may take to answer.
    fn silence_max_ns(&self) -> Nanos {
        self.lag_max_ns / 2
    }

    /// Adds a writer that connected. The first one also starts the time until the next questions.
    pub(super) fn add(&mut self, connection_number: u64, now: Nanos) {
        if self.clients.is_empty() {
            self.asked_at = now;
        }
        self.clients
            .insert(connection_number, Client { ahead_ns: None, answered_at: now, awaited: None });
    }

    /// Removes a client, unless it was removed before.
    pub(super) fn remove(&mut self, connection_number: u64) {
        let awaited =
            self.clients.remove(&connection_number).is_some_and(|client| client.awaited.is_some());
        self.awaited -= usize::from(awaited);
    }

    /// When to call [`RollCall::step`]; `None` while there are no writers.
    pub(super) fn next_step_at(&self) -> Option<Nanos> {
        let ask_at = self.asked_at.saturating_add(self.period_ns());
        let look_at = WaitTimer::since(self.stepped_at).next_look_at(self.silence_max_ns());
        let at = if self.awaited > 0 { ask_at.min(look_at) } else { ask_at };
        (!self.clients.is_empty()).then_some(at)
    }

    /// Advances the waits for answers, and returns the clients to ask and to fence.
    pub(super) fn step(&mut self, now: Nanos) -> DueClients {
        let mut call = DueClients::default();
        let asks_now = now >= self.asked_at.saturating_add(self.period_ns());
        let silence_max_ns = self.silence_max_ns();
        for (connection_number, client) in &mut self.clients {
            match &mut client.awaited {
                Some((_, waiting)) => {
                    waiting.advance(now);
                    if waiting.waited() >= silence_max_ns {
                        call.silent.push((*connection_number, waiting.waited() / 1_000_000));
                    }
                }
                None if asks_now => {
                    client.awaited = Some((now, WaitTimer::since(now)));
                    self.awaited += 1;
                    call.ask.push(*connection_number);
                }
                None => {}
            }
        }
        self.stepped_at = now;
        if asks_now {
            self.asked_at = now;
        }
        call
    }

    /// Takes a client's answer, the time that its clock shows.
    ///
    /// # Errors
    /// The clock fell too far behind the server's clock; the error is the lag in milliseconds.
    pub(super) fn answered(
        &mut self,
        connection_number: u64,
        clock: Nanos,
        now: Nanos,
    ) -> Result<(), u64> {
        let shown_max_ns = self.shown_max_ns();
        let Some(client) = self.clients.get_mut(&connection_number) else { return Ok(()) };
        // An answer without a question does not count: it is unknown when the clock was read.
        let Some((asked_at, mut waiting)) = client.awaited.take() else { return Ok(()) };
        self.awaited -= 1;
        // The client read its clock between the question and now. The timer does not count time in
        // which the server was stopped. Then the answer is taken for an earlier one, which makes
        // the lag look smaller.
        waiting.advance(now);
        let answered_at = asked_at.saturating_add(waiting.waited());
        let clock = i128::from(clock);
        let (ahead_max, ahead_min) =
            (clock - i128::from(asked_at), clock - i128::from(answered_at));
        let passed = i128::from(now.saturating_sub(client.answered_at));
        let ahead = client.ahead_ns.map_or(ahead_max, |before| {
            ahead_max.clamp(before - passed / DRIFT_DIVISOR, before + passed / DRIFT_DIVISOR)
        });
        (client.ahead_ns, client.answered_at) = (Some(ahead), now);
        let behind = ahead - ahead_min;
        if behind > i128::from(shown_max_ns) { Err((behind / 1_000_000) as u64) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::wait_timer::WAITED_NS_MAX;

    use super::*;

    const MS: Nanos = 1_000_000;
    const LAG_MAX: Nanos = 6_400 * MS;
    const PERIOD: Nanos = LAG_MAX / 8;

    /// A server, and a client that answers within 20 ms with what its own clock reads.
    struct World {
        roll_call: RollCall,
        now: Nanos,
        clock: Nanos,
    }

    impl World {
        fn new() -> Self {
            let mut roll_call = RollCall::new(LAG_MAX);
            roll_call.add(7, 1000 * MS);
            Self { roll_call, now: 1000 * MS, clock: 5 * MS }
        }

        /// Advances the time to the next step and does it. The client's clock counts this many
        /// milliseconds of each second.
        fn step(&mut self, counted_ms: u64) -> DueClients {
            let at = self.roll_call.next_step_at().unwrap();
            self.advance(at.saturating_sub(self.now), counted_ms);
            self.roll_call.step(self.now)
        }

        fn advance(&mut self, by: Nanos, counted_ms: u64) {
            self.now += by;
            self.clock += by / 1000 * counted_ms;
        }

        /// Does the next step, in which the client is asked, and has the client answer.
        fn ask_and_answer(&mut self, counted_ms: u64) -> Result<(), u64> {
            assert_eq!(self.step(counted_ms), DueClients { ask: vec![7], silent: vec![] });
            self.advance(20 * MS, counted_ms);
            self.roll_call.answered(7, self.clock, self.now)
        }
    }

    #[test]
    fn a_client_that_answers_is_not_fenced() {
        // As fast as the server's clock, and 6 % slower and faster.
        for counted_ms in [1000, 940, 1060] {
            let mut world = World::new();
            for _ in 0..10_000 {
                assert_eq!(world.ask_and_answer(counted_ms), Ok(()), "{counted_ms}");
            }
        }
    }

    #[test]
    fn no_step_is_due_without_writers() {
        let mut roll_call = RollCall::new(LAG_MAX);
        assert_eq!(roll_call.next_step_at(), None);
        roll_call.add(7, 0);
        assert_eq!(roll_call.step(PERIOD).ask, [7]);
        roll_call.remove(7);
        assert_eq!(roll_call.next_step_at(), None);
        roll_call.add(8, 9 * PERIOD);
        assert_eq!(roll_call.next_step_at(), Some(10 * PERIOD), "no answer is awaited");
    }

    #[test]
    fn a_silent_process_is_reported_and_others_are_asked_meanwhile() {
        let mut world = World::new();
        world.ask_and_answer(1000).unwrap();
        world.roll_call.add(9, world.now);
        let (mut asked, started) = (0, world.now);
        let silent = loop {
            let call = world.step(1000);
            asked += call.ask.iter().filter(|connection_number| **connection_number == 9).count();
            if call.ask.contains(&9) {
                world.roll_call.answered(9, world.now, world.now).unwrap();
            }
            if !call.silent.is_empty() {
                break call.silent;
            }
        };
        assert_eq!(silent, [(7, LAG_MAX / 2 / MS)]);
        assert!(world.now - started <= PERIOD + LAG_MAX / 2, "{}", world.now - started);
        assert_eq!(asked, 5);
    }

    #[test]
    fn a_clock_that_stood_still_is_found_at_the_next_answer() {
        let mut world = World::new();
        world.ask_and_answer(1000).unwrap();
        assert_eq!(world.step(0).ask, [7]);
        world.advance(LAG_MAX / 4, 0);
        let behind = world.roll_call.answered(7, world.clock, world.now);
        // The timer counts only a part of this wait, because the server did not advance it.
        assert_eq!(behind, Ok(()));
        let behind = world.ask_and_answer(1000);
        assert!(matches!(behind, Err(2200..2400)), "{behind:?}");
    }

    /// Each pause is too short to be noticed. The sum is not.
    #[test]
    fn short_pauses_add_up() {
        let mut world = World::new();
        world.ask_and_answer(1000).unwrap();
        let rounds = (0..100).take_while(|_| world.ask_and_answer(500).is_ok()).count();
        assert!((3..5).contains(&rounds), "{rounds}");
    }

    /// The worst case of the four intervals in the module's documentation.
    #[test]
    fn no_clock_falls_further_behind_than_the_maximum_lag() {
        // The clock stands still from the connection to the first answer, and is right for a while.
        // Then it loses as much as an answer may show. Then it stands still for good.
        let mut world = World::new();
        world.ask_and_answer(0).unwrap();
        let mut lost = world.now - 1000 * MS;
        for _ in 0..3 {
            world.ask_and_answer(1000).unwrap();
        }
        let before = world.now;
        world.advance(LAG_MAX / 4 - 30 * MS, 0);
        lost += world.now - before;
        world.ask_and_answer(1000).unwrap();
        let before = world.now;
        while world.step(0).silent.is_empty() {}
        lost += world.now - before;
        assert!(lost > LAG_MAX / 8 * 7 && lost <= LAG_MAX, "{lost} of {LAG_MAX}");
    }

    #[test]
    fn a_server_that_was_stopped_itself_fences_no_client() {
        let mut world = World::new();
        world.ask_and_answer(1000).unwrap();
        // It is stopped before it asks, while it waits, and when the answer has arrived already.
        world.advance(3_600_000 * MS, 1000);
        assert_eq!(world.ask_and_answer(1000), Ok(()));
        world.step(1000);
        world.advance(3_600_000 * MS, 1000);
        assert_eq!(world.roll_call.step(world.now).silent, []);
        assert!(world.roll_call.next_step_at().unwrap() <= world.now + WAITED_NS_MAX);
        let early_clock = world.clock - 3_600_000 * MS;
        assert_eq!(world.roll_call.answered(7, early_clock, world.now), Ok(()));
        assert_eq!(world.ask_and_answer(1000), Ok(()));
    }

    #[test]
    fn no_clock_overflows() {
        for clock in [0, 1, u64::MAX, u64::MAX / 2] {
            let mut world = World::new();
            world.ask_and_answer(1000).unwrap();
            world.step(1000);
            let _ = world.roll_call.answered(7, clock, world.now);
            let _ = world.roll_call.answered(8, clock, world.now);
        }
    }
}
