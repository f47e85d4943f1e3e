//! A session that records its operations in a file, the history of a real process.
//!
//! A session's file is mapped, so its records survive any exit of the process. An operation is
//! recorded before it starts, and its result as soon as it is known. The operations that a killed
//! process had in flight are the last records, without a result.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use farside::OperationError::Indeterminate;
use farside::{Error, Outcome, Session, Store, Value, Version};
use farside_fabric::boot_time_ns;
use farside_fabric::memory::Region;
use farside_linearizability::{Ended, HistoryOperation, Record, numeric};
use farside_protocol::{Action, Change, Expected, Lifetime, Modification};

use crate::lanes::{self, Answered, Call, Way};
use crate::self_describing;

/// Recorded sessions use the keys below this number.
pub const HOT_KEYS: u64 = 64;
/// The keys whose values are decimal numbers.
pub const COUNTERS: std::ops::Range<u64> = HOT_KEYS..HOT_KEYS + 24;
/// The keys that sessions of a cache use besides the hot ones. Their values take more memory than
/// the server has.
pub const COLD_KEYS: std::ops::Range<u64> = COUNTERS.end..10_000;
/// Of the keys of a cache, those with this remainder may have values that expire.
const EXPIRING_REMAINDER: u64 = 3;
const EXPIRING_DIVISOR: u64 = 4;
/// The times to live of values that expire, in milliseconds.
const TTLS_MS: [u64; 3] = [2, 30, 400];
/// The lengths of the values that a client inserts under new keys of a cache.
const NEW_SIZES: [usize; 4] = [self_describing::HEADER_BYTES, 200, 3000, 20_000];

/// The offsets of a record's words. The time when the operation began; 0 if it has not.
const BEGAN: u64 = 0;
/// The operation, an index into `OPERATIONS`, and its result, an index into `ENDS`.
const OPERATION_AND_END: u64 = 8;
const KEY: u64 = 16;
const ARGUMENT: u64 = 24;
const EXPECTED: u64 = 32;
const FOUND: u64 = 40;
/// The version of the value found.
const VERSION: u64 = 48;
/// The time when the operation returned; 0 if it has not.
const RETURNED: u64 = 56;
/// The size of an operation's record.
pub const RECORD_BYTES: u64 = 64;

const OPERATIONS: [HistoryOperation; 10] = [
    HistoryOperation::Get,
    HistoryOperation::Put,
    HistoryOperation::Insert,
    HistoryOperation::Update,
    HistoryOperation::Delete,
    HistoryOperation::Exchange,
    HistoryOperation::ExchangeVersion,
    HistoryOperation::Take,
    HistoryOperation::Increment,
    HistoryOperation::Append,
];
const ENDS: [Ended; 4] = [Ended::Unknown, Ended::Done, Ended::Refused, Ended::Failed];

/// The number of a value that no session wrote. The number of any other value consists of its
/// writer and the writer's count of values.
const FOREIGN: u64 = u64::MAX;
/// The number for no value.
const NONE: u64 = 0;
/// The bit of a decimal number; the others are the number itself.
const DECIMAL: u64 = 1 << 63;

/// Creates and maps a file of `bytes` zeros. Its words survive this process.
///
/// # Errors
/// The error of the system, as in all functions here that return [`std::io::Result`].
pub fn create_mapped(path: &Path, bytes: u64) -> std::io::Result<Region> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    file.set_len(bytes)?;
    Region::map(&file)
}

/// Returns a key that recorded sessions do not use, and its value, which is longer in a cache.
/// `first` is the number of the first session of the client that inserts the key.
pub fn new_key(first: u64, number: u64, is_cache: bool) -> ([u8; 8], Vec<u8>) {
    let key = 1 << 63 | first << 32 | number;
    let at = if is_cache { number as usize % NEW_SIZES.len() } else { 0 };
    (key.to_le_bytes(), self_describing::value(key, first, number, NEW_SIZES[at]))
}

/// Whether values of this key of a cache may expire. Only GET, PUT, INSERT and DELETE are used on
/// such a key: an operation that depends on a value may count it as present after its expiry.
pub fn may_expire(key: u64) -> bool {
    key % EXPIRING_DIVISOR == EXPIRING_REMAINDER && !COUNTERS.contains(&key)
}

/// Returns the time to live, in milliseconds, of the `count`-th value of a session of a cache, if
/// it expires.
fn ttl_ms(key: u64, count: u64) -> Option<u64> {
    let at = (count % (TTLS_MS.len() as u64 + 1)) as usize;
    TTLS_MS.get(at).copied().filter(|_| may_expire(key))
}

/// Returns the time to live, in milliseconds, of a value in the history of a cache, if it expires.
pub fn ttl_ms_of(key: &str, value: &str) -> Option<u64> {
    let key = u64::from_str_radix(key, 16).ok()?;
    let (_, count) = value.split_once('.')?;
    ttl_ms(key, count.parse().ok()?)
}

/// A session that records all its operations.
pub struct RecordingSession {
    session: Session,
    process: u64,
    /// The number of values that the session has made.
    values: u64,
    words: Region,
    /// The offset of the next record.
    next_record: u64,
}

/// The result of an operation, with the value found if the operation returns one.
type RecordedResult = Result<(Ended, Option<Value>), Error>;

/// A recorded operation without a result yet.
struct OpenRecord {
    at: u64,
    key: u64,
    value: Vec<u8>,
}

fn ended(is_done: bool) -> Ended {
    if is_done { Ended::Done } else { Ended::Refused }
}

fn recorded_outcome(outcome: Outcome) -> (Ended, Option<Value>) {
    (ended(outcome.applied), outcome.value)
}

/// Returns the number of a key's value; `FOREIGN` if no session wrote these bytes.
fn number(key: u64, bytes: &[u8]) -> u64 {
    if COUNTERS.contains(&key) {
        let decimal = str::from_utf8(bytes).ok().and_then(numeric);
        return decimal.map_or(FOREIGN, |number| DECIMAL | number as u64);
    }
    let words = bytes.as_chunks::<8>().0;
    match words {
        [_, writer, count, ..] if self_describing::holds(key, bytes) => {
            u64::from_le_bytes(*writer) << 32 | u64::from_le_bytes(*count)
        }
        _ => FOREIGN,
    }
}

/// Returns a history's name for an action on this key, and the number of the value it expects.
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
        Action::Modify(Modification { change: Change::Add(_), .. }) => {
            (HistoryOperation::Increment, NONE)
        }
        Action::Modify(Modification { change: Change::Append, .. }) => {
            (HistoryOperation::Append, NONE)
        }
        Action::Modify(Modification { change: Change::Remove(None), .. }) => {
            (HistoryOperation::Take, NONE)
        }
        Action::Version | Action::Modify(_) => unreachable!("no such operation is recorded"),
    }
}

/// Returns what a history records of an answer: of an append no value.
fn recorded_answer(action: Action<'_>, answered: Answered) -> (Ended, Option<Value>) {
    let Answered { applied, value, number } = answered;
    let value = match action {
        Action::Modify(Modification { change: Change::Add(_), .. }) => Some(sum(number)),
        Action::Modify(Modification { change: Change::Append, .. }) => None,
        _ => value,
    };
    (ended(applied), value)
}

/// The number that an increment stored, as a value without its version.
fn sum(number: i64) -> Value {
    Value { data: number.to_string().into_bytes(), version: Version::from_u64(0) }
}

fn perform(session: &mut Session, action: Action<'_>, key: &[u8], value: &[u8]) -> RecordedResult {
    let changed = |is_done| (ended(is_done), None);
    match action {
        Action::Get => session.get(key).map(|found| (ended(found.is_some()), found)),
        Action::Put(lifetime) => match lifetime.ttl() {
            Some(ttl) => session.store(key, value, Store::always().ttl(ttl)).map(recorded_outcome),
            None => session.put(key, value).map(|()| changed(true)),
        },
        Action::Insert(lifetime) => match lifetime.ttl() {
            Some(ttl) => {
                session.store(key, value, Store::if_absent().ttl(ttl)).map(recorded_outcome)
            }
            None => session.insert(key, value).map(changed),
        },
        Action::Update(_) => session.update(key, value).map(changed),
        Action::Delete => session.delete(key).map(changed),
        Action::Exchange(Expected::Value(expected), _) => {
            session.compare_exchange(key, Some(expected), value).map(recorded_outcome)
        }
        Action::Exchange(Expected::Version(expected), _) => {
            session.compare_exchange_version(key, expected, value).map(recorded_outcome)
        }
        Action::Modify(Modification { change: Change::Add(addend), .. }) => {
            session.increment(key, addend).map(|number| (Ended::Done, Some(sum(number))))
        }
        Action::Modify(Modification { change: Change::Append, .. }) => {
            session.append(key, value).map(|_| changed(true))
        }
        Action::Modify(Modification { change: Change::Remove(None), .. }) => {
            session.take(key).map(|found| (ended(found.is_some()), found))
        }
        Action::Version | Action::Modify(_) => unreachable!("no such operation is recorded"),
    }
}

impl RecordingSession {
    /// Creates a file with room for `operations` operations of this process.
    ///
    /// # Errors
    /// The error of the system.
    pub fn new(
        session: Session,
        path: &Path,
        process: u64,
        operations: u64,
    ) -> std::io::Result<Self> {
        let words = create_mapped(path, operations * RECORD_BYTES)?;
        Ok(Self { session, process, values: 0, words, next_record: 0 })
    }

    /// Returns the number of operations that still fit into the file.
    pub fn room(&self) -> u64 {
        (self.words.bytes() - self.next_record) / RECORD_BYTES
    }

    /// Returns the lifetime of the next value that the session stores under this key of a cache.
    pub fn next_lifetime(&self, key: u64) -> Lifetime {
        let ttl = ttl_ms(key, self.values + 1);
        ttl.map_or(Lifetime::FOREVER, |ttl| Lifetime::lasting(Duration::from_millis(ttl)))
    }

    /// Overwrites the file from its start, for sessions whose history is not checked.
    pub fn rewind(&mut self) {
        self.next_record = 0;
    }

    /// Forgets all cached locations.
    pub fn clear_cache(&mut self) {
        self.session.clear_cache();
    }

    /// Records an operation. If the operation stores a value, the value is new and has `bytes`
    /// bytes. An append appends the digit `bytes`.
    fn begin(&mut self, key: u64, action: Action<'_>, bytes: usize) -> OpenRecord {
        let at = self.next_record;
        self.next_record += RECORD_BYTES;
        let (argument, value) = match action {
            Action::Get | Action::Delete => (NONE, Vec::new()),
            Action::Modify(Modification { change: Change::Add(addend), .. }) => {
                (DECIMAL | addend as u64, Vec::new())
            }
            Action::Modify(Modification { change: Change::Append, .. }) => {
                (DECIMAL | bytes as u64, bytes.to_string().into_bytes())
            }
            Action::Modify(_) => (NONE, Vec::new()),
            _ => {
                self.values += 1;
                let value = self_describing::value(key, self.process, self.values, bytes);
                (self.process << 32 | self.values, value)
            }
        };
        let (operation, expected) = recorded(action, key);
        let code = OPERATIONS.iter().position(|known| *known == operation).unwrap() as u64;
        let began = (BEGAN, boot_time_ns());
        for (offset, word) in [
            (OPERATION_AND_END, code),
            (KEY, key),
            (ARGUMENT, argument),
            (EXPECTED, expected),
            began,
        ] {
            self.words.store(at + offset, word).unwrap();
        }
        // Without the fence a verb could be executed before the clock was read.
        fence(Ordering::SeqCst);
        OpenRecord { at, key, value }
    }

    /// Records the operation's result.
    fn end(&self, record: &OpenRecord, result: &RecordedResult, returned: u64) {
        let store = |offset, word| self.words.store(record.at + offset, word).unwrap();
        let ended = match result {
            Ok((ended, found)) => {
                if let Some(value) = found {
                    let number = number(record.key, value);
                    assert_ne!(number, FOREIGN, "key {:x}: no session wrote its value", record.key);
                    store(FOUND, number);
                    store(VERSION, value.version.to_u64());
                }
                *ended
            }
            Err(Error::Operation(Indeterminate)) => Ended::Unknown,
            Err(_) => Ended::Failed,
        };
        let end = ENDS.iter().position(|known| *known == ended).unwrap() as u64;
        store(
            OPERATION_AND_END,
            self.words.load(record.at + OPERATION_AND_END).unwrap() | end << 8,
        );
        store(RETURNED, returned);
    }

    /// Runs one operation on a key. If the operation stores a value, the value is new and has
    /// `bytes` bytes.
    ///
    /// # Errors
    /// The error of the session, as in all these functions.
    pub fn run(
        &mut self,
        key: u64,
        action: Action<'_>,
        bytes: usize,
    ) -> Result<Option<Value>, Error> {
        self.run_as(key, action, bytes, |session, key, value| perform(session, action, key, value))
    }

    /// Exchanges the key's absence for a new value. A history calls this an INSERT.
    pub fn exchange_absent(&mut self, key: u64, bytes: usize) -> Result<(), Error> {
        let insert = Action::Insert(Lifetime::FOREVER);
        let call = |session: &mut Session, key: &[u8], value: &[u8]| {
            let exchange = session.compare_exchange(key, None, value)?;
            Ok((ended(exchange.applied), None))
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

    /// Runs operations beside each other. Returns their results. None of them may be a
    /// compare-and-exchange.
    pub fn run_beside(
        &mut self,
        way: &Way,
        steps: &[(u64, Action<'_>, usize)],
    ) -> Result<Vec<Result<(), Error>>, Error> {
        let records: Vec<OpenRecord> =
            steps.iter().map(|&(key, action, bytes)| self.begin(key, action, bytes)).collect();
        let keys: Vec<[u8; 8]> = steps.iter().map(|(key, ..)| key.to_le_bytes()).collect();
        let calls: Vec<_> = keys
            .iter()
            .zip(&records)
            .zip(steps)
            .map(|((key, record), (_, action, _))| Call {
                action: *action,
                key,
                value: &record.value,
            })
            .collect();
        // Without a connection no operation happened, and all records stay without a result.
        let returned = lanes::run(&mut self.session, way, &calls)?.into_iter();
        let results =
            returned.zip(calls).zip(&records).map(|(((returned, result), call), record)| {
                let result = result.map(|answered| recorded_answer(call.action, answered));
                self.end(record, &result, returned);
                result.map(drop)
            });
        Ok(results.collect())
    }
}

/// Reads the records of a file. If `died` is a time, the process executed nothing after it: an
/// operation without a result happened before, or never will. With `None` it may still happen at
/// any later time.
///
/// # Errors
/// The error of the system.
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
            let field = |offset| word(record, offset);
            let operation = OPERATIONS[field(OPERATION_AND_END) as usize & 0xff];
            let has_ended = field(RETURNED) != 0;
            let value = |offset| (field(offset) != NONE).then(|| text(field(offset)));
            let version = |offset| (field(offset) != 0).then(|| format!("{:016x}", field(offset)));
            let is_version = operation == HistoryOperation::ExchangeVersion;
            Record {
                process,
                operation,
                key: format!("{:x}", field(KEY)),
                argument: value(ARGUMENT),
                expected: if is_version { version(EXPECTED) } else { value(EXPECTED) },
                // A process may be killed while it records a result.
                result: if has_ended {
                    ENDS[field(OPERATION_AND_END) as usize >> 8]
                } else {
                    Ended::Unknown
                },
                found: value(FOUND).filter(|_| has_ended),
                version: version(VERSION).filter(|_| has_ended),
                invoke: field(BEGAN),
                returned: if has_ended { Some(field(RETURNED)) } else { died },
            }
        })
        .collect())
}

fn text(number: u64) -> String {
    match number {
        FOREIGN => "foreign".to_owned(),
        _ if number & DECIMAL != 0 => (number ^ DECIMAL).to_string(),
        _ => format!("{}.{}", number >> 32, number & 0xffff_ffff),
    }
}
