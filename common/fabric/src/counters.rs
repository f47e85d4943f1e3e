use super::Verb;

/// What a session asked of its fabric, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Chains: each takes its lane one round trip.
    pub round_trips: u64,
    /// Doorbells: chains rung together share one.
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
    /// Counts a chain as it is posted; returns its payload, in bytes.
    #[inline]
    pub fn count(&mut self, chain: &[Verb]) -> u64 {
        let before = self.bytes();
        self.round_trips += 1;
        for verb in chain {
            match *verb {
                Verb::Read { bytes, .. } => {
                    self.reads += 1;
                    self.read_bytes += u64::from(bytes);
                }
                Verb::Write { bytes, .. } => self.count_write(bytes.into()),
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

    #[inline]
    fn count_write(&mut self, bytes: u64) {
        self.writes += 1;
        self.written_bytes += bytes;
    }

    /// What was counted since `earlier`, a former state of these same counters.
    #[inline]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            round_trips: self.round_trips.wrapping_sub(earlier.round_trips),
            doorbells: self.doorbells.wrapping_sub(earlier.doorbells),
            reads: self.reads.wrapping_sub(earlier.reads),
            writes: self.writes.wrapping_sub(earlier.writes),
            compare_swaps: self.compare_swaps.wrapping_sub(earlier.compare_swaps),
            read_bytes: self.read_bytes.wrapping_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.wrapping_sub(earlier.written_bytes),
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

/// `later - earlier`: the counts in between. A count that became less gives 0: on a new connection
/// a session counts from 0 again.
impl std::ops::Sub for Counters {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            round_trips: self.round_trips.saturating_sub(earlier.round_trips),
            doorbells: self.doorbells.saturating_sub(earlier.doorbells),
            reads: self.reads.saturating_sub(earlier.reads),
            writes: self.writes.saturating_sub(earlier.writes),
            compare_swaps: self.compare_swaps.saturating_sub(earlier.compare_swaps),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
        }
    }
}

/// Both together.
impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.round_trips += other.round_trips;
        self.doorbells += other.doorbells;
        self.reads += other.reads;
        self.writes += other.writes;
        self.compare_swaps += other.compare_swaps;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
    }
}
