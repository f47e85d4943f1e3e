//! Iteration over all entries.

use std::fmt;
use std::ops::Range;

use farside_protocol::{Failure, LANE, ScanCursor, next_entry};

use crate::{Entry, Result, Session};

/// Iterates over all entries; see [`Session::scan`](crate::Session::scan).
pub struct Scan<'s> {
    session: &'s mut Session,
    /// The shards that were not read completely. The first one is being read.
    shards: Range<usize>,
    /// The region of the shard, once it was read.
    region_id: Option<[u8; 16]>,
    cursor: ScanCursor,
    /// Only keys that begin with these bytes are returned.
    prefix: Vec<u8>,
    has_ended: bool,
}

impl fmt::Debug for Scan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scan").field("has_ended", &self.has_ended).finish_non_exhaustive()
    }
}

impl<'s> Scan<'s> {
    /// A scan of all shards.
    pub(crate) fn new(session: &'s mut Session, prefix: &[u8]) -> Self {
        let (shards, cursor, prefix) =
            (0..session.shards(), ScanCursor::default(), prefix.to_vec());
        Self { session, shards, region_id: None, cursor, prefix, has_ended: false }
    }

    /// A scan of one shard, or of the last one if there is none with this number.
    pub(crate) fn of_shard(session: &'s mut Session, shard: u16) -> Self {
        let shard = usize::from(shard).min(session.shards() - 1);
        Self { shards: shard..shard + 1, ..Self::new(session, &[]) }
    }

    /// Reads the next entry of the shard. The inner error concerns that entry only, and the scan
    /// continues. The outer error is the connection's, and ends the scan.
    fn step(&mut self) -> Result<Result<Option<Entry>>> {
        let Self { session, shards, region_id, cursor, .. } = self;
        let step = session.run_on_shard(shards.start, |handle| {
            // The cursor's positions mean nothing in another region.
            let found_id = handle.region.format.region_id;
            if *region_id.get_or_insert(found_id) != found_id {
                return Ok(None);
            }
            let entry = handle.engine.endpoint.drive(next_entry(handle, LANE, cursor));
            match entry {
                Ok(entry) => Ok(Some(Ok(entry))),
                Err(Failure::Error(error)) => Ok(Some(Err((*error).into()))),
                Err(failure) => {
                    cursor.restart_part();
                    Err(failure)
                }
            }
        })?;
        step.ok_or_else(|| session.shared.disconnected(shards.start))
    }

    /// Goes on to the next shard. Returns false if there is none.
    fn next_shard(&mut self) -> bool {
        (self.region_id, self.cursor) = (None, ScanCursor::default());
        self.shards.next();
        !self.shards.is_empty()
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Entry>;

    /// Returns the next entry. After an error about one entry the scan continues with the others.
    fn next(&mut self) -> Option<Self::Item> {
        while !self.has_ended {
            let step = self.step();
            self.has_ended = match step {
                Err(_) => true,
                Ok(Ok(None)) => !self.next_shard(),
                _ => false,
            };
            match step.flatten().transpose() {
                Some(Ok(entry)) if !entry.key.starts_with(&self.prefix) => {}
                None => {}
                step => return step,
            }
        }
        None
    }
}
