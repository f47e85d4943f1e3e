//! The endpoint of a peer: a fabric on the region, and a hasher for keys.

use std::cell::Ref;

use farside_fabric::{Buffer, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::KeyHasher;

use super::Result;
use super::index::{KeySlots, Slot, Word, words};
use super::memory::Pieces;

/// How many bytes one WRITE zeroes.
const ZEROS_BYTES: u64 = 64 << 10;
/// The deadline of the peers' verbs, which is never reached: the published descriptions have none.
const NO_DEADLINE: Nanos = Nanos::MAX;
/// The region: peers use one region only.
const REGION: RegionIndex = RegionIndex::FIRST;
/// The lane for zeroing memory, when no other lane is in use.
const LANE: LaneId = LaneId(0);

/// A fabric on the region, and a hasher for keys.
pub struct PeerEndpoint<F> {
    /// The endpoint of the protocol.
    pub inner: Endpoint<F>,
    /// The same hash function as Farside's. Farside takes its key from the region.
    pub hasher: KeyHasher,
}

impl<F: Fabric> PeerEndpoint<F> {
    /// An endpoint over a fabric that has this number of lanes, each with buffers of this length.
    pub fn new(mut fabric: F, lanes: u16, bytes: u64) -> Self {
        for lane in (0..lanes).map(LaneId) {
            for buffer in [Buffer::Window, Buffer::NewBlock, Buffer::ReadBlock] {
                fabric.reserve(lane, buffer, bytes.max(256) as usize);
            }
        }
        let hasher = KeyHasher::new(b"of the benchmark");
        Self { inner: Endpoint::new(fabric, lanes), hasher }
    }

    /// Posts a chain and waits for it: one round trip.
    #[inline]
    pub async fn chain(&self, lane: LaneId, verbs: &[Verb]) -> Result<u64> {
        Ok(self.inner.chain(lane, REGION, verbs, NO_DEADLINE).await?)
    }

    /// Posts a chain without waiting for it; [`Endpoint::take_result`] returns its result.
    #[inline]
    pub fn post(&self, lane: LaneId, verbs: &[Verb]) {
        self.inner.fabric_mut().post(lane, REGION, verbs, NO_DEADLINE);
    }

    /// The content of a buffer. Do not hold the reference across an `.await`.
    #[inline]
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        self.inner.buffer(lane, buffer)
    }

    /// Fills the buffer of the next WRITE.
    #[inline]
    pub fn fill(&self, lane: LaneId, fill: impl FnOnce(&mut [u8])) {
        fill(self.inner.fabric_mut().buffer_mut(lane, Buffer::NewBlock));
    }

    /// Finds the first slot with a wanted word in the choices just read, from this number on.
    #[inline]
    pub fn find(
        &self,
        lane: LaneId,
        slots: &KeySlots,
        from: usize,
        wanted: impl Fn(Word) -> bool,
    ) -> Option<Slot> {
        slots.find(|buffer| words(&self.buffer(lane, buffer)), from, wanted)
    }

    /// Zeroes these pieces. Nothing else may be in flight.
    pub fn clear(&self, pieces: &Pieces) -> Result<()> {
        self.inner.fabric_mut().reserve(LANE, Buffer::NewBlock, ZEROS_BYTES as usize);
        self.fill(LANE, |image| image.fill(0));
        for (start, bytes) in pieces.stretches() {
            for at in (0..bytes).step_by(ZEROS_BYTES as usize) {
                let bytes = ZEROS_BYTES.min(bytes - at) as u32;
                let write = Verb::Write { remote: start + at, from: Buffer::NewBlock, bytes };
                self.inner.drive_lanes(self.chain(LANE, &[write]))?;
            }
        }
        Ok(())
    }
}
