//! Proves that a value with an expiry time is absent from that millisecond on, for every operation.
//! The check costs nothing for operations that READ the block anyway, and nothing for other values.

use std::time::Duration;

use farside_protocol::Lifetime;

use super::*;

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
