//! The connections of a client, one for each shard. A server without a cluster is a single shard.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use farside_control::attach::ConnectError;
use farside_fabric::interrupt;

use crate::client_inner::ClientInner;
use crate::cluster::Attempt;
use crate::connection::ServerConnection;
use crate::{Contact, Error, Result};

/// The pause between two looks at all shards, while no shard has a connection yet.
const FIRST_SHARD_PAUSE: Duration = Duration::from_millis(2);
/// How long a client tries to reach a shard that no operation needs any more.
const UNWANTED_MAX: Duration = Duration::from_secs(10);
/// The pause after a round of attempts. A server that refuses ends a round at once.
const ROUND_PAUSE: Duration = Duration::from_millis(100);

/// What a shard is for an operation that must not wait.
pub(crate) enum ShardState {
    Connected(Arc<ServerConnection>),
    /// A thread has been connecting for this long, and may have made an attempt that failed.
    Connecting {
        tried: Duration,
        has_failed: bool,
    },
    /// The shard could not be reached for the whole timeout. A thread continues to try.
    Down(Error),
}

impl ClientInner {
    /// Returns the connection to a shard, after reconnecting if it was lost. Fails at once if the
    /// shard is known to be down.
    pub(crate) fn connection(self: &Arc<Self>, shard: usize) -> Result<Arc<ServerConnection>> {
        let link = &self.links[shard];
        if let Some(connection) = link.connections.present(|it| it.control.is_lost()) {
            return Ok(connection);
        }
        if let Some(error) = self.down(shard) {
            self.revive(shard);
            return Err(error);
        }
        let made = link.connections.get(
            |connection| connection.control.is_lost(),
            || self.establish(shard, Some(Instant::now() + self.connect_options.timeout)),
        );
        let made = made.map_err(|error| self.connect_error(shard, error));
        // An attempt that its caller has ended proves nothing.
        if let Err(error @ Error::Unavailable { .. }) = &made
            && !interrupt::is_given_up()
        {
            link.revival().failed = Some(error.clone());
            self.revive(shard);
        }
        made
    }

    /// As [`ClientInner::connection`], without a wait. A thread connects meanwhile.
    pub(crate) fn try_connection(self: &Arc<Self>, shard: usize) -> ShardState {
        let link = &self.links[shard];
        if let Some(connection) = link.connections.present(|it| it.control.is_lost()) {
            return ShardState::Connected(connection);
        }
        self.revive(shard);
        let revival = link.revival();
        if let Some(error) = &revival.failed {
            return ShardState::Down(error.clone());
        }
        let tried = revival.since.map_or(Duration::ZERO, |since| since.elapsed());
        ShardState::Connecting { tried, has_failed: revival.has_failed }
    }

    fn down(&self, shard: usize) -> Option<Error> {
        self.links[shard].revival().failed.clone()
    }

    /// Returns a connection to any shard: one that is there, or the first that can be made.
    pub(crate) fn first_connection(self: &Arc<Self>) -> Result<(usize, Arc<ServerConnection>)> {
        if self.cluster.is_none() {
            return Ok((0, self.connection(0)?));
        }
        let started = Instant::now();
        loop {
            let mut failure = None;
            for shard in 0..self.links.len() {
                match self.try_connection(shard) {
                    ShardState::Connected(connection) => return Ok((shard, connection)),
                    ShardState::Connecting { .. } => {}
                    ShardState::Down(error) => failure = Some(error),
                }
            }
            if let Some(error) = failure
                && started.elapsed() >= self.connect_options.timeout
            {
                return Err(error);
            }
            if interrupt::gives_up() {
                return Err(self.unreachable(0, Contact::Lost, started.elapsed()));
            }
            interrupt::sleep(FIRST_SHARD_PAUSE);
        }
    }

    /// Makes a thread connect to a shard, unless one does. It ends once the shard is connected, or
    /// when no operation has needed it for a while.
    fn revive(self: &Arc<Self>, shard: usize) {
        let mut revival = self.links[shard].revival();
        let now = Instant::now();
        revival.wanted_at = Some(now);
        revival.since.get_or_insert(now);
        if revival.is_running {
            return;
        }
        let client = Arc::downgrade(self);
        let thread = std::thread::Builder::new()
            .name("farside-connect".into())
            .spawn(move || connect_until_unwanted(&client, shard));
        match thread {
            Ok(_) => revival.is_running = true,
            Err(source) => {
                let (doing, source) = ("starting a thread to reconnect", Arc::new(source));
                revival.failed = Some(ConnectError::System { doing, source }.into());
            }
        }
    }

    /// Makes one round of attempts to connect. Returns whether to make another.
    fn try_to_revive(self: &Arc<Self>, shard: usize) -> bool {
        let link = &self.links[shard];
        let made = link
            .connections
            .get(|connection| connection.control.is_lost(), || self.establish(shard, None));
        let mut revival = link.revival();
        let failed = made.err().map(|error| self.connect_error(shard, error));
        let is_connected = failed.is_none();
        revival.failed = failed;
        let is_wanted = revival.wanted_at.is_some_and(|at| at.elapsed() < UNWANTED_MAX);
        revival.is_running = !is_connected && is_wanted;
        if !revival.is_running && !is_connected {
            // The next operation tries again, and waits.
            (revival.since, revival.has_failed, revival.failed) = Default::default();
        }
        revival.is_running
    }

    /// Connects to the server of a shard, and notes whether its region was replaced.
    fn establish(
        self: &Arc<Self>,
        shard: usize,
        until: Option<Instant>,
    ) -> std::result::Result<ServerConnection, ConnectError> {
        let link = &self.links[shard];
        let former = link.connections.last();
        link.revival().since.get_or_insert_with(Instant::now);
        let connection = self.connect_within(shard, until)?;
        let mut revival = link.revival();
        (revival.since, revival.has_failed) = Default::default();
        drop(revival);
        let region_id = connection.welcome.region_id;
        if let Some(former) = former {
            link.reconnects.fetch_add(1, Ordering::Relaxed);
            let is_replaced = former.welcome.region_id != region_id;
            link.regions_replaced.fetch_add(is_replaced.into(), Ordering::Relaxed);
        }
        Ok(connection)
    }

    /// Connects to the server of a shard, with as many attempts as the timeout allows. An operation
    /// waits until the given time, if any.
    fn connect_within(
        self: &Arc<Self>,
        shard: usize,
        until: Option<Instant>,
    ) -> std::result::Result<ServerConnection, ConnectError> {
        let cache_bytes = self.cache_bytes_of_shard();
        let Some(cluster) = &self.cluster else {
            let connection = ServerConnection::establish(&self.connect_options, cache_bytes)?;
            tracing::info!(incarnation = connection.welcome.incarnation, "reconnected");
            return Ok(connection);
        };
        let started = Instant::now();
        let mut attempts = farside_control::attach::Attempts::within(self.connect_options.timeout);
        loop {
            let attempt = Attempt { tried: started.elapsed(), until };
            let options = &self.connect_options;
            let known = cluster.view(shard).number;
            let error = match cluster.try_connect(shard, attempt, options, cache_bytes) {
                Err(error @ ConnectError::Unreachable { .. }) => error,
                connected => return connected,
            };
            // A newer view leads to another server, or to the same one with another number. Without
            // any server there was nothing to fail: the map of a server that has just started lacks
            // the others.
            let is_news = cluster.view(shard).number > known;
            let is_unassigned =
                matches!(error, ConnectError::Unreachable { contact: Contact::Unassigned, .. });
            self.links[shard].revival().has_failed |= !is_news && !is_unassigned;
            let tried = started.elapsed();
            let Some(pause) = attempts.pause_after(tried) else {
                return Err(error.tried_for(tried));
            };
            interrupt::sleep(pause);
        }
    }

    /// The error of operations on a shard that could not be reached.
    pub(crate) fn connect_error(&self, shard: usize, error: ConnectError) -> Error {
        match error {
            ConnectError::Unreachable { ref server, .. } if self.cluster.is_some() => {
                let (shard, server) = (shard as u16, server.clone());
                Error::Unavailable { shard, server, source: Arc::new(error) }
            }
            error => error.into(),
        }
    }

    /// The error of operations on a shard whose server did not answer for this long.
    pub(crate) fn unreachable(&self, shard: usize, contact: Contact, tried: Duration) -> Error {
        let server = self.links[shard].connections.last().map(|connection| connection.server());
        let server = server.unwrap_or_else(|| self.server());
        let error = ConnectError::Unreachable { server, tried, contact, source: None };
        self.connect_error(shard, error)
    }
}

fn connect_until_unwanted(client: &Weak<ClientInner>, shard: usize) {
    while client.upgrade().is_some_and(|client| client.try_to_revive(shard)) {
        std::thread::sleep(ROUND_PAUSE);
    }
}
