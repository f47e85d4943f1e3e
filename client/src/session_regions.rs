//! The regions that a session has opened: one for each shard that it has used. It opens them on
//! demand, so a session has queue pairs only to the servers that it needs.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use farside_control::cluster::Router;
use farside_fabric::{Counters, LaneId, RegionIndex};
use farside_layout::hash::KeyHash;
use farside_protocol::{CacheStatistics, LANE, OpenRegion};

use crate::client_inner::ClientInner;
use crate::connection::{ServerConnection, SessionEngine, SessionRegion};
use crate::metrics::SessionMetrics;
use crate::reconnecting::ReconnectBudget;
use crate::{Error, Result};

/// How long a session may wait until it is connected to a shard that its client is connected to. A
/// pipeline does not advance meanwhile.
pub(crate) const ADD_TIMEOUT: Duration = Duration::from_millis(300);

/// The region of a shard, and the connection that it belongs to.
pub(crate) struct OpenShard {
    pub(crate) number: usize,
    /// Declared before the connection, so that it is dropped first and gives back its blocks.
    pub(crate) region: OpenRegion,
    pub(crate) connection: Arc<ServerConnection>,
}

impl OpenShard {
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.connection.control.is_lost()
    }
}

/// The region of a shard, and those that replaced it after a loss of the connection. A pipeline
/// borrows former ones until it is dropped.
#[derive(Default)]
struct ShardSlot(OnceCell<Box<Generation>>);

struct Generation {
    shard: OpenShard,
    next: ShardSlot,
}

impl ShardSlot {
    #[inline]
    fn latest(&self) -> Option<&OpenShard> {
        let mut generation = self.0.get()?;
        while let Some(next) = generation.next.0.get() {
            generation = next;
        }
        Some(&generation.shard)
    }

    fn push(&self, shard: OpenShard) {
        let mut slot = self;
        while let Some(former) = slot.0.get() {
            slot = &former.next;
        }
        let next = ShardSlot::default();
        slot.0.get_or_init(|| Box::new(Generation { shard, next }));
    }

    /// Drops all but the latest.
    fn drop_former(&mut self) {
        while let Some(next) = self.0.get_mut().and_then(|first| first.next.0.take()) {
            self.0 = OnceCell::from(next);
        }
    }
}

/// A session's engine, and the regions that it reaches.
pub(crate) struct SessionRegions {
    /// By the number of the shard. Dropped before the engine.
    slots: Box<[ShardSlot]>,
    pub(crate) engine: SessionEngine,
    pub(crate) router: Router,
    /// The counts for the metrics of the client, if it has any.
    pub(crate) metrics: Option<SessionMetrics>,
    /// What the session had transferred by its former engines.
    former_traffic: Counters,
}

impl SessionRegions {
    /// Opens the region of one shard.
    pub(crate) fn new(client: &Arc<ClientInner>, metrics: Option<&SessionMetrics>) -> Result<Self> {
        let mut budget = ReconnectBudget::default();
        loop {
            let (number, connection) = client.first_connection()?;
            if let Some(regions) = Self::over(client, number, connection, metrics)? {
                return Ok(regions);
            }
            // A restarted server may be killed again before the region could be read.
            client.count_loss(number, &mut budget)?;
        }
    }

    /// `None` if the connection was lost meanwhile.
    fn over(
        client: &ClientInner,
        number: usize,
        connection: Arc<ServerConnection>,
        metrics: Option<&SessionMetrics>,
    ) -> Result<Option<Self>> {
        let lanes = client.lanes();
        let Some(fabric) = connection.fabric(lanes, client.intercept())? else { return Ok(None) };
        let engine = SessionEngine::new(fabric, lanes);
        let opened = connection.open_on(&engine, LANE, RegionIndex::FIRST);
        let region = match engine.endpoint.drive(opened) {
            Ok(region) => region,
            Err(failure) => {
                let error = client.handle_failure(number, &connection, failure);
                return error.map_or(Ok(None), Err);
            }
        };
        let single = || Router::single(region.hasher);
        let router = client.cluster.as_ref().map_or_else(single, |cluster| cluster.router());
        let slots: Box<[_]> = (0..client.links.len()).map(|_| ShardSlot::default()).collect();
        let former_traffic = metrics.map(|metrics| metrics.operations.traffic());
        let former_traffic = former_traffic.unwrap_or_default();
        let regions = Self { slots, engine, router, metrics: metrics.cloned(), former_traffic };
        regions.opened(number, region, connection)?;
        regions.count_traffic();
        Ok(Some(regions))
    }

    /// The key's hash, and the shard that it belongs to.
    // Always, because a call takes more instructions than the choice of a shard.
    #[inline(always)]
    pub(crate) fn route(&self, key: &[u8]) -> (KeyHash, usize) {
        let hash = self.router.hasher.hash(key);
        (hash, self.router.shard(hash))
    }

    /// The number of shards.
    pub(crate) fn shards(&self) -> usize {
        self.slots.len()
    }

    /// The region of a shard, unless it is not open or its connection is lost.
    #[inline]
    pub(crate) fn live(&self, shard: usize) -> Option<&OpenShard> {
        self.slots[shard].latest().filter(|open| !open.is_lost())
    }

    /// The last region of a shard, whose connection may be lost.
    #[inline]
    pub(crate) fn latest(&self, shard: usize) -> Option<&OpenShard> {
        self.slots[shard].latest()
    }

    /// A region that is open.
    pub(crate) fn any(&self) -> &OpenShard {
        // A session opens its first region before anything else.
        self.all().next().expect("a session has at least one region")
    }

    /// The regions of all shards that were opened.
    pub(crate) fn all(&self) -> impl Iterator<Item = &OpenShard> {
        self.slots.iter().filter_map(ShardSlot::latest)
    }

    #[inline]
    pub(crate) fn at<'s>(&'s self, open: &'s OpenShard) -> SessionRegion<'s> {
        self.engine.at(&open.region)
    }

    /// Opens the region of a shard, while no operation is in flight.
    #[cold]
    pub(crate) fn open(&mut self, client: &Arc<ClientInner>, shard: usize) -> Result<()> {
        let mut budget = ReconnectBudget::default();
        self.slots[shard].drop_former();
        loop {
            let connection = client.connection(shard)?;
            if let Some(index) = self.add(client, shard, &connection)? {
                let opened = connection.open_on(&self.engine, LANE, index);
                match self.engine.endpoint.drive(opened) {
                    Ok(region) => {
                        self.opened(shard, region, connection)?;
                        self.slots[shard].drop_former();
                        self.count_traffic();
                        return Ok(());
                    }
                    Err(failure) => {
                        let error = client.handle_failure(shard, &connection, failure);
                        error.map_or(Ok(()), Err)?;
                    }
                }
            }
            client.count_loss(shard, &mut budget)?;
        }
    }

    /// Connects the session to the region of a shard. `None` if the connection was lost meanwhile.
    pub(crate) fn add(
        &self,
        client: &ClientInner,
        shard: usize,
        connection: &ServerConnection,
    ) -> Result<Option<RegionIndex>> {
        let former = self.slots[shard].latest().map(|open| open.region.index);
        let mut fabric = self.engine.endpoint.fabric_mut();
        match connection.add_to(&mut fabric, former, ADD_TIMEOUT) {
            Err(Error::Connect(error)) => Err(client.connect_error(shard, error)),
            added => added,
        }
    }

    /// Keeps the region of a shard, which was opened over this connection.
    pub(crate) fn opened(
        &self,
        number: usize,
        mut region: OpenRegion,
        connection: Arc<ServerConnection>,
    ) -> Result<()> {
        connection.check_lateness(&region)?;
        if let Some(metrics) = &self.metrics {
            metrics.add_region(&mut region);
            // It is set already if another session uses the connection, to the same metrics.
            let _ = connection.control.queue().metrics.set(metrics.client.clone());
        }
        self.slots[number].push(OpenShard { number, region, connection });
        Ok(())
    }

    /// Drops the regions that were replaced.
    pub(crate) fn drop_former(&mut self) {
        self.slots.iter_mut().for_each(ShardSlot::drop_former);
    }

    /// The lane on which a pipeline opens regions, and waits for shards. No operation uses it.
    pub(crate) fn setup_lane(&self) -> LaneId {
        LaneId(self.engine.lanes - 1)
    }

    /// Gives the connections up if a pipeline was leaked (`mem::forget`). One of its operations may
    /// have left a PENDING word: without a goodbye the servers look for it.
    pub(crate) fn give_up_if_leaked(&self) {
        if self.engine.pipelined.get() {
            self.all().for_each(|open| open.connection.control.give_up());
        }
    }

    /// Counts what the engine has transferred beside the operations that are counted one by one. No
    /// operation may be in flight.
    pub(crate) fn count_traffic(&self) {
        if let Some(SessionMetrics { operations, .. }) = &self.metrics {
            let counted = operations.traffic() - self.former_traffic;
            operations.add_traffic(&(self.engine.counters() - counted));
        }
    }

    /// Counts of the lookups in the location caches.
    pub(crate) fn cache_statistics(&self) -> CacheStatistics {
        self.all().fold(CacheStatistics::default(), |sum, open| {
            let CacheStatistics { hits, misses } = open.region.lookups.statistics();
            CacheStatistics { hits: sum.hits + hits, misses: sum.misses + misses }
        })
    }
}

impl Drop for SessionRegions {
    fn drop(&mut self) {
        self.count_traffic();
        self.give_up_if_leaked();
    }
}
