//! What a scenario is: what there is at the start, and what each client does.

use farside_fabric::Nanos;

use super::mutant::Mutant;
use super::script::Script;
use super::server::Chore;

/// What the fabric promises as the shortest round trip.
pub(super) const ROUND_TRIP_MIN_NS: Nanos = 20_000;

/// A key by its number; see [`super::KEYS`].
pub type Key = usize;

/// One operation of a script. Values name themselves after the client that stores them: `A1` is
/// what client A stores with its first operation; what there is at the start is `i0`, by the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operations of `Session`")]
pub enum Op {
    Get(Key),
    Put(Key),
    Insert(Key),
    Update(Key),
    Delete(Key),
    Exchange(Key, &'static str),
    /// By the version that the script's last GET of the key found; left out if it found none.
    ExchangeSeen(Key),
    PutLarge(Key),
    GiveBack,
    Sleep(Nanos),
    /// Changes two other regions, one after the other.
    RaiseBoth,
    /// Nothing: see [`Script::yields`].
    Yield,
}

/// A split of the subtable that the keys are in, by the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitting {
    /// The directory's depth before.
    pub(super) depth: u8,
    /// How many slots are moved at a time.
    pub(super) lanes: u16,
    pub(super) mutant: Option<Mutant>,
}

/// What there is at the start, what each client does, and what may happen meanwhile.
#[derive(Clone)]
pub struct Scenario {
    pub(super) name: String,
    pub(super) slots: usize,
    pub(super) used: usize,
    pub(super) stored: Vec<Key>,
    pub(super) removed: Vec<Key>,
    pub(super) marked: Vec<Key>,
    pub(super) clients: Vec<Script>,
    /// What the fabric promises as the shortest round trip, and what it keeps.
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
    /// What the server does other than it should, except in splits.
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

    /// The key is there at the start.
    pub fn stored(mut self, key: Key) -> Self {
        self.stored.push(key);
        self
    }

    /// The key was there once; its slot remembers its hint.
    pub fn removed(mut self, key: Key) -> Self {
        self.removed.push(key);
        self
    }

    /// The key is there, its block marked by a client that died before the compare-and-swap.
    pub fn marked(mut self, key: Key) -> Self {
        self.marked.push(key);
        self.stored(key)
    }

    /// How many slots of the window can be used, up to 7.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// So many of the slots, the last ones, were used before, if nothing is said later.
    pub fn used(mut self, slots: usize) -> Self {
        self.used = slots;
        self
    }

    /// A client that takes part.
    pub fn client(mut self, script: Script) -> Self {
        self.clients.push(script);
        self
    }

    /// At up to `most` moments the clock jumps by one of these.
    pub fn jumps(mut self, max: u32, by: &[Nanos]) -> Self {
        (self.jumps_max, self.jumps) = (max, by.to_vec());
        self
    }

    /// Up to so many clients die, anywhere.
    pub fn deaths(mut self, max: u32) -> Self {
        self.deaths_max = max;
        self
    }

    /// Up to so many connections break, anywhere; the client gets another.
    pub fn losses(mut self, max: u32) -> Self {
        self.losses_max = max;
        self
    }

    /// The server notices each death and each lost connection at some moment: it fences the client,
    /// whose last verbs may be executed until then, and clears what it left.
    pub fn sweeps(mut self) -> Self {
        self.sweeps = true;
        self
    }

    /// All clients are sessions of one and share a location cache.
    pub fn shares_locations(mut self) -> Self {
        self.name += ", shared locations";
        self.clients.iter_mut().for_each(|client| client.shares = true);
        self
    }

    /// There is a depot. It has all blocks of a chunk but one, the second one, which has key 0.
    pub fn depot(mut self) -> Self {
        self.has_depot = true;
        self.stored(0)
    }

    /// Up to so often a client is paused at any moment, and its clock stands still, until any later
    /// one; the server fences it if it has not answered for this long by then.
    pub fn pauses(mut self, max: u32, answer_timeout_ns: Nanos) -> Self {
        (self.pauses_max, self.answer_timeout_ns) = (max, Some(answer_timeout_ns));
        self
    }

    /// Up to so often the server is killed and started again, and every client gets another
    /// connection.
    pub fn renewals(mut self, max: u32) -> Self {
        self.renewals_max = max;
        self
    }

    /// The server's chores follow a protocol with a rule broken.
    pub fn server_mutant(mut self, mutant: Mutant) -> Self {
        self.server = Some(mutant);
        self
    }

    /// The mutants among those who take part that are not among these.
    pub(super) fn unfired(&self, fired: &[Mutant]) -> Vec<Mutant> {
        let clients = self.clients.iter().filter_map(|client| client.mutant);
        let all = clients.chain(self.server).chain(self.split.and_then(|split| split.mutant));
        all.filter(|mutant| !fired.contains(mutant)).collect()
    }

    /// What the server has to do, in this order.
    pub(super) fn chores(&self) -> Vec<Chore> {
        let lost = if self.sweeps { self.deaths_max + self.losses_max } else { 0 };
        let sweeps = (0..lost).map(|_| Chore::Sweep);
        let splits = self.split.iter().map(|_| Chore::Split);
        let reuse = self.reuse.map(|returns| Chore::Reuse { returns });
        splits.chain(reuse).chain(sweeps).collect()
    }

    /// Meanwhile, at any moment, the server splits the subtable of all keys, so many slots at a
    /// time; the directory is so deep at first, 0 or 1.
    pub fn splits(mut self, depth: u8, lanes: u16) -> Self {
        self.split = Some(Splitting { depth, lanes, mutant: None });
        self
    }

    /// After that, and GRACE, the server splits the subtable where key 0 is then, and uses the
    /// place of the first one again: for key 0, or else for keys that part from it.
    pub fn reuses(mut self, returns: bool) -> Self {
        self.reuse = Some(returns);
        self
    }

    /// Up to so often the server is killed in the middle of the split, and goes on with it.
    pub fn restarts(mut self, max: u32) -> Self {
        self.restarts_max = max;
        self
    }

    /// Time passes: a chain takes as long as the fabric promises at least.
    pub fn round_trips(mut self) -> Self {
        self.round_trip_ns = self.round_trip_min_ns;
        self
    }

    /// How late a chain can take effect (L).
    pub fn lateness(mut self, lateness_max_ns: Nanos) -> Self {
        self.lateness_max_ns = lateness_max_ns;
        self
    }

    /// Other random numbers for the clients: other slots for their INSERTs.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// All follow this protocol with a rule broken.
    pub fn mutant_for_all(mut self, mutant: Mutant) -> Self {
        self.clients.iter_mut().for_each(|client| client.mutant = Some(mutant));
        if let Some(split) = &mut self.split {
            split.mutant = Some(mutant);
        }
        self
    }

    /// How many chains an operation gets; it is left pending when it wants more.
    pub fn chains(mut self, max: u32) -> Self {
        self.chains_max = max;
        self
    }
}
