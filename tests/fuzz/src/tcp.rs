//! The connection of a session over TCP, at a server and at a client.
//!
//! The code of both sides is the real one, at one end of a pair of sockets. An input arrives at
//! once, and then again in parts. The results have to be the same, and those that a simple model of
//! the records predicts.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use farside_fabric::memory::{HugePages, Lease, Region, RegionMemory};
use farside_fabric::rdma::{ConnectionId, RemoteRegion, Rkeys};
use farside_fabric::tcp::record::{
    Header, PendingReply, ReplyKind, WORD_BYTES, changes, decode_begun_request, decode_request,
    encode_clock, encode_clock_request, encode_request, reply_kind, reply_words,
};
use farside_fabric::tcp::{
    DIRECT_BYTES_MIN, DataLink, Event, ROUND_TRIP_MIN_NS, SteppedExecutor, TcpFabric,
};
use farside_fabric::{
    Buffer, ChainError, Completion, Fabric, LaneId, Nanos, RegionIndex, Verb, boot_time_ns,
};
use zerocopy::IntoBytes;

/// The number of parts in which an input arrives the second time.
const PARTS: usize = 4;
/// The length of the region. A READ of a quarter of it is sent without a copy.
const REGION_BYTES: usize = 4 * DIRECT_BYTES_MIN;
const REGION: RegionIndex = RegionIndex::FIRST;
/// The lease of all sessions is the first word of the region.
const LEASE: Lease = Lease { offset: 0, number: 7 };
/// The last word of the region, which the session beside READs.
const LAST_WORD: u64 = (REGION_BYTES - WORD_BYTES) as u64;
/// A deadline that is nearer to the present may pass between the two runs of an input.
const NEAR_NS: Nanos = 10_000_000_000;

/// Returns an end for the code under test, and its peer, which never waits.
fn connected() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    (near, far)
}

/// The whole of an input, and its parts.
fn arrivals(bytes: &[u8]) -> [Vec<&[u8]>; 2] {
    [vec![bytes], bytes.chunks(bytes.len() / PARTS + 1).collect()]
}

/// The whole words of these bytes.
fn words_of(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.as_chunks::<WORD_BYTES>().0;
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn read(remote: u64, into: Buffer, bytes: u32) -> Verb {
    Verb::Read { remote, into, bytes }
}

fn write(remote: u64, bytes: u32) -> Verb {
    Verb::Write { remote, from: Buffer::NewBlock, bytes }
}

/// How the requests in an input end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// With the input.
    Whole,
    /// Before a part of a record, which may become a request.
    Partial,
    /// Before words that begin no request.
    Malformed,
}

fn has_whole_words(verb: &Verb) -> bool {
    match *verb {
        Verb::Read { bytes, .. } | Verb::Write { bytes, .. } => {
            (bytes as usize).is_multiple_of(WORD_BYTES)
        }
        _ => true,
    }
}

/// A request that was decoded.
struct DecodedRequest {
    lane: u16,
    chain: Vec<Verb>,
    deadline: Nanos,
}

/// Decodes requests, and checks that each is encoded to the same words.
fn decode_requests(bytes: &[u8]) -> (Vec<DecodedRequest>, End) {
    let words = words_of(bytes);
    let (mut requests, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let header = Header::of(words[at]);
        let length = header.and_then(Header::request_words);
        let (Ok(header), Ok(length)) = (header, length) else { return (requests, End::Malformed) };
        let Some(record) = words.get(at..at + length) else {
            // A server ends a connection before the rest of such a record arrives.
            let is_refused = decode_begun_request(header, &words[at + 1..]).is_err();
            return (requests, if is_refused { End::Malformed } else { End::Partial });
        };
        let Ok(request) = decode_request(header, &record[1..]) else {
            return (requests, End::Malformed);
        };
        let mut encoded = Vec::new();
        encode_request(LaneId(header.lane), request.chain(), request.deadline, &mut encoded);
        encoded.extend(request.payload);
        assert_eq!(encoded, record);
        assert!(request.chain().iter().all(has_whole_words));
        let (lane, chain, deadline) = (header.lane, request.chain().to_vec(), request.deadline);
        requests.push(DecodedRequest { lane, chain, deadline });
        at += length;
    }
    let is_whole = bytes.len().is_multiple_of(WORD_BYTES);
    (requests, if is_whole { End::Whole } else { End::Partial })
}

/// A thread of a server, with a session beside the one that an input talks to.
struct FuzzedServer {
    executor: SteppedExecutor,
    for_writers: Arc<Region>,
    for_readers: Arc<Region>,
    content: Vec<u64>,
    beside: UnixStream,
    sessions: u64,
}

impl FuzzedServer {
    fn new() -> Self {
        let memory = RegionMemory::anonymous(REGION_BYTES as u64, HugePages::Never).unwrap();
        let for_readers = Region::map_read_only(&memory.reader_descriptor().unwrap()).unwrap();
        // No two words are equal.
        let words = (REGION_BYTES / WORD_BYTES) as u64;
        let mut content: Vec<u64> = (0..words).map(|number| number << 32).collect();
        content[0] = LEASE.number;
        let mut executor = SteppedExecutor::new().unwrap();
        let (near, beside) = connected();
        executor.begin(ConnectionId(0), near.into(), memory.region.clone(), LEASE);
        Self {
            executor,
            for_writers: memory.region,
            for_readers: Arc::new(for_readers),
            content,
            beside,
            sessions: 1,
        }
    }

    /// Has the thread work until it has nothing to do. Receives what it sends to a client.
    fn work(executor: &mut SteppedExecutor, mut client: &UnixStream, received: &mut Vec<u8>) {
        let mut part = [0; 64 << 10];
        loop {
            let has_served = executor.step();
            // An error is the end of the connection, or there is nothing yet.
            let bytes = client.read(&mut part).unwrap_or(0);
            received.extend_from_slice(&part[..bytes]);
            if !has_served && bytes == 0 {
                return;
            }
        }
    }

    /// Serves a session whose client sends these parts, on a fresh region. Returns the replies, and
    /// the region afterwards.
    fn serve(&mut self, region: &Arc<Region>, parts: &[&[u8]]) -> (Vec<Vec<u64>>, Vec<u64>) {
        self.for_writers.write(0, &self.content).unwrap();
        let id = ConnectionId(self.sessions);
        self.sessions += 1;
        let (near, mut client) = connected();
        self.executor.begin(id, near.into(), region.clone(), LEASE);
        let mut received = Vec::new();
        for part in parts {
            let mut sent = 0;
            while sent < part.len() {
                match client.write(&part[sent..]) {
                    Ok(bytes) => sent += bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // The server has closed the connection.
                    Err(_) => break,
                }
                Self::work(&mut self.executor, &client, &mut received);
            }
        }
        // It fails if the server has closed the connection.
        let _ = client.shutdown(Shutdown::Write);
        Self::work(&mut self.executor, &client, &mut received);
        let event = self.executor.next_event();
        assert!(matches!(event, Some(Ok(Event::Ended(ended))) if ended == id), "it has ended");
        let mut region = vec![0; self.content.len()];
        self.for_writers.read(0, &mut region).unwrap();
        (replies(&received), region)
    }

    /// Checks that the session beside is served as if it were alone.
    fn check_beside(&mut self) {
        self.for_writers.write(0, &self.content).unwrap();
        let mut request = Vec::new();
        let chain = [read(LAST_WORD, Buffer::Window, 8)];
        encode_request(LaneId(3), &chain, Nanos::MAX, &mut request);
        self.beside.write_all(request.as_bytes()).unwrap();
        let mut received = Vec::new();
        Self::work(&mut self.executor, &self.beside, &mut received);
        let last = self.content.last().copied();
        let [header, value] = replies(&received)[0][..] else { panic!("{received:?}") };
        let kind = Header::of(header).and_then(reply_kind);
        assert_eq!((kind, Some(value)), (Ok(ReplyKind::Executed(LaneId(3))), last));
        assert!(self.executor.next_event().is_none());
    }
}

/// The records that a server sent, without those of its clock.
fn replies(bytes: &[u8]) -> Vec<Vec<u64>> {
    assert!(bytes.len().is_multiple_of(WORD_BYTES), "{} bytes", bytes.len());
    let words = words_of(bytes);
    let (mut replies, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let header = Header::of(words[at]).unwrap();
        let record = &words[at..=at + header.words as usize];
        if reply_kind(header).unwrap() != ReplyKind::Clock {
            replies.push(record.to_vec());
        }
        at += record.len();
    }
    replies
}

fn is_long_read(chain: &[Verb]) -> bool {
    matches!(*chain, [Verb::Read { bytes, .. }] if bytes as usize >= DIRECT_BYTES_MIN)
}

/// Checks that this is a reply to a request.
fn check_reply(request: &DecodedRequest, reply: &[u64]) {
    let lane = LaneId(request.lane);
    match Header::of(reply[0]).and_then(reply_kind) {
        Ok(ReplyKind::Executed(of)) => {
            assert_eq!((of, reply.len() - 1), (lane, reply_words(&request.chain)));
        }
        kind => assert_eq!(kind, Ok(ReplyKind::Failed(lane))),
    }
}

/// Checks that a reply to a reader has the content of the region, which does not change. Only READs
/// of a reader are executed.
fn check_content(request: &DecodedRequest, reply: &[u64], content: &[u64]) {
    let mut rest = &reply[1..];
    if !matches!(Header::of(reply[0]).and_then(reply_kind), Ok(ReplyKind::Executed(_))) {
        return;
    }
    for verb in &request.chain {
        let Verb::Read { remote, bytes, .. } = *verb else { panic!("a reader executed {verb:?}") };
        let found;
        (found, rest) = rest.split_at(bytes as usize / WORD_BYTES);
        assert!(content[remote as usize / WORD_BYTES..].starts_with(found), "{verb:?}");
    }
}

thread_local! {
    static SERVER: RefCell<FuzzedServer> = RefCell::new(FuzzedServer::new());
}

/// Decodes requests, and executes them as those of a writer and of a reader. Returns whether the
/// input is whole requests.
///
/// # Panics
/// A check fails.
pub(crate) fn execute_requests(bytes: &[u8]) -> bool {
    let (requests, end) = decode_requests(bytes);
    let with_verbs = || requests.iter().filter(|request| !request.chain.is_empty());
    let now = boot_time_ns();
    let is_timeless = requests.iter().all(|request| request.deadline.abs_diff(now) > NEAR_NS);
    // Chains in flight together have no order, and a long READ is sent after all of its batch.
    let has_order = !requests.iter().any(|request| is_long_read(&request.chain))
        || !requests.iter().any(|request| changes(&request.chain));
    SERVER.with_borrow_mut(|server| {
        let (writable, read_only) = (server.for_writers.clone(), server.for_readers.clone());
        let [at_once, in_parts] = arrivals(bytes);
        let (first, region) = server.serve(&writable, &at_once);
        let (second, region_again) = server.serve(&writable, &in_parts);
        let (to_reader, unchanged) = server.serve(&read_only, &at_once);
        assert!(unchanged == server.content, "a reader changed the region");
        for replies in [&first, &second, &to_reader] {
            with_verbs().zip(replies).for_each(|(request, reply)| check_reply(request, reply));
            // Replies to requests before a malformed one may get lost.
            let count = with_verbs().count();
            assert!(replies.len() == count || end == End::Malformed && replies.len() < count);
        }
        with_verbs()
            .zip(&to_reader)
            .for_each(|(request, reply)| check_content(request, reply, &server.content));
        if is_timeless {
            assert!(region == region_again, "the parts of the input change what it does");
            let mut both = first.iter().zip(&second);
            assert!(!has_order || both.all(|(reply, again)| reply == again));
        }
        server.check_beside();
    });
    end == End::Whole
}

/// The chains in flight of a client, each on the lane with its index.
fn chains_in_flight() -> [Vec<Verb>; 5] {
    let swap = Verb::CompareSwap { remote: 64, expected: 1, desired: 2 };
    let mark = Verb::WriteU32 { remote: 32, value: 1 };
    let long = DIRECT_BYTES_MIN as u32;
    let two_long = [read(0, Buffer::Window, 3 * long), read(0, Buffer::ReadBlock, 3 * long)];
    [
        vec![read(8, Buffer::Window, 64)],
        vec![write(128, 64), mark, swap, read(64, Buffer::Window, 16)],
        vec![Verb::WriteWord { remote: 16, value: 3 }],
        vec![read(0, Buffer::ReadBlock, long)],
        two_long.to_vec(),
    ]
}

/// An input, with zeros for the words that its last reply lacks. Without them no short input would
/// have a long reply.
fn completed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let words = words_of(&bytes);
    let mut at = 0;
    while let Some(word) = words.get(at) {
        let header = Header::of(*word).and_then(|header| reply_kind(header).map(|_| header));
        let Ok(header) = header else { return bytes };
        at += 1 + header.words as usize;
    }
    let longest = chains_in_flight().iter().map(|chain| reply_words(chain)).max();
    if at > words.len() && Some(at - words.len()) <= longest {
        bytes.resize(at * WORD_BYTES, 0);
    }
    bytes
}

/// The replies in an input that a client awaits, and whether it has only those and clock records.
fn awaited_replies(words: &[u64]) -> (Vec<u64>, bool) {
    let mut chains = chains_in_flight().map(Some);
    let (mut awaited, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let Ok(header) = Header::of(words[at]) else { return (awaited, false) };
        let record = words.get(at..=at + header.words as usize);
        let (id, is_executed) = match reply_kind(header) {
            Ok(ReplyKind::Clock) => (None, false),
            Ok(ReplyKind::Executed(id)) => (Some(id), true),
            Ok(ReplyKind::Failed(id)) => (Some(id), false),
            Err(_) => return (awaited, false),
        };
        if let Some(id) = id {
            let chain = chains.get_mut(usize::from(id.0)).and_then(Option::take);
            let fits =
                |chain: Vec<Verb>| !is_executed || reply_words(&chain) == header.words as usize;
            let Some(record) = record.filter(|_| chain.is_some_and(fits)) else {
                return (awaited, false);
            };
            awaited.extend(record);
        }
        at += 1 + header.words as usize;
    }
    (awaited, true)
}

/// A client's fabric with chains in flight.
struct FuzzedClient {
    fabric: TcpFabric,
    /// The chains in flight, by their lanes.
    chains: [Option<Vec<Verb>>; 5],
    /// The fabric's end of the connection, which tells how much the fabric has not received.
    near: UnixStream,
    server: UnixStream,
    /// The results of chains, encoded as the server encodes them.
    answers: Vec<u64>,
}

impl FuzzedClient {
    fn new() -> Self {
        let (near, server) = connected();
        let link = DataLink::over(near.try_clone().unwrap().into());
        let region = RemoteRegion {
            base_address: 0,
            region_bytes: REGION_BYTES as u64,
            rkeys: Rkeys::default(),
            writable: true,
            round_trip_min_ns: ROUND_TRIP_MIN_NS,
        };
        let chains = chains_in_flight();
        let mut fabric = link.into_fabric(region, chains.len() as u16 + 1).unwrap();
        for (number, chain) in (0..).zip(&chains) {
            fabric.post(LaneId(number), REGION, chain, Nanos::MAX - 1);
        }
        fabric.ring();
        Self { fabric, chains: chains.map(Some), near, server, answers: Vec::new() }
    }

    /// Receives what has arrived. Returns false if the client has given the connection up.
    fn receive(&mut self) -> bool {
        let unread = |near: &UnixStream| rustix::io::ioctl_fionread(near).unwrap();
        loop {
            let before = unread(&self.near);
            while let Some(completion) = self.fabric.poll() {
                self.take_answer(&completion);
            }
            let left = unread(&self.near);
            if left == 0 {
                return true;
            }
            if left < before {
                // To relax would wait for the rest of a long reply.
                continue;
            }
            // It receives even if no chain is in flight.
            self.fabric.relax();
            if unread(&self.near) == left {
                return false;
            }
        }
    }

    fn take_answer(&mut self, Completion { lane, result }: &Completion) {
        let chain = self.chains[usize::from(lane.0)].take().expect("a chain completes once");
        let reply = PendingReply::begin(&chain, &mut self.answers);
        for verb in &chain {
            if let Verb::Read { into, bytes, .. } = *verb
                && result.is_ok()
            {
                let content = &self.fabric.buffer(*lane, into)[..bytes as usize];
                self.answers.extend(words_of(content));
            }
        }
        reply.finish(lane.0, &chain, result, 0, &mut self.answers);
    }

    /// Receives these parts from the server, until the client gives the connection up.
    fn receive_all(&mut self, parts: &[&[u8]]) {
        for part in parts {
            let mut sent = 0;
            while sent < part.len() {
                match self.server.write(&part[sent..]) {
                    Ok(bytes) => sent += bytes,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
                if !self.receive() {
                    return;
                }
            }
        }
    }

    /// Whether the client can still send a chain, which has a lane of its own.
    fn is_connected(&mut self) -> bool {
        let lane = LaneId(self.chains.len() as u16);
        let chain = [Verb::WriteWord { remote: 0, value: 1 }];
        // The fabric converts it to the server's time, of which any one is possible.
        self.fabric.post(lane, REGION, &chain, Nanos::MAX - 1);
        self.fabric.ring();
        let mut completions = std::iter::from_fn(|| self.fabric.poll());
        !completions.any(|completion| completion.lane == lane)
    }
}

/// Has a client with chains in flight receive the bytes of a server. Returns whether they are whole
/// records that the client awaits.
///
/// # Panics
/// A check fails.
pub(crate) fn decode_replies(bytes: &[u8]) -> bool {
    let bytes = completed(bytes);
    let (awaited, is_valid) = awaited_replies(&words_of(&bytes));
    for parts in arrivals(&bytes) {
        let mut client = FuzzedClient::new();
        client.receive_all(&parts);
        // The client gives up at a malformed record. It has taken the answers before it, and then
        // the other chains fail.
        assert_eq!(client.is_connected(), is_valid);
        let taken = client.answers.get(..awaited.len());
        assert!(taken == Some(&*awaited), "another result than the server sent");
        for later in replies(client.answers[awaited.len()..].as_bytes()) {
            let kind = Header::of(later[0]).and_then(reply_kind);
            assert!(
                !is_valid && matches!(kind, Ok(ReplyKind::Failed(_))),
                "{later:x?} was not sent"
            );
        }
    }
    is_valid && bytes.len().is_multiple_of(WORD_BYTES)
}

/// Valid inputs of [`execute_requests`].
pub(crate) fn some_requests() -> Vec<Vec<u8>> {
    let swap = Verb::CompareSwap { remote: 64, expected: 9 << 32, desired: 2 };
    let mark = Verb::WriteU32 { remote: 4, value: 1 };
    let long = DIRECT_BYTES_MIN as u32;
    let put = [write(512, 64), mark, swap, read(64, Buffer::Window, 16)];
    let two_swaps = [swap, Verb::CompareSwap { remote: LAST_WORD, expected: 0, desired: 1 }];
    let chains: [&[Verb]; 7] = [
        &[read(128, Buffer::Window, 256)],
        &put,
        &two_swaps,
        &[Verb::WriteWord { remote: 16, value: 3 }],
        &[read(8, Buffer::ReadBlock, long)],
        &[read(8, Buffer::ReadBlock, 2 * long), read(0, Buffer::Window, 3 * long)],
        &[read(LAST_WORD, Buffer::Window, 16)],
    ];
    let encoded = |chain: &[Verb]| {
        let mut words = Vec::new();
        encode_request(LaneId(5), chain, Nanos::MAX - 1, &mut words);
        let payload = if chain[0] == put[0] { 8 } else { 0 };
        words.extend(1..=payload);
        words
    };
    let mut seeds: Vec<_> = chains.into_iter().map(encoded).collect();
    let mut all = seeds.concat();
    encode_clock_request(&mut all);
    seeds.push(all);
    // The last request of these is fenced.
    let end_of_lease = encoded(&[Verb::WriteWord { remote: LEASE.offset, value: 0 }]);
    seeds.push([end_of_lease, encoded(chains[0])].concat());
    seeds.iter().map(|words| words.as_bytes().to_vec()).collect()
}

/// Valid inputs of [`decode_replies`].
pub(crate) fn some_replies() -> Vec<Vec<u8>> {
    let reply = |lane: usize, result: Result<u64, ChainError>| {
        let (chain, mut words) = (&chains_in_flight()[lane], Vec::new());
        let reply = PendingReply::begin(chain, &mut words);
        // As many as are missing.
        words.extend(words.len() as u64..=reply_words(chain) as u64);
        reply.finish(lane as u16, chain, &result, 0, &mut words);
        words
    };
    let outside = ChainError::Outside { remote: 1 << 40, bytes: 64 };
    let errors = [outside, ChainError::Denied, ChainError::Late, ChainError::Unknown];
    let mut seeds: Vec<_> = (0..5).map(|lane| reply(lane, Ok(9))).collect();
    seeds.push((0..).zip(errors).flat_map(|(lane, error)| reply(lane, Err(error))).collect());
    let mut clocks = Vec::new();
    for (lane, time) in [(2, 1 << 50), (1, u64::MAX), (4, 0)] {
        encode_clock(time, &mut clocks);
        clocks.extend(reply(lane, Ok(1)));
    }
    seeds.push(clocks);
    seeds.iter().map(|words| words.as_bytes().to_vec()).collect()
}
