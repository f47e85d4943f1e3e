//! Proves that a rolling restart of all servers loses no value, and that a client which repeats
//! failed operations sees no other error. Each server gets SIGTERM, and is started again on its
//! region file at another address, while sessions read and write all keys.
//!
//! Prints for how long a key paused at most. This is not asserted, because it depends on the
//! machine.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farside::{Client, Error, Session};
use farside_cluster::random_id;
use farside_tests::cluster::TestCluster;
use farside_tests::etcd_process::{Etcd, is_left_out};
use farside_tests::{ServerProcess, StopOnDrop, TEST_TIMEOUT};

const SERVERS: u16 = 3;
const KEYS: u64 = 300;
/// How many sessions use the keys of a shard, each a part of them.
const SESSIONS_PER_SHARD: usize = 2;
const ARGUMENTS: &str = "--memory 64MiB --grace-ms 20";
const TIMEOUT: Duration = Duration::from_millis(500);
/// The pause before an operation is repeated, and between two operations.
const PAUSE: Duration = Duration::from_micros(300);
/// For how long there is load before and after each restart.
const BETWEEN: Duration = Duration::from_millis(300);

/// A session that uses keys of one shard, so that it waits for no other shard.
struct Writer {
    session: Session,
    /// Each key with its value, and the end of the last operation on it.
    keys: Vec<(u64, u64, Instant)>,
    operations: u64,
    unavailable: u64,
    indeterminate: u64,
    longest_pause: Duration,
}

impl Writer {
    fn new(client: &Client, keys: &[u64]) -> Self {
        let session = client.session().unwrap();
        let keys = keys.iter().map(|key| (*key, 0, Instant::now())).collect();
        let (operations, unavailable, indeterminate) = (0, 0, 0);
        let longest_pause = Duration::ZERO;
        Self { session, keys, operations, unavailable, indeterminate, longest_pause }
    }

    /// Makes an operation on the key at this place until it succeeds. No other session changes the
    /// key, so a PUT may be repeated.
    fn repeat<T>(
        &mut self,
        at: usize,
        operation: impl Fn(&mut Session, [u8; 8]) -> Result<T, Error>,
    ) -> T {
        let (key, started) = (self.keys[at].0.to_le_bytes(), Instant::now());
        let done = loop {
            match operation(&mut self.session, key) {
                Ok(done) => break done,
                Err(Error::Unavailable { .. }) => self.unavailable += 1,
                Err(error) if error.is_indeterminate() => self.indeterminate += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "an operation does not succeed");
            std::thread::sleep(PAUSE);
        };
        let paused = std::mem::replace(&mut self.keys[at].2, Instant::now()).elapsed();
        self.longest_pause = self.longest_pause.max(paused);
        self.operations += 1;
        done
    }

    /// Checks the value of the key at this place.
    fn check(&mut self, at: usize) {
        let found = self.repeat(at, |session, key| session.get(key));
        let (key, value, _) = self.keys[at];
        assert_eq!(found.unwrap(), value.to_string().as_str(), "key {key}");
    }

    /// Writes and reads all keys again and again.
    fn run(mut self, stop: &AtomicBool) -> Self {
        let count = self.keys.len();
        for number in 1.. {
            let at = number % count;
            self.keys[at].1 = number as u64;
            self.repeat(at, |session, key| session.put(key, number.to_string()));
            if number < count {
                continue;
            }
            self.check(number * 7 % count);
            if stop.load(Ordering::Relaxed) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self
    }
}

/// The keys of each shard.
fn keys_by_shard(cluster: &TestCluster) -> HashMap<usize, Vec<u64>> {
    let router = cluster.store.read().unwrap().map().unwrap().router();
    let mut keys: HashMap<usize, Vec<u64>> = HashMap::new();
    for key in 0..KEYS {
        keys.entry(router.shard(router.hasher.hash(&key.to_le_bytes()))).or_default().push(key);
    }
    keys
}

/// Restarts one server after the other. Returns how long each was away.
fn restart_all(
    cluster: &TestCluster,
    servers: &mut [(PathBuf, ServerProcess)],
    shards: &[u16],
) -> Vec<Duration> {
    let mut away = Vec::new();
    for ((file, server), shard) in servers.iter_mut().zip(shards) {
        std::thread::sleep(BETWEEN);
        let stopped = Instant::now();
        assert_eq!(server.terminate(), Some(0), "{}", server.log());
        *server = cluster.start_with_file(file);
        cluster.wait_for_owner(*shard, server);
        away.push(stopped.elapsed());
    }
    std::thread::sleep(BETWEEN);
    away
}

/// The shard that this server has.
fn shard_of(cluster: &TestCluster, server: &ServerProcess) -> u16 {
    let address = server.address().parse().unwrap();
    let has_it = |shard: &u16| cluster.shard(*shard).copies[0].copy.addresses.contains(&address);
    (0..SERVERS).find(has_it).unwrap()
}

fn rolling_restart(uri: Option<String>) {
    let cluster = TestCluster::create_at(uri, SERVERS, random_id().unwrap(), ARGUMENTS);
    let file = |number: u16| cluster.folder().join(format!("region{number}"));
    let start = |number| (file(number), cluster.start_with_file(&file(number)));
    let mut servers: Vec<_> = (0..SERVERS).map(start).collect();
    cluster.wait_for_servers();
    let shards: Vec<u16> = servers.iter().map(|(_, it)| shard_of(&cluster, it)).collect();
    let connect = |servers: &[(PathBuf, ServerProcess)]| {
        let seeds: Vec<_> = servers.iter().map(|(_, server)| server.address()).collect();
        let builder = Client::builder().server(&seeds.join(","));
        builder.connect_timeout(TIMEOUT).connect().unwrap()
    };
    let client = connect(&servers);
    let (keys, stop) = (keys_by_shard(&cluster), AtomicBool::new(false));
    let parts = keys.values().flat_map(|keys| keys.chunks(keys.len().div_ceil(SESSIONS_PER_SHARD)));
    let writers: Vec<_> = parts.map(|keys| Writer::new(&client, keys)).collect();
    let (away, writers) = std::thread::scope(|scope| {
        let stop_on_drop = StopOnDrop(&stop);
        let run = |writer: Writer| scope.spawn(|| writer.run(&stop));
        let running: Vec<_> = writers.into_iter().map(run).collect();
        let away = restart_all(&cluster, &mut servers, &shards);
        drop(stop_on_drop);
        let writers: Vec<_> = running.into_iter().map(|it| it.join().unwrap()).collect();
        (away, writers)
    });
    let sum = |count: fn(&Writer) -> u64| writers.iter().map(count).sum::<u64>();
    println!(
        "{} operations, {} attempts Unavailable, {} Indeterminate, longest pause of a key {:.2?}, \
         servers away for {away:.2?}",
        sum(|writer| writer.operations),
        sum(|writer| writer.unavailable),
        sum(|writer| writer.indeterminate),
        writers.iter().map(|writer| writer.longest_pause).max().unwrap()
    );
    // A client that knows only the new addresses finds all values, too.
    let other = connect(&servers);
    for mut writer in writers {
        (0..writer.keys.len()).for_each(|at| writer.check(at));
        writer.session = other.session().unwrap();
        (0..writer.keys.len()).for_each(|at| writer.check(at));
    }
    servers[0].1.assert_verifies();
}

#[on(any)]
fn loses_no_value_and_shows_no_error_to_a_client_that_repeats() {
    rolling_restart(None);
}

#[on(any)]
fn with_records_in_etcd_does_the_same() {
    if !is_left_out() {
        let etcd = Etcd::start(3, &[]);
        rolling_restart(Some(etcd.uri("127.0.0.1")));
    }
}
