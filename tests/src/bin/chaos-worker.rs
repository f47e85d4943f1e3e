//! One client of the chaos test: mixed operations on a few hot keys, and ever new ones by which the
//! index grows, until it is killed or its time is up. Exits with 3 and a line on stderr when it
//! sees anything that must not be.
//!
//! `chaos-worker ADDRESS SECONDS WRITER LEDGER`; LEDGER is a file that all
//! workers map.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::time::{Duration, Instant};

use farside::OperationError::Contended;
use farside::{Client, Error, Exchange, Session};
use farside_tests::ledger::{COUNTERS, Ledger};
use farside_tests::proof;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const KEYS: u64 = 1000;
const SIZES: [usize; 6] = [24, 40, 100, 500, 2000, 6000];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, seconds, writer, ledger] = arguments.as_slice() else {
        eprintln!("chaos-worker ADDRESS SECONDS WRITER LEDGER");
        std::process::exit(2);
    };
    let writer: u64 = writer.parse().unwrap();
    let until = Instant::now() + Duration::from_secs(seconds.parse().unwrap());
    let ledger = Ledger::open(ledger.as_ref());
    let client = Client::builder().server(address).connect().unwrap();
    let mut worker = Worker {
        session: client.session().unwrap(),
        random: SmallRng::seed_from_u64(writer),
        writer,
        count: 0,
        ledger,
        grown: Vec::new(),
    };
    while Instant::now() < until {
        for _ in 0..64 {
            worker.step();
        }
    }
}

struct Worker {
    session: Session,
    random: SmallRng,
    writer: u64,
    count: u64,
    ledger: Ledger,
    /// Keys of its own that it inserted and nobody touches.
    grown: Vec<u64>,
}

fn wrong(what: &str, key: u64, bytes: &[u8]) -> ! {
    eprintln!(
        "WRONG: {what}: key {key}, {} bytes: {:?}",
        bytes.len(),
        &bytes[..bytes.len().min(64)]
    );
    std::process::exit(3);
}

/// What an operation under chaos may come to; everything else is a failure of the test.
fn allowed<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(output) => Some(output),
        Err(Error::Operation(Contended { .. })) => None,
        Err(error) => {
            eprintln!("WRONG: {error}");
            std::process::exit(3);
        }
    }
}

impl Worker {
    fn step(&mut self) {
        let key = self.random.random_range(0..KEYS);
        let name = key.to_le_bytes();
        self.count += 1;
        let bytes = SIZES[self.random.random_range(0..SIZES.len())];
        let value = proof::value(key, self.writer, self.count, bytes);
        match self.random.random_range(0..100) {
            0..40 => self.check_get(key),
            40..60 => {
                allowed(self.session.put(&name, &value));
            }
            60..70 => {
                allowed(self.session.delete(&name));
            }
            70..80 => {
                allowed(self.session.insert(&name, &value));
            }
            80..85 => {
                allowed(self.session.update(&name, &value));
            }
            85..90 => self.exchange(key, &value),
            90..93 => self.batch(),
            93..95 => self.grow(),
            _ => self.increment(),
        }
    }

    fn check_get(&mut self, key: u64) {
        if let Some(Some(value)) = allowed(self.session.get(&key.to_le_bytes()))
            && !proof::holds(key, &value)
        {
            wrong("a GET returned what nobody wrote", key, &value);
        }
    }

    /// Inserts a key that stays, and looks at one of those before.
    fn grow(&mut self) {
        let name = |key: u64| format!("new {key}");
        let key = self.writer << 32 | self.count;
        let value = proof::value(key, self.writer, self.count, 24);
        match allowed(self.session.insert(name(key).as_bytes(), &value)) {
            Some(true) => self.grown.push(key),
            Some(false) => wrong("a new key was there", key, &value),
            None => {}
        }
        let Some(&key) = self.grown.get(self.random.random_range(0..=self.grown.len())) else {
            return;
        };
        match allowed(self.session.get(name(key).as_bytes())) {
            Some(Some(value)) if !proof::holds(key, &value) => wrong("a wrong value", key, &value),
            Some(None) => wrong("a key was missed", key, &[]),
            _ => {}
        }
    }

    fn exchange(&mut self, key: u64, value: &[u8]) {
        let name = key.to_le_bytes();
        let Some(Some(current)) = allowed(self.session.get(&name)) else { return };
        let exchanged = self.session.compare_exchange_version(&name, current.version, value);
        if let Some(Exchange::Mismatch(Some(other))) = allowed(exchanged)
            && !proof::holds(key, &other)
        {
            wrong("a compare-and-exchange returned what nobody wrote", key, &other);
        }
    }

    fn batch(&mut self) {
        let keys: Vec<u64> = (0..8).map(|_| self.random.random_range(0..KEYS)).collect();
        let names: Vec<[u8; 8]> = keys.iter().map(|key| key.to_le_bytes()).collect();
        let mut batch = self.session.batch();
        for name in &names {
            batch.get(name);
        }
        for (key, result) in keys.iter().zip(allowed(batch.run()).unwrap()) {
            if let Some(farside::BatchOutcome::Value(Some(value))) = allowed(result)
                && !proof::holds(*key, &value)
            {
                wrong("a batched GET returned what nobody wrote", *key, &value);
            }
        }
    }

    /// Adds one to a shared counter, and keeps book: no update may be lost, none may happen twice.
    fn increment(&mut self) {
        let counter = self.random.random_range(0..COUNTERS);
        let name = format!("counter {counter}");
        loop {
            let Some(current) = allowed(self.session.get(name.as_bytes())) else { return };
            let number = current
                .as_ref()
                .map_or(0, |value| u64::from_le_bytes(value.data.as_slice().try_into().unwrap()));
            let new = (number + 1).to_le_bytes();
            let expected = current.as_ref().map(|value| value.data.as_slice());
            self.ledger.attempt(counter);
            match allowed(self.session.compare_exchange(name.as_bytes(), expected, &new)) {
                Some(Exchange::Exchanged) => return self.ledger.acknowledge(counter),
                _ => self.ledger.retract(counter),
            }
        }
    }
}
