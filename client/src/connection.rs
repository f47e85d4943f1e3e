//! One connection to one life of a server: the mapped region, the lease, the control channel.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_common::address::Address;
use farside_common::control::{
    ConnectRequest, MESSAGE_BYTES_MAX, Purpose, Role, Token, Welcome, decode_reply,
};
use farside_common::fabric::Fabric;
use farside_common::fabric::shm::{self, Lease, Region, ShmFabric};
use farside_common::layout::{CLIENTS_MAX, Geometry, LayoutError, Superblock};

use crate::any_engine::AnyEngine;
use crate::control::{Control, ControlDepot};
use crate::engine::{Engine, EngineOptions, Failure};
use crate::{Error, Result};

/// How to reach a server and as what.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) address: Address,
    pub(crate) role: Role,
    pub(crate) token: Token,
    pub(crate) timeout: Duration,
}

/// The first pause between two attempts to connect; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(250);

pub(crate) struct Connection {
    pub(crate) welcome: Welcome,
    region: Arc<Region>,
    lease: Lease,
    pub(crate) control: Control,
}

impl Connection {
    /// Connects, trying again with growing pauses while no server answers.
    pub(crate) fn establish(target: &Target) -> Result<Self> {
        let started = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            let source = match Self::attempt(target) {
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

    fn attempt(target: &Target) -> std::result::Result<Self, Attempt> {
        match &target.address {
            Address::Shm(path) => Self::attempt_shm(target, path),
            // Trying again would not help: sessions know no other fabric so far.
            _ => {
                let source = io::ErrorKind::Unsupported.into();
                Err(Error::System { doing: "connecting over this fabric", source }.into())
            }
        }
    }

    fn attempt_shm(target: &Target, path: &Path) -> std::result::Result<Self, Attempt> {
        let connection = shm::Connection::connect(path).map_err(Attempt::from_connect)?;
        connection.set_receive_timeout(Some(target.timeout)).map_err(Attempt::Absent)?;
        let request =
            ConnectRequest { role: target.role, purpose: Purpose::Control, token: target.token };
        connection.send(&request.encode(), None).map_err(Attempt::Absent)?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (bytes, descriptor) = connection.receive(&mut buffer).map_err(Attempt::Absent)?;
        if bytes == 0 {
            return Err(Attempt::Absent(io::ErrorKind::ConnectionReset.into()));
        }
        let welcome = decode_reply(&buffer[..bytes])
            .map_err(Error::from)?
            .map_err(|source| Error::Refused { server: target.address.to_string(), source })?;
        let Some(descriptor) = descriptor else {
            let what = "reply without a descriptor";
            return Err(Error::from(LayoutError::Truncated { what, bytes: bytes as u64 }).into());
        };
        let file = File::from(descriptor);
        let mapped = match target.role {
            Role::Reader => Region::map_read_only(&file),
            Role::Writer => Region::map(&file),
        };
        let doing = "mapping the region";
        let region = mapped.map_err(|source| Error::System { doing, source })?;
        Ok(Self::over(region, welcome, Control::start(connection)?)?)
    }

    fn over(region: Region, welcome: Welcome, control: Control) -> Result<Self> {
        let is = region.bytes();
        if welcome.region_bytes != is {
            return Err(LayoutError::RegionLength { says: welcome.region_bytes, is }.into());
        }
        let lease = Lease { offset: lease_offset(&region, &welcome)?, number: welcome.lease };
        Ok(Self { welcome, region: Arc::new(region), lease, control })
    }

    /// An engine for one session.
    pub(crate) fn engine(&self, options: EngineOptions) -> std::result::Result<AnyEngine, Failure> {
        self.engine_over(options, |fabric| fabric).map(AnyEngine::Shm)
    }

    /// An engine whose fabric is something around the real one.
    pub(crate) fn engine_over<F: Fabric>(
        &self,
        options: EngineOptions,
        around: impl FnOnce(ShmFabric) -> F,
    ) -> std::result::Result<Engine<F, ControlDepot>, Failure> {
        let fabric = ShmFabric::new(self.region.clone(), Some(self.lease), options.lanes);
        Engine::open(around(fabric), self.control.depot(), &self.welcome, options)
    }
}

/// Where this client's entry in the client table is.
fn lease_offset(region: &Region, welcome: &Welcome) -> Result<u64> {
    let mut words = [0u64; size_of::<Superblock>().div_ceil(8)];
    let short = || LayoutError::Truncated { what: "region", bytes: region.bytes() };
    region.read(0, &mut words).map_err(|_| short())?;
    let (_, format) = Superblock::decode(zerocopy::IntoBytes::as_bytes(&words), region.bytes())?;
    let geometry: Geometry = format.geometry();
    geometry.client_entry(welcome.client_id).ok_or_else(|| {
        let (field, value) = ("client id", welcome.client_id.into());
        LayoutError::Bound { field, value, min: 1, max: CLIENTS_MAX.into() }.into()
    })
}

/// Why one attempt to connect failed.
enum Attempt {
    /// Nobody answered; somebody may later.
    Absent(io::Error),
    Final(Error),
}

impl Attempt {
    fn from_connect(source: io::Error) -> Self {
        use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound, WouldBlock};
        match source.kind() {
            NotFound | ConnectionRefused | ConnectionReset | WouldBlock => Self::Absent(source),
            _ => Self::Final(Error::System { doing: "connecting to the server's socket", source }),
        }
    }
}

impl From<Error> for Attempt {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}
