//! Transfers of long values between a region and the memory of the caller, which are summed in the
//! same pass.
//!
//! A long block has a **head**, its first bytes, which is in a lane's buffer, and a **rest**, which
//! is in the memory of the caller. The parts of the rest are copied and summed one after the other.

use crate::{
    Buffer, ChainError, Fabric, LaneId, Lent, LentMemory, LentRest, Nanos, RegionIndex, Verb,
    wait_for,
};

/// The length of the parts in which a rest is copied and summed, a multiple of 8: so short that a
/// part that was copied is still in the first cache when it is summed.
pub(crate) const PART_BYTES: usize = 4096;

/// Takes the bytes of a long READ as they arrive.
pub trait ReadSink {
    /// Its memory for what follows the head, at most this many bytes, before the head has arrived.
    /// What it does not want of them is undefined afterwards. `None` if all other bytes of its
    /// memory have to stay.
    fn direct(&mut self, _bytes: usize) -> Option<&mut [u8]> {
        None
    }

    /// Looks at the head. Returns how many of the next bytes it wants.
    fn begin(&mut self, head: &[u8]) -> usize;

    /// Adds the sum of the next `bytes` that it wants, which are in its memory already.
    fn add_summed(&mut self, sum: u32, bytes: usize);

    /// Provides memory for the next `bytes` that it wants, has `fill` copy them there, and sums
    /// them.
    fn next(&mut self, bytes: usize, fill: &mut dyn FnMut(&mut [u8]));
}

/// Sums the bytes of a long WRITE as they are copied.
pub trait WriteSum {
    /// Adds the next bytes of the rest.
    fn add(&mut self, part: &[u8]);

    /// Completes the head, after all bytes of the rest have been added.
    fn end(&mut self, head: &mut [u8]);
}

/// The lengths of a long READ.
#[derive(Clone, Copy, Debug)]
pub struct LongRead {
    /// The buffer for the head.
    pub into: Buffer,
    /// The length of the head, a multiple of 8.
    pub head_bytes: u32,
    /// The length of the READ, a multiple of 8.
    pub bytes: u32,
}

/// The source of a long WRITE: the head is in the WRITE's buffer.
pub struct LongWrite<'w> {
    /// The length of the head, a multiple of 8.
    pub head_bytes: u32,
    /// The rest. The WRITE is as long as both together, rounded up to a multiple of 8.
    pub rest: &'w [u8],
    /// Completes the head.
    pub sum: &'w mut dyn WriteSum,
}

/// Executes one chain that ends in memory of the caller, and takes the memory back.
fn run_direct<F: Fabric + ?Sized>(
    fabric: &mut F,
    lane: LaneId,
    region: RegionIndex,
    (chain, deadline): (&[Verb], Nanos),
    rest: LentRest,
) -> Result<u64, ChainError> {
    /// Takes the memory back, also if a function panics.
    struct Loan<'f, F: Fabric + ?Sized>(&'f mut F);

    impl<F: Fabric + ?Sized> Drop for Loan<'_, F> {
        fn drop(&mut self) {
            // Also after the completion: a server may answer before it has all bytes.
            self.0.lend(Lent::NONE);
        }
    }

    let loan = Loan(fabric);
    loan.0.post_direct(lane, region, chain, deadline, rest);
    wait_for(loan.0, lane)
}

/// [`Fabric::run_long_read`]: to the sink's memory if the fabric takes it, otherwise by way of the
/// lane's buffer.
pub(crate) fn run_delivered<F: Fabric + ?Sized>(
    fabric: &mut F,
    lane: LaneId,
    region: RegionIndex,
    remote: u64,
    LongRead { into, head_bytes, bytes }: LongRead,
    sink: &mut dyn ReadSink,
) -> Result<(), ChainError> {
    let rest_bytes = bytes.saturating_sub(head_bytes) as usize;
    let (mut in_place, mut arrived) = (0, (0, 0));
    match sink.direct(rest_bytes) {
        Some(memory) if fabric.takes_direct(memory)? => {
            in_place = memory.len().min(rest_bytes);
            let rest = LentRest::of(head_bytes, LentMemory::Target(&mut memory[..in_place]));
            let chain = [Verb::Read { remote, into, bytes }];
            run_direct(fabric, lane, region, (&chain, Nanos::MAX), rest)?;
            arrived = fabric.arrived_sum(lane);
        }
        _ => fabric.run_read(lane, region, remote, into, bytes)?,
    }
    let buffer = &fabric.buffer(lane, into)[..bytes as usize - in_place];
    let (head, others) = buffer.split_at(head_bytes as usize);
    let wanted = sink.begin(head).min(rest_bytes);
    let copied = &others[..wanted.saturating_sub(in_place)];
    let mut left = wanted.min(in_place);
    let (sum, summed_bytes) = arrived;
    if (1..=left).contains(&summed_bytes) {
        sink.add_summed(sum, summed_bytes);
        left -= summed_bytes;
    }
    while left > 0 {
        let part_bytes = left.min(PART_BYTES);
        sink.next(part_bytes, &mut |_| ());
        left -= part_bytes;
    }
    for part in copied.chunks(PART_BYTES) {
        sink.next(part.len(), &mut |target| target.copy_from_slice(part));
    }
    Ok(())
}

/// Copies the rest of a long WRITE to the buffer, behind the head, and completes the head. Returns
/// false if the buffer cannot be used now.
fn gather<F: Fabric + ?Sized>(
    fabric: &mut F,
    lane: LaneId,
    verb: Verb,
    write: LongWrite<'_>,
) -> bool {
    let Verb::Write { from, bytes, .. } = verb else { return false };
    let LongWrite { head_bytes, rest, sum } = write;
    // If the memory is not registered, the chain fails.
    fabric.reserve(lane, from, bytes as usize);
    let image = fabric.buffer_mut(lane, from).get_mut(..bytes as usize);
    let Some((head, target)) =
        image.and_then(|image| image.split_at_mut_checked(head_bytes as usize))
    else {
        return false;
    };
    let Some((target, padding)) = target.split_at_mut_checked(rest.len()) else { return false };
    for (part, target) in rest.chunks(PART_BYTES).zip(target.chunks_mut(PART_BYTES)) {
        sum.add(part);
        target.copy_from_slice(part);
    }
    padding.fill(0);
    sum.end(head);
    true
}

/// [`Fabric::run_long_write`]: from the caller's memory if the fabric takes it, otherwise by way of
/// the lane's buffer.
pub(crate) fn run_gathered<F: Fabric + ?Sized>(
    fabric: &mut F,
    lane: LaneId,
    region: RegionIndex,
    chain: &[Verb],
    deadline: Nanos,
    write: LongWrite<'_>,
) -> Result<u64, ChainError> {
    let Some(verb @ &Verb::Write { from, .. }) = chain.first() else {
        return Err(ChainError::Busy);
    };
    let LongWrite { head_bytes, rest, .. } = write;
    if fabric.takes_direct(rest)? && fabric.reserve(lane, from, head_bytes as usize) {
        rest.chunks(PART_BYTES).for_each(|part| write.sum.add(part));
        write.sum.end(&mut fabric.buffer_mut(lane, from)[..head_bytes as usize]);
        let rest = LentRest::of(head_bytes, LentMemory::Source(rest));
        return run_direct(fabric, lane, region, (chain, deadline), rest);
    }
    let gathered = gather(fabric, lane, *verb, write);
    if gathered { fabric.run(lane, region, chain, deadline) } else { Err(ChainError::Busy) }
}
