//! Proves that values expire for every client at their millisecond. The server then frees their
//! memory with a few wakeups, and without such values it does not wake at all.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside::{Outcome, Session, Store, Ttl};
use farside_tests::{ServerProcess, TEST_TIMEOUT, scaled, wait_until};

const TTL: Duration = Duration::from_secs(2);
#[on(shm, tcp_in_soak)]
fn values_expire_for_every_client_and_their_memory_is_reused() {
    let keys = scaled(5000);
    let server = ServerProcess::start("--memory 32MiB --grace-ms 20");
    let client = server.client();
    let (mut session, mut other) = (client.session().unwrap(), server.session());
    for key in 0..keys {
        session.put_with_ttl(key.to_le_bytes(), b"ends", TTL).unwrap();
    }
    session.put(b"stays", b"stays").unwrap();
    assert!((0..keys).step_by(97).all(|n| other.get(n.to_le_bytes()).unwrap().is_some()));
    std::thread::sleep(TTL + Duration::from_secs(1));
    // With and without a cached location, whether or not the server has removed the key.
    assert!((0..keys).all(|n| session.get(n.to_le_bytes()).unwrap().is_none()));
    assert!((0..keys).all(|n| other.get(n.to_le_bytes()).unwrap().is_none()));
    assert_eq!(session.scan().unwrap().count(), 1);
    wait_until("all are removed", TEST_TIMEOUT, || {
        client.admin().statistics().unwrap().keys_expired == keys
    });
    server.assert_verifies();
    assert_eq!(*session.get(b"stays").unwrap().unwrap(), *b"stays");
    // The slots and blocks of expired values can be used again.
    for key in 0..keys {
        assert!(session.insert(key.to_le_bytes(), b"again").unwrap());
    }
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn no_ttl_is_longer_than_it_was_given() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    for number in 0..40_u64 {
        session.put_with_ttl("key", "value", TTL).unwrap();
        let Some(Ttl::For(left)) = session.ttl("key").unwrap() else { panic!("it has a TTL") };
        assert!(left <= TTL, "{left:?}, put {number}");
        let longer = 100 * TTL;
        assert!(session.touch("key", longer).unwrap());
        let Some(Ttl::For(left)) = session.ttl("key").unwrap() else { panic!("it has a TTL") };
        assert!(left <= longer, "{left:?}, touch {number}");
    }
}

#[on(shm, tcp_in_soak)]
fn conditional_stores_can_set_an_expiry() {
    let server = ServerProcess::start("--memory 32MiB");
    let session = &mut server.session();
    let lock = Store::if_absent().ttl(TTL);
    let stores = |session: &mut Session, value: &str, store| {
        session.store("lock", value, store).unwrap().applied
    };
    assert!(stores(session, "mine", lock));
    assert!(!stores(session, "theirs", lock));
    let version = session.get("lock").unwrap().unwrap().version;
    assert!(stores(session, "renewed", Store::if_version(version).ttl(TTL)));
    assert!(!stores(session, "late", Store::if_version(version).ttl(TTL)));
    assert!(stores(session, "again", Store::if_value(b"renewed").ttl(TTL)));
    let batch = session.batch().store("one", "1", Store::always().ttl(TTL));
    let outcomes = batch.store("lock", "no", Store::if_absent()).run().unwrap();
    assert!(matches!(
        outcomes[..],
        [Ok(Outcome { applied: true, .. }), Ok(Outcome { applied: false, .. })]
    ));
    // The UPDATE removes the expiry.
    assert!(session.update("one", "2").unwrap());
    std::thread::sleep(TTL + Duration::from_secs(1));
    assert!(!stores(session, "no", Store::if_present()));
    let exchanged = session.compare_exchange("lock", Some(b"again"), "no").unwrap();
    assert_eq!((exchanged.applied, exchanged.value), (false, None));
    assert!(!session.delete("lock").unwrap());
    assert!(stores(session, "theirs", lock));
    assert_eq!(session.get("one").unwrap().unwrap(), "2");
}

#[on(shm, tcp_in_soak)]
fn a_value_expires_at_a_millisecond_of_the_wall_clock() {
    let server = ServerProcess::start("--memory 32MiB");
    let session = &mut server.session();
    let end = SystemTime::now() + TTL;
    session.store(b"key", b"value", Store::always().until(end)).unwrap();
    let millisecond = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap().as_millis();
    let end = millisecond(end + Duration::from_nanos(999_999));
    loop {
        let before = millisecond(SystemTime::now());
        let is_there = session.get(b"key").unwrap().is_some();
        let after = millisecond(SystemTime::now());
        assert!(is_there || after >= end, "gone in {after}, ends in {end}");
        assert!(!is_there || before < end, "there in {before}, ended in {end}");
        if !is_there {
            break;
        }
    }
}

/// A server that starts on a region with expiring values finds them by itself.
#[on(shm, tcp_in_soak)]
fn an_expiry_survives_the_server_and_the_client() {
    let mut server = ServerProcess::start_with_file("--memory 32MiB --grace-ms 20");
    let mut session = server.session();
    for key in 0..100u64 {
        session.put_with_ttl(key.to_le_bytes(), b"ends", TTL).unwrap();
    }
    drop(session);
    server.kill();
    server.restart();
    let client = server.client();
    wait_until("all are removed", TEST_TIMEOUT, || {
        client.admin().statistics().unwrap().keys_expired == 100
    });
    server.assert_verifies();
    // No client stores expiring values any more, so the server sleeps once the slots are empty.
    std::thread::sleep(Duration::from_secs(2));
    let before = server.wakeups();
    std::thread::sleep(Duration::from_secs(3));
    // Over RDMA and TCP it asks the client for its clock, every 8 x GRACE, and gets an answer.
    let asking = if farside_tests::is_over_shm() { 0 } else { 2 * 3000 / (8 * 20) + 10 };
    assert!(server.wakeups() - before <= asking, "{} wakeups", server.wakeups() - before);
}

#[on(shm, tcp_in_soak)]
fn kv_cli_stores_values_with_an_expiry() {
    let server = ServerProcess::start("--memory 32MiB");
    let is_done = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        server.cli(&words).code == Some(0)
    };
    assert!(is_done("put key value --ttl 2s") && is_done("get key"));
    assert!(is_done("insert lock mine --ttl 1999.5ms") && !is_done("insert lock theirs --ttl 2s"));
    assert!(!is_done("put key value --ttl 2"), "a time without a unit");
    assert!(is_done("put long value --ttl 40000d"), "an expiry after the year 2106");
    // A value with an expiry beyond the format's limit is refused.
    let words = ["put", "late", "value", "--ttl", "4000000d"];
    let output = server.cli(&words);
    output.expect_line(2, &["would expire after the year 10889"]);
    assert!(!is_done("get late"));
    std::thread::sleep(TTL + Duration::from_secs(1));
    assert!(!is_done("get key") && is_done("insert lock theirs --ttl 2s"));
}
