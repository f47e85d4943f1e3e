//! The script of a scenario's client.

use std::fmt;

use farside_fabric::Nanos;

use crate::memory::PACE;
use crate::mutant::Mutant;
use crate::region::Key;

/// The number of operations of a lane that a report shows.
const OPS_SHOWN_MAX: usize = 8;

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
    /// Exchange by the version that the script's last GET of the key found. Skipped if that GET
    /// found no value.
    ExchangeSeen(Key),
    /// DELETE by that version, as `ExchangeSeen`.
    DeleteSeen(Key),
    Take(Key),
    GetOrInsert(Key),
    /// Gives the value an expiry that no other operation gives.
    Touch(Key),
    /// PUT that keeps the expiry of the value that it replaces.
    PutKeepTtl(Key),
    /// Adds 1.
    Increment(Key),
    /// Appends a digit.
    Append(Key),
    /// PUT of a value that expires [`crate::TTL_NS`] after the start of the execution.
    PutTtl(Key),
    /// INSERT of such a value.
    InsertTtl(Key),
    PutLarge(Key),
    GiveBack,
    Sleep(Nanos),
    /// Changes two other regions, one after the other.
    RaiseBoth,
    /// No operation: see [`Script::yields`].
    Yield,
}

/// The operations of one client, and the client's properties.
#[derive(Clone, Debug, Default)]
pub struct Script {
    pub(crate) known: Vec<Key>,
    /// The operations of each lane, one after another.
    pub(crate) lanes: Vec<Vec<Op>>,
    pub(crate) blocks: u64,
    pub(crate) in_one_step: bool,
    pub(crate) guess: Option<usize>,
    /// The number of sixteenths of a second that the client's clock counts in a second.
    pub(crate) pace: u8,
    pub(crate) pauses: bool,
    pub(crate) shares: bool,
    pub(crate) takes: bool,
    pub(crate) mutant: Option<Mutant>,
}

/// Returns a client without operations.
pub fn client() -> Script {
    Script { lanes: vec![Vec::new()], blocks: 4, pace: PACE, ..Script::default() }
}

impl Script {
    fn then(mut self, op: Op) -> Self {
        if let Some(lane) = self.lanes.last_mut() {
            lane.push(op);
        }
        self
    }

    /// Whether an operation of the client can learn something that its own chains did not bring.
    pub(crate) fn is_entangled(&self) -> bool {
        self.lanes.len() > 1 || self.shares || self.takes
    }

    pub(crate) fn operations(&self) -> usize {
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
    /// claims this slot. After an INSERT that found its key present, INSERTs are no longer blind.
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

    /// The client may be paused, with its clock: see [`crate::Scenario::pauses`].
    pub fn pauses(mut self) -> Self {
        self.pauses = true;
        self
    }

    /// The client shares a location cache with all others that share, as sessions of one client do.
    pub fn shares(mut self) -> Self {
        self.shares = true;
        self
    }

    /// The client follows this mutant of the protocol, if any.
    pub fn mutant(mut self, mutant: impl Into<Option<Mutant>>) -> Self {
        self.mutant = mutant.into();
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

    /// DELETE by the version seen last.
    pub fn delete_seen(self, key: Key) -> Self {
        self.then(Op::DeleteSeen(key))
    }

    /// GET, and INSERT if the key is absent.
    pub fn get_or_insert(self, key: Key) -> Self {
        self.then(Op::GetOrInsert(key))
    }

    /// Gives the value another expiry.
    pub fn touch(self, key: Key) -> Self {
        self.then(Op::Touch(key))
    }

    /// PUT of a value that expires [`crate::TTL_NS`] after the start of the execution.
    pub fn put_ttl(self, key: Key) -> Self {
        self.then(Op::PutTtl(key))
    }

    /// INSERT of such a value.
    pub fn insert_ttl(self, key: Key) -> Self {
        self.then(Op::InsertTtl(key))
    }

    /// Appends a digit to a number.
    pub fn append(self, key: Key) -> Self {
        self.then(Op::Append(key))
    }

    /// PUT that keeps the expiry.
    pub fn put_keep_ttl(self, key: Key) -> Self {
        self.then(Op::PutKeepTtl(key))
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

/// One line: the operations of each lane, or the first ones of a long script, and the properties
/// that a table of scenarios varies.
impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lane = |ops: &Vec<Op>| {
            let more = if ops.len() > OPS_SHOWN_MAX { ", ..." } else { "" };
            let ops = ops.iter().take(OPS_SHOWN_MAX).map(|op| format!("{op:?}"));
            ops.collect::<Vec<_>>().join(", ") + more
        };
        write!(f, "{}", self.lanes.iter().map(lane).collect::<Vec<_>>().join(" & "))?;
        self.known.iter().try_for_each(|key| write!(f, " knows {key}"))?;
        self.guess.iter().try_for_each(|slot| write!(f, " guesses {slot}"))?;
        if self.shares { write!(f, " shares") } else { Ok(()) }
    }
}
