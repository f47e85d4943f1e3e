//! A store whose server's processor takes part in every operation: a driver in the paradigm of RFP
//! (Su et al., EuroSys'17), "remote fetching", not their code. The client WRITEs a request into a
//! mailbox and READs until the answer stands beside it; a thread looks at all mailboxes and keeps
//! the records in a hash table of its own.
//!
//! | operation | round trips, each a chain |
//! |---|---|
//! | all | WRITE (the request); READ (the answer), as often as it takes |
//!
//! The thread runs in this process, on the same region: it takes a core that the one-sided stores
//! do not need, and its CPU time counts as the server's. Left out: RFP's switch to answers that the
//! server sends when it is slow.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside_common::checksum::checksum;
use farside_common::fabric::shm::Region;
use farside_common::fabric::{Buffer, ChainError, Endpoint, Fabric, LaneId, Nanos, Verb};
use rustix::process::Pid;
use zerocopy::IntoBytes;

use super::memory::{Memory, Pieces, segments};
use super::reach::Reach;
use super::{Demand, Peer, PeerError, Result};
use crate::accounting::cpu_s_of;
use crate::keys::{KEY_BYTES, Key};
use crate::store::Action;

/// Of a request and of an answer: its number, the checksum of all else, and two words as below.
const HEADER_WORDS: usize = 3;
const HEADER_BYTES: usize = 8 * HEADER_WORDS;
/// A client waits so long for an answer.
const ANSWER_TIMEOUT_NS: Nanos = 5_000_000_000;
/// A server without requests for so long lets others have its core.
const IDLE: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(50);
/// After so many looks in vain both sides give way to others, should they share a core.
const LOOKS: usize = 64;

const GET: u64 = Action::Get as u64;
const PUT: u64 = Action::Put as u64;
const INSERT: u64 = Action::Insert as u64;

/// How long requests and answers are, in bytes.
#[derive(Clone, Copy)]
struct Layout {
    value_bytes: usize,
}

impl Layout {
    fn answer_offset(self) -> u64 {
        self.request_bytes(true).next_multiple_of(64)
    }

    fn request_bytes(self, has_value: bool) -> u64 {
        (KEY_BYTES as u64) + self.answer_bytes(has_value)
    }

    fn answer_bytes(self, has_value: bool) -> u64 {
        let value_bytes = if has_value { self.value_bytes.next_multiple_of(8) } else { 0 };
        (HEADER_BYTES + value_bytes) as u64
    }

    fn mailbox_bytes(self) -> u64 {
        self.answer_offset() + self.answer_bytes(true)
    }
}

/// The header of a message: its number, the checksum, and what it says.
fn header(number: u64, says: u64, body: &[u8]) -> [u64; HEADER_WORDS] {
    let start = checksum([number, says].map(u64::to_le).as_bytes(), 0);
    [number, checksum(body, start).into(), says]
}

fn encode(buffer: &mut [u8], number: u64, says: u64, body: &[&[u8]]) {
    let mut end = HEADER_BYTES;
    for part in body {
        buffer[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    let header = header(number, says, &buffer[HEADER_BYTES..end]);
    buffer[..HEADER_BYTES].copy_from_slice(header.map(u64::to_le).as_bytes());
}

/// What message number so-and-so says, and what stands behind its header, which is this long; none
/// if it has not arrived in full.
fn decode(buffer: &[u8], number: u64, body_bytes: impl Fn(u64) -> usize) -> Option<(u64, &[u8])> {
    let (words, _) = buffer.as_chunks::<8>();
    let word = |at: usize| u64::from_le_bytes(words[at]);
    if word(0) != number {
        return None;
    }
    let body = buffer[HEADER_BYTES..].get(..body_bytes(word(2)))?;
    let header = header(number, word(2), body);
    (header == [word(0), word(1), word(2)]).then_some((word(2), body))
}

/// A client, and its server.
pub struct Rpc<F> {
    reach: Reach<F>,
    mailboxes: Arc<Pieces>,
    layout: Layout,
    number: Cell<u64>,
    server: Server,
}

impl<F: Fabric> Rpc<F> {
    /// An empty store, with a server on the region that the fabric leads to.
    ///
    /// # Errors
    /// What the fabric says, [`PeerError::OutOfMemory`] and [`PeerError::NoServer`].
    pub fn new(
        fabric: F,
        memory: &mut Memory,
        demand: Demand,
        region: Arc<Region>,
    ) -> Result<Self> {
        let layout = Layout { value_bytes: demand.value_bytes };
        let reach = Reach::new(fabric, demand.depth, layout.request_bytes(true));
        let mailboxes = Arc::new(memory.cut(layout.mailbox_bytes(), demand.depth.into())?);
        reach.clear(&mailboxes)?;
        let server = Server::start(region, mailboxes.clone(), layout)?;
        Ok(Self { reach, mailboxes, layout, number: Cell::new(0), server })
    }

    /// How many segments of memory that takes.
    pub fn segments(demand: Demand) -> u64 {
        let layout = Layout { value_bytes: demand.value_bytes };
        segments(layout.mailbox_bytes(), demand.depth.into())
    }
}

impl<F: Fabric> Peer for Rpc<F> {
    type Fabric = F;

    fn endpoint(&self) -> &Endpoint<F> {
        &self.reach.endpoint
    }

    async fn perform(
        &self,
        lane: LaneId,
        action: Action,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> Result<bool> {
        let stores = matches!(action, Action::Put | Action::Insert);
        if stores && value.len() != self.layout.value_bytes {
            return Err(PeerError::Unsupported);
        }
        let number = self.number.get() + 1;
        self.number.set(number);
        let stored = if stores { &value[..] } else { &[] };
        self.reach.fill(lane, |image| encode(image, number, action as u64, &[key, stored]));
        let remote = self.mailboxes.at(lane.0.into());
        let bytes = self.layout.request_bytes(stores) as u32;
        self.reach.chain(lane, &[Verb::Write { remote, from: Buffer::Image, bytes }]).await?;
        let remote = remote + self.layout.answer_offset();
        let bytes = self.layout.answer_bytes(action == Action::Get) as u32;
        let give_up = self.reach.endpoint.now() + ANSWER_TIMEOUT_NS;
        for looks in 1usize.. {
            if looks.is_multiple_of(LOOKS) {
                if self.reach.endpoint.now() > give_up {
                    break;
                }
                std::thread::yield_now();
            }
            let read = Verb::Read { remote, into: Buffer::Block, bytes };
            self.reach.chain(lane, &[read]).await?;
            let block = self.reach.buffer(lane, Buffer::Block);
            let found_bytes = |applied| {
                let has_value = action == Action::Get && applied != 0;
                if has_value { self.layout.value_bytes } else { 0 }
            };
            if let Some((applied, found)) = decode(&block, number, found_bytes) {
                if action == Action::Get && applied != 0 {
                    value.clear();
                    value.extend_from_slice(found);
                }
                return Ok(applied != 0);
            }
        }
        Err(PeerError::NoAnswer)
    }

    fn server_cpu_s(&self) -> f64 {
        self.server.id.and_then(|id| cpu_s_of(id).ok()).unwrap_or(0.0)
    }
}

/// The server's thread; it ends when this is dropped.
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    id: Option<Pid>,
}

impl Server {
    fn start(region: Arc<Region>, mailboxes: Arc<Pieces>, layout: Layout) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut serving = Serving {
            region,
            layout,
            request: vec![0; layout.request_bytes(true) as usize / 8],
            reply: vec![0; layout.answer_bytes(true) as usize / 8],
            records: HashMap::new(),
        };
        let until = stop.clone();
        let (told, id) = mpsc::channel();
        let started = std::thread::Builder::new().spawn(move || {
            let _ = told.send(rustix::thread::gettid());
            // Whoever waits for an answer notices that there is none.
            let _ = serving.serve(&mailboxes, &until);
        });
        let thread = started.map_err(|error| PeerError::NoServer(error.to_string()))?;
        Ok(Self { stop, thread: Some(thread), id: id.recv().ok() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Serving {
    region: Arc<Region>,
    layout: Layout,
    request: Vec<u64>,
    reply: Vec<u64>,
    records: HashMap<Key, Vec<u8>>,
}

impl Serving {
    fn serve(
        &mut self,
        mailboxes: &Pieces,
        stop: &AtomicBool,
    ) -> std::result::Result<(), ChainError> {
        let mut last: Vec<u64> = vec![0; mailboxes.count() as usize];
        let (mut busy_at, mut looks) = (Instant::now(), 0usize);
        while !stop.load(Ordering::Relaxed) {
            let mut any = false;
            for (at, last) in last.iter_mut().enumerate() {
                let mailbox = mailboxes.at(at as u64);
                let number = self.region.load(mailbox)?;
                if number != *last && self.answer(mailbox, number)? {
                    *last = number;
                    any = true;
                }
            }
            if any {
                (busy_at, looks) = (Instant::now(), 0);
                continue;
            }
            looks += 1;
            if busy_at.elapsed() > IDLE {
                std::thread::sleep(NAP);
            } else if looks.is_multiple_of(LOOKS) {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Answers a request, if it has arrived in full.
    fn answer(&mut self, mailbox: u64, number: u64) -> std::result::Result<bool, ChainError> {
        let Self { region, layout, request, reply, records } = self;
        region.read(mailbox, request)?;
        let body_bytes = |action| match action {
            PUT | INSERT => KEY_BYTES + layout.value_bytes,
            _ => KEY_BYTES,
        };
        let Some((action, body)) = decode(request.as_bytes(), number, body_bytes) else {
            return Ok(false);
        };
        let Some((key, value)) = body.split_first_chunk::<KEY_BYTES>() else { return Ok(false) };
        let mut found: &[u8] = &[];
        let applied = match action {
            GET => {
                let record = records.get(key);
                found = record.map_or(&[], Vec::as_slice);
                record.is_some()
            }
            INSERT if records.contains_key(key) => false,
            PUT | INSERT => {
                let record = records.entry(*key).or_default();
                record.clear();
                record.extend_from_slice(value);
                true
            }
            _ => records.remove(key).is_some(),
        };
        encode(reply.as_mut_bytes(), number, applied.into(), &[found]);
        let words = layout.answer_bytes(!found.is_empty()) as usize / 8;
        region.write(mailbox + layout.answer_offset(), &reply[..words])?;
        Ok(true)
    }
}
