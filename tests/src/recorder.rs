//! What sessions do, on file in a way that outlives them: a history of real processes.
//!
//! A session's file is mapped, so what is stored in it is there whenever its process is killed. An
//! operation is on file before it starts and its answer as soon as it is known; the one that a
//! killed process was at is the last, without an answer.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use farside::OperationError::Indeterminate;
use farside::{Error, Exchange, Session, Value, Version};
use farside_fabric::boot_time_ns;
use farside_fabric::shm::Region;
use farside_linearizability::{Ended, Operation, Record};

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

const OPERATIONS: [Operation; 7] = [
    Operation::Get,
    Operation::Put,
    Operation::Insert,
    Operation::Update,
    Operation::Delete,
    Operation::Exchange,
    Operation::ExchangeVersion,
];
const ENDS: [Ended; 4] = [Ended::Unknown, Ended::Done, Ended::Refused, Ended::Failed];

/// The number of a value that nobody wrote; others are its writer and how many it made before.
const NOBODYS: u64 = u64::MAX;
/// No value.
const NONE: u64 = 0;

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
type Outcome = Result<(Ended, Option<Value>), Error>;

fn done(is_done: bool) -> Ended {
    if is_done { Ended::Done } else { Ended::Refused }
}

fn exchanged(exchange: Exchange) -> (Ended, Option<Value>) {
    match exchange {
        Exchange::Exchanged => (Ended::Done, None),
        Exchange::Mismatch(found) => (Ended::Refused, found),
    }
}

/// The number of the value of a key; `NOBODYS` if these bytes are none.
fn number(key: u64, bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<8>().0;
    match words {
        [_, writer, count, ..] if proof::holds(key, bytes) => {
            u64::from_le_bytes(*writer) << 32 | u64::from_le_bytes(*count)
        }
        _ => NOBODYS,
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
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(operations * RECORD_BYTES)?;
        Ok(Self { session, process, values: 0, words: Region::map(&file)?, at: 0 })
    }

    /// Whether there is room for no more operations.
    pub fn is_full(&self) -> bool {
        self.at >= self.words.bytes()
    }

    /// Forgets all cached locations.
    pub fn clear_cache(&mut self) {
        self.session.clear_cache();
    }

    fn store(&self, offset: u64, value: u64) {
        self.words.store(self.at + offset, value).unwrap();
    }

    /// Puts an operation on file, runs it, and puts its answer on file.
    fn run(
        &mut self,
        (operation, key, expected): (Operation, u64, u64),
        argument: u64,
        call: impl FnOnce(&mut Session, &[u8]) -> Outcome,
    ) -> Outcome {
        let code = OPERATIONS.iter().position(|known| *known == operation).unwrap() as u64;
        let words = [(WHAT, code), (KEY, key), (ARGUMENT, argument), (EXPECTED, expected)];
        words.into_iter().for_each(|(offset, value)| self.store(offset, value));
        self.store(BEGAN, boot_time_ns());
        // Nothing of the operation happens before the clock was read.
        fence(Ordering::SeqCst);
        let outcome = call(&mut self.session, &key.to_le_bytes());
        let returned = boot_time_ns();
        let ended = match &outcome {
            Ok((ended, found)) => {
                if let Some(value) = found {
                    self.store(FOUND, number(key, value));
                    self.store(VERSION, value.version.to_u64());
                }
                *ended
            }
            Err(Error::Operation(Indeterminate)) => Ended::Unknown,
            Err(_) => Ended::Failed,
        };
        let end = ENDS.iter().position(|known| *known == ended).unwrap() as u64;
        self.store(WHAT, code | end << 8);
        self.store(RETURNED, returned);
        self.at += RECORD_BYTES;
        outcome
    }

    /// A new value of a key, and its number.
    fn value(&mut self, key: u64, bytes: usize) -> (u64, Vec<u8>) {
        self.values += 1;
        let value = proof::value(key, self.process, self.values, bytes);
        (self.process << 32 | self.values, value)
    }

    /// GET.
    ///
    /// # Errors
    /// As the session's; so for all of these.
    pub fn get(&mut self, key: u64) -> Result<Option<Value>, Error> {
        let outcome = self.run((Operation::Get, key, NONE), NONE, |session, name| {
            let found = session.get(name)?;
            Ok((done(found.is_some()), found))
        });
        outcome.map(|(_, found)| found)
    }

    /// PUT of a new value of so many bytes.
    pub fn put(&mut self, key: u64, bytes: usize) -> Result<(), Error> {
        let (argument, value) = self.value(key, bytes);
        let outcome = self.run((Operation::Put, key, NONE), argument, |session, name| {
            session.put(name, &value).map(|()| (Ended::Done, None))
        });
        outcome.map(drop)
    }

    /// INSERT of a new value of so many bytes.
    pub fn insert(&mut self, key: u64, bytes: usize) -> Result<(), Error> {
        let (argument, value) = self.value(key, bytes);
        let outcome = self.run((Operation::Insert, key, NONE), argument, |session, name| {
            session.insert(name, &value).map(|inserted| (done(inserted), None))
        });
        outcome.map(drop)
    }

    /// UPDATE with a new value of so many bytes.
    pub fn update(&mut self, key: u64, bytes: usize) -> Result<(), Error> {
        let (argument, value) = self.value(key, bytes);
        let outcome = self.run((Operation::Update, key, NONE), argument, |session, name| {
            session.update(name, &value).map(|updated| (done(updated), None))
        });
        outcome.map(drop)
    }

    /// DELETE.
    pub fn delete(&mut self, key: u64) -> Result<(), Error> {
        let outcome = self.run((Operation::Delete, key, NONE), NONE, |session, name| {
            session.delete(name).map(|deleted| (done(deleted), None))
        });
        outcome.map(drop)
    }

    /// Compare-and-exchange of this value for a new one of so many bytes.
    pub fn exchange(&mut self, key: u64, expected: &[u8], bytes: usize) -> Result<(), Error> {
        let (argument, value) = self.value(key, bytes);
        let what = (Operation::Exchange, key, number(key, expected));
        let outcome = self.run(what, argument, |session, name| {
            session.compare_exchange(name, Some(expected), &value).map(exchanged)
        });
        outcome.map(drop)
    }

    /// Compare-and-exchange of the value with this version for a new one of so many bytes.
    pub fn exchange_version(
        &mut self,
        key: u64,
        expected: Version,
        bytes: usize,
    ) -> Result<(), Error> {
        let (argument, value) = self.value(key, bytes);
        let what = (Operation::ExchangeVersion, key, expected.to_u64());
        let outcome = self.run(what, argument, |session, name| {
            session.compare_exchange_version(name, expected, &value).map(exchanged)
        });
        outcome.map(drop)
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
            let is_version = operation == Operation::ExchangeVersion;
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
        NOBODYS => "nobody's".to_owned(),
        _ => format!("{}.{}", number >> 32, number & 0xffff_ffff),
    }
}
