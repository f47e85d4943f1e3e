//! What the server has seen of pinned values. It never evicts them, so a span that has one cannot
//! become empty, and a class that has nothing else can give no block.

use std::collections::HashSet;

use farside_fabric::Nanos;
use farside_layout::SizeClass;

/// Spans are noted again after this time, because their values may not be pinned any more.
const SPANS_AGE_NS: Nanos = 60_000_000_000;

/// The pinned values that were seen.
pub(super) struct Pins {
    /// The first chunks of spans that had a pinned value.
    spans: HashSet<u32>,
    spans_since: Nanos,
    /// How many pinned values of each class were met since a key of the class was evicted, or its
    /// hand began to search.
    met: [u64; SizeClass::COUNT],
    /// The classes whose hand found pinned values and nothing that could be evicted.
    is_full: [bool; SizeClass::COUNT],
}

impl Pins {
    pub(super) fn new() -> Self {
        Self { spans: HashSet::new(), spans_since: 0, met: [0; _], is_full: [false; _] }
    }

    /// Notes a pinned value in a span of this class.
    pub(super) fn note(&mut self, chunk: u32, class: SizeClass) {
        self.spans.insert(chunk);
        self.met[usize::from(class.index())] += 1;
    }

    /// Notes that a key of the class was evicted.
    pub(super) fn note_evicted(&mut self, class: SizeClass) {
        let class = usize::from(class.index());
        (self.met[class], self.is_full[class]) = (0, false);
    }

    /// Notes that no key of the class can be evicted now.
    pub(super) fn note_search_ended(&mut self, class: SizeClass) {
        let class = usize::from(class.index());
        self.is_full[class] = std::mem::take(&mut self.met[class]) > 0;
    }

    /// Whether pinned values are why no key of the class can be evicted.
    pub(super) fn fill(&self, class: SizeClass) -> bool {
        self.is_full[usize::from(class.index())]
    }

    /// Whether pinned values are why no key of any class can be evicted that was searched.
    pub(super) fn fill_any(&self) -> bool {
        self.is_full.contains(&true)
    }

    /// The number of pinned values that were met in the class.
    pub(super) fn met(&self, class: SizeClass) -> u64 {
        self.met[usize::from(class.index())]
    }

    /// Whether a pinned value was seen in the span.
    pub(super) fn are_in(&self, chunk: u32) -> bool {
        self.spans.contains(&chunk)
    }

    /// Forgets the spans if they were noted long ago.
    pub(super) fn forget_old_spans(&mut self, now: Nanos) {
        if now.saturating_sub(self.spans_since) >= SPANS_AGE_NS {
            self.spans.clear();
            self.spans_since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_full_of_pinned_values_once_a_search_met_nothing_else() {
        let [class, other] = [64, 128].map(|bytes| SizeClass::for_bytes(bytes).unwrap());
        let mut pins = Pins::new();
        pins.note_search_ended(class);
        assert!(!pins.fill(class) && !pins.fill_any());
        pins.note(7, class);
        assert!(!pins.fill(class) && pins.are_in(7) && !pins.are_in(8));
        pins.note_search_ended(other);
        assert!(!pins.fill_any());
        pins.note_search_ended(class);
        assert!(pins.fill(class) && !pins.fill(other) && pins.fill_any());
        pins.note_evicted(class);
        pins.note_search_ended(class);
        assert!(!pins.fill_any());
        pins.forget_old_spans(SPANS_AGE_NS);
        assert!(!pins.are_in(7));
    }
}
