//! The checker on a damaged region.

use std::cell::OnceCell;

use farside_layout::{BLOCK_HEADER_BYTES, STATE_OFFSET, SUBTABLE_BYTES};
use farside_tools::check::PROBLEMS_KEPT_MAX;

use crate::sample::{DEPTH, KEYS, Sample};

/// The most words that are changed at a time.
const CHANGES_MAX: usize = 64;

/// A sound region, and the offsets of the words worth damaging.
struct Ground {
    sample: Sample,
    places: Vec<u64>,
}

impl Ground {
    fn new() -> Self {
        let sample = Sample::small();
        let words = |start: u64, bytes: u64| (start..start + bytes).step_by(8);
        let directory = sample.geometry.directory_offset(DEPTH).unwrap();
        let chunks = sample.geometry.chunk_entry(0).unwrap();
        // The rest of the superblock is behind a checksum, and has a target of its own.
        let mut places = vec![STATE_OFFSET];
        places.extend(words(directory, 4 * 8));
        places.extend(words(chunks, 5 * 8));
        for used in &sample.used {
            places.extend(words(used.slot, 16));
            places.extend(words(used.block, BLOCK_HEADER_BYTES + 8));
        }
        for subtable in sample.subtables {
            places.extend(words(subtable, SUBTABLE_BYTES));
        }
        Self { sample, places }
    }

    fn is_sound(&self) -> bool {
        self.sample.check().is_ok_and(|report| report.is_clean() && report.keys == KEYS)
    }
}

thread_local! {
    static GROUND: OnceCell<Ground> = const { OnceCell::new() };
}

/// No damage; a word of each kind as it could be; a whole subtable that says nothing.
pub(crate) fn damages() -> Vec<Vec<u8>> {
    let change = |place: u16, xor: u64| [&place.to_le_bytes()[..], &xor.to_le_bytes()].concat();
    let many = (400..430).flat_map(|place| change(place, u64::MAX)).collect();
    vec![Vec::new(), change(0, 1 << 32), change(2, 1 << 8), change(7, 1), change(10, 7 << 61), many]
}

/// Changes words of a region, each by 10 bytes: which of them, and which bits. Always accepted: no
/// damage may do more than be reported, and once it is undone the region is sound.
pub(crate) fn damaged(bytes: &[u8]) -> bool {
    GROUND.with(|ground| {
        let Ground { sample, places } = ground.get_or_init(Ground::new);
        let mut before = Vec::new();
        for change in bytes.as_chunks::<10>().0.iter().take(CHANGES_MAX) {
            let &[low, high, ref xor @ ..] = change;
            let place = usize::from(u16::from_le_bytes([low, high])) % places.len();
            let word = sample.region.load(places[place]).unwrap();
            let xor = u64::from_le_bytes(*xor);
            sample.region.store(places[place], word ^ xor).unwrap();
            before.push((places[place], word));
        }
        match sample.check() {
            Ok(report) => {
                assert!(report.problems.len() <= PROBLEMS_KEPT_MAX);
                assert!(report.problem_count >= report.problems.len() as u64);
                report.problems.iter().for_each(|problem| {
                    assert!(!problem.to_string().contains(char::is_control), "{problem}");
                });
            }
            Err(error) => crate::is_told_in_one_line(&error),
        }
        for (offset, word) in before.into_iter().rev() {
            sample.region.store(offset, word).unwrap();
        }
        assert!(ground.get().is_some_and(Ground::is_sound));
        true
    })
}
