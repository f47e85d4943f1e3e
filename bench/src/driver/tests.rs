//! Proves that a latency counts from when the operation was due, also if a slow operation delayed
//! it, one by one and in flight. Also proves that a budget of operations is used exactly. The store
//! is a stub whose first operation is slow.

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
fn drive(mut store: SlowOnce, depth: usize, operations: u64, rate_ops_s: Option<f64>) -> Recorder {
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
        // The first operation takes 60 ms. Operations that are due in its first 40 ms start 20 ms
        // late or more.
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
        let mut store = SlowOnce { operations: 1, fails_at: Some(fails_at), ..SlowOnce::default() };
        let mut witness = Counting::default();
        let mut driver = Driver::new(&mut witness, (64, DEPTH), 1, &records);
        let mut recorder = Recorder::new(Workload::C.mix());
        assert!(driver.drive(&mut store, &mut source, &mut recorder, || true).is_err());
        // Every operation except the one that failed.
        assert_eq!((store.taken, witness.ended), (witness.started, witness.started - 1));
    }
}
