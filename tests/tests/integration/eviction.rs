//! Proves that with --evict a PUT finds room however much was stored, also if the size of the
//! values changes, and that the evicted keys are those not written or read for a long time.
//! `memory.rs` proves that without it no key is evicted. Values expire for every client at their
//! millisecond. The server then frees their memory with a few wakeups, and without such values it
//! does not wake at all.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside::{Outcome, Role, Session, Store, Ttl};
use farside_layout::{BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, SizeClass};
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, device, fill, is_over_shm, scaled, self_describing, wait_until,
};

const BYTES: usize = 1000;

#[on(shm, tcp_in_soak)]
fn a_cache_takes_ten_times_what_fits_and_keeps_what_is_written_often() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let (hot, total) = (200u64, scaled(100_000).max(20_000));
    for n in 0..total {
        let key = 1_000_000 + n;
        session.put(key.to_le_bytes(), self_describing::value(key, 0, 0, BYTES)).unwrap();
        let often = n % hot;
        session.put(often.to_le_bytes(), self_describing::value(often, 0, n, BYTES)).unwrap();
    }
    let is_stored = |session: &mut farside::Session, key: u64| {
        session.get(key.to_le_bytes()).unwrap().is_some_and(|value| {
            assert!(self_describing::holds(key, &value), "key {key}");
            true
        })
    };
    // Each hot key was written within the last 400 PUTs, and over 10,000 values fit.
    let kept = (0..hot).filter(|key| is_stored(&mut session, *key)).count() as u64;
    assert!(kept > hot * 8 / 10, "{kept} of {hot} that were written often");
    let early = (0..1000).filter(|n| is_stored(&mut session, 1_000_000 + n)).count();
    let late = (total - 1000..total).filter(|n| is_stored(&mut session, 1_000_000 + n)).count();
    assert!(early < 100 && late > 800, "{early} of the oldest, {late} of the newest");
    let statistics = client.admin().statistics().unwrap();
    assert!(statistics.keys_evicted > total / 2, "{statistics:?}");
    server.assert_verifies();
}

/// Writes three times what a full cache holds, while `reading`, or the same session, reads each of
/// some keys again and again. Checks that most of these keys stay, and that most keys that were
/// written together with them and never read are gone.
fn check_that_what_is_read_stays(mut writing: Session, mut reading: Option<Session>) {
    const READ: u64 = 400;
    const ROUND: u64 = 200;
    const FIRST_ROUNDS: u64 = 30;
    let put = |session: &mut Session, key: u64| {
        session.put(key.to_le_bytes(), self_describing::value(key, 0, 0, BYTES)).unwrap();
    };
    let read = |session: &mut Session, key: u64| {
        let value = session.get(key.to_le_bytes()).unwrap();
        value.is_some_and(|value| self_describing::holds(key, &value))
    };
    // The first keys of a cache may be evicted before clients have reported anything: those that
    // fill it fast lead to many evictions at once.
    (0..20_000).for_each(|n| put(&mut writing, 2_000_000 + n));
    // Of these keys, those with an even number are read.
    (0..2 * READ).for_each(|key| put(&mut writing, key));
    for round in 0..150 {
        (0..ROUND).for_each(|n| put(&mut writing, 1_000_000 + round * ROUND + n));
        let session = reading.as_mut().unwrap_or(&mut writing);
        let absent: Vec<u64> = (0..READ).filter(|n| !read(session, 2 * n)).collect();
        // A key may be evicted before its first reads are reported. It is then stored again.
        if round < FIRST_ROUNDS {
            absent.into_iter().for_each(|n| put(&mut writing, 2 * n));
        }
        // With this GRACE a client reports a key seven times a second. The hand must not come by
        // more often than that.
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut kept = |parity| (0..READ).filter(|n| read(&mut writing, 2 * n + parity)).count() as u64;
    let (with_reads, without) = (kept(0), kept(1));
    assert!(with_reads > READ * 9 / 10, "{with_reads} of {READ} that were read");
    assert!(without < READ / 10, "{without} of {READ} that were not read");
}

#[on(shm, tcp_in_soak)]
fn a_key_that_is_read_stays() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    check_that_what_is_read_stays(server.session(), None);
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_key_that_only_a_reader_reads_stays() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    check_that_what_is_read_stays(server.session(), Some(reader.session().unwrap()));
}

#[on(shm, tcp_in_soak)]
fn clients_report_how_many_reads_found_their_keys_while_the_server_evicts() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 10 --evict");
    let client = server.client();
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let (mut session, mut reading) = (client.session().unwrap(), reader.session().unwrap());
    let reads = || {
        let statistics = client.admin().statistics().unwrap();
        (statistics.reads_found, statistics.reads_absent)
    };
    fill(&mut session, 0..100, |_| [1; 100]);
    for n in 0..150u64 {
        assert_eq!(session.get(n.to_le_bytes()).unwrap().is_some(), n < 100);
        assert_eq!(reading.get(n.to_le_bytes()).unwrap().is_some(), n < 100);
        reading.get(n.to_le_bytes()).unwrap();
    }
    assert_eq!(reads(), (0, 0), "the server asks only if it may have to evict");
    let mut next = 1000u64;
    wait_until("all clients have reported", TEST_TIMEOUT, || {
        fill(&mut session, next..next + 1000, |_| [1; 1000]);
        next += 1000;
        reads() == (300, 150)
    });
    // Those of a session that has ended, too.
    drop(session);
    let mut session = client.session().unwrap();
    let mut ended = reader.session().unwrap();
    (0..7u64).for_each(|n| drop(ended.get((1 << 40 | n).to_le_bytes()).unwrap()));
    drop(ended);
    wait_until("the reads of an ended session are reported", TEST_TIMEOUT, || {
        fill(&mut session, next..next + 1000, |_| [1; 1000]);
        next += 1000;
        reads() == (300, 157)
    });
    let shown = server.cli(&["stat"]).succeeded();
    assert!(shown.text().contains("% of 457 found their key"), "{}", shown.text());
}

/// With small values the index must keep growing, so evicted blocks must free memory for it.
#[on(shm, tcp_in_soak)]
fn a_cache_of_small_values_never_runs_out_of_index() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let total = scaled(600_000).max(100_000);
    fill(&mut session, 0..total, u64::to_le_bytes);
    let last = (total - 1000..total).filter(|n| session.get(n.to_le_bytes()).unwrap().is_some());
    assert!(last.count() > 800);
    let statistics = client.admin().statistics().unwrap();
    assert!(statistics.splits > 100 && statistics.chunks_index > 1, "{statistics:?}");
    server.assert_verifies();
}

/// Half a minute, at 288 x GRACE, passes before a chunk serves another size. So the first values of
/// a new size use a reserve, and get the memory of others later.
#[on(shm, tcp_in_soak)]
fn memory_follows_the_sizes_that_are_stored() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let (mut next, mut stored) = (0u64, Vec::new());
    let mut put = |session: &mut Session, bytes: usize| {
        session.put(next.to_le_bytes(), self_describing::value(next, 0, 0, bytes)).unwrap();
        next += 1;
        next - 1
    };
    // Over RDMA, where each PUT takes long, larger values fill the region.
    let small = if device().is_some() { 1000 } else { 64 };
    while client.admin().statistics().unwrap().keys_evicted == 0 {
        for _ in 0..1000 {
            put(&mut session, small);
        }
    }
    // No PUT is refused, and in the end most of the memory has values of the new size.
    let chunks_of_blocks = |bytes: u64| {
        let statistics = client.admin().statistics().unwrap();
        let classes = statistics.classes.iter().filter(|class| class.class.block_bytes() >= bytes);
        let used = classes.map(|class| class.blocks * class.class.block_bytes()).sum::<u64>() >> 21;
        (used, statistics.chunks - statistics.chunks_index)
    };
    wait_until("most memory has the new size", TEST_TIMEOUT, || {
        stored.extend((0..100).map(|_| put(&mut session, 4000)));
        let (used, all) = chunks_of_blocks(4000);
        used > all / 2
    });
    // The latest ones are stored, more of them than fit into the reserve.
    let latest = &stored[stored.len().saturating_sub(1000)..];
    let found = latest.iter().filter(|key| {
        let value = session.get(key.to_le_bytes()).unwrap();
        value.is_some_and(|value| self_describing::holds(**key, &value))
    });
    assert!(found.count() > latest.len() * 7 / 10);
    // Both sizes at once.
    let both: Vec<_> = (0..20_000).map(|n| put(&mut session, [small, 4000][n % 2])).collect();
    let latest = both[both.len() - 100..].iter();
    let found = latest.filter(|key| session.get(key.to_le_bytes()).unwrap().is_some());
    assert!(found.count() > 70);
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_full_cache_has_free_blocks_ahead_of_demand_and_then_sleeps() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 10 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let total = scaled(200_000).max(40_000);
    fill(&mut session, 0..total, |_| [1; 1000]);
    let statistics = client.admin().statistics().unwrap();
    let class = statistics.classes.iter().find(|class| class.class.block_bytes() == 1280).unwrap();
    assert!(statistics.keys_evicted > 0 && class.blocks_free > 0, "{statistics:?}");
    // Nothing is evicted without requests.
    let evicted = || client.admin().statistics().unwrap().keys_evicted;
    let mut before = evicted();
    wait_until("the server evicts no more", TEST_TIMEOUT, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = evicted();
        std::mem::replace(&mut before, now) == now
    });
    if is_over_shm() {
        wait_until("the server sleeps for half a second", TEST_TIMEOUT, || {
            let woken = server.wakeups();
            std::thread::sleep(Duration::from_millis(500));
            server.wakeups() == woken
        });
    }
    server.assert_verifies();
}

/// A chunk becomes empty only once clients return its free blocks, which idle sessions have.
#[on(shm, tcp_in_soak)]
fn an_idle_session_keeps_no_memory_from_other_sizes() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5 --evict");
    let client = server.client();
    let mut idle: Vec<_> = (0..4).map(|_| client.session().unwrap()).collect();
    let mut next = 0u64;
    let mut put = |session: &mut Session, bytes: usize| {
        session.put(next.to_le_bytes(), vec![1; bytes]).unwrap();
        next += 1;
    };
    let evicted = || client.admin().statistics().unwrap().keys_evicted;
    while evicted() == 0 {
        idle.iter_mut().for_each(|session| (0..250).for_each(|_| put(session, 1000)));
    }
    let mut busy = client.session().unwrap();
    wait_until("most memory has the new size", TEST_TIMEOUT, || {
        (0..100).for_each(|_| put(&mut busy, 10_000));
        let statistics = client.admin().statistics().unwrap();
        let old = statistics.classes.iter().find(|class| class.class.block_bytes() == 1280);
        old.is_none_or(|old| old.blocks * 1280 < 8 << 20)
    });
    server.assert_verifies();
}

/// There are more block sizes than chunks, and a chunk takes 288 x GRACE to change its size.
#[on(shm, tcp_in_soak)]
fn a_cache_stores_values_of_more_sizes_than_it_has_chunks() {
    let server = ServerProcess::start("--memory 32MiB --index 64KiB --grace-ms 20 --evict");
    // The largest first, so that each has a larger one that has a chunk.
    let sizes = || sizes_up_to(512 << 10).into_iter().rev();
    assert!(sizes().len() as u64 > 2 * chunks(&server));
    store_all_sizes(&server, sizes, 30);
}

#[on(shm, tcp_in_soak)]
fn a_cache_has_room_for_the_largest_sizes_that_come_last() {
    let server = ServerProcess::start("--memory 64MiB --index 64KiB --grace-ms 20 --evict");
    let sizes = || sizes_up_to(BLOCK_BYTES_MAX).into_iter();
    assert!(sizes().len() as u64 > chunks(&server));
    store_all_sizes(&server, sizes, 6);
}

fn chunks(server: &ServerProcess) -> u64 {
    server.client().admin().statistics().unwrap().chunks
}

fn sizes_up_to(bytes_max: u64) -> Vec<u64> {
    SizeClass::of_values().map(SizeClass::block_bytes).filter(|bytes| *bytes <= bytes_max).collect()
}

/// Stores values in blocks of all of these sizes, so many times.
fn store_all_sizes<S: Iterator<Item = u64>>(
    server: &ServerProcess,
    sizes: impl Fn() -> S,
    rounds: u64,
) {
    const KEY_BYTES: usize = 16;
    let mut session = server.session();
    for round in 0..rounds {
        for bytes in sizes() {
            let key = (u128::from(round) << 64 | u128::from(bytes)).to_le_bytes();
            let value_bytes = bytes as usize - BLOCK_HEADER_BYTES as usize - KEY_BYTES;
            let value = vec![round as u8; value_bytes];
            let stored = session.put(key, &value);
            assert!(stored.is_ok(), "round {round}, blocks of {bytes} bytes: {stored:?}");
            // It may have gone already.
            let found = session.get(key).unwrap();
            let is_right = found.is_none_or(|found| found.data == value);
            assert!(is_right, "round {round}, blocks of {bytes} bytes");
        }
    }
    server.assert_verifies();
}

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
