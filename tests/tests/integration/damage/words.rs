//! Proves that a server goes on whatever the words of its index say: of every state and class, with
//! addresses everywhere. It skips and counts such slots in each of its walks, and serves the other
//! keys. Guards against a word of a head whose address lay outside the region: the next walk ended
//! the server.
//!
//! Proves that no key loses a block because another key's head names it. A hostile writer replaces
//! the table of a head, under a right checksum. Then the key of that head is overwritten, deleted,
//! expires or is evicted, and the freed blocks are used again. Guards against sessions and servers
//! that freed whatever a head named.

use std::time::Duration;

use farside::Store;
use farside_layout::{
    BlockAddress, Extent, ExtentShape, ExtentTable, FreeBlock, SizeClass, WORD_GENERATIONS,
    block_bytes, seal_again, set_extent,
};
use farside_protocol::allocator::BlockSource;
use farside_tests::engine::{ChannelBlocks, attach};
use farside_tests::{TEST_TIMEOUT, wait_until};
use zerocopy::IntoBytes;

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

const VICTIM: &[u8] = b"victim";
/// As long as the other key, so that its head has as many extents.
const BAIT: &[u8] = b"bait-1";
const LONG_BYTES: usize = 5 << 20;
const EXTENTS: usize = 6;
const SHORTS: u64 = 20;

fn short(n: u64) -> Vec<u8> {
    format!("short-{n}").into_bytes()
}

fn short_value(n: u64) -> Vec<u8> {
    value(n, 5, 100_000)
}

/// A region with a long value and short ones, and the session that has stored them.
fn with_victims(arguments: &str) -> (Scene, Session) {
    let scene = Scene::new(&format!("--value-bytes-max 20971520 --grace-ms 100 {arguments}"));
    let mut session = scene.warm();
    // Pinned, so that no cache evicts them.
    let mut store =
        |key: &[u8], value| session.store(key, value, Store::always().pinned()).map(drop).unwrap();
    store(VICTIM, value(1, 1, LONG_BYTES));
    (0..SHORTS).for_each(|n| store(&short(n), short_value(n)));
    (scene, session)
}

/// The offset of the head of a key, its bytes as words, and the offset of the table in them.
fn head(scene: &Scene, key: &[u8]) -> (u64, Vec<u64>, usize) {
    let block = scene.geometry.block_of(scene.word(scene.slot_of(key))).unwrap();
    assert!(block.class.is_head(), "a long value has a head");
    let mut words = vec![0; block.class.block_bytes() as usize / 8];
    scene.region.read(block.offset(), &mut words).unwrap();
    (block.offset(), words, block_bytes(key.len(), 0) as usize)
}

fn extents(scene: &Scene, key: &[u8]) -> Vec<Extent> {
    let (_, words, start) = head(scene, key);
    let table_bytes = farside_layout::extent_table_bytes(EXTENTS);
    let table = &words.as_bytes()[start..start + table_bytes];
    ExtentTable::decode(key.len(), table, ExtentShape::OF_REGIONS).unwrap().extents.to_vec()
}

/// Makes the head of the bait name these blocks: those of other keys, twice the same, and others.
fn forge(scene: &Scene, variant: usize) {
    let (own, victims) = (extents(scene, BAIT), extents(scene, VICTIM));
    let named = |address, generation| Extent::new(FreeBlock { address, generation }, 1);
    let of_short = |n: usize| {
        let word = scene.word(scene.slot_of(&short(n as u64)));
        named(word.block().unwrap().address, 7)
    };
    let forged: Vec<Extent> = (0..EXTENTS)
        .map(|n| match variant {
            0 => victims[n],
            1 => of_short(n),
            2 => [victims[n], own[0], of_short(n)][n % 3],
            _ => named(BlockAddress(u32::MAX - 64 * n as u32), 1),
        })
        .collect();
    let (offset, mut words, start) = head(scene, BAIT);
    let table = &mut words.as_mut_bytes()[start..];
    for (n, extent) in forged.into_iter().enumerate() {
        set_extent(table, n, extent).unwrap();
    }
    let address = BlockAddress::from_offset(offset).unwrap();
    seal_again(words.as_mut_bytes(), address).unwrap();
    scene.region.write(offset, &words).unwrap();
}

/// Uses freed blocks again, then checks that the other keys have their values. A cache may have no
/// room for a while, and may evict what is stored here.
fn assert_unharmed(scene: &Scene, is_cache: bool, what: &dyn Display) {
    let mut session = scene.cold();
    // A session waits for GRACE before it uses blocks that it has freed, and the server as well.
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(120));
        let mut put = |key: String, value: &[u8]| {
            wait_until("there is room", TEST_TIMEOUT, || {
                let stored = session.put(&key, value);
                assert!(is_cache || stored.is_ok(), "{what}: {stored:?}");
                stored.is_ok()
            });
        };
        (0..3).for_each(|n| put(format!("new-{n}"), &value(n, round, LONG_BYTES)));
        (0..SHORTS).for_each(|n| put(format!("more-{n}"), &[9; 100_000]));
    }
    let found = session.get(VICTIM).unwrap().expect("the victim");
    assert!(found.data == value(1, 1, LONG_BYTES), "{what}: the victim's value");
    for n in 0..SHORTS {
        let found = session.get(short(n)).unwrap().expect("a short value");
        assert!(found.data == short_value(n), "{what}: short value {n}");
    }
    (0..3).for_each(|n| assert!(session.delete(format!("new-{n}")).unwrap() || is_cache));
}

#[on(shm, tcp_in_soak)]
fn sessions_free_no_blocks_that_a_forged_head_names() {
    let (scene, mut writer) = with_victims("--memory 128MiB --index 64KiB");
    for variant in 0..4 {
        for by in ["its writer", "another session", "a session that knows the head"] {
            writer.put(BAIT, value(2, 2, LONG_BYTES)).unwrap();
            forge(&scene, variant);
            let what = format!("variant {variant}, by {by}");
            let mut other = scene.warm();
            let session = if by == "its writer" { &mut writer } else { &mut other };
            if by == "a session that knows the head" {
                // It learns the table, and finds that the parts are damaged or another key's.
                let _ = timed(&what, || session.get(BAIT));
            }
            match variant % 2 {
                0 => session.put(BAIT, b"overwritten").unwrap(),
                _ => assert!(session.delete(BAIT).unwrap(), "{what}"),
            }
            // Uses what the session itself has freed.
            for round in 0..3 {
                std::thread::sleep(Duration::from_millis(110));
                session.put("again", value(3, round, LONG_BYTES)).unwrap();
            }
            assert_unharmed(&scene, false, &what);
        }
    }
    scene.server.cli(&["gc"]).succeeded();
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_server_frees_no_blocks_that_a_forged_head_of_an_expired_value_names() {
    let (scene, mut writer) = with_victims("--memory 128MiB --index 64KiB");
    writer.put_with_ttl(BAIT, value(2, 2, LONG_BYTES), Duration::from_millis(1)).unwrap();
    forge(&scene, 2);
    let observer = scene.server.client();
    wait_until("the bait expires", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().keys_expired > 0
    });
    assert_unharmed(&scene, false, &"expiry");
    scene.server.assert_verifies();
}

/// A session fills the cache with long values until the bait is evicted. The cache finds it by the
/// extent of its own that the head still names.
#[on(shm, tcp_in_soak)]
fn a_cache_frees_no_blocks_that_a_forged_head_of_an_evicted_value_names() {
    let (scene, mut writer) = with_victims("--memory 64MiB --index 64KiB --evict");
    writer.put(BAIT, value(2, 2, LONG_BYTES)).unwrap();
    forge(&scene, 2);
    let slot = scene.slot_of(BAIT);
    let (word, mut next) = (scene.word(slot), 0);
    wait_until("the bait is evicted", TEST_TIMEOUT, || {
        // A full cache may have no room for a while.
        let _ = writer.put(format!("filler-{next}"), value(next, 6, LONG_BYTES));
        next += 1;
        scene.word(slot) != word
    });
    assert!(scene.cold().get(BAIT).unwrap().is_none(), "the bait is there");
    assert_unharmed(&scene, true, &"eviction");
    scene.server.assert_verifies();
}
