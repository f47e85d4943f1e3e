//! The numbers that tell a region file from its copies.
//!
//! Each serving of a region has a random number, and so has its clean end. The record of the shard
//! has the last one, and a file without it is a copy that others have overtaken. The superblock has
//! room for two numbers. Before a server commits a number, it writes it beside the one that the
//! record has: so the file has the record's number at every time, whether the commit takes effect
//! or not. Decision 0021 has the argument.

use std::sync::{Arc, Weak};

use farside_control::cluster::Id;
use farside_fabric::ChainError;
use farside_fabric::memory::RegionMemory;
use farside_layout::SERVINGS_OFFSET;

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

#[cfg(test)]
mod tests;
