//! Watches an execution: hands what is asked and answered to the checker, and keeps the history.

use std::collections::HashMap;

use farside_linearizability::{
    Ended, HistoryAnswer, HistoryCall, HistoryOperation, Record, Register, RegisterFault, Value,
};
use farside_protocol::OperationError;

use super::memory::mix;
use super::region::KEYS;
use super::scenario::{Key, Op};
use super::session::Reply;

/// What is wrong with an execution.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No order of the operations explains an answer.
    #[error("not linearizable")]
    NotLinearizable,
    /// One version, two values, or the other way round.
    #[error("version {0} stands for two writes")]
    Version(String),
    /// An operation failed that nothing should have kept from succeeding.
    #[error("an operation failed: {0}")]
    Failed(String),
    /// At the end the region is not as it should be.
    #[error("the region is damaged: {0}")]
    Damaged(String),
    /// A process can never go on.
    #[error("process {0} is stuck")]
    Stuck(usize),
    /// The checker gave up.
    #[error("too many explanations")]
    TooMany,
}

/// What a script's operation asks, with the names of its values.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) op: Op,
    /// What it stores.
    pub(super) value: String,
    /// The value, and the version if by that, that an exchange requires.
    pub(super) expected: Option<(String, Option<String>)>,
}

impl Asked {
    pub(super) fn key(&self) -> Key {
        match self.op {
            Op::Get(key)
            | Op::Put(key)
            | Op::PutLarge(key)
            | Op::Insert(key)
            | Op::Update(key)
            | Op::Delete(key)
            | Op::Exchange(key, _)
            | Op::ExchangeSeen(key) => key,
            Op::Yield | Op::GiveBack | Op::Sleep(_) | Op::RaiseBoth => {
                unreachable!("nothing is asked")
            }
        }
    }

    fn operation(&self) -> HistoryOperation {
        match self.op {
            Op::Get(_) => HistoryOperation::Get,
            Op::Put(_) | Op::PutLarge(_) => HistoryOperation::Put,
            Op::Insert(_) => HistoryOperation::Insert,
            Op::Update(_) => HistoryOperation::Update,
            Op::Delete(_) => HistoryOperation::Delete,
            Op::Exchange(..) => HistoryOperation::Exchange,
            Op::ExchangeSeen(_) => HistoryOperation::ExchangeVersion,
            Op::Yield | Op::GiveBack | Op::Sleep(_) | Op::RaiseBoth => {
                unreachable!("nothing is asked")
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Monitor {
    registers: Vec<Register>,
    numbers: HashMap<String, Value>,
    versions: HashMap<String, Value>,
    of_value: HashMap<Value, String>,
    pub(super) history: Vec<Record>,
    /// Where in the history each operation is.
    records: HashMap<u32, usize>,
    time: u64,
}

impl Monitor {
    /// All keys absent.
    pub(super) fn new() -> Self {
        let registers = (0..KEYS).map(|_| Register::new(None)).collect();
        Self { registers, ..Self::default() }
    }

    fn number(&mut self, text: &str) -> Value {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let next = self.numbers.len() as Value;
        self.numbers.insert(text.to_owned(), next);
        next
    }

    /// What the n-th operation of a process is called.
    pub(super) fn id(process: usize, n: u32) -> u32 {
        (process as u32) << 16 | n
    }

    pub(super) fn record(&self, id: u32) -> &Record {
        &self.history[self.records[&id]]
    }

    /// The n-th operation of a process begins.
    pub(super) fn invoke(&mut self, process: usize, n: u32, asked: &Asked) -> u32 {
        let value = self.number(&asked.value);
        let expected = asked.expected.as_ref().map(|(text, _)| self.number(text));
        let call = HistoryCall { operation: asked.operation(), argument: value, expected };
        let id = Self::id(process, n);
        self.records.insert(id, self.history.len());
        self.registers[asked.key()].invoke(id, call, None);
        let stores = !matches!(asked.op, Op::Get(_) | Op::Delete(_));
        self.time += 1;
        self.history.push(Record {
            process: process as u64,
            operation: asked.operation(),
            key: format!("k{}", asked.key()),
            argument: stores.then(|| asked.value.clone()),
            expected: asked.expected.clone().map(|(value, version)| version.unwrap_or(value)),
            result: Ended::Unknown,
            found: None,
            version: None,
            invoke: self.time,
            returned: None,
        });
        id
    }

    /// An operation ended.
    pub(super) fn respond(
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
            Err(Some(OperationError::Indeterminate)) => return self.give_up(id, key),
            // What failed has not happened.
            Err(error) => {
                self.history[at].result = Ended::Failed;
                self.registers[key].cancel(id);
                return match error {
                    None => Ok(()),
                    Some(OperationError::Contended { .. } | OperationError::OutOfSpace { .. }) => {
                        Ok(())
                    }
                    Some(error) => Err(Violation::Failed(error.to_string())),
                };
            }
        };
        self.history[at].result = if reply.done { Ended::Done } else { Ended::Refused };
        let mut answer = HistoryAnswer { done: reply.done, found: None };
        if let Some((value, version)) = &reply.found {
            let (text, version) = (String::from_utf8_lossy(value), version.to_string());
            let value = self.number(&text);
            answer.found = Some(value);
            self.history[at].found = Some(text.into_owned());
            self.history[at].version = Some(version.clone());
            let same_value = *self.versions.entry(version.clone()).or_insert(value) == value;
            let of_value = self.of_value.entry(value).or_insert_with(|| version.clone());
            if !same_value || *of_value != version {
                return Err(Violation::Version(version));
            }
        }
        self.registers[key].respond(id, answer).map_err(|fault| match fault {
            RegisterFault::NotLinearizable(_) => Violation::NotLinearizable,
            RegisterFault::TooMany(_) => Violation::TooMany,
        })
    }

    /// An operation ends without an answer: it has taken effect by now, or never will.
    pub(super) fn give_up(&mut self, id: u32, key: Key) -> Result<(), Violation> {
        self.registers[key].give_up(id).map_err(|_| Violation::TooMany)
    }

    /// The same for whatever a process that died was at.
    pub(super) fn bury(&mut self, id: u32) -> Result<(), Violation> {
        let Some(at) = self.records.get(&id) else { return Ok(()) };
        let record = &mut self.history[*at];
        if record.returned.is_some() {
            return Ok(());
        }
        self.time += 1;
        record.returned = Some(self.time);
        let key = record.key[1..].parse().expect("keys are numbered");
        self.give_up(id, key)
    }

    /// A hash of everything that decides about the rest.
    pub(super) fn state(&self) -> u64 {
        let all = self.registers.iter().map(Register::state);
        all.fold(0, mix)
    }
}
