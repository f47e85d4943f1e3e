//! What a client of a scenario does.

use farside_fabric::Nanos;

use super::clock::PACE;
use super::mutant::Mutant;
use super::scenario::{Key, Op};

/// What one client does.
#[derive(Clone)]
pub struct Script {
    pub(super) known: Vec<Key>,
    /// One after another, for each lane.
    pub(super) lanes: Vec<Vec<Op>>,
    pub(super) blocks: u64,
    pub(super) in_one_step: bool,
    pub(super) guess: Option<usize>,
    /// How many sixteenths of a second pass for it in a second.
    pub(super) pace: u8,
    pub(super) pauses: bool,
    pub(super) shares: bool,
    pub(super) takes: bool,
    pub(super) mutant: Option<Mutant>,
}

/// A client that does nothing yet.
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

    /// Whether what it knows does not follow from its own chains alone.
    pub(super) fn is_entangled(&self) -> bool {
        self.lanes.len() > 1 || self.shares || self.takes
    }

    pub(super) fn operations(&self) -> usize {
        self.lanes.iter().map(Vec::len).sum()
    }

    /// The key's location is in its cache.
    pub fn knows(mut self, key: Key) -> Self {
        self.known.push(key);
        self
    }

    /// It has only so many free blocks.
    pub fn blocks(mut self, blocks: u64) -> Self {
        self.blocks = blocks;
        self
    }

    /// What follows is done on another lane of the same session, at the same time.
    pub fn lane(mut self) -> Self {
        self.lanes.push(Vec::new());
        self
    }

    /// All that it does is one step: for those who do a lot.
    pub fn in_one_step(mut self) -> Self {
        self.in_one_step = true;
        self
    }

    /// Its INSERTs claim a slot of the row before they have looked, the first one this slot, until
    /// one of them was for nothing.
    pub fn guesses(mut self, slot: usize) -> Self {
        self.guess = Some(slot);
        self
    }

    /// Its clock runs slow or fast: so many sixteenths of a second pass for it in a second.
    pub fn pace(mut self, sixteenths: u8) -> Self {
        self.pace = sixteenths;
        self
    }

    /// Its virtual machine may be paused, with its clock: see [`super::Scenario::pauses`].
    pub fn pauses(mut self) -> Self {
        self.pauses = true;
        self
    }

    /// It is a session of the same client as all that share, and has their location cache.
    pub fn shares(mut self) -> Self {
        self.shares = true;
        self
    }

    /// It follows a protocol with a rule broken.
    pub fn mutant(mut self, mutant: Mutant) -> Self {
        self.mutant = Some(mutant);
        self
    }

    /// It gets more blocks from the depot: one a request.
    pub fn takes(mut self) -> Self {
        self.takes = true;
        self
    }

    /// It gives all its free blocks back to the depot.
    pub fn gives_back(self) -> Self {
        self.then(Op::GiveBack)
    }

    /// It does nothing for so long.
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

    /// It changes two other regions, one after the other.
    pub fn raises_both(self) -> Self {
        self.then(Op::RaiseBoth)
    }

    /// If all that it does is one step, that ends here, and others may act before the next.
    pub fn yields(self) -> Self {
        self.then(Op::Yield)
    }

    /// Any operation.
    pub fn op(self, op: Op) -> Self {
        self.then(op)
    }
}
