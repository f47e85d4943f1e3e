//! A change of two regions, one after the other, as a change reaches the copies of a region. The
//! two regions, head and tail, hold a count each. A change raises the head's count first, then the
//! tail's.

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};

use crate::memory::{Memory, global};
use crate::mutant::Mutant;
use crate::region::{HEAD, TAIL};
use crate::session::TestSession;

fn count(memory: &Memory, region: RegionIndex) -> u64 {
    memory.word_at_offset(global(region, 0))
}

/// READs the tail's count. Raises the head's count from that value by one, then the tail's. Changes
/// nothing if the head has another count.
pub(crate) async fn raise(session: &TestSession, lane: LaneId) {
    let endpoint = session.endpoint();
    let believes_head = endpoint.fabric().has_mutant(Mutant::HeadBelieved);
    let from = if believes_head { HEAD } else { TAIL };
    let read = [Verb::Read { remote: 0, into: Buffer::Window, bytes: 8 }];
    let no_break = "no connection breaks";
    endpoint.chain(lane, from, &read, Nanos::MAX).await.expect(no_break);
    let seen = endpoint.buffer(lane, Buffer::Window).first_chunk().copied();
    let expected = u64::from_le_bytes(seen.unwrap_or_default());
    let swap = async |region| {
        let swap = [Verb::CompareSwap { remote: 0, expected, desired: expected + 1 }];
        endpoint.chain(lane, region, &swap, Nanos::MAX).await.expect(no_break) == expected
    };
    assert!(
        !swap(HEAD).await || swap(TAIL).await || believes_head,
        "the tail refused a change that the head accepted"
    );
}

/// Checks that the head's count is equal to the tail's, or one higher.
pub(crate) fn check(memory: &Memory) -> Result<(), String> {
    let (head, tail) = (count(memory, HEAD), count(memory, TAIL));
    match head.checked_sub(tail) {
        Some(0 | 1) => Ok(()),
        _ => Err(format!("the head counts {head}, the tail {tail}")),
    }
}
