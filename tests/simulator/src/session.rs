//! A session of the simulation: production code that the scheduler polls.

use std::hash::Hasher;

use farside_fabric::{Buffer, Endpoint, LaneId, RegionIndex};
use farside_layout::SizeClass;
use farside_protocol::allocator::BlockSource;
use farside_protocol::{
    Action, Answer, Change, ConnectionCache, Engine, Failure, LANE, Modification, OpenRegion,
    Operation, OperationError, RegionOptions, Version,
};

use crate::fabric::SimFabric;

/// The answer to an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// A GET found the key, or the change was made.
    pub(crate) done: bool,
    /// The value that a GET found, or that an exchange found instead of the expected one.
    pub(crate) found: Option<FoundValue>,
}

/// A value that an operation returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundValue {
    pub(crate) text: String,
    pub(crate) version: Version,
    /// The number of its expiry, after [`EXPIRY_BASE_MS`]; 0 for never.
    pub(crate) expiry: u64,
}

/// The expiries of touched values are later than this, in milliseconds since 1970: in the year
/// 4199. So no value expires in an execution.
pub(crate) const EXPIRY_BASE_MS: u64 = 1 << 46;

/// A session over the simulated fabric.
pub(crate) struct TestSession {
    engine: Engine<SimFabric>,
    pub(crate) region: OpenRegion,
}

impl TestSession {
    /// Reads the superblock and the directory. `wall` also seeds the random numbers.
    ///
    /// # Errors
    /// The reason why the region cannot be opened.
    pub(crate) fn open(
        (fabric, lanes): (SimFabric, u16),
        blocks: Box<dyn BlockSource + Send>,
        options: RegionOptions,
        locations: &ConnectionCache,
        wall: u64,
    ) -> Result<Self, Option<OperationError>> {
        let engine = Engine::new_at(fabric, lanes, wall);
        let region = engine.open(RegionIndex::FIRST, blocks, options, locations).map_err(error)?;
        Ok(Self { engine, region })
    }

    /// Makes INSERTs of this key blind. The next one claims this slot of the home row.
    pub(crate) fn expect_unused_slot(&self, key: &[u8], slot: usize) {
        self.engine.at(&self.region).expect_unused_slot(key, slot);
    }

    /// Returns the session's endpoint.
    pub(crate) fn endpoint(&self) -> &Endpoint<SimFabric> {
        &self.engine.endpoint
    }

    /// Requests blocks of this class before the first operation needs one.
    ///
    /// # Errors
    /// [`OperationError::OutOfSpace`].
    pub(crate) fn fetch_blocks(&self, class: SizeClass) -> Result<(), Option<OperationError>> {
        let taken =
            self.engine.endpoint.drive(self.engine.at(&self.region).take_block(LANE, class));
        self.region.allocator().put_back(LANE, class, taken.map_err(error)?.0);
        Ok(())
    }

    /// Performs one operation on a lane.
    ///
    /// # Errors
    /// The operation's error, or `None` if the connection was lost.
    pub(crate) async fn run(
        &self,
        lane: LaneId,
        action: Action<'_>,
        (key, value): (&[u8], &[u8]),
    ) -> Result<Reply, Option<OperationError>> {
        self.region.check_key(key).map_err(Some)?;
        self.region.check_value(value).map_err(Some)?;
        let operation = Operation::stage(self.engine.at(&self.region), lane, key, value);
        let Answer { applied, version, number, found } =
            operation.perform(action).await.map_err(error)?;
        let buffer = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
        let found = found.map(|found| FoundValue {
            text: String::from_utf8_lossy(found.value_in(&buffer)).into_owned(),
            version: found.version,
            expiry: found.expires_at_ms().saturating_sub(EXPIRY_BASE_MS),
        });
        // An increment returns the number that it stored.
        let is_increment =
            matches!(action, Action::Modify(Modification { change: Change::Add(_), .. }));
        let stored = version.filter(|_| is_increment);
        let sum = |version| FoundValue { text: number.to_string(), version, expiry: 0 };
        let found = found.or_else(|| stored.map(sum));
        Ok(Reply { done: applied, found })
    }

    /// Returns all free blocks to the server, as a session does on request.
    pub(crate) fn give_back(&self) {
        self.engine.at(&self.region).receive();
        self.region.allocator().give_all();
    }

    /// Mixes all state on which later operations depend into a hash: cache, free blocks and random
    /// numbers. The state of operations in flight is left out.
    pub(crate) fn hash_state(&self, hasher: &mut impl Hasher) {
        self.engine.at(&self.region).hash_state(hasher);
    }
}

fn error(failure: Failure) -> Option<OperationError> {
    match failure {
        Failure::Error(error) => Some(*error),
        Failure::Lost(_) | Failure::HalfDone { .. } | Failure::NoAnswer(_) => None,
    }
}
