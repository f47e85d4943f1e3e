//! Connecting to a server on this host: its socket, and the region it passes.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use farside_common::control::{Channel, MESSAGE_BYTES_MAX, Purpose, Role, Welcome, decode_reply};
use farside_common::fabric::shm::{self, Lease, Region, ShmFabric};
use farside_common::layout::{CLIENTS_MAX, Geometry, LayoutError, Superblock};

use super::{Attempt, Connected, Target};
use crate::engine::EngineOptions;
use crate::{Error, Result};

/// The region, mapped.
pub(super) struct Mapped {
    region: Arc<Region>,
    lease: Lease,
}

pub(super) fn connect(target: &Target, path: &Path) -> Connected<Mapped> {
    let connection = shm::Connection::connect(path).map_err(from_connect)?;
    connection.set_receive_timeout(Some(target.timeout)).map_err(Attempt::Absent)?;
    let request = target.request(Purpose::Control);
    connection.send(&request.encode(), None).map_err(Attempt::Absent)?;
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let (bytes, descriptor) = connection.receive(&mut buffer).map_err(Attempt::Absent)?;
    if bytes == 0 {
        return Err(Attempt::Absent(io::ErrorKind::ConnectionReset.into()));
    }
    let welcome = decode_reply(&buffer[..bytes])
        .map_err(Error::from)?
        .map_err(|source| target.refused(source))?;
    let Some(descriptor) = descriptor else {
        let what = "reply without a descriptor";
        return Err(Error::from(LayoutError::Truncated { what, bytes: bytes as u64 }).into());
    };
    let file = File::from(descriptor);
    let mapped = match target.role {
        Role::Reader => Region::map_read_only(&file),
        Role::Writer => Region::map(&file),
    };
    let failed = |doing| move |source| Error::System { doing, source };
    let mapped = Mapped::over(mapped.map_err(failed("mapping the region"))?, &welcome)?;
    let channel = Channel::over(connection).map_err(failed("setting up the socket"))?;
    Ok((welcome, mapped, channel))
}

impl Mapped {
    fn over(region: Region, welcome: &Welcome) -> Result<Self> {
        let is = region.bytes();
        if welcome.region_bytes != is {
            return Err(LayoutError::RegionLength { says: welcome.region_bytes, is }.into());
        }
        let lease = Lease { offset: lease_offset(&region, welcome)?, number: welcome.lease };
        Ok(Self { region: Arc::new(region), lease })
    }

    /// The fabric of one session.
    pub(super) fn fabric(&self, options: EngineOptions) -> ShmFabric {
        ShmFabric::new(self.region.clone(), Some(self.lease), options.lanes)
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

fn from_connect(source: io::Error) -> Attempt {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound, WouldBlock};
    match source.kind() {
        NotFound | ConnectionRefused | ConnectionReset | WouldBlock => Attempt::Absent(source),
        _ => Attempt::Final(Error::System { doing: "connecting to the server's socket", source }),
    }
}
