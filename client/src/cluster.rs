//! A client's knowledge of its cluster: the map, and where to get a newer one.
//!
//! The map comes from any server and only rises ([`ClusterMap::merge`]). A newer view of a shard
//! ends the connection to the shard's former server at once, so that no session survives the change
//! of an owner.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside_control::address::Address;
use farside_control::attach::{Attached, ConnectError, ConnectOptions};
use farside_control::cluster::{ClusterMap, Id, Router, ShardCopy, ShardView};
use farside_control::{ControlError, Refusal};
use farside_fabric::{Trust, boot_time_ns, interrupt};

use crate::Contact;
use crate::connection::ServerConnection;
use crate::control::{ClusterLink, ControlQueue};

/// The timeout of the first attempt to connect to a server of a cluster, or to get its map.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long answers of further seeds are awaited after the first one.
const FURTHER_SEEDS_TIMEOUT: Duration = Duration::from_millis(300);
/// How long a client waits for the map of a server that it is connected to.
const MAP_TIMEOUT: Duration = Duration::from_millis(100);
/// The shortest time between two requests for maps.
const REFRESH_INTERVAL: Duration = Duration::from_millis(30);
/// Limit on the connected servers that are asked for their maps at once.
const ASKED_MAX: usize = 3;
/// Limit on the addresses that are asked for their maps at once.
const ADDRESSES_MAX: usize = 8;

/// An attempt to connect to the server of a shard.
#[derive(Clone, Copy)]
pub(crate) struct Attempt {
    /// For how long attempts were made before this one.
    pub(crate) tried: Duration,
    /// Until when an operation waits for it, if one does.
    pub(crate) until: Option<Instant>,
}

impl Attempt {
    /// Returns the timeout, or less if the operation does not wait so long.
    fn at_most(self, timeout: Duration) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(timeout, |left| left.min(timeout))
    }
}

/// A kind of fabric. A session reaches all shards over one.
type Kind = fn(&Address) -> bool;
/// All kinds, the best first.
const KINDS: [Kind; 3] = [Address::is_shm, Address::is_rdma, Address::is_tcp];

/// The number of a shard's view, and the connection to its server.
type Owner = (u64, Arc<ControlQueue>);

/// What a client knows of its cluster.
pub(crate) struct Cluster {
    map: Mutex<ClusterMap>,
    /// Notified when the map has changed.
    changed: Condvar,
    /// The present connection to each shard, and the number of the view that it is for.
    owners: Box<[Mutex<Option<Owner>>]>,
    /// When maps were requested last. Locked by the thread that requests them.
    refreshed_at: Mutex<Option<Instant>>,
    seeds: Vec<Address>,
    is_reachable: Kind,
}

/// The result of asking seeds for a map.
pub(crate) enum Discovered {
    /// The map of the cluster that most of them name.
    Map(ClusterMap),
    /// They are addresses of a server without a cluster.
    NoCluster,
}

impl Cluster {
    pub(crate) fn new(map: ClusterMap, seeds: Vec<Address>) -> Result<Self, ConnectError> {
        let copies = || map.shards.iter().flat_map(|view| &view.copies);
        let reaches_all = |kind: &Kind| {
            copies().all(|copy| copy.reachable().any(kind)) && copies().next().is_some()
        };
        // Without any server yet, the seeds tell.
        let of_seeds = |kind: &Kind| copies().next().is_none() && seeds.iter().any(kind);
        let is_reachable = KINDS.into_iter().find(|kind| reaches_all(kind) || of_seeds(kind));
        let is_reachable = is_reachable.ok_or(ConnectError::OtherFabric)?;
        Ok(Self {
            owners: map.shards.iter().map(|_| Mutex::default()).collect(),
            map: Mutex::new(map),
            changed: Condvar::new(),
            refreshed_at: Mutex::default(),
            seeds,
            is_reachable,
        })
    }

    fn lock(&self) -> MutexGuard<'_, ClusterMap> {
        // Poisoning is ignored: a merge replaces whole views.
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self, shard: usize) -> MutexGuard<'_, Option<Owner>> {
        // Poisoning is ignored: the value is replaced as a whole.
        self.owners[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of shards.
    pub(crate) fn shards(&self) -> usize {
        self.owners.len()
    }

    pub(crate) fn router(&self) -> Router {
        self.lock().router()
    }

    /// The view of a shard.
    pub(crate) fn view(&self, shard: usize) -> ShardView {
        self.lock().shards[shard].clone()
    }

    /// The map.
    pub(crate) fn map(&self) -> ClusterMap {
        self.lock().clone()
    }

    /// Takes a map that a server sent. One that cannot be understood changes nothing.
    fn take_map(&self, bytes: &[u8]) {
        match ClusterMap::decode(bytes) {
            Ok(map) => self.merge(&map),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    fn merge(&self, newer: &ClusterMap) {
        let mut map = self.lock();
        if !map.merge(newer) {
            return;
        }
        let numbers: Vec<u64> = map.shards.iter().map(|view| view.number).collect();
        drop(map);
        for (shard, number) in numbers.into_iter().enumerate() {
            self.end_outdated(shard, number);
        }
        self.changed.notify_all();
    }

    /// Ends the connection to a shard, and the trust in its server, if it is for a view before this
    /// one (invariants I24, I25).
    fn end_outdated(&self, shard: usize, number: u64) {
        let mut owner = self.owner(shard);
        if owner.as_ref().is_some_and(|(known, _)| *known < number)
            && let Some((_, queue)) = owner.take()
        {
            queue.give_up();
        }
    }

    /// Makes one attempt to connect to the server of a shard. If the shard's view is outdated, asks
    /// for a newer map.
    ///
    /// # Errors
    /// [`ConnectError`]. After `Unreachable` another attempt may succeed.
    pub(crate) fn try_connect(
        self: &Arc<Self>,
        shard: usize,
        attempt: Attempt,
        options: &ConnectOptions,
        cache_bytes: usize,
    ) -> Result<ServerConnection, ConnectError> {
        let view = self.view(shard);
        let number = view.number;
        let Some(copy) = view.copies.first() else {
            self.refresh(shard, number, attempt, options);
            return Err(unreachable(String::new(), Contact::Unassigned, None));
        };
        let at = options.of_shard(shard as u16, &view, self.is_reachable);
        let at = at.ok_or(ConnectError::OtherFabric)?;
        let timeout = attempt.at_most(attempt_timeout(attempt.tried, options));
        let attached = self.attach(copy, at.clone(), timeout);
        let failed = match attached.and_then(|(attached, options)| {
            self.connect(shard, number, attached, &options, cache_bytes)
        }) {
            Err(
                error @ (ConnectError::Unreachable { .. }
                | ConnectError::Rdma(_)
                | ConnectError::Refused {
                    source:
                        Refusal::OtherView { .. }
                        | Refusal::NoCluster
                        | Refusal::Spare
                        | Refusal::Unconfirmed,
                    ..
                }
                | ConnectError::Control(_)),
            ) => error,
            connected => return connected,
        };
        // The server at the address may know a newer view, or belong to another cluster by now.
        if matches!(failed, ConnectError::Refused { source: Refusal::OtherView { .. }, .. })
            && let Ok((map, _)) = at.fetch_map(attempt.at_most(ATTEMPT_TIMEOUT))
        {
            self.merge(&map);
        }
        self.refresh(shard, number, attempt, options);
        match failed {
            unreachable @ ConnectError::Unreachable { .. } => Err(unreachable),
            error => {
                let server = farside_config::addresses_text(&copy.addresses);
                Err(unreachable(server, Contact::None, Some(std::io::Error::other(error))))
            }
        }
    }

    fn attach(
        &self,
        copy: &ShardCopy,
        options: ConnectOptions,
        timeout: Duration,
    ) -> Result<(Attached, ConnectOptions), ConnectError> {
        // An answer comes after this moment, so the server ran then.
        let trust = Trust::until(boot_time_ns().saturating_add(self.trust_ns()));
        let options = ConnectOptions { trust, ..options };
        let attached = options.attach(timeout)?;
        let welcome = &attached.welcome;
        let is_it = welcome.cluster == self.lock().cluster
            && options.view.is_some_and(|view| {
                (view.shard, view.number) == (welcome.shard, welcome.view_number as u32)
            })
            && Id(welcome.region_id) == copy.region_id
            && welcome.incarnation == copy.incarnation;
        if is_it { Ok((attached, options)) } else { Err(ControlError::NotFarside.into()) }
    }

    fn trust_ns(&self) -> u64 {
        u64::from(self.lock().trust_ms) * 1_000_000
    }

    fn connect(
        self: &Arc<Self>,
        shard: usize,
        number: u64,
        attached: Attached,
        options: &ConnectOptions,
        cache_bytes: usize,
    ) -> Result<ServerConnection, ConnectError> {
        let cluster = self.clone();
        let take_map = Box::new(move |map: &[u8]| cluster.take_map(map));
        let link = ClusterLink { take_map, trust_ns: self.trust_ns() };
        let connection = ServerConnection::over(attached, options, cache_bytes, Some(link))?;
        *self.owner(shard) = Some((number, connection.control.queue().clone()));
        // A newer view may have come between the look at the map and this.
        self.end_outdated(shard, self.view(shard).number);
        Ok(connection)
    }

    /// Asks for a map in which this shard has a view after `number`: the servers that this client
    /// is connected to, or otherwise all addresses that it knows. Returns once there is one, or
    /// after a fraction of a second, or when the operation waits no longer.
    ///
    /// One thread of the client asks at a time; the others wait for its result.
    fn refresh(&self, shard: usize, number: u64, attempt: Attempt, options: &ConnectOptions) {
        if attempt.at_most(MAP_TIMEOUT).is_zero() {
            return;
        }
        let Ok(mut refreshed_at) = self.refreshed_at.try_lock() else {
            self.wait_for_view(shard, number, attempt.at_most(MAP_TIMEOUT));
            return;
        };
        if let Some(before) = *refreshed_at {
            let jitter = Duration::from_nanos(boot_time_ns() % 10_000_000);
            std::thread::sleep((REFRESH_INTERVAL + jitter).saturating_sub(before.elapsed()));
        }
        let asked = self.ask_connected();
        if !(asked && self.wait_for_view(shard, number, attempt.at_most(MAP_TIMEOUT))) {
            let known = self.map();
            let copies = known.shards.iter().flat_map(|view| &view.copies);
            let hosts = copies.flat_map(|copy| copy.reachable().take(1));
            let addresses: Vec<_> = self.seeds.iter().chain(hosts).cloned().collect();
            // Another part of them each time, if there are many.
            let from = boot_time_ns() as usize % addresses.len().max(1);
            let some = addresses.iter().cycle().skip(from).take(ADDRESSES_MAX.min(addresses.len()));
            let answers = fetch_maps(some.cloned().collect(), options, ATTEMPT_TIMEOUT);
            let until = || Instant::now() + attempt.at_most(ATTEMPT_TIMEOUT);
            while let Some((_, answer)) = receive(&answers, until()) {
                if let Ok(map) = answer {
                    self.merge(&map);
                }
                if self.view(shard).number > number {
                    break;
                }
            }
        }
        *refreshed_at = Some(Instant::now());
    }

    /// Asks some of the connected servers for their maps. Returns whether there was one.
    fn ask_connected(&self) -> bool {
        let queues = (0..self.shards()).filter_map(|shard| {
            let owner = self.owner(shard);
            owner.as_ref().map(|(_, queue)| queue.clone()).filter(|queue| !queue.is_lost())
        });
        queues.take(ASKED_MAX).map(|queue| queue.ask_for_map()).count() > 0
    }

    /// Waits for a view of the shard after `number`. Returns whether there is one.
    fn wait_for_view(&self, shard: usize, number: u64, timeout: Duration) -> bool {
        let map = self.lock();
        let is_old = |map: &mut ClusterMap| map.shards[shard].number <= number;
        let waited = self.changed.wait_timeout_while(map, timeout, is_old);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

fn unreachable(server: String, contact: Contact, source: Option<std::io::Error>) -> ConnectError {
    let (tried, source) = (Duration::ZERO, source.map(Arc::new));
    ConnectError::Unreachable { server, contact, tried, source }
}

/// The timeout of an attempt, after attempts for `tried`. On a slow network, or at a busy server,
/// the first ones may be too short.
fn attempt_timeout(tried: Duration, options: &ConnectOptions) -> Duration {
    ATTEMPT_TIMEOUT.max(tried).min(options.timeout)
}

/// Asks all these addresses for their maps at the same time. The answers come as they are.
fn fetch_maps(
    addresses: Vec<Address>,
    options: &ConnectOptions,
    timeout: Duration,
) -> Receiver<(Address, Result<ClusterMap, ConnectError>)> {
    let (sender, receiver) = mpsc::channel();
    for address in addresses {
        let (sender, others) = (sender.clone(), Vec::new());
        let options = ConnectOptions { address, others, view: None, ..options.clone() };
        let fetch = move || {
            let map = options.fetch_map(timeout).map(|(map, _)| map);
            // Fails only if there was a good answer before.
            let _ = sender.send((options.address, map));
        };
        let thread = std::thread::Builder::new().name("farside-map".into()).spawn(fetch);
        if let Err(error) = thread {
            tracing::warn!("cannot ask a server for the map of the cluster: {error}");
        }
    }
    receiver
}

/// Waits until this time for an answer; `None` if there is none, or if no more will come.
fn receive<T>(answers: &Receiver<T>, until: Instant) -> Option<T> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match answers.recv_timeout(interrupt::step(left)) {
            Err(RecvTimeoutError::Timeout) if !left.is_zero() && !interrupt::gives_up() => {}
            received => return received.ok(),
        }
    }
}

/// Asks the seeds for the map of their cluster, again and again until the timeout.
///
/// Takes the cluster that most of the seeds name that answer: a seed that is down, silent or of
/// another cluster does no harm.
///
/// # Errors
/// The error of a seed, if none answers. [`ConnectError::SeveralClusters`] if as many seeds name
/// one cluster as another.
pub(crate) fn discover(options: &ConnectOptions) -> Result<Discovered, ConnectError> {
    let started = Instant::now();
    let seeds: Vec<_> = std::iter::once(&options.address).chain(&options.others).cloned().collect();
    let mut attempts = farside_control::attach::Attempts::within(options.timeout);
    loop {
        let timeout = attempt_timeout(started.elapsed(), options);
        let error = match ask_seeds(&seeds, options, timeout) {
            Err(error @ ConnectError::Unreachable { .. }) => error,
            discovered => return discovered,
        };
        let tried = started.elapsed();
        if let ConnectError::Unreachable { contact, .. } = error {
            attempts.set_timeout(options.timeout_after(contact));
        }
        let Some(pause) = attempts.pause_after(tried) else { return Err(error.tried_for(tried)) };
        interrupt::sleep(pause);
    }
}

fn ask_seeds(
    seeds: &[Address],
    options: &ConnectOptions,
    timeout: Duration,
) -> Result<Discovered, ConnectError> {
    let answers = fetch_maps(seeds.to_vec(), options, timeout);
    let mut maps: Vec<(ClusterMap, Vec<Address>)> = Vec::new();
    let (mut failed, mut has_no_cluster) = (None, false);
    let mut until = Instant::now() + timeout + FURTHER_SEEDS_TIMEOUT;
    while let Some((seed, answer)) = receive(&answers, until) {
        match answer {
            Ok(map) => {
                until = until.min(Instant::now() + FURTHER_SEEDS_TIMEOUT);
                match maps.iter_mut().find(|(known, _)| known.cluster == map.cluster) {
                    Some((known, of_seeds)) => {
                        known.merge(&map);
                        of_seeds.push(seed);
                    }
                    None => maps.push((map, vec![seed])),
                }
                if maps.iter().any(|(_, of_seeds)| of_seeds.len() * 2 > seeds.len()) {
                    break;
                }
            }
            Err(ConnectError::Refused { source: Refusal::NoCluster, .. }) => has_no_cluster = true,
            // A seed that is merely down must not hide why another one refuses.
            Err(error) => {
                let is_worse = !matches!(error, ConnectError::Unreachable { .. });
                if failed.is_none() || is_worse {
                    failed = Some(error);
                }
            }
        }
    }
    maps.sort_by_key(|(_, of_seeds)| std::cmp::Reverse(of_seeds.len()));
    if let [(_, first), (_, second), ..] = &*maps
        && first.len() == second.len()
    {
        let [first, second] = [first, second].map(|seeds| farside_config::addresses_text(seeds));
        return Err(ConnectError::SeveralClusters { first, second });
    }
    let mut maps = maps.into_iter();
    let Some((map, _)) = maps.next() else {
        return match failed {
            _ if has_no_cluster => Ok(Discovered::NoCluster),
            Some(error) => Err(error),
            None => Err(unreachable(farside_config::addresses_text(seeds), Contact::Silent, None)),
        };
    };
    for (_, of_seeds) in maps {
        let seeds = farside_config::addresses_text(&of_seeds);
        tracing::warn!("{seeds} names another cluster than the other seeds, and is not used");
    }
    Ok(Discovered::Map(map))
}
