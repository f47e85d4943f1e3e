//! Random bytes over whole parts of a region while sessions are connected.

use std::collections::HashMap;

use farside_layout::{SUBTABLE_BYTES, SizeClass};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

const KEYS: u64 = 200;
/// The bits of a word that describe its block.
const TARGET_MASK: u64 = (1 << TARGET_BITS) - 1;

fn key(n: u64) -> Vec<u8> {
    format!("flooded-{n}").into_bytes()
}

fn length(n: u64) -> usize {
    [0, 20, 100, 1000, 5000][n as usize % 5]
}

/// Returns a region filled with all keys, whose index starts with this much memory.
fn filled(index: &str) -> Scene {
    let scene = Scene::new(&format!("--memory 16MiB --index {index} --grace-ms 5"));
    let mut session = scene.cold();
    (0..KEYS).for_each(|n| session.put(key(n), value(n, 0, length(n))).unwrap());
    scene
}

impl Scene {
    /// Returns the offsets of all subtables.
    fn subtables(&self) -> Vec<u64> {
        let first = self.geometry.directory_offset(self.depth).unwrap();
        let entry = |n: u64| DirectoryEntry::from_bits(self.region.load(first + n * 8).unwrap());
        (0..1 << self.depth).map(|n| entry(n).subtable(&self.geometry).unwrap()).collect()
    }

    fn fill(&self, offset: u64, bytes: u64, mut word: impl FnMut() -> u64) {
        for offset in (offset..offset + bytes).step_by(8) {
            self.region.store(offset, word()).unwrap();
        }
    }

    /// Returns the low bits of a word: a random class, generation, and address in the heap.
    fn random_target(&self, random: &mut SmallRng) -> u64 {
        let blocks = self.geometry.chunk_offset(0).unwrap() / 64..self.region.bytes() / 64;
        let class = random.random_range(0..SizeClass::COUNT as u64);
        let generation = random.random_range(0..256u64);
        generation << 38 | class << 32 | random.random_range(blocks)
    }

    fn all_slots(&self) -> Vec<u64> {
        self.subtables().into_iter().flat_map(|start| self.subtable_slots(start)).collect()
    }

    /// Fills slots with well-formed words in any state. Enough are EMPTY that most windows have
    /// one: an INSERT retries a window without one for 20 ms, in case a PENDING of others ends.
    fn scramble_slots(&self, random: &mut SmallRng) {
        let others = [1, 2, 4, 5, 6, 7];
        for slot in self.all_slots() {
            let state = match random.random_range(0..14) {
                0..4 => SlotState::Empty as u64,
                4..8 => SlotState::Live as u64,
                n => others[n - 8],
            };
            let middle = random.random_range(0..1u64 << 15) << 46;
            let word = state << 61 | middle | self.random_target(random);
            self.region.store(slot, word).unwrap();
            self.region.store(slot + HINT_OFFSET, random.random()).unwrap();
        }
    }

    /// Replaces only the targets of all words, by random ones.
    fn scramble_pointers(&self, random: &mut SmallRng) {
        for slot in self.all_slots() {
            let word = self.word(slot).bits() & !TARGET_MASK | self.random_target(random);
            self.region.store(slot, word).unwrap();
        }
    }

    /// Lets the word of each key point to the block of a random key.
    fn scramble_keys(&self, random: &mut SmallRng) {
        let live: Vec<u64> =
            (0..KEYS).map(|n| self.word(self.slot_of(&key(n)))).map(SlotWord::bits).collect();
        for slot in (0..KEYS).map(|n| self.slot_of(&key(n))).collect::<Vec<_>>() {
            let other = live[random.random_range(0..live.len())];
            let word = self.word(slot).bits() & !TARGET_MASK | other & TARGET_MASK;
            self.region.store(slot, word).unwrap();
        }
    }
}

/// Runs every operation on every key. Each value found must have been stored under that key.
fn run_every_operation(scene: &Scene, sessions: &mut [Session], round: u64) {
    let mut stored: HashMap<u64, Vec<Vec<u8>>> = HashMap::new();
    for n in 0..KEYS {
        let key = key(n);
        let values = stored.entry(n).or_default();
        values.extend([0, 1, 2].map(|count| value(n, count, length(n))));
        let allowed: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
        for session in &mut *sessions {
            let what = format!("round {round}, {}", String::from_utf8_lossy(&key));
            let _ = get(session, &key, &allowed, &what);
            let _ = timed(&what, || session.put(&key, allowed[1]));
            let _ = get(session, &key, &allowed, &what);
            let _ = timed(&what, || session.compare_exchange(&key, Some(allowed[1]), allowed[2]));
            let _ = get(session, &key, &allowed, &what);
            let _ = timed(&what, || session.delete(&key));
            let _ = timed(&what, || session.insert(&key, allowed[0]));
            let _ = get(session, &key, &allowed, &what);
        }
    }
    for session in &mut *sessions {
        timed(&format!("round {round}, scan"), || {
            // A scan may return any intact block in the region, but only under its own key.
            for entry in session.scan().unwrap().flatten() {
                let n = (0..KEYS).find(|n| key(*n) == entry.key).unwrap();
                assert!(stored[&n].contains(&entry.value.data), "a key with a wrong value");
            }
            for entry in session.scan_keys("").unwrap().flatten() {
                assert!((0..KEYS).any(|n| key(n) == entry.key), "{:?}", entry.key);
            }
            let _ = session.count_keys();
        });
        let pairs: Vec<_> = (0..KEYS).map(|n| (key(n), value(n, 0, length(n)))).collect();
        let mut batch = session.batch();
        for (key, value) in &pairs {
            batch = batch.get(key).delete(key).insert(key, value).put(key, value);
        }
        let _ = timed(&format!("round {round}, batch"), || batch.run());
        session.clear_cache();
    }
    assert!(!scene.server.log().contains("panicked"), "{}", scene.server.log());
}

/// A function that damages the region.
type Flood = fn(&Scene, &mut SmallRng);

/// Runs every operation, and then another server, on a region that `flood` has damaged.
fn check_survival(seeds: u64, flood: Flood) {
    for seed in 0..seeds {
        let mut scene = filled("16KiB");
        let mut sessions = [scene.warm(), scene.cold()];
        for n in 0..KEYS {
            assert!(sessions[0].get(key(n)).unwrap().unwrap().data == value(n, 0, length(n)));
        }
        flood(&scene, &mut SmallRng::seed_from_u64(seed));
        run_every_operation(&scene, &mut sessions, seed);
        scene.server.terminate();
        super::bits::start_briefly(&scene.server.region_file());
    }
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_a_heap_of_random_bytes() {
    check_survival(3, |scene, random| {
        for chunk in 0..scene.geometry.chunks() {
            let start = scene.geometry.chunk_offset(chunk).unwrap();
            let subtables = scene.subtables();
            for part in (start..start + (2 << 20)).step_by(SUBTABLE_BYTES as usize) {
                if !subtables.contains(&part) {
                    scene.fill(part, SUBTABLE_BYTES, || random.random());
                }
            }
        }
    });
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_an_index_of_random_bytes() {
    check_survival(3, |scene, random| {
        for subtable in scene.subtables() {
            scene.fill(subtable, SUBTABLE_BYTES, || random.random());
        }
    });
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_heap_and_index_of_random_bytes() {
    check_survival(3, |scene, random| {
        let heap = scene.geometry.chunk_offset(0).unwrap();
        scene.fill(heap, scene.region.bytes() - heap, || random.random());
    });
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_slots_of_random_but_possible_words() {
    check_survival(1, Scene::scramble_slots);
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_slots_that_point_anywhere() {
    check_survival(3, Scene::scramble_pointers);
}

#[on(shm, tcp_in_soak)]
fn sessions_survive_words_that_point_to_other_keys_blocks() {
    check_survival(3, Scene::scramble_keys);
}

#[on(shm, tcp_in_soak)]
fn new_sessions_find_every_key_or_an_error_in_a_random_directory() {
    let scene = filled("64KiB");
    let client = scene.server.client();
    let offset = scene.geometry.directory_offset(scene.depth).unwrap();
    let entries: Vec<u64> =
        (0..1 << scene.depth).map(|n| scene.region.load(offset + n * 8).unwrap()).collect();
    let mut random = SmallRng::seed_from_u64(1);
    let mut old = scene.cold();
    for round in 0..20 {
        for n in 0..entries.len() as u64 {
            let other = entries[random.random_range(0..entries.len())];
            let word = if round % 2 == 0 { other } else { random.random() };
            scene.region.store(offset + n * 8, word).unwrap();
        }
        // A key none of whose entries leads to its subtable is an error; all others are found.
        if let Ok(mut session) = timed(&"connecting", || client.session()) {
            for n in 0..KEYS {
                let what = format!("round {round}, key {n}");
                let allowed = value(n, 0, length(n));
                let seen = get(&mut session, &key(n), &[&allowed], &what);
                assert!(!matches!(seen, Ok(false)), "{what}: not there, says a wrong subtable");
                let _ = timed(&what, || session.put(key(n), &allowed));
            }
        }
        for n in 0..KEYS {
            assert!(old.get(key(n)).unwrap().unwrap().data == value(n, 0, length(n)));
        }
    }
    for (n, entry) in entries.iter().enumerate() {
        scene.region.store(offset + n as u64 * 8, *entry).unwrap();
    }
    scene.server.assert_verifies();
}
