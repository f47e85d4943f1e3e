//! The numbers that tell a region file from its copies, and whether a server may continue the shard
//! that a region belonged to.
//!
//! Each serving of a region has a random number, and so has its clean end. The record of the shard
//! has the last one, and a file without it is a copy that others have overtaken. The superblock has
//! room for two numbers. Before a server commits a number, it writes it beside the one that the
//! record has: so the file has the record's number at every time, whether the commit takes effect
//! or not. Decision 0021 has the argument.

use std::path::Path;
use std::sync::{Arc, Weak};

use farside_cluster::{Memory, ServedCopy, ShardRecord};
use farside_control::cluster::Id;
use farside_fabric::ChainError;
use farside_fabric::memory::RegionMemory;
use farside_layout::SERVINGS_OFFSET;

use super::error::ClusterError;

const NONE: Id = Id([0; 16]);

/// The numbers in the superblock of this server's region.
pub(super) struct Servings {
    /// While it is there, the file is locked. Without it, another server may have the file.
    memory: Weak<RegionMemory>,
    /// The superblock's numbers: one that was in the record, and the last that was written.
    written: [Id; 2],
    /// The number of the next commit.
    next: Id,
    /// No commit of a former server of the region can take effect any more.
    is_settled: bool,
}

/// What has to be done before a number can be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// The second number of the superblock may still get into the record, if its commit is late.
    /// Any other commit prevents that.
    MustSettle,
    /// The server is about to end.
    Closed,
}

impl Servings {
    /// `written` is what the superblock has, and `next` a number that no superblock has.
    pub(super) fn new(written: [Id; 2], next: Id) -> Self {
        Self { memory: Weak::new(), written, next, is_settled: false }
    }

    /// Lets the numbers be written here.
    pub(super) fn attach(&mut self, memory: &Arc<RegionMemory>) {
        self.memory = Arc::downgrade(memory);
    }

    pub(super) fn written(&self) -> [Id; 2] {
        self.written
    }

    /// Notes that a commit to the shard's record was done.
    pub(super) fn settle(&mut self) {
        self.is_settled = true;
    }

    /// Writes the next number into the superblock, beside the one of the record. `recorded` is
    /// `None` if the record has no number.
    ///
    /// # Errors
    /// The region has no superblock, which never happens.
    pub(super) fn prepare(&mut self, recorded: Option<Id>) -> Result<Readiness, ChainError> {
        let [first, second] = self.written;
        if second == self.next {
            return Ok(Readiness::Ready);
        }
        let is_pending = recorded == Some(first) && ![first, NONE].contains(&second);
        if is_pending && !self.is_settled {
            return Ok(Readiness::MustSettle);
        }
        let Some(memory) = self.memory.upgrade() else { return Ok(Readiness::Closed) };
        // One number after the other: a server that is killed in between leaves one of them whole.
        if !is_pending {
            write(&memory, 0, second)?;
            self.written[0] = second;
        }
        write(&memory, 1, self.next)?;
        self.written[1] = self.next;
        Ok(Readiness::Ready)
    }

    /// Writes this number, with which the serving ends, into the superblock. The last one is in the
    /// record. Returns false if that is not possible any more.
    pub(super) fn end_with(&mut self, number: Id) -> bool {
        self.next = number;
        let recorded = self.written[1];
        matches!(self.prepare(Some(recorded)), Ok(Readiness::Ready))
    }
}

fn write(memory: &RegionMemory, place: u64, number: Id) -> Result<(), ChainError> {
    let at = SERVINGS_OFFSET + place * size_of::<Id>() as u64;
    let (words, _) = number.0.as_chunks::<8>();
    // `store` keeps the order of the numbers, `write` would not.
    words.iter().zip(0..).try_for_each(|(word, index)| {
        memory.region.store(at + index * 8, u64::from_ne_bytes(*word))
    })
}

/// A region that may be a shard's, as its superblock and its file say.
pub(super) struct KnownRegion<'a> {
    pub(super) region_id: Id,
    /// How many times a server had started on it before this one.
    pub(super) incarnation: u64,
    pub(super) memory: &'a Memory,
    /// The numbers in the superblock, which [`Servings`] writes.
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
    //! A model of servers that start on copies of a region file, are killed between any two steps,
    //! and whose commits come at once, late or never. The owner of the shard has all acknowledged
    //! writes.

    use farside_cluster::{Memory, ServedCopy, ShardRecord};
    use farside_control::cluster::ShardCopy;
    use farside_fabric::memory::HugePages;
    use farside_layout::REGION_BYTES_MIN;

    use super::*;

    /// A region file: its numbers, its name, and the last write that it has.
    #[derive(Clone, Debug)]
    struct RegionFile {
        numbers: [Id; 2],
        name: usize,
        write: u64,
    }

    /// A commit whose outcome its server does not know.
    #[derive(Clone, Debug)]
    struct Late {
        revision: u64,
        record: ShardRecord,
    }

    struct World {
        random: u64,
        memory: Arc<RegionMemory>,
        record: ShardRecord,
        revision: u64,
        late: Vec<Late>,
        files: Vec<RegionFile>,
        /// The last acknowledged write.
        acknowledged: u64,
        refused: u64,
        settled: u64,
    }

    impl World {
        fn new(seed: u64) -> Self {
            let memory = RegionMemory::anonymous(REGION_BYTES_MIN, HugePages::Never).unwrap();
            let mut world = Self {
                random: seed | 1,
                memory: Arc::new(memory),
                record: ShardRecord::default(),
                revision: 1,
                late: Vec::new(),
                files: vec![RegionFile { numbers: [NONE; 2], name: 0, write: 0 }],
                acknowledged: 0,
                refused: 0,
                settled: 0,
            };
            let number = world.number();
            let record = world.record_of(0, Some(number), false);
            (world.record, world.files[0].numbers[1]) = (record, number);
            world
        }

        fn below(&mut self, limit: u64) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random % limit
        }

        fn number(&mut self) -> Id {
            let (a, b) = (self.below(u64::MAX), self.below(u64::MAX));
            Id(((u128::from(a) << 64) | u128::from(b)).to_le_bytes())
        }

        fn record_of(&self, file: usize, serving: Option<Id>, is_stopped: bool) -> ShardRecord {
            let copy = ShardCopy {
                server: Id([1; 16]),
                region_id: Id([1; 16]),
                incarnation: 1,
                addresses: Vec::new(),
                host: String::new(),
            };
            let memory = Memory::File { file: self.files[file].name.to_string() };
            let mut record = self.record.clone();
            record.number += 1;
            record.copies = vec![ServedCopy { copy, memory, serving, is_stopped, distrust_ms: 1 }];
            record
        }

        /// Commits at once, late or never. Returns whether the server knows that it was done.
        fn commit(&mut self, record: ShardRecord) -> bool {
            match self.below(4) {
                0 => {}
                1 => self.late.push(Late { revision: self.revision, record }),
                _ => {
                    self.record = record;
                    self.revision += 1;
                    return true;
                }
            }
            false
        }

        /// A late commit takes effect, or none.
        fn come_late(&mut self) {
            if self.late.is_empty() {
                return;
            }
            let chosen = self.below(self.late.len() as u64) as usize;
            let Late { revision, record } = self.late.swap_remove(chosen);
            if revision == self.revision {
                self.record = record;
                self.revision += 1;
            }
        }

        fn may_serve(&mut self, file: usize) -> bool {
            let RegionFile { numbers, name, .. } = self.files[file];
            let memory = &Memory::File { file: name.to_string() };
            let (region_id, incarnation, servings) = (Id([1; 16]), 1, numbers);
            let region = KnownRegion { region_id, incarnation, memory, servings };
            let may = may_continue(&self.record, &region, ("file".as_ref(), 0)).is_ok();
            self.refused += u64::from(!may);
            may
        }

        fn servings(&mut self, file: usize) -> Servings {
            let next = self.number();
            let mut servings = Servings::new(self.files[file].numbers, next);
            servings.attach(&self.memory);
            servings
        }

        /// The process may be killed while it writes the numbers. Returns whether it was.
        fn write_numbers(&mut self, file: usize, servings: &Servings) -> bool {
            let after = servings.written();
            let [first, second] = self.files[file].numbers;
            let torn = [[first, second], [after[0], second]];
            match self.below(6) {
                chosen @ 0..2 => {
                    self.files[file].numbers = torn[chosen as usize];
                    true
                }
                _ => {
                    self.files[file].numbers = after;
                    false
                }
            }
        }

        /// Starts a server on a file. Returns its numbers once it owns the shard.
        fn start(&mut self, file: usize) -> Option<Servings> {
            let mut servings = self.servings(file);
            for _ in 0..4 {
                if !self.may_serve(file) {
                    return None;
                }
                let recorded = self.record.copies[0].serving;
                if recorded == Some(servings.next) {
                    return Some(servings);
                }
                match servings.prepare(recorded).unwrap() {
                    Readiness::Ready if self.write_numbers(file, &servings) => return None,
                    Readiness::Ready => {
                        let record = self.record_of(file, Some(servings.next), false);
                        self.commit(record);
                    }
                    Readiness::MustSettle => {
                        let same = self.record.clone();
                        if self.commit(same) {
                            self.settled += 1;
                            servings.settle();
                        }
                    }
                    Readiness::Closed => unreachable!(),
                }
                if self.below(3) == 0 {
                    self.come_late();
                }
                if self.below(8) == 0 {
                    return None;
                }
            }
            None
        }

        /// A server serves, stops or is killed. Others may start meanwhile on copies.
        fn serve(&mut self, file: usize) {
            let Some(mut servings) = self.start(file) else { return };
            assert_eq!(self.files[file].write, self.acknowledged, "an acknowledged write is lost");
            let revision = self.revision;
            if self.below(2) == 0 {
                self.copy(file);
            }
            self.acknowledged += 1;
            self.files[file].write = self.acknowledged;
            if self.below(2) == 0 {
                self.copy(file);
            }
            for _ in 0..self.below(3) {
                self.come_late();
                let other = self.below(self.files.len() as u64) as usize;
                if other != file {
                    assert!(self.start(other).is_none(), "two servers own the shard");
                }
            }
            assert_eq!(self.revision, revision, "no other server may change the record");
            if self.below(2) == 0 {
                return;
            }
            let number = self.number();
            assert!(servings.end_with(number));
            if !self.write_numbers(file, &servings) {
                let record = self.record_of(file, Some(number), true);
                self.commit(record);
            }
        }

        fn copy(&mut self, file: usize) {
            let name = self.below(u64::MAX) as usize;
            let copied = RegionFile { name, ..self.files[file].clone() };
            // Few files, so that stale ones are tried often.
            if self.files.len() < 4 {
                self.files.push(copied);
                return;
            }
            let place = self.below(4) as usize;
            if place != file && self.files[place].write < self.acknowledged {
                self.files[place] = copied;
            }
        }
    }

    #[test]
    fn the_owner_of_the_shard_has_all_acknowledged_writes() {
        let (mut acknowledged, mut refused, mut settled) = (0, 0, 0);
        for seed in 1..=200 {
            let mut world = World::new(seed * 0x9e37_79b9);
            for _ in 0..100 {
                let file = world.below(world.files.len() as u64) as usize;
                match world.below(4) {
                    0 => world.copy(file),
                    1 => world.come_late(),
                    _ => world.serve(file),
                }
            }
            // Nothing that happened locks the file with all writes out for ever.
            let before = world.acknowledged;
            for _ in 0..200 {
                world.come_late();
                for file in 0..world.files.len() {
                    world.serve(file);
                }
            }
            assert!(world.acknowledged > before, "seed {seed}: {:?}", world.record);
            acknowledged += world.acknowledged;
            refused += world.refused;
            settled += world.settled;
        }
        assert!(acknowledged > 1000 && refused > 1000 && settled > 100);
    }

    #[test]
    fn the_number_of_the_record_stays_in_the_superblock() {
        let memory = RegionMemory::anonymous(REGION_BYTES_MIN, HugePages::Never).unwrap();
        let memory = Arc::new(memory);
        let in_region = || {
            let mut words = [0; 4];
            memory.region.read(SERVINGS_OFFSET, &mut words).unwrap();
            let number = |at: usize| {
                let [low, high] = [words[at], words[at + 1]].map(u64::to_ne_bytes);
                Id([low, high].concat().try_into().unwrap())
            };
            [number(0), number(2)]
        };
        let [a, b, c, d] = [1, 2, 3, 4].map(|byte| Id([byte; 16]));
        let mut servings = Servings::new([a, b], c);
        assert_eq!(servings.prepare(Some(b)), Ok(Readiness::Closed), "the file may be another's");
        servings.attach(&memory);
        assert_eq!(servings.prepare(Some(a)), Ok(Readiness::MustSettle));
        assert_eq!(servings.prepare(Some(b)), Ok(Readiness::Ready));
        assert_eq!(in_region(), [b, c]);
        assert!(servings.end_with(d));
        assert_eq!(in_region(), [c, d]);
        drop(memory);
        assert!(!servings.end_with(a));
    }

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
