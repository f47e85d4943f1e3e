//! Proves that a client may die before and after every verb of any operation. No stored value is
//! lost, other clients continue, and after a collection every block is free or linked. Guards
//! against leaks, and against a collector that takes blocks in use.
//!
//! The victims are processes: this test's binary, run again as `a_victim`. A fabric around its own
//! counts verbs, and kills the process with SIGKILL at one of them.

use std::process::Command;

use farside_layout::SLOTS_PER_ROW;
use rustix::process::Signal;

use farside::Client;
use farside_protocol::{Action, Expected, Lifetime};
use farside_tests::engine::{ENGINE_LANES, engine_over};
use farside_tests::faults::{Faults, Rates};
use farside_tests::{ServerProcess, blocks_with_clients, fill, self_describing};

const ADDRESS: &str = "FARSIDE_VICTIM_SERVER";
const OPERATION: &str = "FARSIDE_VICTIM_OPERATION";
const VERBS: &str = "FARSIDE_VICTIM_VERBS";
/// The exit code of a victim whose operation completed.
const SURVIVED: i32 = 7;
/// Limit on an operation's verbs: more than any takes without contention.
const VERBS_MAX: u64 = 40;

/// The operations that victims die in: a name, whether the key's location is cached, the action.
const OPERATIONS: [(&str, bool, Action<'static>); 15] = [
    (UNSEEN, false, Action::Insert(FOREVER)),
    ("GET", false, Action::Get),
    ("PUT", true, Action::Put(FOREVER)),
    ("PUT", false, Action::Put(FOREVER)),
    ("INSERT", false, Action::Insert(FOREVER)),
    ("UPDATE", false, Action::Update(FOREVER)),
    ("DELETE", true, Action::Delete),
    ("DELETE", false, Action::Delete),
    ("EXCHANGE", false, Action::Exchange(Expected::Value(OLD), FOREVER)),
    ("PUT of a new key", false, Action::Put(FOREVER)),
    (LONG_OVER_LONG, true, Action::Put(FOREVER)),
    (LONG_OVER_LONG, false, Action::Put(FOREVER)),
    ("PUT over a long value", false, Action::Put(FOREVER)),
    ("DELETE of a long value", true, Action::Delete),
    (LONG_EXCHANGE, false, Action::Exchange(Expected::Value(OLD), FOREVER)),
];
/// The old value and the new one have extents.
const LONG_OVER_LONG: &str = "PUT of a long value over a long value";
/// Only the new value has extents.
const LONG_EXCHANGE: &str = "EXCHANGE for a long value";
/// The length of a value with five extents.
const LONG_BYTES: usize = (4 << 20) + 9;
/// An INSERT without a READ first. Each victim claims a different slot, which was never used.
const UNSEEN: &str = "INSERT without a READ first";
const FOREVER: Lifetime = Lifetime::FOREVER;
const OLD: &[u8] = b"the old value";
const NEW: &[u8] = b"the new value";
const KEY: &[u8] = b"the key that the victim works on";
const NEW_KEY: &[u8] = b"a key that the victim may bring";

fn new_value_of(name: &str) -> Vec<u8> {
    let is_long = name == LONG_OVER_LONG || name == LONG_EXCHANGE;
    if is_long { self_describing::value(1, 2, 3, LONG_BYTES) } else { NEW.to_vec() }
}

fn old_value_of(name: &str) -> Vec<u8> {
    let is_long = name.contains("long") && name != LONG_EXCHANGE;
    if is_long { self_describing::value(1, 1, 3, LONG_BYTES) } else { OLD.to_vec() }
}

fn key_of(name: &str) -> &'static [u8] {
    if matches!(name, UNSEEN | "INSERT" | "PUT of a new key") { NEW_KEY } else { KEY }
}

/// Not a test by itself: a victim process runs this function.
#[test]
#[ignore = "run by `clients_may_die_at_every_verb`"]
fn a_victim() {
    let variable = |name| std::env::var(name).unwrap();
    let (name, cached, action) = OPERATIONS[variable(OPERATION).parse::<usize>().unwrap()];
    let verbs_left: u64 = variable(VERBS).parse().unwrap();
    let key = key_of(name);
    let faults = Faults::new(0, Rates::default());
    let engine =
        engine_over(&variable(ADDRESS), |fabric| faults.around(Box::new(fabric), ENGINE_LANES));
    // The victim holds blocks of each kind: free ones, and some that rest.
    for value in [&[0u8; 13][..], &[0; 500], &[0; 3000], OLD] {
        engine
            .handle()
            .perform(Action::Put(FOREVER), engine.hashed(b"the victim's own"), value)
            .unwrap();
    }
    engine.handle().perform(Action::Delete, engine.hashed(b"the victim's own"), &[]).unwrap();
    if cached {
        engine.handle().perform(Action::Get, engine.hashed(key), &[]).unwrap();
    }
    if name == UNSEEN {
        engine.handle().expect_unused_slot(key, verbs_left as usize % SLOTS_PER_ROW);
    }
    faults.die_after(verbs_left);
    engine.handle().perform(action, engine.hashed(key), &new_value_of(name)).unwrap();
    std::process::exit(SURVIVED);
}

/// Runs a victim; returns whether it was killed.
fn kill_one(address: &str, operation: usize, verbs: u64) -> bool {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "deaths::a_victim", "--ignored"])
        .env(ADDRESS, address)
        .env(OPERATION, operation.to_string())
        .env(VERBS, verbs.to_string())
        .output()
        .unwrap();
    let status = output.status;
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) if signal == Signal::KILL.as_raw() => true,
        (_, Some(SURVIVED)) => false,
        _ => panic!("a victim failed: {status}: {}", String::from_utf8_lossy(&output.stdout)),
    }
}

#[test]
fn clients_may_die_at_every_verb() {
    let server = ServerProcess::start("--memory 128MiB --grace-ms 5");
    let client = server.client();
    let mut deaths = 0;
    for (number, (name, ..)) in OPERATIONS.iter().enumerate() {
        for verbs in 0..VERBS_MAX {
            prepare(&client, name);
            let died = kill_one(&server.address(), number, verbs);
            deaths += u64::from(died);
            check(&client, name, &format!("{name}, killed after {verbs} verbs"));
            if !died {
                assert!(verbs > 0, "{name} takes no verb");
                break;
            }
            assert!(verbs + 1 < VERBS_MAX, "{name} has no end");
        }
    }
    assert!(deaths > 90, "{deaths} deaths");
    let lost = client.admin().statistics().unwrap().clients_lost;
    // The victims that survived exited without a goodbye, so they are lost, too.
    assert_eq!(lost, deaths + OPERATIONS.len() as u64);
}

/// Stores the keys that every victim starts with.
fn prepare(client: &Client, name: &str) {
    let mut session = client.session().unwrap();
    session.put(KEY, old_value_of(name)).unwrap();
    session.delete(NEW_KEY).unwrap();
    fill(&mut session, 0..50, u64::to_le_bytes);
}

/// Checks that no key and no block is lost.
fn check(client: &Client, name: &str, what: &str) {
    let statistics = client.admin().collect().unwrap();
    assert_eq!(statistics.collecting, 0, "{what}");
    let mut session = client.session().unwrap();
    for n in 0..50u64 {
        let value = session.get(n.to_le_bytes()).unwrap().unwrap();
        assert_eq!(value.data, n.to_le_bytes(), "{what}");
    }
    let (old, new) = (session.get(KEY).unwrap(), session.get(NEW_KEY).unwrap());
    if let Some(value) = old {
        let is_whole = value.data == old_value_of(name) || value.data == new_value_of(name);
        assert!(is_whole, "{what}: {value:?}");
    } else {
        assert!(what.starts_with("DELETE"), "{what}: the key is gone");
    }
    assert!(new.is_none_or(|value| value.data == NEW), "{what}");
    // Other clients can change the same keys.
    session.put(KEY, OLD).unwrap();
    session.put(NEW_KEY, NEW).unwrap();
    assert!(session.delete(NEW_KEY).unwrap(), "{what}");
    drop(session);
    let after = client.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(client), 0, "{what}");
    assert_eq!(
        after.blocks_collected, statistics.blocks_collected,
        "{what}: the first collection missed some"
    );
}
