//! Target: the checker of regions, on a damaged region.

use std::cell::OnceCell;

use farside_cli::check::PROBLEMS_KEPT_MAX;
use farside_layout::{BLOCK_HEADER_BYTES, STATE_OFFSET, SUBTABLE_BYTES};

use crate::decoded;
use crate::sample::{DEPTH, KEYS, Sample};

/// Limit on the words that one input changes.
const CHANGES_MAX: usize = 64;

/// A sound region, and the offsets of the words that an input can change.
struct DamageableRegion {
    sample: Sample,
    offsets: Vec<u64>,
}

impl DamageableRegion {
    fn new() -> Self {
        let sample = Sample::small();
        let words = |start: u64, bytes: u64| (start..start + bytes).step_by(8);
        let directory = sample.geometry.directory_offset(DEPTH).unwrap();
        let chunks = sample.geometry.chunk_entry(0).unwrap();
        // A checksum covers the rest of the superblock, which has its own target.
        let mut offsets = vec![STATE_OFFSET];
        offsets.extend(words(directory, 4 * 8));
        offsets.extend(words(chunks, 5 * 8));
        for used in &sample.used {
            offsets.extend(words(used.slot, 16));
            offsets.extend(words(used.block, BLOCK_HEADER_BYTES + 8));
        }
        for subtable in sample.subtables {
            offsets.extend(words(subtable, SUBTABLE_BYTES));
        }
        Self { sample, offsets }
    }

    fn is_sound(&self) -> bool {
        self.sample.check().is_ok_and(|report| report.is_clean() && report.keys == KEYS)
    }
}

thread_local! {
    static REGION: OnceCell<DamageableRegion> = const { OnceCell::new() };
}

/// No damage, a plausible change of each kind of word, and many inverted words.
pub(crate) fn damages() -> Vec<Vec<u8>> {
    let change = |index: u16, xor: u64| [&index.to_le_bytes()[..], &xor.to_le_bytes()].concat();
    let many = (400..430).flat_map(|index| change(index, u64::MAX)).collect();
    vec![Vec::new(), change(0, 1 << 32), change(2, 1 << 8), change(7, 1), change(10, 7 << 61), many]
}

/// Changes words of the region. Each change takes 10 bytes: the index of the word, and the bits to
/// flip. Accepts every input: damage is only reported, and after it is undone the region is sound.
pub(crate) fn damaged(bytes: &[u8]) -> bool {
    REGION.with(|region| {
        let DamageableRegion { sample, offsets } = region.get_or_init(DamageableRegion::new);
        let mut before = Vec::new();
        for change in bytes.as_chunks::<10>().0.iter().take(CHANGES_MAX) {
            let &[low, high, ref xor @ ..] = change;
            let offset = offsets[usize::from(u16::from_le_bytes([low, high])) % offsets.len()];
            let word = sample.region.load(offset).unwrap();
            let xor = u64::from_le_bytes(*xor);
            sample.region.store(offset, word ^ xor).unwrap();
            before.push((offset, word));
        }
        if let Some(report) = decoded(sample.check()) {
            assert!(report.problems.len() <= PROBLEMS_KEPT_MAX);
            assert!(report.problem_count >= report.problems.len() as u64);
            for problem in &report.problems {
                assert!(!problem.to_string().contains(char::is_control), "{problem}");
            }
        }
        for (offset, word) in before.into_iter().rev() {
            sample.region.store(offset, word).unwrap();
        }
        assert!(region.get().is_some_and(DamageableRegion::is_sound));
        true
    })
}
