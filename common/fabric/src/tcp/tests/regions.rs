//! A session with several regions: one is replaced, or its server is not trusted any more.

use super::*;
use crate::{AnyFabric, Intercepted, Interceptor, Trust};

const WORD: [Verb; 1] = [Verb::WriteWord { remote: 16, value: 1 }];
/// The request of a READ, and that of [`WORD`], in bytes.
const READ_BYTES: usize = 24;
const WORD_BYTES: usize = 32;

fn connect(address: SocketAddr) -> DataLink {
    connect_data(address, None, &WRITER, TIMEOUT).unwrap()
}

/// Adds the region at this address.
fn add(fabric: &mut TcpFabric, address: SocketAddr, replaces: Option<RegionIndex>) -> RegionIndex {
    fabric.add_region(connect(address), Server::remote(true), replaces).unwrap()
}

/// A server that takes all requests and never answers.
fn silent_server() -> (SocketAddr, JoinHandle<()>) {
    false_server(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    })
}

/// Waits for this many completions. Returns them by their lanes, and when each arrived.
fn complete(
    fabric: &mut impl Fabric,
    count: usize,
) -> Vec<(LaneId, Result<u64, ChainError>, Nanos)> {
    let mut completions = Vec::new();
    while completions.len() < count {
        fabric.ring();
        match fabric.poll() {
            Some(Completion { lane, result }) => completions.push((lane, result, fabric.now())),
            None => fabric.relax(),
        }
    }
    completions.sort_by_key(|(lane, ..)| *lane);
    completions
}

#[test]
fn a_lost_region_is_replaced_before_the_outcome_of_its_chains_is_known() {
    let (server, new) = (Server::start(1), Server::start(1));
    let (address, dying) = false_server(|mut stream| {
        stream.read_exact(&mut [0; WORD_BYTES]).unwrap();
    });
    let mut fabric = server.session(3);
    let second = add(&mut fabric, address, None);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    fabric.post(LANE, second, &WORD, deadline);
    fabric.ring();
    dying.join().unwrap();
    // Until the session notices it: the outcome of a READ needs no wait.
    assert_eq!(fabric.run(LaneId(1), second, &[read(16, 8)], Nanos::MAX), Err(ChainError::Fenced));
    // These wait for the doorbell.
    fabric.post(LaneId(1), second, &WORD, deadline);
    fabric.post(LaneId(2), REGION, &[read(16, 8)], Nanos::MAX);
    assert_eq!(add(&mut fabric, new.address, Some(second)), second);
    let [(_, one, _), (_, two, _)] = complete(&mut fabric, 2)[..] else { panic!() };
    assert_eq!((one, two), (Err(ChainError::Fenced), Ok(0)));
    assert_eq!(fabric.run(LaneId(1), second, &[read(16, 8)], Nanos::MAX), Ok(0));
    // The new connection ends as well, and does not complete the lane a second time.
    fabric.disconnect(second);
    assert_eq!(add(&mut fabric, new.address, Some(second)), second);
    let [(lane, result, at)] = complete(&mut fabric, 1)[..] else { panic!() };
    assert_eq!((lane, result), (LANE, Err(ChainError::Unknown)));
    assert!(at >= deadline);
    assert_eq!((fabric.poll(), new.region.load(16)), (None, Ok(0)));
    let deadline = fabric.now() + LATENESS_MAX_NS;
    assert_eq!(fabric.run(LANE, second, &WORD, deadline), Ok(0));
    assert_eq!((new.region.load(16), server.region.load(16)), (Ok(1), Ok(0)));
}

#[test]
fn replacing_a_region_does_not_affect_chains_of_another() {
    let (server, new) = (Server::start(1), Server::start(1));
    let (address, silent) = silent_server();
    let mut fabric = server.session(2);
    let second = add(&mut fabric, address, None);
    let long = 1 << 20;
    fabric.post(LANE, REGION, &[read(4096, long)], Nanos::MAX);
    fabric.post(LaneId(1), second, &[read(4096, long)], Nanos::MAX);
    fabric.ring();
    assert_eq!(add(&mut fabric, new.address, Some(second)), second);
    silent.join().unwrap();
    let [(_, one, _), (_, two, _)] = complete(&mut fabric, 2)[..] else { panic!() };
    assert_eq!((one, two), (Ok(0), Err(ChainError::Fenced)));
    assert_eq!(fabric.run(LaneId(1), second, &[read(4096, long)], Nanos::MAX), Ok(0));
    // A connection whose socket is not watched would delay each chain by the longest sleep.
    let started = Instant::now();
    for _ in 0..100 {
        assert_eq!(fabric.run(LaneId(1), second, &[read(0, 8)], Nanos::MAX), Ok(0));
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    // The first region, too.
    assert_eq!(add(&mut fabric, new.address, Some(REGION)), REGION);
    assert_eq!(fabric.run(LANE, REGION, &[read(4096, long)], Nanos::MAX), Ok(0));
}

#[test]
fn a_disconnected_region_fails_its_own_chains_only() {
    let server = Server::start(1);
    let (address, silent) = silent_server();
    let mut fabric = server.session(2);
    let second = add(&mut fabric, address, None);
    fabric.post(LaneId(1), second, &[read(0, 8)], Nanos::MAX);
    fabric.ring();
    fabric.disconnect(second);
    silent.join().unwrap();
    assert_eq!(complete(&mut fabric, 1)[0].1, Err(ChainError::Fenced));
    assert_eq!(fabric.run(LANE, second, &WORD, Nanos::MAX), Err(ChainError::Fenced));
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Ok(0));
}

/// Passes all calls on.
struct Pass;

impl<F: Fabric + ?Sized> Interceptor<F> for Pass {}

/// A frozen server's connection stays open. Its chains end soon after the end of the trust, while
/// another server answers all the time.
#[test]
fn chains_at_a_server_that_is_not_trusted_any_more_end() {
    let server = Server::start(1);
    let (address, silent) = silent_server();
    let own = Box::new(AnyFabric::Tcp(server.session(3)));
    let mut fabric =
        AnyFabric::Intercepted(Box::new(Intercepted { interceptor: Pass, fabric: own }));
    let trusted_until = fabric.now() + 300_000_000;
    let trust = Trust::until(trusted_until);
    let link = connect(address).with_trust(trust.clone());
    let Some(AnyFabric::Tcp(own)) = fabric.any() else { panic!("it is behind interceptors") };
    let second = own.add_region(link, Server::remote(true), None).unwrap();
    let deadline = fabric.now() + 600_000_000;
    fabric.post(LaneId(1), second, &[read(0, 8)], Nanos::MAX);
    fabric.post(LaneId(2), second, &WORD, deadline);
    let mut ended = [None; 3];
    let mut answered = 0;
    fabric.post(LANE, REGION, &[read(0, 8)], Nanos::MAX);
    while ended[1..].contains(&None) {
        fabric.ring();
        match fabric.poll() {
            Some(Completion { lane: LANE, result }) => {
                assert_eq!(result, Ok(0));
                answered += 1;
                fabric.post(LANE, REGION, &[read(0, 8)], Nanos::MAX);
            }
            Some(Completion { lane, result }) => {
                ended[usize::from(lane.0)] = Some((result, fabric.now()));
            }
            None => fabric.relax(),
        }
    }
    silent.join().unwrap();
    let [_, Some((read_result, read_at)), Some((result, at))] = ended else { panic!() };
    assert_eq!((read_result, result), (Err(ChainError::Fenced), Err(ChainError::Unknown)));
    // In time even on a busy machine.
    assert!((trusted_until..trusted_until + 1_000_000_000).contains(&read_at));
    assert!((deadline..deadline + 1_000_000_000).contains(&at));
    assert!(answered > 100, "{answered}");
}

/// The thread sleeps for the bytes of one server only, when another thread ends the trust.
#[test]
fn the_end_of_a_trust_is_noticed_during_a_sleep() {
    let (address, silent) = silent_server();
    let trust = Trust::forever();
    let link = connect(address).with_trust(trust.clone());
    let mut fabric = link.into_fabric(Server::remote(true), 1).unwrap();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(250));
        trust.end();
        Instant::now()
    });
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Err(ChainError::Fenced));
    let took = ending.join().unwrap().elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    silent.join().unwrap();
}

/// The answer of a lane has arrived when a send of another lane notices the end of the connection.
#[test]
fn an_answer_that_has_arrived_counts_and_completes_its_lane_once() {
    let (answered, is_answered) = std::sync::mpsc::channel();
    let (address, server) = false_server(move |mut stream| {
        stream.read_exact(&mut [0; READ_BYTES]).unwrap();
        let mut reply = Vec::new();
        let chain = [Verb::WriteWord { remote: 0, value: 0 }];
        super::super::record::PendingReply::begin(&chain, &mut reply).finish(
            1,
            &chain,
            &Ok(0),
            0,
            &mut reply,
        );
        stream.read_exact(&mut [0; WORD_BYTES]).unwrap();
        stream.write_all(zerocopy::IntoBytes::as_bytes(reply.as_slice())).unwrap();
        answered.send(()).unwrap();
        // The request of the READ that follows is not read, so that the end is a reset.
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.peek(&mut [0; 1]).unwrap();
    });
    let mut fabric = connect(address).into_fabric(Server::remote(true), 4).unwrap();
    let deadline = fabric.now() + 500_000_000;
    fabric.post(LANE, REGION, &[read(64, 8)], Nanos::MAX);
    fabric.post(LaneId(1), REGION, &WORD, deadline);
    fabric.ring();
    is_answered.recv().unwrap();
    // Receives the answer, and does not process it.
    fabric.relax();
    fabric.post(LaneId(2), REGION, &[read(64, 8)], Nanos::MAX);
    fabric.ring();
    server.join().unwrap();
    fabric.post(LaneId(3), REGION, &[read(64, 8)], Nanos::MAX);
    let completions = complete(&mut fabric, 4);
    let results: Vec<_> = completions.iter().map(|(_, result, _)| *result).collect();
    let fenced = Err(ChainError::Fenced);
    assert_eq!(results, [fenced, Ok(0), fenced, fenced]);
    while fabric.now() < deadline {
        assert_eq!(fabric.poll(), None);
    }
    assert_eq!(fabric.poll(), None);
}
