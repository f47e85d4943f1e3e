//! Proves which values are pinned: what every kind of store says, what modifications keep, and what
//! survives `kv-cli`, a snapshot and a restore. A cache never evicts them, refuses others if it is
//! full of them, and tells what it evicts.

use std::collections::BTreeMap;
use std::time::Duration;

use farside::OperationError::OutOfSpace;
use farside::{Client, Error, Exhausted, Session, Store, Ttl};
use farside_tests::cluster::TestCluster;
use farside_tests::{ServerProcess, TEST_TIMEOUT, fill, scaled, wait_until};
use serde_json::Value as Json;

use crate::verb_counts::{price, server};

const HOUR: Duration = Duration::from_secs(3600);

/// Returns whether each key is pinned.
fn pins(session: &mut Session) -> BTreeMap<String, bool> {
    let entries = session.scan().unwrap().map(Result::unwrap);
    entries.map(|entry| (String::from_utf8(entry.key).unwrap(), entry.is_pinned)).collect()
}

fn is_pinned(session: &mut Session, key: &str) -> bool {
    pins(session)[key]
}

#[on(any, rdma_in_soak)]
fn every_way_to_store_can_pin_at_the_same_price() {
    let server = server();
    let session = &mut server.session();
    let pinned = Store::always().pinned();
    session.put("key", "1").unwrap();
    let store = |session: &mut Session| assert!(session.store("key", "3", pinned).unwrap().applied);
    assert_eq!(price(session, store), (1, 0, 2, 1), "that of a put");
    assert!(is_pinned(session, "key"));

    let version = session.get("key").unwrap().unwrap().version;
    assert!(session.store("key", "5", Store::if_version(version).pinned()).unwrap().applied);
    assert!(session.store("key", "6", Store::if_value(b"5").pinned()).unwrap().applied);
    assert!(session.store("key", "7", Store::if_present().pinned().returning()).unwrap().applied);
    assert!(session.store("new", "8", Store::if_absent().pinned()).unwrap().applied);
    session.batch().store("batch", "9", pinned).put("plain", "9").run().unwrap();
    session.pipeline().unwrap().store("pipeline", "10", pinned).unwrap();
    assert!(session.store("time", "11", pinned.ttl(HOUR)).unwrap().applied);
    assert!(session.store("before", "12", Store::always().ttl(HOUR).pinned()).unwrap().applied);
    let client = server.client().async_client().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(client.store("async", "13", pinned)).unwrap();
    let pins = pins(session);
    let unpinned: Vec<_> = pins.iter().filter(|(_, is_pinned)| !**is_pinned).collect();
    assert_eq!((pins.len(), unpinned), (8, vec![(&"plain".to_owned(), &false)]));
    for key in ["time", "before"] {
        assert!(matches!(session.ttl(key).unwrap(), Some(Ttl::For(_))));
    }
    server.assert_verifies();
}

#[on(any, rdma_in_soak)]
fn a_put_replaces_the_pin_and_what_keeps_the_ttl_keeps_it() {
    let server = server();
    let session = &mut server.session();
    type Call = fn(&mut Session);
    let keeping: [(&str, Call); 7] = [
        ("increment", |session| assert!(session.increment("key", 1).is_ok())),
        ("append", |session| assert!(session.append("key", "0").is_ok())),
        ("touch", |session| assert!(session.touch("key", HOUR).unwrap())),
        ("persist", |session| assert!(session.persist("key").unwrap())),
        ("keep_ttl", |session| {
            assert!(session.store("key", "5", Store::if_present().keep_ttl()).unwrap().applied);
        }),
        ("a refused insert", |session| assert!(!session.insert("key", "6").unwrap())),
        ("get_or_insert", |session| assert_eq!(session.get_or_insert("key", "6").unwrap(), "5")),
    ];
    let pin = |session: &mut Session, is_pinned| {
        let store = Store::always();
        let store = if is_pinned { store.pinned() } else { store };
        session.store("key", "1", store).unwrap();
    };
    for before in [true, false] {
        pin(session, before);
        for (name, call) in keeping {
            call(session);
            assert_eq!(is_pinned(session, "key"), before, "{name}");
        }
    }
    let keep_and_pin = Store::always().keep_ttl().pinned();
    assert!(session.store("key", "1", keep_and_pin).unwrap().applied);
    assert!(is_pinned(session, "key"));
    let replacing: [(&str, Call); 6] = [
        ("put", |session| session.put("key", "2").unwrap()),
        ("put_with_ttl", |session| session.put_with_ttl("key", "2", HOUR).unwrap()),
        ("update", |session| assert!(session.update("key", "2").unwrap())),
        ("compare_exchange", |session| {
            assert!(session.compare_exchange("key", Some(b"1"), "2").unwrap().applied);
        }),
        ("returning", |session| {
            assert!(session.store("key", "2", Store::always().returning()).unwrap().applied);
        }),
        ("delete and insert", |session| {
            assert!(session.delete("key").unwrap() && session.insert("key", "2").unwrap());
        }),
    ];
    for (name, call) in replacing {
        pin(session, true);
        call(session);
        assert!(!is_pinned(session, "key"), "{name}");
    }
    server.assert_verifies();
}

#[on(any, rdma_in_soak)]
fn pins_survive_kv_cli_snapshots_and_restores() {
    let server = ServerProcess::start("--memory 32MiB");
    server.cli(&["put", "pinned", "1", "--pinned"]).expect(0, "");
    server.cli(&["insert", "both", "2", "--pinned", "--ttl", "1h"]).expect(0, "");
    server.cli(&["update", "both", "3", "--ttl", "1h", "--pinned"]).expect(0, "");
    server.cli(&["put", "plain", "4"]).expect(0, "");
    let path = |name: &str| server.folder().join(name).to_str().unwrap().to_owned();
    let (lines, snapshot) = (path("lines.jsonl"), path("snapshot"));
    std::fs::write(&lines, "{\"key\":\"loaded\",\"value\":\"5\"}\n").unwrap();
    server.cli(&["load", &lines, "--pinned"]).succeeded();
    let expected = [("both", true), ("loaded", true), ("pinned", true), ("plain", false)]
        .map(|(key, is_pinned)| (key.to_owned(), is_pinned));
    let expected = BTreeMap::from(expected);
    assert_eq!(pins(&mut server.session()), expected);
    server.cli(&["snapshot", &snapshot]).succeeded();
    let restored = ServerProcess::start(&format!("--memory 16MiB --restore {snapshot}"));
    assert_eq!(pins(&mut restored.session()), expected);
    let running = ServerProcess::start("--memory 16MiB");
    running.cli(&["restore", &snapshot]).succeeded();
    assert_eq!(pins(&mut running.session()), expected);
    assert!(matches!(running.session().ttl("both").unwrap(), Some(Ttl::For(_))));
    server.cli(&["load", &lines]).succeeded();
    assert!(!is_pinned(&mut server.session(), "loaded"));
}

#[on(any, rdma_in_soak)]
fn a_cluster_stores_pinned_values() {
    let (_cluster, servers) = TestCluster::with_servers(2);
    let seeds: Vec<_> = servers.iter().map(ServerProcess::address).collect();
    let client = Client::builder().server(&seeds.join(",")).connect().unwrap();
    let session = &mut client.session().unwrap();
    for n in 0..20 {
        let store = Store::always();
        let store = if n % 2 == 0 { store.pinned() } else { store };
        session.store(n.to_string(), "value", store).unwrap();
    }
    let pins = pins(session);
    assert!(
        pins.len() == 20
            && pins
                .iter()
                .all(|(key, is_pinned)| { *is_pinned == (key.parse::<u32>().unwrap() % 2 == 0) }),
        "{pins:?}"
    );
}

/// Stores so many values of 1000 bytes under other keys.
fn flood(session: &mut Session, round: u64) {
    let total = scaled(60_000).max(20_000);
    fill(session, round << 32..(round << 32) + total, |_| [7; 1000]);
}

#[on(any)]
fn a_flood_evicts_no_pinned_value() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let session = &mut client.session().unwrap();
    let key = |n: u32| format!("key {n}");
    let pinned = Store::always().pinned();
    for n in 0..300 {
        session.store(key(n), [n as u8; 1000], pinned).unwrap();
        session.store(format!("number {n}"), "1", pinned).unwrap();
    }
    flood(session, 1);
    for n in 0..300 {
        assert_eq!(session.increment(format!("number {n}"), 1).unwrap(), 2);
    }
    // Half of the values lose their pin.
    (0..150).for_each(|n| session.put(key(n), [1; 1000]).unwrap());
    flood(session, 2);
    for n in 0..300 {
        assert_eq!(session.increment(format!("number {n}"), 1).unwrap(), 3);
    }
    for n in 150..300 {
        assert_eq!(session.get(key(n)).unwrap().unwrap(), [n as u8; 1000]);
    }
    let kept = (0..150).filter(|n| session.get(key(*n)).unwrap().is_some()).count();
    assert!(kept < 75, "{kept} of 150 without a pin");

    let statistics = client.admin().statistics().unwrap();
    let evicted = |bytes: u64| {
        let mut classes = statistics.classes.iter();
        let class = classes.find(|class| class.class.block_bytes() == bytes).unwrap();
        (class.evicted, class.evicted_after_ms)
    };
    assert!(evicted(1280).0 > 10_000 && evicted(64) == (0, 0), "{statistics:?}");
    assert_eq!(evicted(1280).0, statistics.keys_evicted);
    let stat: Json = serde_json::from_str(server.cli(&["stat", "--json"]).text()).unwrap();
    let classes = stat["classes"].as_array().unwrap();
    let class = classes.iter().find(|class| class["block_bytes"] == 1280).unwrap();
    assert!(class["evicted"].as_u64() >= Some(evicted(1280).0), "{stat}");
    assert!(class["evicted_after_ms"].is_u64(), "{stat}");
    let used = ["index_bytes", "blocks_bytes"].map(|field| stat["memory"][field].as_u64().unwrap());
    let (used, keys) = (used.iter().sum::<u64>(), stat["keys"].as_u64().unwrap());
    assert_eq!(stat["memory"]["bytes_per_key"], used / keys);
    let table = server.cli(&["stat"]).succeeded().text().to_owned();
    assert!(table.contains("evicted") && table.contains("with its share of the index"), "{table}");
    // The test takes less than a minute to replace what 16 MiB hold, or the age tells otherwise.
    if evicted(1280).1 < 30_000 {
        server.wait_for_log("keys with blocks of 1280 bytes are evicted");
    }
    server.assert_verifies();
}

#[on(any)]
fn a_cache_full_of_pinned_values_refuses_others_and_says_why() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let mut session = server.session();
    let pinned = Store::always().pinned();
    let put = |session: &mut Session, n: u64| session.store(n.to_le_bytes(), [1; 1000], pinned);
    let (stored, error) =
        (0..).find_map(|n| put(&mut session, n).err().map(|error| (n, error))).unwrap();
    let Error::Operation(OutOfSpace { what: Exhausted::Pinned { bytes: 1280 } }) = error else {
        panic!("after {stored}: {error}")
    };
    assert!(stored > 3000, "{stored} values of 1000 bytes in 16 MiB");
    let (value, text) = ("v".repeat(1000), ["no free block", "pinned", "delete", "--memory"]);
    server.cli(&["put", "another", &value]).expect_line(5, &text);
    for n in 0..stored {
        assert_eq!(session.get(n.to_le_bytes()).unwrap().unwrap(), [1; 1000]);
    }
    // A DELETE makes room, for a put that removes a pin too. From then on there is one to evict.
    assert!(session.delete(0u64.to_le_bytes()).unwrap());
    std::thread::sleep(session.limits().grace);
    session.put(1u64.to_le_bytes(), [2; 1000]).unwrap();
    wait_until("the value without a pin makes room", TEST_TIMEOUT, || {
        session.put(b"other", [3; 1000]).is_ok()
    });
    assert!((2..stored).all(|n| session.get(n.to_le_bytes()).unwrap().is_some()));
    server.assert_verifies();
}

#[on(any, rdma_in_soak)]
fn a_pinned_value_expires_all_the_same() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let session = &mut client.session().unwrap();
    let short = Store::always().pinned().ttl(Duration::from_millis(100));
    (0..100).for_each(|n| assert!(session.store(n.to_string(), "v", short).unwrap().applied));
    wait_until("all are removed", TEST_TIMEOUT, || {
        client.admin().statistics().unwrap().keys_expired == 100
    });
    assert_eq!(session.scan().unwrap().count(), 0);
    server.assert_verifies();
}
