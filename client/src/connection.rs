//! One connection to one life of a server: the way to the region, and the control channel.

use std::time::{Duration, Instant};

use farside_common::attach::{AnyFabric, AttachError, Attached, Route, Target};
use farside_common::control::Welcome;

use crate::any_engine::AnyEngine;
use crate::control::Control;
use crate::engine::{Engine, EngineOptions, Failure};
use crate::{Error, Result};

/// The first pause between two attempts to connect; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(250);

pub(crate) struct Connection {
    pub(crate) welcome: Welcome,
    route: Route,
    pub(crate) control: Control,
}

impl Connection {
    /// Connects, trying again with growing pauses while no server answers.
    pub(crate) fn establish(target: &Target) -> Result<Self> {
        let started = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            let left = target.timeout.saturating_sub(started.elapsed());
            let source = match target.attach(left) {
                Ok(Attached { welcome, route, channel }) => {
                    return Ok(Self { welcome, route, control: Control::start(channel)? });
                }
                Err(AttachError::Absent { source, .. }) => source,
                Err(error) => return Err(error.into()),
            };
            let tried = started.elapsed();
            if tried + pause > target.timeout {
                let server = target.address.to_string();
                return Err(Error::Unreachable { server, tried, source: Some(source) });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// An engine for one session.
    pub(crate) fn engine(&self, options: EngineOptions) -> std::result::Result<AnyEngine, Failure> {
        let (depot, welcome) = (self.control.depot(), &self.welcome);
        Ok(match self.route.fabric(options.lanes)? {
            AnyFabric::Shm(fabric) => {
                AnyEngine::Shm(Engine::open(fabric, depot, welcome, options)?)
            }
            AnyFabric::Verbs(fabric) => {
                AnyEngine::Verbs(Engine::open(fabric, depot, welcome, options)?)
            }
        })
    }
}

#[cfg(test)]
impl Connection {
    /// An engine whose fabric is something around that of shared memory.
    pub(crate) fn engine_over<F: farside_common::fabric::Fabric>(
        &self,
        options: EngineOptions,
        around: impl FnOnce(farside_common::fabric::shm::ShmFabric) -> F,
    ) -> std::result::Result<Engine<F, crate::control::ControlDepot>, Failure> {
        let AnyFabric::Shm(fabric) = self.route.fabric(options.lanes)? else {
            return Err(Failure::Disconnected);
        };
        Engine::open(around(fabric), self.control.depot(), &self.welcome, options)
    }
}
