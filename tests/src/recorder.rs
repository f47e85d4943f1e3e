//! A session that puts what it does on file, in a way that outlives its process: the history of
//! real processes.
//!
//! A session's file is mapped, so what is stored in it is there however its process ends. An
//! operation is on file before it starts. Its answer follows as soon as it is known. The operations
//! that a killed process was at are the last ones, without an answer.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use farside::OperationError::Indeterminate;
use farside::{BatchOutcome, Error, Exchange, Session, Value};
use farside_fabric::boot_time_ns;
use farside_fabric::shm::Region;
use farside_linearizability::{Ended, HistoryOperation, Record};
use farside_protocol::{Action, Expected, Lifetime};

use crate::proof;

/// The keys 0 to this are for recorded sessions.
pub const HOT_KEYS: u64 = 64;

/// The words of an operation, by their offsets. When it began; 0: not yet.
const BEGAN: u64 = 0;
/// Which operation it is, and how it ended.
const WHAT: u64 = 8;
const KEY: u64 = 16;
const ARGUMENT: u64 = 24;
const EXPECTED: u64 = 32;
const FOUND: u64 = 40;
/// That of what was found.
const VERSION: u64 = 48;
/// When it ended; 0: not yet.
const RETURNED: u64 = 56;
/// What an operation takes in a file.
pub const RECORD_BYTES: u64 = 64;

const OPERATIONS: [HistoryOperation; 7] = [
    HistoryOperation::Get,
    HistoryOperation::Put,
    HistoryOperation::Insert,
    HistoryOperation::Update,
    HistoryOperation::Delete,
    HistoryOperation::Exchange,
    HistoryOperation::ExchangeVersion,
];
const ENDS: [Ended; 4] = [Ended::Unknown, Ended::Done, Ended::Refused, Ended::Failed];

/// The number of a value that no session wrote. Others are their writer and how many it made
/// before.
const FOREIGN: u64 = u64::MAX;
/// No value.
const NONE: u64 = 0;

/// A new file with so many bytes of zeros, as words that outlive this process.
///
/// # Errors
/// The system's.
pub fn mapped(path: &Path, bytes: u64) -> std::io::Result<Region> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    file.set_len(bytes)?;
    Region::map(&file)
}

/// A key that no record names, by the first session of the client that inserts it, and its value.
pub fn new_key(first: u64, number: u64) -> ([u8; 8], Vec<u8>) {
    let key = 1 << 63 | first << 32 | number;
    (key.to_le_bytes(), proof::value(key, first, number, proof::HEADER_BYTES))
}

/// A session all of whose operations are on file.
pub struct RecordingSession {
    session: Session,
    process: u64,
    /// How many values it made.
    values: u64,
    words: Region,
    /// Where the next record goes.
    at: u64,
}

/// How an operation ended: with what was found, where that was asked for.
type RecordedResult = Result<(Ended, Option<Value>), Error>;

/// An operation on file that has no answer yet.
struct OpenRecord {
    at: u64,
    key: u64,
    value: Vec<u8>,
}

fn done(is_done: bool) -> Ended {
    if is_done { Ended::Done } else { Ended::Refused }
}

fn exchanged(exchange: Exchange) -> (Ended, Option<Value>) {
    match exchange {
        Exchange::Exchanged => (Ended::Done, None),
        Exchange::Mismatch(found) => (Ended::Refused, found),
    }
}

/// The number of the value of a key; `FOREIGN` if these bytes are none.
fn number(key: u64, bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<8>().0;
    match words {
        [_, writer, count, ..] if proof::holds(key, bytes) => {
            u64::from_le_bytes(*writer) << 32 | u64::from_le_bytes(*count)
        }
        _ => FOREIGN,
    }
}

/// What a history calls an action on this key, and what the action expects.
fn recorded(action: Action<'_>, key: u64) -> (HistoryOperation, u64) {
    match action {
        Action::Get => (HistoryOperation::Get, NONE),
        Action::Put(_) => (HistoryOperation::Put, NONE),
        Action::Insert(_) => (HistoryOperation::Insert, NONE),
        Action::Update(_) => (HistoryOperation::Update, NONE),
        Action::Delete => (HistoryOperation::Delete, NONE),
        Action::Exchange(Expected::Value(expected), _) => {
            (HistoryOperation::Exchange, number(key, expected))
        }
        Action::Exchange(Expected::Version(expected), _) => {
            (HistoryOperation::ExchangeVersion, expected.to_u64())
        }
    }
}

fn perform(session: &mut Session, action: Action<'_>, key: &[u8], value: &[u8]) -> RecordedResult {
    let changed = |is_done| (done(is_done), None);
    match action {
        Action::Get => session.get(key).map(|found| (done(found.is_some()), found)),
        Action::Put(_) => session.put(key, value).map(|()| changed(true)),
        Action::Insert(_) => session.insert(key, value).map(changed),
        Action::Update(_) => session.update(key, value).map(changed),
        Action::Delete => session.delete(key).map(changed),
        Action::Exchange(Expected::Value(expected), _) => {
            session.compare_exchange(key, Some(expected), value).map(exchanged)
        }
        Action::Exchange(Expected::Version(expected), _) => {
            session.compare_exchange_version(key, expected, value).map(exchanged)
        }
    }
}

impl RecordingSession {
    /// Room for so many operations of this process in a new file.
    ///
    /// # Errors
    /// The system's.
    pub fn new(
        session: Session,
        path: &Path,
        process: u64,
        operations: u64,
    ) -> std::io::Result<Self> {
        let words = mapped(path, operations * RECORD_BYTES)?;
        Ok(Self { session, process, values: 0, words, at: 0 })
    }

    /// How many more operations there is room for.
    pub fn room(&self) -> u64 {
        (self.words.bytes() - self.at) / RECORD_BYTES
    }

    /// Overwrites the file from its start: for sessions whose history is not judged.
    pub fn rewind(&mut self) {
        self.at = 0;
    }

    /// Forgets all cached locations.
    pub fn clear_cache(&mut self) {
        self.session.clear_cache();
    }

    /// Puts an operation on file. What it stores is a new value of so many bytes.
    fn begin(&mut self, key: u64, action: Action<'_>, bytes: usize) -> OpenRecord {
        let (at, stores) = (self.at, !matches!(action, Action::Get | Action::Delete));
        self.at += RECORD_BYTES;
        self.values += u64::from(stores);
        let argument = if stores { self.process << 32 | self.values } else { NONE };
        let value = match stores {
            true => proof::value(key, self.process, self.values, bytes),
            false => Vec::new(),
        };
        let (operation, expected) = recorded(action, key);
        let code = OPERATIONS.iter().position(|known| *known == operation).unwrap() as u64;
        let began = (BEGAN, boot_time_ns());
        for (offset, word) in
            [(WHAT, code), (KEY, key), (ARGUMENT, argument), (EXPECTED, expected), began]
        {
            self.words.store(at + offset, word).unwrap();
        }
        // Nothing of the operation happens before the clock was read.
        fence(Ordering::SeqCst);
        OpenRecord { at, key, value }
    }

    /// Puts its answer on file.
    fn end(&self, record: &OpenRecord, result: &RecordedResult, returned: u64) {
        let store = |offset, word| self.words.store(record.at + offset, word).unwrap();
        let ended = match result {
            Ok((ended, found)) => {
                if let Some(value) = found {
                    store(FOUND, number(record.key, value));
                    store(VERSION, value.version.to_u64());
                }
                *ended
            }
            Err(Error::Operation(Indeterminate)) => Ended::Unknown,
            Err(_) => Ended::Failed,
        };
        let end = ENDS.iter().position(|known| *known == ended).unwrap() as u64;
        store(WHAT, self.words.load(record.at + WHAT).unwrap() | end << 8);
        store(RETURNED, returned);
    }

    /// One operation on a key; what it stores is a new value of so many bytes.
    ///
    /// # Errors
    /// As the session's; so for all of these.
    pub fn run(
        &mut self,
        key: u64,
        action: Action<'_>,
        bytes: usize,
    ) -> Result<Option<Value>, Error> {
        self.run_as(key, action, bytes, |session, key, value| perform(session, action, key, value))
    }

    /// Compare-and-exchange of nothing for a new value: an INSERT, for a history.
    pub fn exchange_absent(&mut self, key: u64, bytes: usize) -> Result<(), Error> {
        let insert = Action::Insert(Lifetime::Forever);
        let call = |session: &mut Session, key: &[u8], value: &[u8]| {
            let exchange = session.compare_exchange(key, None, value)?;
            Ok((exchanged(exchange).0, None))
        };
        self.run_as(key, insert, bytes, call).map(drop)
    }

    fn run_as(
        &mut self,
        key: u64,
        action: Action<'_>,
        bytes: usize,
        call: impl FnOnce(&mut Session, &[u8], &[u8]) -> RecordedResult,
    ) -> Result<Option<Value>, Error> {
        let record = self.begin(key, action, bytes);
        let result = call(&mut self.session, &key.to_le_bytes(), &record.value);
        self.end(&record, &result, boot_time_ns());
        result.map(|(_, found)| found)
    }

    /// Operations of one batch, all of them concurrent: GET, DELETE and stores without a condition
    /// on the value. What came of each.
    pub fn batch(
        &mut self,
        steps: &[(u64, Action<'_>, usize)],
    ) -> Result<Vec<Result<(), Error>>, Error> {
        let records: Vec<OpenRecord> =
            steps.iter().map(|&(key, action, bytes)| self.begin(key, action, bytes)).collect();
        let keys: Vec<[u8; 8]> = steps.iter().map(|(key, ..)| key.to_le_bytes()).collect();
        let mut batch = self.session.batch();
        for ((key, record), (_, action, _)) in keys.iter().zip(&records).zip(steps) {
            match action {
                Action::Get => batch.get(key),
                Action::Put(_) => batch.put(key, &record.value),
                Action::Insert(_) => batch.insert(key, &record.value),
                Action::Update(_) => batch.update(key, &record.value),
                Action::Delete => batch.delete(key),
                Action::Exchange(..) => unreachable!("its outcome would lack what was found"),
            };
        }
        // Without a connection nothing happened, and all of them stay without an answer.
        let outcomes = batch.run()?;
        let returned = boot_time_ns();
        let ended = |outcome| match outcome {
            BatchOutcome::Value(found) => (done(found.is_some()), found),
            BatchOutcome::Stored => (Ended::Done, None),
            BatchOutcome::Applied(is_done) => (done(is_done), None),
        };
        let results = outcomes.into_iter().zip(&records).map(|(outcome, record)| {
            let result = outcome.map(ended);
            self.end(record, &result, returned);
            result.map(drop)
        });
        Ok(results.collect())
    }
}

/// Reads a file. `died` is a time from which on its process certainly executed nothing more: what
/// it was at has happened by then or never will.
///
/// # Errors
/// The system's.
pub fn read(path: &Path, process: u64, died: Option<u64>) -> std::io::Result<Vec<Record>> {
    let bytes = std::fs::read(path)?;
    let (records, _) = bytes.as_chunks::<{ RECORD_BYTES as usize }>();
    let word = |record: &[u8], offset: u64| {
        let (words, _) = record.as_chunks::<8>();
        u64::from_le_bytes(words[offset as usize / 8])
    };
    let began = records.iter().take_while(|record| word(&record[..], BEGAN) != 0);
    Ok(began
        .map(|record| {
            let at = |offset| word(record, offset);
            let operation = OPERATIONS[at(WHAT) as usize & 0xff];
            let has_ended = at(RETURNED) != 0;
            let value = |offset| (at(offset) != NONE).then(|| text(at(offset)));
            let version = |offset| (at(offset) != 0).then(|| format!("{:016x}", at(offset)));
            let is_version = operation == HistoryOperation::ExchangeVersion;
            Record {
                process,
                operation,
                key: format!("{:x}", at(KEY)),
                argument: value(ARGUMENT),
                expected: if is_version { version(EXPECTED) } else { value(EXPECTED) },
                // A process may be killed while it notes an answer.
                result: if has_ended { ENDS[at(WHAT) as usize >> 8] } else { Ended::Unknown },
                found: value(FOUND).filter(|_| has_ended),
                version: version(VERSION).filter(|_| has_ended),
                invoke: at(BEGAN),
                returned: if has_ended { Some(at(RETURNED)) } else { died },
            }
        })
        .collect())
}

fn text(number: u64) -> String {
    match number {
        FOREIGN => "foreign".to_owned(),
        _ => format!("{}.{}", number >> 32, number & 0xffff_ffff),
    }
}
