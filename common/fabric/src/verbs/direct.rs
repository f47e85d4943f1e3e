//! Transfers between a region and memory of the caller: without a copy if it is registered.

use std::sync::Arc;

use super::fabric::VerbsFabric;
use super::ffi::ibv_access_flags;
use super::handles::MemoryRegion;
use super::lanes::Lane;
use super::work::{RegisteredRange, buffer_of};
use crate::lane_state::{NO_VERB, Stage};
use crate::long_transfer::PART_BYTES;
use crate::registered::Pages;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, LaneId, Lent, Verb};

/// Pages of a buffer that are registered with the fabric's device.
pub(super) struct Registration {
    /// Declared before the pages, so that it is dropped first.
    region: MemoryRegion,
    pages: Arc<Pages>,
}

/// The memory that the caller has lent.
#[derive(Default)]
pub(super) struct LentState {
    pub(super) memory: Lent,
    /// Whether it is not registered. Then its parts go by the lanes' buffers.
    pub(super) bounces: bool,
}

impl VerbsFabric {
    /// Where the device finds this memory. `None` if it is in no buffer of
    /// [`crate::RegisteredBuffer`].
    pub(super) fn range_of(
        &mut self,
        memory: &[u8],
    ) -> Result<Option<RegisteredRange>, ChainError> {
        let bytes = u32::try_from(memory.len()).unwrap_or_default();
        if bytes == 0 {
            return Ok(None);
        }
        let known = self.registrations.iter().position(|known| known.pages.has(memory));
        let at = match known {
            Some(at) => at,
            None => {
                let Some(pages) = Pages::of(memory) else { return Ok(None) };
                self.register(pages)?
            }
        };
        let lkey = self.registrations[at].region.lkey();
        Ok(Some(RegisteredRange { address: memory.as_ptr() as u64, bytes, lkey }))
    }

    #[cold]
    fn register(&mut self, pages: Arc<Pages>) -> Result<usize, ChainError> {
        self.registrations.retain(|known| Arc::strong_count(&known.pages) > 1);
        let (domain, access) = (&self.lanes.domain, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE);
        // SAFETY: the pages are mapped until the registration is dropped. A device accesses them
        // only in calls that borrow the memory, and these end after the device's access.
        let region =
            unsafe { MemoryRegion::register(domain, pages.start(), pages.bytes(), access) };
        let bytes = pages.bytes() as u64;
        let region = region.map_err(|_| ChainError::Unregistered { bytes })?;
        self.registrations.push(Registration { region, pages });
        Ok(self.registrations.len() - 1)
    }

    /// Begins or ends the use of lent memory.
    pub(super) fn set_lent(&mut self, memory: Lent) {
        for number in 0..self.lanes.all.len() {
            let Lane { chain, rest, .. } = &self.lanes.all[number];
            if chain.stage != Stage::Idle && (chain.uses_lent() || rest.is_some()) {
                self.destroy(chain.region);
            }
        }
        let range = self.range_of(memory.content());
        let bounces = matches!(range, Ok(None)) && !memory.content().is_empty();
        // Chains with memory that could not be registered fail.
        let range = range.ok().flatten();
        for lane in &mut self.lanes.all {
            (lane.memory.lent, lane.rest) = (range, None);
        }
        self.lent = LentState { memory, bounces };
    }

    /// A chain whose parts in lent memory go by the lane's buffer.
    #[cold]
    pub(super) fn bounce(
        &mut self,
        lane: LaneId,
        chain: &[Verb],
    ) -> Result<[Verb; CHAIN_VERBS_MAX], ChainError> {
        let in_block = |verb: &Verb| match buffer_of(*verb) {
            Some((Buffer::ReadBlock, end)) => end.next_multiple_of(8),
            _ => 0,
        };
        let mut end = chain.iter().map(in_block).max().unwrap_or_default();
        let mut bounced = [NO_VERB; CHAIN_VERBS_MAX];
        bounced[..chain.len()].copy_from_slice(chain);
        for verb in &mut bounced[..chain.len()] {
            match verb {
                Verb::ReadPart { into: buffer @ Buffer::Lent, at, bytes, .. } => {
                    (*buffer, *at) = (Buffer::ReadBlock, end);
                    end += *bytes;
                }
                Verb::WritePart { from: buffer @ Buffer::Lent, at, bytes, .. } => {
                    if !self.lanes.provide(lane.0, Buffer::ReadBlock, (end + *bytes) as usize) {
                        return Err(ChainError::Unregistered { bytes: (*bytes).into() });
                    }
                    let part = self.lent.memory.part(*at, *bytes);
                    let copy = self.lanes.buffer_mut(lane.0, Buffer::ReadBlock);
                    copy[end as usize..][..part.len()].copy_from_slice(part);
                    (*buffer, *at) = (Buffer::ReadBlock, end);
                    end += *bytes;
                }
                _ => {}
            }
        }
        Ok(bounced)
    }

    /// The sum of a part in lent memory. Copies it there first, if it was READ to a lane's buffer.
    pub(super) fn sum_lent(&mut self, lane: LaneId, verb: usize, at: u32, bytes: u32) -> u32 {
        if let Some(rest) = &self.lanes.all[usize::from(lane.0)].rest {
            return crc32fast::hash(rest.memory.part(at, bytes));
        }
        if !self.lent.bounces {
            return crc32fast::hash(self.lent.memory.part(at, bytes));
        }
        let verb = self.lanes.all[usize::from(lane.0)].chain.verbs()[verb];
        let (Verb::ReadPart { into: buffer, at: from, .. }
        | Verb::WritePart { from: buffer, at: from, .. }) = verb
        else {
            return 0;
        };
        let arrived = &self.lanes.buffer(lane.0, buffer)[from as usize..][..bytes as usize];
        if matches!(verb, Verb::WritePart { .. }) {
            return crc32fast::hash(arrived);
        }
        let mut sum = crc32fast::Hasher::new();
        let target = self.lent.memory.part_mut(at, bytes);
        for (part, target) in arrived.chunks(PART_BYTES).zip(target.chunks_mut(PART_BYTES)) {
            sum.update(part);
            target.copy_from_slice(part);
        }
        sum.finalize()
    }
}
