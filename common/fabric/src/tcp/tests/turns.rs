//! What one client can take of a server's threads and memory: sessions take turns by the bytes that
//! they touch, and keep few bytes between them. Guards against requests that cost more than they
//! look like.

use std::os::fd::OwnedFd;

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use zerocopy::IntoBytes;

use super::super::executors::{INPUT_WORDS, News, Thread};
use super::super::kept_bytes::KeptBytes;
use super::super::record::encode_request;
use super::super::session::{OUTPUT_BYTES_MAX, Session, TURN_BYTES, Tools};
use super::super::stream::{self, Stream};
use super::*;
use crate::memory::Executor;
use crate::rdma::ConnectionId;

/// The lease of a second client.
const OTHER: Lease = Lease { offset: 64, number: 9 };
/// What a session may keep: the rest of what it received at once, and replies.
const SESSION_BYTES_MAX: usize = 2 * (INPUT_WORDS * 8 + OUTPUT_BYTES_MAX);

/// A thread of a server, without a thread: a test has it work.
struct Bench {
    memory: RegionMemory,
    read_only: Arc<Region>,
    news: Arc<News>,
    kept: Arc<KeptBytes>,
    thread: Thread,
    sessions: u64,
}

impl Bench {
    fn new(kept_bytes_max: usize) -> Self {
        let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
        for lease in [LEASE, OTHER] {
            memory.region.store(lease.offset, lease.number).unwrap();
        }
        let read_only = Region::map_read_only(&memory.reader_descriptor().unwrap()).unwrap();
        let news = Arc::new(News::new().unwrap());
        let kept = Arc::new(KeptBytes::new(kept_bytes_max));
        let thread = Thread::new(news.clone(), None, Duration::ZERO, kept.clone()).unwrap();
        Self { memory, read_only: Arc::new(read_only), news, kept, thread, sessions: 0 }
    }

    /// Begins a reader's session. Returns its client's end.
    fn reader(&mut self, lease: Lease) -> OwnedFd {
        let (near, far) = pair();
        let executor = Executor::new(self.read_only.clone(), Some(lease));
        self.thread.begin(Session::new(ConnectionId(self.sessions), near, executor));
        self.sessions += 1;
        take(&far);
        far
    }
}

fn pair() -> (Stream, OwnedFd) {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let (near, far) = net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    (Stream::unchanged(near), far)
}

/// The words that have arrived.
fn take(far: &OwnedFd) -> Vec<u64> {
    let mut words = vec![0; 1 << 20];
    let bytes = stream::receive(far, words.as_mut_bytes(), false).unwrap_or(0);
    words.truncate(bytes / 8);
    words
}

/// How many chains were refused because of an access outside of the region.
fn refusals(words: &[u64]) -> usize {
    // Without the two words of a clock record.
    words.iter().filter(|word| **word == 1 << 16 | 2 << 32).count()
}

/// Requests of a chain, as many as fit into so many bytes.
fn requests(chain: &[Verb], bytes: usize) -> Vec<u64> {
    let mut words = Vec::new();
    encode_request(LANE, chain, Nanos::MAX, &mut words);
    words.repeat(bytes / size_of_val(&*words))
}

fn send(far: &OwnedFd, words: &[u64]) {
    let sent = stream::send(far, &[std::io::IoSlice::new(words.as_bytes())]).unwrap();
    assert_eq!(sent, size_of_val(words));
}

/// Each chain READs nearly 16 KiB, and then fails: it is answered by three words.
fn costly() -> [Verb; 2] {
    [read(0, (16 << 10) - 8), read(REGION_BYTES, 8)]
}

#[test]
fn a_session_that_reads_much_and_is_told_little_takes_turns() {
    let mut bench = Bench::new(usize::MAX);
    let (greedy, other) = (bench.reader(LEASE), bench.reader(OTHER));
    send(&greedy, &requests(&costly(), 64 << 10));
    send(&other, &requests(&[read(OTHER.offset, 8)], 24));
    assert!(bench.thread.serve_waiting());
    assert_eq!(take(&other).last(), Some(&OTHER.number));
    let refused = refusals(&take(&greedy));
    assert!((1..=TURN_BYTES / (16 << 10) + 1).contains(&refused), "{refused}");
    let mut rest = refused;
    while bench.thread.serve_waiting() {
        rest += refusals(&take(&greedy));
    }
    assert_eq!(rest, (64 << 10) / 40, "all are answered in the end");
}

/// The session beside them has its turn after one of theirs.
#[test]
fn sessions_of_one_client_take_turns_as_one() {
    let mut bench = Bench::new(usize::MAX);
    let greedy: Vec<_> = (0..50).map(|_| bench.reader(LEASE)).collect();
    let other = bench.reader(OTHER);
    greedy.iter().for_each(|greedy| send(greedy, &requests(&costly(), 64 << 10)));
    send(&other, &requests(&[read(OTHER.offset, 8)], 24));
    assert!(bench.thread.serve_waiting());
    assert_eq!(take(&other).last(), Some(&OTHER.number));
    let served = greedy.iter().filter(|greedy| refusals(&take(greedy)) > 0).count();
    assert_eq!(served, 1);
    (0..49).for_each(|_| assert!(bench.thread.serve_waiting()));
    let served = greedy.iter().filter(|greedy| refusals(&take(greedy)) > 0).count();
    assert_eq!(served, 49, "each of the others has had its turn");
}

/// A chain that is not allowed, or that has a part outside of the region, touches nothing.
#[test]
fn a_long_chain_that_fails_is_refused_before_anything_is_copied() {
    let mut bench = Bench::new(usize::MAX);
    let reader = bench.reader(LEASE);
    let long = REGION_BYTES as u32;
    send(&reader, &requests(&[read(0, long), read(REGION_BYTES, 8)], 40_000));
    assert!(bench.thread.serve_waiting());
    // A turn of chains that touch 16 MiB each would be one chain.
    assert!(refusals(&take(&reader)) > 500);
}

/// Drives one session, whose client sends these bytes and reads nothing before they are sent.
/// Returns the most that the session kept, and the words of its answers.
fn serve_one(region: &Arc<Region>, bytes: &[u8]) -> (usize, Vec<u64>) {
    let (near, far) = pair();
    let executor = Executor::new(region.clone(), Some(LEASE));
    let mut session = Session::new(ConnectionId(1), near, executor);
    let (mut buffer, mut tools) = (vec![0; INPUT_WORDS], Tools::default());
    let (mut kept, mut sent, mut answers) = (0, 0, Vec::new());
    loop {
        let part = &bytes[sent..bytes.len().min(sent + 100_001)];
        sent += stream::send(&far, &[std::io::IoSlice::new(part)]).unwrap_or(0);
        let has_more = session.take_turn(&mut buffer, &mut tools).unwrap_or(true);
        kept = kept.max(session.kept_bytes());
        if sent == bytes.len() {
            let words = take(&far);
            if words.is_empty() && !has_more {
                assert_eq!(session.kept_bytes(), 0, "nothing is kept when nothing waits");
                return (kept, answers);
            }
            answers.extend(words);
        }
    }
}

#[test]
fn the_payload_of_a_reader_is_not_kept() {
    let bench = Bench::new(usize::MAX);
    let long = 4 << 20;
    let word = Verb::WriteWord { remote: 128, value: 5 };
    let chains: [&[Verb]; 4] = [
        &[write(4096, long)],
        &[word, write(4096, long)],
        &[write(4096, long), write(65_536, long)],
        &[read(0, 8), write(4096, 8), write(4096, long)],
    ];
    for chain in chains {
        let mut words = Vec::new();
        encode_request(LANE, chain, boot_time_ns() + 60_000_000_000, &mut words);
        let payload = chain.iter().map(|verb| match verb {
            Verb::Write { bytes, .. } => *bytes as usize / 8,
            _ => 0,
        });
        words.extend((1..=payload.sum()).map(|word| word as u64));
        let (kept, answers) = serve_one(&bench.read_only, words.as_bytes());
        assert!(kept < 64 << 10, "{chain:?}: {kept}");
        assert_eq!(answers.last(), Some(&(2 << 16)), "denied");
        // A writer's payload is in the region, and not in the server's memory.
        let (kept, answers) = serve_one(&bench.memory.region, words.as_bytes());
        assert!(kept < 64 << 10, "{chain:?}: {kept}");
        let is_executed = |word: &u64| *word & 0xff_ffff == 0;
        assert!(answers.iter().skip(2).any(is_executed), "{chain:?}: {answers:?}");
        let Some(Verb::Write { remote, .. }) = chain.last() else { panic!("{chain:?}") };
        let last = bench.memory.region.load(remote + u64::from(long) - 8);
        assert_eq!(last, Ok(*words.last().unwrap()), "{chain:?}");
        bench.memory.region.store(LEASE.offset, LEASE.number).unwrap();
    }
}

#[test]
fn a_reply_that_was_read_leaves_no_memory_behind() {
    let bench = Bench::new(usize::MAX);
    let part = 2 << 20;
    let long = [read(0, part), read(8, part), read(16, part), read(0, 8)];
    let mixed = [read(0, 8), read(0, 8000), read(0, part), read(64, 8000)];
    for chain in [&long[..], &mixed] {
        let words = requests(chain, 2000);
        let (kept, answers) = serve_one(&bench.read_only, words.as_bytes());
        assert!(kept <= SESSION_BYTES_MAX, "{kept}");
        let reply_words: usize = chain
            .iter()
            .map(|verb| match verb {
                Verb::Read { bytes, .. } => *bytes as usize / 8,
                _ => 0,
            })
            .sum();
        let chains = words.len() / (1 + 2 * chain.len());
        assert!(answers.len() >= chains * (1 + reply_words), "{} words", answers.len());
    }
}

/// A later READ of a chain may prove that nothing has changed since an earlier one.
#[test]
fn a_word_behind_a_long_read_is_read_after_it_was_sent() {
    let mut bench = Bench::new(usize::MAX);
    let reader = bench.reader(LEASE);
    let word = REGION_BYTES - 8;
    send(&reader, &requests(&[read(0, 4 << 20), read(word, 8)], 40));
    while bench.thread.serve_waiting() {}
    bench.memory.region.store(word, 77).unwrap();
    let mut answer = Vec::new();
    loop {
        let words = take(&reader);
        answer.extend(words.iter().copied());
        if !bench.thread.serve_waiting() && words.is_empty() {
            break;
        }
    }
    assert_eq!((answer.len(), answer.last()), (3 + (4 << 20) / 8 + 1, Some(&77)));
}

/// Sessions that send requests without end and take no replies.
#[test]
fn all_sessions_together_keep_a_bounded_number_of_bytes() {
    const MAX: usize = 4 << 20;
    let mut bench = Bench::new(MAX);
    for lease in (0..16).map(|client| Lease { offset: 64 * client, number: 3 }) {
        bench.memory.region.store(lease.offset, lease.number).unwrap();
        let readers: Vec<_> = (0..8).map(|_| bench.reader(lease)).collect();
        for _ in 0..4 {
            let flood = requests(&[read(0, 8192)], 128 << 10);
            for reader in &readers {
                // The server may have closed it.
                let _ = stream::send(reader, &[std::io::IoSlice::new(flood.as_bytes())]);
            }
            while bench.thread.serve_waiting() {
                assert!(bench.kept.total() <= MAX);
            }
        }
        // They stay connected until the end of the test.
        std::mem::forget(readers);
    }
    let ended = std::iter::from_fn(|| bench.news.take()).count();
    assert!((1..128).contains(&ended), "{ended} sessions have ended");
    assert!(bench.kept.total() > MAX / 4, "{}", bench.kept.total());
}
