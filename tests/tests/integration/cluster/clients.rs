//! Clients of a cluster: keys go to their shards, a shard that is down fails its own keys only, and
//! a client finds servers that come back elsewhere.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use farside::{Client, Error, Session};
use farside_control::attach::ConnectError;
use farside_fabric::{
    Buffer, Completion, Fabric, Intercepted, Interceptor, LaneId, Nanos, RegionIndex, Verb,
};
use farside_tests::cluster::TestCluster;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, free_tcp_address, is_over_shm, short_timeout, wait_until,
};

const KEYS: u32 = 300;
/// How long a server may stand still before it asks the records whose its shard is, and a margin.
const SERVER_GAP: Duration = Duration::from_secs(6);

fn connect(servers: &[&ServerProcess]) -> Client {
    let seeds: Vec<String> = servers.iter().map(|server| server.address()).collect();
    let builder = Client::builder().server(&seeds.join(","));
    builder.connect_timeout(short_timeout()).connect().unwrap()
}

fn key(number: u32) -> String {
    format!("key {number}")
}

/// Puts all keys. Returns the numbers of the keys of each shard, by the servers' own counts of
/// keys.
fn fill(session: &mut Session) {
    for number in 0..KEYS {
        session.put(key(number), number.to_string()).unwrap();
    }
}

/// The keys of each shard.
fn keys_by_shard(cluster: &TestCluster) -> HashMap<usize, Vec<u32>> {
    let router = cluster.store.read().unwrap().map().unwrap().router();
    let mut keys: HashMap<usize, Vec<u32>> = HashMap::new();
    for number in 0..KEYS {
        let shard = router.shard(router.hasher.hash(key(number).as_bytes()));
        keys.entry(shard).or_default().push(number);
    }
    keys
}

#[on(each, rdma_in_soak)]
fn an_application_for_one_server_works_with_several() {
    let (cluster, servers) = TestCluster::with_servers(4);
    let client = connect(&[&servers[0]]);
    let mut session = client.session().unwrap();
    fill(&mut session);
    for number in 0..KEYS {
        assert_eq!(session.get(key(number)).unwrap().unwrap(), number.to_string().as_str());
    }
    assert_eq!(session.scan().unwrap().map(Result::unwrap).count(), KEYS as usize);
    let shards = keys_by_shard(&cluster);
    for (shard, keys) in &shards {
        let statistics = client.admin().shard(*shard as u16).statistics().unwrap();
        assert!(statistics.blocks_taken >= keys.len() as u64, "shard {shard}");
    }
    assert!(session.insert("new", "1").unwrap() && !session.insert("new", "2").unwrap());
    assert_eq!(session.increment("count", 5).unwrap(), 5);
    let values = session.get_many((0..KEYS).map(key)).unwrap();
    assert!(values.iter().all(Option::is_some));
    let mut pipeline = session.pipeline().unwrap();
    for number in 0..KEYS {
        if pipeline.free_lanes() == 0 {
            assert!(pipeline.wait().unwrap().result.unwrap().applied);
        }
        pipeline.get(key(number)).unwrap();
    }
    while let Some(completed) = pipeline.wait() {
        assert!(completed.result.unwrap().applied);
    }
    drop(pipeline);
    assert_eq!(client.admin().compact().unwrap().chunks_thin, 0);
    client.admin().collect().unwrap();
    assert_eq!(session.delete_prefix("key ").unwrap(), u64::from(KEYS));
    assert_eq!(session.scan().unwrap().count(), 2);
}

/// A batch rings one doorbell for each server that is concerned, and takes one round trip in time.
#[on(each, rdma_in_soak)]
fn a_batch_rings_as_many_doorbells_as_there_are_servers() {
    let (_cluster, servers) = TestCluster::with_servers(4);
    let mut session = connect(&[&servers[0]]).session().unwrap();
    fill(&mut session);
    let before = session.counters();
    let values = session.get_many((0..32).map(key)).unwrap();
    assert!(values.iter().all(Option::is_some));
    let counted = session.counters() - before;
    // Over shared memory one doorbell is for all regions.
    let doorbells = if is_over_shm() { 1 } else { 4 };
    assert_eq!((counted.round_trips, counted.doorbells), (32, doorbells));
}

#[on(each, rdma_in_soak)]
fn a_shard_that_is_down_fails_its_own_keys_and_comes_back() {
    let cluster = TestCluster::create(3);
    let file = |number: usize| cluster.folder().join(format!("region{number}"));
    let mut servers: Vec<_> = (0..3).map(|number| cluster.start_with_file(&file(number))).collect();
    cluster.wait_for_servers();
    let client = connect(&[&servers[0], &servers[1], &servers[2]]);
    let mut session = client.session().unwrap();
    fill(&mut session);
    let shards = keys_by_shard(&cluster);
    let down = |server: &ServerProcess| {
        let address = server.address().parse().unwrap();
        (0..3).find(|&shard| cluster.shard(shard).copies[0].copy.addresses.contains(&address))
    };
    let shard = usize::from(down(&servers[1]).unwrap());
    servers[1].kill();
    let mut pipeline = session.pipeline().unwrap();
    let started = Instant::now();
    let (mut done, mut failed) = (0, 0);
    while started.elapsed() < Duration::from_secs(2) || failed == 0 || done <= KEYS {
        assert!(started.elapsed() < TEST_TIMEOUT, "{done} done, {failed} failed");
        for number in 0..KEYS {
            if pipeline.free_lanes() == 0 {
                let completed = pipeline.wait().unwrap();
                match completed.result {
                    Ok(_) => done += 1,
                    Err(Error::Unavailable { shard: of, .. }) => {
                        assert_eq!(usize::from(of), shard);
                        failed += 1;
                    }
                    // A PUT that was in flight when the server died may have taken effect.
                    Err(error) if !is_over_shm() && error.is_indeterminate() => {}
                    Err(error) => panic!("{error}"),
                }
            }
            pipeline.put(key(number), "new").unwrap();
        }
    }
    // A call fails at once by now.
    while pipeline.wait().is_some() {}
    servers[1] = cluster.start_with_file(&file(1));
    // The same pipeline goes on with all keys.
    let mut missing: Vec<u32> = shards[&shard].clone();
    let started = Instant::now();
    while let Some(number) = missing.pop() {
        assert!(started.elapsed() < TEST_TIMEOUT, "{}", servers[1].log());
        pipeline.get(key(number)).unwrap();
        match pipeline.wait().unwrap().result {
            Ok(outcome) => assert!(outcome.applied),
            Err(Error::Unavailable { .. }) => {
                missing.push(number);
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
    drop(pipeline);
    for number in 0..KEYS {
        assert!(session.get(key(number)).unwrap().is_some());
    }
}

/// No session survives the change of its shard's owner: the server is frozen, and a shared mapping
/// or its device would go on with the verbs.
#[on(each, rdma_in_soak)]
fn no_operation_reaches_the_former_owner_of_a_shard() {
    let (cluster, servers) = TestCluster::with_servers(1);
    let client = connect(&[&servers[0]]);
    let mut session = client.session().unwrap();
    session.put("key", "of the former owner").unwrap();
    let spare = cluster.start("");
    servers[0].pause();
    let frozen = Instant::now();
    // As `cluster assign` does it. The clients' trust ends meanwhile.
    let former = cluster.change(0, |record| record.revoked = record.copies.pop());
    let distrust = Duration::from_millis(former.revoked.unwrap().distrust_ms);
    let revoked = Instant::now();
    while revoked.elapsed() < distrust {
        // What it still reads is from before the hand-over.
        if let Ok(value) = session.get("key") {
            assert_eq!(value.unwrap(), "of the former owner");
        }
    }
    cluster.change(0, |record| record.revoked = None);
    // From now on nothing may come from the former region. The spare is no seed of this client, and
    // its address comes with a map of the former server only; so the client sees no server at all.
    for _ in 0..20 {
        assert!(matches!(session.get("key"), Ok(None) | Err(Error::Unavailable { .. })));
    }
    cluster.wait_for_owner(0, &spare);
    let mut other = connect(&[&spare]).session().unwrap();
    assert_eq!(other.get("key").unwrap(), None);
    other.put("key", "of the new owner").unwrap();
    // `assign` waits for so long if the former server does not answer. Then that server knows that
    // it was stopped, and asks the records before it serves a client.
    std::thread::sleep(SERVER_GAP.saturating_sub(frozen.elapsed()));
    servers[0].signal(rustix::process::Signal::CONT);
    for _ in 0..200 {
        match session.get("key") {
            Ok(value) => assert_eq!(value.unwrap(), "of the new owner"),
            Err(Error::Unavailable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        assert_eq!(other.get("key").unwrap().unwrap(), "of the new owner");
    }
}

#[on(each, rdma_in_soak)]
fn a_client_with_one_live_connection_learns_of_a_new_owner_at_once() {
    let cluster = TestCluster::create(2);
    let first = cluster.start("");
    let second = cluster.start("");
    cluster.wait_for_servers();
    let client = connect(&[&first]);
    let mut session = client.session().unwrap();
    fill(&mut session);
    let spare = cluster.start("");
    let shard = (0..2).find(|&shard| {
        let copy = &cluster.shard(shard).copies[0].copy;
        copy.addresses.contains(&second.address().parse().unwrap())
    });
    let shard = shard.unwrap();
    let lost = keys_by_shard(&cluster)[&usize::from(shard)].clone();
    // Its data ends with the process, so that the spare takes the shard.
    drop(second);
    cluster.wait_for_owner(shard, &spare);
    wait_until("the client reaches the new owner", TEST_TIMEOUT, || {
        matches!(session.get(key(lost[0])), Ok(None))
    });
    assert!(lost.iter().all(|&number| session.get(key(number)).unwrap().is_none()));
    assert_eq!(session.scan().unwrap().count(), KEYS as usize - lost.len());
}

/// Of the first opening of a further region, the first chain takes longer than a client waits for a
/// shard. The second one completes after the next chain was posted, or after a while.
struct SlowOpening {
    chains: Arc<AtomicU32>,
    until: Nanos,
    second: Option<LaneId>,
}

impl<F: Fabric + ?Sized> Interceptor<F> for SlowOpening {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        let timeout = short_timeout().as_nanos() as Nanos;
        if region != RegionIndex::FIRST {
            match self.chains.fetch_add(1, Ordering::Relaxed) {
                0 => self.until = fabric.now() + 2 * timeout,
                1 => {
                    (self.second, self.until) = (Some(lane), fabric.now() + timeout);
                    return;
                }
                _ => self.until = 0,
            }
        }
        fabric.post(lane, region, chain, deadline);
    }

    fn poll(&mut self, fabric: &mut F) -> Option<Completion> {
        if fabric.now() < self.until {
            return None;
        }
        let Some(lane) = self.second.take() else { return fabric.poll() };
        // What it has read.
        fabric.buffer_mut(lane, Buffer::ReadBlock).fill(0xff);
        Some(Completion { lane, result: Ok(0) })
    }
}

/// The operation for which it opens the shard fails between the two chains of the opening.
#[on(each, rdma_in_soak)]
fn a_pipeline_that_ends_while_it_opens_a_shard_leaves_no_chain_to_the_next_one() {
    let (cluster, servers) = TestCluster::with_servers(2);
    let chains = Arc::new(AtomicU32::new(0));
    let counted = chains.clone();
    let client = Client::builder().server(&servers[0].address()).connect_timeout(short_timeout());
    let client = client.intercept_fabric(Arc::new(move |fabric, _| {
        let interceptor = SlowOpening { chains: counted.clone(), until: 0, second: None };
        Box::new(Intercepted { interceptor, fabric })
    }));
    let mut session = client.connect().unwrap().session().unwrap();
    let numbers: Vec<u32> = keys_by_shard(&cluster).values().map(|numbers| numbers[0]).collect();
    // In a pipeline of its own. Returns whether the key's shard could be reached.
    let mut get = |number| {
        let mut pipeline = session.pipeline().unwrap();
        pipeline.get(key(number)).unwrap();
        match pipeline.wait().unwrap().result {
            Ok(found) => found.value.is_none(),
            Err(Error::Unavailable { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    };
    // A session has opened one of the shards from the start.
    let (mut number, mut numbers) = (0, numbers.into_iter().cycle());
    wait_until("the other one comes too late", TEST_TIMEOUT, || {
        number = numbers.next().unwrap();
        !get(number) && chains.load(Ordering::Relaxed) > 0
    });
    wait_until("the shard can be reached", TEST_TIMEOUT, || get(number));
    assert!(chains.load(Ordering::Relaxed) > 2, "the shard was opened at once");
}

/// A seed that is down, silent, wrong, or of another cluster does no harm.
#[on(each, rdma_in_soak)]
fn one_bad_seed_does_no_harm() {
    let (_cluster, servers) = TestCluster::with_servers(2);
    let (_other_cluster, others) = TestCluster::with_servers(1);
    // It accepts connections and never answers.
    let black_hole = TcpListener::bind("127.0.0.1:0").unwrap();
    let black_hole = format!("tcp://{}", black_hole.local_addr().unwrap());
    let good: Vec<String> = servers.iter().map(|server| server.address()).collect();
    let single = ServerProcess::start("--memory 16MiB");
    let mut bad = vec![
        black_hole,
        "tcp://no-such-host.invalid:7400".to_owned(),
        "tcp://127.0.0.1:1".to_owned(),
        "shm:///nowhere/kv.sock".to_owned(),
        others[0].address(),
        single.address(),
    ];
    for bad in &bad {
        let seeds = format!("{bad},{},{}", good[0], good[1]);
        let client = Client::builder().server(&seeds).connect();
        let client = client.unwrap_or_else(|error| panic!("{bad}: {error}"));
        let mut session = client.session().unwrap();
        session.put("key", bad).unwrap();
        assert_eq!(session.get("key").unwrap().unwrap(), bad.as_str());
    }
    // As many seeds name one cluster as the other.
    let seeds = format!("{},{}", good[0], others[0].address());
    let error = Client::builder().server(&seeds).connect().unwrap_err();
    let farside::SetupError::Connect(error) = error else { panic!("{error}") };
    assert!(matches!(error, ConnectError::SeveralClusters { .. }), "{error}");
    // None is good.
    bad.truncate(4);
    let none = Client::builder().server(&bad.join(","));
    let error = none.connect_timeout(short_timeout()).connect().unwrap_err();
    assert!(error.to_string().contains("://"), "{error}");
}

/// Forwards each connection to a server, whose bytes come late.
fn start_relay(server: String, late: Duration) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let (mut to, mut from) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut client, &mut server));
            std::thread::spawn(move || {
                std::thread::sleep(late);
                std::io::copy(&mut from, &mut to)
            });
        }
    });
    address
}

/// Every attempt to get the map takes longer than the first attempt may.
#[on(each, rdma_in_soak)]
fn a_seed_that_answers_late_is_a_seed() {
    let cluster = TestCluster::create(1);
    let address = free_tcp_address();
    let _server = cluster.start(&format!("--listen {address}"));
    cluster.wait_for_servers();
    let host = address.strip_prefix("tcp://").unwrap().to_owned();
    let relay = start_relay(host, Duration::from_millis(700));
    let client = Client::builder().server(&format!("tcp://{relay}"));
    let client = client.connect_timeout(TEST_TIMEOUT).connect().unwrap();
    client.session().unwrap().put("key", "value").unwrap();
}
