//! Whether a server may continue the shard that a region belonged to.

use std::path::Path;

use farside_cluster::{Memory, ServedCopy, ShardRecord};
use farside_control::cluster::Id;

use super::error::ClusterError;

/// A region that may be a shard's, as its superblock and its file say.
pub(super) struct KnownRegion<'a> {
    pub(super) region_id: Id,
    /// How many times a server had started on it before this one.
    pub(super) incarnation: u64,
    pub(super) memory: &'a Memory,
    /// The numbers in the superblock, which [`Servings`](super::serving::Servings) writes.
    pub(super) servings: [Id; 2],
}

/// Whether a server with this region may continue the shard of this record. False if the shard has
/// another region.
///
/// # Errors
/// [`ClusterError`] if the region is of the shard, but must not be served.
pub(super) fn may_continue(
    record: &ShardRecord,
    region: &KnownRegion<'_>,
    (file, shard): (&Path, u16),
) -> Result<bool, ClusterError> {
    let file = || file.to_owned();
    let is_it = |served: &&ServedCopy| served.copy.region_id == region.region_id;
    if record.revoked.as_ref().is_some_and(|revoked| is_it(&revoked)) {
        return Err(ClusterError::Revoked { file: file(), shard });
    }
    let Some(found) = record.copies.iter().find(is_it) else { return Ok(false) };
    let server = found.copy.server;
    let has_number = match found.serving {
        Some(number) => region.servings.contains(&number),
        // The records went back, so that only the operator knows. But an older copy stays one.
        None => region.incarnation >= found.copy.incarnation,
    };
    if !has_number {
        return Err(ClusterError::StaleFile { file: file(), shard, server });
    }
    // A copy that was made while a server ran has the numbers of the original, and less data.
    let is_original = found.is_stopped || found.serving.is_none() || found.memory == *region.memory;
    if is_original {
        Ok(true)
    } else {
        Err(ClusterError::OtherFile { file: file(), shard, server })
    }
}

#[cfg(test)]
mod tests {
    use farside_control::cluster::ShardCopy;

    use super::*;

    const NUMBERS: [Id; 2] = [Id([3; 16]), Id([4; 16])];

    fn memory(name: &str) -> Memory {
        Memory::File { file: name.to_owned() }
    }

    fn record(serving: Option<Id>, is_stopped: bool) -> ShardRecord {
        let copy = ShardCopy {
            server: Id([2; 16]),
            region_id: Id([1; 16]),
            incarnation: 5,
            addresses: Vec::new(),
            host: String::new(),
        };
        let memory = memory("file");
        let mut record = ShardRecord::default();
        record.copies.push(ServedCopy { copy, memory, serving, is_stopped, distrust_ms: 1 });
        record
    }

    fn continues(record: &ShardRecord, name: &str, incarnation: u64) -> Result<bool, ClusterError> {
        let (region_id, memory) = (Id([1; 16]), &memory(name));
        let region = KnownRegion { region_id, incarnation, memory, servings: NUMBERS };
        may_continue(record, &region, (Path::new("/dev/shm/region"), 3))
    }

    #[test]
    fn only_a_file_with_the_number_of_the_record_continues() {
        for number in NUMBERS {
            let (running, stopped) = (record(Some(number), false), record(Some(number), true));
            assert!(continues(&running, "file", 5).unwrap());
            let copied = continues(&running, "copy", 5);
            assert!(matches!(copied, Err(ClusterError::OtherFile { .. })), "{copied:?}");
            assert!(
                continues(&stopped, "file", 5).unwrap() && continues(&stopped, "moved", 5).unwrap()
            );
        }
        for is_stopped in [false, true] {
            let stale = continues(&record(Some(Id([9; 16])), is_stopped), "file", 9);
            assert!(matches!(stale, Err(ClusterError::StaleFile { .. })), "{stale:?}");
        }
        let restored = record(None, false);
        assert!(
            continues(&restored, "moved", 5).unwrap() && continues(&restored, "file", 6).unwrap()
        );
        assert!(matches!(continues(&restored, "file", 4), Err(ClusterError::StaleFile { .. })));
        let mut revoked = record(Some(NUMBERS[0]), true);
        revoked.revoked = revoked.copies.pop();
        assert!(matches!(continues(&revoked, "file", 5), Err(ClusterError::Revoked { .. })));
        let mut other = record(Some(NUMBERS[0]), true);
        other.copies[0].copy.region_id = Id([9; 16]);
        assert!(!continues(&other, "file", 5).unwrap());
    }
}
