//! Sessions whose operations are recorded, for the tests of histories and of collections.
//!
//! Each session does mixed operations on a few hot keys, singly and in batches. One further session
//! inserts new keys and reads them again; the splits that it causes move the hot keys to other
//! subtables. The process exits with 3 and a message on stderr when a call fails in a forbidden
//! way, or returns a value that no session wrote.
//!
//! `history-worker ADDRESS FOLDER FIRST SESSIONS [MODE]`: the sessions are the processes FIRST,
//! FIRST + 1 and so on of the history. Each writes a file with its number as name to FOLDER. The
//! file `new-FIRST` has the number of new keys. The process ends once FOLDER has a file `stop`.
//! MODE is one of faults, endless, network, cluster, lanes, pipelines, batches, async, cache,
//! faulty-cache, long, long-cache and long-full.
//!
//! With `faults`, chains are late and connections break, and at some verb the process kills itself.
//! The file `faults-FIRST` counts the faults. With `endless`, sessions overwrite their files once
//! these are full, and few new keys are inserted: such a client works until it is killed. With
//! `network`, the network fails, so that a write may wait for its blocks in vain. With `cluster`,
//! ADDRESS is a list of seeds, and shards may be unavailable. Then sessions make fewer operations,
//! so that their files have room for minutes. With `pipelines`, `batches` or `async`, as with
//! `cluster`, and sessions have many operations in flight in such a way, while connections break:
//! counters are incremented and appended to. With `lanes`, each session does it in another way.
//!
//! With `cache`, the server evicts keys. The sessions also use cold keys, whose values do not fit
//! into its memory, and some values expire. `faulty-cache` has the faults as well. With `long`, as
//! with `faults`, and some values have extents. `long-cache` is both `long` and `faulty-cache`.
//! With `long-full`, as with `long`, and the server has no room for all values.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farside::ConnectError::Unreachable;
use farside::OperationError::{Contended, Indeterminate, OutOfSpace};
use farside::{Client, ClientBuilder, Contact, Error, Session, SetupError};
use farside_protocol::{Action, Change, Expected, Lifetime, Modification};
use farside_tests::device;
use farside_tests::faults::{Faults, Rates};
use farside_tests::lanes::Way;
use farside_tests::recorder::{
    COLD_KEYS, COUNTERS, HOT_KEYS, RecordingSession, create_mapped, may_expire, new_key,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const SIZES: [usize; 4] = [24, 100, 1000, 6000];
/// Values of these lengths have extents.
const LONG_SIZES: [usize; 2] = [(4 << 20) + 1, (6 << 20) + 777];
/// Of the values of [`has_long`], one in this many is long.
const STEPS_PER_LONG: usize = 8;
/// Timeout of a call, during which the server may restart.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit on a session's recorded operations: the check of a longer history would take too long.
const OPERATIONS_MAX: u64 = 1 << 17;
/// The number of steps of a session between two pauses.
const BURST: u64 = 256;
/// [`BURST`] in a cluster.
const BURST_IN_CLUSTER: u64 = 6;
/// The length of a pause.
const PAUSE: Duration = Duration::from_millis(3);
/// Timeout of a call in a cluster. It is short, so that operations on a shard that is down fail.
const CONNECT_TIMEOUT_IN_CLUSTER: Duration = Duration::from_millis(300);
/// The pause after an operation whose shard is unavailable: the next one may fail at once.
const UNAVAILABLE_PAUSE: Duration = Duration::from_millis(5);
const BATCH: usize = 8;
/// The number of operations that a session of a cluster does beside each other.
const IN_LANES: usize = 16;
/// Nothing is appended to a longer decimal number. The checker takes numbers of 12 digits.
const COUNTER_BYTES_MAX: usize = 6;
/// Limit on the keys that a session inserts: the region has room for no more.
const NEW_KEYS_MAX: u64 = 400_000;
/// The number of keys that a session inserts into a cache between two pauses.
const NEW_KEYS_PER_PAUSE: u64 = 16;
/// [`NEW_KEYS_MAX`] for a client that works until it is killed: many such clients share a region,
/// one after another.
const NEW_KEYS_MAX_ENDLESS: u64 = 5_000;

/// The faults in a million chains.
const RATES: Rates = Rates { delayed: 3000, reported_late: 2000, broken: 200 };
/// [`RATES`] of a client with many operations in flight, which all lose their connection at once.
const RATES_IN_LANES: Rates = Rates { delayed: 0, reported_late: 0, broken: 2000 };
/// The range of `n`: the process ends after at least 2^n verbs, and fewer than twice as many.
const LAST_VERB_LOG2: std::ops::Range<u32> = 8..17;
/// The interval at which the counts of faults are written to their file.
const REPORT_INTERVAL: Duration = Duration::from_millis(5);

/// The last argument.
static MODE: OnceLock<Mode> = OnceLock::new();

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Plain,
    Faults,
    Endless,
    Network,
    Cluster,
    Lanes,
    Pipelines,
    Batches,
    Async,
    Cache,
    FaultyCache,
    Long,
    LongCache,
    LongFull,
}

fn mode() -> Mode {
    *MODE.get().unwrap()
}

fn is_cache() -> bool {
    matches!(mode(), Mode::Cache | Mode::FaultyCache | Mode::LongCache)
}

/// Whether sessions have many operations in flight in a cluster, and connections break.
fn has_lanes() -> bool {
    matches!(mode(), Mode::Lanes | Mode::Pipelines | Mode::Batches | Mode::Async)
}

fn is_in_cluster() -> bool {
    mode() == Mode::Cluster || has_lanes()
}

/// Whether some values have extents. Such workers have faults, too.
fn has_long() -> bool {
    matches!(mode(), Mode::Long | Mode::LongCache | Mode::LongFull)
}

const PUT: Action<'static> = Action::Put(Lifetime::FOREVER);
const INSERT: Action<'static> = Action::Insert(Lifetime::FOREVER);
const UPDATE: Action<'static> = Action::Update(Lifetime::FOREVER);

fn main() {
    // A session that panics ends the process, not only its own thread.
    let report_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report_panic(panic);
        std::process::exit(3);
    }));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, folder, first, sessions, mode @ ..] = arguments.as_slice() else { usage() };
    let (first, sessions): (u64, u64) = (first.parse().unwrap(), sessions.parse().unwrap());
    let mode = match mode.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Mode::Plain,
        ["faults"] => Mode::Faults,
        ["endless"] => Mode::Endless,
        ["network"] => Mode::Network,
        ["cluster"] => Mode::Cluster,
        ["lanes"] => Mode::Lanes,
        ["pipelines"] => Mode::Pipelines,
        ["batches"] => Mode::Batches,
        ["async"] => Mode::Async,
        ["cache"] => Mode::Cache,
        ["faulty-cache"] => Mode::FaultyCache,
        ["long"] => Mode::Long,
        ["long-cache"] => Mode::LongCache,
        ["long-full"] => Mode::LongFull,
        _ => usage(),
    };
    let (folder, mode) = (Path::new(folder), *MODE.get_or_init(|| mode));
    let timeout = match is_in_cluster() {
        // In emulation a connection takes longer.
        true if device().is_some() => 10 * CONNECT_TIMEOUT_IN_CLUSTER,
        true => CONNECT_TIMEOUT_IN_CLUSTER,
        false => CONNECT_TIMEOUT,
    };
    let mut client = Client::builder().server(address).connect_timeout(timeout);
    let is_faulty = has_long() || has_lanes() || matches!(mode, Mode::Faults | Mode::FaultyCache);
    let faults = is_faulty.then(|| faults(first));
    if let Some(faults) = &faults {
        let faults = faults.clone();
        client = client.intercept_fabric(Arc::new(move |fabric, lanes| {
            Box::new(faults.around(fabric, lanes))
        }));
    }
    // Sessions of one client share their cached locations; sessions of two clients do not.
    let [Some(client), Some(other)] = &[client.clone(), client].map(|it| connect(&it, folder))
    else {
        return;
    };
    std::thread::scope(|scope| {
        for process in first..first + sessions {
            let client = if process % 3 == 0 { other } else { client };
            scope.spawn(move || work(client, folder, process));
        }
        let new_keys = match mode {
            Mode::Endless => NEW_KEYS_MAX_ENDLESS,
            _ if has_long() || is_in_cluster() => NEW_KEYS_MAX_ENDLESS,
            _ => NEW_KEYS_MAX,
        };
        scope.spawn(move || insert(client, folder, first, new_keys));
        if let Some(faults) = &faults {
            report(faults, folder, first);
        }
    });
}

fn usage() -> ! {
    eprintln!(
        "history-worker ADDRESS FOLDER FIRST SESSIONS \
         [faults|endless|network|cluster|lanes|pipelines|batches|async|cache|faulty-cache|long|\
         long-cache|long-full]"
    );
    std::process::exit(2);
}

fn has_stopped(folder: &Path) -> bool {
    folder.join("stop").exists()
}

/// Connects a client. In a cluster tries again while no server answers. `None` if the run ends
/// before.
fn connect(builder: &ClientBuilder, folder: &Path) -> Option<Client> {
    while !has_stopped(folder) {
        match builder.clone().connect() {
            Ok(client) => return Some(client),
            Err(SetupError::Connect(Unreachable { .. })) if is_in_cluster() => {}
            Err(error) => panic!("{error}"),
        }
    }
    None
}

/// Opens a session. In a cluster tries again while no shard is available. `None` if the run ends
/// before.
fn open(client: &Client, folder: &Path) -> Option<Session> {
    while !has_stopped(folder) {
        match client.session() {
            Ok(session) => return Some(session),
            Err(error) => drop(allowed(Err::<(), _>(error))),
        }
    }
    None
}

fn faults(seed: u64) -> Arc<Faults> {
    if has_lanes() {
        return Faults::new(seed, RATES_IN_LANES);
    }
    let faults = Faults::new(seed, RATES);
    let mut random = SmallRng::seed_from_u64(seed);
    let magnitude = 1 << random.random_range(LAST_VERB_LOG2);
    faults.die_after(magnitude + random.random_range(0..magnitude));
    faults
}

/// Writes the counts of faults to a file that survives this process.
fn report(faults: &Faults, folder: &Path, first: u64) {
    let bytes = size_of_val(&faults.counts()) as u64;
    let words = create_mapped(&folder.join(format!("faults-{first}")), bytes).unwrap();
    while !has_stopped(folder) {
        for (offset, count) in (0..).step_by(size_of::<u64>()).zip(faults.counts()) {
            words.store(offset, count).unwrap();
        }
        std::thread::sleep(REPORT_INTERVAL);
    }
}

/// Returns the output of a call; `None` for the errors with which it may fail. Panics at any other.
fn allowed<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(output) => Some(output),
        Err(Error::Operation(Contended { .. } | Indeterminate)) => None,
        Err(Error::Operation(OutOfSpace { .. })) if mode() == Mode::LongFull => None,
        // Behind a network that fails, or on a busy machine. It has not taken effect.
        Err(Error::Connect(Unreachable { contact: Contact::Silent, .. })) => None,
        Err(Error::Unavailable { .. }) if is_in_cluster() => {
            std::thread::sleep(UNAVAILABLE_PAUSE);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// [`allowed`] for a single GET, which a session repeats when its outcome is unknown.
fn allowed_get<T>(result: Result<T, Error>) -> Option<T> {
    assert!(!matches!(result, Err(Error::Operation(Indeterminate))), "a GET was indeterminate");
    allowed(result)
}

fn work(client: &Client, folder: &Path, process: u64) {
    let Some(session) = open(client, folder) else { return };
    let file = folder.join(process.to_string());
    let mut session = RecordingSession::new(session, &file, process, OPERATIONS_MAX).unwrap();
    let mut random = SmallRng::seed_from_u64(process);
    let way = match mode() {
        Mode::Pipelines => Way::Pipeline,
        Mode::Async => Way::Async(client.async_client().unwrap()),
        Mode::Lanes if process.is_multiple_of(3) => Way::Pipeline,
        Mode::Lanes if process % 3 == 1 => Way::Async(client.async_client().unwrap()),
        _ => Way::Batch,
    };
    let burst = match mode() {
        Mode::Cluster => BURST_IN_CLUSTER,
        _ if has_lanes() => 1,
        _ => BURST,
    };
    while !has_stopped(folder) {
        for _ in 0..burst {
            if session.room() < (2 * IN_LANES) as u64 {
                if mode() != Mode::Endless {
                    return;
                }
                session.rewind();
            }
            match has_lanes() {
                true => steps_in_lanes(&mut session, &way, &mut random),
                false => step(&mut session, &mut random),
            }
        }
        std::thread::sleep(PAUSE);
    }
}

fn step(session: &mut RecordingSession, random: &mut SmallRng) {
    let key = any_key(random);
    let bytes = any_length(random);
    if random.random_range(0..4) == 0 {
        session.clear_cache();
    }
    if is_cache() && may_expire(key) {
        return step_of_expiring(session, key, random);
    }
    if random.random_range(0..8) == 0 {
        let (key, mut action, digit) = count(random);
        if let Action::Modify(Modification { change: Change::Append, .. }) = action
            && !is_short(session, key)
        {
            action = Action::Delete;
        }
        return drop(allowed(session.run(key, action, digit)));
    }
    match random.random_range(0..103) {
        choice @ 0..88 => match unconditional(choice) {
            Action::Get => drop(allowed_get(session.run(key, Action::Get, 0))),
            action => drop(allowed(session.run(key, action, bytes))),
        },
        choice @ 88..100 => {
            let Some(found) = allowed_get(session.run(key, Action::Get, 0)) else { return };
            let _ = match found {
                None => allowed(session.exchange_absent(key, bytes)),
                Some(current) => {
                    let expected = match choice {
                        88..94 => Expected::Value(&current),
                        _ => Expected::Version(current.version),
                    };
                    let exchange = Action::Exchange(expected, Lifetime::FOREVER);
                    allowed(session.run(key, exchange, bytes).map(drop))
                }
            };
        }
        _ => {
            // A batch of long values would take the memory of many at once.
            let bytes = bytes.min(SIZES[SIZES.len() - 1]);
            let mut next = || {
                // The steps of a batch store no values that expire.
                let mut keys = std::iter::repeat_with(|| any_key(random));
                let key = keys.find(|key| !is_cache() || !may_expire(*key)).unwrap();
                (key, unconditional(random.random_range(0..88)), bytes)
            };
            let steps: [_; BATCH] = std::array::from_fn(|_| next());
            run_beside(session, &Way::Batch, &steps);
        }
    }
}

fn run_beside(session: &mut RecordingSession, way: &Way, steps: &[(u64, Action<'_>, usize)]) {
    for result in allowed(session.run_beside(way, steps)).into_iter().flatten() {
        allowed(result);
    }
}

/// Does operations beside each other, half of them on counters.
fn steps_in_lanes(session: &mut RecordingSession, way: &Way, random: &mut SmallRng) {
    if random.random_range(0..4) == 0 {
        session.clear_cache();
    }
    let mut appended = Vec::new();
    let steps: [_; IN_LANES] = std::array::from_fn(|_| {
        if random.random() {
            return (
                any_key(random),
                unconditional(random.random_range(0..88)),
                any_length(random),
            );
        }
        let (key, mut action, digit) = count(random);
        let is_append =
            matches!(action, Action::Modify(Modification { change: Change::Append, .. }));
        if is_append && (appended.contains(&key) || !is_short(session, key)) {
            action = Action::Delete;
        }
        if is_append {
            appended.push(key);
        }
        (key, action, digit)
    });
    run_beside(session, way, &steps);
}

/// Returns the length of a value.
fn any_length(random: &mut SmallRng) -> usize {
    let is_long = has_long() && random.random_range(0..STEPS_PER_LONG) == 0;
    let lengths = if is_long { &LONG_SIZES[..] } else { &SIZES[..] };
    lengths[random.random_range(0..lengths.len())]
}

/// Returns a key for one step.
fn any_key(random: &mut SmallRng) -> u64 {
    if is_cache() && random.random() {
        return random.random_range(COLD_KEYS);
    }
    random.random_range(0..HOT_KEYS)
}

/// Does one operation on a key whose values may expire.
fn step_of_expiring(session: &mut RecordingSession, key: u64, random: &mut SmallRng) {
    let bytes = any_length(random);
    let lifetime = session.next_lifetime(key);
    let action = match random.random_range(0..100) {
        0..50 => return drop(allowed_get(session.run(key, Action::Get, 0))),
        50..70 => Action::Put(lifetime),
        70..90 => Action::Insert(lifetime),
        _ => Action::Delete,
    };
    drop(allowed(session.run(key, action, bytes)));
}

/// Whether a further digit fits in the records of this counter.
fn is_short(session: &mut RecordingSession, key: u64) -> bool {
    let found = allowed_get(session.run(key, Action::Get, 0));
    found.is_some_and(|found| found.is_none_or(|value| value.len() <= COUNTER_BYTES_MAX))
}

/// Returns an operation on a key whose value is a decimal number: the key, the action, and the
/// digit that it adds or appends.
fn count(random: &mut SmallRng) -> (u64, Action<'static>, usize) {
    let key = random.random_range(COUNTERS);
    let digit = random.random_range(1..10);
    let action = match random.random_range(0..100) {
        0..50 => Action::increment(digit),
        50..65 => Action::append(),
        65..75 => Action::take(),
        75..80 => Action::Delete,
        _ => Action::Get,
    };
    (key, action, digit as usize)
}

/// Returns the action for a random number below 88.
fn unconditional(choice: u32) -> Action<'static> {
    match choice {
        0..40 => Action::Get,
        40..60 => PUT,
        60..70 => Action::Delete,
        70..80 => INSERT,
        _ => UPDATE,
    }
}

/// Inserts keys that no other session uses, and checks that some of them are still there.
fn insert(client: &Client, folder: &Path, first: u64, keys_max: u64) {
    let Some(mut session) = open(client, folder) else { return };
    let count = create_mapped(&folder.join(format!("new-{first}")), 8).unwrap();
    let mut random = SmallRng::seed_from_u64(first);
    for number in 0..keys_max {
        if number % 64 == 0 && has_stopped(folder) {
            return;
        }
        if mode() == Mode::Cluster || is_cache() && number % NEW_KEYS_PER_PAUSE == 0 {
            std::thread::sleep(PAUSE);
        }
        if !insert_new(&mut session, folder, first, number) {
            return;
        }
        count.store(0, number + 1).unwrap();
        let (key, value) = new_key(first, random.random_range(0..=number), is_cache());
        if number % 4 == 0
            && let Some(found) = allowed_get(session.get(key))
        {
            let is_lost = found.is_none() && is_cache();
            assert!(
                is_lost || found.as_ref().is_some_and(|found| found.data == value),
                "the new key {key:x?} has {found:?}"
            );
        }
    }
}

/// Inserts a new key, and returns once it is there. Returns false if the run ends before there is
/// room for it.
fn insert_new(session: &mut Session, folder: &Path, first: u64, number: u64) -> bool {
    let (key, value) = new_key(first, number, is_cache());
    let mut may_be_there = false;
    loop {
        match session.insert(key, &value) {
            Ok(true) => return true,
            Ok(false) if may_be_there => return true,
            Ok(false) => panic!("the new key {key:x?} was there"),
            Err(Error::Operation(Indeterminate)) => may_be_there = true,
            Err(Error::Operation(OutOfSpace { .. })) if has_stopped(folder) => return false,
            Err(error) => drop(allowed(Err::<(), _>(error))),
        }
    }
}
