//! GETs and PUTs of long values at cached locations, several of which may share a doorbell. The
//! data goes between the region and memory of the caller, which is lent to the lane.

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, LentMemory, Loan, Nanos, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{ArrivingBlock, BLOCK_HEADER_BYTES, BlockRef, DepartingBlock, SizeClass};

use super::{LongGet, ReadValue, head_bytes, read_bytes, value_bytes_in_head};
use crate::get::CachedRead;
use crate::operation::LONG_VALUE_BYTES;
use crate::operation_metrics::OperationKind;
use crate::put::CachedPut;
use crate::region_handle::RegionHandle;
use crate::{Action, Lifetime, Operation, ProtocolResult, Version};

/// The lane of a GET, its key, and the cached location with its block.
type GetAt<'m> = (LaneId, (KeyHash, &'m [u8]), CachedRead, BlockRef);

/// A GET whose READ of the cached location is in flight.
pub struct PostedGet<'e, 'm, F> {
    handle: RegionHandle<'e, F>,
    at: GetAt<'m>,
    /// How many bytes the READ has behind the head, and whether the memory of the caller has no
    /// room for more.
    rest: (usize, bool),
    /// The memory for the bytes of the value that are in the block's head; `None` if the memory of
    /// the caller comes later.
    first: Option<&'m mut [u8]>,
}

/// A PUT whose chain at the cached location is in flight.
pub struct PostedPut<'e, 'm, F: Fabric> {
    operation: Operation<'e, F>,
    put: CachedPut<'e>,
    key: &'m [u8],
    value: &'m [u8],
}

impl<'e, F: Fabric> RegionHandle<'e, F> {
    /// The class of the block at the cached location, if there is one.
    pub fn cached_class(self, hash: KeyHash) -> Option<SizeClass> {
        let read = self.cached_read_of_any(hash, || self.engine.endpoint.now())?;
        read.location().block().ok().map(|block| block.class)
    }

    /// Posts the READ of the cached location, if a long block is cached. Otherwise posts nothing.
    pub fn post_get<'m>(
        self,
        loan: &Loan<'_, 'm, F>,
        lane: LaneId,
        key: (KeyHash, &'m [u8]),
        target: &'m mut [u8],
    ) -> Option<PostedGet<'e, 'm, F>> {
        let read = self.cached_read(key.0, || self.engine.endpoint.now())?;
        let block = read.only_block()?;
        if read_bytes(read.bytes(block), key.1, target.len()) < LONG_VALUE_BYTES {
            return None;
        }
        self.post_long(loan, (lane, key, read, block), Some(target))
    }

    /// Posts the READ of a long block into this memory, or into memory that is known later. `None`
    /// if the value may be short, or is longer than the memory for certain.
    pub(super) fn post_long<'m>(
        self,
        loan: &Loan<'_, 'm, F>,
        (lane, (hash, key), read, block): GetAt<'m>,
        memory: Option<&'m mut [u8]>,
    ) -> Option<PostedGet<'e, 'm, F>> {
        let (head_bytes, mut bytes) = (head_bytes(key), read.bytes(block) as usize);
        if let Some(memory) = &memory {
            bytes = read_bytes(bytes as u64, key, memory.len());
        }
        // Otherwise the value may be short: at most a fifth of a block is padding.
        if head_bytes > bytes / 2 {
            return None;
        }
        let (mut rest_bytes, mut is_full) = (bytes - head_bytes, false);
        let (mut rest, mut first): (&mut [u8], _) = (&mut [], None);
        if let Some(memory) = memory {
            let (in_head, behind) = memory.split_at_mut_checked(value_bytes_in_head(key))?;
            is_full = behind.len() < rest_bytes;
            rest_bytes = behind.len().min(rest_bytes);
            (rest, first) = (&mut behind[..rest_bytes], Some(in_head));
        }
        if !loan.lend(lane, LentMemory::Target(rest)) {
            return None;
        }
        let rest = (rest_bytes, is_full || (bytes as u64) < read.bytes(block));
        let (into, head_bytes, bytes) = (Buffer::ReadBlock, head_bytes as u32, bytes as u32);
        let chain = [Verb::ReadSplit { remote: block.offset(), into, head_bytes, bytes }];
        // The result is taken later.
        drop(self.post(lane, &chain, Nanos::MAX));
        Some(PostedGet { handle: self, at: (lane, (hash, key), read, block), rest, first })
    }

    /// Posts the chain of a PUT at the cached location, if the value is long and has no extents.
    /// Otherwise posts nothing.
    pub fn post_put<'m>(
        self,
        loan: &Loan<'_, 'm, F>,
        lane: LaneId,
        lifetime: Lifetime,
        (hash, key): (KeyHash, &'m [u8]),
        value: &'m [u8],
    ) -> ProtocolResult<Option<PostedPut<'e, 'm, F>>> {
        self.region.check_key(key)?;
        self.region.check_value(value)?;
        self.engine.check_expiry(Action::Put(lifetime))?;
        if value.len() < LONG_VALUE_BYTES || !self.is_short(key, value.len()) {
            return Ok(None);
        }
        self.post_long_put(loan, lane, lifetime, (hash, key), value)
    }

    /// As [`RegionHandle::post_put`], for a key and a value that were checked.
    pub(super) fn post_long_put<'m>(
        self,
        loan: &Loan<'_, 'm, F>,
        lane: LaneId,
        lifetime: Lifetime,
        (hash, key): (KeyHash, &'m [u8]),
        value: &'m [u8],
    ) -> ProtocolResult<Option<PostedPut<'e, 'm, F>>> {
        let (head_bytes, in_head) = (head_bytes(key), value_bytes_in_head(key));
        let (first, rest) = value.split_at(in_head);
        if !loan.lend(lane, LentMemory::Source(rest)) {
            return Ok(None);
        }
        let operation = Operation::staged(self, lane, hash, (key.len(), value.len()), None);
        let endpoint = &self.engine.endpoint;
        let mut departing = None;
        let put = operation.cached_put_by(|taken| {
            let (new, stamp) = operation.stamp_block(taken, operation.input(), lifetime)?;
            let mut fabric = endpoint.fabric_mut();
            fabric.reserve(lane, Buffer::NewBlock, head_bytes);
            let head = &mut fabric.buffer_mut(lane, Buffer::NewBlock)[..head_bytes];
            let (key_image, value_image) =
                head[BLOCK_HEADER_BYTES as usize..].split_at_mut(key.len());
            key_image.copy_from_slice(key);
            value_image.copy_from_slice(first);
            let (key_bytes, value_bytes) = (key.len() as u16, value.len() as u32);
            departing = Some(DepartingBlock::begin(head, key_bytes, value_bytes, stamp)?);
            Ok(new)
        })?;
        let Some((put, mut departing)) = put.zip(departing) else { return Ok(None) };
        let (chain, deadline) = operation.split_chain_of(&put, head_bytes as u32)?;
        // The result is taken later.
        drop(self.post(lane, &chain, deadline));
        let mut fabric = endpoint.fabric_mut();
        let part = (Buffer::Lent, 0, rest.len() as u32);
        departing.add_summed(fabric.part_sum(lane, 0, part, departing.sum()));
        departing.end(fabric.buffer_mut(lane, Buffer::NewBlock));
        drop(fabric);
        Ok(Some(PostedPut { operation, put, key, value }))
    }
}

impl<'m, F: Fabric> PostedGet<'_, 'm, F> {
    /// Evaluates the READ, which has completed. `None` if this location does not answer the GET, or
    /// if the value is longer than the target. `Some(None)` if the value has expired.
    pub fn complete(self, loan: &Loan<'_, 'm, F>) -> ProtocolResult<Option<Option<ReadValue>>> {
        let (handle, posted) = (self.handle, self.at.2.posted());
        let LongGet::Done(found) = self.evaluate(loan, |_| None)? else { return Ok(None) };
        if let Some(metrics) = handle.metrics() {
            let latency = handle.engine.endpoint.fabric().now().saturating_sub(posted);
            metrics.add(OperationKind::Get, found.is_some(), latency);
        }
        Ok(Some(found))
    }

    /// As [`PostedGet::complete`], without metrics. If no memory was lent yet, `room` provides it
    /// for a value of so many bytes.
    pub(super) fn evaluate(
        self,
        loan: &Loan<'_, 'm, F>,
        room: impl FnOnce(usize) -> Option<&'m mut [u8]>,
    ) -> ProtocolResult<LongGet> {
        let Self { handle, at: (lane, (hash, key), read, block), rest, first } = self;
        let (rest_bytes, is_full) = rest;
        let endpoint = &handle.engine.endpoint;
        let result = endpoint.take_result(lane).unwrap_or(Err(ChainError::Unknown));
        result.map_err(|error| handle.failed(error))?;
        let arriving = {
            let buffer = endpoint.buffer(lane, Buffer::ReadBlock);
            let head = buffer.get(..head_bytes(key));
            head.and_then(|head| ArrivingBlock::of_key(head, block, key))
        };
        let mut proof = None;
        let is_too_long = |arriving: &ArrivingBlock| arriving.missing_bytes() > rest_bytes;
        if is_full && arriving.as_ref().is_some_and(is_too_long) {
            return Ok(LongGet::ByBuffer);
        }
        // A longer value is not that of the cached location.
        if let Some(mut arriving) = arriving.filter(|arriving| !is_too_long(arriving)) {
            let missing = arriving.missing_bytes();
            let first = match first {
                Some(first) => Some(first),
                None => room(arriving.value_bytes()).map(|room| {
                    let (first, rest) = room.split_at_mut(value_bytes_in_head(key));
                    loan.lend(lane, LentMemory::Target(rest));
                    first
                }),
            };
            let Some(first) = first else { return Ok(LongGet::ByBuffer) };
            let mut fabric = endpoint.fabric_mut();
            let head = &fabric.buffer(lane, Buffer::ReadBlock)[..head_bytes(key)];
            first.copy_from_slice(&head[BLOCK_HEADER_BYTES as usize + key.len()..]);
            let part = (Buffer::Lent, 0, missing as u32);
            arriving.add_summed(fabric.part_sum(lane, 0, part, arriving.sum()), missing);
            proof = arriving.end().map(|header| (header, arriving));
        }
        let arrived = proof.as_ref().map(|(header, block)| (*header, block.expires_at_ms()));
        let is_present = handle.complete_long_read(&*endpoint.fabric(), hash, &read, arrived);
        let (Some(is_present), Some((header, arrived))) = (is_present, proof) else {
            return Ok(LongGet::Missed);
        };
        let version = Version::of(block.address, header.generation);
        let found = ReadValue { bytes: arrived.value_bytes(), version };
        Ok(LongGet::Done(is_present.then_some(found)))
    }
}

impl<F: Fabric> PostedPut<'_, '_, F> {
    /// Evaluates the chain, which has completed, and runs the PUT to its end. No other operation
    /// may be in flight. Returns as [`RegionHandle::put`].
    pub fn complete(self) -> ProtocolResult<Option<Version>> {
        let Self { operation, put, key, value } = self;
        let endpoint = &operation.engine.endpoint;
        let result = endpoint.take_result(operation.lane).unwrap_or(Err(ChainError::Unknown));
        match operation.complete_cached_put(&put, result)? {
            None => Ok(Some(put.version())),
            Some(swung) => {
                let displaced = put.displaced(swung);
                operation.restage(displaced.new_block(), key, value)?;
                operation.put_displaced(displaced)
            }
        }
    }
}
