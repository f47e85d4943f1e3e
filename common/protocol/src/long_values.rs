//! Long values of synchronous calls: one pass copies and sums a value between the region and the
//! caller's memory, which is lent to a lane.
//!
//! | | short value | long value |
//! |---|---|---|
//! | GET at a cached location | READ into the lane, sum, copy out | `Verb::ReadSplit` |
//! | PUT at a cached location | copy into the lane, sum, WRITE | `Verb::WriteSplit` |
//!
//! Chains, round trips and checks are those of short values. All other ways go by the lane's
//! buffers, also the way on if the location is wrong. Extents: `extents/direct.rs`.

mod posted;

use farside_fabric::{Buffer, Fabric};
use farside_layout::hash::KeyHash;
use farside_layout::{BLOCK_HEADER_BYTES, BlockRef};

use crate::engine::LANE;
use crate::failure::Failure;
use crate::get::{CachedMiss, CachedRead};
use crate::operation::LONG_VALUE_BYTES;
use crate::region_handle::RegionHandle;
use crate::{Found, Lifetime, Operation, OperationError, ProtocolResult, Version};

pub use posted::{PostedGet, PostedPut};

/// The head of a block ends at a multiple of this, so that the copy of the rest is aligned.
const HEAD_UNIT_BYTES: usize = 64;
/// The lengths of READs are multiples of this.
const WORD_BYTES: usize = 8;

/// A value that was read into the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadValue {
    /// The value's length, in bytes.
    pub bytes: usize,
    /// The write that it comes from.
    pub version: Version,
}

impl ReadValue {
    /// A value of so many bytes, from this write.
    pub const fn new(bytes: usize, version: Version) -> Self {
        Self { bytes, version }
    }
}

/// Memory of the caller for the value that a GET finds.
pub trait ValueTarget {
    /// Makes room for a value of this length. Returns the memory for it, whose content is replaced
    /// next; `None` if it cannot be so long.
    fn room(&mut self, bytes: usize) -> Option<&mut [u8]>;

    /// Replaces the content by this value. Returns false, and changes nothing, if it cannot be so
    /// long.
    #[inline]
    fn set(&mut self, value: &[u8]) -> bool {
        self.room(value.len()).map(|room| room.copy_from_slice(value)).is_some()
    }

    /// All of its memory, if what follows the value may change.
    fn spare(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// Removes the former content, if it can.
    fn clear(&mut self);

    /// How long a value can be, in bytes.
    fn bytes_max(&self) -> usize;
}

impl ValueTarget for Vec<u8> {
    fn room(&mut self, bytes: usize) -> Option<&mut [u8]> {
        if self.capacity() < bytes {
            // The system has zeroed this memory already.
            *self = vec![0; bytes];
        } else {
            // The former content stays, so that only what is longer is filled with zeros.
            self.resize(bytes, 0);
        }
        Some(self)
    }

    #[inline]
    fn set(&mut self, value: &[u8]) -> bool {
        self.clear();
        self.extend_from_slice(value);
        true
    }

    fn clear(&mut self) {
        self.clear();
    }

    fn bytes_max(&self) -> usize {
        usize::MAX
    }
}

/// The value is at the start. What follows is undefined.
impl ValueTarget for &mut [u8] {
    #[inline]
    fn room(&mut self, bytes: usize) -> Option<&mut [u8]> {
        self.get_mut(..bytes)
    }

    fn spare(&mut self) -> Option<&mut [u8]> {
        Some(self)
    }

    fn clear(&mut self) {}

    fn bytes_max(&self) -> usize {
        self.len()
    }
}

/// The result of a long READ of a cached location.
pub(crate) enum LongGet {
    /// The value is in the target; `None` if it has expired.
    Done(Option<ReadValue>),
    /// The block does not prove that it is the key's.
    Missed,
    /// The value cannot go to the target directly, or does not fit into it.
    ByBuffer,
}

/// The length of the head of a block with a key of this length.
fn head_bytes(key: &[u8]) -> usize {
    (BLOCK_HEADER_BYTES as usize + key.len()).next_multiple_of(HEAD_UNIT_BYTES)
}

/// How many bytes of its value are in the head of a long block with this key.
fn value_bytes_in_head(key: &[u8]) -> usize {
    head_bytes(key) - BLOCK_HEADER_BYTES as usize - key.len()
}

/// The length of the READ of a long block whose value goes to so much memory: without the padding
/// that would not fit there.
fn read_bytes(block_bytes: u64, key: &[u8], memory_bytes: usize) -> usize {
    let needed = head_bytes(key) + memory_bytes.saturating_sub(value_bytes_in_head(key));
    needed.next_multiple_of(WORD_BYTES).min(block_bytes as usize)
}

/// The error of a target that is too short for this value.
#[cold]
fn too_short(value: &[u8], target: &impl ValueTarget) -> Failure {
    let (needed, bytes) = (value.len(), target.bytes_max());
    OperationError::TargetTooShort { needed, bytes }.into()
}

impl<'e, F: Fabric> RegionHandle<'e, F> {
    /// As [`RegionHandle::get`], into this memory. Without a value the memory's content is
    /// undefined. A long value at a cached location is copied and summed in one pass.
    ///
    /// # Errors
    /// [`OperationError::TargetTooShort`].
    #[inline]
    pub fn get_into<T: ValueTarget>(
        self,
        (hash, key): (KeyHash, &[u8]),
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        self.region.check_key(key)?;
        match self.run_cached(hash, key, LONG_VALUE_BYTES as u32)? {
            Ok(found) => self.deliver(found, target),
            Err(missed) => self.get_missed_into((hash, key), missed, target),
        }
    }

    /// Puts the value that a GET found in the lane's buffer into this memory.
    #[inline(always)]
    pub(crate) fn deliver<T: ValueTarget>(
        self,
        found: Option<Found>,
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        let Some(found) = found else {
            target.clear();
            return Ok(None);
        };
        let block = self.engine.endpoint.buffer(LANE, Buffer::ReadBlock);
        let value = found.value_in(&block);
        if !target.set(value) {
            return Err(too_short(value, target));
        }
        Ok(Some(ReadValue { bytes: value.len(), version: found.version }))
    }

    #[cold]
    fn get_missed_into<T: ValueTarget>(
        self,
        (hash, key): (KeyHash, &[u8]),
        missed: CachedMiss,
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        self.measure_missed(missed, Option::is_some, |missed| {
            self.get_rest_into((hash, key), missed, target)
        })
    }

    #[cold]
    fn get_rest_into<T: ValueTarget>(
        self,
        (hash, key): (KeyHash, &[u8]),
        missed: CachedMiss,
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        let (read, block) = match missed {
            CachedMiss::Long(read, block) if !block.class.is_head() => (read, block),
            _ => return self.get_by_future_into((hash, key), missed, target),
        };
        let missed = match self.read_long((hash, key), &read, block, target)? {
            LongGet::Done(Some(found)) => return Ok(Some(found)),
            LongGet::Done(None) => return self.deliver(None, target),
            LongGet::Missed => CachedMiss::InVain(read),
            // The future READs the cached location into the lane's buffer.
            LongGet::ByBuffer => CachedMiss::Unread,
        };
        self.get_by_future_into((hash, key), missed, target)
    }

    #[cold]
    fn get_by_future_into<T: ValueTarget>(
        self,
        (hash, key): (KeyHash, &[u8]),
        missed: CachedMiss,
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        let operation = self.stage_missed(hash, key, missed);
        self.get_staged_into(&operation, target)
    }

    /// READs the block at the cached location directly into the target.
    #[cold]
    pub(crate) fn read_long(
        self,
        (hash, key): (KeyHash, &[u8]),
        read: &CachedRead,
        block: BlockRef,
        target: &mut dyn ValueTarget,
    ) -> ProtocolResult<LongGet> {
        let endpoint = &self.engine.endpoint;
        let at = (LANE, (hash, key), *read, block);
        endpoint.lending(move |loan| {
            if target.spare().is_some() {
                let posted = endpoint.alone(|| self.post_long(loan, at, target.spare()));
                let Some(posted) = posted else { return Ok(LongGet::ByBuffer) };
                return posted.evaluate(loan, |_| None);
            }
            // The length of the value has to be known first.
            let posted = endpoint.alone(|| self.post_long(loan, at, None));
            let Some(posted) = posted else { return Ok(LongGet::ByBuffer) };
            posted.evaluate(loan, |bytes| target.room(bytes))
        })
    }

    /// As [`RegionHandle::put`], for a key and a long value that were checked.
    #[cold]
    pub(crate) fn put_long(
        self,
        lifetime: Lifetime,
        (hash, key): (KeyHash, &[u8]),
        value: &[u8],
    ) -> ProtocolResult<Option<Version>> {
        if !self.is_short(key, value.len()) {
            return self.measure_put(None, || self.put_extents(lifetime, (hash, key), value));
        }
        let endpoint = &self.engine.endpoint;
        let done = endpoint.lending(|loan| {
            endpoint.tick();
            let posted = self.post_long_put(loan, LANE, lifetime, (hash, key), value)?;
            let Some(posted) = posted else { return Ok(None) };
            endpoint.wait_for(LANE);
            posted.complete().map(Some)
        });
        match done? {
            Some(version) => Ok(version),
            None => Operation::stage(self, LANE, (hash, key), value).put_by_future(lifetime),
        }
    }
}
