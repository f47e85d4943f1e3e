//! Decides when the server logs how much of the memory is in use.

/// The levels of use that are logged, in percent of the heap's chunks.
const LEVELS: [u64; 3] = [100, 90, 80];
/// How far, in percentage points, the use must fall below a level before that is logged. With a
/// smaller value, a use that varies by a chunk would fill the log.
const HYSTERESIS: u64 = 5;

/// A change that is worth a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LevelChange {
    Reached(u64),
    FellBelow(u64),
}

/// The level that was logged last; 0 below all levels.
#[derive(Debug, Default)]
pub(crate) struct MemoryLevel {
    level: u64,
}

impl MemoryLevel {
    /// Returns the change to log when `used` of `total` chunks are in use.
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
    fn each_level_is_logged_once_until_use_has_clearly_fallen_below_it() {
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
