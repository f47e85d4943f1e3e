//! One connection to one life of a server: the way to the region, and the control channel.

mod shm;
mod verbs;

use std::io;
use std::time::{Duration, Instant};

use farside_common::address::Address;
use farside_common::control::{Channel, ConnectRequest, Purpose, Role, Token, Welcome};
use farside_common::fabric::verbs::Options;

use crate::any_engine::AnyEngine;
use crate::control::Control;
use crate::engine::{Engine, EngineOptions, Failure};
use crate::{Error, Result};

/// How to reach a server and as what.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) address: Address,
    pub(crate) role: Role,
    pub(crate) token: Token,
    pub(crate) timeout: Duration,
    pub(crate) rdma: Options,
}

impl Target {
    fn request(&self, purpose: Purpose) -> ConnectRequest {
        ConnectRequest { role: self.role, purpose, token: self.token }
    }

    fn refused(&self, source: farside_common::control::Refusal) -> Error {
        Error::Refused { server: self.address.to_string(), source }
    }
}

/// The first pause between two attempts to connect; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(250);

pub(crate) struct Connection {
    pub(crate) welcome: Welcome,
    way: Way,
    pub(crate) control: Control,
}

/// How sessions reach the region.
enum Way {
    Shm(shm::Mapped),
    Verbs(verbs::Route),
}

impl Connection {
    /// Connects, trying again with growing pauses while no server answers.
    pub(crate) fn establish(target: &Target) -> Result<Self> {
        let started = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            let source = match Self::attempt(target, started) {
                Ok(connection) => return Ok(connection),
                Err(Attempt::Final(error)) => return Err(error),
                Err(Attempt::Absent(source)) => source,
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

    fn attempt(target: &Target, started: Instant) -> std::result::Result<Self, Attempt> {
        let (welcome, way, channel) = match &target.address {
            Address::Shm(path) => {
                let (welcome, mapped, channel) = shm::connect(target, path)?;
                (welcome, Way::Shm(mapped), channel)
            }
            Address::Rdma { .. } => {
                let left = target.timeout.saturating_sub(started.elapsed());
                let (welcome, route, channel) = verbs::connect(target, left)?;
                (welcome, Way::Verbs(route), channel)
            }
            // The address was parsed by this build, which has no other fabric.
            _ => return Err(Attempt::Absent(io::ErrorKind::Unsupported.into())),
        };
        Ok(Self { welcome, way, control: Control::start(channel)? })
    }

    /// An engine for one session.
    pub(crate) fn engine(&self, options: EngineOptions) -> std::result::Result<AnyEngine, Failure> {
        let (depot, welcome) = (self.control.depot(), &self.welcome);
        Ok(match &self.way {
            Way::Shm(mapped) => {
                AnyEngine::Shm(Engine::open(mapped.fabric(options), depot, welcome, options)?)
            }
            Way::Verbs(route) => {
                AnyEngine::Verbs(Engine::open(route.fabric(options)?, depot, welcome, options)?)
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
    ) -> std::result::Result<Engine<F, crate::remote_depot::ControlDepot>, Failure> {
        let Way::Shm(mapped) = &self.way else { return Err(Failure::Disconnected) };
        let fabric = around(mapped.fabric(options));
        Engine::open(fabric, self.control.depot(), &self.welcome, options)
    }
}

/// What an attempt that succeeded brings.
type Connected<W> = std::result::Result<(Welcome, W, Channel), Attempt>;

/// Why one attempt to connect failed.
enum Attempt {
    /// Nobody answered; somebody may later.
    Absent(io::Error),
    Final(Error),
}

impl From<Error> for Attempt {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}
