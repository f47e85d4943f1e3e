//! Checks whether a history of operations is linearizable. Each key is checked by itself, because
//! linearizability is local.
//!
//! The simulator, tests over shared memory and over verbs, and `kv-bench` use it. It depends on
//! nothing else of Farside.
//!
//! - [`Record`], [`read`], [`write()`]: the open format of histories, one JSON object for each
//!   line. `docs/testing.md` describes it.
//! - [`Register`]: checks the operations on one key as they happen, for the simulator.
//! - [`check`]: checks a whole history. [`check_cache`] checks one of a cache.
#![deny(unsafe_code)]

mod register;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

pub use register::{
    CONFIGURATIONS_MAX, Ending, Held, HistoryAnswer, HistoryCall, OPAQUE_MIN, Register,
    RegisterFault, Value, numeric,
};

/// The reason why a history was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No order of the operations explains the answers.
    #[error("key {key}: no order of the operations explains the last of\n{}", lines(around))]
    NotLinearizable {
        /// The key.
        key: String,
        /// The operation with the impossible answer, after the operations on the key before it.
        around: Vec<Record>,
    },
    /// One version of two values, or two versions of a value that was written once.
    #[error("key {key}: version {version} does not belong to one write:\n{}", lines(around))]
    Version {
        /// The key.
        key: String,
        /// The version.
        version: String,
        /// The operations that found the version or the value.
        around: Vec<Record>,
    },
    /// An invalid record: a field that its operation needs is missing, or it ends before it begins.
    #[error("the record is not a possible operation: {0}")]
    Record(Box<Record>),
    /// Too many concurrent or unanswered operations: the checker gave no verdict.
    #[error("key {key}: no verdict: over {CONFIGURATIONS_MAX} orders of operations at {at}")]
    TooMany {
        /// The key.
        key: String,
        /// The operation at which the limit was exceeded.
        at: Box<Record>,
    },
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| format!("  {record}")).collect::<Vec<_>>().join("\n")
}

/// Limit on the operations that a violation shows.
const AROUND_MAX: usize = 24;

/// Checks a history in which all keys are absent at the start.
///
/// # Errors
/// The first violation, with keys in alphabetical order.
pub fn check(history: &[Record]) -> Result<(), Violation> {
    check_keys(history, Rules::default())
}

/// Checks a history of a cache, in which the server evicts keys and values expire: a key that is
/// present may become absent at any moment, and only an operation that stores a value makes it
/// present again. Everything else is as for [`check`].
///
/// # Errors
/// As [`check`].
pub fn check_cache(history: &[Record]) -> Result<(), Violation> {
    check_keys(history, Rules { is_cache: true, ..Rules::default() })
}

/// Checks a history in which compactions give values another version
/// (`docs/decisions/0001-versions.md`). An exchange that requires the former version is then
/// refused, although it finds the same value. Such an exchange counts as a GET.
///
/// # Errors
/// As [`check`].
pub fn check_compacted(history: &[Record]) -> Result<(), Violation> {
    let mut values: HashMap<(&str, &str), &str> = HashMap::new();
    for record in history {
        if let (Some(version), Some(found)) = (&record.version, &record.found) {
            values.insert((&record.key, version), found);
        }
    }
    let refused_as_get = |record: &Record| {
        let Record { operation, result, expected, found, version, .. } = record;
        let is_refused =
            (*operation, *result) == (HistoryOperation::ExchangeVersion, Ended::Refused);
        let required = expected.as_deref().and_then(|version| values.get(&(&record.key, version)));
        let has_moved = found.is_some() && required.copied() == found.as_deref();
        if is_refused && has_moved && expected != version {
            let (operation, result) = (HistoryOperation::Get, Ended::Done);
            Record { operation, result, argument: None, expected: None, ..record.clone() }
        } else {
            record.clone()
        }
    };
    let history: Vec<_> = history.iter().map(refused_as_get).collect();
    check_keys(&history, Rules { values_move: true, ..Rules::default() })
}

/// What a history may contain besides the recorded operations.
#[derive(Clone, Copy, Default)]
struct Rules {
    /// Compactions give values other versions.
    values_move: bool,
    /// Present keys become absent.
    is_cache: bool,
}

fn check_keys(history: &[Record], rules: Rules) -> Result<(), Violation> {
    let mut keys: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
    for record in history {
        keys.entry(&record.key).or_default().push(record);
    }
    keys.into_iter().try_for_each(|(key, records)| check_key(key, &records, rules))
}

fn check_key(key: &str, records: &[&Record], rules: Rules) -> Result<(), Violation> {
    let values = Values::new(key, records, rules.values_move)?;
    // Time, whether it is an end, and the record's index. At one time beginnings come before ends,
    // which makes the operations concurrent.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * records.len());
    for (index, record) in records.iter().enumerate() {
        // A GET without an answer proves nothing, so it would only take time.
        let is_unanswered =
            record.operation == HistoryOperation::Get && record.result == Ended::Unknown;
        if record.result == Ended::Failed || is_unanswered {
            continue;
        }
        events.push((record.invoke, false, index));
        match (record.result, record.returned) {
            (Ended::Unknown, None) => {}
            (_, Some(end)) if end >= record.invoke => events.push((end, true, index)),
            _ => return Err(Violation::Record(Box::new((*record).clone()))),
        }
    }
    events.sort_unstable();
    let mut register = if rules.is_cache { Register::cached() } else { Register::default() };
    for (_, is_end, index) in events {
        let record = records[index];
        let answer = values.answer(record);
        let id = index as u32;
        if !is_end {
            let ending = answer.map_or(Ending::Unanswered, Ending::Answer);
            register.invoke(id, values.call(record)?, ending);
        } else {
            let result = match answer {
                Some(answer) => register.respond(id, answer),
                None => register.end_without_answer(id),
            };
            result.map_err(|fault| {
                let key = key.to_owned();
                match fault {
                    RegisterFault::NotLinearizable(_) => {
                        Violation::NotLinearizable { key, around: before(records, record) }
                    }
                    RegisterFault::TooMany(_) => {
                        Violation::TooMany { key, at: Box::new(record.clone()) }
                    }
                }
            })?;
        }
    }
    Ok(())
}

/// Returns up to `AROUND_MAX` operations: the latest that began before `last` ended, and `last`.
fn before(records: &[&Record], last: &Record) -> Vec<Record> {
    let began = |record: &&&Record| Some(record.invoke) <= last.returned && **record != last;
    let mut around: Vec<Record> =
        records.iter().filter(began).map(|record| (*record).clone()).collect();
    around.sort_by_key(|record| record.returned.unwrap_or(u64::MAX).min(record.invoke));
    let skipped = (around.len() + 1).saturating_sub(AROUND_MAX);
    around.drain(..skipped);
    around.push(last.clone());
    around
}

/// The number of each value's text, and the number of the value that each version belongs to.
struct Values<'r> {
    numbers: HashMap<&'r str, Value>,
    versions: HashMap<&'r str, Value>,
}

impl<'r> Values<'r> {
    /// Checks that each version belongs to one write: a version has one value, and a value that was
    /// stored once has one version. Compactions (`values_move`) give a value more versions.
    fn new(key: &str, records: &[&'r Record], values_move: bool) -> Result<Self, Violation> {
        let mut numbers = HashMap::new();
        let mut stored: HashMap<Value, u32> = HashMap::new();
        for record in records {
            for text in [&record.argument, &record.found, &record.expected].into_iter().flatten() {
                let next = OPAQUE_MIN + numbers.len() as Value;
                numbers.entry(text.as_str()).or_insert(numeric(text).unwrap_or(next));
            }
            if let Some(argument) = &record.argument {
                *stored.entry(numbers[argument.as_str()]).or_default() += 1;
            }
        }
        // A sum may be stored again after the key was deleted.
        let is_counter = records.iter().any(|record| {
            matches!(record.operation, HistoryOperation::Increment | HistoryOperation::Append)
        });
        let mut versions: HashMap<&str, Value> = HashMap::new();
        let mut version_of_value: HashMap<Value, &str> = HashMap::new();
        for record in records {
            let (Some(version), Some(found)) = (&record.version, &record.found) else { continue };
            let value = numbers[found.as_str()];
            let same_value = *versions.entry(version).or_insert(value) == value;
            let is_stored_once = !is_counter && stored.get(&value).is_none_or(|times| *times == 1);
            let same_version = *version_of_value.entry(value).or_insert(version) == version;
            if !(same_value && (same_version || values_move || !is_stored_once)) {
                let saw = |other: &&&Record| {
                    other.version.as_ref() == Some(version) || other.found.as_ref() == Some(found)
                };
                let around = records.iter().filter(saw).map(|other| (*other).clone()).collect();
                let (key, version) = (key.to_owned(), version.clone());
                return Err(Violation::Version { key, version, around });
            }
        }
        Ok(Self { numbers, versions })
    }

    fn call(&self, record: &Record) -> Result<HistoryCall, Violation> {
        let number = |text: &Option<String>| {
            let known = text.as_ref().and_then(|text| self.numbers.get(text.as_str()));
            known.copied().ok_or_else(|| Violation::Record(Box::new(record.clone())))
        };
        let operation = record.operation;
        let argument = match operation {
            HistoryOperation::Touch | HistoryOperation::Evict | HistoryOperation::Expire => {
                return Err(Violation::Record(Box::new(record.clone())));
            }
            _ if !operation.stores() => 0,
            _ => number(&record.argument)?,
        };
        let expected = match operation {
            HistoryOperation::Exchange => Some(number(&record.expected)?),
            HistoryOperation::ExchangeVersion | HistoryOperation::DeleteVersion => {
                let version = record.expected.as_ref();
                version.and_then(|version| self.versions.get(version.as_str())).copied()
            }
            _ => None,
        };
        Ok(HistoryCall { operation, argument, expiry: 0, expected: expected.map(Held::from) })
    }

    /// Returns the answer that the caller got; `None` if the operation ended without an answer.
    fn answer(&self, record: &Record) -> Option<HistoryAnswer> {
        let found = record.found.as_ref().map(|text| self.numbers[text.as_str()].into());
        match record.result {
            Ended::Done => Some(HistoryAnswer { done: true, found }),
            Ended::Refused => Some(HistoryAnswer { done: false, found }),
            Ended::Failed | Ended::Unknown => None,
        }
    }
}

/// The operation that a process called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the operations of `Session`")]
pub enum HistoryOperation {
    Get,
    Put,
    Insert,
    Update,
    Delete,
    Exchange,
    ExchangeVersion,
    Take,
    Increment,
    Append,
    DeleteVersion,
    GetOrInsert,
    /// A store that keeps the expiry of the value that it replaces.
    PutKeepTtl,
    /// Only the simulator checks it: a history has no expiries.
    Touch,
    /// The server's removal of exactly the expected value. Only the simulator knows when it
    /// happens.
    Evict,
    /// The server's removal of exactly the expected value, which must have expired. Only the
    /// simulator knows when it happens.
    Expire,
}

impl HistoryOperation {
    /// Whether the operation has an argument.
    pub fn stores(self) -> bool {
        !matches!(
            self,
            Self::Get
                | Self::Delete
                | Self::DeleteVersion
                | Self::Take
                | Self::Evict
                | Self::Expire
        )
    }
}

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// A GET found the key, or a change was made.
    Done,
    /// A GET did not find the key, or a condition did not hold and nothing was changed.
    Refused,
    /// An error after which nothing has changed.
    Failed,
    /// The process died or its connection broke. The operation took effect at some time between its
    /// begin and its return, or later if it never returned, or not at all.
    Unknown,
}

/// One operation of one process. Texts are opaque; equal texts mean equal bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The process that called the operation.
    pub process: u64,
    /// The operation.
    pub operation: HistoryOperation,
    /// The operation's key.
    pub key: String,
    /// The value to be stored. For an increment the addend, for an append the digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argument: Option<String>,
    /// The value, or the version, that an exchange or a DELETE required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// The operation's result.
    pub result: Ended,
    /// The value that a GET or take found, that an exchange found instead of the required one, that
    /// kept a get-or-insert from storing, or that an increment stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// The version of the found value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The time when the operation began, on a clock that all processes share.
    pub invoke: u64,
    /// The time when the operation ended, on the same clock; `None` if it never ended.
    #[serde(rename = "return", default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<u64>,
}

/// Reads a history; empty lines are skipped.
///
/// # Errors
/// The number of the first line that is no record, and the reason.
pub fn read(input: impl BufRead) -> Result<Vec<Record>, String> {
    let mut records = Vec::new();
    for (number, line) in input.lines().enumerate() {
        let number = number + 1;
        let line = line.map_err(|error| format!("line {number}: {error}"))?;
        if !line.trim().is_empty() {
            let record = serde_json::from_str(&line);
            records.push(record.map_err(|error| format!("line {number}: {error}"))?);
        }
    }
    Ok(records)
}

/// Writes a history.
///
/// # Errors
/// The errors of the output.
pub fn write(records: &[Record], mut output: impl Write) -> std::io::Result<()> {
    for record in records {
        serde_json::to_writer(&mut output, record)?;
        output.write_all(b"\n")?;
    }
    output.flush()
}

impl std::fmt::Display for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = self.returned.map_or("...".to_owned(), |end| end.to_string());
        write!(f, "[{:>4} {end:>4}] process {}: ", self.invoke, self.process)?;
        write!(f, "{:?} {}", self.operation, self.key)?;
        if let Some(expected) = &self.expected {
            write!(f, " if {expected}")?;
        }
        if let Some(argument) = &self.argument {
            write!(f, " := {argument}")?;
        }
        write!(f, " -> {:?}", self.result)?;
        if let Some(found) = &self.found {
            write!(f, ", found {found}")?;
        }
        if let Some(version) = &self.version {
            write!(f, " (version {version})")?;
        }
        Ok(())
    }
}
