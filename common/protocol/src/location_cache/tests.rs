use farside_layout::hash::KeyHasher;
use farside_layout::{BlockAddress, BlockRef, INCARNATION_MAX, NamedBlock, SizeClass, SlotWord};

use super::proof_time_base::{ProofTimeBase, UNIT_SHIFT_MIN, UNITS_PER_PROOF};
use super::*;

/// For a proof that is good for this time, a unit is the shortest one: 134 ms.
const PROOF_NS: Nanos = UNITS_PER_PROOF << UNIT_SHIFT_MIN;

fn cache(bytes: usize) -> LocationCache {
    LocationCache::new(bytes, PROOF_NS, 0)
}

impl LocationCache {
    fn sets(&self) -> usize {
        self.sets.load(Ordering::Relaxed)
    }

    fn get(&self, hash: KeyHash) -> Option<Location> {
        let ((_, entry), proved_at) = self.get_proved(hash)?;
        Some(entry.location(hash, proved_at).unwrap())
    }

    fn filled(&self) -> usize {
        self.filled.0.load(Ordering::Relaxed).try_into().unwrap()
    }
}

fn prove(cache: &LocationCache, hash: KeyHash, location: &Location, at: Nanos) {
    let location = PackedLocation::new(hash, location).unwrap();
    cache.prove(hash, location, at, &ReadReports::default());
}

fn units(n: u64) -> Nanos {
    n << UNIT_SHIFT_MIN
}

/// A location of `key`, a different one for each `n`.
fn location(key: u64, n: u64) -> Location {
    let class = SizeClass::from_index((n % SizeClass::COUNT as u64) as u8).unwrap();
    let address = BlockAddress(u32::MAX - n as u32);
    let block = NamedBlock { address, class, generation_low: n as u8 };
    let fingerprint = hash(key).fingerprint();
    Location {
        in_window: (n % 16) as u16 * 16,
        word: SlotWord::live_in(
            (n % (u64::from(INCARNATION_MAX) + 1)) as u8,
            fingerprint,
            block,
            n % 5 == 1,
        ),
        generation: (n as u32 & 0xff) | 0xabcd_ef00,
        has_stale_mark: n % 2 == 1,
        expires: n % 3 == 1,
        padding: (n % 4) as u8,
        proved_at: units(n % 256),
    }
}

fn hash(n: u64) -> KeyHash {
    KeyHasher::new(&[0; 16]).hash(&n.to_le_bytes())
}

#[test]
fn a_location_is_found_until_it_is_forgotten() {
    let cache = cache(1 << 20);
    for n in 0..1000 {
        cache.put(hash(n), location(n, n));
    }
    for n in 0..1000 {
        assert_eq!(cache.get(hash(n)), Some(location(n, n)));
    }
    cache.put(hash(7), location(7, 8));
    assert_eq!(cache.get(hash(7)), Some(location(7, 8)));
    prove(&cache, hash(7), &location(7, 8), units(99));
    prove(&cache, hash(7), &location(7, 9), units(100));
    prove(&cache, hash(7), &location(7, 8), units(98));
    assert_eq!(cache.get(hash(7)), Some(Location { proved_at: units(99), ..location(7, 8) }));
    // The same word 256 generations earlier, when it led to other content.
    let earlier = Location { generation: 0xabcd_ee08, ..location(7, 8) };
    cache.put(hash(7), earlier);
    prove(&cache, hash(7), &location(7, 8), units(200));
    assert_eq!(cache.get(hash(7)), Some(earlier));
    cache.forget_word(hash(7), location(7, 9).word);
    assert_eq!(cache.get(hash(7)), Some(earlier));
    cache.forget_word(hash(7), location(7, 8).word);
    assert_eq!(cache.get(hash(7)), None);
    cache.clear();
    assert_eq!(cache.get(hash(8)), None);
}

/// A store gives its location an older stamp, so the first read at the same time is reported, and
/// the second one is not.
#[test]
fn the_first_read_after_a_store_is_reported() {
    let (cache, reads, mut reported) = (cache(1 << 20), ReadReports::default(), Vec::new());
    assert_eq!([0, units(1) - 1].map(|at| cache.earlier_stamp(at)), [0, units(1) - 1]);
    reads.take(1, &mut reported);
    for (n, at) in [(1, units(1)), (2, units(7) + 5), (3, units(9) - 1)] {
        let proved_at = cache.earlier_stamp(at);
        assert!((1..=units(1)).contains(&(at - proved_at)));
        let stored = Location { proved_at, ..location(n, n) };
        cache.put(hash(n), stored);
        let packed = PackedLocation::new(hash(n), &stored).unwrap();
        for expected in [vec![stored.word.block().unwrap().address], Vec::new()] {
            let (entry, _) = cache.get_proved(hash(n)).unwrap();
            assert!(entry.1.is_at(packed));
            cache.prove(hash(n), entry.1, at, &reads);
            reads.take(9, &mut reported);
            assert_eq!(std::mem::take(&mut reported), expected);
        }
    }
}

/// A PUT replaces the entry that it found, whether or not other sessions have changed it since.
#[test]
fn an_entry_that_was_found_is_replaced() {
    let cache = cache(1 << 20);
    for n in 0..100 {
        cache.put(hash(n), location(n, n));
        let (found, _) = cache.get_proved(hash(n)).unwrap();
        match n % 3 {
            0 => cache.put(hash(n), location(n, n + 1)),
            1 => cache.forget(hash(n)),
            _ => {}
        }
        let (old, other, expires) = (location(n, n), location(n, n + 100), n % 5 == 0);
        let block = other.word.block().unwrap();
        let new = Location {
            word: old.word.live(block, expires),
            has_stale_mark: false,
            expires,
            in_window: old.in_window,
            ..other
        };
        let packed = found
            .1
            .replaced_by((BlockRef::unpacked(block), new.generation), (expires, new.padding));
        assert_eq!(packed.bits(), PackedLocation::new(hash(n), &new).unwrap().bits());
        cache.replace(hash(n), found, packed, new.proved_at);
        assert_eq!(cache.get(hash(n)), Some(new));
    }
}

#[test]
fn a_location_with_a_frozen_word_is_not_cached() {
    let cache = cache(1 << 20);
    cache.put(hash(1), location(1, 1));
    let frozen = location(1, 1).word.with_state(SlotState::Frozen);
    cache.put(hash(1), Location { word: frozen, ..location(1, 1) });
    assert_eq!(cache.get(hash(1)), None);
}

/// Stamps overflow, so the base moves. A proof keeps its time as long as it is young enough to be
/// used.
#[test]
fn proofs_keep_their_time_until_they_are_useless() {
    let cache = cache(1 << 20);
    for lap in 1..5 {
        let now = lap * (ProofTimeBase::STAMP_MAX + 1);
        for n in 0..100 {
            cache.put(hash(n), Location { proved_at: units(now - n), ..location(n, n) });
        }
        for n in 0..100 {
            let proved_at = cache.get(hash(n)).unwrap().proved_at;
            let is_good = n <= UNITS_PER_PROOF;
            assert!(proved_at == units(now - n) || !is_good && proved_at < units(now - n));
        }
    }
    let much_later = units(1 << 30);
    let known = cache.get(hash(5)).unwrap();
    prove(&cache, hash(5), &known, much_later);
    assert_eq!(cache.get(hash(5)).unwrap().proved_at, much_later);
    assert_eq!(cache.get(hash(6)).unwrap().proved_at, 0);
}

/// Hardly any two keys have the same tag, and every bit of the tag varies.
#[test]
fn keys_rarely_share_a_tag_and_every_bit_of_it_varies() {
    let tags = (0..100_000).map(|n| PackedLocation::tag(hash(n)));
    let distinct: std::collections::HashSet<u64> = tags.clone().collect();
    // With 2^33 possible tags, half a pair of equal tags is expected.
    assert!(distinct.len() >= 100_000 - 4, "{}", distinct.len());
    let (in_all, in_any) =
        tags.fold((u64::MAX, 0), |(in_all, in_any), tag| (in_all & tag, in_any | tag));
    assert_eq!((in_all, in_any), (0, (1 << 33) - 1));
}

#[test]
fn a_key_whose_preferred_line_is_full_uses_the_other_one() {
    let cache = cache(128);
    let same_line = |n: &u64| first_way(hash(*n)) == first_way(hash(0));
    let keys: Vec<u64> = (0..).filter(same_line).take(WAYS).collect();
    keys.iter().for_each(|n| cache.put(hash(*n), location(*n, *n)));
    for (at, n) in keys.iter().enumerate() {
        let set = cache.set(hash(*n)).unwrap();
        let way = ways(hash(*n)).position(|way| entry(&set[way]).is_of(hash(*n)));
        assert_eq!((way, cache.get(hash(*n))), (Some(at), Some(location(*n, *n))));
    }
    // The entry of a key in the other line can be replaced and forgotten.
    let last_key = keys[WAYS - 1];
    cache.put(hash(last_key), location(last_key, 100));
    assert_eq!(cache.get(hash(last_key)), Some(location(last_key, 100)));
    cache.forget(hash(last_key));
    assert_eq!(cache.get(hash(last_key)), None);
    assert!(keys[..WAYS - 1].iter().all(|n| cache.get(hash(*n)).is_some()));
}

/// The number of sets doubles as entries are added, and hardly any entry is lost when it does.
#[test]
fn sets_double_with_the_number_of_entries() {
    let sets_max = 4 * FIRST_SETS;
    let cache = cache(sets_max * SET_BYTES);
    let count = (sets_max * ENTRIES_PER_SET) as u64;
    for n in 0..count {
        cache.put(hash(n), location(n, n % 1000));
        let sets_wanted = cache.filled().div_ceil(ENTRIES_PER_SET).next_power_of_two();
        assert_eq!(cache.sets(), sets_wanted.max(FIRST_SETS));
        if cache.filled().is_power_of_two() {
            let found = (0..=n).filter(|n| cache.get(hash(*n)) == Some(location(*n, n % 1000)));
            assert_eq!(found.count(), cache.filled());
        }
    }
    assert!(cache.filled() as u64 * 1000 > count * 999, "{} of {count}", cache.filled());
    // A full cache stays within its memory.
    for n in count..4 * count {
        cache.put(hash(n), location(n, n % 1000));
    }
    assert_eq!(cache.sets(), sets_max);
    for n in 0..4 * count {
        cache.forget(hash(n));
    }
    assert_eq!(cache.filled(), 0);
    (0..100).for_each(|n| cache.put(hash(n), location(n, n)));
    cache.clear();
    assert!((0..100).all(|n| cache.get(hash(n)).is_none()));
    assert_eq!((cache.sets(), cache.filled()), (sets_max, 0));
}

#[test]
fn memory_is_bounded_and_zero_bytes_turn_the_cache_off() {
    for bytes in [128, 255, 256, 1000, 1 << 20] {
        let cache = cache(bytes);
        assert!((128..=bytes).contains(&(cache.cells().len() * size_of::<PackedLocation>())));
    }
    let off = cache(0);
    off.put(hash(1), location(1, 1));
    assert_eq!(off.get(hash(1)), None);
    let small = cache(128);
    for n in 1..=8 {
        small.put(hash(n), location(n, n));
    }
    // Key 1 is proved again, so key 2 has the oldest proof.
    prove(&small, hash(1), &location(1, 1), units(19));
    small.put(hash(9), location(9, 9));
    let found: Vec<u64> = (1..=9).filter(|n| small.get(hash(*n)).is_some()).collect();
    assert_eq!(found, [1, 3, 4, 5, 6, 7, 8, 9]);
}

/// Threads share a cache, while sets double and the base moves. A location that a thread gets is
/// exactly one that some thread put, never a mix, and was proved at its time or later.
#[test]
fn a_location_that_one_thread_gets_was_put_by_another_one() {
    const ROUNDS: u64 = 200_000;
    const KEYS: u64 = 3000;
    /// More times than a stamp can distinguish.
    const TIMES: u64 = 2 * ProofTimeBase::STAMP_MAX;
    let cache = cache(1 << 20);
    let work = |thread: u64| {
        let mut found = 0;
        for round in 0..ROUNDS {
            let random = hash(round << 8 | thread).identity();
            let (key, now) = (random % KEYS, round * TIMES / ROUNDS);
            match random >> 60 {
                0..8 => cache.put(hash(key), location(key, now)),
                8 => cache.forget(hash(key)),
                // Odd keys are never proved again, so they keep the time of their PUT.
                _ if key % 2 == 0 => {
                    let location = cache.get(hash(key));
                    location.inspect(|known| prove(&cache, hash(key), known, units(now)));
                }
                _ => {}
            }
            if let Some(found_location) = cache.get(hash(key)) {
                let stored = location(
                    key,
                    u64::from(u32::MAX - found_location.word.block().unwrap().address.0),
                );
                assert_eq!(
                    found_location,
                    Location { proved_at: found_location.proved_at, ..stored }
                );
                assert!(key % 2 == 0 || found_location.proved_at <= stored.proved_at);
                found += 1;
            }
        }
        assert!(found > ROUNDS / 2);
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|thread| drop(scope.spawn(move || work(thread))));
    });
    assert_eq!(cache.sets(), 2 * FIRST_SETS);
    cache.clear();
    assert_eq!(cache.filled(), 0);
}
