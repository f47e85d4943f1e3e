//! Proves the price list exactly, with a clock that only a test advances. With a real clock, a
//! process that is descheduled during a READ rightly pays for another READ. Guards against relying
//! on an old proof of a word, and against dropping a proof too early.
//!
//! A value with an expiry time is absent from that millisecond on, for every operation. The check
//! costs nothing for operations that READ the block anyway, and nothing for other values.

use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use farside_fabric::shm::ShmFabric;
use farside_fabric::{
    ChainError, Completion, Counters, Endpoint, Fabric, Intercepted, Interceptor, LaneId, Nanos,
    RegionIndex, Verb,
};
use farside_protocol::{
    Action, Expected, Failure, LANE, Lifetime, Operation, ScanCursor, next_entry,
};
use farside_tests::ServerProcess;
use farside_tests::engine::{TestEngine, engine_over};

const FOREVER: Lifetime = Lifetime::FOREVER;
const VALUE: &[u8] = b"value";

/// Replaces the fabric's clock by the test's, and refuses chains whose deadline has passed.
struct TestClock {
    clock: Rc<Clock>,
    late: VecDeque<LaneId>,
}

#[derive(Default)]
struct Clock {
    now: Cell<Nanos>,
    /// The delay of the next chain before it is executed.
    stall: Cell<Nanos>,
}

impl Clock {
    fn advance(&self, nanos: Nanos) {
        self.now.set(self.now.get() + nanos);
    }
}

impl Interceptor<ShmFabric> for TestClock {
    fn now(&self, _: &ShmFabric) -> Nanos {
        self.clock.now.get()
    }

    fn wall_clock_ns(&self, _: &ShmFabric) -> u64 {
        self.clock.now.get()
    }

    fn post(
        &mut self,
        fabric: &mut ShmFabric,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        self.clock.advance(self.clock.stall.take());
        match self.clock.now.get() > deadline {
            true => self.late.push_back(lane),
            false => fabric.post(lane, region, chain, Nanos::MAX),
        }
    }

    /// Waits in real time: an operation waits only for the server's blocks.
    fn wait(&mut self, fabric: &mut ShmFabric, lane: LaneId, until: Nanos) {
        fabric.wait(lane, fabric.now() + until - self.clock.now.get());
    }

    fn poll(&mut self, fabric: &mut ShmFabric) -> Option<Completion> {
        let late = |lane| Completion { lane, result: Err(ChainError::Late) };
        self.late.pop_front().map(late).or_else(|| fabric.poll())
    }
}

type ClockedFabric = Intercepted<ShmFabric, TestClock>;
type ClockedEngine = TestEngine<ClockedFabric>;

/// Round trips, READs, WRITEs and compare-and-swaps.
type Price = (u64, u64, u64, u64);

/// A client of the test's server. Its operations on a key return what they cost.
#[derive(Clone, Copy)]
struct Bench<'a> {
    engine: &'a ClockedEngine,
    clock: &'a Clock,
    key: u64,
}

impl Bench<'_> {
    /// Returns the same client, on another key.
    fn at(self, key: u64) -> Self {
        Self { key, ..self }
    }

    /// Returns the same client, with an empty cache.
    fn uncached(self) -> Self {
        self.engine.region.cache.clear();
        self
    }

    fn run<T>(
        self,
        value: &[u8],
        call: impl AsyncFn(&Operation<'_, ClockedFabric>) -> Result<T, Failure>,
    ) -> (T, Price) {
        let before = self.engine.counters();
        let operation = Operation::stage(
            self.engine.handle(),
            LANE,
            self.engine.hashed(&self.key.to_le_bytes()),
            value,
        );
        let output = self.engine.endpoint.drive(call(&operation)).unwrap();
        let counters = self.engine.counters() - before;
        let Counters { round_trips, doorbells, reads, writes, compare_swaps, .. } = counters;
        assert_eq!(doorbells, round_trips);
        (output, (round_trips, reads, writes, compare_swaps))
    }

    fn get(self) -> (bool, Price) {
        self.run(VALUE, async |operation| operation.get().await.map(|found| found.is_some()))
    }

    fn put(self) -> Price {
        self.put_value(VALUE)
    }

    fn put_value(self, value: &[u8]) -> Price {
        self.run(value, async |operation| operation.put(FOREVER).await).1
    }

    fn insert(self) -> (bool, Price) {
        self.run(VALUE, async |operation| operation.insert(FOREVER).await.map(|it| it.applied))
    }

    fn update(self) -> (bool, Price) {
        self.run(VALUE, async |operation| operation.update(FOREVER).await.map(|it| it.applied))
    }

    fn delete(self) -> (bool, Price) {
        self.run(VALUE, async |operation| operation.delete().await)
    }

    /// Exchanges the value for the same one, with another lifetime.
    fn exchange(self, lifetime: Lifetime) -> (bool, Price) {
        let expected = Expected::Value(VALUE);
        self.run(VALUE, async |operation| {
            operation.perform(Action::Exchange(expected, lifetime)).await.map(|it| it.applied)
        })
    }

    /// Returns the size of the value that a GET finds.
    fn found_bytes(self) -> usize {
        let (found, _) = self.run(VALUE, async |operation| operation.get().await);
        found.unwrap().value_bytes as usize
    }
}

/// Lets an operation that is not complete post a chain, and completes the chain after `meanwhile`.
fn step(
    endpoint: &Endpoint<ClockedFabric>,
    operation: Pin<&mut impl Future>,
    meanwhile: impl FnOnce(),
) {
    endpoint.tick();
    assert!(operation.poll(&mut Context::from_waker(Waker::noop())).is_pending());
    meanwhile();
    endpoint.step(|_| ());
}

/// Calls `test` with a client of a new server.
fn with_bench(test: impl FnOnce(Bench<'_>)) {
    with_benches(|[bench]| test(bench));
}

/// Calls `test` with `N` clients of a new server, which share a clock.
fn with_benches<const N: usize>(test: impl FnOnce([Bench<'_>; N])) {
    // The index is so large that no subtable is split.
    let server = ServerProcess::start("--memory 64MiB --index 16MiB");
    let clock = Rc::new(Clock::default());
    let engines = [(); N].map(|()| {
        let interceptor = TestClock { clock: clock.clone(), late: VecDeque::new() };
        engine_over(&server.address(), |fabric| Intercepted {
            interceptor,
            fabric: Box::new(fabric),
        })
    });
    test(engines.each_ref().map(|engine| Bench { engine, clock: &clock, key: 1 }));
}

#[test]
fn every_operation_costs_what_the_price_list_says() {
    with_bench(|bench| {
        let unseen = (0..10_000).filter(|key| assert_price_list(bench.at(*key))).count();
        // The exceptions: the first INSERTs, the first in each of 2,048 subtables, wrong guesses.
        assert!(unseen > 7_500, "{unseen} INSERTs in two round trips");
        // The last key is still there: the first INSERT claims a slot in vain, the next only READs.
        let last = bench.at(9_999);
        assert_eq!(last.insert(), (false, (1, 1, 1, 1)), "INSERT refused for the first time");
        assert_eq!(last.insert(), (false, (1, 1, 0, 0)), "refused INSERT");
    });
}

/// Checks the costs of a key's operations; returns whether its INSERT needed no READ first.
fn assert_price_list(bench: Bench<'_>) -> bool {
    let insert = bench.insert();
    let is_unseen = insert == (true, (2, 1, 1, 2));
    // The first INSERTs READ the window first. A wrong guess costs one more compare-and-swap, and
    // so does the hint of a used slot.
    let has_looked = matches!(insert, (true, (3, 2, 1, 2..=4)));
    assert!(is_unseen || has_looked, "INSERT: {insert:?}");
    assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "cached GET");
    assert_eq!(bench.put(), (1, 0, 2, 1), "cached PUT");
    assert_eq!(bench.uncached().put(), (2, 2, 2, 1), "uncached PUT");
    assert_eq!(bench.uncached().get(), (true, (2, 2, 0, 0)), "uncached GET");
    match bench.key % 4 {
        0 | 2 => assert_eq!(bench.uncached().delete(), (true, (2, 2, 1, 1)), "uncached DELETE"),
        1 => assert_eq!(bench.delete(), (true, (1, 0, 1, 1)), "cached DELETE"),
        _ => {}
    }
    is_unseen
}

#[test]
fn a_put_of_a_new_key_costs_three_round_trips() {
    with_bench(|bench| {
        let (mut unused, mut used) = (0, 0);
        for key in 0..2000 {
            match bench.at(key).put() {
                // READ window; WRITE block, CAS of the hint, READ window; CAS.
                (3, 2, 1, 2) => unused += 1,
                // READ window; WRITE block, CAS, READ window; CAS of the hint, CAS.
                (3, 2, 1, 3) => used += 1,
                price => panic!("PUT of the new key {key}: {price:?}"),
            }
            bench.at(key).delete();
        }
        assert!(unused > 0 && used > 0, "{unused} {used}");
    });
}

/// Each chain has up to four verbs, and an extent takes one READ or two WRITEs.
#[test]
fn operations_on_values_with_extents_cost_what_the_price_list_says() {
    with_benches(|[bench, other]| {
        let long = vec![7; (4 << 20) + 9];
        // Five extents: ten WRITEs in three chains. READ window; the swing.
        bench.put();
        assert_eq!(bench.uncached().put_value(&long), (5, 2, 12, 1), "PUT of a long value");
        // READ head and three extents; two extents and the head's header.
        other.get();
        assert_eq!(other.get(), (true, (2, 7, 0, 0)), "cached GET with the table");
        // READ window, head; four extents; one extent and the header.
        assert_eq!(other.uncached().get(), (true, (4, 8, 0, 0)), "uncached GET");
        // The session that has stored the value knows the location, but not the table.
        assert_eq!(bench.get(), (true, (3, 7, 0, 0)), "cached GET without the table");
        assert_eq!(bench.put_value(&long), (4, 0, 12, 1), "cached PUT over a long value");
        // READ window, head; the swing.
        assert_eq!(other.uncached().put(), (3, 2, 2, 1), "PUT of a short value over a long one");
        bench.uncached().put_value(&long);
        assert_eq!(bench.delete(), (true, (2, 1, 1, 1)), "DELETE without the table");
    });
}

/// A word may recur for another key once its block had 256 generations (invariant I4). A GET needs
/// no such limit (I10), and proves the word for the next operation.
#[test]
fn a_proof_of_a_word_lasts_for_t_word() {
    with_bench(|bench| {
        let constants = &bench.engine.region.constants;
        let proof_age_ns_max = constants.proof_age_ns_max;
        let later = |nanos: Nanos| bench.clock.advance(nanos);
        bench.put();
        // The cache stores a proof's time rounded down, to a fraction of its maximum age.
        later(proof_age_ns_max - proof_age_ns_max / 16);
        assert_eq!(bench.put(), (1, 0, 2, 1), "PUT on a proof of almost T_word");
        later(proof_age_ns_max + 1);
        assert_eq!(bench.put(), (2, 2, 2, 1), "PUT on an older proof");
        // With drifting clocks, the word may recur for another key before 256 x GRACE.
        later(constants.grace_ns * 256 / 8 * 7);
        assert_eq!(bench.put(), (2, 2, 2, 1), "PUT on a proof of 7/8 of 256 x GRACE");
        later(proof_age_ns_max + 1);
        assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "GET, however long ago");
        assert_eq!(bench.put(), (1, 0, 2, 1), "PUT after the GET");
        later(proof_age_ns_max + 1);
        let exchange = bench.exchange(FOREVER);
        assert_eq!(exchange, (true, (2, 1, 2, 1)), "exchange, which relies on its own GET");
    });
}

/// A replaced block's mark leads to its successor, and a lost compare-and-swap returns the present
/// word: neither needs the window.
#[test]
fn an_operation_with_a_stale_location_follows_it_to_the_present_value() {
    with_benches(|[bench, other]| {
        other.put();
        bench.put();
        assert_eq!(other.get(), (true, (2, 3, 0, 0)), "GET of a replaced value");
        assert_eq!(other.get(), (true, (1, 1, 0, 0)), "the next GET");
        bench.put();
        bench.put();
        assert_eq!(other.get(), (true, (3, 4, 0, 0)), "GET of a value replaced twice");
        bench.put_value(&[0; 200]);
        assert_eq!(other.get(), (true, (3, 4, 0, 0)), "GET of a value replaced by a longer one");
        bench.put_value(&[0; 5000]);
        other.get();
        bench.put_value(&[0; 5000]);
        assert_eq!(other.get(), (true, (3, 3, 0, 0)), "GET of a replaced long value");
        bench.put();
        assert_eq!(other.put(), (3, 1, 3, 2), "PUT over a replaced value");
        assert_eq!(other.put(), (1, 0, 2, 1), "the next PUT");
        bench.delete();
        assert_eq!(other.get(), (false, (2, 2, 0, 0)), "GET of a deleted value");
    });
}

/// A READ that was executed too late is repeated, and so is a late change of the slot. The
/// connection stays usable.
#[test]
fn a_late_chain_is_repeated() {
    with_bench(|bench| {
        let constants = &bench.engine.region.constants;
        let stall = || bench.clock.stall.set(10 * constants.lateness_ns.max(constants.grace_ns));
        bench.put();
        stall();
        assert_eq!(bench.get(), (true, (3, 3, 0, 0)), "cached GET, then an uncached one");
        stall();
        assert_eq!(bench.uncached().get(), (true, (3, 3, 0, 0)), "uncached GET, its window twice");
        stall();
        let (round_trips, reads, ..) = bench.put();
        assert_eq!((round_trips, reads), (2, 2), "refused cached PUT, then an uncached one");
        stall();
        assert_eq!(bench.uncached().put(), (3, 3, 2, 1), "uncached PUT, its window twice");
        assert!(bench.get().0);
    });
}

/// A PUT that loses to a PUT of another session after so long does not count as overwritten: it
/// tries again.
#[test]
fn a_put_that_loses_to_a_put_of_its_own_session_is_overwritten() {
    with_benches(|[bench, other]| {
        let engine = bench.engine;
        for (winner, value_bytes) in [(bench, 6), (other, 3)] {
            bench.put_value(b"longer");
            bench.uncached();
            let operation = Operation::stage(
                engine.handle(),
                LaneId(1),
                engine.hashed(&1u64.to_le_bytes()),
                b"new",
            );
            let mut put = pin!(operation.put(FOREVER));
            // Two READs: the window, whose hints prove nothing after so long, and the block.
            let late = 2 * engine.region.constants.exact_hint_read_ns_max;
            for _ in 0..2 {
                step(&engine.endpoint, put.as_mut(), || bench.clock.advance(late));
            }
            winner.put_value(b"longer");
            engine.endpoint.drive_lanes(put).unwrap();
            assert_eq!(bench.found_bytes(), value_bytes);
        }
    });
}

/// The window's READ took so long that its hints prove nothing. The key in the block does.
#[test]
fn a_put_or_delete_after_a_slow_read_reads_the_key_of_the_block_alone() {
    with_benches(|[bench, _]| {
        let engine = bench.engine;
        let late = 2 * engine.region.constants.exact_hint_read_ns_max;
        for deletes in [false, true] {
            bench.put_value(&vec![7; 90_000]);
            bench.uncached();
            let before = engine.counters();
            let operation = Operation::stage(
                engine.handle(),
                LaneId(1),
                engine.hashed(&1u64.to_le_bytes()),
                b"new",
            );
            let mut change = pin!(async {
                if deletes {
                    operation.delete().await
                } else {
                    operation.put(FOREVER).await.map(|_| true)
                }
            });
            for _ in 0..2 {
                step(&engine.endpoint, change.as_mut(), || bench.clock.advance(late));
            }
            assert!(engine.endpoint.drive_lanes(change).unwrap());
            let counters = engine.counters() - before;
            // A window of 256 bytes, 32 of header, and 8 of the key.
            assert_eq!((counters.reads, counters.read_bytes), (2, 256 + 40));
        }
    });
}

#[test]
fn a_scan_returns_a_key_whose_value_is_replaced_in_every_round_trip() {
    with_benches(|[Bench { engine, .. }, other]| {
        other.put();
        let mut progress = ScanCursor::default();
        let mut next = pin!(next_entry(engine.handle(), LANE, &mut progress));
        let entry = loop {
            engine.endpoint.tick();
            match next.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(entry) => break entry,
                Poll::Pending => engine.endpoint.step(|_| ()),
            }
            other.put();
        };
        assert_eq!(entry.unwrap().unwrap().key, 1u64.to_le_bytes());
    });
}

/// The cached location comes from a PUT of the same session, or from a GET.
#[test]
fn a_cached_get_reads_only_the_used_part_of_a_block() {
    with_benches(|[bench, other]| {
        // 32 bytes of header, 8 of the key; classes of 64, 128, 5,120 and 98,304 bytes.
        for (value, read) in
            [(24, 64), (41, 96), (64, 112), (88, 128), (4096, 4352), (90_000, 90_112)]
        {
            bench.put_value(&vec![7; value]);
            other.get();
            for bench in [bench, other] {
                let before = bench.engine.counters();
                assert_eq!(bench.found_bytes(), value);
                let counters = bench.engine.counters() - before;
                assert_eq!(counters.read_bytes, read, "{value} bytes");
            }
        }
    });
}

const MILLISECOND: Nanos = 1_000_000;
/// Not a whole number of seconds.
const TTL_NS: Nanos = 10_500 * MILLISECOND;
const TTL: Lifetime = Lifetime::lasting(Duration::from_nanos(TTL_NS));

impl Bench<'_> {
    /// Stores a value that expires after exactly [`TTL_NS`], at a full millisecond.
    fn store(self) {
        self.clock.now.set(self.clock.now.get().next_multiple_of(MILLISECOND));
        self.put_for(TTL);
    }

    fn put_for(self, lifetime: Lifetime) -> Price {
        self.run(VALUE, async |operation| operation.put(lifetime).await).1
    }

    /// Lets the value expire.
    fn expire(self) {
        self.clock.advance(TTL_NS);
    }
}

#[test]
fn the_successor_of_a_cached_value_may_have_expired() {
    with_benches(|[bench, other]| {
        for operation in [Bench::get, Bench::update] {
            bench.put();
            assert!(other.get().0);
            bench.store();
            bench.expire();
            let cost = operation(other);
            assert!(matches!(cost, (false, (2, 1 | 3, ..))), "{cost:?}");
        }
    });
}

#[test]
fn a_value_is_present_before_its_expiry_millisecond_and_absent_from_it_on() {
    with_bench(|bench| {
        bench.store();
        bench.clock.advance(TTL_NS - 1);
        assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "cached GET, a nanosecond before");
        assert_eq!(bench.uncached().get(), (true, (2, 2, 0, 0)), "uncached GET, likewise");
        bench.clock.advance(1);
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)), "cached GET, on the millisecond");
        assert_eq!(bench.uncached().get(), (false, (2, 2, 0, 0)), "uncached GET, likewise");
        assert!(!bench.uncached().exchange(FOREVER).0, "exchange, likewise");
    });
}

#[test]
fn an_expired_value_is_absent_for_insert_update_and_delete() {
    with_bench(|bench| {
        bench.store();
        bench.expire();
        assert!(!bench.update().0, "cached UPDATE");
        assert_eq!(bench.uncached().update(), (false, (2, 2, 0, 0)), "uncached UPDATE");
        // READ window, READ block; WRITE block, WRITE mark, CAS.
        assert_eq!(bench.uncached().insert(), (true, (3, 2, 2, 1)), "INSERT in its place");
        assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "the inserted value does not expire");
        bench.expire();
        assert!(bench.get().0, "even later");
        bench.store();
        bench.expire();
        // The chain also READs the header of the block that it unlinks.
        assert_eq!(bench.delete(), (false, (1, 1, 1, 1)), "cached DELETE");
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)), "and the slot is empty");
        bench.store();
        bench.expire();
        assert_eq!(bench.uncached().delete(), (false, (2, 2, 1, 1)), "uncached DELETE");
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)));
    });
}

#[test]
fn an_unexpired_value_costs_a_verb_where_its_expiry_is_unknown() {
    with_bench(|bench| {
        bench.store();
        assert_eq!(bench.uncached().insert(), (false, (2, 2, 0, 0)), "refused INSERT");
        assert!(bench.get().0);
        assert_eq!(bench.update(), (true, (2, 1, 2, 1)), "cached UPDATE");
        assert_eq!(bench.update(), (true, (1, 0, 2, 1)), "UPDATE after one that stored no expiry");
        assert_eq!(bench.uncached().update(), (true, (3, 2, 2, 1)), "its word is conditional");
        bench.store();
        assert_eq!(bench.uncached().update(), (true, (3, 2, 2, 1)), "uncached UPDATE");
        bench.store();
        assert_eq!(bench.delete(), (true, (1, 1, 1, 1)), "cached DELETE");
        bench.put();
        assert_eq!(bench.uncached().insert(), (false, (1, 1, 0, 0)), "refused INSERT, no expiry");
        assert_eq!(bench.uncached().update(), (true, (2, 2, 2, 1)), "UPDATE, no expiry");
    });
}

#[test]
fn a_put_costs_the_same_with_and_without_an_expiry() {
    with_bench(|bench| {
        let put = |lifetime| bench.put_for(lifetime);
        assert_eq!(put(FOREVER), (3, 2, 1, 2), "new");
        assert_eq!([put(TTL), put(TTL), put(FOREVER)], [(1, 0, 2, 1); 3], "cached");
        put(TTL);
        bench.expire();
        assert_eq!(put(TTL), (1, 0, 2, 1), "over an expired value");
        assert_eq!(bench.uncached().put(), (2, 2, 2, 1), "uncached");
    });
}

/// The DELETE found the key absent, so the PUT must come after it: it cannot count as overwritten.
#[test]
fn a_put_that_loses_to_the_deletion_of_an_expired_value_is_stored() {
    with_benches(|[bench, other]| {
        let endpoint = &bench.engine.endpoint;
        for expires_meanwhile in [false, true] {
            bench.store();
            if expires_meanwhile {
                bench.put();
            } else {
                bench.expire();
            }
            bench.uncached();
            let operation = Operation::stage(
                bench.engine.handle(),
                LANE,
                bench.engine.hashed(&1u64.to_le_bytes()),
                b"new",
            );
            let mut put = pin!(operation.put(FOREVER));
            step(endpoint, put.as_mut(), || ());
            // The PUT has READ the window, and swapped no word yet.
            if expires_meanwhile {
                assert!(other.exchange(Lifetime::lasting(Duration::ZERO)).0);
            }
            assert!(!other.delete().0);
            endpoint.drive_lanes(put).unwrap();
            assert!(bench.get().0 && other.get().0, "expires meanwhile: {expires_meanwhile}");
        }
    });
}
