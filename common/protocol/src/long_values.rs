//! Long values of synchronous calls: one pass copies and sums a value between the region and the
//! caller's memory.
//!
//! | | short value | long value |
//! |---|---|---|
//! | GET at a cached location | READ into the lane, sum, copy out | `Fabric::run_long_read` |
//! | PUT at a cached location | copy into the lane, sum, WRITE | `Fabric::run_long_write` |
//!
//! Chains, round trips and checks are those of short values. All other ways go by the lane's
//! buffers, also the way on if the location is wrong. Extents: `extents/direct.rs`.

mod posted;

use farside_fabric::{Buffer, ChainError, Fabric, LongRead, LongWrite, ReadSink, WriteSum};
use farside_layout::hash::KeyHash;
use farside_layout::{ArrivingBlock, BLOCK_HEADER_BYTES, BlockRef, DepartingBlock};

use crate::engine::LANE;
use crate::failure::Failure;
use crate::get::{CachedMiss, CachedRead};
use crate::operation::LONG_VALUE_BYTES;
use crate::put::{CachedPut, DisplacedPut};
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

/// Takes the value of a long block.
struct ValueSink<'k, 'v> {
    block: BlockRef,
    key: &'k [u8],
    target: Option<&'v mut dyn ValueTarget>,
    /// The target's memory.
    room: &'v mut [u8],
    /// `None` until the head has arrived, or if it is not that of the key's block.
    arriving: Option<ArrivingBlock>,
    is_too_long: bool,
}

impl ReadSink for ValueSink<'_, '_> {
    fn direct(&mut self, bytes: usize) -> Option<&mut [u8]> {
        let rest = self.target.as_mut()?.spare()?.get_mut(value_bytes_in_head(self.key)..)?;
        let bytes = bytes.min(rest.len());
        Some(&mut rest[..bytes])
    }

    fn begin(&mut self, head: &[u8]) -> usize {
        let arriving = ArrivingBlock::of_key(head, self.block, self.key);
        let (Some(arriving), Some(target)) = (arriving, self.target.take()) else { return 0 };
        let Some(room) = target.room(arriving.value_bytes()) else {
            self.is_too_long = true;
            return 0;
        };
        let first = &head[BLOCK_HEADER_BYTES as usize + self.key.len()..];
        room[..first.len()].copy_from_slice(first);
        self.room = room;
        self.arriving.insert(arriving).missing_bytes()
    }

    fn add_summed(&mut self, sum: u32, bytes: usize) {
        if let Some(arriving) = &mut self.arriving {
            arriving.add_summed(sum, bytes);
        }
    }

    fn next(&mut self, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let Some(arriving) = &mut self.arriving else { return };
        let start = self.room.len() - arriving.missing_bytes();
        let part = &mut self.room[start..start + bytes];
        fill(part);
        arriving.add(part);
    }
}

/// Sums the value of a long block that is written.
struct DepartingBlockSum(DepartingBlock);

impl WriteSum for DepartingBlockSum {
    fn add(&mut self, part: &[u8]) {
        self.0.add(part);
    }

    fn end(&mut self, head: &mut [u8]) {
        self.0.end(head);
    }
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
        let mut fabric = self.engine.endpoint.fabric_mut();
        let (head_bytes, mut bytes) = (head_bytes(key) as u32, read.bytes(block) as u32);
        if let Some(memory) = target.spare() {
            bytes = read_bytes(bytes.into(), key, memory.len()) as u32;
        }
        // Otherwise the value may be short: at most a fifth of a block is padding.
        if head_bytes > bytes / 2 {
            return Ok(LongGet::ByBuffer);
        }
        let (target, room, arriving) = (Some(target), Default::default(), None);
        let mut sink = ValueSink { block, key, target, room, arriving, is_too_long: false };
        let lengths = LongRead { into: Buffer::ReadBlock, head_bytes, bytes };
        let remote = block.offset();
        let done = fabric.run_long_read(LANE, self.region.index, remote, lengths, &mut sink);
        done.map_err(|error| self.failed(error))?;
        if sink.is_too_long {
            return Ok(LongGet::ByBuffer);
        }
        let arrived = sink.arriving.and_then(|block| Some((block.end()?, block)));
        let proof = arrived.as_ref().map(|(header, block)| (*header, block.expires_at_ms()));
        let is_present = self.complete_long_read(&*fabric, hash, read, proof);
        let (Some(is_present), Some((header, arrived))) = (is_present, arrived) else {
            return Ok(LongGet::Missed);
        };
        let version = Version::of(block.address, header.generation);
        let found = ReadValue { bytes: arrived.value_bytes(), version };
        Ok(LongGet::Done(is_present.then_some(found)))
    }

    /// As [`RegionHandle::put`], for a long value.
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
        let operation = Operation::staged(self, LANE, hash, (key.len(), value.len()), None);
        match self.engine.endpoint.alone(|| operation.put_long_cached(lifetime, key, value))? {
            Some(Ok(version)) => Ok(Some(version)),
            Some(Err(displaced)) => operation.put_displaced(displaced),
            None => {
                Operation::<F>::fill(self.engine, LANE, key, value);
                operation.put_by_future(lifetime)
            }
        }
    }
}

impl<'e, F: Fabric> Operation<'e, F> {
    /// Runs a PUT of a long value at the cached location. `None` if nothing was posted, as in
    /// [`Operation::cached_put`].
    fn put_long_cached(
        &self,
        lifetime: Lifetime,
        key: &[u8],
        value: &[u8],
    ) -> ProtocolResult<Option<Result<Version, DisplacedPut>>> {
        let Some((put, mut sum)) = self.begin_long_put(lifetime, key, value)? else {
            return Ok(None);
        };
        let (head_bytes, rest) = (head_bytes(key) as u32, &value[value_bytes_in_head(key)..]);
        let write = LongWrite { head_bytes, rest, sum: &mut sum };
        let result = self.run_cached_put(&put, write)?;
        self.end_long_put(put, result, key, value).map(Some)
    }

    /// Takes a block for a PUT of a long value at the cached location, and fills in its head.
    /// `None` as in [`Operation::cached_put`].
    fn begin_long_put(
        &self,
        lifetime: Lifetime,
        key: &[u8],
        value: &[u8],
    ) -> ProtocolResult<Option<(CachedPut<'e>, DepartingBlockSum)>> {
        let head_bytes = head_bytes(key);
        let Some(in_head) = value.get(..value_bytes_in_head(key)) else { return Ok(None) };
        let mut sum = None;
        let put = self.cached_put_by(|taken| {
            let (new, stamp) = self.stamp_block(taken, self.input(), lifetime)?;
            let mut fabric = self.engine.endpoint.fabric_mut();
            fabric.reserve(self.lane, Buffer::NewBlock, head_bytes);
            let head = &mut fabric.buffer_mut(self.lane, Buffer::NewBlock)[..head_bytes];
            let (key_image, value_image) =
                head[BLOCK_HEADER_BYTES as usize..].split_at_mut(key.len());
            key_image.copy_from_slice(key);
            value_image.copy_from_slice(in_head);
            let departing =
                DepartingBlock::begin(head, key.len() as u16, value.len() as u32, stamp)?;
            sum = Some(DepartingBlockSum(departing));
            Ok(new)
        })?;
        Ok(put.zip(sum))
    }

    /// Evaluates the result of the chain of [`Operation::begin_long_put`].
    fn end_long_put(
        &self,
        put: CachedPut<'_>,
        result: Result<u64, ChainError>,
        key: &[u8],
        value: &[u8],
    ) -> ProtocolResult<Result<Version, DisplacedPut>> {
        match self.complete_cached_put(&put, result)? {
            None => Ok(Ok(put.version())),
            Some(swung) => {
                let displaced = put.displaced(swung);
                self.restage(displaced.new_block(), key, value)?;
                Ok(Err(displaced))
            }
        }
    }
}
