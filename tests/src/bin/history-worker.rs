//! Sessions whose operations are recorded: mixed ones on a few hot keys, and one session more that
//! inserts new keys, so that the hot ones move from subtable to subtable. Exits with 3 and a line
//! on stderr when a call fails as it must not.
//!
//! `history-worker ADDRESS FOLDER FIRST SESSIONS [faults]`; the sessions are the processes FIRST,
//! FIRST + 1 and so on of the history and each writes a file of that name to FOLDER. It ends once
//! FOLDER has a file `stop`. With `faults` chains are late and connections break, and at some verb
//! it kills itself; how often the former happened is in the file `faults-FIRST`.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use farside::OperationError::{Contended, Indeterminate};
use farside::{Client, Error};
use farside_fabric::shm::Region;
use farside_tests::faults::{Faults, Rates};
use farside_tests::proof;
use farside_tests::recorder::{HOT_KEYS, RecordingSession};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const SIZES: [usize; 4] = [24, 100, 1000, 6000];
/// How long a call waits for a server to come back.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// How many operations a session records at most, so that they can be judged.
const OPERATIONS_MAX: u64 = 1 << 17;
/// A session pauses after so many operations, for so long.
const BURST: u64 = 256;
const PAUSE: Duration = Duration::from_millis(3);
/// How many keys a session inserts at most: what the region has room for.
const NEW_KEYS_MAX: u64 = 400_000;

/// What goes wrong, in a million chains.
const RATES: Rates = Rates { delayed: 3000, told_late: 2000, broken: 200 };
/// After how many verbs the process ends: two to one of these powers, and up to twice that.
const LAST_VERB: std::ops::Range<u32> = 8..17;
/// How often what went wrong is put on file.
const LOOK: Duration = Duration::from_millis(5);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, folder, first, sessions, rest @ ..] = arguments.as_slice() else {
        eprintln!("history-worker ADDRESS FOLDER FIRST SESSIONS [faults]");
        std::process::exit(2);
    };
    let (first, sessions): (u64, u64) = (first.parse().unwrap(), sessions.parse().unwrap());
    let folder = Path::new(folder);
    let mut client = Client::builder().server(address).connect_timeout(CONNECT_TIMEOUT);
    let faults = (rest == ["faults"]).then(|| faults(first));
    if let Some(faults) = &faults {
        let faults = faults.clone();
        client =
            client.around(Arc::new(move |fabric, lanes| Box::new(faults.around(fabric, lanes))));
    }
    // Sessions that share their locations, and others that do not.
    let [client, other] = &[client.clone(), client].map(|client| client.connect().unwrap());
    std::thread::scope(|scope| {
        for process in first..first + sessions {
            let client = if process % 3 == 0 { other } else { client };
            scope.spawn(move || work(client, folder, process));
        }
        scope.spawn(|| insert(client, folder, first));
        if let Some(faults) = &faults {
            report(faults, folder, first);
        }
    });
}

fn faults(seed: u64) -> Arc<Faults> {
    let faults = Faults::new(seed, RATES);
    let mut random = SmallRng::seed_from_u64(seed);
    let magnitude = 1 << random.random_range(LAST_VERB);
    faults.die_after(magnitude + random.random_range(0..magnitude));
    faults
}

/// Keeps on file what went wrong, in a way that outlives this process.
fn report(faults: &Faults, folder: &Path, first: u64) {
    let file = folder.join(format!("faults-{first}"));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(file).unwrap();
    let counts = faults.counts();
    file.set_len(size_of_val(&counts) as u64).unwrap();
    let words = Region::map(&file).unwrap();
    while !folder.join("stop").exists() {
        for (at, count) in (0..).step_by(size_of::<u64>()).zip(faults.counts()) {
            words.store(at, count).unwrap();
        }
        std::thread::sleep(LOOK);
    }
}

/// What may fail, and says so, has to be one of these.
fn allowed<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(output) => Some(output),
        Err(Error::Operation(Contended { .. } | Indeterminate)) => None,
        Err(error) => {
            eprintln!("WRONG: {error}");
            std::process::exit(3);
        }
    }
}

fn work(client: &Client, folder: &Path, process: u64) {
    let session = client.session().unwrap();
    let file = folder.join(process.to_string());
    let mut session = RecordingSession::new(session, &file, process, OPERATIONS_MAX).unwrap();
    let mut random = SmallRng::seed_from_u64(process);
    while !folder.join("stop").exists() {
        for _ in 0..BURST {
            if session.is_full() {
                return;
            }
            step(&mut session, &mut random);
        }
        std::thread::sleep(PAUSE);
    }
}

fn step(session: &mut RecordingSession, random: &mut SmallRng) {
    let key = random.random_range(0..HOT_KEYS);
    let bytes = SIZES[random.random_range(0..SIZES.len())];
    if random.random_range(0..4) == 0 {
        session.clear_cache();
    }
    match random.random_range(0..100) {
        0..40 => drop(allowed(session.get(key))),
        40..60 => drop(allowed(session.put(key, bytes))),
        60..70 => drop(allowed(session.delete(key))),
        70..80 => drop(allowed(session.insert(key, bytes))),
        80..88 => drop(allowed(session.update(key, bytes))),
        choice => {
            let Some(Some(current)) = allowed(session.get(key)) else { return };
            if session.is_full() {
                return;
            }
            let _ = allowed(match choice {
                88..94 => session.exchange(key, &current, bytes),
                _ => session.exchange_version(key, current.version, bytes),
            });
        }
    }
}

/// New keys, without a record.
fn insert(client: &Client, folder: &Path, writer: u64) {
    let mut session = client.session().unwrap();
    for number in 0..NEW_KEYS_MAX {
        if number % 64 == 0 && folder.join("stop").exists() {
            return;
        }
        let key = 1 << 63 | writer << 32 | number;
        let value = proof::value(key, writer, number, SIZES[0]);
        if allowed(session.insert(&key.to_le_bytes(), &value)) == Some(false) {
            eprintln!("WRONG: the new key {key:#x} was there");
            std::process::exit(3);
        }
    }
}
