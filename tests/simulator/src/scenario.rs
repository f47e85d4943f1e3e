//! A scenario: the region at the start, the clients' scripts, and the events that may happen.

use std::fmt;

use farside_fabric::{Nanos, RegionIndex};

use crate::cluster::{FORMER, LATTER, OTHER};
use crate::memory::TIMING;
use crate::mutant::Mutant;
use crate::region::Key;
use crate::script::Script;

/// The number of slots that clients can use by default.
const SLOTS: usize = 2;

/// The server's split of the keys' subtable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Splitting {
    /// The depth of the directory before the split.
    pub(crate) depth: u8,
    /// The number of slots that are moved at a time.
    pub(crate) lanes: u16,
    pub(crate) mutant: Option<Mutant>,
}

/// A task that the server does once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
    Split,
    /// Splits the subtable that key 0 is in after the first split. One half goes into the place
    /// that the first split emptied: key 0's half if `key_0_returns`.
    Reuse {
        key_0_returns: bool,
    },
    /// Clears the slots of lost clients.
    Sweep,
    /// Evicts a key.
    Evict(Key),
    /// Removes the first value that it finds expired.
    Expire,
    /// Clears the tombstones that the removals before it left.
    ClearTombs,
}

/// The number of events of each kind: those of an execution so far, or a scenario's limits.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(crate) struct EventCounts {
    pub(crate) jumps: u32,
    pub(crate) pauses: u32,
    pub(crate) deaths: u32,
    pub(crate) losses: u32,
    /// Restarts of the server that end all connections.
    pub(crate) server_restarts: u32,
    /// Restarts of the server in the middle of a split.
    pub(crate) split_restarts: u32,
    /// Times at which the first owner of the moving shard stands still.
    pub(crate) freezes: u32,
    /// Heartbeats of all clients to that owner.
    pub(crate) heartbeats: u32,
    /// Further connections to that owner.
    pub(crate) reconnects: u32,
    /// Maps that are older than the client's.
    pub(crate) old_maps: u32,
}

/// The region at the start, the clients' scripts, and the events that may happen.
#[derive(Clone, Debug, Default)]
pub struct Scenario {
    pub(crate) slots: usize,
    pub(crate) used: usize,
    pub(crate) stored: Vec<Key>,
    pub(crate) removed: Vec<Key>,
    pub(crate) marked: Vec<Key>,
    /// The stored keys whose values expire.
    pub(crate) expiring: Vec<Key>,
    /// The keys that the server evicts, one after another.
    pub(crate) evicted: Vec<Key>,
    /// How often the server looks for an expired value.
    pub(crate) expiries: usize,
    pub(crate) clients: Vec<Script>,
    /// The time that chains really take.
    pub(crate) round_trip_ns: Nanos,
    pub(crate) limits: EventCounts,
    pub(crate) jumps: Vec<Nanos>,
    pub(crate) answer_timeout_ns: Option<Nanos>,
    pub(crate) sweeps: bool,
    pub(crate) has_depot: bool,
    /// Whether large values have extents.
    pub(crate) has_extents: bool,
    /// The mutant that the server follows, except in splits.
    pub(crate) server: Option<Mutant>,
    pub(crate) split: Option<Splitting>,
    pub(crate) reuse: Option<bool>,
    /// Whether there is a cluster, in which the shard of key 0 changes its region.
    pub(crate) moves: bool,
    pub(crate) late_answers: bool,
    pub(crate) records_fail: bool,
    pub(crate) chains_max: u32,
    pub(crate) seed: u64,
}

impl Scenario {
    /// A scenario with two free slots and nothing stored.
    pub fn new() -> Self {
        Self { slots: SLOTS, chains_max: 16, ..Self::default() }
    }

    /// The key is stored at the start.
    pub fn stored(mut self, key: Key) -> Self {
        self.stored.push(key);
        self
    }

    /// The key was stored and deleted before the start. Its slot still holds the hint.
    pub fn removed(mut self, key: Key) -> Self {
        self.removed.push(key);
        self
    }

    /// The key is stored, and its block was marked by a client that died before its
    /// compare-and-swap.
    pub fn marked(mut self, key: Key) -> Self {
        self.marked.push(key);
        self.stored(key)
    }

    /// The key is stored, and its value expires [`crate::TTL_NS`] after the start.
    pub fn expiring(mut self, key: Key) -> Self {
        self.expiring.push(key);
        if self.stored.contains(&key) { self } else { self.stored(key) }
    }

    /// The server evicts this key at any moment, after the keys of earlier calls. GRACE later it
    /// clears the slot, after a split if there is one.
    pub fn evicts(mut self, key: Key) -> Self {
        self.evicted.push(key);
        self
    }

    /// The server removes an expired value, at any moment after it has evicted keys. It looks
    /// `max` times for one.
    pub fn expires(mut self, max: usize) -> Self {
        self.expiries = max;
        self
    }

    /// The number of slots that clients can use.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// The last `slots` usable slots were used before the start. The default is 0.
    pub fn used(mut self, slots: usize) -> Self {
        self.used = slots;
        self
    }

    /// Adds a client.
    pub fn client(mut self, script: Script) -> Self {
        self.clients.push(script);
        self
    }

    /// The clock jumps up to `max` times, each time by one of these times.
    pub fn jumps(mut self, max: u32, times: &[Nanos]) -> Self {
        (self.limits.jumps, self.jumps) = (max, times.to_vec());
        self
    }

    /// Up to `max` clients die, each at any moment.
    pub fn deaths(mut self, max: u32) -> Self {
        self.limits.deaths = max;
        self
    }

    /// Up to `max` connections break, each at any moment. The client then reconnects.
    pub fn losses(mut self, max: u32) -> Self {
        self.limits.losses = max;
        self
    }

    /// The server notices each death and each lost connection at some moment. It fences the client,
    /// whose verbs in flight may be executed until then, and clears its slots.
    pub fn sweeps(mut self) -> Self {
        self.sweeps = true;
        self
    }

    /// All clients share a location cache, as sessions of one client do.
    pub fn shares_locations(mut self) -> Self {
        self.clients.iter_mut().for_each(|client| client.shares = true);
        self
    }

    /// The server has a depot with all blocks of a chunk except the second one, which holds key 0.
    pub fn depot(mut self) -> Self {
        self.has_depot = true;
        self.stored(0)
    }

    /// Large values have extents.
    pub fn extents(mut self) -> Self {
        self.has_extents = true;
        self
    }

    /// Clients are paused up to `max` times, from any moment to any later one. A paused client's
    /// clock stands still. The server fences the client if the pause is longer than
    /// `answer_timeout_ns`.
    pub fn pauses(mut self, max: u32, answer_timeout_ns: Nanos) -> Self {
        (self.limits.pauses, self.answer_timeout_ns) = (max, Some(answer_timeout_ns));
        self
    }

    /// The server is killed and restarted up to `max` times, and every client reconnects.
    pub fn server_restarts(mut self, max: u32) -> Self {
        self.limits.server_restarts = max;
        self
    }

    /// The server's chores follow this mutant of the protocol.
    pub fn server_mutant(mut self, mutant: Mutant) -> Self {
        self.server = Some(mutant);
        self
    }

    /// Returns the mutants of the scenario that are not in `fired`.
    pub(crate) fn unfired(&self, fired: &[Mutant]) -> Vec<Mutant> {
        self.mutants().filter(|mutant| !fired.contains(mutant)).collect()
    }

    fn mutants(&self) -> impl Iterator<Item = Mutant> {
        let clients = self.clients.iter().filter_map(|client| client.mutant);
        clients.chain(self.server).chain(self.split.and_then(|split| split.mutant))
    }

    /// Returns the regions with keys.
    pub(crate) fn regions(&self) -> &'static [RegionIndex] {
        if self.moves { &[FORMER, LATTER, OTHER] } else { &[RegionIndex::FIRST] }
    }

    /// Returns the server's chores in their order.
    pub(crate) fn chores(&self) -> Vec<Chore> {
        let lost = if self.sweeps { self.limits.deaths + self.limits.losses } else { 0 };
        let sweeps = (0..lost).map(|_| Chore::Sweep);
        let splits = self.split.iter().map(|_| Chore::Split);
        let reuse = self.reuse.map(|key_0_returns| Chore::Reuse { key_0_returns });
        let mut splits = Some(splits.chain(reuse));
        let evictions = self.evicted.iter().map(|key| Chore::Evict(*key));
        let removals = evictions.chain((0..self.expiries).map(|_| Chore::Expire));
        let mut chores = Vec::new();
        for removal in removals {
            chores.push(removal);
            chores.extend(splits.take().into_iter().flatten());
            chores.push(Chore::ClearTombs);
        }
        chores.extend(splits.into_iter().flatten());
        chores.extend(sweeps);
        chores
    }

    /// The server splits the subtable of all keys at any moment, `lanes` slots at a time. The
    /// directory has this depth before, 0 or 1.
    pub fn splits(mut self, depth: u8, lanes: u16) -> Self {
        self.split = Some(Splitting { depth, lanes, mutant: None });
        self
    }

    /// GRACE after the first split, the server splits the subtable that key 0 is in, and reuses the
    /// place of the first subtable: for key 0's half of the keys, or for the other half.
    pub fn reuses(mut self, key_0_returns: bool) -> Self {
        self.reuse = Some(key_0_returns);
        self
    }

    /// The server is killed up to `max` times in the middle of the split, and continues it.
    pub fn split_restarts(mut self, max: u32) -> Self {
        self.limits.split_restarts = max;
        self
    }

    /// There is a cluster of two shards. An operator gives the shard of key 0 another, empty
    /// region. Its former server stands still up to `freezes` times, from any moment to any later
    /// one. The clients send it up to `heartbeats` heartbeats.
    pub fn moves(mut self, freezes: u32, heartbeats: u32) -> Self {
        (self.limits.freezes, self.limits.heartbeats) = (freezes, heartbeats);
        Self { moves: true, ..self }
    }

    /// The owner answers a heartbeat at any moment after it was sent, and the answer arrives at any
    /// moment after that. Otherwise both happen at once.
    pub fn late_answers(mut self) -> Self {
        self.late_answers = true;
        self
    }

    /// The owner may be unable to read the records when it is told that it lost the shard.
    pub fn records_fail(mut self) -> Self {
        self.records_fail = true;
        self
    }

    /// Clients whose trust has ended connect to the former server again, up to `max` times.
    pub fn reconnects(mut self, max: u32) -> Self {
        self.limits.reconnects = max;
        self
    }

    /// Clients get up to `max` maps that are older than theirs.
    pub fn old_maps(mut self, max: u32) -> Self {
        self.limits.old_maps = max;
        self
    }

    /// Each chain takes the time of the shortest round trip that the fabric promises.
    pub fn round_trips(mut self) -> Self {
        self.round_trip_ns = TIMING.round_trip_min_ns;
        self
    }

    /// The seed of the clients' random numbers, which choose the slots of their INSERTs.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// All clients, and the server in its splits, follow this mutant of the protocol.
    pub fn mutant_for_all(mut self, mutant: Mutant) -> Self {
        self.clients.iter_mut().for_each(|client| client.mutant = Some(mutant));
        if let Some(split) = &mut self.split {
            split.mutant = Some(mutant);
        }
        self
    }

    /// Limit on the chains of an operation. An operation that needs more stays unanswered.
    pub fn chains(mut self, max: u32) -> Self {
        self.chains_max = max;
        self
    }
}

/// One line: the mutants, the clients, and the options without a default value.
impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut mutants: Vec<_> = self.mutants().map(|mutant| format!("{mutant:?}: ")).collect();
        mutants.dedup();
        let clients: Vec<_> = self.clients.iter().map(Script::to_string).collect();
        write!(f, "{}{}", mutants.concat(), clients.join(" beside "))?;
        let limits = &self.limits;
        let numbers = [
            ("slots", self.slots as u64, SLOTS as u64),
            ("used", self.used as u64, 0),
            ("seed", self.seed, 0),
            ("jumps", limits.jumps.into(), 0),
            ("pauses", limits.pauses.into(), 0),
            ("deaths", limits.deaths.into(), 0),
            ("losses", limits.losses.into(), 0),
            ("server_restarts", limits.server_restarts.into(), 0),
            ("split_restarts", limits.split_restarts.into(), 0),
            ("freezes", limits.freezes.into(), 0),
            ("heartbeats", limits.heartbeats.into(), 0),
            ("reconnects", limits.reconnects.into(), 0),
            ("old_maps", limits.old_maps.into(), 0),
            ("expires", self.expiries as u64, 0),
        ];
        for (name, number, default) in numbers {
            if number != default {
                write!(f, ", {name}={number}")?;
            }
        }
        for (name, keys) in [
            ("stored", &self.stored),
            ("removed", &self.removed),
            ("marked", &self.marked),
            ("expiring", &self.expiring),
            ("evicts", &self.evicted),
        ] {
            if !keys.is_empty() {
                write!(f, ", {name}={keys:?}")?;
            }
        }
        if let Some(Splitting { depth, lanes, .. }) = self.split {
            write!(f, ", split from depth {depth} in {lanes} lanes")?;
        }
        let reuse = self.reuse.map(|returns| format!("key_0_returns={returns}"));
        let flags = [
            (self.sweeps, "sweeps"),
            (self.has_depot, "depot"),
            (self.has_extents, "extents"),
            (self.moves, "moves"),
        ];
        let flags = flags.iter().filter(|(is_set, _)| *is_set).map(|(_, name)| (*name).to_owned());
        flags.chain(reuse).try_for_each(|option| write!(f, ", {option}"))
    }
}
