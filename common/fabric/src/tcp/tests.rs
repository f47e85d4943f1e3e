//! A session and the executors of a server, over a real connection of this host.

mod direct;
mod encrypted;
mod long_writes;
mod regions;
mod turns;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;
use crate::memory::{HugePages, Lease, Region, RegionMemory};
use crate::rdma::{RemoteRegion, Rkeys};
use crate::{
    Buffer, ChainError, Completion, Fabric, LaneId, Nanos, REQUEST_BYTES_MAX, RegionIndex, Verb,
    boot_time_ns,
};

const REGION: RegionIndex = RegionIndex::FIRST;
const LANE: LaneId = LaneId(0);
const REGION_BYTES: u64 = 8 << 20;
const OPTIONS: ExecutorOptions =
    ExecutorOptions { spin: Duration::from_micros(50), kept_bytes_max: 64 << 20 };
/// The lease is the first word of the region.
const LEASE: Lease = Lease { offset: 0, number: 7 };
/// In place of the control crate's messages.
const WRITER: [u8; REQUEST_BYTES_MAX] = [b'w'; REQUEST_BYTES_MAX];
const READER: [u8; REQUEST_BYTES_MAX] = [b'r'; REQUEST_BYTES_MAX];
const REPLY: &[u8] = b"welcome";

/// A server that accepts every session.
struct Server {
    address: SocketAddr,
    tls: Option<TlsClient>,
    region: Arc<Region>,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(threads: usize) -> Self {
        Self::start_with(None, move |listener, _| listener.start_executors(threads, OPTIONS))
    }

    fn start_with(
        tls: Option<Arc<TlsServer>>,
        start: impl FnOnce(&Listener, &Arc<Region>) -> std::io::Result<Executors> + Send + 'static,
    ) -> Self {
        let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
        memory.region.store(LEASE.offset, LEASE.number).unwrap();
        let mut listener = Listener::over(vec![TcpListener::bind("127.0.0.1:0").unwrap()]).unwrap();
        if let Some(tls) = tls {
            listener.require_tls(tls);
        }
        let address = SocketAddr::from(([127, 0, 0, 1], listener.port()));
        let stops = Arc::new(AtomicBool::new(false));
        let (region, stop) = (memory.region.clone(), stops.clone());
        let thread = std::thread::spawn(move || {
            let read_only = memory.reader_descriptor().unwrap();
            let read_only = Arc::new(Region::map_read_only(&read_only).unwrap());
            let executors = start(&listener, &memory.region).unwrap();
            let mut arrivals = listener.start().unwrap();
            let mut connections = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                match arrivals.next_event().unwrap() {
                    Some(Event::Request(incoming)) if incoming.request() == WRITER => {
                        let writable = &memory.region;
                        let accepted = incoming.accept_data(&executors, writable, LEASE, REPLY);
                        connections.push(accepted.unwrap());
                    }
                    Some(Event::Request(incoming)) if incoming.request() == READER => {
                        let accepted = incoming.accept_data(&executors, &read_only, LEASE, REPLY);
                        connections.push(accepted.unwrap());
                    }
                    Some(Event::Request(incoming)) => incoming.reject(b"go away"),
                    Some(Event::Ended(id)) => connections.retain(|other| other.id() != id),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        Self { address, tls: None, region, stops, thread: Some(thread) }
    }

    fn remote(writable: bool) -> RemoteRegion {
        RemoteRegion {
            base_address: 0,
            region_bytes: REGION_BYTES,
            rkeys: Rkeys::default(),
            writable,
            round_trip_min_ns: ROUND_TRIP_MIN_NS,
        }
    }

    fn session(&self, lanes: u16) -> TcpFabric {
        let link = connect_data(self.address, self.tls.as_ref(), &WRITER, TIMEOUT).unwrap();
        assert_eq!(link.reply(), REPLY);
        link.into_fabric(Self::remote(true), lanes).unwrap()
    }

    /// A connection that was accepted as a session's, as bytes.
    fn raw(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(&(WRITER.len() as u32).to_le_bytes()).unwrap();
        stream.write_all(&WRITER).unwrap();
        let mut greeting = [0; 4 + REPLY.len() + 16];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting[4..4 + REPLY.len()], *REPLY);
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

const TIMEOUT: Duration = Duration::from_secs(10);

/// A server that accepts one session, and continues with its connection as `serve` does. Returns
/// its address and its thread.
fn false_server(serve: impl FnOnce(TcpStream) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 4 + REQUEST_BYTES_MAX]).unwrap();
        let mut clock = Vec::new();
        super::record::encode_clock(boot_time_ns(), &mut clock);
        stream.write_all(&(REPLY.len() as u32).to_le_bytes()).unwrap();
        stream.write_all(REPLY).unwrap();
        stream.write_all(zerocopy::IntoBytes::as_bytes(clock.as_slice())).unwrap();
        serve(stream);
    });
    (address, thread)
}

fn read(remote: u64, bytes: u32) -> Verb {
    Verb::Read { remote, into: Buffer::ReadBlock, bytes }
}

fn write(remote: u64, bytes: u32) -> Verb {
    Verb::Write { remote, from: Buffer::NewBlock, bytes }
}

fn fill(fabric: &mut TcpFabric, lane: LaneId, bytes: usize, seed: u8) {
    assert!(fabric.reserve(lane, Buffer::NewBlock, bytes));
    let buffer = fabric.buffer_mut(lane, Buffer::NewBlock);
    buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 8) as u8 ^ seed);
}

#[test]
fn all_verbs_have_their_effects() {
    check_all_verbs(&Server::start(1));
}

fn check_all_verbs(server: &Server) {
    let mut fabric = server.session(1);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    fill(&mut fabric, LANE, 64, 5);
    let put = [
        write(4096, 64),
        Verb::WriteU32 { remote: 4100, value: 9 },
        Verb::CompareSwap { remote: 8192, expected: 0, desired: 3 },
    ];
    assert_eq!(fabric.run(LANE, REGION, &put, deadline), Ok(0));
    let again = [Verb::CompareSwap { remote: 8192, expected: 0, desired: 4 }, read(4096, 64)];
    assert_eq!(fabric.run(LANE, REGION, &again, deadline), Ok(3), "the word that it found");
    let mut expected = fabric.buffer(LANE, Buffer::NewBlock)[..64].to_vec();
    expected[4..8].copy_from_slice(&9u32.to_le_bytes());
    assert_eq!(fabric.buffer(LANE, Buffer::ReadBlock)[..64], expected);
    let word = [Verb::WriteWord { remote: 16, value: u64::MAX - 1 }];
    assert_eq!(fabric.run(LANE, REGION, &word, deadline), Ok(0));
    assert_eq!(server.region.load(16), Ok(u64::MAX - 1));
    let counters = fabric.counters();
    assert_eq!((counters.round_trips, counters.doorbells, counters.verbs()), (3, 3, 6));
}

#[test]
fn failed_chains_say_why_and_break_nothing() {
    let server = Server::start(1);
    let mut fabric = server.session(1);
    let now = fabric.now();
    let outside = ChainError::Outside { remote: REGION_BYTES, bytes: 8 };
    assert_eq!(fabric.run(LANE, REGION, &[read(REGION_BYTES, 8)], Nanos::MAX), Err(outside));
    let long = 64 << 10;
    let outside = ChainError::Outside { remote: REGION_BYTES, bytes: long.into() };
    assert_eq!(fabric.run(LANE, REGION, &[read(REGION_BYTES, long)], Nanos::MAX), Err(outside));
    let word = [Verb::WriteWord { remote: 16, value: 1 }];
    assert_eq!(fabric.run(LANE, REGION, &word, now - 1), Err(ChainError::Late));
    assert_eq!(server.region.load(16), Ok(0));
    let reader = connect_data(server.address, None, &READER, TIMEOUT).unwrap();
    // A client that ignores its role is refused by the server.
    for writable in [false, true] {
        let reader = connect_data(server.address, None, &READER, TIMEOUT);
        let mut reader = reader.unwrap().into_fabric(Server::remote(writable), 1).unwrap();
        let deadline = now + LATENESS_MAX_NS;
        assert_eq!(reader.run(LANE, REGION, &word, deadline), Err(ChainError::Denied));
        assert_eq!(reader.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Ok(0));
    }
    drop(reader);
    server.region.store(LEASE.offset, 0).unwrap();
    for chain in [&word[..], &[read(16, 8)], &[read(16, long)]] {
        let deadline = fabric.now() + LATENESS_MAX_NS;
        assert_eq!(fabric.run(LANE, REGION, chain, deadline), Err(ChainError::Fenced));
    }
    assert_eq!(server.region.load(16), Ok(0));
}

/// A chain arrives after its deadline by the server's clock, although it left in time.
#[test]
fn the_server_refuses_a_chain_that_arrives_late() {
    let server = Server::start(1);
    let mut stream = server.raw();
    let word = [Verb::WriteWord { remote: 16, value: 1 }];
    let mut record = Vec::new();
    super::record::encode_request(LANE, &word, boot_time_ns() - 1, &mut record);
    stream.write_all(zerocopy::IntoBytes::as_bytes(record.as_slice())).unwrap();
    let mut reply = [0; 24];
    stream.read_exact(&mut reply).unwrap();
    // A clock record, then the status "late".
    assert_eq!((reply[2], reply[18]), (5, 4), "{reply:?}");
    assert_eq!(server.region.load(16), Ok(0));
}

/// Long payloads travel without a copy, short ones with others, and all arrive whole. The pipeline
/// has more in flight than the sockets hold.
#[test]
fn chains_of_all_lengths_in_flight_together() {
    check_all_lengths(&Server::start(2));
}

fn check_all_lengths(server: &Server) {
    let lanes = 16;
    let mut fabric = server.session(lanes);
    let lengths = [8u32, 64, 4096, 16 << 10, 65_536, 400_000];
    let start = |lane: u16| 4096 + u64::from(lane) * 400_000;
    for round in 0..20 {
        for (changes, first) in [(true, 0), (false, 1)] {
            let mut left = 0;
            for lane in 0..lanes {
                let bytes = lengths[(usize::from(lane) + round) % lengths.len()];
                let id = LaneId(lane);
                let deadline = fabric.now() + LATENESS_MAX_NS;
                let chain = match first {
                    0 => {
                        fill(&mut fabric, id, bytes as usize, lane as u8 ^ round as u8);
                        write(start(lane), bytes)
                    }
                    _ => read(start(lane), bytes),
                };
                fabric.post(id, REGION, &[chain], if changes { deadline } else { Nanos::MAX });
                left += 1;
            }
            while left > 0 {
                fabric.ring();
                match fabric.poll() {
                    Some(Completion { result, .. }) => {
                        assert_eq!(result, Ok(0));
                        left -= 1;
                    }
                    None => fabric.relax(),
                }
            }
        }
        for lane in 0..lanes {
            let bytes = lengths[(usize::from(lane) + round) % lengths.len()] as usize;
            let written = &fabric.buffer(LaneId(lane), Buffer::NewBlock)[..bytes];
            assert!(fabric.buffer(LaneId(lane), Buffer::ReadBlock)[..bytes] == *written);
        }
    }
}

/// A chain in flight that changes the region may still be executed when its connection breaks. So
/// it completes after its deadline, and a READ at once.
#[test]
fn a_chain_whose_connection_breaks_is_unknown_after_its_deadline() {
    let (address, server) = false_server(|mut stream| {
        // It takes the requests, and dies.
        stream.read_exact(&mut [0; 24 + 32]).unwrap();
    });
    let link = connect_data(address, None, &WRITER, TIMEOUT).unwrap();
    let mut fabric = link.into_fabric(Server::remote(true), 2).unwrap();
    let deadline = fabric.now() + 300_000_000;
    fabric.post(LANE, REGION, &[read(64, 8)], Nanos::MAX);
    fabric.post(LaneId(1), REGION, &[Verb::WriteWord { remote: 16, value: 1 }], deadline);
    let mut completions = Vec::new();
    while completions.len() < 2 {
        fabric.ring();
        match fabric.poll() {
            Some(completion) => completions.push((completion, fabric.now())),
            None => fabric.relax(),
        }
    }
    server.join().unwrap();
    let [(first, _), (second, at)] = &completions[..] else { panic!("{completions:?}") };
    assert_eq!(*first, Completion { lane: LANE, result: Err(ChainError::Fenced) });
    assert_eq!(*second, Completion { lane: LaneId(1), result: Err(ChainError::Unknown) });
    assert!(*at >= deadline);
    assert_eq!(fabric.run(LANE, REGION, &[read(64, 8)], Nanos::MAX), Err(ChainError::Fenced));
}

/// Garbage, truncated records, silence and connections that send no byte: others go on.
#[test]
fn malformed_bytes_end_their_own_connection_only() {
    let server = Server::start(1);
    let mut fabric = server.session(1);
    let mut seed = 7u64;
    let mut random = move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        seed >> 8
    };
    let silent: Vec<_> = (0..50).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for round in 0..200 {
        let mut stream = server.raw();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes: Vec<u8> = (0..random() % 200).map(|_| random() as u8).collect();
        if round % 2 == 0 {
            // A header that announces more than any request has.
            bytes.splice(0..0, [0, 0, 1, 0, 255, 255, 255, 255]);
        } else {
            // A whole header and a part of the rest.
            bytes.splice(0..0, [0, 0, 1, 0, 200, 0, 0, 0]);
        }
        // It fails if the server has closed the connection meanwhile.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        // The end, maybe after replies.
        let _ = stream.read_to_end(&mut Vec::new());
        assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Ok(0));
    }
    drop(silent);
}

/// A session asks for long READs without end and takes no reply. The server executes no more of
/// them than fit into its bounded buffers, and serves the other sessions.
#[test]
fn a_session_that_takes_no_replies_is_not_served_further() {
    let server = Server::start(1);
    let mut stream = server.raw();
    let mut record = Vec::new();
    for _ in 0..1000 {
        super::record::encode_request(LANE, &[read(0, 1 << 20)], Nanos::MAX, &mut record);
    }
    let bytes = zerocopy::IntoBytes::as_bytes(record.as_slice());
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut accepted = 0;
    let limit = 64 << 20;
    while accepted < limit {
        match stream.write(bytes) {
            Ok(sent) => accepted += sent,
            Err(_) => break,
        }
    }
    assert!(accepted < limit, "the server reads without end");
    let mut fabric = server.session(1);
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Ok(0));
}

#[test]
fn a_refusal_reaches_the_client() {
    let server = Server::start(1);
    let link = connect_data(server.address, None, &[0; REQUEST_BYTES_MAX], TIMEOUT).unwrap();
    assert_eq!(link.reply(), b"go away");
    let (_, reply) = connect_control(server.address, None, b"hello", TIMEOUT).unwrap();
    assert_eq!(reply, b"go away");
}

/// After a pause a session first asks for the server's clock: without it, the deadline of a chain
/// could be too late by a sixteenth of the pause.
#[test]
fn after_a_pause_a_session_asks_for_the_clock() {
    let server = Server::start(1);
    let link = connect_data(server.address, None, &WRITER, TIMEOUT).unwrap();
    let old = super::clock_bound::ClockBound::new(0, boot_time_ns().saturating_sub(60_000_000_000));
    let link = DataLink { clock_bound: old, ..link };
    let mut fabric = link.into_fabric(Server::remote(true), 1).unwrap();
    let started = Instant::now();
    let deadline = fabric.now() + LATENESS_MAX_NS;
    let word = [Verb::WriteWord { remote: 16, value: 1 }];
    assert_eq!(fabric.run(LANE, REGION, &word, deadline), Ok(0), "{:?}", started.elapsed());
    assert_eq!(server.region.load(16), Ok(1));
}

/// More silent connections than the listener keeps: the oldest are closed, and a session that comes
/// after them, or is there already, goes on.
#[test]
fn silent_connections_crowd_out_no_session() {
    let server = Server::start(1);
    let mut before = server.session(1);
    let silent: Vec<_> = (0..1000).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let mut after = server.session(1);
    for fabric in [&mut before, &mut after] {
        assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], Nanos::MAX), Ok(0));
    }
    let mut oldest = &silent[0];
    oldest.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The end, or a reset.
    assert!(!matches!(oldest.read(&mut [0; 8]), Ok(1..)));
}

/// A connection from one of this host's addresses.
fn connect_from(address: [u8; 4], server: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let from = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&from, &SocketAddr::from((address, 0))).unwrap();
    connect(&from, &server).unwrap();
    from.into()
}

/// A client that is slow to send its request keeps its connection, however many another host opens.
#[test]
fn silent_connections_of_one_host_close_none_of_another() {
    let server = Server::start(1);
    let mut slow = connect_from([127, 0, 0, 2], server.address);
    let silent: Vec<_> = (0..1000).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let mut oldest = &silent[0];
    oldest.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert!(!matches!(oldest.read(&mut [0; 8]), Ok(1..)), "the end, or a reset");
    slow.write_all(&(WRITER.len() as u32).to_le_bytes()).unwrap();
    slow.write_all(&WRITER).unwrap();
    let mut reply = [0; 4 + REPLY.len()];
    slow.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..], *REPLY);
}

/// A server that is stopped answers not even a request for its clock. A change that waits for that
/// ends as well.
#[test]
fn a_silent_server_is_noticed_while_a_session_asks_for_its_clock() {
    let (address, server) = false_server(|mut stream| {
        // Until the session gives up.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let link = connect_data(address, None, &WRITER, TIMEOUT).unwrap();
    let old = super::clock_bound::ClockBound::new(0, boot_time_ns().saturating_sub(60_000_000_000));
    let link = DataLink { clock_bound: old, ..link };
    let mut fabric = link.into_fabric(Server::remote(true), 1).unwrap();
    let word = [Verb::WriteWord { remote: 16, value: 1 }];
    let mut result = Err(ChainError::Late);
    while result == Err(ChainError::Late) {
        let deadline = fabric.now() + LATENESS_MAX_NS;
        result = fabric.run(LANE, REGION, &word, deadline);
    }
    assert_eq!(result, Err(ChainError::Fenced));
    server.join().unwrap();
}

/// A device that the tests control. Its atomic verbs are a processor's, which is the same to one
/// client.
struct FalseDevice {
    region: Arc<Region>,
    /// The lengths of its chains.
    runs: Arc<Mutex<Vec<usize>>>,
    /// When the lease is cleared: in `prepare`, or in `run`.
    fences: [bool; 2],
    failure: Option<ChainError>,
}

impl DeviceAtomics for FalseDevice {
    fn prepare(&mut self) -> Result<(), ChainError> {
        if self.fences[0] { self.region.store(LEASE.offset, 0) } else { Ok(()) }
    }

    fn run(&mut self, verbs: &[Verb], _: Nanos) -> Result<u64, ChainError> {
        self.runs.lock().unwrap().push(verbs.len());
        if self.fences[1] {
            self.region.store(LEASE.offset, 0)?;
        }
        let swapped = verbs.iter().map(|verb| match *verb {
            Verb::CompareSwap { remote, expected, desired } => {
                self.region.compare_swap(remote, expected, desired)
            }
            _ => panic!("{verb:?} is no atomic verb"),
        });
        let found = swapped.collect::<Result<Vec<_>, _>>()?;
        self.failure.map_or(Ok(*found.last().unwrap()), Err)
    }
}

/// Starts a server whose atomic verbs such a device executes. Returns the lengths of its chains,
/// too.
fn server_beside_device(
    fences: [bool; 2],
    failure: Option<ChainError>,
) -> (Server, Arc<Mutex<Vec<usize>>>) {
    let runs = Arc::new(Mutex::default());
    let of_device = runs.clone();
    let server = Server::start_with(None, move |listener, region| {
        let region = region.clone();
        let device = FalseDevice { region, runs: of_device, fences, failure };
        listener.start_executors_beside_device(vec![Box::new(device)], OPTIONS)
    });
    (server, runs)
}

const fn swap(remote: u64, expected: u64, desired: u64) -> Verb {
    Verb::CompareSwap { remote, expected, desired }
}

#[test]
fn a_device_gets_the_atomic_verbs_of_writers_and_no_others() {
    let (server, runs) = server_beside_device([false; 2], None);
    let mut fabric = server.session(1);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    fill(&mut fabric, LANE, 64, 5);
    let mark = Verb::WriteU32 { remote: 4100, value: 9 };
    let chain = [write(4096, 64), mark, swap(8192, 0, 3), read(8192, 8)];
    assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(0));
    assert_eq!(fabric.buffer(LANE, Buffer::ReadBlock)[..8], 3u64.to_le_bytes());
    assert_eq!(server.region.load(4096).map(|word| word >> 32), Ok(9));
    let two = [swap(8200, 0, 1), swap(8192, 3, 4), read(8192, 8), read(8200, 8)];
    assert_eq!(fabric.run(LANE, REGION, &two, deadline), Ok(3), "the word of the second swap");
    assert_eq!(fabric.run(LANE, REGION, &[read(8192, 8)], Nanos::MAX), Ok(0));
    let word = [Verb::WriteWord { remote: 16, value: 1 }];
    assert_eq!(fabric.run(LANE, REGION, &word, deadline), Ok(0));
    // The device would execute a reader's swap, because its queue pair is the server's own.
    let reader = connect_data(server.address, None, &READER, TIMEOUT).unwrap();
    let mut reader = reader.into_fabric(Server::remote(true), 1).unwrap();
    let swapped = reader.run(LANE, REGION, &[swap(8192, 4, 5)], deadline);
    assert_eq!(swapped, Err(ChainError::Denied));
    assert_eq!(*runs.lock().unwrap(), [1, 2]);
    assert_eq!(server.region.load(8192), Ok(4));
}

#[test]
fn a_lease_is_checked_after_the_device_is_prepared_and_not_after_a_swap() {
    let (server, runs) = server_beside_device([true, false], None);
    let mut fabric = server.session(1);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    let chain = [swap(8192, 0, 3), read(8192, 8)];
    assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Err(ChainError::Fenced));
    assert_eq!((runs.lock().unwrap().len(), server.region.load(8192)), (0, Ok(0)));
    let (server, runs) = server_beside_device([false, true], None);
    let mut fabric = server.session(1);
    assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(0), "the swap took effect");
    assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Err(ChainError::Fenced));
    assert_eq!((runs.lock().unwrap().len(), server.region.load(8192)), (1, Ok(3)));
}

#[test]
fn a_client_learns_that_the_device_may_have_executed_a_swap() {
    let (server, _) = server_beside_device([false; 2], Some(ChainError::Unknown));
    let mut fabric = server.session(1);
    let deadline = fabric.now() + LATENESS_MAX_NS;
    let chain = [swap(8192, 0, 3), read(8192, 8)];
    assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Err(ChainError::Unknown));
    assert_eq!(fabric.run(LANE, REGION, &[read(8192, 8)], Nanos::MAX), Ok(0));
}
