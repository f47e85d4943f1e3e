//! Proves the price list exactly, on a clock that stands still but for what a test adds: on shared
//! memory a process that loses the processor during a READ rightly pays for another. Guards against
//! an old proof of a word being relied on, and against one being forgotten too early.

use std::cell::Cell;
use std::rc::Rc;

use farside_common::config::ServerConfig;
use farside_common::fabric::shm::ShmFabric;
use farside_common::fabric::{Buffer, Completion, Counters, Fabric, LaneId, Nanos, Timing, Verb};
use farside_common::size::ByteSize;
use farside_server::Server;

use super::{Expected, Operation};
use crate::Client;
use crate::control::ControlDepot;
use crate::engine::{Engine, LANE};

/// A fabric whose time is the test's.
struct Timeless(ShmFabric, Rc<Cell<Nanos>>);

impl Fabric for Timeless {
    fn timing(&self) -> Timing {
        self.0.timing()
    }

    fn now(&self) -> Nanos {
        self.1.get()
    }

    fn post(&mut self, lane: LaneId, chain: &[Verb], _: Nanos) {
        self.0.post(lane, chain, Nanos::MAX);
    }

    /// Waits, for blocks from the server, are real.
    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.0.wait(lane, self.0.now() + until - self.now());
    }

    fn ring(&mut self) {
        self.0.ring();
    }

    fn poll(&mut self) -> Option<Completion> {
        self.0.poll()
    }

    fn relax(&mut self) {
        self.0.relax();
    }

    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.0.buffer(lane, buffer)
    }

    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.0.buffer_mut(lane, buffer)
    }

    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) {
        self.0.reserve(lane, buffer, bytes);
    }

    fn counters(&self) -> Counters {
        self.0.counters()
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        self.0.lane_counters(lane)
    }
}

type TimelessEngine = Engine<Timeless, ControlDepot>;

fn run<T>(
    engine: &TimelessEngine,
    key: u64,
    call: impl AsyncFn(&Operation<'_, Timeless, ControlDepot>) -> super::Outcome<T>,
) -> (T, (u64, u64, u64, u64)) {
    let before = engine.counters();
    let operation = Operation::stage(engine, LANE, &key.to_le_bytes(), b"value");
    let output = engine.endpoint.drive(call(&operation)).unwrap();
    let counters = engine.counters() - before;
    let Counters { round_trips, reads, writes, compare_swaps, .. } = counters;
    (output, (round_trips, reads, writes, compare_swaps))
}

/// Calls `test` with a session of its own server, and the session's clock.
fn with_engine(test: impl FnOnce(&TimelessEngine, &Cell<Nanos>)) {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("shm://{}", folder.path().join("kv.sock").display());
    let config = ServerConfig {
        listen: Some(address.parse().unwrap()),
        memory: Some(ByteSize::mib(64)),
        // Large enough for nothing to be split.
        index: Some(ByteSize::mib(16)),
        ..Default::default()
    };
    let _server = Server::start(&config).unwrap();
    let client = Client::builder().server(&address).connect().unwrap();
    let clock = Rc::new(Cell::new(0));
    let engine = client.engine_over(|fabric| Timeless(fabric, clock.clone())).unwrap();
    test(&engine, &clock);
}

#[test]
fn every_operation_costs_what_the_price_list_says() {
    with_engine(|engine, _| (0..10_000).for_each(|key| assert_price_list(engine, key)));
}

fn assert_price_list(engine: &TimelessEngine, key: u64) {
    let insert = run(engine, key, async |operation| operation.insert().await);
    assert_eq!(insert, (true, (3, 2, 2, 2)), "INSERT");
    let get = run(engine, key, async |operation| operation.get().await.map(|f| f.is_some()));
    assert_eq!(get, (true, (1, 1, 0, 0)), "cached GET");
    let put = run(engine, key, async |operation| operation.put().await);
    assert_eq!(put.1, (1, 0, 2, 1), "cached PUT");
    engine.cache().clear();
    let put = run(engine, key, async |operation| operation.put().await);
    assert_eq!(put.1, (2, 2, 2, 1), "uncached PUT");
    engine.cache().clear();
    let get = run(engine, key, async |operation| operation.get().await.map(|f| f.is_some()));
    assert_eq!(get, (true, (2, 2, 0, 0)), "uncached GET");
    if key.is_multiple_of(2) {
        engine.cache().clear();
        let delete = run(engine, key, async |operation| operation.delete().await);
        assert_eq!(delete, (true, (2, 2, 1, 1)), "uncached DELETE");
    } else if key % 4 == 1 {
        let delete = run(engine, key, async |operation| operation.delete().await);
        assert_eq!(delete, (true, (1, 0, 1, 1)), "cached DELETE");
    }
}

/// A word may come again for another key once its block went through 256 generations (invariant
/// I4). A GET needs no such limit (I10), and proves the word for whoever comes after it.
#[test]
fn a_proof_of_a_word_lasts_for_t_word() {
    with_engine(|engine, clock| {
        let word_ns = engine.constants.word_ns;
        let later = |by: Nanos| clock.set(clock.get() + by);
        let put = || run(engine, 1, async |operation| operation.put().await).1;
        let get = || run(engine, 1, async |operation| operation.get().await.map(drop)).1;
        let exchange = || {
            let value = Expected::Value(b"value");
            let call = async |operation: &Operation<'_, _, _>| {
                operation.compare_exchange(value).await.map(|(done, _)| done)
            };
            run(engine, 1, call)
        };
        put();
        later(word_ns - (1 << 24));
        assert_eq!(put(), (1, 0, 2, 1), "PUT on a proof of almost T_word");
        later(word_ns + 1);
        assert_eq!(put(), (2, 2, 2, 1), "PUT on an older one");
        later(word_ns + 1);
        assert_eq!(get(), (1, 1, 0, 0), "GET, however long ago");
        assert_eq!(put(), (1, 0, 2, 1), "PUT after the GET");
        later(word_ns + 1);
        assert_eq!(exchange(), (true, (2, 1, 2, 1)), "exchange, which relies on its own GET");
    });
}
