//! Fabrics that lie: each makes of the production code a twin that breaks one rule of the protocol,
//! without a switch in the code itself. A checker that does not catch a twin is worth nothing.

use farside_common::fabric::{Buffer, Nanos, Verb};

use super::memory::Memory;

/// The scratch buffers of a lane.
pub(super) type Buffers = [Vec<u64>; Buffer::COUNT];

/// What a fabric does other than it was told.
pub(super) trait Lie {
    /// Changes a chain as it is posted.
    fn post(&mut self, _chain: &mut Vec<Verb>, _buffers: &mut Buffers, _memory: &Memory) {}

    /// Changes what a chain brought.
    fn complete(
        &mut self,
        _asked: &[Verb],
        _buffers: &mut Buffers,
        _found: &mut u64,
        _memory: &Memory,
    ) {
    }

    /// What the client's clock shows.
    fn now(&self, now: Nanos) -> Nanos {
        now
    }
}
