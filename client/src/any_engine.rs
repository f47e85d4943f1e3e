//! The one place where fabrics part: an engine over whichever the server's address names.

use std::cell::Ref;

use farside_fabric::shm::ShmFabric;
use farside_fabric::verbs::VerbsFabric;
use farside_fabric::{Buffer, Counters};
use farside_layout::Format;

use farside_protocol::Failure;
use farside_protocol::{Action, Answer, Found};
use farside_protocol::{CacheStatistics, LocationCache};
use farside_protocol::{Engine, LANE};

/// What a session works with. Everything behind it is generic over the fabric; calls are matched
/// here, once each.
#[allow(clippy::large_enum_variant, reason = "one a session")]
pub(crate) enum AnyEngine {
    Shm(Engine<ShmFabric>),
    Verbs(Engine<VerbsFabric>),
    #[cfg(feature = "around")]
    Wrapped(Engine<Box<dyn farside_fabric::Fabric + Send>>),
}

/// The same expression over whichever engine it is.
macro_rules! over {
    ($any:expr, $engine:ident => $result:expr) => {
        match $any {
            AnyEngine::Shm($engine) => $result,
            AnyEngine::Verbs($engine) => $result,
            #[cfg(feature = "around")]
            AnyEngine::Wrapped($engine) => $result,
        }
    };
}
pub(crate) use over;

impl AnyEngine {
    /// A GET, waited for; the value is in [`AnyEngine::block`].
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Found>, Failure> {
        over!(self, engine => engine.get(key))
    }

    /// One operation, waited for.
    #[inline]
    pub(crate) fn perform(
        &self,
        action: Action<'_>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Answer, Failure> {
        over!(self, engine => engine.perform(action, key, value))
    }

    /// What the last GET left in the block buffer.
    #[inline]
    pub(crate) fn block(&self) -> Ref<'_, [u8]> {
        over!(self, engine => engine.endpoint.buffer(LANE, Buffer::ReadBlock))
    }

    /// Whether a pipeline has operations on the lanes.
    #[inline]
    pub(crate) fn is_pipelined(&self) -> bool {
        over!(self, engine => engine.pipelined.get())
    }

    pub(crate) fn counters(&self) -> Counters {
        over!(self, engine => engine.counters())
    }

    pub(crate) fn cache(&self) -> &LocationCache {
        over!(self, engine => &engine.region.cache)
    }

    pub(crate) fn cache_statistics(&self) -> CacheStatistics {
        over!(self, engine => engine.region.lookups.statistics())
    }

    pub(crate) fn format(&self) -> &Format {
        over!(self, engine => &engine.region.format)
    }
}
