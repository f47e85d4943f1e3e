//! Whether the processes of writers are there, and whether their clocks go on.
//!
//! A client whose host is paused does not see that time passes: it takes old proofs of words for
//! young ones. Over verbs its device answers probes meanwhile. So the server asks each client's
//! process what its clock reads, and compares. A client that does not answer in time, or whose
//! clock fell behind the server's by too much, is fenced; it connects anew, and knows nothing then.
//!
//! Four intervals add up to what T_word leaves for this (`clock_lag_max_ns`; `docs/protocol.md`,
//! "Time"). They are the time until the first question, what an answer may show, the time until the
//! next question, and that question's longest wait for an answer.

use std::collections::BTreeMap;

use farside_fabric::Nanos;
use farside_fabric::waiting::WaitTimer;

/// By what part of the time a clock may run slow or fast and count as right.
const DRIFT: i128 = 16;

/// A client as far as its clock goes.
struct Client {
    /// By how much its clock was ahead of the server's, at most, as far as drift does not explain
    /// the difference to now. `None` before the first answer.
    ahead_ns: Option<i128>,
    /// When that was found out.
    answered_at: Nanos,
    /// For an answer, and when it was asked.
    awaited: Option<(Nanos, WaitTimer)>,
}

/// What to do now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    /// The clients to ask.
    pub(super) ask: Vec<u64>,
    /// The clients that did not answer, and for how many milliseconds.
    pub(super) silent: Vec<(u64, u64)>,
}

/// All writers, by the token of their connection.
pub(super) struct RollCall {
    lag_max_ns: Nanos,
    clients: BTreeMap<u64, Client>,
    /// How many have not answered yet.
    awaited: usize,
    asked_at: Nanos,
    looked_at: Nanos,
}

impl RollCall {
    /// For clients of which none may fall behind by more than this.
    pub(super) fn new(lag_max_ns: Nanos) -> Self {
        Self { lag_max_ns, clients: BTreeMap::new(), awaited: 0, asked_at: 0, looked_at: 0 }
    }

    /// How often each client is asked.
    fn period_ns(&self) -> Nanos {
        self.lag_max_ns / 8
    }

    /// How far an answer may show that a clock fell behind.
    fn shown_max_ns(&self) -> Nanos {
        self.lag_max_ns / 4
    }

    /// How long a client may take to answer.
    fn silence_max_ns(&self) -> Nanos {
        self.lag_max_ns / 2
    }

    /// A writer connected. Only the first one starts the clock.
    pub(super) fn came(&mut self, token: u64, now: Nanos) {
        if self.clients.is_empty() {
            self.asked_at = now;
        }
        self.clients.insert(token, Client { ahead_ns: None, answered_at: now, awaited: None });
    }

    /// It is no client any more.
    pub(super) fn left(&mut self, token: u64) {
        let awaited = self.clients.remove(&token).is_some_and(|client| client.awaited.is_some());
        self.awaited -= usize::from(awaited);
    }

    /// When there is something to do; never while there are no writers.
    pub(super) fn next_step_at(&self) -> Option<Nanos> {
        let ask_at = self.asked_at.saturating_add(self.period_ns());
        let look_at = WaitTimer::since(self.looked_at).next_look_at(self.silence_max_ns());
        let at = if self.awaited > 0 { ask_at.min(look_at) } else { ask_at };
        (!self.clients.is_empty()).then_some(at)
    }

    /// Goes on, when [`RollCall::next_step_at`] says so.
    pub(super) fn step(&mut self, now: Nanos) -> Call {
        let mut call = Call::default();
        let is_time = now >= self.asked_at.saturating_add(self.period_ns());
        let silence_max_ns = self.silence_max_ns();
        for (token, client) in &mut self.clients {
            match &mut client.awaited {
                Some((_, waiting)) => {
                    waiting.advance(now);
                    if waiting.waited() >= silence_max_ns {
                        call.silent.push((*token, waiting.waited() / 1_000_000));
                    }
                }
                None if is_time => {
                    client.awaited = Some((now, WaitTimer::since(now)));
                    self.awaited += 1;
                    call.ask.push(*token);
                }
                None => {}
            }
        }
        self.looked_at = now;
        if is_time {
            self.asked_at = now;
        }
        call
    }

    /// A client's clock reads this; by how many milliseconds it fell behind if that is too much.
    pub(super) fn answered(&mut self, token: u64, clock: Nanos, now: Nanos) -> Result<(), u64> {
        let shown_max_ns = self.shown_max_ns();
        let Some(client) = self.clients.get_mut(&token) else { return Ok(()) };
        // What was not asked says nothing.
        let Some((asked_at, mut waiting)) = client.awaited.take() else { return Ok(()) };
        self.awaited -= 1;
        // It read its clock between the question and now. A server that was stopped meanwhile
        // does not know when it was answered, and takes it to have been early.
        waiting.advance(now);
        let answered_at = asked_at.saturating_add(waiting.waited());
        let clock = i128::from(clock);
        let (most, least) = (clock - i128::from(asked_at), clock - i128::from(answered_at));
        let passed = i128::from(now.saturating_sub(client.answered_at));
        let ahead = client
            .ahead_ns
            .map_or(most, |before| most.clamp(before - passed / DRIFT, before + passed / DRIFT));
        (client.ahead_ns, client.answered_at) = (Some(ahead), now);
        let behind = ahead - least;
        if behind > i128::from(shown_max_ns) { Err((behind / 1_000_000) as u64) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::waiting::WAITED_NS_MAX;

    use super::*;

    const MS: Nanos = 1_000_000;
    const LAG_MAX: Nanos = 6_400 * MS;
    const PERIOD: Nanos = LAG_MAX / 8;

    /// A server, and one client with a clock of its own that it shows within 20 ms.
    struct World {
        roll_call: RollCall,
        now: Nanos,
        clock: Nanos,
    }

    impl World {
        fn new() -> Self {
            let mut roll_call = RollCall::new(LAG_MAX);
            roll_call.came(7, 1000 * MS);
            Self { roll_call, now: 1000 * MS, clock: 5 * MS }
        }

        /// Until the next thing to do; of each second the client's clock counts this much.
        fn pass(&mut self, counted_ms: u64) -> Call {
            let at = self.roll_call.next_step_at().unwrap();
            self.advance(at.saturating_sub(self.now), counted_ms);
            self.roll_call.step(self.now)
        }

        fn advance(&mut self, by: Nanos, counted_ms: u64) {
            self.now += by;
            self.clock += by / 1000 * counted_ms;
        }

        /// Until the client was asked and has answered.
        fn round(&mut self, counted_ms: u64) -> Result<(), u64> {
            assert_eq!(self.pass(counted_ms), Call { ask: vec![7], silent: vec![] });
            self.advance(20 * MS, counted_ms);
            self.roll_call.answered(7, self.clock, self.now)
        }
    }

    #[test]
    fn a_client_that_answers_stays() {
        // As fast as the server's clock, and as much slower or faster as clocks may be.
        for counted_ms in [1000, 940, 1060] {
            let mut world = World::new();
            for _ in 0..10_000 {
                assert_eq!(world.round(counted_ms), Ok(()), "{counted_ms}");
            }
        }
    }

    #[test]
    fn without_writers_nothing_is_asked() {
        let mut roll_call = RollCall::new(LAG_MAX);
        assert_eq!(roll_call.next_step_at(), None);
        roll_call.came(7, 0);
        assert_eq!(roll_call.step(PERIOD).ask, [7]);
        roll_call.left(7);
        assert_eq!(roll_call.next_step_at(), None);
        roll_call.came(8, 9 * PERIOD);
        assert_eq!(roll_call.next_step_at(), Some(10 * PERIOD), "no answer is awaited");
    }

    #[test]
    fn a_silent_process_is_named_and_others_are_asked_meanwhile() {
        let mut world = World::new();
        world.round(1000).unwrap();
        world.roll_call.came(9, world.now);
        let (mut asked, started) = (0, world.now);
        let silent = loop {
            let call = world.pass(1000);
            asked += call.ask.iter().filter(|token| **token == 9).count();
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
    fn a_clock_that_stood_still_is_seen_when_it_goes_on() {
        let mut world = World::new();
        world.round(1000).unwrap();
        assert_eq!(world.pass(0).ask, [7]);
        world.advance(LAG_MAX / 4, 0);
        let behind = world.roll_call.answered(7, world.clock, world.now);
        // Waiting counts what there was to see: this server did not look meanwhile.
        assert_eq!(behind, Ok(()));
        let behind = world.round(1000);
        assert!(matches!(behind, Err(2200..2400)), "{behind:?}");
    }

    /// Paused again and again, each time too briefly to be silent for long: the sum counts.
    #[test]
    fn short_pauses_add_up() {
        let mut world = World::new();
        world.round(1000).unwrap();
        let rounds = (0..100).take_while(|_| world.round(500).is_ok()).count();
        assert!((3..5).contains(&rounds), "{rounds}");
    }

    /// All that a clock can lose before its client is fenced, whatever it does, is what T_word
    /// leaves for it.
    #[test]
    fn no_clock_falls_behind_by_more() {
        // Stands still right behind the connection, is right for a while, then loses as much as
        // an answer may show, then stands still for good.
        let mut world = World::new();
        world.round(0).unwrap();
        let born = world.now - 1000 * MS;
        let mut lost = born;
        for _ in 0..3 {
            world.round(1000).unwrap();
        }
        let before = world.now;
        world.advance(LAG_MAX / 4 - 30 * MS, 0);
        lost += world.now - before;
        world.round(1000).unwrap();
        let before = world.now;
        while world.pass(0).silent.is_empty() {}
        lost += world.now - before;
        assert!(lost > LAG_MAX / 8 * 7 && lost <= LAG_MAX, "{lost} of {LAG_MAX}");
    }

    #[test]
    fn a_server_that_was_stopped_itself_fences_no_client() {
        let mut world = World::new();
        world.round(1000).unwrap();
        // Before it asked, while it waits, and with the answer there already.
        world.advance(3_600_000 * MS, 1000);
        assert_eq!(world.round(1000), Ok(()));
        world.pass(1000);
        world.advance(3_600_000 * MS, 1000);
        assert_eq!(world.roll_call.step(world.now).silent, []);
        assert!(world.roll_call.next_step_at().unwrap() <= world.now + WAITED_NS_MAX);
        let at_once = world.clock - 3_600_000 * MS;
        assert_eq!(world.roll_call.answered(7, at_once, world.now), Ok(()));
        assert_eq!(world.round(1000), Ok(()));
    }

    #[test]
    fn any_clock_is_taken() {
        for clock in [0, 1, u64::MAX, u64::MAX / 2] {
            let mut world = World::new();
            world.round(1000).unwrap();
            world.pass(1000);
            let _ = world.roll_call.answered(7, clock, world.now);
            let _ = world.roll_call.answered(8, clock, world.now);
        }
    }
}
