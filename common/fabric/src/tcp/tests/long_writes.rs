//! WRITEs whose payloads the system copies into the region. Each byte must arrive, however the
//! stream is cut. Nothing that the client may not write must reach the region.

use zerocopy::IntoBytes;

use super::super::executors::INPUT_WORDS;
use super::super::record::encode_request;
use super::super::session::{Session, Tools};
use super::super::stream::Stream;
use super::*;
use crate::memory::Executor;
use crate::rdma::ConnectionId;

const LONG: u32 = 1 << 20;
const AT: u64 = 1 << 20;

/// The words of a payload. No two are equal.
fn payload(bytes: u32) -> Vec<u64> {
    (0..u64::from(bytes) / 8).map(|at| at << 32 | (at ^ 0xa5a5)).collect()
}

/// The chain of a PUT of a long value, and its request with this deadline.
fn put(deadline: Nanos) -> Vec<u8> {
    let chain = [
        write(AT, LONG),
        Verb::WriteU32 { remote: 64, value: 9 },
        Verb::CompareSwap { remote: 128, expected: 0, desired: 3 },
    ];
    request(&chain, deadline)
}

fn request(chain: &[Verb], deadline: Nanos) -> Vec<u8> {
    let mut words = Vec::new();
    encode_request(LANE, chain, deadline, &mut words);
    for verb in chain {
        if let Verb::Write { bytes, .. } = verb {
            words.extend(payload(*bytes));
        }
    }
    words.as_bytes().to_vec()
}

fn soon() -> Nanos {
    boot_time_ns() + LATENESS_MAX_NS
}

/// How many words of the payload are in the region, from the first one on.
fn arrived(server: &Server) -> usize {
    let words = payload(LONG).into_iter().enumerate();
    let is_there = |(at, word): &(usize, u64)| server.region.load(AT + 8 * *at as u64) == Ok(*word);
    words.take_while(is_there).count()
}

/// The status of the next reply, which follows a clock record.
fn status(stream: &mut TcpStream) -> u8 {
    let mut reply = [0; 24];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[2], 5, "a clock record: {reply:?}");
    reply[18]
}

/// The bytes arrive in parts of these lengths, again and again.
#[test]
fn a_payload_arrives_whole_in_any_parts() {
    for parts in [&[1 << 21][..], &[7, 93], &[8, 100_001], &[3, 200_000, 1], &[4096], &[65_537]] {
        let server = Server::start(1);
        let mut stream = server.raw();
        stream.set_nodelay(true).unwrap();
        let bytes = put(soon() + 20 * LATENESS_MAX_NS);
        let mut left = &bytes[..];
        for part in parts.iter().cycle() {
            let (now, later) = left.split_at(left.len().min(*part));
            stream.write_all(now).unwrap();
            if parts.len() < 2 || left.len() > bytes.len() - 2000 {
                std::thread::sleep(Duration::from_micros(200));
            }
            left = later;
            if left.is_empty() {
                break;
            }
        }
        let mut reply = [0; 32];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!((reply[2], reply[18]), (5, 0), "{parts:?}: {reply:?}");
        assert_eq!(arrived(&server), LONG as usize / 8, "{parts:?}");
        assert_eq!([64, 128].map(|at| server.region.load(at)), [Ok(9), Ok(3)]);
        assert_eq!(server.region.load(AT + u64::from(LONG)), Ok(0));
        // Behind it requests of all lengths arrive as ever.
        let word = Verb::WriteWord { remote: 16, value: 5 };
        let several =
            [request(&[word], soon()), put(soon()), put(soon()), request(&[word], soon())];
        stream.write_all(&several.concat()).unwrap();
        let mut bytes = Vec::new();
        stream.shutdown(Shutdown::Write).unwrap();
        stream.read_to_end(&mut bytes).unwrap();
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        // Headers of replies without an error, some of them with the word that a swap found.
        let replies = words.filter(|word| *word == 0 || *word == 1 << 32).count();
        assert_eq!((replies, server.region.load(16)), (4, Ok(5)), "{parts:?}");
    }
}

/// The lease ends while the payload arrives. The rest is dropped, and the session goes on.
#[test]
fn a_fence_stops_a_payload_that_is_arriving() {
    let server = Server::start(1);
    let mut stream = server.raw();
    let bytes = put(soon());
    let (begun, rest) = bytes.split_at(bytes.len() / 2);
    stream.write_all(begun).unwrap();
    let started = Instant::now();
    while arrived(&server) < LONG as usize / 8 / 3 {
        assert!(started.elapsed() < TIMEOUT, "the first half does not arrive in the region");
    }
    std::thread::sleep(Duration::from_millis(20));
    server.region.store(LEASE.offset, 0).unwrap();
    stream.write_all(rest).unwrap();
    assert_eq!(status(&mut stream), 3, "fenced");
    assert!(arrived(&server) <= LONG as usize / 16);
    assert_eq!([64, 128].map(|at| server.region.load(at)), [Ok(0), Ok(0)]);
    server.region.store(LEASE.offset, LEASE.number).unwrap();
    stream.write_all(&request(&[Verb::WriteWord { remote: 16, value: 5 }], soon())).unwrap();
    assert_eq!((status(&mut stream), server.region.load(16)), (0, Ok(5)));
}

/// The deadline passes while the payload arrives.
#[test]
fn a_payload_that_arrives_too_late_is_not_written() {
    let server = Server::start(1);
    let mut stream = server.raw();
    let bytes = put(boot_time_ns() + 300_000_000);
    let (begun, rest) = bytes.split_at(bytes.len() / 2);
    stream.write_all(begun).unwrap();
    std::thread::sleep(Duration::from_millis(350));
    stream.write_all(rest).unwrap();
    assert_eq!(status(&mut stream), 4, "late");
    assert!(arrived(&server) <= LONG as usize / 16);
    assert_eq!([64, 128].map(|at| server.region.load(at)), [Ok(0), Ok(0)]);
}

#[test]
fn a_long_write_that_is_not_allowed_changes_nothing_and_breaks_nothing() {
    let server = Server::start(1);
    let read_back = |fabric: &mut TcpFabric| fabric.run(LANE, REGION, &[read(AT, 8)], Nanos::MAX);
    let mut fabric = server.session(1);
    fill(&mut fabric, LANE, LONG as usize, 5);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    for remote in [REGION_BYTES - u64::from(LONG) + 8, u64::MAX - 7, REGION_BYTES, AT + 4] {
        let outside = ChainError::Outside { remote, bytes: LONG.into() };
        let chain = [write(remote, LONG), Verb::WriteWord { remote: 16, value: 1 }];
        assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Err(outside));
        assert_eq!((read_back(&mut fabric), server.region.load(16)), (Ok(0), Ok(0)));
    }
    assert_eq!(server.region.load(REGION_BYTES - 8), Ok(0));
    let reader = connect_data(server.address, None, &READER, TIMEOUT).unwrap();
    let mut reader = reader.into_fabric(Server::remote(true), 1).unwrap();
    fill(&mut reader, LANE, LONG as usize, 5);
    let chain = [write(AT, LONG)];
    assert_eq!(reader.run(LANE, REGION, &chain, deadline), Err(ChainError::Denied));
    assert_eq!((read_back(&mut reader), server.region.load(AT + 64)), (Ok(0), Ok(0)));
}

/// Guards against a server that copies payloads after all.
#[test]
fn long_payloads_take_no_memory_of_the_server() {
    let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
    memory.region.store(LEASE.offset, LEASE.number).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let stream = Stream::over(listener.accept().unwrap().0.into()).unwrap();
    let executor = Executor::new(memory.region.clone(), Some(LEASE));
    let mut session = Session::new(ConnectionId(1), stream, executor);
    let mut buffer = vec![0; INPUT_WORDS];
    let mut tools = Tools::new(None);
    for round in 0..3 {
        let bytes = request(&[write(AT, LONG)], soon());
        let mut far = far.try_clone().unwrap();
        let client = std::thread::spawn(move || {
            far.write_all(&bytes).unwrap();
            status(&mut far)
        });
        while !client.is_finished() {
            assert!(session.take_turn(&mut buffer, &mut tools).is_ok());
        }
        assert_eq!(client.join().unwrap(), 0);
        assert!(session.kept_bytes() < 4096, "round {round}: {}", session.kept_bytes());
    }
}
