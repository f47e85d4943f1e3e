//! One client of the restart test. It numbers what it does to each of its own keys, and keeps book
//! of what was acknowledged in a file that all workers map; counters it shares with the others.
//! Exits with 3 and a line on stderr when anything acknowledged is gone, or was never written.
//!
//! `restart-worker ADDRESS WRITER LEDGER STOP`; it ends once the file STOP is there.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::Path;
use std::time::Duration;

use farside::OperationError::{Contended, Indeterminate};
use farside::{Client, Error, Exchange, Session};
use farside_tests::ledger::{COUNTERS, KEYS_PER_WRITER, Ledger, WRITERS, entry_of, is_removal};
use farside_tests::proof;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const SIZES: [usize; 4] = [24, 100, 1000, 6000];
/// How long a call waits for a server to come back.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, writer, ledger, stop] = arguments.as_slice() else {
        eprintln!("restart-worker ADDRESS WRITER LEDGER STOP");
        std::process::exit(2);
    };
    let writer: u64 = writer.parse().unwrap();
    let ledger = Ledger::open(ledger.as_ref());
    let builder = Client::builder().server(address).connect_timeout(CONNECT_TIMEOUT);
    let client = builder.connect().unwrap();
    let mut worker = Worker {
        session: client.session().unwrap(),
        random: SmallRng::seed_from_u64(writer),
        writer,
        done: vec![0; KEYS_PER_WRITER as usize],
        ledger,
    };
    while !Path::new(stop).exists() {
        for _ in 0..64 {
            worker.step();
        }
    }
}

struct Worker {
    session: Session,
    random: SmallRng,
    writer: u64,
    /// The number of the last step that each own key has seen.
    done: Vec<u64>,
    ledger: Ledger,
}

fn wrong(what: &str, key: u64, details: std::fmt::Arguments<'_>) -> ! {
    eprintln!("WRONG: {what}: key {key}: {details}");
    std::process::exit(3);
}

/// How a call went.
enum Outcome<T> {
    Done(T),
    /// It has not happened.
    Not,
    /// It has happened, or never will.
    Unknown,
}

fn outcome<T>(result: Result<T, Error>) -> Outcome<T> {
    match result {
        Ok(output) => Outcome::Done(output),
        Err(Error::Operation(Contended { .. })) => Outcome::Not,
        Err(Error::Operation(Indeterminate)) => Outcome::Unknown,
        Err(error) => {
            eprintln!("WRONG: {error}");
            std::process::exit(3);
        }
    }
}

impl Worker {
    fn step(&mut self) {
        let key = self.random.random_range(0..KEYS_PER_WRITER);
        match self.random.random_range(0..100) {
            0..45 => self.change(key),
            45..70 => self.check_own(key),
            70..85 => self.check_others(),
            _ => self.increment(),
        }
    }

    /// What a value of one of the own keys says its number is; `None` if it is absent.
    fn number(&mut self, key: u64) -> Option<Option<u64>> {
        let name = entry_of(self.writer, key);
        let Outcome::Done(value) = outcome(self.session.get(&name.to_le_bytes())) else {
            return None;
        };
        Some(value.map(|value| match proof::number(name, &value) {
            Some(number) => number,
            None => wrong("nobody wrote this", name, format_args!("{} bytes", value.len())),
        }))
    }

    /// The next step of a key: a store, now and then a removal.
    fn change(&mut self, key: u64) {
        let name = entry_of(self.writer, key);
        let last = self.done[key as usize];
        let number = self.ledger.attempt(name) + 1;
        let result = if is_removal(number) {
            let was_there = last > 0 && !is_removal(last);
            self.session.delete(&name.to_le_bytes()).map(|deleted| {
                if deleted != was_there {
                    wrong("a DELETE says", name, format_args!("{deleted} after step {last}"));
                }
            })
        } else {
            let bytes = SIZES[self.random.random_range(0..SIZES.len())];
            let value = proof::value(name, self.writer, number, bytes);
            self.session.put(&name.to_le_bytes(), &value)
        };
        match outcome(result) {
            Outcome::Done(()) => {
                self.ledger.acknowledge_as(name, number);
                self.done[key as usize] = number;
            }
            Outcome::Not => {}
            // Whichever of the two it is, from now on it stays.
            Outcome::Unknown => {
                let found = self.number(key).flatten();
                let happened =
                    if is_removal(number) { found.is_none() } else { found == Some(number) };
                self.done[key as usize] = if happened { number } else { last };
            }
        }
    }

    /// Nobody else writes this key, so it is exactly as the last acknowledged step left it.
    fn check_own(&mut self, key: u64) {
        let last = self.done[key as usize];
        let expected = (last > 0 && !is_removal(last)).then_some(last);
        if let Some(found) = self.number(key)
            && found != expected
        {
            let name = entry_of(self.writer, key);
            wrong("an own key", name, format_args!("{found:?}, not {expected:?}"));
        }
    }

    /// A key of any writer is never older than what was acknowledged before the look.
    fn check_others(&mut self) {
        let writer = self.random.random_range(0..WRITERS);
        let name = entry_of(writer, self.random.random_range(0..KEYS_PER_WRITER));
        let (acknowledged, _) = self.ledger.bounds(name);
        let Outcome::Done(value) = outcome(self.session.get(&name.to_le_bytes())) else { return };
        let number = value.map(|value| proof::number(name, &value));
        let (_, attempted) = self.ledger.bounds(name);
        if let Some(number) = number
            && !number.is_some_and(|number| (acknowledged..=attempted).contains(&number))
        {
            let range = acknowledged..=attempted;
            wrong("another's key", name, format_args!("{number:?}, not in {range:?}"));
        }
    }

    /// Adds one to a shared counter: no increment may be lost, none may happen twice.
    fn increment(&mut self) {
        let counter = self.random.random_range(0..COUNTERS);
        let name = format!("counter {counter}");
        loop {
            let Outcome::Done(current) = outcome(self.session.get(name.as_bytes())) else { return };
            let number = current.as_ref().map_or(0, |value| {
                let bytes: &[u8] = value;
                u64::from_le_bytes(bytes.try_into().unwrap())
            });
            let new = (number + 1).to_le_bytes();
            let expected = current.as_ref().map(|value| value.data.as_slice());
            self.ledger.attempt(counter);
            match outcome(self.session.compare_exchange(name.as_bytes(), expected, &new)) {
                Outcome::Done(Exchange::Exchanged) => return self.ledger.acknowledge(counter),
                // It may count, or not.
                Outcome::Unknown => return,
                Outcome::Done(Exchange::Mismatch(_)) | Outcome::Not => {
                    self.ledger.retract(counter);
                }
            }
        }
    }
}
