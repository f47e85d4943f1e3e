//! Proves the operations beyond GET, PUT and DELETE: their results, and their round trips and verbs
//! as the price list states them, on every fabric. Guards against an additional verb and against a
//! change that is made twice or not at all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farside::OperationError::{Denied, NotANumber, NumberOverflow, ValueTooLong};
use farside::{Error, Role, Session, Store, Ttl};
use farside_tests::{ServerProcess, TEST_TIMEOUT, scaled};

use crate::verb_counts::{price, server, uncached};

const HOUR: Duration = Duration::from_secs(3600);

#[on(any, rdma_in_soak)]
fn a_modification_costs_one_round_trip_more_than_a_get() {
    let server = server();
    let session = &mut server.session();
    let increment = |session: &mut Session| assert!(session.increment("n", 1).is_ok());
    assert!(price(session, increment).0 <= 4, "INSERT behind a GET");
    type Call = fn(&mut Session);
    let calls: [(&str, Call); 6] = [
        ("increment", |session| assert!(session.increment("n", 1).is_ok())),
        ("append", |session| assert!(session.append("n", "0").is_ok())),
        ("touch", |session| assert!(session.touch("n", HOUR).unwrap())),
        ("persist", |session| assert!(session.persist("n").unwrap())),
        ("keep_ttl", |session| {
            assert!(session.store("n", "5", Store::always().keep_ttl()).is_ok())
        }),
        ("returning", |session| {
            assert_eq!(
                session.store("n", "6", Store::always().returning()).unwrap().value.unwrap(),
                "5"
            )
        }),
    ];
    for (name, call) in calls {
        assert_eq!(price(session, call), (2, 1, 2, 1), "{name}, cached");
        if name != "returning" {
            assert_eq!(uncached(session, call), (3, 2, 2, 1), "{name}, uncached");
        }
    }
    let absent = |session: &mut Session| {
        assert!(session.compare_exchange("absent", None, "value").unwrap().applied);
    };
    assert!(price(session, absent).0 <= 3, "an INSERT, without a GET before it");
    let take = |session: &mut Session| assert!(session.take("n").unwrap().is_some());
    assert_eq!(price(session, take), (2, 1, 1, 1), "take, cached");
    session.put("n", "1").unwrap();
    assert_eq!(uncached(session, take), (3, 2, 1, 1), "take, uncached");
    for is_cached in [true, false] {
        let first = session.get_or_insert("n", "1").unwrap().version;
        session.put("n", "1").unwrap();
        let present = session.get("n").unwrap().unwrap().version;
        let mut cost = |expected, applies| {
            let delete = |session: &mut Session| {
                assert_eq!(session.delete_if_version("n", expected).unwrap(), applies);
            };
            if is_cached { price(session, delete) } else { uncached(session, delete) }
        };
        let (refused, removed) =
            if is_cached { ((1, 1, 0, 0), (2, 1, 1, 1)) } else { ((2, 2, 0, 0), (3, 2, 1, 1)) };
        assert_eq!(cost(first, false), refused, "DELETE by another version, {is_cached}");
        assert_eq!(cost(present, true), removed, "DELETE by version, {is_cached}");
        assert_eq!(cost(present, false), (1, 1, 0, 0), "DELETE by version, absent, {is_cached}");
    }
    let absent = |session: &mut Session| {
        assert_eq!(session.take("n").unwrap(), None);
        assert!(!session.touch("n", HOUR).unwrap());
        assert_eq!(session.ttl("n").unwrap(), None);
        assert!(!session.exists("n").unwrap());
    };
    assert_eq!(price(session, absent), (4, 4, 0, 0), "one READ for each, of an absent key");
}

#[on(any, rdma_in_soak)]
fn the_version_of_a_cached_key_costs_a_read_of_8_bytes() {
    let server = server();
    let [session, other] = &mut [server.session(), server.session()];
    session.put("key", [7; 1000]).unwrap();
    let version = session.get("key").unwrap().unwrap().version;
    let before = session.counters();
    assert_eq!(session.version("key").unwrap(), Some(version));
    assert!(session.exists("key").unwrap());
    let cost = session.counters() - before;
    assert_eq!((cost.round_trips, cost.reads, cost.read_bytes), (2, 2, 16));
    other.put("key", [8; 1000]).unwrap();
    let changed = session.version("key").unwrap();
    assert_eq!(changed, other.version("key").unwrap());
    assert_ne!(changed, Some(version));
    // A value that expires has to be READ.
    session.put_with_ttl("key", [9; 1000], HOUR).unwrap();
    let before = session.counters();
    assert!(session.exists("key").unwrap());
    assert!((session.counters() - before).read_bytes > 1000);
}

#[on(any, rdma_in_soak)]
fn several_keys_share_a_doorbell() {
    let server = server();
    let session = &mut server.session();
    let keys: Vec<String> = (0..16).map(|n| format!("key {n}")).collect();
    session.put_many(keys.iter().map(|key| (key, "value"))).unwrap();
    let before = session.counters();
    let values = session.get_many(keys.iter().chain(["absent".to_owned()].iter())).unwrap();
    assert!(values[..16].iter().all(|value| value.as_ref().is_some_and(|it| *it == "value")));
    assert_eq!(values[16], None);
    session.put_many(keys.iter().map(|key| (key, "other"))).unwrap();
    assert_eq!(session.delete_many(keys.iter().take(10)).unwrap(), 10);
    assert_eq!(session.delete_many(&keys).unwrap(), 6);
    let cost = session.counters() - before;
    assert!(cost.doorbells <= 4 + 1, "{cost:?}");
}

#[on(any, rdma_in_soak)]
fn results_are_those_that_the_documentation_says() {
    let server = ServerProcess::start("--memory 32MiB --value-bytes-max 1000");
    let session = &mut server.session();
    assert_eq!(session.increment("n", -5).unwrap(), -5);
    assert_eq!(session.increment("n", i64::MAX).unwrap(), i64::MAX - 5);
    let is = |result: Result<i64, Error>, expected| {
        result.is_err_and(|error| matches!(error, Error::Operation(it) if it == expected))
    };
    assert!(is(session.increment("n", 6), NumberOverflow));
    for text in ["", "+1", "01", "-0", " 1", "1.5", "9223372036854775808", "x"] {
        session.put("text", text).unwrap();
        assert!(is(session.increment("text", 1), NotANumber), "{text:?}");
        assert_eq!(session.get("text").unwrap().unwrap(), text);
    }
    assert_eq!(session.append("log", "one ").unwrap(), 4);
    assert_eq!(session.append("log", "two").unwrap(), 7);
    assert_eq!(session.get("log").unwrap().unwrap(), "one two");
    let full = session.append("log", vec![b'x'; 994]);
    assert!(matches!(full, Err(Error::Operation(ValueTooLong { bytes: 1001, max: 1000 }))));
    assert_eq!(session.append("log", vec![b'x'; 993]).unwrap(), 1000);
    assert_eq!(session.get_or_insert("new", "mine").unwrap(), "mine");
    let found = session.get_or_insert("new", "theirs").unwrap();
    assert_eq!((&found, Some(found.version)), (&found, session.version("new").unwrap()));
    assert_eq!(found, "mine");
    let refused = session.store("new", "x", Store::if_absent().returning()).unwrap();
    assert_eq!((refused.applied, refused.value.unwrap()), (false, found));
    let plain = session.store("new", "x", Store::if_value(b"other")).unwrap();
    assert_eq!((plain.applied, plain.value), (false, None), "a value only on request");
    let stored = session.store("new", "y", Store::always()).unwrap();
    assert_eq!(stored.version, session.version("new").unwrap());
    // An increment and an append keep the TTL, as `keep_ttl` does; a PUT removes it.
    session.put_with_ttl("n", "1", HOUR).unwrap();
    session.increment("n", 1).unwrap();
    session.append("n", "0").unwrap();
    session.store("n", "30", Store::if_present().keep_ttl()).unwrap();
    let ttl = session.ttl("n").unwrap();
    assert!(matches!(ttl, Some(Ttl::For(ttl)) if ttl < 2 * HOUR && ttl > HOUR / 2), "{ttl:?}");
    session.put("n", "1").unwrap();
    assert_eq!(session.ttl("n").unwrap(), Some(Ttl::Forever));
    server.assert_verifies();
}

#[on(any, rdma_in_soak)]
fn a_prefix_selects_keys_of_scans_and_deletes() {
    let server = server();
    let session = &mut server.session();
    let keys = scaled(1000);
    for n in 0..3 * keys {
        session.put(format!("{}/{n}", if n % 3 == 0 { "a" } else { "b" }), "value").unwrap();
    }
    assert_eq!(session.scan_prefix("a/").unwrap().count() as u64, keys);
    assert_eq!(session.delete_prefix("b/").unwrap(), 2 * keys);
    assert_eq!(session.scan().unwrap().count() as u64, keys);
    assert_eq!(session.delete_prefix("b/").unwrap(), 0);
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let refused = reader.session().unwrap().delete_prefix("a/");
    assert!(matches!(refused, Err(Error::Operation(Denied))));
}

#[on(any, rdma_in_soak)]
fn concurrent_increments_and_appends_are_all_there() {
    let each = 10 * scaled(50) as i64;
    let server = server();
    let (client, other) = (server.client(), server.client());
    std::thread::scope(|scope| {
        for client in [&client, &client, &other] {
            scope.spawn(move || {
                let mut session = client.session().unwrap();
                for n in 0..each {
                    session.increment("sum", 1).unwrap();
                    if n % 10 == 0 {
                        session.append("log", "x").unwrap();
                    }
                }
            });
        }
    });
    let mut session = server.session();
    assert_eq!(session.get("sum").unwrap().unwrap(), (3 * each).to_string().as_str());
    assert_eq!(session.get("log").unwrap().unwrap().len() as i64, 3 * each / 10);
    server.assert_verifies();
}

/// Each client has its own session of the server, so nothing is combined before the slot.
#[on(any, rdma_in_soak)]
fn a_key_that_many_clients_increment_is_not_given_up() {
    let server = server();
    let each = scaled(60) as i64;
    const CLIENTS: i64 = 24;
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut session = server.session();
                for _ in 0..each {
                    session.increment("sum", 1).unwrap();
                }
            });
        }
    });
    let sum = (CLIENTS * each).to_string();
    assert_eq!(server.session().get("sum").unwrap().unwrap(), sum.as_str());
}

#[on(any, rdma_in_soak)]
fn a_pipeline_has_all_operations() {
    let server = server();
    let mut session = server.session();
    session.put("a", "1").unwrap();
    let mut pipeline = session.pipeline().unwrap();
    let mut run = |start: &mut dyn FnMut(&mut farside::Pipeline<'_>)| {
        start(&mut pipeline);
        let outcome = pipeline.wait().unwrap().result.unwrap();
        (outcome.applied, outcome.number, outcome.value.map(|value| value.to_vec()))
    };
    let value = |text: &str| Some(text.as_bytes().to_vec());
    assert_eq!(run(&mut |it| assert!(it.increment("a", 41).is_ok())), (true, 42, None));
    assert_eq!(run(&mut |it| assert!(it.append("a", "!").is_ok())), (true, 0, value("42")));
    assert_eq!(run(&mut |it| assert!(it.touch("a", HOUR).is_ok())), (true, 0, None));
    assert_eq!(run(&mut |it| assert!(it.version("a").is_ok())), (true, 0, None));
    assert_eq!(run(&mut |it| assert!(it.take("a").is_ok())), (true, 0, value("42!")));
    assert_eq!(run(&mut |it| assert!(it.take("a").is_ok())), (false, 0, None));
    drop(pipeline);
    let first = session.get_or_insert("a", "1").unwrap().version;
    session.put("a", "1").unwrap();
    let second = session.get("a").unwrap().unwrap().version;
    let batch = session.batch().delete_if_version("a", first);
    let refused = batch.run().unwrap().remove(0).unwrap();
    assert_eq!((refused.applied, refused.version), (false, Some(second)));
    let mut pipeline = session.pipeline().unwrap();
    pipeline.delete_if_version("a", second).unwrap();
    assert!(pipeline.wait().unwrap().result.unwrap().applied);
}

#[on(any, rdma_in_soak)]
fn sessions_of_a_client_fetch_a_value_once() {
    let server = server();
    let client = server.client();
    let fetches = AtomicU64::new(0);
    let fetch = || {
        fetches.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(100));
        Ok::<_, Error>("fetched")
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut session = client.session().unwrap();
                assert_eq!(session.get_or_fetch("key", HOUR, fetch).unwrap(), b"fetched");
            });
        }
    });
    assert_eq!(fetches.load(Ordering::Relaxed), 1);
    let mut session = client.session().unwrap();
    assert!(matches!(session.ttl("key").unwrap(), Some(Ttl::For(_))));
    // A failed fetch stores nothing, and the next call fetches again.
    let fail = || Err::<&str, _>(Error::from(Denied));
    assert!(session.get_or_fetch("other", HOUR, fail).is_err());
    assert_eq!(session.get_or_fetch("other", HOUR, fetch).unwrap(), b"fetched");
    assert_eq!(session.get_or_fetch("other", HOUR, fail).unwrap(), b"fetched");
}

#[on(any, rdma_in_soak)]
fn a_fetched_value_that_cannot_be_stored_is_returned() {
    let server = server();
    let mut session = server.client().session().unwrap();
    let long = vec![7; session.limits().value_bytes_max + 1];
    let fetch = || Ok::<_, Error>(&long);
    assert!(session.get_or_fetch("long", HOUR, fetch).unwrap() == long);
    // Until the server has no room for more.
    let value = vec![7; session.limits().value_bytes_max];
    let full = (0..).find(|n| session.put(format!("key:{n}"), &value).is_err());
    assert!(full.is_some_and(|keys| keys > 0));
    let fetch = || Ok::<_, Error>(&value);
    assert!(session.get_or_fetch("more", HOUR, fetch).unwrap() == value);
    assert!(session.get("more").unwrap().is_none());
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let mut reader = reader.session().unwrap();
    let denied = reader.get_or_fetch("more", HOUR, || -> Result<&str, Error> {
        panic!("fetched for a reader, which cannot store")
    });
    assert!(matches!(denied, Err(Error::Operation(Denied))), "{denied:?}");
}

#[on(any, rdma_in_soak)]
fn a_watch_returns_when_a_key_changes() {
    let server = server();
    let mut session = server.session();
    session.put("a", "1").unwrap();
    let keys = ["a", "b"];
    assert_eq!(session.watch(&keys, Duration::from_millis(20)).unwrap(), None);
    for (change, index) in [("b", 1), ("a", 0)] {
        let changed = std::thread::scope(|scope| {
            let watching = scope.spawn(|| session.watch(&keys, TEST_TIMEOUT).unwrap());
            let mut writer = server.session();
            while !watching.is_finished() {
                writer.put(change, "2").unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            watching.join().unwrap().unwrap()
        });
        assert_eq!(changed.index, index);
    }
    let known = keys.map(|key| session.version(key).unwrap());
    session.delete("b").unwrap();
    let changed = session.watch_since(&keys, &known, Duration::ZERO).unwrap().unwrap();
    assert_eq!((changed.index, changed.version), (1, None));
}
