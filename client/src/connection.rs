//! One connection to a running server: access to the region, and the control channel.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use farside_control::attach::{Attached, Attempts, ConnectError, ConnectOptions, FabricFactory};
use farside_control::{Role, Welcome};
use farside_fabric::{AnyFabric, Intercept, RegionIndex};
use farside_protocol::{ConnectionCache, Engine, Failure, OpenRegion, RegionHandle, RegionOptions};

use crate::control::Control;
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
}

impl ServerConnection {
    /// Connects, with as many attempts as the timeout allows.
    pub(crate) fn establish(options: &ConnectOptions) -> std::result::Result<Self, ConnectError> {
        let Attached { address, welcome, factory, channel } = options.connect()?;
        if !options.others.is_empty() {
            tracing::info!(%address, "connected at the best address that answered");
        }
        let control = Control::start(channel)?;
        let cache = ConnectionCache::default();
        let connect_options = ConnectOptions { address, ..options.clone() };
        Ok(Self { welcome, factory, connect_options, control, cache })
    }

    /// Opens an engine for one session, with `intercept` in front of its fabric, and the region.
    /// The outer error is final. The inner failure concerns this connection only: with another one
    /// it may succeed.
    pub(crate) fn open(
        &self,
        options: SessionOptions,
        intercept: Option<&Intercept>,
    ) -> Result<std::result::Result<(SessionEngine, OpenRegion), Failure>> {
        let Some(mut fabric) = self.fabric(options.lanes)? else {
            return Ok(Err(Failure::Lost(RegionIndex::FIRST)));
        };
        let is_remote = fabric.is_remote();
        if let Some(intercept) = intercept {
            fabric = AnyFabric::Intercepted(intercept(Box::new(fabric), options.lanes));
        }
        let Welcome { region_id, region_bytes, client_id, .. } = self.welcome;
        let SessionOptions { cache_bytes, lanes, .. } = options;
        let options = RegionOptions { region_id, region_bytes, client_id, cache_bytes };
        let blocks = Box::new(self.control.blocks());
        let engine = Engine::new(fabric, lanes);
        let opened = engine.open(RegionIndex::FIRST, blocks, options, &self.cache);
        if let Ok(region) = &opened
            && is_remote
        {
            self.check_lateness(region.format.grace_ms)?;
        }
        Ok(opened.map(|region| (engine, region)))
    }

    /// Returns a fabric for one session; `None` if the connection is lost.
    ///
    /// If the server does not answer, the connection is kept: the server may only be busy or
    /// stopped, and other sessions continue with the region meanwhile.
    fn fabric(&self, lanes: u16) -> Result<Option<AnyFabric>> {
        let started = Instant::now();
        let mut attempts = Attempts::within(self.connect_options.timeout);
        loop {
            let source = match self.factory.fabric(lanes) {
                Err(ConnectError::Rdma(error)) if error.is_transient() => {
                    Some(Arc::new(io::Error::other(error)))
                }
                Err(ConnectError::Unreachable { contact: Contact::Silent, source, .. }) => source,
                Err(ConnectError::Unreachable { .. }) => return Ok(None),
                fabric => return Ok(Some(fabric?)),
            };
            if self.control.is_lost() {
                return Ok(None);
            }
            let tried = started.elapsed();
            let Some(pause) = attempts.pause_after(tried) else {
                let server = self.connect_options.address.to_string();
                let contact = Contact::Silent;
                let error = ConnectError::Unreachable { server, tried, contact, source };
                return Err(error.into());
            };
            std::thread::sleep(pause);
        }
    }

    /// Checks that a writer's retry settings are fast enough for GRACE: they must leave a positive
    /// T_word (`docs/protocol.md`). The server has checked its own. A reader does not use T_word,
    /// because it relies on no proof of a word.
    fn check_lateness(&self, grace_ms: u32) -> Result<()> {
        let lateness_max_ns = self.connect_options.lateness_max_ns();
        let grace_ms_min = farside_layout::grace_ms_min(lateness_max_ns);
        if self.connect_options.role == Role::Reader || u64::from(grace_ms) >= grace_ms_min {
            return Ok(());
        }
        let lateness_ms = lateness_max_ns / 1_000_000;
        Err(Error::Lateness { lateness_ms, grace_ms, grace_ms_min })
    }
}
