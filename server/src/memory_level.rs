//! When the log is to say how much of the memory is in use.

/// Percentages of the heap's chunks that are worth a line.
const LEVELS: [u64; 3] = [100, 90, 80];
/// How many points use has to fall below a level before that is worth one, too: use goes up and
/// down by a chunk all the time.
const HYSTERESIS: u64 = 5;

/// What the log says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LevelChange {
    Reached(u64),
    FellBelow(u64),
}

/// The level that the log has said last.
#[derive(Debug, Default)]
pub(crate) struct MemoryLevel {
    level: u64,
}

impl MemoryLevel {
    /// Returns what to log when so many of all chunks are in use; usually nothing.
    pub(crate) fn update(&mut self, used: u64, total: u64) -> Option<LevelChange> {
        let reached = LEVELS.into_iter().find(|level| used * 100 >= level * total).unwrap_or(0);
        let before = self.level;
        if reached > before {
            self.level = reached;
            return Some(LevelChange::Reached(reached));
        }
        if reached < before && used * 100 < (before - HYSTERESIS) * total {
            self.level = reached;
            return Some(LevelChange::FellBelow(before));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_is_said_once_until_use_has_clearly_fallen_below_it() {
        let mut level = MemoryLevel::default();
        let mut update = |used| level.update(used, 1000);
        assert_eq!([update(0), update(799)], [None, None]);
        assert_eq!(update(800), Some(LevelChange::Reached(80)));
        assert_eq!([update(799), update(801), update(750), update(800)], [None; 4]);
        assert_eq!(update(749), Some(LevelChange::FellBelow(80)));
        assert_eq!(update(950), Some(LevelChange::Reached(90)));
        assert_eq!(update(1000), Some(LevelChange::Reached(100)));
        assert_eq!([update(999), update(950)], [None, None]);
        assert_eq!(update(949), Some(LevelChange::FellBelow(100)));
        assert_eq!([update(890), update(850)], [None, None]);
        assert_eq!(update(849), Some(LevelChange::FellBelow(90)));
        assert_eq!(update(0), Some(LevelChange::FellBelow(80)));
        assert_eq!(update(0), None);
    }
}
