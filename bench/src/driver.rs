//! The measured loops: one operation after another, or many in flight. They allocate nothing, and
//! make no system calls except those of the clock.
//!
//! # How latency is measured
//! One after another: the clock is read once between two operations of a batch. The reading is the
//! end of one and the start of the next, so each latency includes one reading.
//!
//! In flight: a latency runs from a reading at or before the start of the operation to a reading at
//! or after its completion. Up to `READING_SHARED_MAX` operations share a reading. So a latency is
//! never too short. It is too long by at most the time that `READING_SHARED_MAX` calls take.
//!
//! With a [`Schedule`]: a latency counts from when the operation was due, also if earlier
//! operations delayed it. The service time, which is recorded too, counts from its start, as above.

use farside::PipelineFull;

use crate::accounting::now_ns;
use crate::arrivals::Schedule;
use crate::journal::Witness;
use crate::operations::{BATCH, Batch, Operation, Source, Values};
use crate::recorder::{Attribution, Recorder};
use crate::records::{self, Key, RecordCounter};
use crate::store::{Action, MeasuredStore, Outcome, Pipelined};
use crate::workload::Kind;

/// Limit on the operations in flight that share one reading of the clock. Above it latencies would
/// include more of the driver's own time.
const READING_SHARED_MAX: usize = 8;

/// The lane of operations that run one after another.
const ONLY_LANE: usize = 0;

/// The state that a thread keeps from phase to phase. The witness sees every operation.
pub struct Driver<'a, W> {
    witness: &'a mut W,
    batch: Batch,
    values: Values,
    /// The buffer for values that GETs find.
    value: Vec<u8>,
    depth: usize,
    schedule: Option<Schedule>,
    records: &'a RecordCounter,
}

impl<'a, W: Witness> Driver<'a, W> {
    /// A driver for values of up to this length, and this many operations in flight.
    pub fn new(
        witness: &'a mut W,
        (value_bytes_max, depth): (u32, usize),
        seed: u64,
        records: &'a RecordCounter,
    ) -> Self {
        let values = Values::new(value_bytes_max, seed);
        let value = Vec::with_capacity(value_bytes_max as usize);
        let (batch, schedule) = (Batch::new(), None);
        Self { witness, batch, values, value, depth, schedule, records }
    }

    /// Forgets the operations that are generated and not started yet, because the next phase has
    /// another source.
    pub fn clear(&mut self) {
        self.batch = Batch::new();
    }

    /// Sets the schedule: an operation starts when it is due, or as soon as possible after that.
    pub fn pace(&mut self, schedule: Option<Schedule>) {
        self.schedule = schedule;
    }

    /// Runs operations as long as `go_on` returns true and the source has any.
    pub fn drive<S: MeasuredStore>(
        &mut self,
        store: &mut S,
        source: &mut impl Source,
        recorder: &mut Recorder,
        go_on: impl Fn() -> bool,
    ) -> Result<(), S::Error> {
        self.batch.unclaim();
        if let Some(schedule) = &mut self.schedule {
            schedule.start(now_ns());
        }
        if self.depth == 1 {
            self.one_by_one(store, source, recorder, go_on)?;
        } else {
            let pipeline = store.pipeline()?;
            let lanes = vec![OperationInFlight::NOTHING; pipeline.depth()];
            let finished = Vec::with_capacity(READING_SHARED_MAX);
            PipelinedLoop { driver: self, pipeline, lanes, finished, recorder }
                .run(source, go_on)?;
        }
        if let Some(schedule) = &self.schedule {
            recorder.behind_ns = now_ns().saturating_sub(schedule.due_ns());
        }
        Ok(())
    }

    fn one_by_one<S: MeasuredStore>(
        &mut self,
        store: &mut S,
        source: &mut impl Source,
        recorder: &mut Recorder,
        go_on: impl Fn() -> bool,
    ) -> Result<(), S::Error> {
        let mut times = [Times::default(); BATCH];
        let mut attribution = Attribution::new(store);
        let mut last = now_ns();
        while go_on() && self.batch.refill(source) {
            let mut start = now_ns();
            recorder.driver_ns += start - last;
            let mut done = 0;
            for operation in self.batch.rest() {
                if !go_on() {
                    break;
                }
                if let Some(schedule) = &self.schedule {
                    let Some(now) = schedule.wait(&go_on) else { break };
                    start = now;
                }
                attribution.enter(operation.kind, store, recorder);
                let (witness, values) = (&mut *self.witness, &mut self.values);
                let is_expected = perform(store, operation, witness, values, &mut self.value)?;
                recorder.unexpected += u64::from(!is_expected);
                let end = now_ns();
                let due = take_due(&mut self.schedule, start);
                times[done] = Times { latency_ns: end - due, service_ns: end - start };
                start = end;
                done += 1;
            }
            last = start;
            for (operation, times) in self.batch.rest().iter().zip(&times[..done]) {
                times.record(operation.kind, recorder);
                if operation.kind == Kind::Insert {
                    self.records.acknowledge(operation.record);
                }
            }
            self.batch.consume(done);
        }
        attribution.leave(store, recorder);
        Ok(())
    }
}

/// Returns when the operation that starts now was due. Advances the schedule to the next one.
#[inline]
fn take_due(schedule: &mut Option<Schedule>, now: u64) -> u64 {
    let Some(schedule) = schedule else { return now };
    let due = schedule.due_ns();
    schedule.advance();
    due
}

/// How long an operation took: from when it was due, and from its start.
#[derive(Clone, Copy, Default)]
struct Times {
    latency_ns: u64,
    service_ns: u64,
}

impl Times {
    #[inline]
    fn record(&self, kind: Kind, recorder: &mut Recorder) {
        recorder.record(kind, self.latency_ns, self.service_ns);
    }
}

/// Performs one operation and waits for it. Returns whether it found what the workload had left.
#[inline(always)]
fn perform<S: MeasuredStore>(
    store: &mut S,
    operation: &Operation,
    witness: &mut impl Witness,
    values: &mut Values,
    found: &mut Vec<u8>,
) -> Result<bool, S::Error> {
    // One arm for each action: with a constant the compiler removes the match on the action.
    match operation.kind {
        Kind::Get => act(store, Action::Get, operation, witness, values, found),
        Kind::Put => act(store, Action::Put, operation, witness, values, found),
        Kind::Insert => act(store, Action::Insert, operation, witness, values, found),
        Kind::Rmw => Ok(act(store, Action::Get, operation, witness, values, found)?
            & act(store, Action::Put, operation, witness, values, found)?),
    }
}

/// Does one action of an operation. Returns whether it found what the workload had left.
#[inline(always)]
fn act<S: MeasuredStore>(
    store: &mut S,
    action: Action,
    &Operation { record, ref key, value_bytes, .. }: &Operation,
    witness: &mut impl Witness,
    values: &mut Values,
    found: &mut Vec<u8>,
) -> Result<bool, S::Error> {
    witness.begins(action.into(), record);
    let value = new_value(action, witness, values, value_bytes);
    let outcome = store.perform(action, key, value, found)?;
    witness.started_on(ONLY_LANE);
    witness.ends(ONLY_LANE, outcome);
    Ok(as_expected(outcome, value_bytes))
}

/// The value that an operation stores; empty if it stores none.
#[inline]
fn new_value<'v>(
    action: Action,
    witness: &'v mut impl Witness,
    values: &'v mut Values,
    value_bytes: u32,
) -> &'v [u8] {
    match action {
        Action::Put | Action::Insert => witness.value(values, value_bytes),
        Action::Get => &[],
    }
}

#[derive(Clone, Copy)]
struct OperationInFlight {
    kind: Kind,
    record: u64,
    value_bytes: u32,
    due_ns: u64,
    started_ns: u64,
    /// Whether the GET of a read-modify-write is done.
    has_read: bool,
}

impl OperationInFlight {
    const NOTHING: Self = Self {
        kind: Kind::Get,
        record: 0,
        value_bytes: 0,
        due_ns: 0,
        started_ns: 0,
        has_read: false,
    };
}

/// The loop with many operations in flight.
struct PipelinedLoop<'d, 'a, W, P> {
    driver: &'d mut Driver<'a, W>,
    pipeline: P,
    /// The operations in flight, by lane.
    lanes: Vec<OperationInFlight>,
    /// Completed operations whose latencies are recorded at the next reading.
    finished: Vec<OperationInFlight>,
    recorder: &'d mut Recorder,
}

impl<W: Witness, P: Pipelined> PipelinedLoop<'_, '_, W, P> {
    fn run(mut self, source: &mut impl Source, go_on: impl Fn() -> bool) -> Result<(), P::Error> {
        loop {
            let is_early = self.start(source, &go_on);
            if self.pipeline.in_flight() > 0 {
                self.finish(!is_early)?;
                continue;
            }
            let Some(schedule) = self.driver.schedule.as_ref().filter(|_| is_early) else {
                return Ok(());
            };
            if schedule.wait(&go_on).is_none() {
                return Ok(());
            }
        }
    }

    /// Fills the pipeline. Returns true if it stopped because the next operation is not due yet.
    fn start(&mut self, source: &mut impl Source, go_on: impl Fn() -> bool) -> bool {
        let mut now = now_ns();
        let mut sharing = 0;
        while self.pipeline.in_flight() < self.driver.depth && go_on() {
            let Some(&operation) = self.driver.batch.rest().first() else {
                let before = now_ns();
                if !self.driver.batch.refill(source) {
                    return false;
                }
                (now, sharing) = (now_ns(), 0);
                self.recorder.driver_ns += now - before;
                continue;
            };
            if sharing == READING_SHARED_MAX {
                (now, sharing) = (now_ns(), 0);
            }
            let due_ns = self.driver.schedule.as_ref().map_or(now, Schedule::due_ns);
            if due_ns > now {
                return true;
            }
            let Operation { kind, record, key, value_bytes } = operation;
            let in_flight = OperationInFlight {
                kind,
                record,
                value_bytes,
                due_ns,
                started_ns: now,
                has_read: false,
            };
            if self.submit(in_flight, &key).is_err() {
                return false;
            }
            if let Some(schedule) = &mut self.driver.schedule {
                schedule.advance();
            }
            self.driver.batch.consume(1);
            sharing += 1;
        }
        false
    }

    /// Starts an operation, or the PUT of a read-modify-write.
    fn submit(&mut self, in_flight: OperationInFlight, key: &Key) -> Result<(), PipelineFull> {
        let (pipeline, Driver { witness, values, .. }) = (&mut self.pipeline, &mut *self.driver);
        let (first, then) = in_flight.kind.actions();
        let action = then.filter(|_| in_flight.has_read).unwrap_or(first);
        witness.begins(action.into(), in_flight.record);
        let value = new_value(action, &mut **witness, values, in_flight.value_bytes);
        let lane = pipeline.start(action, key, value)?;
        witness.started_on(lane);
        self.lanes[lane] = in_flight;
        Ok(())
    }

    /// Takes all completions that have arrived. If none has and `may_wait` is true, waits for one.
    fn finish(&mut self, may_wait: bool) -> Result<(), P::Error> {
        let mut taken = if may_wait { self.pipeline.wait() } else { self.pipeline.poll() };
        while let Some(completed) = taken {
            let in_flight = self.lanes[completed.lane];
            if let Some(counters) = completed.counters {
                self.recorder.attribute(in_flight.kind, counters);
            }
            let outcome = match completed.result {
                Ok(outcome) => outcome,
                Err(error) => {
                    self.drain();
                    return Err(error);
                }
            };
            self.driver.witness.ends(completed.lane, outcome);
            let is_expected = as_expected(outcome, in_flight.value_bytes);
            self.recorder.unexpected += u64::from(!is_expected);
            if in_flight.kind == Kind::Rmw && !in_flight.has_read {
                let key = records::key_of(in_flight.record);
                // This cannot fail, because the GET's lane is free again.
                let _ = self.submit(OperationInFlight { has_read: true, ..in_flight }, &key);
            } else {
                self.finished.push(in_flight);
                if self.finished.len() == READING_SHARED_MAX {
                    self.record();
                }
            }
            taken = self.pipeline.poll();
        }
        self.record();
        Ok(())
    }

    /// After a failure: waits for the other operations in flight, so that the witness sees which of
    /// them completed.
    #[cold]
    fn drain(&mut self) {
        while let Some(completed) = self.pipeline.wait() {
            if let Ok(outcome) = completed.result {
                self.driver.witness.ends(completed.lane, outcome);
            }
        }
    }

    /// Records the finished operations, which share one reading of the clock.
    fn record(&mut self) {
        let now = now_ns();
        for OperationInFlight { kind, record, due_ns, started_ns, .. } in self.finished.drain(..) {
            let times = Times { latency_ns: now - due_ns, service_ns: now - started_ns };
            times.record(kind, self.recorder);
            if kind == Kind::Insert {
                self.driver.records.acknowledge(record);
            }
        }
    }
}

/// Whether an operation found what the workload had left.
#[inline]
fn as_expected(outcome: Outcome<'_>, value_bytes: u32) -> bool {
    outcome.applied && outcome.value.is_none_or(|value| value.len() == value_bytes as usize)
}

#[cfg(test)]
mod tests {
    //! Proves that a latency counts from when the operation was due, also if a slow operation
    //! delayed it, one by one and in flight. Also proves that a budget of operations is used
    //! exactly. The store is a stub whose first operation is slow.

    use std::sync::Arc;
    use std::time::Duration;

    use farside::Counters;

    use super::*;
    use crate::args::tests::ycsb;
    use crate::arrivals::{Arrivals, Schedule};
    use crate::operations::{Budget, Generator};
    use crate::pattern::Pattern;
    use crate::store::Completed;
    use crate::workload::Workload;

    /// A store whose operations succeed at once, except for the first one, which is slow.
    #[derive(Default)]
    struct SlowOnce {
        operations: u64,
        in_flight: Vec<usize>,
        /// The number of results that were taken.
        taken: u64,
        /// The number of the result that is an error.
        fails_at: Option<u64>,
        counters: Counters,
    }

    const STALL: Duration = Duration::from_millis(60);

    impl SlowOnce {
        fn operate(&mut self) {
            if self.operations == 0 {
                std::thread::sleep(STALL);
            }
            self.operations += 1;
        }

        fn post(&mut self) -> Result<usize, PipelineFull> {
            self.operate();
            let lane =
                (0..DEPTH).find(|lane| !self.in_flight.contains(lane)).ok_or(PipelineFull)?;
            self.in_flight.push(lane);
            Ok(lane)
        }
    }

    const DEPTH: usize = 2;

    impl MeasuredStore for SlowOnce {
        type Error = ();
        type Pipeline<'s> = &'s mut Self;

        fn perform<'v>(
            &mut self,
            _: Action,
            _: &Key,
            _: &[u8],
            _: &'v mut Vec<u8>,
        ) -> Result<Outcome<'v>, ()> {
            self.operate();
            Ok(Action::Put.outcome(true, &[]))
        }

        fn pipeline(&mut self) -> Result<&mut Self, ()> {
            Ok(self)
        }

        fn counters(&self) -> Counters {
            self.counters
        }
    }

    impl Pipelined for &mut SlowOnce {
        type Error = ();

        fn start(&mut self, _: Action, _: &Key, _: &[u8]) -> Result<usize, PipelineFull> {
            self.post()
        }

        fn wait(&mut self) -> Option<Completed<'_, ()>> {
            self.poll()
        }

        fn poll(&mut self) -> Option<Completed<'_, ()>> {
            let lane = self.in_flight.pop()?;
            let fails = self.fails_at.is_some_and(|number| number == self.taken);
            self.taken += 1;
            let result = if fails { Err(()) } else { Ok(Action::Put.outcome(true, &[])) };
            Some(Completed { lane, result, counters: Some(&self.counters) })
        }

        fn in_flight(&self) -> usize {
            self.in_flight.len()
        }

        fn depth(&self) -> usize {
            DEPTH
        }
    }

    /// Drives `operations` operations. They arrive at this rate; without a rate, each starts when
    /// another has ended.
    fn drive(
        mut store: SlowOnce,
        depth: usize,
        operations: u64,
        rate_ops_s: Option<f64>,
    ) -> Recorder {
        let records = Arc::new(RecordCounter::new(10));
        let pattern = Pattern::new(&ycsb("ycsb --workload c --records 10"));
        let mut source = Generator::new(pattern, records.clone(), 1);
        source.limit(Some(Arc::new(Budget::new(operations))));
        let mut witness = ();
        let mut driver = Driver::new(&mut witness, (64, depth), 1, &records);
        driver.pace(rate_ops_s.map(|rate| Schedule::new(Arrivals::Fixed, rate, (0, 1), 1)));
        let mut recorder = Recorder::new(Workload::C.mix()).with_service_times();
        driver.drive(&mut store, &mut source, &mut recorder, || true).unwrap();
        assert_eq!(recorder.operations(), operations, "{depth} {rate_ops_s:?}");
        recorder
    }

    #[test]
    fn an_operation_that_a_slow_one_delays_counts_from_when_it_was_due() {
        let ms = |number: u64| number * 1_000_000;
        for depth in [1, DEPTH] {
            let late = |recorder: &Recorder| {
                let (_, gets) = recorder.kinds().next().unwrap();
                let service_times = gets.service_times.as_ref().unwrap().histogram();
                assert!(service_times.max() > ms(59), "the slow operation itself");
                gets.latencies.histogram().count_between(ms(15), ms(10_000))
            };
            // The first operation takes 60 ms. Operations that are due in its first 40 ms start 20
            // ms late or more.
            let open = drive(SlowOnce::default(), depth, 200, Some(1000.0));
            assert!(late(&open) >= 40, "{depth}: {}", late(&open));
            // Without a schedule no operation is due while the slow one runs.
            let closed = drive(SlowOnce::default(), depth, 200, None);
            assert!(late(&closed) < 40, "{depth}: {}", late(&closed));
        }
    }

    #[test]
    fn every_operation_is_done_at_any_rate() {
        for rate_ops_s in [300_000.0, 1e6, 3e6, 1e7] {
            for depth in [1, DEPTH] {
                let never_slow = SlowOnce { operations: 1, ..SlowOnce::default() };
                drive(never_slow, depth, 20_000, Some(rate_ops_s));
            }
        }
    }

    /// A witness that counts operations.
    #[derive(Default)]
    struct Counting {
        started: u64,
        ended: u64,
    }

    impl Witness for Counting {
        fn begins(&mut self, _: farside_linearizability::HistoryOperation, _: u64) {}

        fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8] {
            values.take(value_bytes)
        }

        fn started_on(&mut self, _: usize) {
            self.started += 1;
        }

        fn ends(&mut self, _: usize, _: Outcome<'_>) {
            self.ended += 1;
        }
    }

    #[test]
    fn the_witness_of_a_failed_run_sees_every_operation_that_completed() {
        let records = Arc::new(RecordCounter::new(10));
        let pattern = Pattern::new(&ycsb("ycsb --workload c --records 10"));
        let mut source = Generator::new(pattern, records.clone(), 1);
        for fails_at in [0, 1, 10, 11] {
            let mut store =
                SlowOnce { operations: 1, fails_at: Some(fails_at), ..SlowOnce::default() };
            let mut witness = Counting::default();
            let mut driver = Driver::new(&mut witness, (64, DEPTH), 1, &records);
            let mut recorder = Recorder::new(Workload::C.mix());
            assert!(driver.drive(&mut store, &mut source, &mut recorder, || true).is_err());
            // Every operation except the one that failed.
            assert_eq!((store.taken, witness.ended), (witness.started, witness.started - 1));
        }
    }
}
