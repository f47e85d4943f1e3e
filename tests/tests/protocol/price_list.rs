//! Proves the price list exactly, on a clock that only moves when a test says so. On shared memory
//! a process that loses the processor during a READ rightly pays for another. Guards against
//! an old proof of a word being relied on, and against one being forgotten too early.

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

/// The time is the test's, and the deadline of every chain is looked at.
struct Timeless {
    clock: Rc<Clock>,
    late: VecDeque<LaneId>,
}

#[derive(Default)]
struct Clock {
    now: Cell<Nanos>,
    /// How long the next chain waits before it is executed.
    stall: Cell<Nanos>,
}

impl Clock {
    fn add(&self, by: Nanos) {
        self.now.set(self.now.get() + by);
    }
}

impl Interceptor<ShmFabric> for Timeless {
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
        self.clock.add(self.clock.stall.take());
        match self.clock.now.get() > deadline {
            true => self.late.push_back(lane),
            false => fabric.post(lane, region, chain, Nanos::MAX),
        }
    }

    /// Waits, for blocks from the server, are real.
    fn wait(&mut self, fabric: &mut ShmFabric, lane: LaneId, until: Nanos) {
        fabric.wait(lane, fabric.now() + until - self.clock.now.get());
    }

    fn poll(&mut self, fabric: &mut ShmFabric) -> Option<Completion> {
        let late = |lane| Completion { lane, result: Err(ChainError::Late) };
        self.late.pop_front().map(late).or_else(|| fabric.poll())
    }
}

type TimelessFabric = Intercepted<ShmFabric, Timeless>;
type TimelessEngine = TestEngine<TimelessFabric>;

fn run<T>(
    engine: &TimelessEngine,
    key: u64,
    call: impl AsyncFn(&Operation<'_, TimelessFabric>) -> Result<T, Failure>,
) -> (T, (u64, u64, u64, u64)) {
    run_with(engine, key, b"value", call)
}

fn run_with<T>(
    engine: &TimelessEngine,
    key: u64,
    value: &[u8],
    call: impl AsyncFn(&Operation<'_, TimelessFabric>) -> Result<T, Failure>,
) -> (T, (u64, u64, u64, u64)) {
    let before = engine.counters();
    let operation = Operation::stage(engine.handle(), LANE, &key.to_le_bytes(), value);
    let output = engine.endpoint.drive(call(&operation)).unwrap();
    let counters = engine.counters() - before;
    let Counters { round_trips, reads, writes, compare_swaps, .. } = counters;
    (output, (round_trips, reads, writes, compare_swaps))
}

/// Calls `test` with a session of its own server, and the session's clock.
fn with_engine(test: impl FnOnce(&TimelessEngine, &Clock)) {
    with_engines(|[engine], clock| test(engine, clock));
}

/// The same with some sessions of one server, of a client each, which have one clock.
fn with_engines<const N: usize>(test: impl FnOnce([&TimelessEngine; N], &Clock)) {
    let server = TestServer::start(ServerConfig {
        memory: Some(ByteSize::mib(64)),
        // Large enough for nothing to be split.
        index: Some(ByteSize::mib(16)),
        ..Default::default()
    });
    let clock = Rc::new(Clock::default());
    let engines = [(); N].map(|()| {
        let interceptor = Timeless { clock: clock.clone(), late: VecDeque::new() };
        engine_over(&server.address, |fabric| Intercepted { interceptor, fabric: Box::new(fabric) })
    });
    test(engines.each_ref(), &clock);
}

#[test]
fn every_operation_costs_what_the_price_list_says() {
    with_engine(|engine, _| {
        let unseen = (0..10_000).filter(|key| assert_price_list(engine, *key)).count();
        // Except the first ones, the first one in each of 2,048 subtables, and some wrong guesses.
        assert!(unseen > 7_500, "{unseen} INSERTs in two round trips");
        // The key that the last one left: a claim for nothing; and then only a look.
        let insert = || run(engine, 9_999, async |operation| operation.insert(FOREVER).await);
        assert_eq!(insert(), (false, (1, 1, 1, 1)), "INSERT refused for the first time");
        assert_eq!(insert(), (false, (1, 1, 0, 0)), "refused INSERT");
    });
}

/// Whether the INSERT did without a look before it.
fn assert_price_list(engine: &TimelessEngine, key: u64) -> bool {
    let insert = run(engine, key, async |operation| operation.insert(FOREVER).await);
    let is_unseen = insert == (true, (2, 1, 1, 2));
    // The first ones look; a guess that was wrong is one more compare-and-swap, and so is the hint
    // of a slot that was used.
    let looked = matches!(insert, (true, (3, 2, 1, 2..=4)));
    assert!(is_unseen || looked, "INSERT: {insert:?}");
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

/// A word may come again for another key once its block went through 256 generations (invariant
/// I4). A GET needs no such limit (I10), and proves the word for the operation after it.
#[test]
fn a_proof_of_a_word_lasts_for_t_word() {
    with_engine(|engine, clock| {
        let proof_age_ns_max = engine.region.constants.proof_age_ns_max;
        let later = |by: Nanos| clock.add(by);
        let put = || run(engine, 1, async |operation| operation.put(FOREVER).await).1;
        let get = || run(engine, 1, async |operation| operation.get().await.map(drop)).1;
        let exchange = || {
            let value = Expected::Value(b"value");
            let call = async |operation: &Operation<'_, _>| {
                operation.compare_exchange(value, FOREVER).await.map(|(done, _)| done)
            };
            run(engine, 1, call)
        };
        put();
        // The cache dates proofs back, by a part of this.
        later(proof_age_ns_max - proof_age_ns_max / 16);
        assert_eq!(put(), (1, 0, 2, 1), "PUT on a proof of almost T_word");
        later(proof_age_ns_max + 1);
        assert_eq!(put(), (2, 2, 2, 1), "PUT on an older one");
        // Where clocks drift, the word may stand for another key before 256 x GRACE.
        later(engine.region.constants.grace_ns * 256 / 8 * 7);
        assert_eq!(put(), (2, 2, 2, 1), "PUT on one of 7/8 of 256 x GRACE");
        later(proof_age_ns_max + 1);
        assert_eq!(get(), (1, 1, 0, 0), "GET, however long ago");
        assert_eq!(put(), (1, 0, 2, 1), "PUT after the GET");
        later(proof_age_ns_max + 1);
        assert_eq!(exchange(), (true, (2, 1, 2, 1)), "exchange, which relies on its own GET");
    });
}

/// A block says what took its place, a compare-and-swap that lost what is there: both lead on.
#[test]
fn a_location_that_another_client_made_stale_leads_on() {
    with_engines(|[engine, other], _| {
        let put = |of| run(of, 1, async |operation| operation.put(FOREVER).await).1;
        let get = |of| run(of, 1, async |of| of.get().await.map(|found| found.is_some()));
        put(other);
        put(engine);
        assert_eq!(get(other), (true, (2, 3, 0, 0)), "GET of what was replaced");
        assert_eq!(get(other), (true, (1, 1, 0, 0)), "and then");
        put(engine);
        put(engine);
        assert_eq!(get(other), (true, (3, 4, 0, 0)), "GET of what was replaced twice");
        let put_long = |bytes: usize| {
            run_with(engine, 1, &vec![0; bytes], async |of| of.put(FOREVER).await);
        };
        put_long(200);
        assert_eq!(get(other), (true, (3, 4, 0, 0)), "GET of what a longer value replaced");
        put_long(5000);
        get(other);
        put_long(5000);
        assert_eq!(get(other), (true, (3, 3, 0, 0)), "GET of a long value that was replaced");
        put(engine);
        assert_eq!(put(other), (3, 1, 3, 2), "PUT of what was replaced");
        assert_eq!(put(other), (1, 0, 2, 1), "and then");
        run(engine, 1, async |operation| operation.delete().await);
        assert_eq!(get(other), (false, (2, 2, 0, 0)), "GET of what was removed");
    });
}

/// What reached the region too late: a READ is too old to be believed and is read again, a swing is
/// tried again; the connection is as good as before.
#[test]
fn what_comes_late_is_tried_again() {
    with_engine(|engine, clock| {
        let late = 10 * engine.region.constants.lateness_ns.max(engine.region.constants.grace_ns);
        let get = || run(engine, 1, async |of| of.get().await.map(|found| found.is_some()));
        let put = || run(engine, 1, async |of| of.put(FOREVER).await).1;
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

/// However many PUTs of a key it has in flight, and however long their round trips take.
#[test]
fn a_put_that_loses_to_one_of_its_session_is_overwritten() {
    with_engines(|[engine, other], clock| {
        let put_long = |by| run_with(by, 1, b"longer", async |of| of.put(FOREVER).await);
        for (winner, value_bytes) in [(engine, 6), (other, 3)] {
            put_long(engine);
            engine.region.cache.clear();
            let operation =
                Operation::stage(engine.handle(), LaneId(1), &1u64.to_le_bytes(), b"new");
            let mut put = pin!(operation.put(FOREVER));
            // The window, whose hints say nothing after that time, and the block.
            for _ in 0..2 {
                engine.endpoint.tick();
                assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                clock.add(2 * engine.region.constants.exact_hint_read_ns_max);
                engine.endpoint.step(|_| ());
            }
            put_long(winner);
            engine.endpoint.drive_lanes(put).unwrap();
            let (found, _) = run(engine, 1, async |of| of.get().await);
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

/// Of the same key, by sessions that found it and that stored it.
#[test]
fn a_cached_get_reads_a_block_as_far_as_it_is_in_use() {
    with_engines(|[engine, other], _| {
        // 32 bytes of header, 8 of the key; classes of 64, 128, 5,120 and 98,304 bytes.
        for (value, read) in
            [(24, 64), (41, 96), (64, 112), (88, 128), (4096, 4352), (90_000, 90_112)]
        {
            run_with(engine, 1, &vec![7; value], async |of| of.put(FOREVER).await);
            run(other, 1, async |of| of.get().await.map(drop));
            for of in [engine, other] {
                let before = of.counters();
                let (found, _) = run(of, 1, async |of| of.get().await);
                assert_eq!(found.unwrap().value_bytes as usize, value);
                assert_eq!((of.counters() - before).read_bytes, read, "{value} bytes");
            }
        }
    });
}
