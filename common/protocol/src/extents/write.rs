//! WRITEs of extents.

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Nanos, Verb};
use farside_layout::{
    BlockAddress, BlockStamp, Extent, NamedBlock, SizeClass, extend_sum, extent_data_offset,
    extent_table_bytes, seal_extent, set_extent, set_value_bytes,
};

use super::{Chain, split_at_word};
use crate::failure::Failure;
use crate::image::{Image, image_behind};
use crate::{Lifetime, Operation, ProtocolResult};

/// How many extents a chain WRITEs: two verbs each.
const EXTENTS_PER_CHAIN: usize = 2;
/// Limit on the attempts to WRITE extents of which none was in time.
const LATE_ATTEMPTS_MAX: u32 = 100;

/// The extents of a value that are written so far. Their blocks are with the operation's lane, and
/// their table is in its [`Buffer::NewBlock`], behind the images of extents.
#[derive(Clone, Copy, Debug)]
pub struct ExtentWriter {
    /// Where the images of the extents of a chain begin, in the buffer of each lane.
    images: usize,
    count: usize,
    value_bytes: u64,
}

/// The next part of a value.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) buffer: Buffer,
    /// Where it begins in the buffer.
    pub(super) at: usize,
    pub(super) bytes: usize,
    /// The bytes after its last whole word, in memory of the caller; then zeros.
    pub(super) tail: [u8; 8],
}

impl ExtentWriter {
    /// The length of the value so far, in bytes.
    pub fn value_bytes(&self) -> usize {
        self.value_bytes as usize
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// The state before the first extent. The first `used` bytes of the lane's [`Buffer::NewBlock`]
    /// keep what they have: the key, and possibly the value.
    pub(super) fn begin_extents(&self, used: usize) -> ExtentWriter {
        ExtentWriter { images: image_behind(used), count: 0, value_bytes: 0 }
    }

    /// Takes blocks for the extents of the value in this image, and WRITEs them. The image stays as
    /// it is. Returns the image of the head, whose value is the table. One round trip for each two
    /// extents. All of them are complete when the head is linked (invariant I26).
    pub(crate) async fn write_extents(
        &self,
        image: Image,
        lifetime: Lifetime,
    ) -> ProtocolResult<Image> {
        let (at, bytes) = (image.at + self.key_end(), image.value_bytes);
        let mut writer = self.begin_extents(at + bytes);
        {
            let mut fabric = self.engine.endpoint.fabric_mut();
            fabric.reserve(self.lane, Buffer::NewBlock, writer.images);
            let behind = self.image_mut(&mut *fabric, self.lane, at + bytes);
            behind[..writer.images - (at + bytes)].fill(0);
        }
        let source = Source { buffer: Buffer::NewBlock, at, bytes, tail: [0; 8] };
        self.write_parts::<1>(&mut writer, source, lifetime).await?;
        self.end_extents(&writer)
    }

    /// Completes the table. Returns the image of the head.
    pub(super) fn end_extents(&self, writer: &ExtentWriter) -> ProtocolResult<Image> {
        let head =
            Image { at: self.head_at(writer), value_bytes: extent_table_bytes(writer.count) };
        let bytes = self.key_end() + head.value_bytes;
        let mut fabric = self.engine.endpoint.fabric_mut();
        let image = self.begin_image(&mut *fabric, self.lane, head.at, bytes)?;
        set_value_bytes(&mut image[self.key_end()..], writer.value_bytes)?;
        Ok(head)
    }

    /// Where the image of the head begins in the lane's [`Buffer::NewBlock`].
    fn head_at(&self, writer: &ExtentWriter) -> usize {
        writer.images + EXTENTS_PER_CHAIN * self.image_bytes()
    }

    /// The length of an extent's image: header and key, and the last word of its part if that is
    /// not in the source.
    fn image_bytes(&self) -> usize {
        extent_data_offset(self.key_bytes) as usize + 64
    }

    /// Takes blocks for the extents of the next part of a value, and WRITEs them. Only the last
    /// part of a value may end within an extent. An error gives up all extents. Uses the
    /// operation's lane and those after it, up to `LANES`, which have the key in their buffers.
    /// Their chains share doorbells.
    pub(super) async fn write_parts<const LANES: usize>(
        &self,
        writer: &mut ExtentWriter,
        source: Source,
        lifetime: Lifetime,
    ) -> ProtocolResult<()> {
        let written = self.take_and_write::<LANES>(writer, source, lifetime).await;
        if written.is_err() {
            self.region.allocator().put_back_extents(self.lane);
        }
        written
    }

    async fn take_and_write<const LANES: usize>(
        &self,
        writer: &mut ExtentWriter,
        source: Source,
        lifetime: Lifetime,
    ) -> ProtocolResult<()> {
        let count = self.region.extent_shape.count(self.key_bytes, source.bytes as u64);
        let mut taken_at = self.now();
        for taken in 0..count {
            self.region.allocator().want(SizeClass::EXTENT, (count - taken) as u32);
            let (free, _, at) = self.handle().take_block(self.lane, SizeClass::EXTENT).await?;
            self.region.allocator().hold_extent(self.lane, free);
            taken_at = at;
        }
        let stamp = self.stamp(taken_at, lifetime);
        let (mut chains, mut posted) = ([Chain::EMPTY; LANES], [const { None }; LANES]);
        let lanes = LANES.min(usize::from(self.engine.lanes - self.lane.0)).min(count);
        self.reserve_images(writer, count, lanes);
        let lane_of = |at: usize| LaneId(self.lane.0 + at as u16);
        let (mut next, mut late) = (0, 0);
        while next < count {
            let (mut used, mut executed) = (0, [false; LANES]);
            while used < lanes && next < count {
                let chain = &mut chains[used];
                *chain = Chain { first: next, ..Chain::EMPTY };
                while next < count && self.push(lane_of(used), chain, writer, source, stamp)? {
                    next += 1;
                }
                used += 1;
            }
            while executed[..used].contains(&false) {
                let now = self.now();
                let deadline = now.saturating_add(self.region.constants.lateness_ns);
                for at in (0..used).filter(|at| !executed[*at]) {
                    let verbs = chains[at].verbs();
                    posted[at] =
                        Some(self.handle().chain_of_parts(lane_of(at), verbs, now, deadline));
                }
                late += 1;
                // All of them end before this returns, because the source is the caller's memory.
                let mut failed = None;
                for at in 0..used {
                    let Some(posted) = posted[at].take() else { continue };
                    match posted.await {
                        Ok(_) => (executed[at], late) = (true, 0),
                        Err(ChainError::Late) if late < LATE_ATTEMPTS_MAX => {}
                        // The blocks are not linked, so nothing has happened that another client
                        // can see.
                        Err(ChainError::Unknown) => failed = Some(Failure::Lost(self.region.index)),
                        Err(error) => failed = Some(self.failed(error)),
                    }
                }
                failed.map_or(Ok(()), Err)?;
            }
            for (at, chain) in chains[..used].iter().enumerate() {
                self.note_sums(lane_of(at), chain, writer, source)?;
            }
        }
        writer.count += count;
        writer.value_bytes += source.bytes as u64;
        Ok(())
    }

    /// The fields that the headers of a value's extents have alike.
    fn stamp(&self, taken_at: Nanos, lifetime: Lifetime) -> BlockStamp {
        BlockStamp {
            address: BlockAddress(0),
            generation: 0,
            writer: self.region.client_id,
            written_at_ms: self.engine.estimated_wall_clock_ns(taken_at) / 1_000_000,
            expires_at_ms: 0,
            is_pinned: lifetime.is_pinned,
        }
    }

    /// Makes room for the images of each lane's chain, and for `more` extents in the table.
    fn reserve_images(&self, writer: &ExtentWriter, more: usize, lanes: usize) {
        let mut fabric = self.engine.endpoint.fabric_mut();
        let head_at = self.head_at(writer);
        let table_bytes = extent_table_bytes(writer.count + more);
        let head_end = head_at + self.key_end() + table_bytes.next_multiple_of(8);
        fabric.reserve(self.lane, Buffer::NewBlock, head_end);
        for at in 1..lanes {
            let lane = LaneId(self.lane.0 + at as u16);
            fabric.reserve(lane, Buffer::NewBlock, head_at);
        }
    }

    /// Where a part begins in its source, and the lengths that [`split_at_word`] returns.
    fn part_of(&self, source: Source, number: usize) -> (usize, u64, u64) {
        let part_bytes = self.region.extent_shape.part_bytes(self.key_bytes) as usize;
        let start = number * part_bytes;
        let (words, rest) =
            split_at_word((source.bytes - start).min(part_bytes) as u64, source.buffer);
        (source.at + start, words, rest)
    }

    /// Adds the WRITEs of the chain's next extent: header and key, then the part of the value.
    /// Returns false if the chain has no room.
    fn push(
        &self,
        lane: LaneId,
        chain: &mut Chain,
        writer: &ExtentWriter,
        source: Source,
        stamp: BlockStamp,
    ) -> ProtocolResult<bool> {
        let number = chain.first + chain.parts;
        let (start, words, rest) = self.part_of(source, number);
        if !chain.has_room(1 + usize::from(words > 0) + usize::from(rest > 0)) {
            return Ok(false);
        }
        let free = self.region.allocator().held_extent(self.lane, writer.count + number);
        let class = SizeClass::EXTENT;
        let block = NamedBlock { address: free.address, class, generation_low: 0 };
        let block = self.region.geometry.check_block(block)?;
        let data_at = extent_data_offset(self.key_bytes) as usize;
        let image_at = writer.images + chain.parts * self.image_bytes();
        let mut fabric = self.engine.endpoint.fabric_mut();
        let image = self.begin_image(&mut *fabric, lane, image_at, self.image_bytes())?;
        let stamp = BlockStamp { address: free.address, generation: free.generation, ..stamp };
        seal_extent(image, self.key_bytes as u16, (words + rest) as u32, stamp)?;
        let (remote, from) = (block.offset(), Buffer::NewBlock);
        let bytes = self.key_end().next_multiple_of(8) as u32;
        chain.push(Verb::WritePart { remote, from, at: image_at as u32, bytes });
        let remote = remote + data_at as u64;
        if words > 0 {
            let bytes = words.next_multiple_of(8) as u32;
            chain.push(Verb::WritePart { remote, from: source.buffer, at: start as u32, bytes });
        }
        if rest > 0 {
            image[data_at..data_at + 8].copy_from_slice(&source.tail);
            let at = (image_at + data_at) as u32;
            chain.push(Verb::WritePart { remote: remote + words, from, at, bytes: 8 });
        }
        chain.parts += 1;
        Ok(true)
    }

    /// Adds the extents that a chain has written to the table.
    fn note_sums(
        &self,
        lane: LaneId,
        chain: &Chain,
        writer: &ExtentWriter,
        source: Source,
    ) -> ProtocolResult<()> {
        let table_at = self.head_at(writer) + self.key_end();
        let mut fabric = self.engine.endpoint.fabric_mut();
        let mut verbs = chain.verbs().iter().enumerate();
        for number in chain.first..chain.first + chain.parts {
            let (_, words, rest) = self.part_of(source, number);
            let (_image, mut sum) = (verbs.next(), 0);
            if words > 0
                && let Some((at, Verb::WritePart { from, at: start, bytes, .. })) = verbs.next()
            {
                sum = fabric.part_sum(lane, at, (*from, *start, *bytes), 0);
            }
            if rest > 0 {
                verbs.next();
                sum = extend_sum(sum, &source.tail);
            }
            let number = writer.count + number;
            let free = self.region.allocator().held_extent(self.lane, number);
            let table = self.image_mut(&mut *fabric, self.lane, table_at);
            set_extent(table, number, Extent::new(free, sum))?;
        }
        Ok(())
    }
}
