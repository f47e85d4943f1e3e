//! The script of a scenario's client.

use farside_fabric::Nanos;

use super::clock::PACE;
use super::mutant::Mutant;
use super::scenario::{Key, Op};

/// The operations of one client, and the client's properties.
#[derive(Clone)]
pub struct Script {
    pub(super) known: Vec<Key>,
    /// The operations of each lane, one after another.
    pub(super) lanes: Vec<Vec<Op>>,
    pub(super) blocks: u64,
    pub(super) in_one_step: bool,
    pub(super) guess: Option<usize>,
    /// How many sixteenths of a second its clock counts in a second.
    pub(super) pace: u8,
    pub(super) pauses: bool,
    pub(super) shares: bool,
    pub(super) takes: bool,
    pub(super) mutant: Option<Mutant>,
}

/// Returns a client without operations.
pub fn client() -> Script {
    Script {
        known: Vec::new(),
        lanes: vec![Vec::new()],
        blocks: 4,
        in_one_step: false,
        guess: None,
        pace: PACE,
        pauses: false,
        shares: false,
        takes: false,
        mutant: None,
    }
}

impl Script {
    fn then(mut self, op: Op) -> Self {
        if let Some(lane) = self.lanes.last_mut() {
            lane.push(op);
        }
        self
    }

    /// Whether an operation of the client can learn something that its own chains did not bring.
    pub(super) fn is_entangled(&self) -> bool {
        self.lanes.len() > 1 || self.shares || self.takes
    }

    pub(super) fn operations(&self) -> usize {
        self.lanes.iter().map(Vec::len).sum()
    }

    /// The client has the key's location in its cache.
    pub fn knows(mut self, key: Key) -> Self {
        self.known.push(key);
        self
    }

    /// The client has this many free blocks.
    pub fn blocks(mut self, blocks: u64) -> Self {
        self.blocks = blocks;
        self
    }

    /// The operations that follow run on another lane of the session, at the same time.
    pub fn lane(mut self) -> Self {
        self.lanes.push(Vec::new());
        self
    }

    /// All operations of the client are one step, for scripts that are too long to explore.
    pub fn in_one_step(mut self) -> Self {
        self.in_one_step = true;
        self
    }

    /// The client's INSERTs are blind: they claim a slot before they read the window. The first one
    /// claims this slot. After a failed claim, INSERTs are no longer blind.
    pub fn guesses(mut self, slot: usize) -> Self {
        self.guess = Some(slot);
        self
    }

    /// The client's clock runs slow or fast: it counts this many sixteenths of a second in a
    /// second.
    pub fn pace(mut self, sixteenths: u8) -> Self {
        self.pace = sixteenths;
        self
    }

    /// The client may be paused, with its clock: see [`super::Scenario::pauses`].
    pub fn pauses(mut self) -> Self {
        self.pauses = true;
        self
    }

    /// The client shares a location cache with all others that share, as sessions of one client do.
    pub fn shares(mut self) -> Self {
        self.shares = true;
        self
    }

    /// The client follows this mutant of the protocol.
    pub fn mutant(mut self, mutant: Mutant) -> Self {
        self.mutant = Some(mutant);
        self
    }

    /// The client requests more blocks from the depot, which gives one for each request.
    pub fn takes(mut self) -> Self {
        self.takes = true;
        self
    }

    /// The client returns all its free blocks to the depot.
    pub fn gives_back(self) -> Self {
        self.then(Op::GiveBack)
    }

    /// The client does nothing for this time.
    pub fn sleeps(self, time: Nanos) -> Self {
        self.then(Op::Sleep(time))
    }

    /// PUT of a value whose block is twice as large.
    pub fn put_large(self, key: Key) -> Self {
        self.then(Op::PutLarge(key))
    }

    /// GET.
    pub fn get(self, key: Key) -> Self {
        self.then(Op::Get(key))
    }

    /// PUT.
    pub fn put(self, key: Key) -> Self {
        self.then(Op::Put(key))
    }

    /// PUT if absent.
    pub fn insert(self, key: Key) -> Self {
        self.then(Op::Insert(key))
    }

    /// PUT if present.
    pub fn update(self, key: Key) -> Self {
        self.then(Op::Update(key))
    }

    /// DELETE.
    pub fn delete(self, key: Key) -> Self {
        self.then(Op::Delete(key))
    }

    /// Compare-and-exchange by value.
    pub fn exchange(self, key: Key, expected: &'static str) -> Self {
        self.then(Op::Exchange(key, expected))
    }

    /// Compare-and-exchange by the version seen last.
    pub fn exchange_seen(self, key: Key) -> Self {
        self.then(Op::ExchangeSeen(key))
    }

    /// The client changes two other regions, one after the other.
    pub fn raises_both(self) -> Self {
        self.then(Op::RaiseBoth)
    }

    /// Ends the step of a client whose operations are [one step](Self::in_one_step), so that other
    /// clients can act before the next step.
    pub fn yields(self) -> Self {
        self.then(Op::Yield)
    }

    /// Any operation.
    pub fn op(self, op: Op) -> Self {
        self.then(op)
    }
}
