//! Read-only access to regions, for the checker: a server's, or a file that no server uses.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use farside_cli::check::{self, CheckError, Observer, Report, Scope};
use farside_config::ClientConfig;
use farside_control::attach::{Attached, Attempts, ConnectError, ConnectOptions, Contact};
use farside_control::cluster::ClusterMap;
use farside_control::{
    MESSAGE_BYTES_MAX, Refusal, Request, Role, ServerMessage, ServerStatistics, say_goodbye,
};
use farside_fabric::memory::Region;
use farside_fabric::shm::ShmFabric;
use farside_fabric::{ChainError, Endpoint, LaneId};
use indicatif::ProgressBar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::output;

/// The only lane of the checker's endpoint.
const LANE: LaneId = LaneId(0);
/// Timeout for sending the goodbye.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The timeout of the first attempt to connect to a server of a cluster.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);

/// A check that loses its connection fails only after at least this many attempts, and once the
/// timeout for connecting is over.
const CHECKS_MIN: u32 = 3;

/// A connection as a reader, for the checker. The memory or the device refuses writes.
pub(crate) struct RawRegion {
    place: Place,
    attached: Attached,
}

/// Where the server of a region is.
#[derive(Clone)]
enum Place {
    At(ConnectOptions),
    /// Wherever the servers of the cluster say.
    Shard {
        shard: u16,
        seeds: ConnectOptions,
        map: ClusterMap,
    },
}

impl RawRegion {
    /// Connects as a reader to the server, or to the servers of all shards of a cluster, with a
    /// connection of its own to each. An error in the place of a shard says why this host does not
    /// reach its server.
    pub(crate) fn open_all(config: &ClientConfig) -> anyhow::Result<Vec<anyhow::Result<Self>>> {
        let options = config.connect_options(Role::Reader)?;
        // A single address is mostly that of a server without a cluster.
        if options.others.is_empty() {
            match options.connect() {
                Err(ConnectError::Refused { source: Refusal::Clustered, .. }) => {}
                attached => {
                    return Ok(vec![Ok(Self { attached: attached?, place: Place::At(options) })]);
                }
            }
        }
        let map = match fetch_map(&options) {
            Err(ConnectError::Refused { source: Refusal::NoCluster, .. }) => {
                return Ok(vec![Self::attach(options)]);
            }
            map => map?,
        };
        let open = |shard| {
            let mut place = Place::Shard { shard, seeds: options.clone(), map: map.clone() };
            Ok(Self { attached: place.connect()?, place })
        };
        Ok((0..map.shards.len() as u16).map(open).collect())
    }

    /// Connects with these options.
    pub(crate) fn attach(options: ConnectOptions) -> anyhow::Result<Self> {
        Ok(Self { attached: options.connect()?, place: Place::At(options) })
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
                    if checks >= CHECKS_MIN && tried >= self.place.timeout() {
                        let server = self.server();
                        let (contact, source) = (Contact::Lost, None);
                        let lost = ConnectError::Unreachable { server, contact, tried, source };
                        return Err(lost.into());
                    }
                    self.attached = self.place.connect().map_err(after_an_answer)?;
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

impl Place {
    fn timeout(&self) -> Duration {
        match self {
            Self::At(options) | Self::Shard { seeds: options, .. } => options.timeout,
        }
    }

    /// Connects, with as many attempts as the timeout allows. In a cluster the server may have
    /// become another one meanwhile, or may be about to take its shard.
    fn connect(&mut self) -> anyhow::Result<Attached> {
        let (shard, seeds, map) = match self {
            Self::At(options) => return Ok(options.connect()?),
            Self::Shard { shard, seeds, map } => (*shard, seeds, map),
        };
        let (started, mut attempts) = (Instant::now(), Attempts::within(seeds.timeout));
        loop {
            let timeout = ATTEMPT_TIMEOUT.max(started.elapsed()).min(seeds.timeout);
            let view = map.shards.get(usize::from(shard)).cloned().unwrap_or_default();
            let options = seeds.of_shard(shard, &view, |_| true);
            let failed = match &options {
                None if view.copies.is_empty() => anyhow!("it has no server at present"),
                None => return Err(ConnectError::OtherFabric.into()),
                Some(options) => match options.attach(timeout) {
                    Err(error) if may_pass(&error) => error.tried_for(started.elapsed()).into(),
                    attached => return Ok(attached?),
                },
            };
            let Some(pause) = attempts.pause_after(started.elapsed()) else { return Err(failed) };
            std::thread::sleep(pause);
            // The server itself knows its newest view, and the seeds know where it is.
            for options in options.iter().chain([&*seeds]) {
                if let Ok((newer, _)) = options.fetch_map(timeout) {
                    map.merge(&newer);
                }
            }
        }
    }
}

/// Fetches the map of a cluster, with as many attempts as the timeout allows.
///
/// # Errors
/// Those of [`ConnectOptions::fetch_map`].
pub(crate) fn fetch_map(options: &ConnectOptions) -> Result<ClusterMap, ConnectError> {
    let (started, mut attempts) = (Instant::now(), Attempts::within(options.timeout));
    loop {
        let error = match options.fetch_map(options.timeout) {
            Err(error @ ConnectError::Unreachable { .. }) => error.tried_for(started.elapsed()),
            fetched => return fetched.map(|(map, _)| map),
        };
        let Some(pause) = attempts.pause_after(started.elapsed()) else { return Err(error) };
        std::thread::sleep(pause);
    }
}

/// Whether a server of a cluster that fails so may serve its shard soon, or another one may.
fn may_pass(error: &ConnectError) -> bool {
    use Refusal::{NoCluster, OtherView, Spare, Unconfirmed};
    let refusal = match error {
        ConnectError::Unreachable { .. } => return true,
        ConnectError::Refused { source, .. } => source,
        _ => return false,
    };
    matches!(refusal, OtherView { .. } | Spare | Unconfirmed | NoCluster)
}

fn after_an_answer(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<ConnectError>() {
        Ok(error) => error.after_an_answer().into(),
        Err(error) => error,
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
