//! Work requests have the right fields, order and bounds, and errors the right meaning.

use super::*;
use crate::rdma::Rkeys;

const REGION: RemoteRegion = RemoteRegion {
    base_address: 0x10_0000,
    region_bytes: 4096,
    rkeys: Rkeys::whole(7),
    writable: true,
    round_trip_min_ns: 500,
};
const MEMORY: LaneMemory = {
    const fn range(address: u64, bytes: u32) -> RegisteredRange {
        RegisteredRange { address, bytes, lkey: 3 }
    }
    LaneMemory {
        buffers: [range(0x1000, 256), range(0x2000, 512), range(0x3000, 512)],
        lent: None,
        found: range(0x100, 8),
        words: range(0x108, 32),
    }
};
const INLINE_MAX: u32 = 64;

const READ: Verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 256 };
const WRITE: Verb = Verb::Write { remote: 512, from: Buffer::NewBlock, bytes: 128 };
const MARK: Verb = Verb::WriteU32 { remote: 1028, value: 9 };
const HINT: Verb = Verb::WriteWord { remote: 1024, value: 11 };
const CAS: Verb = Verb::CompareSwap { remote: 64, expected: 1, desired: 2 };

fn requests(chain: &[Verb]) -> Vec<Request> {
    (0..chain.len()).map(|at| request(chain, at, &REGION, &MEMORY, INLINE_MAX).unwrap()).collect()
}

fn error(verb: Verb, region: RemoteRegion) -> ChainError {
    request(&[verb], 0, &region, &MEMORY, INLINE_MAX).unwrap_err()
}

#[test]
fn a_put_becomes_three_requests_without_a_fence() {
    let [write, mark, cas] = requests(&[WRITE, MARK, CAS])[..] else { panic!() };
    assert_eq!((write.opcode, write.flags), (ibv_wr_opcode::IBV_WR_RDMA_WRITE, 0));
    assert_eq!((write.remote, write.address, write.bytes, write.lkey), (0x10_0200, 0x2000, 128, 3));
    assert_eq!((mark.flags, mark.address, mark.bytes), (INLINE, 0x110, 4));
    assert_eq!(mark.word, Some(9));
    assert_eq!((cas.opcode, cas.flags), (ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, SIGNALED));
    assert_eq!((cas.remote, cas.address, cas.bytes), (0x10_0040, 0x100, 8));
    assert_eq!((cas.compare_add, cas.swap), (1, 2));
}

#[test]
fn a_filled_request_has_the_fields_of_its_opcode() {
    // SAFETY: a structure of numbers and pointers.
    let mut work = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
    let mut entry = ffi::ibv_sge { addr: 0, length: 0, lkey: 0 };
    requests(&[CAS])[0].fill(&mut work, &mut entry);
    // SAFETY: this field is valid for the opcode.
    let atomic = unsafe { work.wr.atomic };
    assert_eq!(
        (atomic.remote_addr, atomic.compare_add, atomic.swap, atomic.rkey),
        (0x10_0040, 1, 2, 7)
    );
    requests(&[READ])[0].fill(&mut work, &mut entry);
    // SAFETY: this field is valid for the opcode.
    let rdma = unsafe { work.wr.rdma };
    assert_eq!((rdma.remote_addr, rdma.rkey), (0x10_0000, 7));
    assert_eq!((entry.addr, entry.length, entry.lkey), (0x1000, 256, 3));
}

#[test]
fn small_writes_are_inline_and_large_ones_are_not() {
    for (bytes, inline) in [(8, INLINE), (INLINE_MAX, INLINE), (INLINE_MAX + 8, 0)] {
        let chain = [Verb::Write { remote: 0, from: Buffer::NewBlock, bytes }, CAS];
        assert_eq!(requests(&chain)[0].flags, inline);
    }
}

#[test]
fn only_pairs_that_a_device_does_not_order_have_a_fence() {
    let fenced = |chain: &[Verb]| {
        let fence = |request: &Request| request.flags & FENCE != 0;
        requests(chain).iter().map(fence).collect::<Vec<_>>()
    };
    // Chains of the protocol.
    assert_eq!(fenced(&[WRITE, MARK, CAS, READ]), [false; 4]);
    assert_eq!(fenced(&[CAS, CAS]), [false; 2]);
    assert_eq!(fenced(&[READ, READ]), [false; 2]);
    assert_eq!(fenced(&[WRITE, CAS, READ]), [false; 3]);
    // Other chains.
    assert_eq!(fenced(&[READ, CAS]), [false, true]);
    assert_eq!(fenced(&[CAS, MARK, READ]), [false, true, false]);
    assert_eq!(fenced(&[READ, WRITE]), [false, true]);
}

#[test]
fn an_access_outside_the_region_is_refused() {
    let outside = |verb| matches!(error(verb, REGION), ChainError::Outside { .. });
    assert!(outside(Verb::CompareSwap { remote: 4, expected: 0, desired: 0 }));
    assert!(outside(Verb::WriteU32 { remote: 2, value: 0 }));
    assert!(outside(Verb::WriteU32 { remote: 4096, value: 0 }));
    assert!(outside(Verb::WriteWord { remote: 4092, value: 0 }));
    assert!(outside(Verb::Read { remote: 4096, into: Buffer::ReadBlock, bytes: 8 }));
    assert!(outside(Verb::Read { remote: u64::MAX - 7, into: Buffer::ReadBlock, bytes: 64 }));
    assert!(outside(Verb::Write { remote: 0, from: Buffer::ReadBlock, bytes: 12 }));
    let reader = RemoteRegion { writable: false, ..REGION };
    for verb in [WRITE, MARK, HINT, CAS] {
        assert_eq!(error(verb, reader), ChainError::Denied);
    }
    assert!(request(&[READ], 0, &reader, &MEMORY, INLINE_MAX).is_ok());
}

#[test]
fn a_failed_chain_counts_as_fenced_only_if_it_certainly_had_no_effect() {
    use ibv_wc_status::*;
    let put = [WRITE, MARK, CAS];
    for at in 0..put.len() {
        assert_eq!(classify_failure(IBV_WC_REM_ACCESS_ERR, &put, at), ChainError::Fenced);
        assert_eq!(classify_failure(IBV_WC_RETRY_EXC_ERR, &put, at), ChainError::Unknown);
        assert_eq!(classify_failure(IBV_WC_WR_FLUSH_ERR, &put, at), ChainError::Unknown);
        assert_eq!(classify_failure(77, &put, at), ChainError::Unknown);
    }
    // A publication of a hint, and then of a word.
    assert_eq!(classify_failure(IBV_WC_REM_ACCESS_ERR, &[CAS, CAS], 0), ChainError::Fenced);
    assert_eq!(classify_failure(IBV_WC_REM_ACCESS_ERR, &[CAS, CAS], 1), ChainError::Unknown);
    // The compare-and-swap was executed, but its word did not arrive.
    assert_eq!(
        classify_failure(IBV_WC_REM_ACCESS_ERR, &[WRITE, CAS, READ], 2),
        ChainError::Unknown
    );
    // The device may have repeated the READ after the later compare-and-swap was executed.
    assert_eq!(classify_failure(IBV_WC_REM_ACCESS_ERR, &[READ, CAS], 0), ChainError::Unknown);
    assert_eq!(classify_failure(IBV_WC_REM_ACCESS_ERR, &put, 9), ChainError::Unknown);
    for status in [IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, 99] {
        assert_eq!(classify_failure(status, &[READ, READ], 1), ChainError::Fenced);
    }
}

#[test]
fn a_work_request_id_survives_its_conversion() {
    for id in [WorkRequestId { lane: 0, verb: 0 }, WorkRequestId { lane: u16::MAX, verb: 3 }] {
        assert_eq!(WorkRequestId::from_id(id.to_id()), id);
    }
}

/// Each verb of a chain has the key of its own slice.
#[test]
fn the_verbs_of_a_chain_take_the_keys_of_their_slices() {
    const SLICE: u64 = 8 << 20;
    let keys = std::array::from_fn(|at| at as u32 + 20);
    let rkeys = Rkeys { slice_bytes: SLICE, keys };
    let region = RemoteRegion { region_bytes: 3 * SLICE, rkeys, ..REGION };
    let key_of = |verb| request(&[verb], 0, &region, &MEMORY, INLINE_MAX).map(|of| of.rkey);
    let chain = [
        Verb::Write { remote: SLICE - 128, from: Buffer::NewBlock, bytes: 256 },
        Verb::WriteU32 { remote: 2 * SLICE + 4, value: 9 },
        Verb::CompareSwap { remote: SLICE - 8, expected: 1, desired: 2 },
        Verb::CompareSwap { remote: SLICE, expected: 1, desired: 2 },
    ];
    assert_eq!(chain.map(key_of), [20, 22, 20, 21].map(Ok));
    // SAFETY: a structure of numbers and pointers.
    let mut work = unsafe { ffi::zeroed::<ffi::ibv_send_wr>() };
    let mut entry = ffi::ibv_sge { addr: 0, length: 0, lkey: 0 };
    request(&chain, 1, &region, &MEMORY, INLINE_MAX).unwrap().fill(&mut work, &mut entry);
    // SAFETY: this field is valid for the opcode.
    let rdma = unsafe { work.wr.rdma };
    assert_eq!((rdma.remote_addr, rdma.rkey), (REGION.base_address + 2 * SLICE + 4, 22));
    // The device would refuse a verb that goes beyond what is registered with its key.
    let (remote, bytes) = (SLICE - 8, (4 << 20) + 16);
    let long = Verb::Read { remote, into: Buffer::ReadBlock, bytes };
    let outside = ChainError::Outside { remote, bytes: bytes.into() };
    assert_eq!(key_of(long), Err(outside));
    let whole = RemoteRegion { rkeys: Rkeys::whole(7), ..region };
    assert_eq!(request(&[long], 0, &whole, &MEMORY, INLINE_MAX).map(|of| of.rkey), Ok(7));
}
