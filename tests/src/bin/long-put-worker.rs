//! A client that replaces long values until it is killed. Exits with 3 and a line on stderr when a
//! PUT fails.
//!
//! `long-put-worker ADDRESS LEDGER VALUES WORKER`: LEDGER is a file that counts the PUTs, and
//! VALUES one with the values (`farside_tests::self_describing`). WORKER chooses the keys.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::Path;

use farside::Client;
use farside_tests::counters::Ledger;
use farside_tests::self_describing::{LongValues, counters_of, key_of};

/// One in this many rounds begins without cached locations and tables of extents.
const ROUNDS_PER_CLEARED_CACHE: u64 = 3;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, ledger, values, worker] = arguments.as_slice() else {
        eprintln!("long-put-worker ADDRESS LEDGER VALUES WORKER");
        std::process::exit(2);
    };
    let (ledger, values) = (Ledger::open(Path::new(ledger)), LongValues::open(Path::new(values)));
    let counters = counters_of(worker.parse().unwrap());
    let client = Client::builder().server(address).connect().unwrap();
    let mut session = client.session().unwrap();
    for round in 0u64.. {
        if round % ROUNDS_PER_CLEARED_CACHE == 0 {
            session.clear_cache();
        }
        for counter in counters.clone() {
            ledger.attempt(counter);
            let (_, number) = ledger.bounds(counter);
            if let Err(error) = session.put(key_of(counter), values.value(counter, number)) {
                eprintln!("WRONG: {error}");
                std::process::exit(3);
            }
            ledger.acknowledge(counter);
        }
    }
}
