//! What a driver tells about every operation: nothing, or all of it to a history.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use farside::{Outcome, Version};
use farside_fabric::boot_time_ns;
use farside_linearizability::{Ended, HistoryOperation, Record, write};

use crate::operations::Values;
use crate::store::Action;
use crate::{Error, Result};

/// Is told what a driver does. `()` does not listen, and costs nothing.
pub trait Witness {
    /// An operation is about to be started on a record.
    fn begins(&mut self, operation: HistoryOperation, record: u64);

    /// The value that it stores, of this length.
    fn value<'v>(&'v mut self, values: &'v mut Values, value_bytes: u32) -> &'v [u8];

    /// It is under way on this lane.
    fn goes_on(&mut self, lane: usize);

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
    fn goes_on(&mut self, _: usize) {}

    #[inline]
    fn ends(&mut self, _: usize, _: Outcome<'_>) {}
}

impl From<Action> for HistoryOperation {
    fn from(action: Action) -> Self {
        match action {
            Action::Get => Self::Get,
            Action::Put => Self::Put,
            Action::Insert => Self::Insert,
            Action::Delete => Self::Delete,
        }
    }
}

/// The file that all threads write their operations to.
pub struct HistoryFile {
    path: PathBuf,
    output: Mutex<BufWriter<File>>,
}

impl HistoryFile {
    /// A new file, over an old one of this name.
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

/// An operation as the loop notes it.
#[derive(Clone, Copy)]
struct JournalEntry {
    operation: HistoryOperation,
    record: u64,
    /// The content that it stores.
    argument: Option<u64>,
    found: Option<(u64, Version)>,
    ended: Ended,
    invoke: u64,
    returned: Option<u64>,
}

/// So many operations are written at once.
const ENTRIES_MAX: usize = 1 << 14;
/// A value begins with its number, so that no two are the same.
pub const NUMBER_BYTES: usize = size_of::<u64>();
/// The numbers of one thread.
const NUMBERS_PER_THREAD: u64 = 1 << 48;

/// A witness that writes everything to a file. Each lane is a process of the history: it does one
/// operation after another.
pub struct Journal<'f> {
    file: &'f HistoryFile,
    /// The process that the first lane is.
    process: u64,
    /// The next value's.
    number: u64,
    value: Vec<u8>,
    /// What is about to start.
    next: Option<JournalEntry>,
    lanes: Vec<Option<JournalEntry>>,
    /// With the process of each.
    ended: Vec<(u64, JournalEntry)>,
    failed: Option<Error>,
}

impl<'f> Journal<'f> {
    /// That of one thread with so many lanes.
    pub fn new(file: &'f HistoryFile, thread: u32, lanes: u16) -> Self {
        Self {
            file,
            process: u64::from(thread) * u64::from(lanes),
            number: u64::from(thread) * NUMBERS_PER_THREAD,
            value: Vec::new(),
            next: None,
            lanes: vec![None; lanes.into()],
            ended: Vec::with_capacity(ENTRIES_MAX),
            failed: None,
        }
    }

    /// Writes what is left, operations without an answer too: what they did is unknown.
    pub fn finish(mut self) -> Result<()> {
        if let (Some(first), Some(next)) = (self.lanes.first_mut(), self.next.take()) {
            // One after another: it failed on its way.
            *first = Some(next);
        }
        let open = self.lanes.drain(..).zip(self.process..);
        self.ended.extend(open.filter_map(|(entry, process)| Some((process, entry?))));
        self.write();
        self.failed.map_or(Ok(()), Err)
    }

    fn write(&mut self) {
        let records: Vec<Record> = self.ended.drain(..).map(record).collect();
        if self.failed.is_none() {
            self.failed = self.file.append(&records).err();
        }
    }
}

impl Witness for Journal<'_> {
    fn begins(&mut self, operation: HistoryOperation, record: u64) {
        self.next = Some(JournalEntry {
            operation,
            record,
            argument: None,
            found: None,
            ended: Ended::Unknown,
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
            next.argument = Some(content(&self.value));
        }
        &self.value
    }

    fn goes_on(&mut self, lane: usize) {
        self.lanes[lane] = self.next.take();
    }

    fn ends(&mut self, lane: usize, outcome: Outcome<'_>) {
        let returned = Some(boot_time_ns());
        let Some(entry) = self.lanes[lane].take() else { return };
        let (done, found) = match outcome {
            Outcome::Value(found) => (found.is_some(), found),
            Outcome::Stored => (true, None),
            Outcome::Applied(applied) => (applied, None),
        };
        let ended = if done { Ended::Done } else { Ended::Refused };
        let found = found.map(|(value, version)| (content(value), version));
        self.ended
            .push((self.process + lane as u64, JournalEntry { ended, found, returned, ..entry }));
        if self.ended.len() == ENTRIES_MAX {
            self.write();
        }
    }
}

/// What stands for a value in a history: a hash of all its bytes.
fn content(value: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(value);
    hasher.finish()
}

fn record((process, entry): (u64, JournalEntry)) -> Record {
    let text = |number: u64| format!("{number:016x}");
    let (found, version) = entry.found.unzip();
    Record {
        process,
        operation: entry.operation,
        key: entry.record.to_string(),
        argument: entry.argument.map(text),
        expected: None,
        result: entry.ended,
        found: found.map(text),
        version: version.map(|version| text(version.to_u64())),
        invoke: entry.invoke,
        returned: entry.returned,
    }
}
