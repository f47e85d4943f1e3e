//! A session of the simulation: production code that the scheduler polls.

use std::hash::Hasher;

use farside_fabric::{Buffer, Endpoint, LaneId, RegionIndex};
use farside_layout::SizeClass;
use farside_protocol::allocator::BlockSource;
use farside_protocol::{
    Action, Answer, Change, ConnectionCache, Engine, Failure, LANE, Modification, OpenRegion,
    Operation, OperationError, RegionOptions, Version,
};

use crate::cluster::ClusterClient;
use crate::fabric::SimFabric;
use crate::mutant::Mutant;

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
    /// The region that the value is in, and its version there.
    pub(crate) region: RegionIndex,
    pub(crate) version: Version,
    /// When it expires, in milliseconds of the simulated wall clock; 0 for never.
    pub(crate) expiry: u64,
}

/// A session over the simulated fabric.
pub(crate) struct TestSession {
    engine: Engine<SimFabric>,
    /// The region; in a cluster, that of the shard that stays where it is.
    pub(crate) region: OpenRegion,
    /// What a client of a cluster has besides.
    pub(crate) cluster: Option<ClusterClient>,
}

impl TestSession {
    /// Reads the superblock and the directory of a region. `wall` also seeds the random numbers.
    ///
    /// # Errors
    /// The reason why the region cannot be opened.
    pub(crate) fn open(
        (fabric, lanes): (SimFabric, u16),
        index: RegionIndex,
        blocks: Box<dyn BlockSource + Send>,
        options: RegionOptions,
        locations: &ConnectionCache,
        wall: u64,
    ) -> Result<Self, Option<OperationError>> {
        let engine = Engine::new_at(fabric, lanes, wall);
        let region = engine.open(index, blocks, options, locations).map_err(error)?;
        Ok(Self { engine, region, cluster: None })
    }

    /// Opens a further region.
    ///
    /// # Errors
    /// As [`TestSession::open`].
    pub(crate) fn open_further(
        &self,
        index: RegionIndex,
        blocks: Box<dyn BlockSource + Send>,
        options: RegionOptions,
    ) -> Result<OpenRegion, Option<OperationError>> {
        let locations = ConnectionCache::default();
        self.engine.open(index, blocks, options, &locations).map_err(error)
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
    pub(crate) fn fetch_blocks(
        &self,
        region: &OpenRegion,
        class: SizeClass,
    ) -> Result<(), Option<OperationError>> {
        let taken = self.engine.endpoint.drive(self.engine.at(region).take_block(LANE, class));
        region.allocator().put_back(LANE, class, taken.map_err(error)?.0);
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
        Operation::fill(&self.engine, lane, key, value);
        self.run_staged(lane, action, (key, value)).await
    }

    /// As [`TestSession::run`], for an operation whose key and value are in the lane's buffer since
    /// an earlier run, as in the pipeline of a cluster. The earlier run was broken off.
    pub(crate) async fn run_staged(
        &self,
        lane: LaneId,
        action: Action<'_>,
        (key, value): (&[u8], &[u8]),
    ) -> Result<Reply, Option<OperationError>> {
        let moving = self.cluster.as_ref().filter(|cluster| cluster.is_moving(key));
        let opened = moving.map(|cluster| cluster.region().ok_or(None)).transpose()?;
        let region = opened.as_deref().unwrap_or(&self.region);
        if let Some(cluster) = &self.cluster {
            cluster.used.set(region.index);
        }
        self.note_ignored_trust(moving);
        region.check_key(key).map_err(Some)?;
        region.check_value(value).map_err(Some)?;
        let ((hash, _), bytes) = (region.hashed(key), (key.len(), value.len()));
        let operation = Operation::staged(self.engine.at(region), lane, hash, bytes, None);
        let performed = operation.perform(action).await;
        if let (Some(cluster), Err(Failure::Lost(_))) = (moving, &performed) {
            cluster.disconnect();
        }
        let Answer { applied, version, number, found } = performed.map_err(error)?;
        let buffer = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
        let found = found.map(|found| FoundValue {
            text: String::from_utf8_lossy(found.value_in(&buffer)).into_owned(),
            region: region.index,
            version: found.version,
            expiry: found.expires_at_ms(),
        });
        // An increment returns the number that it stored.
        let is_increment =
            matches!(action, Action::Modify(Modification { change: Change::Add(_), .. }));
        let stored = version.filter(|_| is_increment);
        let region = region.index;
        let sum = |version| FoundValue { text: number.to_string(), region, version, expiry: 0 };
        let found = found.or_else(|| stored.map(sum));
        Ok(Reply { done: applied, found })
    }

    /// Whether the client has no connection to the shard of this key.
    pub(crate) fn is_offline(&self, key: &[u8]) -> bool {
        let cluster = self.cluster.as_ref().filter(|cluster| cluster.is_moving(key));
        cluster.is_some_and(|cluster| cluster.region().is_none())
    }

    /// Lets the mutant that ignores trust count as fired, if the trust has ended.
    fn note_ignored_trust(&self, cluster: Option<&ClusterClient>) {
        let fabric = self.engine.endpoint.fabric();
        let connection = cluster.map(|cluster| cluster.connection.borrow());
        if let Some(Some(connection)) = connection.as_deref()
            && !connection.trust.holds_at(fabric.clock_shows())
        {
            fabric.has_mutant(Mutant::TrustIgnored);
        }
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
        if let Some(region) = self.cluster.as_ref().and_then(ClusterClient::region) {
            self.engine.at(&region).hash_state(hasher);
        }
    }
}

fn error(failure: Failure) -> Option<OperationError> {
    match failure {
        Failure::Error(error) => Some(*error),
        Failure::Lost(_) | Failure::NoAnswer(_) => None,
    }
}
