//! Values with extents, of synchronous calls: READs and WRITEs go between the region and the
//! caller's memory, and several lanes share a doorbell.
//!
//! A fabric that cannot use the caller's memory transfers one extent after the other by the lane's
//! buffer.

use farside_fabric::{Buffer, Fabric, LaneId, LentMemory};
use farside_layout::hash::KeyHash;

use super::read::{Head, Parts, Value};
use super::write::{ExtentWriter, Source};
use super::{LANES_MAX, Operation, OperationError, ProtocolResult};
use crate::engine::LANE;
use crate::insert::Condition;
use crate::operation_metrics::OperationKind;
use crate::region_handle::RegionHandle;
use crate::{Action, Answer, Found, Lifetime, ReadValue, RetryState, ValueTarget, Version};

/// A part of a value that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadRange {
    /// How many bytes were read: fewer than were asked for if the value ends before.
    pub bytes: usize,
    /// The length of the whole value, in bytes.
    pub value_bytes: usize,
    /// The write that the value comes from.
    pub version: Version,
}

impl<F: Fabric> RegionHandle<'_, F> {
    /// Reads bytes of a value from `start` on, as many as fit into the target. READs only the
    /// extents concerned; a value without extents is READ as a whole. Round trips as of
    /// [`RegionHandle::get_into`], and one for each extent of which only a part is asked for.
    pub fn get_range(
        self,
        (hash, key): (KeyHash, &[u8]),
        start: usize,
        target: &mut [u8],
    ) -> ProtocolResult<Option<ReadRange>> {
        self.region.check_key(key)?;
        self.measure(OperationKind::GetRange, None, Option::is_some, || {
            self.run_get_range((hash, key), start, target)
        })
    }

    fn run_get_range(
        self,
        (hash, key): (KeyHash, &[u8]),
        start: usize,
        target: &mut [u8],
    ) -> ProtocolResult<Option<ReadRange>> {
        let operation = Operation::stage(self, LANE, (hash, key), &[]);
        operation.find_and_read(|value| {
            let (found, value_bytes, bytes) = match value {
                Value::Short(found) => {
                    let block = self.engine.endpoint.buffer(LANE, Buffer::ReadBlock);
                    let value = found.value_in(&block);
                    let rest = value.get(start..).unwrap_or_default();
                    let bytes = rest.len().min(target.len());
                    target[..bytes].copy_from_slice(&rest[..bytes]);
                    (found, value.len(), bytes)
                }
                Value::Extents(head) => {
                    let value_bytes = operation.value_bytes_of(LANE);
                    let start = (start as u64).min(value_bytes);
                    let bytes = (value_bytes - start).min(target.len() as u64) as usize;
                    let target = &mut target[..bytes];
                    match operation.read_to(head, start, target)? {
                        Some(Some(found)) => (found, value_bytes as usize, bytes),
                        missed => return Ok(missed.map(|_| None)),
                    }
                }
            };
            Ok(Some(Some(ReadRange { bytes, value_bytes, version: found.version })))
        })
    }

    /// Reads the value of the staged operation into the target.
    pub(crate) fn get_staged_into<T: ValueTarget>(
        self,
        operation: &Operation<'_, F>,
        target: &mut T,
    ) -> ProtocolResult<Option<ReadValue>> {
        let read = operation.find_and_read(|value| {
            let head = match value {
                Value::Short(found) => return Ok(Some(self.deliver(Some(found), target)?)),
                Value::Extents(head) => head,
            };
            let needed = operation.value_bytes_of(LANE) as usize;
            let bytes_max = target.bytes_max();
            // Without room this only looks whether the value is there.
            let room = target.room(needed);
            let is_too_short = room.is_none();
            let read = operation.read_to(head, 0, room.unwrap_or_default())?;
            if is_too_short && matches!(read, Some(Some(_))) {
                let bytes = bytes_max;
                return Err(OperationError::TargetTooShort { needed, bytes }.into());
            }
            let value = |found: Found| ReadValue { bytes: needed, version: found.version };
            Ok(read.map(|found| found.map(value)))
        })?;
        if read.is_none() {
            target.clear();
        }
        Ok(read)
    }

    /// Begins to write a value with extents, in parts.
    pub fn begin_value(self, (hash, key): (KeyHash, &[u8])) -> ProtocolResult<ExtentWriter> {
        self.region.check_key(key)?;
        let lanes = self.engine.lanes.min(LANES_MAX as u16);
        (0..lanes).for_each(|lane| Operation::fill(self.engine, LaneId(lane), key, &[]));
        let operation = Operation::staged(self, LANE, hash, (key.len(), 0), None);
        Ok(operation.begin_extents(operation.key_end()))
    }

    /// The length of the part of a value that an extent has, in bytes.
    pub fn part_bytes(self, key: &[u8]) -> usize {
        self.region.extent_shape.part_bytes(key.len()) as usize
    }

    /// Whether a value of this length has no extents.
    pub fn is_short(self, key: &[u8], bytes: usize) -> bool {
        let class = self.region.extent_shape.class_in_slot(key.len(), bytes);
        class.is_some_and(|class| !class.is_head())
    }

    /// Writes the next part of a value: whole extents, or its end. No other operation may use the
    /// session before [`RegionHandle::link_value`]. After an error the value is given up.
    pub fn write_value(
        self,
        writer: &mut ExtentWriter,
        (hash, key): (KeyHash, &[u8]),
        part: &[u8],
        lifetime: Lifetime,
    ) -> ProtocolResult<()> {
        let bytes = writer.value_bytes().saturating_add(part.len());
        let checked = self.region.check_value_bytes(bytes);
        checked.inspect_err(|_| self.give_up_value())?;
        let operation = Operation::staged(self, LANE, hash, (key.len(), 0), None);
        operation.write_from(writer, part, lifetime)
    }

    /// Stores the value that was written, as a PUT.
    pub fn link_value(
        self,
        writer: &ExtentWriter,
        (hash, key): (KeyHash, &[u8]),
        lifetime: Lifetime,
    ) -> ProtocolResult<Option<Version>> {
        let checked = self.engine.check_expiry(Action::Put(lifetime));
        checked.inspect_err(|_| self.give_up_value())?;
        let operation = Operation::staged(self, LANE, hash, (key.len(), 0), None);
        Ok(self.engine.endpoint.drive(operation.link(writer, lifetime))?.version)
    }

    /// Gives up a value that was written in part.
    pub fn give_up_value(self) {
        self.region.allocator().put_back_extents(LANE);
    }

    /// As [`RegionHandle::put`], for a value with extents.
    pub(crate) fn put_extents(
        self,
        lifetime: Lifetime,
        (hash, key): (KeyHash, &[u8]),
        value: &[u8],
    ) -> ProtocolResult<Option<Version>> {
        let mut writer = self.begin_value((hash, key))?;
        self.write_value(&mut writer, (hash, key), value, lifetime)?;
        self.link_value(&writer, (hash, key), lifetime)
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// Finds the key's value, and has `read` bring it. Repeats both if `read` returns `None`.
    fn find_and_read<T>(
        &self,
        mut read: impl FnMut(Value) -> ProtocolResult<Option<Option<T>>>,
    ) -> ProtocolResult<Option<T>> {
        let endpoint = &self.engine.endpoint;
        let mut tries = RetryState::default();
        let mut value = endpoint.drive(self.find_value())?;
        loop {
            let Some(found) = value else { return Ok(None) };
            if let Some(done) = read(found)? {
                return Ok(done);
            }
            value = endpoint.drive(async {
                self.try_again(&mut tries).await?;
                self.find_uncached_value().await
            })?;
        }
    }

    /// The length of the value of the lane's table, in bytes.
    fn value_bytes_of(&self, lane: LaneId) -> u64 {
        self.region.extent_tables.borrow_mut().lane(lane).value_bytes
    }

    /// READs bytes of a value from `start` on, as many as the target has. Returns as
    /// [`Operation::read_value`].
    fn read_to(
        &self,
        mut head: Head,
        start: u64,
        target: &mut [u8],
    ) -> ProtocolResult<Option<Option<Found>>> {
        let (endpoint, lanes) = (&self.engine.endpoint, self.engine.lanes.min(LANES_MAX as u16));
        let part_bytes = self.region.extent_shape.part_bytes(self.key_bytes);
        let end = start + target.len() as u64;
        // Whole parts go to the target. Of others only some bytes are wanted.
        let is_all = end == self.value_bytes_of(self.lane);
        let whole_end = if is_all { end } else { end / part_bytes * part_bytes };
        let (mut found, mut next, mut lends) = (None, start, true);
        while next < end || found.is_none() {
            let first = (next / part_bytes) as usize;
            let room = &mut target[(next - start) as usize..];
            let (read, bytes);
            if lends && next < whole_end && next.is_multiple_of(part_bytes) {
                bytes = (whole_end - next) as usize;
                let parts_end = whole_end.div_ceil(part_bytes) as usize;
                let parts = Parts { first, end: parts_end, into: Buffer::Lent, at: 0 };
                let reading = self.read_value::<LANES_MAX>(&head, parts);
                let room = &mut room[..bytes];
                match endpoint.drive_lending(lanes, LentMemory::Target(room), reading) {
                    Some(done) => read = done?,
                    None => {
                        lends = false;
                        continue;
                    }
                }
                if let Some(Some((_, tail))) = read {
                    let tail_bytes = if is_all { bytes % 8 } else { 0 };
                    room[bytes - tail_bytes..].copy_from_slice(&tail[..tail_bytes]);
                }
            } else {
                let at = head.block.class.block_bytes();
                let parts_end = first + usize::from(next < end);
                let parts = Parts { first, end: parts_end, into: Buffer::ReadBlock, at };
                read = endpoint.drive(self.read_value::<1>(&head, parts))?;
                let skipped = next - first as u64 * part_bytes;
                bytes = (part_bytes - skipped).min(end - next) as usize;
                if let Some(Some(_)) = read {
                    let block = endpoint.buffer(self.lane, Buffer::ReadBlock);
                    let part = &block[(at + skipped) as usize..];
                    room[..bytes].copy_from_slice(&part[..bytes]);
                }
            }
            let Some(Some((value, _))) = read else { return Ok(read.map(|_| None)) };
            head = head.after_read(value);
            found = Some(value);
            next += bytes as u64;
        }
        Ok(Some(found))
    }

    /// WRITEs the next part of a value.
    fn write_from(
        &self,
        writer: &mut ExtentWriter,
        part: &[u8],
        lifetime: Lifetime,
    ) -> ProtocolResult<()> {
        let (endpoint, lanes) = (&self.engine.endpoint, self.engine.lanes.min(LANES_MAX as u16));
        let (_, rest) = part.as_chunks::<8>();
        let mut tail = [0; 8];
        tail[..rest.len()].copy_from_slice(rest);
        let source = Source { buffer: Buffer::Lent, at: 0, bytes: part.len(), tail };
        let writing = self.write_parts::<LANES_MAX>(writer, source, lifetime);
        if let Some(written) = endpoint.drive_lending(lanes, LentMemory::Source(part), writing) {
            return written;
        }
        let part_bytes = self.region.extent_shape.part_bytes(self.key_bytes) as usize;
        for part in part.chunks(part_bytes) {
            let bytes = part.len();
            {
                let mut fabric = endpoint.fabric_mut();
                fabric.reserve(self.lane, Buffer::ReadBlock, bytes.next_multiple_of(8));
                let buffer = fabric.buffer_mut(self.lane, Buffer::ReadBlock);
                buffer[..bytes].copy_from_slice(part);
                buffer[bytes..bytes.next_multiple_of(8)].fill(0);
            }
            let source = Source { buffer: Buffer::ReadBlock, at: 0, bytes, tail };
            endpoint.drive(self.write_parts::<1>(writer, source, lifetime))?;
        }
        Ok(())
    }

    /// Stores the value whose extents are written.
    async fn link(&self, writer: &ExtentWriter, lifetime: Lifetime) -> ProtocolResult<Answer> {
        let head = self.end_extents(writer)?;
        let class = self.class_in_slot(writer.value_bytes())?;
        let (taken, head) = self.take_block_of(class, head).await?;
        self.store_taken(Condition::None, lifetime, taken, head).await
    }
}
