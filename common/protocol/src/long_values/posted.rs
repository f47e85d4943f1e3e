//! GETs and PUTs of long values at cached locations, several of which share a doorbell. The data
//! goes between the region and memory of the caller, if the fabric takes it.

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, LentMemory, Loan, Nanos};
use farside_layout::hash::KeyHash;
use farside_layout::{ArrivingBlock, BLOCK_HEADER_BYTES, BlockRef, SizeClass};

use super::{DepartingBlockSum, ReadValue, head_bytes, read_bytes, value_bytes_in_head};
use crate::get::CachedRead;
use crate::operation::{LONG_VALUE_BYTES, read_block};
use crate::operation_metrics::OperationKind;
use crate::put::CachedPut;
use crate::region_handle::RegionHandle;
use crate::{Action, Lifetime, Operation, ProtocolResult, Version};

/// A GET whose READ of the cached location is in flight.
pub struct PostedGet<'e, 'm, F> {
    handle: RegionHandle<'e, F>,
    lane: LaneId,
    key: (KeyHash, &'m [u8]),
    read: CachedRead,
    block: BlockRef,
    /// The memory for the bytes of the value that are in the block's head.
    first: &'m mut [u8],
    /// How many bytes the lent memory has.
    rest_bytes: usize,
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

    /// Posts the READ of the cached location, if a long block is cached and the fabric takes the
    /// target. Otherwise posts nothing.
    pub fn post_get<'m>(
        self,
        loan: &Loan<'_, 'm, F>,
        lane: LaneId,
        (hash, key): (KeyHash, &'m [u8]),
        target: &'m mut [u8],
    ) -> ProtocolResult<Option<PostedGet<'e, 'm, F>>> {
        let cached = self.cached_read(hash, || self.engine.endpoint.now());
        let Some((read, block)) = cached.and_then(|read| Some((read, read.only_block()?))) else {
            return Ok(None);
        };
        let head_bytes = head_bytes(key);
        let bytes = read_bytes(read.bytes(block), key, target.len());
        if bytes < LONG_VALUE_BYTES || head_bytes > bytes / 2 {
            return Ok(None);
        }
        let Some((first, rest)) = target.split_at_mut_checked(value_bytes_in_head(key)) else {
            return Ok(None);
        };
        let rest_bytes = rest.len().min(bytes - head_bytes);
        let rest = &mut rest[..rest_bytes];
        if !loan.takes(rest).map_err(|error| self.failed(error))? {
            return Ok(None);
        }
        let chain = [read_block(block, bytes as u64)];
        let rest = (head_bytes as u32, LentMemory::Target(rest));
        loan.post(lane, self.region.index, (&chain, Nanos::MAX), rest);
        Ok(Some(PostedGet { handle: self, lane, key: (hash, key), read, block, first, rest_bytes }))
    }

    /// Posts the chain of a PUT at the cached location, if the value is long and has no extents,
    /// and if the fabric takes it. Otherwise posts nothing.
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
        let rest = &value[value_bytes_in_head(key)..];
        if !loan.takes(rest).map_err(|error| self.failed(error))? {
            return Ok(None);
        }
        let operation = Operation::staged(self, lane, hash, (key.len(), value.len()), None);
        let Some((put, sum)) = operation.begin_long_put(lifetime, key, value)? else {
            return Ok(None);
        };
        let (chain, deadline) = operation.chain_of(&put)?;
        let DepartingBlockSum(mut sum) = sum;
        sum.add(rest);
        sum.end(self.engine.endpoint.fabric_mut().buffer_mut(lane, Buffer::NewBlock));
        let rest = (head_bytes(key) as u32, LentMemory::Source(rest));
        loan.post(lane, self.region.index, (&chain, deadline), rest);
        Ok(Some(PostedPut { operation, put, key, value }))
    }
}

impl<F: Fabric> PostedGet<'_, '_, F> {
    /// Evaluates the READ, which has completed. `None` if this location does not answer the GET, or
    /// if the value is longer than the target. `Some(None)` if the value has expired.
    pub fn complete(self) -> ProtocolResult<Option<Option<ReadValue>>> {
        let Self { handle, lane, key: (hash, key), read, block, first, rest_bytes } = self;
        let result = handle.engine.endpoint.take_result(lane).unwrap_or(Err(ChainError::Unknown));
        result.map_err(|error| handle.failed(error))?;
        let mut fabric = handle.engine.endpoint.fabric_mut();
        let head = fabric.buffer(lane, Buffer::ReadBlock).get(..head_bytes(key));
        let arriving = head.and_then(|head| {
            let arriving = ArrivingBlock::of_key(head, block, key)?;
            first.copy_from_slice(&head[BLOCK_HEADER_BYTES as usize + key.len()..]);
            Some(arriving)
        });
        let mut proof = None;
        if let Some(mut arriving) = arriving {
            let missing = arriving.missing_bytes();
            if missing > rest_bytes {
                return Ok(None);
            }
            let sum = fabric.part_sum(lane, 0, (Buffer::Lent, 0, missing as u32));
            arriving.add_summed(sum, missing);
            proof = arriving.end().map(|header| (header, arriving));
        }
        let arrived = proof.as_ref().map(|(header, block)| (*header, block.expires_at_ms()));
        let is_present = handle.complete_long_read(&*fabric, hash, &read, arrived);
        let (Some(is_present), Some((header, arrived))) = (is_present, proof) else {
            return Ok(None);
        };
        if let Some(metrics) = handle.metrics() {
            let latency = fabric.now().saturating_sub(read.posted());
            metrics.add(OperationKind::Get, is_present, latency);
        }
        let version = Version::of(block.address, header.generation);
        let found = ReadValue { bytes: arrived.value_bytes(), version };
        Ok(Some(is_present.then_some(found)))
    }
}

impl<F: Fabric> PostedPut<'_, '_, F> {
    /// Evaluates the chain, which has completed, and runs the PUT to its end. No other operation
    /// may be in flight. Returns as [`RegionHandle::put`].
    pub fn complete(self) -> ProtocolResult<Option<Version>> {
        let Self { operation, put, key, value } = self;
        let endpoint = &operation.engine.endpoint;
        let result = endpoint.take_result(operation.lane).unwrap_or(Err(ChainError::Unknown));
        match operation.end_long_put(put, result, key, value)? {
            Ok(version) => Ok(Some(version)),
            Err(displaced) => operation.put_displaced(displaced),
        }
    }
}
