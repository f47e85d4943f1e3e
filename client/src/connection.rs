//! One connection to one life of a server: the way to the region, and the control channel.

use std::io;
use std::time::Instant;

use farside_control::attach::{AnyFabric, AttachError, Attached, Attempts, Route, Target};
use farside_control::{Role, Welcome};
use farside_fabric::Fabric;
use farside_protocol::{ConnectionCache, Engine, EngineOptions};

use crate::any_engine::AnyEngine;
use crate::control::Control;
use crate::failure::Failure;
use crate::{Contact, Error, Result};

/// How a session wants to work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionOptions {
    /// How much memory the client's location cache takes, in bytes.
    pub(crate) cache_bytes: usize,
    /// How many operations can be in flight.
    pub(crate) lanes: u16,
}

pub(crate) struct Connection {
    pub(crate) welcome: Welcome,
    route: Route,
    target: Target,
    pub(crate) control: Control,
    cache: ConnectionCache,
}

impl Connection {
    /// Connects, with as many attempts as the timeout allows.
    pub(crate) fn establish(target: &Target) -> Result<Self> {
        let Attached { welcome, route, channel } = target.connect()?;
        let control = Control::start(channel)?;
        let cache = ConnectionCache::default();
        Ok(Self { welcome, route, target: target.clone(), control, cache })
    }

    /// An engine for one session.
    pub(crate) fn engine(
        &self,
        options: SessionOptions,
    ) -> std::result::Result<AnyEngine, Failure> {
        Ok(match self.fabric(options.lanes)? {
            AnyFabric::Shm(fabric) => AnyEngine::Shm(self.open(fabric, options)?),
            AnyFabric::Verbs(fabric) => {
                let engine = self.open(fabric, options)?;
                self.check_lateness(engine.region.format.grace_ms)?;
                AnyEngine::Verbs(engine)
            }
        })
    }

    /// A fabric for one session. A server that does not answer may only be busy, or stopped, and
    /// other sessions go on with the region meanwhile: they keep the connection.
    fn fabric(&self, lanes: u16) -> std::result::Result<AnyFabric, Failure> {
        let started = Instant::now();
        let mut attempts = Attempts::within(self.target.timeout);
        loop {
            let error = match self.route.fabric(lanes) {
                Err(AttachError::Rdma(error)) if error.is_passing() => error,
                fabric => return Ok(fabric?),
            };
            if self.control.is_lost() {
                return Err(Failure::Disconnected);
            }
            let tried = started.elapsed();
            let Some(pause) = attempts.pause_after(tried) else {
                let server = self.target.address.to_string();
                let (contact, source) = (Contact::Silent, Some(io::Error::other(error)));
                return Err(Error::Unreachable { server, tried, contact, source }.into());
            };
            std::thread::sleep(pause);
        }
    }

    fn open<F: Fabric>(
        &self,
        fabric: F,
        options: SessionOptions,
    ) -> std::result::Result<Engine<F>, Failure> {
        let Welcome { region_id, region_bytes, client_id, .. } = self.welcome;
        let SessionOptions { cache_bytes, lanes } = options;
        let options = EngineOptions { region_id, region_bytes, client_id, cache_bytes, lanes };
        Ok(Engine::open(fabric, Box::new(self.control.blocks()), options, &self.cache)?)
    }

    /// That a writer's own settings leave it a T_word (`docs/protocol.md`); the server checked its
    /// own, and a reader relies on no proof of a word.
    fn check_lateness(&self, grace_ms: u32) -> Result<()> {
        let rdma = self.target.rdma;
        let grace_ms_min = farside_layout::grace_ms_min(rdma.lateness_max_ns());
        if self.target.role == Role::Reader || u64::from(grace_ms) >= grace_ms_min {
            return Ok(());
        }
        let lateness_ms = rdma.lateness_max_ns() / 1_000_000;
        Err(Error::Lateness { lateness_ms, grace_ms, grace_ms_min })
    }
}

#[cfg(feature = "around")]
impl Connection {
    /// [`Connection::engine`] with something around the fabric.
    pub(crate) fn wrapped_engine(
        &self,
        options: SessionOptions,
        wrap: &farside_fabric::Intercept,
    ) -> std::result::Result<AnyEngine, Failure> {
        let fabric: Box<dyn Fabric + Send> = match self.fabric(options.lanes)? {
            AnyFabric::Shm(fabric) => Box::new(fabric),
            AnyFabric::Verbs(fabric) => Box::new(fabric),
        };
        let wrapped = wrap(fabric, options.lanes);
        Ok(AnyEngine::Wrapped(self.open(wrapped, options)?))
    }
}
