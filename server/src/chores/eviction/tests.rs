//! Checks which keys are evicted, that a damaged slot costs no other key, and that a span that
//! drains becomes empty.

use std::time::Duration;

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_fabric::boot_time_ns;
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    BlockStamp, FreeBlock, HINT_OFFSET, Mark, SlotState, SlotWord, WINDOW_SLOTS, seal, slot_offset,
};

use super::*;
use crate::region::recovery;
use crate::region::served::ServedRegion;

/// A time that is longer than these tests run.
const HOUR: Nanos = 3_600_000_000_000;

/// A region whose keys have 8 bytes, and its evictor.
struct Cache {
    opened: ServedRegion,
    own: OwnEndpoint,
    reaper: Reaper,
    evictor: Evictor,
    class: SizeClass,
    /// Whether the next values are pinned, and when they expire.
    pins: bool,
    expires_at_ms: u64,
    _memory: RegionMemory,
}

impl Cache {
    fn new(block_bytes: u64) -> Self {
        let memory = RegionMemory::anonymous(16 << 20, HugePages::Never).unwrap();
        // So many subtables that no window becomes full.
        let config = ServerConfig { index: Some(ByteSize::mib(2)), ..Default::default() };
        let mut opened = recovery::open(&memory, &config).unwrap();
        opened.depot.keep_reserve(SizeClass::LARGEST_OF_VALUES);
        let own = OwnEndpoint::over_memory(&opened.region);
        let reader = || BlockReader::new(&opened.region, &opened.format);
        let (reaper, evictor) = (
            Reaper::new(reader(), (HOUR, HOUR), true),
            Evictor::new(reader(), (opened.format.grace_ns(), HOUR)),
        );
        let class = SizeClass::for_bytes(block_bytes).unwrap();
        Self { opened, own, reaper, evictor, class, pins: false, expires_at_ms: 0, _memory: memory }
    }

    fn hash(&self, key: u64) -> KeyHash {
        KeyHasher::new(&self.opened.format.hash_key).hash(&key.to_le_bytes())
    }

    fn slots(&self, key: u64) -> impl Iterator<Item = u64> {
        let (hash, index) = (self.hash(key), &self.opened.index);
        let (subtable, _) = index.subtable_at(hash.directory_index(index.depth)).unwrap();
        let window = subtable.offset() + hash.window_offset();
        (0..WINDOW_SLOTS).map(move |number| window + slot_offset(number))
    }

    fn word(&self, slot: u64) -> SlotWord {
        SlotWord::from_bits(self.opened.region.load(slot).unwrap())
    }

    /// Stores a key as clients do. Returns its block.
    fn store(&mut self, key: u64, written_at_ms: u64) -> NamedBlock {
        let free = self.opened.take_blocks(self.class, 1, boot_time_ns()).unwrap()[0];
        self.store_in(free, key, written_at_ms)
    }

    fn store_in(&self, free: FreeBlock, key: u64, written_at_ms: u64) -> NamedBlock {
        let class = self.class;
        let FreeBlock { address, generation } = free;
        let mut image = vec![0u64; (class.block_bytes() / 8) as usize];
        image[BLOCK_HEADER_BYTES as usize / 8] = key;
        let (writer, expires_at_ms, is_pinned) = (1, self.expires_at_ms, self.pins);
        let stamp =
            BlockStamp { address, generation, writer, written_at_ms, expires_at_ms, is_pinned };
        let value_bytes = class.block_bytes() - BLOCK_HEADER_BYTES - 8;
        seal(image.as_mut_bytes(), 8, value_bytes as u32, stamp).unwrap();
        self.opened.region.write(address.claimed_offset(), &image).unwrap();
        let block = NamedBlock { address, class, generation_low: generation as u8 };
        self.link(key, block);
        block
    }

    /// Lets a free slot of the key lead to this block.
    fn link(&self, key: u64, block: NamedBlock) {
        let hash = self.hash(key);
        let slot =
            self.slots(key).find(|slot| self.word(*slot).state() == SlotState::Empty).unwrap();
        let word = SlotWord::live_in(2, hash.fingerprint(), block, false);
        self.opened.region.store(slot + HINT_OFFSET, hash.hint(2)).unwrap();
        self.opened.region.store(slot, word.bits()).unwrap();
    }

    fn is_stored(&self, key: u64, block: NamedBlock) -> bool {
        self.opened.index.find_linked(self.hash(key), block).unwrap().is_some()
    }

    fn with<T>(&mut self, run: impl FnOnce(&mut Evictor, &mut Tools<'_>) -> T) -> T {
        let ServedRegion { index, depot, .. } = &mut self.opened;
        let (own, reaper) = (&self.own, &mut self.reaper);
        run(&mut self.evictor, &mut Tools { index, own, reaper, depot })
    }
}

/// A time in the far future.
const NEVER: Nanos = HOUR * 24 * 365;

impl Cache {
    /// Fills the class with keys. Returns their blocks, each at the index of its key.
    fn fill(&mut self) -> Vec<NamedBlock> {
        let mut blocks = Vec::new();
        while self.opened.depot.blocks_to_give(self.class).0 > 0 {
            blocks.push(self.store(blocks.len() as u64, 1 + blocks.len() as u64));
        }
        blocks
    }

    /// Notes a request for so many blocks.
    fn request(&mut self, count: u32) {
        let class = self.class;
        let now = boot_time_ns();
        self.with(|evictor, tools| evictor.note_request(class, (count, 0), tools.depot, now));
    }

    /// Evicts so many keys, if there are so many. Returns how many were evicted.
    fn evict(&mut self, count: usize, until: Nanos) -> usize {
        let class = self.class;
        self.with(|evictor, tools| evictor.evict_first(class, count, tools, until).unwrap())
    }

    /// Returns the keys that are stored, of those with these blocks.
    fn stored(&self, blocks: &[NamedBlock]) -> Vec<u64> {
        let keys = (0..).zip(blocks).filter(|(key, block)| self.is_stored(*key, **block));
        keys.map(|(key, _)| key).collect()
    }
}

#[test]
fn a_request_that_finds_nothing_evicts_keys_and_their_blocks_rest() {
    let mut cache = Cache::new(4096);
    let class = cache.class;
    let blocks = cache.fill();
    let none = cache.with(|evictor, tools| evictor.make_room(class, tools, NEVER).unwrap());
    assert_eq!(none, 0, "there was no request");
    cache.request(100);
    assert_eq!((cache.evictor.next_step_at(), &cache.evictor.low[..]), (Some(0), &[class][..]));
    let evicted = cache.with(|evictor, tools| evictor.make_room(class, tools, NEVER).unwrap());
    assert!((50..=BATCH).contains(&evicted), "{evicted}");
    assert_eq!(cache.opened.depot.blocks_to_give(class).1, evicted as u64);
    let stored = cache.stored(&blocks);
    let gone: Vec<u64> =
        (0..blocks.len() as u64).filter(|key| stored.binary_search(key).is_err()).collect();
    assert_eq!(gone.len(), evicted);
    let is_tomb =
        |key: &u64| cache.slots(*key).any(|slot| cache.word(slot).state() == SlotState::Tomb);
    assert!(gone.iter().all(is_tomb));
}

#[test]
fn keys_that_were_read_are_spared_as_often_as_they_were_read() {
    let mut cache = Cache::new(4096);
    let blocks = cache.fill();
    // Key n was read n % 3 times.
    let reads = |key: u64| key % 3;
    for (key, block) in (0..).zip(&blocks) {
        (0..reads(key)).for_each(|_| cache.opened.depot.note_read(block.address));
    }
    for round in 0..3 {
        let count = (0..blocks.len() as u64).filter(|key| reads(*key) == round).count();
        assert_eq!(cache.evict(count, NEVER), count);
        let left = cache.stored(&blocks);
        assert!(left.iter().all(|key| reads(*key) > round), "round {round}");
    }
    assert_eq!(cache.evictor.evicted, blocks.len() as u64);
}

/// A client with an old location marks a block that is linked to another key by now.
#[test]
fn a_marked_block_to_which_a_slot_leads_is_evicted_in_a_later_round() {
    let mut cache = Cache::new(4096);
    let blocks = cache.fill();
    let marked = blocks.iter().skip(1).step_by(2);
    for offset in marked.clone().map(|block| block.address.claimed_offset()) {
        let word = cache.opened.region.load(offset).unwrap();
        cache.opened.region.store(offset, word | u64::from(Mark::SUPERSEDED.bits())).unwrap();
    }
    let others = blocks.len() - marked.len();
    assert_eq!(cache.evict(others, NEVER), others);
    assert!(cache.stored(&blocks).iter().all(|key| key % 2 == 1));
    assert_eq!(cache.evict(blocks.len(), NEVER), blocks.len() - others);
}

#[test]
fn if_all_keys_were_read_the_search_goes_on_and_without_keys_it_ends() {
    let mut cache = Cache::new(4096);
    let class = cache.class;
    let blocks = cache.fill();
    for block in &blocks {
        (0..5).for_each(|_| cache.opened.depot.note_read(block.address));
    }
    cache.request(10);
    // A search whose time is over goes on in the next step.
    let steps = (0..).take_while(|_| cache.evict(1, 0) == 0).count();
    assert!(steps > 1 && cache.evictor.is_searching(class, cache.own.now()), "{steps}");
    assert_eq!(cache.evict(blocks.len(), NEVER), blocks.len() - 1);
    // Clients or the depot have all blocks.
    assert!(!cache.evictor.rests(class, cache.own.now()));
    assert_eq!(cache.evict(1, NEVER), 0);
    assert!(!cache.evictor.is_searching(class, cache.own.now()));
}

#[test]
fn a_slot_that_leads_to_the_block_of_another_key_is_left_alone() {
    let mut cache = Cache::new(4096);
    let block = cache.store(1, 5);
    cache.link(2, block);
    let class = cache.class;
    let evict = |cache: &mut Cache| {
        let mut unlinked = Vec::new();
        let address = std::iter::once(block.address);
        cache.with(|evictor, tools| {
            let counted = (&mut unlinked, &mut 0);
            evictor.unlink_each(address, class, tools, Nanos::MAX, counted).unwrap();
        });
        unlinked.pop().map(|removed| removed.block)
    };
    let free = evict(&mut cache).unwrap();
    assert_eq!(
        (free.address, free.generation as u8),
        (block.address, block.generation_low.wrapping_add(1))
    );
    assert!(!cache.is_stored(1, block) && evict(&mut cache).is_none());
    let words: Vec<_> = cache.slots(2).map(|slot| cache.word(slot)).collect();
    assert!(words.iter().any(|word| word.state() == SlotState::Live));
}

#[test]
fn a_span_that_drains_becomes_empty_once_clients_return_its_blocks() {
    let mut cache = Cache::new(4096);
    let class = cache.class;
    let blocks: Vec<_> = (0..500).map(|key| (key, cache.store(key, 1 + key))).collect();
    let held = cache.opened.take_blocks(class, 1, boot_time_ns()).unwrap();
    let chunk = cache.opened.geometry.chunk_of(blocks[0].1.address.claimed_offset()).unwrap();
    let recall = cache.with(|evictor, tools| {
        evictor.begin(chunk, class, tools, 0);
        while evictor.drain(tools, 1, Nanos::MAX).unwrap() {}
        evictor.recall.take()
    });
    assert_eq!(recall, Some(class));
    assert!(!blocks.iter().any(|(key, block)| cache.is_stored(*key, *block)));
    assert!(cache.opened.depot.is_draining(chunk), "a client holds a block");
    cache.opened.depot.give(class, held, true, boot_time_ns()).unwrap();
    assert!(!cache.opened.depot.is_draining(chunk));
    assert_eq!(cache.opened.depot.chunks_draining(), 1);
    assert_eq!(cache.evictor.evicted, 500);
}

#[test]
fn values_above_2_mib_get_two_neighbouring_chunks_of_a_cache_full_of_small_ones() {
    let mut cache = Cache::new(4096);
    let (small, large) = (cache.class, SizeClass::for_bytes(3 << 20).unwrap());
    for key in 0.. {
        if cache.opened.depot.blocks_to_give(small).0 == 0 {
            break;
        }
        cache.store(key, 1 + key);
    }
    assert_eq!(cache.opened.take_blocks(large, 1, boot_time_ns()).unwrap(), []);
    let rested_at = cache.with(|evictor, tools| {
        let now = boot_time_ns();
        evictor.note_request(large, (1, 0), tools.depot, now);
        evictor.plan(tools, now).unwrap();
        assert!(tools.depot.has_pair_coming());
        while evictor.drain(tools, now, Nanos::MAX).unwrap() {}
        boot_time_ns() + tools.depot.chunk_rest() + evictor.grace
    });
    assert_eq!(cache.opened.take_blocks(large, 1, rested_at).unwrap().len(), 1);
}

#[test]
fn pinned_values_stay_and_a_class_with_nothing_else_is_full() {
    let mut cache = Cache::new(4096);
    let (class, other) = (cache.class, SizeClass::for_bytes(64).unwrap());
    let mut blocks = Vec::new();
    while cache.opened.depot.blocks_to_give(class).0 > 0 {
        let key = blocks.len() as u64;
        cache.pins = key.is_multiple_of(3);
        blocks.push(cache.store(key, 1 + key));
    }
    let pinned: Vec<u64> = (0..blocks.len() as u64).step_by(3).collect();
    let is_full = |cache: &Cache, class| cache.evictor.is_full_of_pins(class, &cache.opened.depot);
    assert_eq!(cache.evict(blocks.len(), NEVER), blocks.len() - pinned.len());
    assert_eq!(cache.stored(&blocks), pinned);
    assert_eq!(cache.evict(1, NEVER), 0);
    assert!(is_full(&cache, class) && is_full(&cache, other));
    let address = blocks[0].address;
    let mut unlinked = Vec::new();
    cache.with(|evictor, tools| {
        let addresses = std::iter::once(address);
        evictor.unlink_each(addresses, class, tools, NEVER, (&mut unlinked, &mut 0)).unwrap()
    });
    assert!(unlinked.is_empty() && cache.is_stored(0, blocks[0]));
    let evictions = cache.evictor.evictions(class);
    assert_eq!(evictions.keys, (blocks.len() - pinned.len()) as u64);
    assert!(evictions.age_ms().abs_diff(cache.own.wall_ms()) < 60_000, "they were written in 1970");
    // One that can be evicted ends this.
    cache.pins = false;
    let free = cache.opened.take_blocks(class, 1, boot_time_ns() + HOUR).unwrap();
    cache.opened.depot.give(class, free, true, boot_time_ns()).unwrap();
    cache.store(1, 1);
    assert_eq!(cache.evict(1, NEVER), 1);
    assert!(!is_full(&cache, class));
}

#[test]
fn spans_with_pinned_values_do_not_drain_if_others_can() {
    let mut cache = Cache::new(4096);
    let class = cache.class;
    let held = cache.opened.take_blocks(class, 1, boot_time_ns()).unwrap()[0];
    let chunk_of = |cache: &Cache, address: BlockAddress| {
        cache.opened.geometry.chunk_of(address.claimed_offset()).unwrap()
    };
    // Each span but that of the held block has one pinned value.
    let unpinned = chunk_of(&cache, held.address);
    let (mut blocks, mut chunks) = (Vec::new(), Vec::new());
    while cache.opened.depot.blocks_to_give(class).0 > 0 {
        let key = blocks.len() as u64;
        let free = cache.opened.take_blocks(class, 1, boot_time_ns()).unwrap()[0];
        let chunk = chunk_of(&cache, free.address);
        cache.pins = chunk != unpinned && !chunks.contains(&chunk);
        chunks.extend(cache.pins.then_some(chunk));
        blocks.push(cache.store_in(free, key, 1 + key));
    }
    assert!(chunks.len() > 1);
    let drain = |cache: &mut Cache, now| {
        cache.with(|evictor, tools| {
            while evictor.drain(tools, now, Nanos::MAX).unwrap() {}
            evictor.evicted
        })
    };
    for chunk in &chunks {
        cache.with(|evictor, tools| evictor.begin(*chunk, class, tools, 0));
        assert_eq!(drain(&mut cache, 1), 0);
        assert!(!cache.opened.depot.is_draining(*chunk));
    }
    for _ in 0..100 {
        let chosen = cache.with(|evictor, tools| evictor.span_to_drain(class, tools).unwrap());
        assert!(chosen.is_none_or(|chunk| chunk == unpinned));
    }
    // A client stores a pinned value while the span drains. Its other blocks rest first.
    cache.with(|evictor, tools| evictor.begin(unpinned, class, tools, 0));
    let evicted = drain(&mut cache, 1);
    assert_eq!(evicted, class.blocks_per_span() - 1);
    assert!(cache.opened.depot.is_draining(unpinned));
    cache.pins = true;
    let late = cache.store_in(held, u64::MAX, 1);
    drain(&mut cache, boot_time_ns());
    std::thread::sleep(Duration::from_nanos(2 * cache.evictor.grace));
    drain(&mut cache, boot_time_ns());
    assert!(!cache.opened.depot.is_draining(unpinned) && cache.is_stored(u64::MAX, late));
    assert_eq!(cache.evictor.evicted, evicted);
}

#[test]
fn values_that_have_expired_go_before_others() {
    let mut cache = Cache::new(4096);
    let mut blocks = Vec::new();
    while cache.opened.depot.blocks_to_give(cache.class).0 > 0 {
        let key = blocks.len() as u64;
        // One in four has expired in 1970. The others never expire, or not today.
        cache.expires_at_ms = [1, 0, cache.own.wall_ms() + HOUR / 1_000_000, 0][(key % 4) as usize];
        blocks.push(cache.store(key, 1 + key));
    }
    let expired = blocks.len().div_ceil(4);
    while cache.evictor.evicted < expired as u64 {
        assert!(cache.evict(16, NEVER) > 0);
    }
    let stored = cache.stored(&blocks);
    let others = (0..blocks.len() as u64).filter(|key| key % 4 != 0);
    assert!(stored.into_iter().eq(others));
}
