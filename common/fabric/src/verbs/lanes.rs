//! The lanes of a fabric: their registered memory, and the work requests that are built once and
//! filled in for every chain.

use std::ptr::NonNull;
use std::sync::Arc;

use super::ffi;
use super::handles::ProtectionDomain;
use super::memory::Registered;
use super::work::{LaneMemory, RegisteredRange, WorkRequestId};
use crate::rdma::VerbsError;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, Counters, Nanos, RegionIndex, Verb};

/// What each buffer has at the start, in bytes; a larger verb makes it grow.
const BUFFER_BYTES: [usize; Buffer::COUNT] = [512, 4096, 4096];
/// The words in front of a lane's buffers, in whole cache lines. One takes the word that an atomic
/// verb found; for each verb one has the number that it writes.
const WORDS_BYTES: usize = ((1 + CHAIN_VERBS_MAX) * 8).next_multiple_of(64);
const NO_VERB: Verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };

/// Where a lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its buffers belong to the session.
    Idle,
    /// Waits for the doorbell.
    Posted,
    /// The device has it, and its buffers.
    Flying,
}

/// One lane.
pub(super) struct Lane {
    /// Whose the chain is.
    pub(super) region: RegionIndex,
    pub(super) chain: [Verb; CHAIN_VERBS_MAX],
    pub(super) verbs: usize,
    /// The chain's payload.
    pub(super) bytes: u64,
    /// For ever, if the chain changes nothing.
    pub(super) deadline: Nanos,
    pub(super) stage: Stage,
    /// The first error of the chain under way.
    pub(super) result: Result<u64, ChainError>,
    pub(super) memory: LaneMemory,
    /// Buffers that outgrew the arena.
    grown: [Option<Registered>; Buffer::COUNT],
    /// Buffers that the system did not let be registered.
    plain: [Option<Plain>; Buffer::COUNT],
    pub(super) counters: Counters,
}

impl Lane {
    pub(super) fn chain(&self) -> &[Verb] {
        &self.chain[..self.verbs]
    }
}

/// All lanes, and what they share.
pub(super) struct Lanes {
    pub(super) all: Box<[Lane]>,
    works: Slab<Work>,
    entries: Slab<ffi::ibv_sge>,
    pub(super) domain: Arc<ProtectionDomain>,
    /// Where lanes' memory begins. Last: nothing above is used without it.
    _arena: Registered,
}

impl Lanes {
    pub(super) fn new(domain: Arc<ProtectionDomain>, count: u16) -> Result<Self, VerbsError> {
        let lane_bytes = WORDS_BYTES + BUFFER_BYTES.iter().sum::<usize>();
        let arena = Registered::new(&domain, lane_bytes * usize::from(count))?;
        let lkey = arena.lkey();
        let lane = |number: u16| {
            let mut next = arena.start() as u64 + (lane_bytes * usize::from(number)) as u64;
            let mut take = |bytes: usize| {
                let stretch = RegisteredRange { address: next, bytes: bytes as u32, lkey };
                next += bytes as u64;
                stretch
            };
            let found = take(8);
            let words = take(WORDS_BYTES - 8);
            let buffers = BUFFER_BYTES.map(take);
            Lane {
                region: RegionIndex::FIRST,
                chain: [NO_VERB; CHAIN_VERBS_MAX],
                verbs: 0,
                bytes: 0,
                deadline: 0,
                stage: Stage::Idle,
                result: Ok(0),
                memory: LaneMemory { buffers, found, words },
                grown: Default::default(),
                plain: Default::default(),
                counters: Counters::default(),
            }
        };
        let all = (0..count).map(lane).collect();
        let places = usize::from(count) * CHAIN_VERBS_MAX;
        let entries = Slab::new(places, |_| ffi::ibv_sge { addr: 0, length: 0, lkey });
        let works = Slab::new(places, |place| {
            // SAFETY: a structure of numbers and pointers.
            let mut work = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
            let (lane, verb) = (place / CHAIN_VERBS_MAX, place % CHAIN_VERBS_MAX);
            work.wr_id = WorkRequestId { lane: lane as u16, verb: verb as u16 }.to_id();
            work.sg_list = entries.at(place);
            work.num_sge = 1;
            Work(work)
        });
        Ok(Self { all, works, entries, domain, _arena: arena })
    }

    /// The work request and the entry of a verb.
    #[inline]
    pub(super) fn work(
        &mut self,
        lane: u16,
        verb: usize,
    ) -> (&mut ffi::ibv_send_wr, &mut ffi::ibv_sge) {
        let place = usize::from(lane) * CHAIN_VERBS_MAX + verb;
        let (work, entry) = (self.works.at(place), self.entries.at(place));
        // SAFETY: alive, and borrowed from `self` alone; providers copy what they were posted.
        let Work(work) = unsafe { &mut *work };
        // SAFETY: likewise.
        let entry = unsafe { &mut *entry };
        (work, entry)
    }

    /// Where the work request of a verb is, for a list.
    #[inline]
    pub(super) fn place(&self, lane: u16, verb: usize) -> *mut ffi::ibv_send_wr {
        self.works.at(usize::from(lane) * CHAIN_VERBS_MAX + verb).cast()
    }

    /// Puts a word where the WRITE of a verb takes it from.
    #[inline]
    pub(super) fn put_word(&mut self, lane: u16, verb: usize, word: u64) {
        let words = self.all[usize::from(lane)].memory.words.address as *mut u64;
        // SAFETY: the lane has a word for each verb of a chain.
        let target = unsafe { words.add(verb) };
        // SAFETY: aligned, in the arena, and no device uses it: the lane has nothing under way.
        unsafe { target.write(word) };
    }

    /// What the lane's last atomic verb found.
    #[inline]
    pub(super) fn found(&self, lane: u16) -> u64 {
        let found = self.all[usize::from(lane)].memory.found.address as *const u64;
        // SAFETY: aligned, in the arena; volatile, because the device wrote it.
        unsafe { found.read_volatile() }
    }

    /// The content of a buffer; empty while the device has it.
    #[inline]
    pub(super) fn buffer(&self, lane: u16, buffer: Buffer) -> &[u8] {
        let lane = &self.all[usize::from(lane)];
        debug_assert_ne!(lane.stage, Stage::Flying, "the device has the buffer");
        let RegisteredRange { address, bytes, .. } = lane.memory.buffers[buffer as usize];
        let bytes = if lane.stage == Stage::Flying { 0 } else { bytes as usize };
        // SAFETY: in the arena or in memory of the lane's own, and no device uses it.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
    }

    /// The same, to change it.
    #[inline]
    pub(super) fn buffer_mut(&mut self, lane: u16, buffer: Buffer) -> &mut [u8] {
        let lane = &mut self.all[usize::from(lane)];
        debug_assert_ne!(lane.stage, Stage::Flying, "the device has the buffer");
        let RegisteredRange { address, bytes, .. } = lane.memory.buffers[buffer as usize];
        let bytes = if lane.stage == Stage::Flying { 0 } else { bytes as usize };
        // SAFETY: in the arena or in memory of the lane's own, no device uses it, and no two
        // buffers overlap.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }
    }

    /// Makes a buffer at least this long; false when the system does not let it be registered. The
    /// buffer is as long as asked for even then, and of no use to the device until less will do.
    /// False, too, while a chain of the lane is under way: its work requests name the buffer.
    #[inline]
    pub(super) fn provide(&mut self, lane: u16, buffer: Buffer, bytes: usize) -> bool {
        let of = &self.all[usize::from(lane)];
        let has_all = bytes <= of.memory.buffers[buffer as usize].bytes as usize;
        (has_all && of.plain[buffer as usize].is_none()) || self.grow(lane, buffer, bytes)
    }

    #[cold]
    fn grow(&mut self, lane: u16, buffer: Buffer, bytes: usize) -> bool {
        let of = &mut self.all[usize::from(lane)];
        if of.stage != Stage::Idle {
            return false;
        }
        let (grown, plain) = (&mut of.grown[buffer as usize], &mut of.plain[buffer as usize]);
        let stretch = &mut of.memory.buffers[buffer as usize];
        let registered = plain.as_ref().map_or(*stretch, |plain| plain.instead_of);
        if bytes <= registered.bytes as usize {
            stretch.move_to(registered);
            *plain = None;
            return true;
        }
        let bytes = bytes.next_power_of_two();
        if let Ok(memory) = Registered::new(&self.domain, bytes) {
            let (address, lkey) = (memory.start() as u64, memory.lkey());
            stretch.move_to(RegisteredRange { address, bytes: bytes as u32, lkey });
            (*plain, *grown) = (None, Some(memory));
            return true;
        }
        if bytes > stretch.bytes as usize {
            let words = Slab::new(bytes / size_of::<u64>(), |_| 0);
            let address = words.at(0) as u64;
            stretch.move_to(RegisteredRange { address, bytes: bytes as u32, lkey: 0 });
            *plain = Some(Plain { instead_of: registered, _words: words });
        }
        false
    }
}

impl RegisteredRange {
    /// The content goes along, as far as there is room.
    fn move_to(&mut self, to: Self) {
        let bytes = self.bytes.min(to.bytes) as usize;
        let (from, target) = (self.address as *const u8, to.address as *mut u8);
        // SAFETY: two stretches of a lane that has nothing under way, each as long as it says, and
        // apart: memory in use is never given to another one.
        unsafe { target.copy_from_nonoverlapping(from, bytes) };
        *self = to;
    }
}

/// Memory for a buffer that the system did not let be registered.
struct Plain {
    /// What the lane has for the device.
    instead_of: RegisteredRange,
    _words: Slab<u64>,
}

/// A work request of a lane.
#[repr(transparent)]
struct Work(ffi::ibv_send_wr);

// SAFETY: its pointers lead to other work requests and entries of the same `Lanes`, which go
// along to another thread and are reached through them alone.
unsafe impl Send for Work {}

/// Values in memory that does not move, reached by pointers that C may keep.
struct Slab<T> {
    first: NonNull<[T]>,
}

// SAFETY: it owns its values, which may go to another thread, and nothing else reaches them.
unsafe impl<T: Send> Send for Slab<T> {}

impl<T> Slab<T> {
    fn new(count: usize, value: impl FnMut(usize) -> T) -> Self {
        let values: Box<[T]> = (0..count).map(value).collect();
        Self { first: NonNull::from(Box::leak(values)) }
    }

    #[inline]
    fn at(&self, place: usize) -> *mut T {
        assert!(place < self.first.len());
        // SAFETY: within the values, by the line above.
        unsafe { self.first.as_ptr().cast::<T>().add(place) }
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        // SAFETY: leaked from a box in `new`, and taken back once.
        drop(unsafe { Box::from_raw(self.first.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;
    use std::rc::Rc;

    use super::*;

    /// Whether a type may go to another thread: its own constant goes before the trait's.
    struct Probe<T>(PhantomData<T>);

    trait Otherwise {
        const IS_SEND: bool = false;
    }

    impl<T> Otherwise for Probe<T> {}

    impl<T: Send> Probe<T> {
        const IS_SEND: bool = true;
    }

    /// Guards against a slab that took values to other threads which must stay with theirs.
    #[test]
    fn a_slab_goes_where_its_values_may_go() {
        const { assert!(Probe::<Slab<u64>>::IS_SEND && Probe::<Lanes>::IS_SEND) };
        const { assert!(!Probe::<Slab<Rc<u64>>>::IS_SEND) };
    }
}
