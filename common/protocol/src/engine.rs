//! What the operations of a session share, whatever their region: the endpoint with its lanes, the
//! wall clock, random numbers.

use std::cell::Cell;

use farside_fabric::{Counters, Endpoint, Fabric, LaneId, Nanos};

use crate::{Action, Lifetime, OperationError};

/// The lane that setup and synchronous calls use.
pub const LANE: LaneId = LaneId(0);

/// What a session has once for all its regions. A client's session has one region today.
pub struct Engine<F> {
    /// The way to the regions.
    pub endpoint: Endpoint<F>,
    /// How many operations can be in flight.
    pub lanes: u16,
    /// Wall clock minus the fabric's clock, in nanoseconds.
    wall_offset_ns: u64,
    random: Cell<u64>,
    /// A pipeline has operations on the lanes.
    pub pipelined: Cell<bool>,
}

impl<F: Fabric> Engine<F> {
    /// An engine for this many operations in flight, over a fabric that has as many lanes.
    pub fn new(fabric: F, lanes: u16) -> Self {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::new_at(fabric, lanes, wall.unwrap_or_default().as_nanos() as u64)
    }

    /// [`Engine::new`] when the wall clock reads this many nanoseconds since 1970; it also seeds
    /// the random numbers.
    pub fn new_at(fabric: F, lanes: u16, wall: u64) -> Self {
        let wall_offset_ns = wall.wrapping_sub(fabric.now());
        let (endpoint, random) = (Endpoint::new(fabric, lanes), Cell::new(wall | 1));
        Self { endpoint, lanes, wall_offset_ns, random, pipelined: Cell::new(false) }
    }

    /// The wall clock, nanoseconds since 1970, by the fabric's clock.
    pub fn wall_clock_ns(&self, now: Nanos) -> u64 {
        now.wrapping_add(self.wall_offset_ns)
    }

    /// A random number below `bound`, good enough to keep sessions apart.
    pub fn random_below(&self, bound: u64) -> u64 {
        // xorshift64
        let mut state = self.random.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.random.set(state);
        state % bound.max(1)
    }

    /// The state of the random number generator.
    pub(crate) fn random(&self) -> &Cell<u64> {
        &self.random
    }

    /// What all lanes did so far.
    pub fn counters(&self) -> Counters {
        self.endpoint.fabric().counters()
    }

    /// Checks that a block can store when the action's value expires.
    #[inline]
    pub fn check_end(&self, action: Action<'_>) -> Result<(), OperationError> {
        match action.lifetime() {
            Lifetime::Forever => Ok(()),
            lifetime => lifetime.check(self.endpoint.fabric().wall_clock_ns()),
        }
    }
}
