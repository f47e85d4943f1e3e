//! Transfers between a region and memory of the caller: without a copy if it is registered.

use std::sync::Arc;

use super::fabric::VerbsFabric;
use super::ffi::ibv_access_flags;
use super::handles::MemoryRegion;
use super::lanes::{Lane, LaneLoan};
use super::work::{RegisteredRange, buffer_of};
use crate::lane_state::{NO_VERB, Stage};
use crate::lent::{copy_summed, sum_after};
use crate::registered::Pages;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, LaneId, Lent, Verb};

/// Pages of a buffer that are registered with the fabric's device.
pub(super) struct Registration {
    /// Declared before the pages, so that it is dropped first.
    region: MemoryRegion,
    pages: Arc<Pages>,
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

    /// Takes a lane's lent memory back, and lends other memory.
    pub(super) fn replace_loan(&mut self, lane: LaneId, memory: Lent) {
        let chain = &self.lanes.all[usize::from(lane.0)].chain;
        if chain.stage != Stage::Idle && chain.uses_lent() {
            self.destroy(chain.region);
        }
        let range = self.range_of(memory.content());
        let bounces = matches!(range, Ok(None)) && memory.bytes() > 0;
        let lane = &mut self.lanes.all[usize::from(lane.0)];
        // Chains with memory that could not be registered fail.
        lane.memory.lent = range.ok().flatten();
        lane.loan = LaneLoan { memory, bounces, gathers: false };
    }

    /// Divides the memory of a chain's first verb, which is split: between the lane's buffer and
    /// registered lent memory. Memory that is not registered goes by the buffer, behind the head.
    #[cold]
    pub(super) fn split_first(&mut self, id: LaneId, verb: Verb) -> Result<(), ChainError> {
        let Lane { memory, loan, split_bytes, .. } = &mut self.lanes.all[usize::from(id.0)];
        *split_bytes = 0;
        let (Verb::ReadSplit { into: buffer, head_bytes, bytes, .. }
        | Verb::WriteSplit { from: buffer, head_bytes, bytes, .. }) = verb
        else {
            return Ok(());
        };
        let range = match memory.lent {
            Some(range) => range,
            None if loan.bounces || loan.memory.bytes() == 0 => {
                loan.gathers = verb.changes_region();
                return Ok(());
            }
            None => return Err(ChainError::Unregistered { bytes: bytes.into() }),
        };
        let own = memory.buffers[buffer as usize];
        let head = RegisteredRange { bytes: head_bytes, ..own };
        let lent = RegisteredRange { bytes: range.bytes.min(bytes - head_bytes), ..range };
        *split_bytes = lent.bytes;
        let others = bytes - head_bytes - lent.bytes;
        let end = match verb.changes_region() {
            false => {
                let address = own.address + u64::from(head_bytes);
                RegisteredRange { address, bytes: others, ..own }
            }
            true => RegisteredRange { bytes: others, ..memory.words },
        };
        self.lanes.put_word(id.0, 0, 0);
        self.lanes.set_ranges(id.0, &[head, lent, end][..2 + usize::from(others > 0)]);
        Ok(())
    }

    /// How much of a lane's buffer the first verb of a chain needs, if it is split.
    pub(super) fn own_bytes(&self, lane: LaneId, verb: Verb) -> Option<u32> {
        let lent = self.lanes.all[usize::from(lane.0)].memory.lent;
        match verb {
            Verb::ReadSplit { head_bytes, bytes, .. } => {
                Some(bytes - lent.map_or(0, |lent| lent.bytes.min(bytes - head_bytes)))
            }
            Verb::WriteSplit { head_bytes, .. } if lent.is_some() => Some(head_bytes),
            _ => None,
        }
    }

    /// Copies lent memory behind the head of a posted `WriteSplit`, once. Returns its CRC-32.
    #[cold]
    pub(super) fn gather(&mut self, id: LaneId, before: u32) -> u32 {
        let Lane { loan, chain, .. } = &mut self.lanes.all[usize::from(id.0)];
        loan.gathers = false;
        let Some(Verb::WriteSplit { from, head_bytes, bytes, .. }) = chain.verbs().first().copied()
        else {
            return 0;
        };
        let lent = loan.memory.again();
        let behind = &mut self.lanes.buffer_mut(id.0, from)[head_bytes as usize..bytes as usize];
        let (target, padding) = behind.split_at_mut(lent.bytes());
        padding.fill(0);
        copy_summed(before, lent.content(), target)
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
                    let part = self.lanes.all[usize::from(lane.0)].loan.memory.again();
                    let part = part.part(*at, *bytes);
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
    pub(super) fn sum_lent(
        &mut self,
        id: LaneId,
        verb: usize,
        (at, bytes): (u32, u32),
        before: u32,
    ) -> u32 {
        let Lane { chain, loan, split_bytes, .. } = &self.lanes.all[usize::from(id.0)];
        if loan.gathers {
            return self.gather(id, before);
        }
        let (verb, mut lent) = (chain.verbs().get(verb).copied(), loan.memory.again());
        // Of other memory an interceptor may hold the chain back, and this is a former one.
        let (buffer, from) = match verb.filter(|_| lent.is_target()) {
            Some(Verb::ReadSplit { into, head_bytes, .. }) if *split_bytes == 0 => {
                (into, head_bytes + at)
            }
            Some(Verb::ReadPart { into: buffer, at: from, .. }) if loan.bounces => (buffer, from),
            _ => return sum_after(before, lent.part(at, bytes)),
        };
        let arrived = &self.lanes.buffer(id.0, buffer)[from as usize..][..bytes as usize];
        copy_summed(before, arrived, lent.part_mut(at, bytes))
    }
}
