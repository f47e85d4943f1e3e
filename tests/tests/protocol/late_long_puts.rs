//! Proves that a PUT of a long value stores the value whole although its chain at the cached
//! location came too late. Such a chain takes the value from the caller's memory, and leaves no
//! copy in the lane's buffer. So the PUT stages the value there before it goes on (`restage`).
//!
//! The chain is that of the shared-memory fabric, which finds its deadline passed. Meanwhile
//! another session may have replaced or deleted the value.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use farside::Session;
use farside_fabric::shm::ShmFabric;
use farside_fabric::{
    Buffer, ChainError, Completion, Counters, Fabric, LaneId, Lent, Nanos, RegionIndex, Timing,
    Verb,
};
use farside_protocol::Lifetime;
use farside_tests::engine::{TestEngine, engine_over};
use farside_tests::{ServerProcess, self_describing};

const KEY: &[u8] = b"key";
/// Values that a PUT takes from the caller's memory.
const LENGTHS: [usize; 5] = [4096, 64 << 10, 70_001, 500_000, 1 << 20];

/// Limit on the PUTs until one finds a cached location and a free block.
const PUTS_MAX: u32 = 10;

/// What happens just before a long WRITE.
type Event = Box<dyn FnOnce()>;

/// The long WRITEs of a fabric, and what happens to the next one.
#[derive(Default)]
struct LongWrites {
    begun: Cell<u64>,
    late: Cell<u64>,
    /// If present, the next long WRITE finds its deadline passed.
    next_is_late: RefCell<Option<Event>>,
}

/// A fabric in which long WRITEs can be late.
struct LateFabric {
    fabric: ShmFabric,
    writes: Rc<LongWrites>,
}

impl Fabric for LateFabric {
    fn timing(&self, region: RegionIndex) -> Timing {
        self.fabric.timing(region)
    }

    fn now(&self) -> Nanos {
        self.fabric.now()
    }

    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        let mut late = None;
        if let Verb::WriteSplit { .. } = chain[0] {
            self.writes.begun.update(|begun| begun + 1);
            late = self.writes.next_is_late.take();
        }
        let deadline = late.map_or(deadline, |event| {
            event();
            0
        });
        self.fabric.post(lane, region, chain, deadline);
    }

    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        self.fabric.lend(lane, memory)
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.fabric.wait(lane, until);
    }

    fn ring(&mut self) {
        self.fabric.ring();
    }

    fn poll(&mut self) -> Option<Completion> {
        let completion = self.fabric.poll()?;
        let is_late = completion.result == Err(ChainError::Late);
        self.writes.late.update(|late| late + u64::from(is_late));
        Some(completion)
    }

    fn relax(&mut self) {
        self.fabric.relax();
    }

    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.fabric.buffer(lane, buffer)
    }

    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.fabric.buffer_mut(lane, buffer)
    }

    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        self.fabric.reserve(lane, buffer, bytes)
    }

    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        self.fabric.part_sum(lane, verb, part, before)
    }

    fn counters(&self) -> Counters {
        self.fabric.counters()
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        self.fabric.lane_counters(lane)
    }
}

fn value(count: u64, bytes: usize) -> Vec<u8> {
    self_describing::value(1, 0, count, bytes)
}

fn put(engine: &TestEngine<LateFabric>, value: &[u8]) {
    engine.handle().put(Lifetime::FOREVER, engine.hashed(KEY), value).unwrap();
}

/// Checks that both clients read this value.
fn check(engine: &TestEngine<LateFabric>, other: &mut Session, expected: &[u8], what: &str) {
    let found = other.get(KEY).unwrap().unwrap_or_else(|| panic!("{what}: the key is gone"));
    assert!(found.data == expected, "{what}: the other client reads another value");
    let mut found = Vec::new();
    let read = engine.handle().get_into(engine.hashed(KEY), &mut found).unwrap();
    assert!(read.is_some() && found == expected, "{what}: the writer reads another value");
}

/// What another client does to the key while the chain is late.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    Put,
    Delete,
}

#[test]
fn a_long_put_whose_chain_was_late_stores_its_value_whole() {
    let server = ServerProcess::start("--memory 128MiB --grace-ms 50");
    let writes = Rc::new(LongWrites::default());
    let engine =
        engine_over(&server.address(), |fabric| LateFabric { fabric, writes: writes.clone() });
    let mut other = server.session();
    let mut count = 0;
    for bytes in LENGTHS {
        for meanwhile in [Meanwhile::Nothing, Meanwhile::Put, Meanwhile::Delete] {
            let what = format!("{bytes} bytes, meanwhile {meanwhile:?}");
            let [first, second, replacing, last] = [0, 1, 2, 3].map(|n| value(count + n, bytes));
            count += 4;
            put(&engine, &first);
            // The first PUTs may have to ask for blocks, and then take the value from the buffer.
            let begun = writes.begun.get();
            let is_direct = (0..PUTS_MAX).any(|_| {
                put(&engine, &second);
                writes.begun.get() > begun
            });
            assert!(is_direct, "{what}: no PUT takes the value from the caller's memory");
            check(&engine, &mut other, &second, &what);
            let mut session = server.session();
            let event = move || match meanwhile {
                Meanwhile::Nothing => {}
                Meanwhile::Put => session.put(KEY, &replacing).unwrap(),
                Meanwhile::Delete => assert!(session.delete(KEY).unwrap()),
            };
            let late = writes.late.get();
            *writes.next_is_late.borrow_mut() = Some(Box::new(event));
            put(&engine, &last);
            assert_eq!(writes.late.get(), late + 1, "{what}: the chain was not late");
            check(&engine, &mut other, &last, &what);
        }
    }
    server.assert_verifies();
}
