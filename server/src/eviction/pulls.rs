//! Decides when the server asks its clients what they have read. It asks while it evicts, and once
//! before, when the memory is nearly full: from then on clients note what they read.

use farside_fabric::Nanos;
use farside_layout::SizeClass;

use crate::depot::Depot;

/// The server asks when so large a share of a class was evicted: 1/64. Blocks that were read since
/// the last question look unread meanwhile.
const SHARE_DIVISOR: u64 = 64;
/// The server asks after this time in any case, if it evicted anything since.
const PAUSE_NS_MAX: Nanos = 100_000_000;
/// It asks for the first time when so small a share of the chunks is left: an eighth.
const FIRST_SHARE_DIVISOR: u64 = 8;
/// It asks no sooner than this.
const PAUSE_NS_MIN: Nanos = 10_000_000;
/// The pause is longer if answers take long: so long for each client and for each block that was
/// reported. Then they take about an eighth of the thread's time.
const PAUSE_NS_PER_CLIENT: Nanos = 100_000;
const PAUSE_NS_PER_BLOCK: Nanos = 200;

/// The questions to clients about their reads.
pub(crate) struct ReadPulls {
    /// How many keys of each class were evicted since the last question.
    evicted: [u64; SizeClass::COUNT],
    /// Whether any key was evicted since the last question.
    has_evicted: bool,
    /// Whether [`SHARE_DIVISOR`] demands a question.
    is_urgent: bool,
    asked_at: Option<Nanos>,
    /// How many clients were asked the last time.
    asked: u64,
    /// How many blocks were reported since then.
    reported: u64,
}

impl ReadPulls {
    pub(super) fn new() -> Self {
        Self {
            evicted: [0; _],
            has_evicted: false,
            is_urgent: false,
            asked_at: None,
            asked: 0,
            reported: 0,
        }
    }

    /// Notes that `count` keys of a class were evicted, which has so many blocks.
    pub(super) fn note_evicted(&mut self, class: SizeClass, count: usize, blocks: u64) {
        let evicted = &mut self.evicted[usize::from(class.index())];
        *evicted += count as u64;
        self.has_evicted |= count > 0;
        self.is_urgent |= *evicted * SHARE_DIVISOR >= blocks;
    }

    /// Notes that a client reported so many blocks.
    pub(crate) fn note_reported(&mut self, blocks: usize) {
        self.reported += blocks as u64;
    }

    /// Whether to ask all clients for the first time, because the memory is nearly full.
    pub(crate) fn is_first_due(&self, depot: &Depot) -> bool {
        let chunks = u64::from(depot.chunks());
        self.asked_at.is_none() && depot.chunks_coming() * FIRST_SHARE_DIVISOR <= chunks
    }

    /// Whether to ask all clients now.
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        let Some(asked_at) = self.asked_at else { return self.has_evicted };
        let pause = if self.is_urgent { PAUSE_NS_MIN } else { PAUSE_NS_MAX };
        let cost = self.asked * PAUSE_NS_PER_CLIENT + self.reported * PAUSE_NS_PER_BLOCK;
        self.has_evicted && now.saturating_sub(asked_at) >= pause.max(cost)
    }

    /// Notes that so many clients are asked now.
    pub(crate) fn note_asked(&mut self, clients: usize, now: Nanos) {
        let (asked_at, asked) = (Some(now), clients as u64);
        *self = Self { asked_at, asked, ..Self::new() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    fn class() -> SizeClass {
        SizeClass::for_bytes(64).unwrap()
    }

    #[test]
    fn questions_come_with_evictions_and_stop_with_them() {
        let mut pulls = ReadPulls::new();
        assert!(!pulls.is_due(500 * MS));
        pulls.note_evicted(class(), 0, 6400);
        assert!(!pulls.is_due(500 * MS));
        pulls.note_evicted(class(), 1, 6400);
        assert!(pulls.is_due(0));
        pulls.note_asked(1, 500 * MS);
        assert!(!pulls.is_due(9000 * MS));
        pulls.note_evicted(class(), 1, 6400);
        assert!(!pulls.is_due(599 * MS) && pulls.is_due(600 * MS));
        pulls.note_evicted(class(), 99, 6400);
        assert!(!pulls.is_due(509 * MS) && pulls.is_due(510 * MS));
        pulls.note_asked(1, 510 * MS);
        assert!(!pulls.is_due(9000 * MS));
    }

    #[test]
    fn costly_answers_make_questions_rare() {
        let mut pulls = ReadPulls::new();
        pulls.note_asked(1000, 0);
        pulls.note_evicted(class(), 100, 100);
        assert!(!pulls.is_due(99 * MS) && pulls.is_due(100 * MS));
        (0..50).for_each(|_| pulls.note_reported(16_000));
        assert!(!pulls.is_due(259 * MS) && pulls.is_due(260 * MS));
    }
}
