//! Watches an execution: passes operations and answers to the checker, and keeps the history.

use std::collections::HashMap;

use farside_fabric::RegionIndex;
use farside_linearizability::{
    Ended, Ending, Held, HistoryAnswer, HistoryCall, HistoryOperation, OPAQUE_MIN, Record,
    Register, RegisterFault, Value, numeric,
};
use farside_protocol::OperationError;

use crate::memory::{EXPIRES_AT_MS, mix};
use crate::region::{KEYS, Key};
use crate::script::Op;
use crate::session::{FoundValue, Reply};

/// The process that the history names for the emptying of a shard.
const OPERATOR: usize = 98;

/// The reason why an execution is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No order of the operations explains an answer.
    #[error("not linearizable")]
    NotLinearizable,
    /// One version has two values, or one value has two versions.
    #[error("version {0} stands for two writes")]
    Version(String),
    /// An operation failed in a way that nothing in the scenario explains.
    #[error("an operation failed: {0}")]
    Failed(String),
    /// The region is not consistent.
    #[error("the region is damaged: {0}")]
    Damaged(String),
    /// A session unlinked a head without holding this extent of it, by its offset.
    #[error("a head was unlinked by a session that does not hold its extent at {0:#x}")]
    Unheld(u64),
    /// A rule about the shards of a cluster is broken.
    #[error("{0}")]
    Cluster(String),
    /// A process can never continue.
    #[error("process {0} is stuck")]
    Stuck(usize),
    /// The checker gave no verdict, because there are too many explanations.
    #[error("too many explanations")]
    TooMany,
}

/// An operation of a script, with its values.
#[derive(Clone, Debug)]
pub(crate) struct RequestedOperation {
    pub(crate) operation: HistoryOperation,
    pub(crate) key: Key,
    /// The value to be stored.
    pub(crate) value: String,
    /// When the value to be stored expires, in milliseconds; 0 for never.
    pub(crate) expiry: u64,
    pub(crate) expected: Option<ExpectedContent>,
}

/// What an exchange, a DELETE or a removal by the server requires.
#[derive(Clone, Debug)]
pub(crate) enum ExpectedContent {
    /// This value.
    Value(&'static str),
    /// The version of this value.
    Seen(FoundValue),
    /// This value, with the time at which it expires.
    Removed(String, u64),
}

impl ExpectedContent {
    /// The value.
    fn text(&self) -> &str {
        match self {
            Self::Value(text) => text,
            Self::Seen(found) => &found.text,
            Self::Removed(text, _) => text,
        }
    }

    /// The value's expiry, as far as it counts.
    fn expiry(&self) -> Value {
        match self {
            Self::Value(_) => 0,
            Self::Seen(found) => found.expiry as Value,
            Self::Removed(_, expiry) => *expiry as Value,
        }
    }

    /// The value, or the version, for a report.
    fn shown(&self) -> String {
        match self {
            Self::Value(text) => (*text).to_owned(),
            Self::Seen(found) => found.version.to_string(),
            Self::Removed(text, _) => text.clone(),
        }
    }
}

impl RequestedOperation {
    /// Returns a request of a script.
    pub(crate) fn of(op: Op, value: String, expected: Option<ExpectedContent>) -> Self {
        let (operation, key) = Self::operation(op);
        let expires = matches!(op, Op::PutTtl(_) | Op::InsertTtl(_));
        let expiry = if expires { EXPIRES_AT_MS } else { 0 };
        Self { operation, key, value, expiry, expected }
    }

    /// Returns the request of an operation that stores and requires nothing.
    pub(crate) fn plain(op: Op) -> Self {
        Self::of(op, String::new(), None)
    }

    fn operation(op: Op) -> (HistoryOperation, Key) {
        match op {
            Op::Get(key) => (HistoryOperation::Get, key),
            Op::Put(key) | Op::PutTtl(key) | Op::PutLarge(key) => (HistoryOperation::Put, key),
            Op::Insert(key) | Op::InsertTtl(key) => (HistoryOperation::Insert, key),
            Op::Update(key) => (HistoryOperation::Update, key),
            Op::Delete(key) => (HistoryOperation::Delete, key),
            Op::Exchange(key, _) => (HistoryOperation::Exchange, key),
            Op::ExchangeSeen(key) => (HistoryOperation::ExchangeVersion, key),
            Op::DeleteSeen(key) => (HistoryOperation::DeleteVersion, key),
            Op::Take(key) => (HistoryOperation::Take, key),
            Op::GetOrInsert(key) => (HistoryOperation::GetOrInsert, key),
            Op::Touch(key) => (HistoryOperation::Touch, key),
            Op::PutKeepTtl(key) => (HistoryOperation::PutKeepTtl, key),
            Op::Increment(key) => (HistoryOperation::Increment, key),
            Op::Append(key) => (HistoryOperation::Append, key),
            Op::Yield | Op::GiveBack | Op::Sleep(_) | Op::RaiseBoth => {
                unreachable!("nothing is requested")
            }
        }
    }
}

#[derive(Default)]
pub(crate) struct Monitor {
    registers: Vec<Register>,
    numbers: HashMap<String, Value>,
    /// The value of each version of a region, and the reverse.
    versions: HashMap<(RegionIndex, String), Value>,
    version_of_value: HashMap<Held, (RegionIndex, String)>,
    pub(crate) history: Vec<Record>,
    /// The index of each operation in the history.
    records: HashMap<u32, usize>,
    time: u64,
    /// Whether the values with a time to live have expired.
    has_expired: bool,
}

impl Monitor {
    /// Starts with all keys absent.
    pub(crate) fn new() -> Self {
        let registers = vec![Register::default(); KEYS];
        Self { registers, ..Self::default() }
    }

    fn number(&mut self, text: &str) -> Value {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let next = OPAQUE_MIN + self.numbers.len() as Value;
        let number = numeric(text).unwrap_or(next);
        self.numbers.insert(text.to_owned(), number);
        number
    }

    /// Returns the id of a process's n-th operation.
    pub(crate) fn id(process: usize, n: u32) -> u32 {
        (process as u32) << 16 | n
    }

    pub(crate) fn record(&self, id: u32) -> &Record {
        &self.history[self.records[&id]]
    }

    /// Begins a process's n-th operation.
    pub(crate) fn invoke(&mut self, process: usize, n: u32, requested: &RequestedOperation) -> u32 {
        let RequestedOperation { operation, key, .. } = *requested;
        let value = self.number(&requested.value);
        let expected = requested.expected.as_ref().map(|expected| Held {
            value: self.number(expected.text()),
            expiry: expected.expiry(),
        });
        let expiry = requested.expiry as Value;
        let call = HistoryCall { operation, argument: value, expiry, expected };
        let id = Self::id(process, n);
        self.records.insert(id, self.history.len());
        self.registers[key].invoke(id, call, Ending::Unknown);
        self.time += 1;
        self.history.push(Record {
            process: process as u64,
            operation,
            key: format!("k{key}"),
            argument: operation.stores().then(|| requested.value.clone()),
            expected: requested.expected.as_ref().map(ExpectedContent::shown),
            result: Ended::Unknown,
            found: None,
            version: None,
            invoke: self.time,
            returned: None,
        });
        id
    }

    /// Ends an operation. `Err(None)`: the connection was lost, or a server did not answer.
    pub(crate) fn respond(
        &mut self,
        id: u32,
        key: Key,
        reply: &Result<Reply, Option<OperationError>>,
    ) -> Result<(), Violation> {
        self.time += 1;
        let at = self.records[&id];
        self.history[at].returned = Some(self.time);
        let reply = match reply {
            Ok(reply) => reply,
            Err(Some(OperationError::Indeterminate)) => return self.end_without_answer(id, key),
            // A failed operation has changed nothing.
            Err(error) => {
                use OperationError::{Contended, NotANumber, OutOfSpace};
                self.history[at].result = Ended::Failed;
                self.registers[key].cancel(id);
                return match error {
                    None | Some(Contended { .. } | OutOfSpace { .. } | NotANumber) => Ok(()),
                    Some(error) => Err(Violation::Failed(error.to_string())),
                };
            }
        };
        self.history[at].result = if reply.done { Ended::Done } else { Ended::Refused };
        let mut answer = HistoryAnswer { done: reply.done, found: None };
        // An append's answer in a history has no value.
        let is_append = self.history[at].operation == HistoryOperation::Append;
        if let Some(found) = reply.found.as_ref().filter(|_| !is_append) {
            let version = found.version.to_string();
            let held = Held { value: self.number(&found.text), expiry: found.expiry as Value };
            answer.found = Some(held);
            self.history[at].found = Some(found.text.clone());
            self.history[at].version = Some(version.clone());
            let version = (found.region, version);
            // The sum of an increment comes without its expiry, so only the value is compared.
            let known = *self.versions.entry(version.clone()).or_insert(held.value);
            let same_value = known == held.value;
            let version_of_value =
                self.version_of_value.entry(held).or_insert_with(|| version.clone());
            // A sum may be stored again after the key was deleted.
            if !same_value || held.value >= OPAQUE_MIN && *version_of_value != version {
                return Err(Violation::Version(version.1));
            }
        }
        self.registers[key].respond(id, answer).map_err(|fault| match fault {
            RegisterFault::NotLinearizable(_) => Violation::NotLinearizable,
            RegisterFault::TooMany(_) => Violation::TooMany,
        })
    }

    /// Records that a shard loses this key, which it has if `reply` is done: as if it were deleted.
    pub(crate) fn empty(&mut self, key: Key, reply: Reply) -> Result<(), Violation> {
        let id = self.invoke(OPERATOR, key as u32, &RequestedOperation::plain(Op::Delete(key)));
        self.respond(id, key, &Ok(reply))
    }

    /// Notes the time in milliseconds. Returns whether values have expired since the last call.
    pub(crate) fn advance(&mut self, now_ms: u64) -> Result<bool, Violation> {
        if self.has_expired || now_ms < EXPIRES_AT_MS {
            return Ok(false);
        }
        self.has_expired = true;
        let mut registers = self.registers.iter_mut();
        registers
            .try_for_each(|register| register.advance(now_ms as Value))
            .map_err(|_| Violation::TooMany)?;
        Ok(true)
    }

    /// Ends an operation without an answer. It has taken effect by now, or never will.
    fn end_without_answer(&mut self, id: u32, key: Key) -> Result<(), Violation> {
        self.registers[key].end_without_answer(id).map_err(|_| Violation::TooMany)
    }

    /// Ends the operation of a process that died, if it has not ended.
    pub(crate) fn end_unanswered(&mut self, id: u32) -> Result<(), Violation> {
        let Some(at) = self.records.get(&id) else { return Ok(()) };
        let record = &mut self.history[*at];
        if record.returned.is_some() {
            return Ok(());
        }
        self.time += 1;
        record.returned = Some(self.time);
        let key = record.key[1..].parse().expect("keys are numbered");
        self.end_without_answer(id, key)
    }

    /// Returns a hash of everything on which later verdicts depend.
    pub(crate) fn state(&self) -> u64 {
        self.registers.iter().map(Register::state).fold(0, mix)
    }
}
