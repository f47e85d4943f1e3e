//! The effects of the verbs on words of a region, and their memory orders. Generic over the word,
//! so that loom runs the same code on its own words.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// An atomic word.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(
        &self,
        expected: u64,
        desired: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    fn fence(order: Ordering);
}

/// Implements [`Word`] for an atomic type and the fence that belongs to it.
macro_rules! impl_word {
    ($word:ty, $fence:path) => {
        impl Word for $word {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }

            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }

            #[inline]
            fn compare_exchange(
                &self,
                expected: u64,
                desired: u64,
                success: Ordering,
                failure: Ordering,
            ) -> Result<u64, u64> {
                self.compare_exchange(expected, desired, success, failure)
            }

            #[inline]
            fn fence(order: Ordering) {
                $fence(order);
            }
        }
    };
}

impl_word!(AtomicU64, fence);

/// READ: in no particular order, but before the next accesses of the session.
///
/// Relaxed loads and a fence, because acquire loads are not guaranteed to work on read-only pages.
#[inline]
pub(super) fn read<W: Word>(words: &[W], into: &mut [u64]) {
    // One cache line at a time, because a loop around each load takes longer than the load.
    let (lines, rest) = words.as_chunks::<8>();
    let (line_targets, rest_targets) = into.as_chunks_mut::<8>();
    for (line, target) in lines.iter().zip(line_targets) {
        for at in 0..line.len() {
            target[at] = line[at].load(Ordering::Relaxed);
        }
    }
    for (word, target) in rest.iter().zip(rest_targets) {
        *target = word.load(Ordering::Relaxed);
    }
    W::fence(Ordering::Acquire);
}

/// [`read`] to any bytes, which may end within the last word.
#[inline]
pub(super) fn read_bytes<W: Word>(words: &[W], into: &mut [u8]) {
    let (lines, _) = words.as_chunks::<8>();
    let (line_targets, rest_targets) = into.as_chunks_mut::<64>();
    for (line, target) in lines.iter().zip(&mut *line_targets) {
        let (target, _) = target.as_chunks_mut::<8>();
        for at in 0..line.len() {
            target[at] = line[at].load(Ordering::Relaxed).to_ne_bytes();
        }
    }
    // The last line may be whole, although its bytes are not all wanted.
    let rest = &words[line_targets.len() * 8..];
    for (word, target) in rest.iter().zip(rest_targets.chunks_mut(8)) {
        let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        target.copy_from_slice(&bytes[..target.len()]);
    }
    W::fence(Ordering::Acquire);
}

/// [`read`] of one word.
#[inline]
pub(super) fn load<W: Word>(word: &W) -> u64 {
    let value = word.load(Ordering::Relaxed);
    W::fence(Ordering::Acquire);
    value
}

/// WRITE: its words in no particular order, but after the earlier accesses of the session. A later
/// swap publishes it.
#[inline]
pub(super) fn write<W: Word>(words: &[W], from: &[u64]) {
    W::fence(Ordering::Release);
    // Several at a time, as in `read`. Most blocks are short.
    let (fours, rest) = words.as_chunks::<4>();
    let (four_sources, rest_sources) = from.as_chunks::<4>();
    for (four, source) in fours.iter().zip(four_sources) {
        for at in 0..four.len() {
            four[at].store(source[at], Ordering::Relaxed);
        }
    }
    for (word, source) in rest.iter().zip(rest_sources) {
        word.store(*source, Ordering::Relaxed);
    }
}

/// [`write`] of any bytes. They fill these words; zeros pad the last one.
#[inline]
pub(super) fn write_bytes<W: Word>(words: &[W], from: &[u8]) {
    W::fence(Ordering::Release);
    let (lines, _) = words.as_chunks::<8>();
    let (line_sources, rest_sources) = from.as_chunks::<64>();
    for (line, source) in lines.iter().zip(line_sources) {
        let (source, _) = source.as_chunks::<8>();
        for at in 0..line.len() {
            line[at].store(u64::from_ne_bytes(source[at]), Ordering::Relaxed);
        }
    }
    // The last line may be whole, although its last word is not.
    let rest = &words[line_sources.len() * 8..];
    for (word, source) in rest.iter().zip(rest_sources.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..source.len()].copy_from_slice(source);
        word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}

/// WRITE of four bytes. The other half of the word is unchanged, even if another thread writes it
/// meanwhile.
#[inline]
pub(super) fn write_half<W: Word>(word: &W, shift: u64, value: u32) {
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let merged = (old & !(0xffff_ffff << shift)) | (u64::from(value) << shift);
        match word.compare_exchange(old, merged, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return,
            // No livelock: another thread changed the word.
            Err(found) => old = found,
        }
    }
}

/// CAS: publishes all earlier writes; returns the word that it found.
#[inline]
pub(super) fn swap<W: Word>(word: &W, expected: u64, desired: u64) -> u64 {
    word.compare_exchange(expected, desired, Ordering::AcqRel, Ordering::Acquire)
        .unwrap_or_else(|found| found)
}

/// Orders a READ after a swap: the READ returns no word from before the swap. Without this, two
/// inserters could each miss the other (invariant I8).
#[inline]
pub(super) fn order_read_after_swap<W: Word>() {
    W::fence(Ordering::SeqCst);
}

/// loom explores every execution that the memory model allows. Each model has a mutant that must
/// fail.
#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64 as LoomWord;
    use loom::thread;

    use super::*;

    impl_word!(LoomWord, loom::sync::atomic::fence);

    fn words<const N: usize>(values: [u64; N]) -> Arc<[LoomWord; N]> {
        Arc::new(values.map(LoomWord::new))
    }

    fn one<W: Word>(word: &W) -> u64 {
        let mut value = [0];
        read(std::slice::from_ref(word), &mut value);
        value[0]
    }

    /// Runs a mutant: some execution must fail.
    fn assert_caught(model: fn()) {
        assert!(catch_unwind(|| loom::model(model)).is_err(), "the mutant was not caught");
    }

    /// Each INSERT claims a slot of its own, then reads the other one's slot.
    fn two_inserters(order: fn()) {
        let slots = words([0, 0]);
        let insert = move |own: usize, slots: Arc<[LoomWord; 2]>| {
            assert_eq!(swap(&slots[own], 0, 1), 0);
            order();
            one(&slots[1 - own])
        };
        let second_slots = slots.clone();
        let second = thread::spawn(move || insert(1, second_slots));
        let seen = insert(0, slots);
        assert!(seen == 1 || second.join().unwrap() == 1, "neither inserter saw the other");
    }

    #[test]
    fn one_of_two_inserters_sees_the_other() {
        loom::model(|| two_inserters(order_read_after_swap::<LoomWord>));
    }

    #[test]
    fn mutant_without_order_after_the_swap_is_caught() {
        assert_caught(|| two_inserters(|| ()));
    }

    /// PUT publishes a block of two words. A reader that sees the slot's word sees the block.
    fn put_and_get(publish: fn(&LoomWord)) {
        let memory = words([0, 0, 0]);
        let writer = memory.clone();
        let put = thread::spawn(move || {
            write(&writer[1..], &[7, 7]);
            publish(&writer[0]);
        });
        if one(&memory[0]) == 1 {
            let mut block = [0; 2];
            read(&memory[1..], &mut block);
            assert_eq!(block, [7, 7]);
        }
        put.join().unwrap();
    }

    #[test]
    fn a_linked_block_is_complete() {
        loom::model(|| put_and_get(|slot| assert_eq!(swap(slot, 0, 1), 0)));
    }

    #[test]
    fn mutant_with_a_relaxed_swap_is_caught() {
        assert_caught(|| {
            put_and_get(|slot| {
                let relaxed = Ordering::Relaxed;
                assert_eq!(Word::compare_exchange(slot, 0, 1, relaxed, relaxed), Ok(0));
            });
        });
    }

    /// If a reader sees that a PUT has swung the slot away from a block, it also sees the block's
    /// mark (I2).
    fn mark_and_swing(unlink: fn(&[LoomWord; 2])) {
        const GENERATION: u64 = 9 << 32;
        let memory = words([1, GENERATION]);
        let writer = memory.clone();
        let put = thread::spawn(move || unlink(&writer));
        if one(&memory[0]) == 2 {
            assert_eq!(one(&memory[1]), GENERATION | 1);
        }
        put.join().unwrap();
    }

    #[test]
    fn an_unlinked_block_is_marked() {
        loom::model(|| {
            mark_and_swing(|[slot, header]| {
                write_half(header, 0, 1);
                assert_eq!(swap(slot, 1, 2), 1);
            });
        });
    }

    #[test]
    fn mutant_that_marks_after_the_swing_is_caught() {
        assert_caught(|| {
            mark_and_swing(|[slot, header]| {
                assert_eq!(swap(slot, 1, 2), 1);
                write_half(header, 0, 1);
            });
        });
    }
}
