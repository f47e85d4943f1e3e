//! One connection to a running server: access to the region, and the control channel.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_control::attach::{Attached, Attempts, ConnectError, ConnectOptions, FabricFactory};
use farside_control::{Role, Welcome};
use farside_fabric::{AnyFabric, Intercept, LaneId, RegionIndex, Trust, interrupt};
use farside_protocol::{ConnectionCache, Engine, Failure, OpenRegion, RegionHandle, RegionOptions};

use crate::control::{ClusterLink, Control};
use crate::{Contact, Error, Result};

/// The settings of a client's sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionOptions {
    /// Size of the client's location cache, in bytes.
    pub(crate) cache_bytes: usize,
    /// How many operations a session can have in flight.
    pub(crate) lanes: u16,
    /// Whether pipelines count the verbs of each operation.
    pub(crate) counts_operations: bool,
}

/// The engine of a session, over any fabric.
pub(crate) type SessionEngine = Engine<AnyFabric>;
/// The engine of a session, and the region that it works on.
pub(crate) type SessionRegion<'s> = RegionHandle<'s, AnyFabric>;

/// A client's connection to one run of a server. Its sessions share it.
pub(crate) struct ServerConnection {
    pub(crate) welcome: Welcome,
    factory: Box<dyn FabricFactory>,
    connect_options: ConnectOptions,
    pub(crate) control: Control,
    cache: ConnectionCache,
    /// The size of the location cache of this server's keys, in bytes.
    cache_bytes: usize,
}

impl ServerConnection {
    /// Connects, with as many attempts as the timeout allows.
    pub(crate) fn establish(
        options: &ConnectOptions,
        cache_bytes: usize,
    ) -> std::result::Result<Self, ConnectError> {
        // Of this connection: it ends with the connection.
        let options = ConnectOptions { trust: Trust::forever(), ..options.clone() };
        Self::over(options.connect()?, &options, cache_bytes, None)
    }

    /// A connection over this channel. `cluster` is what it needs to know of a cluster.
    pub(crate) fn over(
        attached: Attached,
        options: &ConnectOptions,
        cache_bytes: usize,
        cluster: Option<ClusterLink>,
    ) -> std::result::Result<Self, ConnectError> {
        let Attached { address, welcome, factory, channel, .. } = attached;
        if !options.others.is_empty() {
            tracing::info!(%address, "connected at the best address that answered");
        }
        let control = Control::start(channel, options.trust.clone(), cluster)?;
        let cache = ConnectionCache::default();
        let connect_options = ConnectOptions { address, ..options.clone() };
        Ok(Self { welcome, factory, connect_options, control, cache, cache_bytes })
    }

    /// The server's address.
    pub(crate) fn server(&self) -> String {
        self.connect_options.address.to_string()
    }

    /// Returns a fabric of this many lanes for one session, with `intercept` in front of it; `None`
    /// if the connection is lost. Its first region is the server's.
    pub(crate) fn fabric(
        &self,
        lanes: u16,
        intercept: Option<&Intercept>,
    ) -> Result<Option<AnyFabric>> {
        let fabric =
            self.with_attempts(self.connect_options.timeout, || self.factory.fabric(lanes))?;
        Ok(match (fabric, intercept) {
            (Some(fabric), Some(intercept)) => {
                Some(AnyFabric::Intercepted(intercept(Box::new(fabric), lanes)))
            }
            (fabric, _) => fabric,
        })
    }

    /// Adds the server's region to a session's fabric, in place of a former one, if there was one.
    /// `None` if the connection is lost.
    pub(crate) fn add_to(
        &self,
        fabric: &mut AnyFabric,
        replaces: Option<RegionIndex>,
        timeout: Duration,
    ) -> Result<Option<RegionIndex>> {
        self.with_attempts(timeout, || self.factory.add_to(fabric, replaces))
    }

    /// Makes attempts to connect a session. Returns `None` if the connection is lost.
    ///
    /// If the server does not answer, the connection is kept: the server may only be busy or
    /// stopped, and other sessions continue with the region meanwhile.
    fn with_attempts<T>(
        &self,
        timeout: Duration,
        mut attempt: impl FnMut() -> std::result::Result<T, ConnectError>,
    ) -> Result<Option<T>> {
        let started = Instant::now();
        let mut attempts = Attempts::within(timeout);
        loop {
            let source = match attempt() {
                Err(ConnectError::Rdma(error)) if error.is_transient() => {
                    Some(Arc::new(io::Error::other(error)))
                }
                Err(ConnectError::Unreachable { contact: Contact::Silent, source, .. }) => source,
                Err(ConnectError::Unreachable { .. }) => return Ok(None),
                made => return Ok(Some(made?)),
            };
            if self.control.is_lost() {
                return Ok(None);
            }
            let tried = started.elapsed();
            let Some(pause) = attempts.pause_after(tried) else {
                let (server, contact) = (self.server(), Contact::Silent);
                let error = ConnectError::Unreachable { server, tried, contact, source };
                return Err(error.into());
            };
            interrupt::sleep(pause);
        }
    }

    /// Opens the region of this index in a session's fabric, on this lane.
    pub(crate) async fn open_on(
        &self,
        engine: &SessionEngine,
        lane: LaneId,
        index: RegionIndex,
    ) -> std::result::Result<OpenRegion, Failure> {
        let Welcome { region_id, region_bytes, client_id, .. } = self.welcome;
        let (cache_bytes, trust) = (self.cache_bytes, self.connect_options.trust.clone());
        let options = RegionOptions { region_id, region_bytes, client_id, cache_bytes, trust };
        let blocks = Box::new(self.control.blocks());
        let region = engine.open_on(lane, index, blocks, options, &self.cache).await?;
        self.control.queue().count(region.lookups.share());
        Ok(region)
    }

    /// Checks that a writer's retry settings are fast enough for GRACE: they must leave a positive
    /// T_word (`docs/protocol.md`). The server has checked its own. A reader does not use T_word,
    /// because it relies on no proof of a word.
    pub(crate) fn check_lateness(&self, region: &OpenRegion) -> Result<()> {
        let grace_ms = region.format.grace_ms;
        let lateness_max_ns = self.connect_options.lateness_max_ns();
        let grace_ms_min = farside_layout::grace_ms_min(lateness_max_ns);
        let is_local = self.connect_options.address.is_shm();
        let is_reader = self.connect_options.role == Role::Reader;
        if is_local || is_reader || u64::from(grace_ms) >= grace_ms_min {
            return Ok(());
        }
        let lateness_ms = lateness_max_ns / 1_000_000;
        Err(Error::Lateness { lateness_ms, grace_ms, grace_ms_min })
    }
}
