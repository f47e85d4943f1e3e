//! The open format of histories: one JSON object for each line. `docs/testing.md` describes it.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};

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
