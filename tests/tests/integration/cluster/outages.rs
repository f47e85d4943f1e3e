//! Proves what docs/cluster.md promises for a shard that is down. Its keys fail as unavailable, at
//! once when the client knows. All other keys go on, in the same pipeline too, of whose lanes at
//! most a quarter waits. The same sessions and pipelines reach the shard when its server is back.
//!
//! Guards against a scheduler that serves answers before it advances lanes: a caller that repeats
//! each failed operation then gets failures for ever, and no other operation is executed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::{AsyncClient, Client, Error, Pipeline, Session};
use farside_control::attach::ConnectError;
use farside_tests::cluster::TestCluster;
use farside_tests::{ServerProcess, StopOnDrop, TEST_TIMEOUT, short_timeout, wait_until};

const SHARDS: usize = 2;
/// The number of keys of each shard.
const KEYS: usize = 64;
/// More operations than would fail within [`TEST_TIMEOUT`] if each waited for its shard.
const MANY: u64 = 500;

/// A cluster of servers that continue their shards when they are started again.
struct Outages {
    _cluster: TestCluster,
    /// By shard: its server, and keys.
    servers: Vec<ServerProcess>,
    keys: Vec<Vec<String>>,
}

impl Outages {
    fn new() -> Self {
        let cluster = TestCluster::create(SHARDS as u16);
        let router = cluster.store.read().unwrap().map().unwrap().router();
        let mut keys = vec![Vec::new(); SHARDS];
        for key in (0..).map(|number| format!("key {number}")) {
            let of_shard: &mut Vec<String> =
                &mut keys[router.shard(router.hasher.hash(key.as_bytes()))];
            if of_shard.len() < KEYS {
                of_shard.push(key);
            }
            if keys.iter().all(|keys| keys.len() == KEYS) {
                break;
            }
        }
        let file = |number: usize| cluster.folder().join(format!("region{number}"));
        let mut servers: Vec<_> =
            (0..SHARDS).map(|number| cluster.start_with_file(&file(number))).collect();
        cluster.wait_for_servers();
        let shard_of = |server: &ServerProcess| {
            let address = server.address().parse().unwrap();
            (0..SHARDS as u16)
                .find(|&shard| cluster.shard(shard).copies[0].copy.addresses.contains(&address))
        };
        servers.sort_by_key(shard_of);
        let outages = Self { _cluster: cluster, servers, keys };
        let mut session = outages.client(TEST_TIMEOUT).session().unwrap();
        for key in outages.keys.iter().flatten() {
            session.put(key, "value").unwrap();
        }
        outages
    }

    fn client(&self, timeout: Duration) -> Client {
        let seeds: Vec<_> = self.servers.iter().map(ServerProcess::address).collect();
        Client::builder().server(&seeds.join(",")).connect_timeout(timeout).connect().unwrap()
    }
}

/// For how long the shard was tried, if this is the error of a shard that is down.
fn tried(error: &Error, shard: usize) -> Duration {
    match error {
        Error::Unavailable { shard: of, source, .. } if usize::from(*of) == shard => match **source
        {
            ConnectError::Unreachable { tried, .. } => tried,
            ref source => panic!("{source}"),
        },
        error => panic!("{error}"),
    }
}

/// A pipeline whose caller starts each operation again as soon as it completes, whether it failed
/// or not. Half of its lanes are for the keys of each shard.
struct Load<'s, 'o> {
    pipeline: Pipeline<'s>,
    keys: &'o [Vec<String>],
    in_flight: HashMap<u64, (usize, usize)>,
    /// By shard.
    succeeded: [u64; SHARDS],
    failed: [u64; SHARDS],
    tried_max: [Duration; SHARDS],
}

impl<'s, 'o> Load<'s, 'o> {
    fn new(session: &'s mut Session, keys: &'o [Vec<String>]) -> Self {
        let pipeline = session.pipeline().unwrap();
        let (in_flight, succeeded, failed, tried_max) = Default::default();
        let mut load = Self { pipeline, keys, in_flight, succeeded, failed, tried_max };
        for number in 0..load.pipeline.free_lanes() {
            load.start(number % SHARDS, number / SHARDS % KEYS);
        }
        load
    }

    fn start(&mut self, shard: usize, number: usize) {
        let ticket = self.pipeline.get(&self.keys[shard][number]).unwrap();
        self.in_flight.insert(ticket.number(), (shard, number));
    }

    fn step(&mut self) {
        let completed = self.pipeline.wait().unwrap();
        let (shard, number) = self.in_flight.remove(&completed.ticket.number()).unwrap();
        match completed.result {
            Ok(outcome) => {
                assert!(outcome.applied);
                self.succeeded[shard] += 1;
            }
            Err(error) => {
                self.failed[shard] += 1;
                self.tried_max[shard] = self.tried_max[shard].max(tried(&error, shard));
            }
        }
        self.start(shard, number);
    }

    fn run_until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            let Self { succeeded, failed, tried_max, .. } = self;
            assert!(
                started.elapsed() < TEST_TIMEOUT,
                "waiting until {what}: {succeeded:?} succeeded, {failed:?} failed, tried for \
                 {tried_max:?}"
            );
            self.step();
        }
    }

    /// Runs until this shard is known to be down, and operations on all others went on since then.
    fn run_while_down(&mut self, down: &[usize]) {
        (self.failed, self.tried_max) = Default::default();
        let is_down = |load: &Self| {
            down.iter()
                .all(|&shard| load.tried_max[shard] >= short_timeout() && load.failed[shard] > MANY)
        };
        self.run_until("the client knows that the shards are down", is_down);
        self.succeeded = Default::default();
        self.run_until("the other shards go on", |load| {
            (0..SHARDS).all(|shard| down.contains(&shard) || load.succeeded[shard] > MANY)
        });
    }

    fn run_until_all_succeed(&mut self) {
        self.succeeded = Default::default();
        let all = |load: &Self| load.succeeded.iter().all(|&succeeded| succeeded > MANY);
        self.run_until("operations on all shards succeed", all);
    }
}

#[on(each, rdma_in_soak)]
fn a_pipeline_whose_caller_repeats_failures_goes_on_and_recovers() {
    let mut outages = Outages::new();
    let client = outages.client(short_timeout());
    let mut session = client.session().unwrap();
    let keys = outages.keys.clone();
    let mut load = Load::new(&mut session, &keys);
    load.run_until_all_succeed();
    outages.servers[0].kill();
    load.run_while_down(&[0]);
    outages.servers[0].start_again();
    load.run_until_all_succeed();
    // It flaps.
    for _ in 0..3 {
        outages.servers[0].kill();
        outages.servers[0].start_again();
        load.run_until_all_succeed();
    }
    outages.servers[1].pause();
    load.run_while_down(&[1]);
    outages.servers[1].signal(rustix::process::Signal::CONT);
    load.run_until_all_succeed();
    // All are down.
    outages.servers.iter_mut().for_each(ServerProcess::kill);
    load.run_while_down(&[0, 1]);
    outages.servers.iter_mut().for_each(ServerProcess::start_again);
    load.run_until_all_succeed();
}

/// Waits without end if the server does not come back, so that those lanes stay which may wait.
#[on(each, rdma_in_soak)]
fn at_most_a_quarter_of_the_lanes_waits_for_a_shard() {
    let mut outages = Outages::new();
    let client = outages.client(Duration::from_secs(3600));
    let mut used = client.session().unwrap();
    let mut unused = client.session().unwrap();
    let keys = outages.keys.clone();
    let [away, other] = [&*keys[0], &*keys[1]];
    assert_eq!(unused.get(&other[0]).unwrap().unwrap(), "value");
    assert_eq!(used.get(&away[0]).unwrap().unwrap(), "value");
    assert_eq!(used.get(&other[0]).unwrap().unwrap(), "value");
    outages.servers[0].kill();
    let mut pipelines = [&mut used, &mut unused].map(|session| session.pipeline().unwrap());
    for pipeline in &mut pipelines {
        fill_with_waiting(pipeline, away);
        let (waiting, depth) = (pipeline.in_flight(), pipeline.depth());
        assert_eq!(waiting * 4, depth);
        let failed_at = Instant::now();
        for number in 0..MANY as usize {
            while pipeline.free_lanes() > 0 {
                pipeline.get(&other[number % KEYS]).unwrap();
            }
            while pipeline.in_flight() > waiting {
                assert!(next(pipeline).unwrap());
            }
            // Further ones do not wait.
            let tried_at_least = failed_at.elapsed();
            pipeline.get(&away[number % KEYS]).unwrap();
            assert!(tried(&next(pipeline).unwrap_err(), 0) >= tried_at_least);
        }
    }
    outages.servers[0].start_again();
    for pipeline in &mut pipelines {
        while pipeline.in_flight() > 0 {
            assert!(next(pipeline).unwrap());
        }
    }
}

/// The result of the next operation.
fn next(pipeline: &mut Pipeline<'_>) -> Result<bool, Error> {
    let started = Instant::now();
    loop {
        assert!(started.elapsed() < TEST_TIMEOUT, "no operation completes");
        if let Some(completed) = pipeline.poll() {
            return completed.result.map(|outcome| outcome.applied);
        }
        std::thread::yield_now();
    }
}

/// Starts operations of the shard that is away in all lanes, and those again that still reach it.
/// Returns when only as many are left as may wait.
fn fill_with_waiting(pipeline: &mut Pipeline<'_>, away: &[String]) {
    let lanes = pipeline.free_lanes();
    for lane in 0..lanes {
        pipeline.get(&away[lane % KEYS]).unwrap();
    }
    while pipeline.in_flight() * 4 > lanes {
        match next(pipeline) {
            Ok(_) => {
                pipeline.get(&away[0]).unwrap();
            }
            Err(error) => {
                tried(&error, 0);
            }
        }
    }
}

#[on(each, rdma_in_soak)]
fn every_kind_of_call_fails_for_its_own_shard_only_and_recovers() {
    let mut outages = Outages::new();
    let client = outages.client(short_timeout());
    let mut session = client.session().unwrap();
    let keys = outages.keys.clone();
    let [away, other] = [&*keys[0], &*keys[1]];
    let both = || away.iter().chain(other);
    assert!(session.get_many(both()).unwrap().iter().all(Option::is_some));
    outages.servers[0].kill();
    // Until the death is noticed, shared memory can be read.
    wait_until("the shard is down", TEST_TIMEOUT, || session.get(&away[0]).is_err());
    for number in 0..MANY as usize {
        // The first one has waited, and these do not.
        tried(&session.get(&away[number % KEYS]).unwrap_err(), 0);
        assert!(session.get(&other[number % KEYS]).unwrap().is_some());
        tried(&session.get_many(both()).unwrap_err(), 0);
        session.put_many(other.iter().map(|key| (key, "value"))).unwrap();
        tried(&session.put_many(both().map(|key| (key, "value"))).unwrap_err(), 0);
        assert!(session.get_many(other).unwrap().iter().all(Option::is_some));
    }
    let batch =
        |session: &mut Session| both().fold(session.batch(), |batch, key| batch.get(key)).run();
    for (number, result) in batch(&mut session).unwrap().into_iter().enumerate() {
        if number < KEYS {
            tried(&result.unwrap_err(), 0);
        } else {
            assert!(result.unwrap().applied);
        }
    }
    outages.servers[0].start_again();
    wait_until("the shard is back", TEST_TIMEOUT, || session.get(&away[0]).is_ok());
    assert!(session.get_many(both()).unwrap().iter().all(Option::is_some));
    session.put_many(both().map(|key| (key, "value"))).unwrap();
    assert!(batch(&mut session).unwrap().into_iter().all(|result| result.unwrap().applied));
}

/// A batch waits for all its operations, so all of its lanes may wait for a shard.
#[on(each, rdma_in_soak)]
fn a_batch_waits_for_a_shard_that_comes_back() {
    let mut outages = Outages::new();
    let client = outages.client(TEST_TIMEOUT);
    let mut session = client.session().unwrap();
    let keys = outages.keys.clone();
    session.get(&keys[0][0]).unwrap();
    outages.servers[0].kill();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| session.get_many(keys.iter().flatten()));
        outages.servers[0].start_again();
        assert!(reading.join().unwrap().unwrap().iter().all(Option::is_some));
    });
}

/// Tasks that repeat failures leave the driver of an async client to all others.
#[on(each, rdma_in_soak)]
fn an_async_client_whose_tasks_repeat_failures_goes_on_and_recovers() {
    let mut outages = Outages::new();
    let client = outages.client(short_timeout()).async_client().unwrap();
    let keys = outages.keys.clone();
    let counts = [(); 4].map(|()| AtomicU64::new(0));
    let [succeeded_away, failed, succeeded_other, failed_other] = &counts;
    let done = AtomicBool::new(false);
    outages.servers[0].kill();
    std::thread::scope(|scope| {
        let _stops = StopOnDrop(&done);
        for (away, other) in keys[0].iter().zip(&keys[1]) {
            let (client, done) = (&client, &done);
            scope.spawn(move || repeat(client, away, done, [succeeded_away, failed]));
            scope.spawn(move || repeat(client, other, done, [succeeded_other, failed_other]));
        }
        let grows = |what, count: &AtomicU64| {
            let before = count.load(Ordering::Relaxed);
            wait_until(what, TEST_TIMEOUT, || count.load(Ordering::Relaxed) > before + MANY);
        };
        grows("operations fail", failed);
        grows("the others go on", succeeded_other);
        outages.servers[0].start_again();
        grows("the shard is back", succeeded_away);
    });
    assert_eq!(failed_other.load(Ordering::Relaxed), 0);
}

/// GETs a key again and again, and counts the successes and the failures.
fn repeat(client: &AsyncClient, key: &str, done: &AtomicBool, counts: [&AtomicU64; 2]) {
    while !done.load(Ordering::Relaxed) {
        let has_failed = match smol::block_on(client.get(key)) {
            Ok(value) => value.is_none(),
            Err(Error::Unavailable { .. }) => true,
            Err(error) => panic!("{error}"),
        };
        counts[usize::from(has_failed)].fetch_add(1, Ordering::Relaxed);
    }
}
