//! The raw verbs of a whole value. If the value has extents, these are READs or WRITEs of as many
//! bytes, in parts of the same lengths, and in short chains as a client's.
//!
//! The chains follow each other, as those of one GET or PUT do. Each has a lane of its own, and
//! each part a buffer. So the memory on the client's side is as long as the value, too.

use std::time::{Duration, Instant};

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, RegionIndex, Verb};
use farside_layout::{BLOCK_HEADER_BYTES, ExtentShape, SizeClass, extent_data_offset};

use super::RawVerb;
use super::measure::STRIDE;
use crate::Result;
use crate::keys::KEY_BYTES;

/// How many parts are READ in a chain: one for each buffer of a lane. A GET READs one more.
const READS_PER_CHAIN: usize = 3;
/// How many parts are WRITten in a chain, as by a PUT.
const WRITES_PER_CHAIN: usize = 2;
/// The buffers of the parts of a chain.
const BUFFERS: [Buffer; READS_PER_CHAIN] = [Buffer::NewBlock, Buffer::ReadBlock, Buffer::Window];
/// Limit on the attempts of a chain that the system did not run in time.
const LATE_ATTEMPTS_MAX: u32 = 100;
/// A place in a chain that no verb has yet.
const NO_VERB: Verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };
const REGION: RegionIndex = RegionIndex::FIRST;

/// The blocks that hold the content of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ValueBlocks {
    /// The length of the value, in bytes: a multiple of 8.
    pub(super) value_bytes: u64,
    /// Their class: that of extents, if the value has any.
    pub(super) class: SizeClass,
    /// How many they are.
    pub(super) count: usize,
    /// How many bytes of the value each of them holds, except for the last.
    part_bytes: u64,
}

impl ValueBlocks {
    /// The blocks of a value of this length, which is a multiple of 8; `None` if it is too long.
    pub(super) fn of(value_bytes: u64) -> Option<Self> {
        let shape = ExtentShape::OF_REGIONS;
        let in_slot = shape.class_in_slot(KEY_BYTES, value_bytes as usize)?;
        let (class, count, part_bytes) = match in_slot.is_head() {
            false => (in_slot, 1, value_bytes),
            true => {
                let count = shape.count(KEY_BYTES, value_bytes);
                (SizeClass::EXTENT, count, shape.part_bytes(KEY_BYTES))
            }
        };
        Some(Self { value_bytes, class, count, part_bytes })
    }

    /// Whether the value has extents.
    pub(super) fn are_extents(self) -> bool {
        self.class == SizeClass::EXTENT
    }

    /// The number of lanes that its chains need.
    pub(super) fn lanes(self) -> u16 {
        self.count.div_ceil(WRITES_PER_CHAIN) as u16
    }

    /// The memory of the blocks, in bytes.
    pub(super) fn bytes(self) -> u64 {
        self.count as u64 * self.class.block_bytes()
    }

    /// Where the verbs access a block, in bytes after its header: where the client does, in an
    /// extent.
    pub(super) fn offset(self) -> u64 {
        match self.are_extents() {
            false => 0,
            true => extent_data_offset(KEY_BYTES) - BLOCK_HEADER_BYTES,
        }
    }

    /// The length of the part with this number, in bytes.
    fn part(self, number: usize) -> u32 {
        (self.value_bytes - number as u64 * self.part_bytes).min(self.part_bytes) as u32
    }

    /// READs or WRITEs whole values, one after the other. Returns values a second. Each has
    /// [`ValueBlocks::count`] of the targets, which are offsets of memory that may be overwritten.
    pub(super) fn measure<F: Fabric>(
        self,
        fabric: &mut F,
        verb: RawVerb,
        targets: &[u64],
        time: Duration,
    ) -> Result<f64> {
        let (started, mut done, mut next) = (Instant::now(), 0, 0);
        let values = targets.len() / self.count;
        loop {
            next = (next + STRIDE) % values;
            self.transfer(fabric, verb, &targets[next * self.count..][..self.count])?;
            done += 1;
            let elapsed = started.elapsed();
            if elapsed >= time {
                return Ok(f64::from(done) / elapsed.as_secs_f64());
            }
        }
    }

    /// READs or WRITEs all parts of a value.
    fn transfer<F: Fabric>(self, fabric: &mut F, verb: RawVerb, targets: &[u64]) -> Result<()> {
        let is_read = verb == RawVerb::Read;
        let per_chain = if is_read { READS_PER_CHAIN } else { WRITES_PER_CHAIN };
        for (number, targets) in targets.chunks(per_chain).enumerate() {
            let lane = LaneId(number as u16);
            let mut chain = [NO_VERB; READS_PER_CHAIN];
            for (at, remote) in targets.iter().copied().enumerate() {
                let (bytes, buffer) = (self.part(number * per_chain + at), BUFFERS[at]);
                fabric.reserve(lane, buffer, bytes as usize);
                chain[at] = match is_read {
                    true => Verb::Read { remote, into: buffer, bytes },
                    false => Verb::Write { remote, from: buffer, bytes },
                };
            }
            run(fabric, lane, &chain[..targets.len()])?;
        }
        Ok(())
    }
}

/// Executes a chain, again if it was late.
fn run<F: Fabric>(fabric: &mut F, lane: LaneId, chain: &[Verb]) -> Result<()> {
    let mut attempts = 1;
    loop {
        let deadline = fabric.now() + fabric.timing(REGION).lateness_max_ns;
        match fabric.run(lane, REGION, chain, deadline) {
            Ok(_) => return Ok(()),
            Err(ChainError::Late) if attempts < LATE_ATTEMPTS_MAX => attempts += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use farside_fabric::memory::Region;
    use farside_fabric::shm::ShmFabric;
    use farside_layout::{BLOCK_BYTES_MAX, VALUE_BYTES_LIMIT, block_bytes};

    use super::*;

    #[test]
    fn the_parts_of_a_value_have_its_bytes() {
        let short = BLOCK_BYTES_MAX - block_bytes(KEY_BYTES, 0);
        for value_bytes in [8, 1 << 20, short, short + 8, 64 << 20, VALUE_BYTES_LIMIT] {
            let blocks = ValueBlocks::of(value_bytes).unwrap();
            assert_eq!(blocks.are_extents(), value_bytes > short);
            let parts = (0..blocks.count).map(|number| blocks.part(number));
            assert_eq!(parts.clone().map(u64::from).sum::<u64>(), value_bytes);
            let start = BLOCK_HEADER_BYTES + blocks.offset();
            let room = (blocks.class.block_bytes() - start) as u32;
            assert!(parts.clone().all(|part| 0 < part && part <= room && part.is_multiple_of(8)));
        }
        assert_eq!(ValueBlocks::of(VALUE_BYTES_LIMIT + 8), None);
    }

    #[test]
    fn each_part_is_written_to_its_target_and_read_from_it() {
        let blocks = ValueBlocks::of(5 << 20).unwrap();
        assert_eq!(blocks.count, 6);
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let mut fabric = ShmFabric::new(region.clone(), None, blocks.lanes());
        let targets: Vec<u64> = (1..7).map(|n| n << 20).collect();
        for lane in 0..blocks.lanes() {
            for buffer in &BUFFERS[..WRITES_PER_CHAIN] {
                fabric.reserve(LaneId(lane), *buffer, 1 << 20);
                fabric.buffer_mut(LaneId(lane), *buffer).fill(lane as u8 + 1);
            }
        }
        blocks.transfer(&mut fabric, RawVerb::Write, &targets).unwrap();
        for (number, target) in targets.iter().enumerate() {
            let last = target + u64::from(blocks.part(number)) - 8;
            let expected = 0x0101_0101_0101_0101 * (number as u64 / 2 + 1);
            for (at, expected) in [(*target, expected), (last, expected), (last + 8, 0)] {
                assert_eq!(region.load(at).unwrap(), expected, "part {number} at {at}");
            }
        }
        blocks.transfer(&mut fabric, RawVerb::Read, &targets).unwrap();
        for (number, expected) in [1u8, 1, 2, 2, 3, 3].into_iter().enumerate() {
            let lane = LaneId((number / READS_PER_CHAIN) as u16);
            let buffer = fabric.buffer(lane, BUFFERS[number % READS_PER_CHAIN]);
            assert_eq!(buffer[0], expected, "part {number}");
        }
        assert!(
            blocks.measure(&mut fabric, RawVerb::Read, &targets, Duration::ZERO).unwrap() > 0.0
        );
    }
}
