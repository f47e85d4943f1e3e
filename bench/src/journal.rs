//! Witnesses: what a measured loop reports about each operation. `()` ignores it, and a [`Journal`]
//! writes it to a history.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use farside_fabric::boot_time_ns;
use farside_linearizability::{Ended, HistoryOperation, Record, write};

use crate::operations::Values;
use crate::store::{Action, Outcome};
use crate::{Error, Result};

/// Receives every event of a driver's operations. `()` ignores them and costs nothing.
pub trait Witness {
    /// An operation is about to be started on a record.
    fn begins(&mut self, operation: HistoryOperation, record: u64);

    /// Returns the value that the operation stores, of this length.
    fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8];

    /// The operation has started on this lane.
    fn started_on(&mut self, lane: usize);

    /// The lane's operation has ended.
    fn ends(&mut self, lane: usize, outcome: Outcome<'_>);
}

impl Witness for () {
    #[inline]
    fn begins(&mut self, _: HistoryOperation, _: u64) {}

    #[inline]
    fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8] {
        values.take(value_bytes)
    }

    #[inline]
    fn started_on(&mut self, _: usize) {}

    #[inline]
    fn ends(&mut self, _: usize, _: Outcome<'_>) {}
}

impl From<Action> for HistoryOperation {
    fn from(action: Action) -> Self {
        match action {
            Action::Get => Self::Get,
            Action::Put => Self::Put,
            Action::Insert => Self::Insert,
        }
    }
}

/// The file that all threads write their operations to.
pub struct HistoryFile {
    path: PathBuf,
    output: Mutex<BufWriter<File>>,
}

impl HistoryFile {
    /// Creates the file. An older file of this name is overwritten.
    pub fn create(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        match File::create(&path) {
            Ok(file) => Ok(Self { path, output: Mutex::new(BufWriter::new(file)) }),
            Err(source) => Err(Error::History { path, source }),
        }
    }

    fn append(&self, records: &[Record]) -> Result<()> {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let written = write(records, &mut *output);
        written.map_err(|source| Error::History { path: self.path.clone(), source })
    }
}

/// The number of operations that are written at once.
const RECORDS_MAX: usize = 1 << 14;
/// The length of a value's number, in bytes. Each value begins with its number, so no two are
/// equal.
pub const NUMBER_BYTES: usize = size_of::<u64>();
/// The size of a thread's range of numbers.
const NUMBERS_PER_THREAD: u64 = 1 << 48;

/// A witness that writes all operations to a file. Each lane is a process of the history, because
/// it does one operation after another.
pub struct Journal<'f> {
    file: &'f HistoryFile,
    /// The process number of the first lane.
    process: u64,
    /// The number of the next value.
    number: u64,
    value: Vec<u8>,
    /// The operation that is about to start.
    next: Option<Record>,
    /// The operations in flight, by lane.
    lanes: Vec<Option<Record>>,
    /// Ended operations that are not written yet.
    ended: Vec<Record>,
    /// The first error of the file. After it nothing more is written.
    failed: Option<Error>,
}

impl<'f> Journal<'f> {
    /// The journal of one thread with `lanes` lanes.
    pub fn new(file: &'f HistoryFile, thread: u32, lanes: u16) -> Self {
        Self {
            file,
            process: u64::from(thread) * u64::from(lanes),
            number: u64::from(thread) * NUMBERS_PER_THREAD,
            value: Vec::new(),
            next: None,
            lanes: vec![None; lanes.into()],
            ended: Vec::with_capacity(RECORDS_MAX),
            failed: None,
        }
    }

    /// Writes what is left. Operations in flight are written with an unknown result.
    pub fn finish(mut self) -> Result<()> {
        if let (Some(first), Some(next)) = (self.lanes.first_mut(), self.next.take()) {
            // Happens only without a pipeline: the operation failed before `started_on` put it on a
            // lane.
            *first = Some(next);
        }
        self.ended.extend(self.lanes.drain(..).flatten());
        self.write();
        self.failed.map_or(Ok(()), Err)
    }

    fn write(&mut self) {
        if self.failed.is_none() {
            self.failed = self.file.append(&self.ended).err();
        }
        self.ended.clear();
    }
}

impl Witness for Journal<'_> {
    fn begins(&mut self, operation: HistoryOperation, record: u64) {
        self.next = Some(Record {
            process: self.process,
            operation,
            key: record.to_string(),
            argument: None,
            expected: None,
            result: Ended::Unknown,
            found: None,
            version: None,
            invoke: boot_time_ns(),
            returned: None,
        });
    }

    fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8] {
        self.value.clear();
        self.value.extend_from_slice(values.take(value_bytes));
        self.value[..NUMBER_BYTES].copy_from_slice(&self.number.to_le_bytes());
        self.number += 1;
        if let Some(next) = &mut self.next {
            next.argument = Some(hash(&self.value));
        }
        &self.value
    }

    fn started_on(&mut self, lane: usize) {
        let process = self.process + lane as u64;
        self.lanes[lane] = self.next.take().map(|record| Record { process, ..record });
    }

    fn ends(&mut self, lane: usize, outcome: Outcome<'_>) {
        let returned = Some(boot_time_ns());
        let Some(mut record) = self.lanes[lane].take() else { return };
        record.returned = returned;
        record.result = if outcome.applied { Ended::Done } else { Ended::Refused };
        if let Some(value) = outcome.value {
            record.found = Some(hash(&value));
            record.version = Some(hexadecimal(value.version.to_u64()));
        }
        self.ended.push(record);
        if self.ended.len() == RECORDS_MAX {
            self.write();
        }
    }
}

/// The hash of a value's bytes, which identifies the value in a history.
fn hash(value: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(value);
    hexadecimal(hasher.finish())
}

fn hexadecimal(number: u64) -> String {
    format!("{number:016x}")
}
