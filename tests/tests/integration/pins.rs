//! Proves which values are pinned: what every kind of store says, what modifications keep, and what
//! survives `kv-cli`, a snapshot and a restore. `eviction.rs` proves that a server keeps them.

use std::collections::BTreeMap;
use std::time::Duration;

use farside::{Client, Session, Store, Ttl};
use farside_tests::ServerProcess;
use farside_tests::cluster::TestCluster;

use crate::verb_counts::{price, server, uncached};

const HOUR: Duration = Duration::from_secs(3600);

/// Returns whether each key is pinned.
fn pins(session: &mut Session) -> BTreeMap<String, bool> {
    let entries = session.scan().unwrap().map(Result::unwrap);
    entries.map(|entry| (String::from_utf8(entry.key).unwrap(), entry.is_pinned)).collect()
}

fn is_pinned(session: &mut Session, key: &str) -> bool {
    pins(session)[key]
}

#[test]
fn every_way_to_store_can_pin_at_the_same_price() {
    let server = server();
    let session = &mut server.session();
    let pinned = Store::always().pinned();
    session.put("key", "1").unwrap();
    let put = price(session, |session| session.put("key", "2").unwrap());
    let store = |session: &mut Session| assert!(session.store("key", "3", pinned).unwrap().applied);
    assert_eq!(price(session, store), put);
    session.clear_cache();
    let put = uncached(session, |session| session.put("key", "4").unwrap());
    assert_eq!(uncached(session, store), put);
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

#[test]
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

#[test]
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

#[test]
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
