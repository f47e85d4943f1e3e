//! Proves the price list exactly, with a clock that only a test advances. With a real clock, a
//! process that is descheduled during a READ rightly pays for another READ. Guards against relying
//! on an old proof of a word, and against dropping a proof too early.

mod expiry;

use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_fabric::shm::ShmFabric;
use farside_fabric::{
    ChainError, Completion, Counters, Fabric, Intercepted, Interceptor, LaneId, Nanos, RegionIndex,
    Verb,
};
use farside_protocol::{Expected, Failure, LANE, Lifetime, Operation, ScanCursor, next_entry};
use farside_tests::engine::{TestEngine, TestServer, engine_over};

const FOREVER: Lifetime = Lifetime::Forever;

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

    /// Waits for real: an operation waits only for the server's blocks.
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

fn run<T>(
    engine: &ClockedEngine,
    key: u64,
    call: impl AsyncFn(&Operation<'_, ClockedFabric>) -> Result<T, Failure>,
) -> (T, (u64, u64, u64, u64)) {
    run_with(engine, key, b"value", call)
}

fn run_with<T>(
    engine: &ClockedEngine,
    key: u64,
    value: &[u8],
    call: impl AsyncFn(&Operation<'_, ClockedFabric>) -> Result<T, Failure>,
) -> (T, (u64, u64, u64, u64)) {
    let before = engine.counters();
    let operation = Operation::stage(engine.handle(), LANE, &key.to_le_bytes(), value);
    let output = engine.endpoint.drive(call(&operation)).unwrap();
    let counters = engine.counters() - before;
    let Counters { round_trips, doorbells, reads, writes, compare_swaps, .. } = counters;
    assert_eq!(doorbells, round_trips);
    (output, (round_trips, reads, writes, compare_swaps))
}

/// Calls `test` with an engine of a new server, and the engine's clock.
fn with_engine(test: impl FnOnce(&ClockedEngine, &Clock)) {
    with_engines(|[engine], clock| test(engine, clock));
}

/// Calls `test` with `N` engines of a new server, each a separate client, and their shared clock.
fn with_engines<const N: usize>(test: impl FnOnce([&ClockedEngine; N], &Clock)) {
    let server = TestServer::start(ServerConfig {
        memory: Some(ByteSize::mib(64)),
        // Large enough that no subtable is split.
        index: Some(ByteSize::mib(16)),
        ..Default::default()
    });
    let clock = Rc::new(Clock::default());
    let engines = [(); N].map(|()| {
        let interceptor = TestClock { clock: clock.clone(), late: VecDeque::new() };
        engine_over(&server.address, |fabric| Intercepted { interceptor, fabric: Box::new(fabric) })
    });
    test(engines.each_ref(), &clock);
}

#[test]
fn every_operation_costs_what_the_price_list_says() {
    with_engine(|engine, _| {
        let unseen = (0..10_000).filter(|key| assert_price_list(engine, *key)).count();
        // The exceptions: the first INSERTs, the first in each of 2,048 subtables, wrong guesses.
        assert!(unseen > 7_500, "{unseen} INSERTs in two round trips");
        // The last key is still there: the first INSERT claims a slot in vain, the next only READs.
        let insert = || run(engine, 9_999, async |operation| operation.insert(FOREVER).await);
        assert_eq!(insert(), (false, (1, 1, 1, 1)), "INSERT refused for the first time");
        assert_eq!(insert(), (false, (1, 1, 0, 0)), "refused INSERT");
    });
}

/// Checks the costs of a key's operations; returns whether its INSERT needed no READ first.
fn assert_price_list(engine: &ClockedEngine, key: u64) -> bool {
    let insert = run(engine, key, async |operation| operation.insert(FOREVER).await);
    let is_unseen = insert == (true, (2, 1, 1, 2));
    // The first INSERTs READ the window first. A wrong guess costs one more compare-and-swap, and
    // so does the hint of a used slot.
    let has_looked = matches!(insert, (true, (3, 2, 1, 2..=4)));
    assert!(is_unseen || has_looked, "INSERT: {insert:?}");
    let get = run(engine, key, async |operation| operation.get().await.map(|f| f.is_some()));
    assert_eq!(get, (true, (1, 1, 0, 0)), "cached GET");
    let put = run(engine, key, async |operation| operation.put(FOREVER).await);
    assert_eq!(put.1, (1, 0, 2, 1), "cached PUT");
    engine.region.cache.clear();
    let put = run(engine, key, async |operation| operation.put(FOREVER).await);
    assert_eq!(put.1, (2, 2, 2, 1), "uncached PUT");
    engine.region.cache.clear();
    let get = run(engine, key, async |operation| operation.get().await.map(|f| f.is_some()));
    assert_eq!(get, (true, (2, 2, 0, 0)), "uncached GET");
    if key.is_multiple_of(2) {
        engine.region.cache.clear();
        let delete = run(engine, key, async |operation| operation.delete().await);
        assert_eq!(delete, (true, (2, 2, 1, 1)), "uncached DELETE");
    } else if key % 4 == 1 {
        let delete = run(engine, key, async |operation| operation.delete().await);
        assert_eq!(delete, (true, (1, 0, 1, 1)), "cached DELETE");
    }
    is_unseen
}

#[test]
fn a_put_of_a_new_key_costs_three_round_trips() {
    with_engine(|engine, _| {
        let (mut unused, mut used) = (0, 0);
        for key in 0..2000 {
            match run(engine, key, async |operation| operation.put(FOREVER).await).1 {
                // READ window; WRITE block, CAS of the hint, READ window; CAS.
                (3, 2, 1, 2) => unused += 1,
                // READ window; WRITE block, CAS, READ window; CAS of the hint, CAS.
                (3, 2, 1, 3) => used += 1,
                price => panic!("PUT of the new key {key}: {price:?}"),
            }
            run(engine, key, async |operation| operation.delete().await);
        }
        assert!(unused > 0 && used > 0, "{unused} {used}");
    });
}

/// A word may recur for another key once its block had 256 generations (invariant I4). A GET needs
/// no such limit (I10), and proves the word for the next operation.
#[test]
fn a_proof_of_a_word_lasts_for_t_word() {
    with_engine(|engine, clock| {
        let proof_age_ns_max = engine.region.constants.proof_age_ns_max;
        let later = |nanos: Nanos| clock.advance(nanos);
        let put = || run(engine, 1, async |operation| operation.put(FOREVER).await).1;
        let get = || run(engine, 1, async |operation| operation.get().await.map(drop)).1;
        let exchange = || {
            let value = Expected::Value(b"value");
            let call = async |operation: &Operation<'_, _>| {
                operation.compare_exchange(value, FOREVER).await.map(|(exchanged, _)| exchanged)
            };
            run(engine, 1, call)
        };
        put();
        // The cache stores a proof's time rounded down, to a fraction of its maximum age.
        later(proof_age_ns_max - proof_age_ns_max / 16);
        assert_eq!(put(), (1, 0, 2, 1), "PUT on a proof of almost T_word");
        later(proof_age_ns_max + 1);
        assert_eq!(put(), (2, 2, 2, 1), "PUT on an older proof");
        // With drifting clocks, the word may recur for another key before 256 x GRACE.
        later(engine.region.constants.grace_ns * 256 / 8 * 7);
        assert_eq!(put(), (2, 2, 2, 1), "PUT on a proof of 7/8 of 256 x GRACE");
        later(proof_age_ns_max + 1);
        assert_eq!(get(), (1, 1, 0, 0), "GET, however long ago");
        assert_eq!(put(), (1, 0, 2, 1), "PUT after the GET");
        later(proof_age_ns_max + 1);
        assert_eq!(exchange(), (true, (2, 1, 2, 1)), "exchange, which relies on its own GET");
    });
}

/// A replaced block's mark leads to its successor, and a lost compare-and-swap returns the present
/// word: neither needs the window.
#[test]
fn an_operation_with_a_stale_location_follows_it_to_the_present_value() {
    with_engines(|[engine, other], _| {
        let put = |engine| run(engine, 1, async |operation| operation.put(FOREVER).await).1;
        let get = |engine| {
            run(engine, 1, async |operation| operation.get().await.map(|found| found.is_some()))
        };
        put(other);
        put(engine);
        assert_eq!(get(other), (true, (2, 3, 0, 0)), "GET of a replaced value");
        assert_eq!(get(other), (true, (1, 1, 0, 0)), "the next GET");
        put(engine);
        put(engine);
        assert_eq!(get(other), (true, (3, 4, 0, 0)), "GET of a value replaced twice");
        let put_long = |bytes: usize| {
            run_with(engine, 1, &vec![0; bytes], async |operation| operation.put(FOREVER).await);
        };
        put_long(200);
        assert_eq!(get(other), (true, (3, 4, 0, 0)), "GET of a value replaced by a longer one");
        put_long(5000);
        get(other);
        put_long(5000);
        assert_eq!(get(other), (true, (3, 3, 0, 0)), "GET of a replaced long value");
        put(engine);
        assert_eq!(put(other), (3, 1, 3, 2), "PUT over a replaced value");
        assert_eq!(put(other), (1, 0, 2, 1), "the next PUT");
        run(engine, 1, async |operation| operation.delete().await);
        assert_eq!(get(other), (false, (2, 2, 0, 0)), "GET of a deleted value");
    });
}

/// A READ that was executed too late is repeated, and so is a late change of the slot. The
/// connection stays usable.
#[test]
fn a_late_chain_is_repeated() {
    with_engine(|engine, clock| {
        let late = 10 * engine.region.constants.lateness_ns.max(engine.region.constants.grace_ns);
        let get =
            || run(engine, 1, async |operation| operation.get().await.map(|found| found.is_some()));
        let put = || run(engine, 1, async |operation| operation.put(FOREVER).await).1;
        put();
        clock.stall.set(late);
        assert_eq!(get(), (true, (3, 3, 0, 0)), "cached GET, then an uncached one");
        engine.region.cache.clear();
        clock.stall.set(late);
        assert_eq!(get(), (true, (3, 3, 0, 0)), "uncached GET, its window twice");
        clock.stall.set(late);
        let (round_trips, reads, ..) = put();
        assert!(
            (round_trips, reads) == (2, 2),
            "cached PUT that was refused, then an uncached one"
        );
        engine.region.cache.clear();
        clock.stall.set(late);
        assert_eq!(put(), (3, 3, 2, 1), "uncached PUT, its window twice");
        assert!(get().0);
    });
}

/// A PUT that loses to a PUT of another session after so long does not count as overwritten: it
/// tries again.
#[test]
fn a_put_that_loses_to_a_put_of_its_own_session_is_overwritten() {
    with_engines(|[engine, other], clock| {
        let put_long =
            |engine| run_with(engine, 1, b"longer", async |operation| operation.put(FOREVER).await);
        for (winner, value_bytes) in [(engine, 6), (other, 3)] {
            put_long(engine);
            engine.region.cache.clear();
            let operation =
                Operation::stage(engine.handle(), LaneId(1), &1u64.to_le_bytes(), b"new");
            let mut put = pin!(operation.put(FOREVER));
            // Two READs: the window, whose hints prove nothing after so long, and the block.
            for _ in 0..2 {
                engine.endpoint.tick();
                assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                clock.advance(2 * engine.region.constants.exact_hint_read_ns_max);
                engine.endpoint.step(|_| ());
            }
            put_long(winner);
            engine.endpoint.drive_lanes(put).unwrap();
            let (found, _) = run(engine, 1, async |operation| operation.get().await);
            assert_eq!(found.unwrap().value_bytes, value_bytes);
        }
    });
}

#[test]
fn a_scan_returns_a_key_whose_value_is_replaced_in_every_round_trip() {
    with_engines(|[engine, other], _| {
        let put = || run(other, 1, async |operation| operation.put(FOREVER).await);
        put();
        let mut progress = ScanCursor::default();
        let mut next = pin!(next_entry(engine.handle(), LANE, &mut progress));
        let entry = loop {
            engine.endpoint.tick();
            match next.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(entry) => break entry,
                Poll::Pending => engine.endpoint.step(|_| ()),
            }
            put();
        };
        assert_eq!(entry.unwrap().unwrap().key, 1u64.to_le_bytes());
    });
}

/// The cached location comes from a PUT of the same session, or from a GET.
#[test]
fn a_cached_get_reads_only_the_used_part_of_a_block() {
    with_engines(|[engine, other], _| {
        // 32 bytes of header, 8 of the key; classes of 64, 128, 5,120 and 98,304 bytes.
        for (value, read) in
            [(24, 64), (41, 96), (64, 112), (88, 128), (4096, 4352), (90_000, 90_112)]
        {
            run_with(engine, 1, &vec![7; value], async |operation| operation.put(FOREVER).await);
            run(other, 1, async |operation| operation.get().await.map(drop));
            for engine in [engine, other] {
                let before = engine.counters();
                let (found, _) = run(engine, 1, async |operation| operation.get().await);
                assert_eq!(found.unwrap().value_bytes as usize, value);
                assert_eq!((engine.counters() - before).read_bytes, read, "{value} bytes");
            }
        }
    });
}
