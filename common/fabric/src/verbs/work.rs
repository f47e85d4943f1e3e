//! Translates verbs into work requests, and statuses of completions into errors. Uses no device.

use super::ffi::{self, ibv_send_flags, ibv_wc_status, ibv_wr_opcode};
use crate::rdma::RemoteRegion;
use crate::{Buffer, CHAIN_VERBS_MAX, ChainError, Verb};

const FENCE: u32 = ibv_send_flags::IBV_SEND_FENCE.0;
const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;

/// A range of registered memory.
#[derive(Clone, Copy)]
pub(super) struct RegisteredRange {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) lkey: u32,
}

impl RegisteredRange {
    /// The range from this offset on.
    fn from(self, at: u32) -> Self {
        Self { address: self.address + u64::from(at), bytes: self.bytes - at, ..self }
    }
}

/// The registered memory of a lane.
pub(super) struct LaneMemory {
    pub(super) buffers: [RegisteredRange; Buffer::COUNT],
    /// [`Buffer::Lent`], if it is registered.
    pub(super) lent: Option<RegisteredRange>,
    /// The word that the last atomic verb found.
    pub(super) found: RegisteredRange,
    /// The words that WriteWord and WriteU32 send, one for each verb of a chain.
    pub(super) words: RegisteredRange,
}

impl LaneMemory {
    /// The memory of a part.
    fn part(&self, buffer: Buffer, at: u32, bytes: u32) -> Result<RegisteredRange, ChainError> {
        let range = match buffer {
            Buffer::Lent => self.lent,
            own => Some(self.buffers[own as usize]),
        };
        let range = range.filter(|range| u64::from(at) + u64::from(bytes) <= range.bytes.into());
        range.map(|range| range.from(at)).ok_or(ChainError::Unregistered { bytes: bytes.into() })
    }
}

/// A work request without the pointers of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) opcode: ibv_wr_opcode::Type,
    pub(super) flags: u32,
    pub(super) remote: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    /// The local memory that it reads or writes.
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) lkey: u32,
    /// The key of the slice of the region in which it begins.
    pub(super) rkey: u32,
    /// The word to store at `address` before the request is posted.
    pub(super) word: Option<u64>,
}

/// Returns the work request of the verb at this index of its chain.
///
/// For the order at the region see the contract of the trait. The responder executes a WRITE before
/// all later verbs, and READs and atomics in order, except an atomic after a READ. An atomic after
/// a READ, and a WRITE after a READ or an atomic, need IBV_SEND_FENCE. It waits for all READs and
/// atomics of the queue pair (InfiniBand 1.4, 10.8.3.3, table 76). The protocol's chains have no
/// such pair, and so no fence.
#[inline]
pub(super) fn request(
    chain: &[Verb],
    at: usize,
    remote: &RemoteRegion,
    memory: &LaneMemory,
    inline_bytes_max: u32,
) -> Result<Request, ChainError> {
    let verb = chain[at];
    let mut request = Request {
        opcode: ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        flags: 0,
        remote: 0,
        compare_add: 0,
        swap: 0,
        address: memory.words.address + (at * size_of::<u64>()) as u64,
        bytes: 0,
        lkey: memory.words.lkey,
        rkey: 0,
        word: None,
    };
    let mut local = |range: RegisteredRange| {
        (request.address, request.lkey) = (range.address, range.lkey);
    };
    let (offset, bytes) = match verb {
        Verb::Read { remote, into, bytes } | Verb::ReadSplit { remote, into, bytes, .. } => {
            local(memory.buffers[into as usize]);
            request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
            (remote, bytes)
        }
        Verb::Write { remote, from, bytes } | Verb::WriteSplit { remote, from, bytes, .. } => {
            local(memory.buffers[from as usize]);
            (remote, bytes)
        }
        Verb::ReadPart { remote, into, at, bytes } => {
            local(memory.part(into, at, bytes)?);
            request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
            (remote, bytes)
        }
        Verb::WritePart { remote, from, at, bytes } => {
            local(memory.part(from, at, bytes)?);
            (remote, bytes)
        }
        Verb::WriteU32 { remote, value } => {
            request.word = Some(value.into());
            (remote, 4)
        }
        Verb::WriteWord { remote, value } => {
            request.word = Some(value);
            (remote, 8)
        }
        Verb::CompareSwap { remote, expected, desired } => {
            local(memory.found);
            request.opcode = ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
            (request.compare_add, request.swap) = (expected, desired);
            (remote, 8)
        }
    };
    request.rkey = check_inside(verb, offset, bytes, remote)?;
    (request.remote, request.bytes) = (remote.base_address + offset, bytes);
    if is_write(verb) && bytes <= inline_bytes_max {
        request.flags |= INLINE;
    }
    if chain[..at].iter().any(|before| needs_fence(*before, verb)) {
        request.flags |= FENCE;
    }
    if at + 1 == chain.len() {
        request.flags |= SIGNALED;
    }
    Ok(request)
}

impl Request {
    /// Fills in a work request of the library and its first scatter/gather entry, the only one.
    #[inline]
    pub(super) fn fill(&self, work: &mut ffi::ibv_send_wr, entry: &mut ffi::ibv_sge) {
        let rkey = self.rkey;
        *entry = ffi::ibv_sge { addr: self.address, length: self.bytes, lkey: self.lkey };
        work.num_sge = 1;
        work.opcode = self.opcode;
        work.send_flags = self.flags;
        // Assigning a union's field that needs no drop is safe. The opcode decides which is valid.
        if self.opcode == ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP {
            let (remote_addr, compare_add, swap) = (self.remote, self.compare_add, self.swap);
            work.wr.atomic = ffi::atomic_t { remote_addr, compare_add, swap, rkey };
        } else {
            work.wr.rdma = ffi::rdma_t { remote_addr: self.remote, rkey };
        }
    }
}

#[inline]
fn needs_fence(before: Verb, verb: Verb) -> bool {
    match before {
        Verb::CompareSwap { .. } => is_write(verb),
        _ => !before.changes_region() && verb.changes_region(),
    }
}

#[inline]
fn is_write(verb: Verb) -> bool {
    verb.changes_region() && !verb.is_atomic()
}

/// The buffer that a verb uses, and how many bytes of it.
#[inline]
pub(super) fn buffer_of(verb: Verb) -> Option<(Buffer, u32)> {
    match verb {
        Verb::Read { into: buffer, bytes, .. }
        | Verb::Write { from: buffer, bytes, .. }
        | Verb::ReadSplit { into: buffer, bytes, .. }
        | Verb::WriteSplit { from: buffer, bytes, .. } => Some((buffer, bytes)),
        Verb::ReadPart { into: Buffer::Lent, .. } | Verb::WritePart { from: Buffer::Lent, .. } => {
            None
        }
        Verb::ReadPart { into: buffer, at, bytes, .. }
        | Verb::WritePart { from: buffer, at, bytes, .. } => Some((buffer, at + bytes)),
        _ => None,
    }
}

/// Checks an access before it is posted, because a device that refuses one breaks the queue pair.
/// Returns its remote key.
#[inline]
fn check_inside(
    verb: Verb,
    offset: u64,
    bytes: u32,
    region: &RemoteRegion,
) -> Result<u32, ChainError> {
    if !region.writable && verb.changes_region() {
        return Err(ChainError::Denied);
    }
    let bytes = u64::from(bytes);
    let unit = if matches!(verb, Verb::WriteU32 { .. }) { 4 } else { 8 };
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= region.region_bytes);
    let is_aligned = offset.is_multiple_of(unit) && bytes.is_multiple_of(unit);
    let key = if inside && is_aligned { region.rkeys.key_for(offset, bytes) } else { None };
    key.ok_or(ChainError::Outside { remote: offset, bytes })
}

/// The error of a chain whose verb at this index completed with an error.
///
/// `Fenced` if the chain only READs, or if the peer refused a WRITE or an atomic and no atomic
/// stood before it. Then no word was swapped. Otherwise `Unknown`: an acknowledgement may have been
/// lost, or a READ refused when it was repeated, after later verbs were executed.
pub(super) fn classify_failure(
    status: ibv_wc_status::Type,
    chain: &[Verb],
    at: usize,
) -> ChainError {
    if !chain.iter().any(|verb| verb.changes_region()) {
        return ChainError::Fenced;
    }
    let refused = matches!(
        status,
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR
            | ibv_wc_status::IBV_WC_REM_INV_REQ_ERR
            | ibv_wc_status::IBV_WC_REM_OP_ERR
    );
    let before = chain.iter().take(at).any(|verb| verb.is_atomic());
    let is_read = chain.get(at).is_none_or(|verb| !verb.changes_region());
    if refused && !before && !is_read { ChainError::Fenced } else { ChainError::Unknown }
}

/// The lane and the verb of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkRequestId {
    pub(super) lane: u16,
    pub(super) verb: u16,
}

impl WorkRequestId {
    pub(super) fn to_id(self) -> u64 {
        u64::from(self.lane) | u64::from(self.verb) << 16
    }

    pub(super) fn from_id(id: u64) -> Self {
        Self { lane: id as u16, verb: (id >> 16) as u16 }
    }
}

const _: () = assert!(CHAIN_VERBS_MAX <= u16::MAX as usize);

#[cfg(test)]
mod tests;
