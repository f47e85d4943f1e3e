//! A scenario: the region at the start, the clients' scripts, and the events that may happen.

use farside_fabric::Nanos;

use super::mutant::Mutant;
use super::script::Script;
use super::server::Chore;

/// The shortest round trip that the fabric promises.
pub(super) const ROUND_TRIP_MIN_NS: Nanos = 20_000;

/// A key by its number; see [`super::KEYS`].
pub type Key = usize;

/// One operation of a script. A value is named after its writer: `A1` is the value that client A
/// stores with its first operation. `i0` is the value of key 0 at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operations of `Session`")]
pub enum Op {
    Get(Key),
    Put(Key),
    Insert(Key),
    Update(Key),
    Delete(Key),
    Exchange(Key, &'static str),
    /// Exchange by the version that the script's last GET of the key found. Skipped if it found
    /// none.
    ExchangeSeen(Key),
    PutLarge(Key),
    GiveBack,
    Sleep(Nanos),
    /// Changes two other regions, one after the other.
    RaiseBoth,
    /// No operation: see [`Script::yields`].
    Yield,
}

/// The server's split of the keys' subtable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitting {
    /// The depth of the directory before the split.
    pub(super) depth: u8,
    /// The number of slots that are moved at a time.
    pub(super) lanes: u16,
    pub(super) mutant: Option<Mutant>,
}

/// The region at the start, the clients' scripts, and the events that may happen.
#[derive(Clone)]
pub struct Scenario {
    pub(super) name: String,
    pub(super) slots: usize,
    pub(super) used: usize,
    pub(super) stored: Vec<Key>,
    pub(super) removed: Vec<Key>,
    pub(super) marked: Vec<Key>,
    pub(super) clients: Vec<Script>,
    /// The shortest round trip that the fabric promises, and the time that chains really take.
    pub(super) round_trip_min_ns: Nanos,
    pub(super) round_trip_ns: Nanos,
    pub(super) lateness_max_ns: Nanos,
    pub(super) jumps: Vec<Nanos>,
    pub(super) jumps_max: u32,
    pub(super) deaths_max: u32,
    pub(super) losses_max: u32,
    pub(super) renewals_max: u32,
    pub(super) sweeps: bool,
    pub(super) has_depot: bool,
    pub(super) pauses_max: u32,
    pub(super) answer_timeout_ns: Option<Nanos>,
    /// The mutant that the server follows, except in splits.
    pub(super) server: Option<Mutant>,
    pub(super) split: Option<Splitting>,
    pub(super) reuse: Option<bool>,
    pub(super) restarts_max: u32,
    pub(super) chains_max: u32,
    pub(super) seed: u64,
}

impl Scenario {
    /// A scenario with two free slots and nothing stored.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            slots: 2,
            used: 0,
            stored: Vec::new(),
            removed: Vec::new(),
            marked: Vec::new(),
            clients: Vec::new(),
            round_trip_min_ns: ROUND_TRIP_MIN_NS,
            round_trip_ns: 0,
            lateness_max_ns: 8_000_000_000,
            jumps: Vec::new(),
            jumps_max: 0,
            deaths_max: 0,
            losses_max: 0,
            renewals_max: 0,
            sweeps: false,
            has_depot: false,
            pauses_max: 0,
            answer_timeout_ns: None,
            server: None,
            split: None,
            reuse: None,
            restarts_max: 0,
            chains_max: 16,
            seed: 0,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
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

    /// The number of slots that clients can use.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// The last so many usable slots were used before the start. The default is none.
    pub fn used(mut self, slots: usize) -> Self {
        self.used = slots;
        self
    }

    /// Adds a client.
    pub fn client(mut self, script: Script) -> Self {
        self.clients.push(script);
        self
    }

    /// The clock jumps up to `max` times, each time by one of these.
    pub fn jumps(mut self, max: u32, by: &[Nanos]) -> Self {
        (self.jumps_max, self.jumps) = (max, by.to_vec());
        self
    }

    /// Up to `max` clients die, each at any moment.
    pub fn deaths(mut self, max: u32) -> Self {
        self.deaths_max = max;
        self
    }

    /// Up to `max` connections break, each at any moment. The client then reconnects.
    pub fn losses(mut self, max: u32) -> Self {
        self.losses_max = max;
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
        self.name += ", shared locations";
        self.clients.iter_mut().for_each(|client| client.shares = true);
        self
    }

    /// The server has a depot with all blocks of a chunk except the second one, which holds key 0.
    pub fn depot(mut self) -> Self {
        self.has_depot = true;
        self.stored(0)
    }

    /// Clients are paused up to `max` times, from any moment to any later one. A paused client's
    /// clock stands still. The server fences the client if the pause is longer than
    /// `answer_timeout_ns`.
    pub fn pauses(mut self, max: u32, answer_timeout_ns: Nanos) -> Self {
        (self.pauses_max, self.answer_timeout_ns) = (max, Some(answer_timeout_ns));
        self
    }

    /// The server is killed and restarted up to `max` times, and every client reconnects.
    pub fn renewals(mut self, max: u32) -> Self {
        self.renewals_max = max;
        self
    }

    /// The server's chores follow this mutant of the protocol.
    pub fn server_mutant(mut self, mutant: Mutant) -> Self {
        self.server = Some(mutant);
        self
    }

    /// Returns the mutants of the scenario that are not in `fired`.
    pub(super) fn unfired(&self, fired: &[Mutant]) -> Vec<Mutant> {
        let clients = self.clients.iter().filter_map(|client| client.mutant);
        let all = clients.chain(self.server).chain(self.split.and_then(|split| split.mutant));
        all.filter(|mutant| !fired.contains(mutant)).collect()
    }

    /// Returns the server's chores in their order.
    pub(super) fn chores(&self) -> Vec<Chore> {
        let lost = if self.sweeps { self.deaths_max + self.losses_max } else { 0 };
        let sweeps = (0..lost).map(|_| Chore::Sweep);
        let splits = self.split.iter().map(|_| Chore::Split);
        let reuse = self.reuse.map(|key_0_returns| Chore::Reuse { key_0_returns });
        splits.chain(reuse).chain(sweeps).collect()
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
    pub fn restarts(mut self, max: u32) -> Self {
        self.restarts_max = max;
        self
    }

    /// Chains take time: as long as the shortest round trip that the fabric promises.
    pub fn round_trips(mut self) -> Self {
        self.round_trip_ns = self.round_trip_min_ns;
        self
    }

    /// How late a chain can take effect (L).
    pub fn lateness(mut self, lateness_max_ns: Nanos) -> Self {
        self.lateness_max_ns = lateness_max_ns;
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
