//! The lanes of a fabric: their registered memory, and their work requests, which are allocated
//! once and filled in for each chain.

use std::ptr::NonNull;
use std::sync::Arc;

use super::ffi;
use super::handles::ProtectionDomain;
use super::local_memory::Registered;
use super::work::{LaneMemory, RegisteredRange, WorkRequestId};
use crate::lane_state::{LaneChain, Stage};
use crate::rdma::VerbsError;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, Counters, Lent};

/// The initial length of each buffer, in bytes. A larger verb makes it grow.
const BUFFER_BYTES: [usize; Buffer::COUNT] = [512, 4096, 4096];
/// The scatter/gather entries of a work request: the three parts of a verb that is split.
pub(super) const ENTRIES_PER_WORK: usize = 3;
/// The words before a lane's buffers, in whole cache lines: one for the result of the last atomic
/// verb, and for each verb of a chain one that it writes.
const WORDS_BYTES: usize = ((1 + CHAIN_VERBS_MAX) * 8).next_multiple_of(64);

/// One lane.
pub(super) struct Lane {
    pub(super) chain: LaneChain,
    /// The first error of the chain in flight, if there is one.
    pub(super) result: Result<u64, ChainError>,
    pub(super) memory: LaneMemory,
    pub(super) loan: LaneLoan,
    /// How many bytes of the last split verb are in lent memory. The others are in a buffer.
    pub(super) split_bytes: u32,
    /// The memory of buffers that became too long for the arena.
    grown: [Option<Registered>; Buffer::COUNT],
    /// The memory of buffers that the system did not allow to be registered.
    plain: [Option<Plain>; Buffer::COUNT],
    pub(super) counters: Counters,
}

/// The memory that the caller has lent to a lane.
#[derive(Default)]
pub(super) struct LaneLoan {
    pub(super) memory: Lent,
    /// Whether it is not registered. Then its parts go by the lane's buffers.
    pub(super) bounces: bool,
    /// Whether it is still to be copied behind the head of the posted `WriteSplit`.
    pub(super) gathers: bool,
}

/// All lanes, and their memory.
pub(super) struct Lanes {
    pub(super) all: Box<[Lane]>,
    works: Slab<Work>,
    entries: Slab<ffi::ibv_sge>,
    pub(super) domain: Arc<ProtectionDomain>,
    /// The initial memory of all lanes. Declared last, so that it is dropped last.
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
                let range = RegisteredRange { address: next, bytes: bytes as u32, lkey };
                next += bytes as u64;
                range
            };
            let found = take(8);
            let words = take(WORDS_BYTES - 8);
            let buffers = BUFFER_BYTES.map(take);
            Lane {
                chain: LaneChain::NONE,
                result: Ok(0),
                memory: LaneMemory { buffers, lent: None, found, words },
                loan: LaneLoan::default(),
                split_bytes: 0,
                grown: Default::default(),
                plain: Default::default(),
                counters: Counters::default(),
            }
        };
        let all = (0..count).map(lane).collect();
        let verbs = usize::from(count) * CHAIN_VERBS_MAX;
        let entry = |_| ffi::ibv_sge { addr: 0, length: 0, lkey };
        let entries = Slab::new(verbs * ENTRIES_PER_WORK, entry);
        let works = Slab::new(verbs, |index| {
            // SAFETY: a structure of numbers and pointers.
            let mut work = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
            let (lane, verb) = (index / CHAIN_VERBS_MAX, index % CHAIN_VERBS_MAX);
            work.wr_id = WorkRequestId { lane: lane as u16, verb: verb as u16 }.to_id();
            work.sg_list = entries.at(index * ENTRIES_PER_WORK);
            work.num_sge = 1;
            Work(work)
        });
        Ok(Self { all, works, entries, domain, _arena: arena })
    }

    /// The work request and the scatter/gather entry of a verb.
    #[inline]
    pub(super) fn work(
        &mut self,
        lane: u16,
        verb: usize,
    ) -> (&mut ffi::ibv_send_wr, &mut ffi::ibv_sge) {
        let index = usize::from(lane) * CHAIN_VERBS_MAX + verb;
        let (work, entry) = (self.works.at(index), self.entries.at(index * ENTRIES_PER_WORK));
        // SAFETY: the value is alive, and borrowed from `self` only. Providers copy the requests
        // that are posted.
        let Work(work) = unsafe { &mut *work };
        // SAFETY: likewise.
        let entry = unsafe { &mut *entry };
        (work, entry)
    }

    /// Replaces the memory of a lane's first verb by these ranges.
    pub(super) fn set_ranges(&mut self, lane: u16, ranges: &[RegisteredRange]) {
        let first = usize::from(lane) * CHAIN_VERBS_MAX * ENTRIES_PER_WORK;
        for (at, range) in ranges.iter().enumerate().take(ENTRIES_PER_WORK) {
            let entry = self.entries.at(first + at);
            let RegisteredRange { address: addr, bytes: length, lkey } = *range;
            // SAFETY: the entry is alive, and accessed through `self` only.
            unsafe { entry.write(ffi::ibv_sge { addr, length, lkey }) };
        }
        self.work(lane, 0).0.num_sge = ranges.len().min(ENTRIES_PER_WORK) as i32;
    }

    /// The address of a verb's work request, for a list.
    #[inline]
    pub(super) fn work_pointer(&self, lane: u16, verb: usize) -> *mut ffi::ibv_send_wr {
        self.works.at(usize::from(lane) * CHAIN_VERBS_MAX + verb).cast()
    }

    /// Stores the word that a verb writes.
    #[inline]
    pub(super) fn put_word(&mut self, lane: u16, verb: usize, word: u64) {
        let words = self.all[usize::from(lane)].memory.words.address as *mut u64;
        // SAFETY: the lane has a word for each verb of a chain.
        let target = unsafe { words.add(verb) };
        // SAFETY: aligned and in the arena. The lane has no chain in flight, so no device uses it.
        unsafe { target.write(word) };
    }

    /// The word that the lane's last atomic verb found.
    #[inline]
    pub(super) fn found(&self, lane: u16) -> u64 {
        let found = self.all[usize::from(lane)].memory.found.address as *const u64;
        // SAFETY: aligned and in the arena. The read is volatile because the device wrote the word.
        unsafe { found.read_volatile() }
    }

    /// The content of a buffer; empty while the device may access it.
    #[inline]
    pub(super) fn buffer(&self, lane: u16, buffer: Buffer) -> &[u8] {
        let lane = &self.all[usize::from(lane)];
        debug_assert_ne!(lane.chain.stage, Stage::InFlight, "the device has the buffer");
        let RegisteredRange { address, bytes, .. } = lane.memory.buffers[buffer as usize];
        let bytes = if lane.chain.stage == Stage::InFlight { 0 } else { bytes as usize };
        // SAFETY: in the arena or in the lane's own memory, and no device uses it.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
    }

    /// As [`Lanes::buffer`], to change the content.
    #[inline]
    pub(super) fn buffer_mut(&mut self, lane: u16, buffer: Buffer) -> &mut [u8] {
        let lane = &mut self.all[usize::from(lane)];
        debug_assert_ne!(lane.chain.stage, Stage::InFlight, "the device has the buffer");
        let RegisteredRange { address, bytes, .. } = lane.memory.buffers[buffer as usize];
        let bytes = if lane.chain.stage == Stage::InFlight { 0 } else { bytes as usize };
        // SAFETY: in the arena or in the lane's own memory. No device uses it, and no two buffers
        // overlap.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }
    }

    /// Makes a buffer at least `bytes` long. Returns false if the system does not allow its memory
    /// to be registered. The buffer then still has this length, but no verb can use it before a
    /// shorter one is requested. Also returns false while a chain of the lane is posted or in
    /// flight, because its work requests have the buffer's address.
    #[inline]
    pub(super) fn provide(&mut self, lane: u16, buffer: Buffer, bytes: usize) -> bool {
        let of = &self.all[usize::from(lane)];
        let has_all = bytes <= of.memory.buffers[buffer as usize].bytes as usize;
        (has_all && of.plain[buffer as usize].is_none()) || self.grow(lane, buffer, bytes)
    }

    #[cold]
    fn grow(&mut self, lane: u16, buffer: Buffer, bytes: usize) -> bool {
        let of = &mut self.all[usize::from(lane)];
        if of.chain.stage != Stage::Idle {
            return false;
        }
        let (grown, plain) = (&mut of.grown[buffer as usize], &mut of.plain[buffer as usize]);
        let range = &mut of.memory.buffers[buffer as usize];
        let registered = plain.as_ref().map_or(*range, |plain| plain.registered);
        if bytes <= registered.bytes as usize {
            range.move_to(registered);
            *plain = None;
            return true;
        }
        let bytes = bytes.next_power_of_two();
        if let Ok(memory) = Registered::new(&self.domain, bytes) {
            let (address, lkey) = (memory.start() as u64, memory.lkey());
            range.move_to(RegisteredRange { address, bytes: bytes as u32, lkey });
            (*plain, *grown) = (None, Some(memory));
            return true;
        }
        if bytes > range.bytes as usize {
            let words = Slab::new(bytes / size_of::<u64>(), |_| 0);
            let address = words.at(0) as u64;
            range.move_to(RegisteredRange { address, bytes: bytes as u32, lkey: 0 });
            *plain = Some(Plain { registered, _words: words });
        }
        false
    }
}

impl RegisteredRange {
    /// Replaces the range by another, and copies as much of the content as fits.
    fn move_to(&mut self, to: Self) {
        let bytes = self.bytes.min(to.bytes) as usize;
        let (from, target) = (self.address as *const u8, to.address as *mut u8);
        // SAFETY: both ranges belong to a lane without a chain in flight, and have these lengths.
        // They do not overlap, because memory in use is never assigned twice.
        unsafe { target.copy_from_nonoverlapping(from, bytes) };
        *self = to;
    }
}

/// Memory of a buffer that the system did not allow to be registered.
struct Plain {
    /// The shorter registered memory of the same buffer.
    registered: RegisteredRange,
    _words: Slab<u64>,
}

/// A work request of a lane.
#[repr(transparent)]
struct Work(ffi::ibv_send_wr);

// SAFETY: the pointers lead to other work requests and entries of the same `Lanes`. These move to
// another thread together, and are accessed through `Lanes` only.
unsafe impl Send for Work {}

/// Values in memory that does not move, so that C may store pointers to them.
struct Slab<T> {
    first: NonNull<[T]>,
}

// SAFETY: it owns its values, which may move to another thread, and only it accesses them.
unsafe impl<T: Send> Send for Slab<T> {}

impl<T> Slab<T> {
    fn new(count: usize, value: impl FnMut(usize) -> T) -> Self {
        let values: Box<[T]> = (0..count).map(value).collect();
        Self { first: NonNull::from(Box::leak(values)) }
    }

    #[inline]
    fn at(&self, index: usize) -> *mut T {
        assert!(index < self.first.len());
        // SAFETY: the index is within the values, by the line above.
        unsafe { self.first.as_ptr().cast::<T>().add(index) }
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        // SAFETY: leaked from a box in `new`, and reclaimed once.
        drop(unsafe { Box::from_raw(self.first.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;
    use std::rc::Rc;

    use super::*;

    /// Whether a type is `Send`: the constant of its own has precedence over the trait's.
    struct Probe<T>(PhantomData<T>);

    trait Otherwise {
        const IS_SEND: bool = false;
    }

    impl<T> Otherwise for Probe<T> {}

    impl<T: Send> Probe<T> {
        const IS_SEND: bool = true;
    }

    /// Guards against a slab that moved values to other threads although they are not `Send`.
    #[test]
    fn a_slab_is_send_only_if_its_values_are() {
        const { assert!(Probe::<Slab<u64>>::IS_SEND && Probe::<Lanes>::IS_SEND) };
        const { assert!(!Probe::<Slab<Rc<u64>>>::IS_SEND) };
    }
}
