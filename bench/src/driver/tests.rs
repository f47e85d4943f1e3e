//! Proves that the latency of an operation counts from when it was meant to start, also if a slow
//! one kept it waiting. That holds one by one and in flight. A count of operations is kept exactly.
//! The store is a stub that is slow once.

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

/// Every operation succeeds at once, except the first one.
#[derive(Default)]
struct SlowOnce {
    operations: u64,
    in_flight: Vec<usize>,
    /// How many results were taken.
    taken: u64,
    /// Which of them is an error.
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
        let lane = (0..DEPTH).find(|lane| !self.in_flight.contains(lane)).ok_or(PipelineFull)?;
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
        Ok(Outcome::Stored)
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
        let result = if fails { Err(()) } else { Ok(Outcome::Stored) };
        Some(Completed { lane, result, counters: &self.counters })
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn depth(&self) -> usize {
        DEPTH
    }
}

/// So many operations that arrive at this rate, or one when another has ended.
fn drive(mut store: SlowOnce, depth: usize, operations: u64, rate_ops_s: Option<f64>) -> Recorder {
    let (records, progress) = (Arc::new(RecordCounter::new(10, (0, 1))), AtomicU64::new(0));
    let pattern = Pattern::new(&ycsb("ycsb --workload c --records 10"));
    let mut source = Generator::new(pattern, records.clone(), 1);
    source.limit(Some(Arc::new(Budget::new(operations))));
    let mut witness = ();
    let mut driver = Driver::new(&mut witness, (64, depth), 1, &records, &progress);
    driver.pace(rate_ops_s.map(|rate| Schedule::new(Arrivals::Fixed, rate, (0, 1), 1)));
    let mut recorder = Recorder::new(Workload::C.mix()).with_services();
    driver.drive(&mut store, &mut source, &mut recorder, || true).unwrap();
    assert_eq!(recorder.operations(), operations, "{depth} {rate_ops_s:?}");
    recorder
}

#[test]
fn who_waits_for_a_slow_operation_is_late() {
    let ms = |number: u64| number * 1_000_000;
    for depth in [1, DEPTH] {
        let late = |recorder: &Recorder| {
            let (_, gets) = recorder.kinds().next().unwrap();
            let services = gets.services.as_ref().unwrap();
            assert!(services.max() > ms(59), "the slow one itself");
            gets.latencies.count_between(ms(15), ms(10_000))
        };
        // The first waits for sixty milliseconds, those of the next forty for twenty at least.
        let open = drive(SlowOnce::default(), depth, 200, Some(1000.0));
        assert!(late(&open) >= 40, "{depth}: {}", late(&open));
        // No operation was meant to start while none could.
        let closed = drive(SlowOnce::default(), depth, 200, None);
        assert!(late(&closed) < 40, "{depth}: {}", late(&closed));
    }
}

#[test]
fn operations_that_come_due_at_any_moment_are_all_done() {
    for rate_ops_s in [300_000.0, 1e6, 3e6, 1e7] {
        for depth in [1, DEPTH] {
            let never_slow = SlowOnce { operations: 1, ..SlowOnce::default() };
            drive(never_slow, depth, 20_000, Some(rate_ops_s));
        }
    }
}

/// Counts what it is told.
#[derive(Default)]
struct Counting {
    begun: u64,
    ended: u64,
}

impl Witness for Counting {
    fn begins(&mut self, _: farside_linearizability::HistoryOperation, _: u64) {}

    fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8] {
        values.take(value_bytes)
    }

    fn goes_on(&mut self, _: usize) {
        self.begun += 1;
    }

    fn ends(&mut self, _: usize, _: Outcome<'_>) {
        self.ended += 1;
    }
}

#[test]
fn a_run_that_fails_still_tells_which_operations_have_completed() {
    let (records, progress) = (Arc::new(RecordCounter::new(10, (0, 1))), AtomicU64::new(0));
    let pattern = Pattern::new(&ycsb("ycsb --workload c --records 10"));
    let mut source = Generator::new(pattern, records.clone(), 1);
    for fails_at in [0, 1, 10, 11] {
        let mut store = SlowOnce { operations: 1, fails_at: Some(fails_at), ..SlowOnce::default() };
        let mut witness = Counting::default();
        let mut driver = Driver::new(&mut witness, (64, DEPTH), 1, &records, &progress);
        let mut recorder = Recorder::new(Workload::C.mix());
        assert!(driver.drive(&mut store, &mut source, &mut recorder, || true).is_err());
        // All but the one that failed.
        assert_eq!((store.taken, witness.ended), (witness.begun, witness.begun - 1));
    }
}
