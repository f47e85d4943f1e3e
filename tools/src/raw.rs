//! Read-only access to regions, for the checker: a server's, or a file that no server uses.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use farside_config::ClientConfig;
use farside_control::attach::{Attached, ConnectError, ConnectOptions, Contact};
use farside_control::cluster::ShardView;
use farside_control::{
    MESSAGE_BYTES_MAX, Refusal, Request, Role, ServerMessage, ServerStatistics, say_goodbye,
};
use farside_fabric::shm::{Region, ShmFabric};
use farside_fabric::{ChainError, Endpoint, LaneId};
use farside_tools::check::{self, CheckError, Observer, Report, Scope};
use indicatif::ProgressBar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::output;

/// The only lane of the checker's endpoint.
const LANE: LaneId = LaneId(0);
/// Timeout for sending the goodbye.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A check that loses its connection fails only after at least this many attempts, and once the
/// timeout for connecting is over.
const CHECKS_MIN: u32 = 3;

/// A connection as a reader, for the checker. The memory or the device refuses writes.
pub(crate) struct RawRegion {
    options: ConnectOptions,
    attached: Attached,
}

impl RawRegion {
    /// Connects as a reader to the server, or to the servers of all shards of a cluster, with a
    /// connection of its own to each. `None` for a shard whose server this host does not reach.
    pub(crate) fn open_all(config: &ClientConfig) -> anyhow::Result<Vec<Option<Self>>> {
        let options = config.connect_options(Role::Reader)?;
        // A single address is mostly that of a server without a cluster.
        if options.others.is_empty() {
            match options.connect() {
                Err(ConnectError::Refused { source: Refusal::Clustered, .. }) => {}
                attached => return Ok(vec![Some(Self { attached: attached?, options })]),
            }
        }
        let map = match options.fetch_map(options.timeout) {
            Err(ConnectError::Refused { source: Refusal::NoCluster, .. }) => {
                return Ok(vec![Some(Self { attached: options.connect()?, options })]);
            }
            map => map?.0,
        };
        let open = |(shard, view)| Self::open_shard(&options, shard, view);
        Ok(map.shards.iter().enumerate().map(open).collect())
    }

    /// Connects to the server of a shard, by this view of it. `None` if this host does not reach
    /// it.
    fn open_shard(options: &ConnectOptions, shard: usize, view: &ShardView) -> Option<Self> {
        let of_view = |view: &ShardView| options.of_shard(shard as u16, view, |_| true);
        let options = of_view(view)?;
        let attached = match options.connect() {
            // The server that sent the map had not read the newest records yet. This one has.
            Err(ConnectError::Refused { source: Refusal::OtherView { .. }, .. }) => {
                let (map, _) = options.fetch_map(options.timeout).ok()?;
                return Self::attach(of_view(map.shards.get(shard)?)?).ok();
            }
            attached => attached.ok()?,
        };
        Some(Self { options, attached })
    }

    /// Connects with these options.
    pub(crate) fn attach(options: ConnectOptions) -> anyhow::Result<Self> {
        Ok(Self { attached: options.connect()?, options })
    }

    /// The server's address.
    pub(crate) fn server(&self) -> String {
        self.attached.address.to_string()
    }

    /// Asks the server for its statistics.
    pub(crate) fn statistics(&mut self, timeout: Duration) -> anyhow::Result<ServerStatistics> {
        let channel = &mut self.attached.channel;
        let (started, mut message) = (Instant::now(), Vec::new());
        Request::Statistics.encode(&mut message);
        channel.send(&message)?;
        message.resize(MESSAGE_BYTES_MAX, 0);
        loop {
            match channel.receive(&mut message)? {
                Some(0) => bail!("the server closed the connection"),
                Some(bytes) => match ServerMessage::decode(&message[..bytes])? {
                    ServerMessage::Statistics(statistics) => return Ok(statistics),
                    // The map of the cluster, for example.
                    _ => continue,
                },
                None => {}
            }
            let left = timeout.checked_sub(started.elapsed());
            let left = left.context("the server does not answer: it is stopped or overloaded")?;
            let left = Timespec::try_from(left)?;
            poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&left))?;
        }
    }

    /// Checks the region while clients continue to work. If the connection is lost, starts the
    /// check again on a new one.
    pub(crate) fn check(&mut self, scope: Scope, bar: &ProgressBar) -> anyhow::Result<Report> {
        let (started, mut checks) = (Instant::now(), 0);
        loop {
            checks += 1;
            match self.check_once(scope, bar) {
                Err(error) if is_connection_loss(&error) => {
                    let tried = started.elapsed();
                    if checks >= CHECKS_MIN && tried >= self.options.timeout {
                        let server = self.options.address.to_string();
                        let (contact, source) = (Contact::Lost, None);
                        let lost = ConnectError::Unreachable { server, contact, tried, source };
                        return Err(lost.into());
                    }
                    self.attached =
                        self.options.connect().map_err(ConnectError::after_an_answer)?;
                }
                result => return result,
            }
        }
    }

    fn check_once(&self, scope: Scope, bar: &ProgressBar) -> anyhow::Result<Report> {
        let (bytes, mut observer) = (self.attached.welcome.region_bytes, BarObserver(bar));
        let endpoint = Endpoint::new(self.attached.factory.fabric(1)?, 1);
        Ok(check::check(&endpoint, LANE, bytes, (scope, false), &mut observer)?)
    }
}

/// Whether the connection was lost. Then the check can be repeated, because it changes nothing.
fn is_connection_loss(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CheckError::Chain(ChainError::Fenced)))
        || matches!(error.downcast_ref(), Some(ConnectError::Unreachable { .. }))
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        say_goodbye(&mut *self.attached.channel, FLUSH_TIMEOUT);
    }
}

/// Shows a check's progress on a bar.
pub(crate) struct BarObserver<'a>(pub(crate) &'a ProgressBar);

impl Observer for BarObserver<'_> {
    fn progress(&mut self, done: u64, total: u64) {
        if self.0.length() != Some(total) {
            output::set_total(self.0, total);
        }
        self.0.set_position(done);
    }
}

/// Checks a region file, under a lock that keeps servers from using it meanwhile.
pub(crate) fn check_file(path: &Path, observer: &mut dyn Observer) -> anyhow::Result<Report> {
    let name = path.display();
    // NONBLOCK: if the file is a pipe, opening it does not wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.with_context(|| format!("cannot open {name}"))?);
    if !file.metadata()?.is_file() {
        bail!("{name} is not a file: name a server's region_file");
    }
    // A shared lock: several checks may run at once, but a server needs an exclusive one. It lasts
    // until `file` is dropped.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => bail!(
            "a server uses {name}: stop it first, or check it with `kv-cli verify --server ADDRESS`"
        ),
        Err(error) => return Err(error).with_context(|| format!("cannot lock {name}")),
    }
    let region = Region::map_read_only(&file).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => anyhow::anyhow!("{name} is too short to hold a region"),
        _ => anyhow::Error::from(error).context(format!("cannot map {name}")),
    })?;
    let bytes = region.bytes();
    let endpoint = Endpoint::new(ShmFabric::new(Arc::new(region), None, 1), 1);
    let report = check::check(&endpoint, LANE, bytes, (Scope::File, true), observer);
    report.with_context(|| format!("{name} cannot be checked"))
}
