//! The region itself, mapped read-only, for the checker.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use farside_common::address::Address;
use farside_common::check::{self, Observer, Report, Scope};
use farside_common::config::ClientConfig;
use farside_common::control::{ConnectRequest, Purpose, REPLY_BYTES_MAX, Request, Role};
use farside_common::fabric::shm::{Connection, Region, ShmFabric};
use farside_common::fabric::{Endpoint, LaneId};
use indicatif::ProgressBar;

use crate::output;

/// The only lane of the checker's endpoint.
const LANE: LaneId = LaneId(0);

/// A region that cannot be changed from here: the memory refuses it.
pub(crate) struct RawRegion {
    endpoint: Endpoint<ShmFabric>,
    region_bytes: u64,
    connection: Connection,
}

impl RawRegion {
    /// Connects as a reader of its own and maps the region.
    pub(crate) fn open(config: &ClientConfig) -> anyhow::Result<Self> {
        let server = config.server.as_deref().unwrap_or_default();
        let Address::Shm(path) = server.parse()? else {
            bail!("the checker reads regions over shm:// only: run it on the server's host");
        };
        let unreachable = || format!("no server answers at {server}: is kv-server running there?");
        let connection = Connection::connect(&path).with_context(unreachable)?;
        let timeout = Duration::from_millis(config.connect_timeout_ms);
        connection.set_receive_timeout(Some(timeout))?;
        let (role, purpose, token) = (Role::Reader, Purpose::Control, config.token());
        let request = ConnectRequest { role, purpose, token };
        connection.send(&request.encode(), None).with_context(unreachable)?;
        let mut reply = [0; REPLY_BYTES_MAX];
        let (bytes, descriptor) = connection.receive(&mut reply).with_context(unreachable)?;
        if bytes == 0 {
            bail!("the server at {server} hung up: its log says why");
        }
        let welcome = farside_common::control::decode_reply(&reply[..bytes])?
            .with_context(|| format!("{server} refused the connection"))?;
        let descriptor = descriptor.context("the server sent no region")?;
        let region =
            Region::map_read_only(&File::from(descriptor)).context("mapping the region")?;
        // Without a lease, because a reader has nothing to be fenced from.
        let fabric = ShmFabric::new(Arc::new(region), None, 1);
        Ok(Self {
            endpoint: Endpoint::new(fabric, 1),
            region_bytes: welcome.region_bytes,
            connection,
        })
    }

    /// Checks the region while clients go on.
    pub(crate) fn check(&self, scope: Scope, bar: &ProgressBar) -> anyhow::Result<Report> {
        let mut observer = OnBar(bar);
        Ok(check::check(&self.endpoint, LANE, self.region_bytes, scope, &mut observer)?)
    }
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        let mut goodbye = Vec::new();
        Request::Goodbye.encode(&mut goodbye);
        // If it does not arrive, the server sees the socket close.
        let _ = self.connection.send(&goodbye, None);
    }
}

struct OnBar<'a>(&'a ProgressBar);

impl Observer for OnBar<'_> {
    fn progress(&mut self, done: u64, total: u64) {
        if self.0.length() != Some(total) {
            output::set_total(self.0, total);
        }
        self.0.set_position(done);
    }
}
