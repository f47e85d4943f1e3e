//! The state that a session has once for all its regions: the endpoint with its lanes, the wall
//! clock and random numbers.

use std::cell::Cell;
use std::ops::Range;

use farside_fabric::{Counters, Endpoint, Fabric, LaneId, Nanos};

use crate::random::Random;
use crate::{Action, OperationError};

/// The lane that setup and synchronous calls use.
pub const LANE: LaneId = LaneId(0);

/// The part of a session that all its regions share.
pub struct Engine<F> {
    /// Executes the chains of all lanes.
    pub endpoint: Endpoint<F>,
    /// The number of operations that can be in flight.
    pub lanes: u16,
    /// Wall clock minus the fabric's clock, in nanoseconds.
    wall_offset_ns: u64,
    /// Random numbers that keep sessions from acting in step.
    pub random: Random,
    /// Whether a pipeline uses the lanes.
    pub pipelined: Cell<bool>,
}

impl<F: Fabric> Engine<F> {
    /// An engine for this many operations in flight. The fabric has as many lanes.
    pub fn new(fabric: F, lanes: u16) -> Self {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::new_at(fabric, lanes, wall.unwrap_or_default().as_nanos() as u64)
    }

    /// [`Engine::new`] at this time of the wall clock, in nanoseconds since 1970. The time also
    /// seeds the random numbers.
    pub fn new_at(fabric: F, lanes: u16, wall: u64) -> Self {
        let wall_offset_ns = wall.wrapping_sub(fabric.now());
        let (endpoint, random) = (Endpoint::new(fabric, lanes), Random::new(wall));
        Self { endpoint, lanes, wall_offset_ns, random, pipelined: Cell::new(false) }
    }

    /// The wall clock when the fabric's clock reads `now`, in nanoseconds since 1970.
    pub fn estimated_wall_clock_ns(&self, now: Nanos) -> u64 {
        now.wrapping_add(self.wall_offset_ns)
    }

    /// Counts of the verbs of these lanes, without doorbells.
    pub fn counters_of(&self, lanes: Range<u16>) -> Counters {
        let fabric = self.endpoint.fabric();
        lanes.fold(Counters::default(), |mut sum, lane| {
            sum += *fabric.lane_counters(LaneId(lane));
            sum
        })
    }

    /// Counts of the verbs of all lanes.
    pub fn counters(&self) -> Counters {
        self.endpoint.fabric().counters()
    }

    /// Checks that the action's value, if it expires, does so at a time that a block can hold.
    ///
    /// # Errors
    /// [`OperationError::ExpiryTooLate`].
    // Without `always` the compiler makes a call of it, in every PUT.
    #[inline(always)]
    pub fn check_expiry(&self, action: Action<'_>) -> Result<(), OperationError> {
        let lifetime = action.lifetime();
        if lifetime.never_expires() {
            return Ok(());
        }
        lifetime.check(self.endpoint.fabric().wall_clock_ns())
    }
}

/// Whether a value with this expiry had expired at `posted`, when a READ or chain was posted. The
/// region executes a chain later than that, so the value had expired then as well.
#[inline]
pub(crate) fn has_expired<F: Fabric>(fabric: &F, expires_at_ms: u64, posted: Nanos) -> bool {
    expires_at_ms != 0 && is_past(fabric, expires_at_ms, posted)
}

#[cold]
fn is_past<F: Fabric>(fabric: &F, expires_at_ms: u64, posted: Nanos) -> bool {
    let since = fabric.now().saturating_sub(posted);
    let wall_ns = fabric.wall_clock_ns().saturating_sub(since);
    expires_at_ms <= wall_ns / 1_000_000
}
