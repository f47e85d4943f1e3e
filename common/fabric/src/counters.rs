use super::Verb;

/// What a session has asked of its fabric since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Chains. Each takes its lane one round trip.
    pub round_trips: u64,
    /// Doorbells. Chains for one region that are rung together share one.
    pub doorbells: u64,
    /// READ verbs.
    pub reads: u64,
    /// WRITE verbs, inline ones included.
    pub writes: u64,
    /// Compare-and-swap verbs.
    pub compare_swaps: u64,
    /// Payload of READs, in bytes.
    pub read_bytes: u64,
    /// Payload of WRITEs and compare-and-swaps, in bytes.
    pub written_bytes: u64,
}

impl Counters {
    /// The sum of the lanes' counts, with the doorbells of all.
    pub(crate) fn sum<'l>(doorbells: u64, lanes: impl Iterator<Item = &'l Self>) -> Self {
        let mut all = Self { doorbells, ..Self::default() };
        lanes.for_each(|lane| all += *lane);
        all
    }

    /// Counts a chain as it is posted; returns its payload, in bytes.
    #[inline]
    pub fn count(&mut self, chain: &[Verb]) -> u64 {
        let before = self.bytes();
        self.round_trips += 1;
        for verb in chain {
            match *verb {
                Verb::Read { bytes, .. }
                | Verb::ReadPart { bytes, .. }
                | Verb::ReadSplit { bytes, .. } => self.count_read(bytes.into()),
                Verb::Write { bytes, .. }
                | Verb::WritePart { bytes, .. }
                | Verb::WriteSplit { bytes, .. } => self.count_write(bytes.into()),
                Verb::WriteU32 { .. } => self.count_write(4),
                Verb::WriteWord { .. } => self.count_write(8),
                Verb::CompareSwap { .. } => {
                    self.compare_swaps += 1;
                    self.written_bytes += 8;
                }
            }
        }
        self.bytes() - before
    }

    /// Counts a chain of one READ.
    #[inline]
    pub(crate) fn count_only_read(&mut self, bytes: u32) {
        self.round_trips += 1;
        self.count_read(bytes.into());
    }

    /// Counts a chain that WRITEs this many bytes and a mark, and swaps a word. Returns its
    /// payload, in bytes.
    #[inline]
    pub(crate) fn count_put(&mut self, bytes: u32) -> u64 {
        let payload_bytes = u64::from(bytes) + 4 + 8;
        self.round_trips += 1;
        self.writes += 2;
        self.compare_swaps += 1;
        self.written_bytes += payload_bytes;
        payload_bytes
    }

    #[inline]
    fn count_read(&mut self, bytes: u64) {
        self.reads += 1;
        self.read_bytes += bytes;
    }

    #[inline]
    fn count_write(&mut self, bytes: u64) {
        self.writes += 1;
        self.written_bytes += bytes;
    }

    /// The counts since `earlier`, a former state of the same connection's counters. Across
    /// connections use `-`.
    #[inline]
    pub fn since(&self, earlier: &Self) -> Self {
        self.zip(earlier, u64::wrapping_sub)
    }

    /// Combines each count with the other's.
    #[inline]
    fn zip(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            round_trips: combine(self.round_trips, other.round_trips),
            doorbells: combine(self.doorbells, other.doorbells),
            reads: combine(self.reads, other.reads),
            writes: combine(self.writes, other.writes),
            compare_swaps: combine(self.compare_swaps, other.compare_swaps),
            read_bytes: combine(self.read_bytes, other.read_bytes),
            written_bytes: combine(self.written_bytes, other.written_bytes),
        }
    }

    /// All verbs together.
    pub fn verbs(&self) -> u64 {
        self.reads + self.writes + self.compare_swaps
    }

    /// All bytes together.
    pub fn bytes(&self) -> u64 {
        self.read_bytes + self.written_bytes
    }
}

/// `later - earlier`: the counts in between. A count that is lower in `later` gives 0, because a
/// session counts from 0 again on a new connection.
impl std::ops::Sub for Counters {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        self.zip(&earlier, u64::saturating_sub)
    }
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        *self = self.zip(&other, |own, other| own + other);
    }
}
