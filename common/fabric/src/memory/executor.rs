//! The execution of chains on a mapped region, by a client on its host or by a server's thread.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::chain_memory::ChainMemory;
use super::region::Region;
use super::words::{self, order_read_after_swap};
use crate::clock::Clock;
use crate::lent::PART_BYTES;
use crate::{Buffer, ChainError, Nanos, Verb};

/// The longest part of a WRITE between two checks of lease and clock, in words of 8 bytes.
const WRITE_WORDS_MAX: usize = 512;
/// Limit on the bytes of one verb that are prefetched.
pub(crate) const PREFETCH_BYTES_MAX: u32 = 256;

/// The word of the client table that tells whether the server accepts a client: the fence on
/// shared memory and over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The offset of the word, in bytes.
    pub offset: u64,
    /// The value of the word while the client is accepted.
    pub number: u64,
}

/// The chain of a PUT at a known location, by far the most frequent one that changes a region.
/// Without loops over its verbs it takes fewer instructions.
pub(crate) struct PutChain<'c> {
    pub(crate) verbs: &'c [Verb; 3],
    block: u64,
    from: Buffer,
    pub(crate) bytes: u32,
    mark: u64,
    mark_value: u32,
    slot: u64,
    expected: u64,
    desired: u64,
}

impl<'c> PutChain<'c> {
    #[inline(always)]
    pub(crate) fn of(chain: &'c [Verb]) -> Option<Self> {
        let verbs: &[Verb; 3] = chain.try_into().ok()?;
        let [
            Verb::Write { remote: block, from, bytes },
            Verb::WriteU32 { remote: mark, value: mark_value },
            Verb::CompareSwap { remote: slot, expected, desired },
        ] = *verbs
        else {
            return None;
        };
        Some(Self { verbs, block, from, bytes, mark, mark_value, slot, expected, desired })
    }
}

/// Executes the chains for one region, on behalf of one client.
///
/// It has a clock of its own, so that a chain needs only pointers to this and to its lane. Clocks
/// of one process differ by microseconds, and no fabric's `lateness_max_ns` is as short.
pub(crate) struct Executor {
    pub(crate) region: Arc<Region>,
    lease: Option<Lease>,
    pub(crate) clock: Clock,
}

/// The word of an executor's lease, and its value while the client is accepted. `None` without a
/// lease.
#[derive(Clone, Copy)]
struct LeaseWord<'r>(Option<(&'r AtomicU64, u64)>);

impl LeaseWord<'_> {
    #[inline]
    fn check(self) -> Result<(), ChainError> {
        match self.0 {
            Some((word, number)) if words::load(word) != number => Err(ChainError::Fenced),
            _ => Ok(()),
        }
    }
}

impl Executor {
    /// An executor with a clock of its own. Without a lease it is never fenced.
    pub(crate) fn new(region: Arc<Region>, lease: Option<Lease>) -> Self {
        Self::with_clock(region, lease, Clock::new())
    }

    /// As [`Executor::new`], with a copy of another clock.
    pub(crate) fn with_clock(region: Arc<Region>, lease: Option<Lease>, clock: Clock) -> Self {
        Self { region, lease, clock }
    }

    /// The offset of the client's lease, by which clients of a region differ; 0 without a lease.
    pub(crate) fn client(&self) -> u64 {
        self.lease.map_or(0, |lease| lease.offset)
    }

    /// Checks that the client is not fenced.
    ///
    /// # Errors
    /// [`ChainError::Fenced`].
    pub(crate) fn check_lease(&self) -> Result<(), ChainError> {
        self.lease_word()?.check()
    }

    /// The address of a WRITE of this many words, for the system to copy a part to. Checks lease
    /// and deadline, so it has to be called for each part.
    ///
    /// # Errors
    /// [`ChainError`]: the part must not be written.
    pub(crate) fn address_to_write(
        &self,
        remote: u64,
        words: usize,
        deadline: Nanos,
    ) -> Result<*mut u64, ChainError> {
        let address = self.region.address_to_change(remote, words)?;
        self.check_accepted(self.lease_word()?, Clock::roughly, deadline)?;
        Ok(address)
    }

    /// Executes a part of a WRITE.
    ///
    /// # Errors
    /// [`ChainError`], as of a WRITE.
    pub(crate) fn write_words(
        &self,
        remote: u64,
        source: &[u64],
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        self.write(remote, source, self.lease_word()?, deadline)
    }

    /// Finds the word of the lease, once for a chain. Each check loads it.
    #[inline]
    fn lease_word(&self) -> Result<LeaseWord<'_>, ChainError> {
        let Some(lease) = self.lease else { return Ok(LeaseWord(None)) };
        Ok(LeaseWord(Some((self.region.word(lease.offset)?, lease.number))))
    }

    /// Prefetches the memory of all verbs of a chain at once.
    #[inline]
    pub(crate) fn prefetch_chain(&self, chain: &[Verb]) {
        for verb in chain {
            match *verb {
                Verb::Read { remote, bytes, .. } | Verb::ReadPart { remote, bytes, .. } => {
                    self.region.prefetch(remote, bytes.min(PREFETCH_BYTES_MAX));
                }
                Verb::Write { remote, bytes, .. } | Verb::WritePart { remote, bytes, .. } => {
                    self.region.prefetch_to_change(remote, bytes.min(PREFETCH_BYTES_MAX));
                }
                Verb::ReadSplit { remote, bytes, .. } => {
                    self.region.prefetch(remote, bytes.min(PART_BYTES as u32));
                }
                Verb::WriteSplit { remote, bytes, .. } => {
                    self.region.prefetch_to_change(remote, bytes.min(PART_BYTES as u32));
                }
                Verb::WriteU32 { remote, .. }
                | Verb::WriteWord { remote, .. }
                | Verb::CompareSwap { remote, .. } => {
                    self.region.prefetch_word_to_change(remote & !7);
                }
            }
        }
    }

    /// Prefetches the memory of a PUT.
    #[inline]
    pub(crate) fn prefetch_put(&self, put: &PutChain<'_>) {
        self.region.prefetch_to_change(put.block, put.bytes.min(PREFETCH_BYTES_MAX));
        self.region.prefetch_word_to_change(put.mark & !7);
        self.region.prefetch_word_to_change(put.slot);
    }

    /// Executes the chain of a PUT, with the checks of [`Executor::execute`].
    #[inline(always)]
    pub(crate) fn put(
        &self,
        memory: &mut impl ChainMemory,
        put: &PutChain<'_>,
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        let lease = self.lease_word()?;
        self.write(put.block, memory.source(put.from, put.bytes), lease, deadline)?;
        self.mark_and_swap(put, lease, deadline)
    }

    /// Executes the last two verbs of the chain of a PUT.
    #[inline(always)]
    fn mark_and_swap(
        &self,
        put: &PutChain<'_>,
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        self.check_accepted(lease, Clock::roughly, deadline)?;
        self.region.store_half(put.mark, put.mark_value)?;
        self.check_accepted(lease, Clock::now, deadline)?;
        self.region.compare_swap(put.slot, put.expected, put.desired)
    }

    /// Executes a chain of one READ.
    #[inline(always)]
    pub(crate) fn read(
        &self,
        memory: &mut impl ChainMemory,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> Result<(), ChainError> {
        self.lease_word()?.check()?;
        self.region.read(remote, memory.target(into, bytes))
    }

    /// Executes a chain. The READs and WRITEs of `memory` are asked for in the chain's order.
    #[inline]
    pub(crate) fn execute(
        &self,
        memory: &mut impl ChainMemory,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        let (mut found, mut swapped) = (0, false);
        let lease = self.lease_word()?;
        lease.check()?;
        for (number, verb) in chain.iter().enumerate() {
            match *verb {
                Verb::Read { remote, into, bytes } => {
                    if swapped {
                        // By contract 2 this READ returns no word from before the swap.
                        order_read_after_swap::<AtomicU64>();
                    }
                    self.region.read(remote, memory.target(into, bytes))?;
                }
                Verb::Write { remote, from, bytes } => {
                    self.write(remote, memory.source(from, bytes), lease, deadline)?;
                }
                Verb::ReadPart { remote, into, at, bytes } => {
                    lease.check()?;
                    let target = memory.target_part(into, at, bytes);
                    let sum = self.region.read_summed(remote, target, 0)?;
                    memory.note_sum(number, sum);
                }
                Verb::WritePart { remote, from, at, bytes } => {
                    let source = memory.source_part(from, at, bytes);
                    let sum = self.write_summed(remote, source, lease, deadline, 0)?;
                    memory.note_sum(number, sum);
                }
                Verb::ReadSplit { remote, into, head_bytes, bytes } => {
                    // The caller of `Fabric::part_sum` knows how much of the others is needed.
                    self.region.check_range(remote, bytes as usize / size_of::<u64>())?;
                    self.region.read(remote, memory.target(into, head_bytes))?;
                }
                Verb::WriteSplit { remote, from, head_bytes, .. } => {
                    // Until then the header of the block's former content stays (invariant I9).
                    memory.end_split(|lent| {
                        self.write_rest((remote, head_bytes), lent, deadline, 0)
                    })?;
                    self.write(remote, memory.source(from, head_bytes), lease, deadline)?;
                }
                Verb::WriteU32 { remote, value } => {
                    self.check_accepted(lease, Clock::roughly, deadline)?;
                    self.region.store_half(remote, value)?;
                }
                Verb::WriteWord { remote, value } => {
                    self.check_accepted(lease, Clock::now, deadline)?;
                    self.region.store(remote, value)?;
                }
                Verb::CompareSwap { remote, expected, desired } => {
                    self.check_accepted(lease, Clock::now, deadline)?;
                    found = self.region.compare_swap(remote, expected, desired)?;
                    swapped = true;
                }
            }
        }
        Ok(found)
    }

    /// Checks lease and clock again every few kilobytes, because the memory of a fenced or late
    /// client may have another use (invariant I13).
    #[inline(always)]
    fn write(
        &self,
        remote: u64,
        source: &[u64],
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        if source.len() <= WRITE_WORDS_MAX {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            return self.region.write(remote, source);
        }
        self.write_long(remote, source, lease, deadline)
    }

    /// Checks the lease and the deadline. For a verb that changes a word of the index, `time` must
    /// be [`Clock::now`]. It reads the clock in order with other accesses, and the shortest round
    /// trip over shared memory relies on that. For other verbs a reading accurate to a microsecond
    /// is enough, because every fabric's `lateness_max_ns` is much longer.
    #[inline]
    fn check_accepted(
        &self,
        lease: LeaseWord<'_>,
        time: impl Fn(&Clock) -> Nanos,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        lease.check()?;
        if time(&self.clock) > deadline { Err(ChainError::Late) } else { Ok(()) }
    }

    #[cold]
    fn write_long(
        &self,
        remote: u64,
        source: &[u64],
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        // Before the first part, because a verb outside the region is not executed at all.
        self.region.check_range(remote, source.len())?;
        let mut offset = remote;
        for part in source.chunks(WRITE_WORDS_MAX) {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            self.region.write(offset, part)?;
            offset += size_of_val(part) as u64;
        }
        Ok(())
    }

    /// WRITEs all but the head of a `WriteSplit`. Returns the CRC-32 `before`, continued over the
    /// lent memory.
    ///
    /// # Errors
    /// [`ChainError`], as of a WRITE.
    pub(crate) fn write_rest(
        &self,
        (remote, head_bytes): (u64, u32),
        lent: &[u8],
        deadline: Nanos,
        before: u32,
    ) -> Result<u32, ChainError> {
        let rest = remote + u64::from(head_bytes);
        self.write_summed(rest, lent, self.lease_word()?, deadline, before)
    }

    /// WRITEs bytes with the checks of [`Executor::write`]. Returns their CRC-32.
    fn write_summed(
        &self,
        remote: u64,
        source: &[u8],
        lease: LeaseWord<'_>,
        deadline: Nanos,
        before: u32,
    ) -> Result<u32, ChainError> {
        let mut sum = crc32fast::Hasher::new_with_initial(before);
        self.region.write_parts(remote, source, |part| {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            sum.update(part);
            Ok(())
        })?;
        Ok(sum.finalize())
    }
}
