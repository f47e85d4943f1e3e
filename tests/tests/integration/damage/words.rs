//! Proves that a server goes on whatever the words of its index say: of every state and class, with
//! addresses everywhere. It skips and counts such slots in each of its walks, and serves the other
//! keys. Guards against a word of a head whose address lay outside the region: the next walk ended
//! the server.

use farside_layout::{SizeClass, WORD_GENERATIONS};
use farside_protocol::allocator::BlockSource;
use farside_tests::engine::{ChannelBlocks, attach};
use farside_tests::{TEST_TIMEOUT, wait_until};

use super::*;

/// Keys whose words are not damaged.
const OTHERS: u64 = 300;
const STATES: u64 = 8;
const CLASSES: u64 = SizeClass::COUNT as u64;
/// Where the fields begin in a word.
const CLASS_SHIFT: u32 = u32::BITS;
const STATE_SHIFT: u32 = u64::BITS - 3;
const CONDITIONAL: u64 = 1 << (STATE_SHIFT - 1);
const _: () = assert!(TARGET_BITS == CLASS_SHIFT + 6 + WORD_GENERATIONS.ilog2());

fn key(n: u64) -> Vec<u8> {
    format!("key-{n}").into_bytes()
}

/// Words of all states and classes, and many addresses, some of them conditional.
fn damaged_words(scene: &Scene) -> Vec<u64> {
    let end = (scene.region.bytes() / 64) as u32;
    let heap = scene.geometry.chunk_offset(0).unwrap() / 64;
    let addresses = [0, 1, heap as u32 - 1, heap as u32 + 1, end - 1, end, u32::MAX];
    let targets = (0..STATES * CLASSES).flat_map(|n| addresses.map(|address| (n, address)));
    targets
        .map(|(n, address)| {
            let conditional = CONDITIONAL * (u64::from(address) % 2);
            (n / CLASSES) << STATE_SHIFT
                | conditional
                | (n % CLASSES) << CLASS_SHIFT
                | u64::from(address)
        })
        .collect()
}

/// Stores the words in the slots of keys of their own, each with the key's fingerprint, incarnation
/// and generation.
fn damage(scene: &Scene, session: &mut Session) {
    let words = damaged_words(scene);
    let victim = |n: usize| key(OTHERS + n as u64);
    (0..words.len()).for_each(|n| session.put(victim(n), b"a value").unwrap());
    let class_bits = (CLASSES - 1) << CLASS_SHIFT | u64::from(u32::MAX);
    let replaced = (STATES - 1) << STATE_SHIFT | CONDITIONAL | class_bits;
    let slots: Vec<u64> = (0..words.len()).map(|n| scene.slot_of(&victim(n))).collect();
    for (slot, word) in slots.into_iter().zip(words) {
        let before = scene.region.load(slot).unwrap();
        scene.region.store(slot, before & !replaced | word).unwrap();
    }
}

/// Whether clients find the key. A MOVED word hides the keys of its windows from them, as they look
/// again for a split. So do FROZEN and COPY words, for keys of their fingerprint.
fn is_seen(scene: &Scene, key: &[u8]) -> bool {
    let own = scene.hash(key).fingerprint();
    !scene.slots(scene.window(key)).any(|slot| match scene.word(slot).state() {
        SlotState::Moved => true,
        SlotState::Frozen | SlotState::Copy => scene.word(slot).fingerprint() == own,
        _ => false,
    })
}

/// Lets a client die, and waits until the server has collected what it left.
fn lose_a_client(scene: &Scene) {
    let observer = scene.server.client();
    let before = observer.admin().statistics().unwrap();
    let mut lost = ChannelBlocks::over(attach(&scene.server.address()).channel);
    lost.request(SizeClass::for_bytes(64).unwrap(), 10);
    wait_until("the client has blocks", TEST_TIMEOUT, || lost.receive().is_some());
    drop(lost);
    wait_until("the lost client's blocks are collected", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().collections > before.collections
    });
}

#[on(shm, tcp_in_soak)]
fn a_server_goes_on_whatever_the_words_of_its_index_say() {
    let mut scene = Scene::new("--memory 32MiB --index 1MiB --grace-ms 20");
    let mut session = scene.cold();
    (0..OTHERS).for_each(|n| session.put(key(n), value(n, 0, 20)).unwrap());
    damage(&scene, &mut session);
    for round in 1..=2 {
        let mut session = scene.cold();
        lose_a_client(&scene);
        let statistics = scene.server.client().admin().collect().unwrap();
        assert!(statistics.slots_skipped > 1000, "round {round}: {statistics:?}");
        let seen: Vec<u64> = (0..OTHERS).filter(|n| is_seen(&scene, &key(*n))).collect();
        assert!(seen.len() as u64 > OTHERS / 2, "{} keys", seen.len());
        for n in seen {
            let expected = value(n, round - 1, 20);
            let found = session.get(key(n)).unwrap().expect("an undamaged key");
            assert_eq!(found.data, expected, "round {round}, key {n}");
            session.put(key(n), value(n, round, 20)).unwrap();
        }
        drop(session);
        scene.server.kill();
        scene.server.restart();
    }
    assert!(scene.server.log().contains("FS-019 skipped the damaged slot"));
}

/// The hand of a cache, and the chunks that it drains, come by the damaged slots as well.
#[on(shm, tcp_in_soak)]
fn a_cache_evicts_keys_whatever_the_words_of_its_index_say() {
    let scene = Scene::new("--memory 16MiB --index 1MiB --grace-ms 20 --evict");
    let mut session = scene.cold();
    damage(&scene, &mut session);
    let observer = scene.server.client();
    let evicted = || observer.admin().statistics().unwrap().keys_evicted;
    let mut stored = 0;
    wait_until("the cache evicts many keys", TEST_TIMEOUT, || {
        for _ in 0..500 {
            stored += 1;
            let new = [&b"new-"[..], &key(stored)].concat();
            // No room for a new key: the index cannot grow over its damaged slots.
            let _ = session.put(new, value(stored, 0, (stored % 4 * 700) as usize));
        }
        evicted() > 2000
    });
    lose_a_client(&scene);
    let last = (0..).map(key).find(|key| is_seen(&scene, key)).unwrap();
    session.put(&last, "value").unwrap();
    assert_eq!(session.get(&last).unwrap().unwrap().data, b"value");
}
