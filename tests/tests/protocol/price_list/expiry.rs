//! Proves that a value with an end is absent from that millisecond on, for every operation. Finding
//! out costs nothing for operations that READ its block anyway, and nothing for other values.

use std::time::Duration;

use farside_protocol::Lifetime;

use super::*;

const MILLISECOND: Nanos = 1_000_000;
/// No full seconds.
const TTL_NS: Nanos = 10_500 * MILLISECOND;
const TTL: Lifetime = Lifetime::For(Duration::from_nanos(TTL_NS));

struct Bench<'a> {
    engine: &'a TimelessEngine,
    clock: &'a Clock,
}

impl Bench<'_> {
    /// Stores a value that ends after exactly [`TTL_NS`], at a full millisecond.
    fn store(&self) {
        self.clock.now.set(self.clock.now.get().next_multiple_of(MILLISECOND));
        run(self.engine, 1, async |operation| operation.put(TTL).await);
    }

    /// Lets the value end.
    fn end(&self) {
        self.clock.add(TTL_NS);
    }

    fn uncached(&self) -> &Self {
        self.engine.region.cache.clear();
        self
    }

    fn get(&self) -> (bool, (u64, u64, u64, u64)) {
        run(self.engine, 1, async |operation| operation.get().await.map(|found| found.is_some()))
    }

    fn insert(&self) -> (bool, (u64, u64, u64, u64)) {
        run(self.engine, 1, async |operation| operation.insert(FOREVER).await)
    }

    fn update(&self) -> (bool, (u64, u64, u64, u64)) {
        run(self.engine, 1, async |operation| operation.update(FOREVER).await)
    }

    fn delete(&self) -> (bool, (u64, u64, u64, u64)) {
        run(self.engine, 1, async |operation| operation.delete().await)
    }

    fn exchange(&self) -> (bool, (u64, u64, u64, u64)) {
        let expected = Expected::Value(b"value");
        let call = async |operation: &Operation<'_, _>| {
            operation.compare_exchange(expected, FOREVER).await.map(|(done, _)| done)
        };
        run(self.engine, 1, call)
    }
}

#[test]
fn what_replaced_a_cached_value_may_have_ended() {
    with_engines(|engines, clock| {
        let [bench, other] = engines.map(|engine| Bench { engine, clock });
        for ask in [Bench::get, Bench::update] {
            run(bench.engine, 1, async |operation| operation.put(FOREVER).await);
            assert!(other.get().0);
            bench.store();
            bench.end();
            let asked = ask(&other);
            assert!(matches!(asked, (false, (2, 1 | 3, ..))), "{asked:?}");
        }
    });
}

fn with_bench(test: impl FnOnce(&Bench<'_>)) {
    with_engine(|engine, clock| test(&Bench { engine, clock }));
}

#[test]
fn a_value_is_there_until_its_millisecond_and_not_from_it_on() {
    with_bench(|bench| {
        bench.store();
        bench.clock.add(TTL_NS - 1);
        assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "cached GET, a nanosecond before");
        assert_eq!(bench.uncached().get(), (true, (2, 2, 0, 0)), "uncached GET, likewise");
        bench.clock.add(1);
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)), "cached GET, on the millisecond");
        assert_eq!(bench.uncached().get(), (false, (2, 2, 0, 0)), "uncached GET, likewise");
        assert!(!bench.uncached().exchange().0, "exchange, likewise");
    });
}

#[test]
fn an_ended_value_is_absent_for_insert_update_and_delete() {
    with_bench(|bench| {
        bench.store();
        bench.end();
        assert!(!bench.update().0, "cached UPDATE");
        assert_eq!(bench.uncached().update(), (false, (2, 2, 0, 0)), "uncached UPDATE");
        // READ window, READ block; WRITE block, WRITE mark, CAS.
        assert_eq!(bench.uncached().insert(), (true, (3, 2, 2, 1)), "INSERT in its place");
        assert_eq!(bench.get(), (true, (1, 1, 0, 0)), "what was inserted has no end");
        bench.end();
        assert!(bench.get().0, "even later");
        bench.store();
        bench.end();
        // The chain READs the header of what it unlinks.
        assert_eq!(bench.delete(), (false, (1, 1, 1, 1)), "cached DELETE");
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)), "and the slot is empty");
        bench.store();
        bench.end();
        assert_eq!(bench.uncached().delete(), (false, (2, 2, 1, 1)), "uncached DELETE");
        assert_eq!(bench.get(), (false, (1, 1, 0, 0)));
    });
}

#[test]
fn a_value_that_has_not_ended_costs_a_verb_where_its_end_is_unknown() {
    with_bench(|bench| {
        bench.store();
        assert_eq!(bench.uncached().insert(), (false, (2, 2, 0, 0)), "refused INSERT");
        assert!(bench.get().0);
        assert_eq!(bench.update(), (true, (2, 1, 2, 1)), "cached UPDATE");
        assert_eq!(bench.update(), (true, (1, 0, 2, 1)), "an UPDATE took the end away");
        assert_eq!(bench.uncached().update(), (true, (3, 2, 2, 1)), "its word is conditional");
        bench.store();
        assert_eq!(bench.uncached().update(), (true, (3, 2, 2, 1)), "uncached UPDATE");
        bench.store();
        assert_eq!(bench.delete(), (true, (1, 1, 1, 1)), "cached DELETE");
        run(bench.engine, 1, async |operation| operation.put(FOREVER).await);
        assert_eq!(bench.uncached().insert(), (false, (1, 1, 0, 0)), "refused INSERT, no end");
        assert_eq!(bench.uncached().update(), (true, (2, 2, 2, 1)), "UPDATE, no end");
    });
}

#[test]
fn a_put_costs_the_same_with_and_without_an_end() {
    with_bench(|bench| {
        let put = |lifetime| run(bench.engine, 1, async |of| of.put(lifetime).await).1;
        assert_eq!(put(FOREVER), (3, 2, 1, 2), "new");
        assert_eq!([put(TTL), put(TTL), put(FOREVER)], [(1, 0, 2, 1); 3], "cached");
        put(TTL);
        bench.end();
        assert_eq!(put(TTL), (1, 0, 2, 1), "over a value that ended");
        bench.engine.region.cache.clear();
        assert_eq!(put(FOREVER), (2, 2, 2, 1), "uncached");
    });
}

/// Before the DELETE it would have been there, so it comes after: it may not be called overwritten.
#[test]
fn a_put_that_loses_to_the_deletion_of_an_ended_value_is_stored() {
    with_engines(|engines, clock| {
        let [bench, other] = engines.map(|engine| Bench { engine, clock });
        let endpoint = &bench.engine.endpoint;
        let exchange_for_nothing = || {
            let call = async |operation: &Operation<'_, _>| {
                let ended = Lifetime::For(Duration::ZERO);
                operation.compare_exchange(Expected::Value(b"value"), ended).await
            };
            assert!(run(other.engine, 1, call).0.0);
        };
        for ends_meanwhile in [false, true] {
            bench.store();
            if ends_meanwhile {
                run(bench.engine, 1, async |operation| operation.put(FOREVER).await);
            } else {
                bench.end();
            }
            bench.uncached();
            let operation =
                Operation::stage(bench.engine.handle(), LANE, &1u64.to_le_bytes(), b"new");
            let mut put = pin!(operation.put(FOREVER));
            endpoint.tick();
            assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            endpoint.step(|_| ());
            // The window is READ, and nothing swapped yet.
            if ends_meanwhile {
                exchange_for_nothing();
            }
            assert!(!other.delete().0);
            endpoint.drive_lanes(put).unwrap();
            assert!(bench.get().0 && other.get().0, "ends meanwhile: {ends_meanwhile}");
        }
    });
}
