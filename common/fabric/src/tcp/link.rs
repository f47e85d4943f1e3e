//! A session's connection to one region: its chains in flight, and the bytes in both directions.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::epoll::{self, EventFlags};
use zerocopy::IntoBytes;

use super::SILENCE_NS_MAX;
use super::clock_bound::ClockBound;
use super::connect::DataLink;
use super::output::{DIRECT_BYTES_MIN, Output};
use super::record::{self, Header, RecordError, ReplyKind, WORD_BYTES, decode_failure, reply_kind};
use super::stream::Stream;
use crate::lane_state::{LaneChain, Stage};
use crate::lent::{copy_summed, sum_after};
use crate::memory::{Buffers, part_mut, words_mut};
use crate::rdma::RemoteRegion;
use crate::{Buffer, ChainError, Counters, Flight, LaneId, Lent, Nanos, RegionIndex, Trust, Verb};

/// The bytes that one system call receives at most, except into the buffer of a lane.
const INPUT_WORDS: usize = (64 << 10) / WORD_BYTES;
/// The bytes that one system call receives after a long value. Another one may follow, of which no
/// more than the beginning should arrive in the input, from where it is copied.
const INPUT_BYTES_OF_READER: usize = 4 << 10;
/// A thread that waits for a long value receives and sums it in pieces of this many bytes. While it
/// sums one, the next ones arrive. A piece stays in the second cache.
const PIECE_BYTES: usize = 128 << 10;
/// The longest wait of a system call. A lost wakeup delays the session by as much. So does the end
/// of a trust.
pub(super) const WAIT_MAX: Duration = Duration::from_millis(100);

pub(super) struct Lane {
    pub(super) chain: LaneChain,
    /// [`Buffer::Lent`].
    pub(super) lent: Lent,
    /// The sum of the first bytes of `lent`, which have arrived by a `ReadSplit`.
    pub(super) arrived: ArrivedSum,
    pub(super) buffers: Buffers,
    pub(super) counters: Counters,
}

/// The sum of the first bytes of lent memory, while they arrive.
#[derive(Clone, Default)]
pub(super) struct ArrivedSum {
    sum: crc32fast::Hasher,
    bytes: usize,
    /// How many bytes the `ReadSplit` has for the memory. The others are in the lane's buffer.
    split_bytes: usize,
}

impl ArrivedSum {
    /// Adds the bytes up to this one.
    fn extend(&mut self, lent: &[u8], end: usize) {
        if let Some(more) = lent.get(self.bytes..end) {
            self.sum.update(more);
            self.bytes = end;
        }
    }

    /// The sum of the first `bytes`, of which some are summed already.
    fn of_first(&self, lent: &[u8], bytes: usize) -> crc32fast::Hasher {
        let mut whole = if self.bytes > bytes { Self::default() } else { self.clone() };
        whole.extend(lent, bytes);
        whole.sum
    }
}

impl Lane {
    /// Prepares for the results of the chain, which is about to be posted.
    #[inline]
    pub(super) fn begin(&mut self, chain: &[Verb]) {
        if let Some(Verb::ReadSplit { head_bytes, bytes, .. }) = chain.first() {
            let split_bytes = self.lent.bytes().min((bytes - head_bytes) as usize);
            self.arrived = ArrivedSum { split_bytes, ..ArrivedSum::default() };
        }
    }

    /// Sums the lent bytes of a `ReadSplit` that have arrived, `filled` being those of the READ.
    fn sum_arrived(&mut self, filled: usize) {
        if let Some(Verb::ReadSplit { head_bytes, .. }) = self.chain.verbs().first() {
            let arrived = filled.saturating_sub(*head_bytes as usize);
            let arrived = arrived.min(self.arrived.split_bytes);
            self.arrived.extend(self.lent.content(), arrived);
        }
    }

    /// As [`Fabric::part_sum`](crate::Fabric::part_sum), of lent memory.
    pub(super) fn lent_sum(&mut self, verb: usize, (at, bytes): (u32, u32), before: u32) -> u32 {
        let Self { chain, lent, arrived, buffers, .. } = self;
        // Otherwise an interceptor may hold the chain back, and this is a former one.
        match chain.verbs().get(verb).filter(|_| lent.is_target()) {
            Some(Verb::ReadSplit { into, head_bytes, .. }) if arrived.split_bytes == 0 => {
                let behind = part_mut(buffers, *into, head_bytes + at, bytes);
                copy_summed(before, behind, lent.part_mut(at, bytes))
            }
            Some(Verb::ReadSplit { .. }) if arrived.bytes > 0 => {
                let mut sum = crc32fast::Hasher::new_with_initial(before);
                sum.combine(&arrived.of_first(lent.content(), bytes as usize));
                sum.finalize()
            }
            _ => sum_after(before, lent.part(at, bytes)),
        }
    }
}

/// The results of long READs, which arrive where they belong, without a copy in this process.
struct DirectReply {
    lane: LaneId,
    /// The bytes of all READs of the chain, and how many of them have arrived.
    bytes: usize,
    filled: usize,
}

/// The connection to one region.
pub(super) struct Link {
    /// `None` after it broke.
    pub(super) stream: Option<Stream>,
    pub(super) region: RemoteRegion,
    pub(super) clock_bound: ClockBound,
    /// Whether an answer with the server's clock is awaited. Chains that change the region wait for
    /// it.
    asks_for_clock: bool,
    /// The lanes whose chains wait for the doorbell, and the payload of these chains.
    pub(super) posted: VecDeque<LaneId>,
    pub(super) posted_bytes: u64,
    pub(super) in_flight: usize,
    pub(super) flight: Flight,
    pub(super) output: Output,
    watches_room: bool,
    input: Vec<u64>,
    /// The bytes of `input` that were received, and those of them that were processed. The second
    /// is a multiple of [`WORD_BYTES`].
    received: usize,
    processed: usize,
    direct: Option<DirectReply>,
    /// Whether the last answer was a long value.
    reads_long: bool,
    /// When the last bytes arrived, or when the first request left since then.
    pub(super) heard_at: Nanos,
    trust: Trust,
}

/// The result of a lane's chain.
type Answer = (LaneId, Result<u64, ChainError>);

impl Link {
    pub(super) fn new(link: DataLink, region: RemoteRegion, lanes: u16) -> io::Result<Self> {
        link.stream.set_wait_max(WAIT_MAX)?;
        Ok(Self {
            stream: Some(link.stream),
            region,
            clock_bound: link.clock_bound,
            asks_for_clock: false,
            posted: VecDeque::with_capacity(lanes.into()),
            posted_bytes: 0,
            in_flight: 0,
            flight: Flight::new(lanes),
            output: Output::default(),
            watches_room: false,
            input: vec![0; INPUT_WORDS],
            received: 0,
            processed: 0,
            direct: None,
            reads_long: false,
            heard_at: 0,
            trust: link.trust,
        })
    }

    /// Whether chains that change the region may leave. If the bound of the server's clock is too
    /// old, asks for another one.
    #[inline]
    pub(super) fn may_set_deadlines(&mut self, now: Nanos) -> bool {
        if !self.clock_bound.is_old(now) {
            return true;
        }
        if !self.asks_for_clock {
            self.asks_for_clock = true;
            if self.in_flight == 0 {
                self.heard_at = now;
            }
            record::encode_clock_request(&mut self.output.words);
        }
        false
    }

    /// Whether bytes from the server are awaited.
    #[inline]
    pub(super) fn awaits_bytes(&self) -> bool {
        self.stream.is_some() && (self.in_flight > 0 || self.asks_for_clock)
    }

    /// Whether bytes are awaited from a server that has been silent for too long, or that is not
    /// trusted any more.
    #[inline]
    pub(super) fn is_overdue(&self, now: Nanos) -> bool {
        let is_silent = now.saturating_sub(self.heard_at) > SILENCE_NS_MAX;
        self.awaits_bytes() && (is_silent || !self.trust.holds_at(now))
    }

    /// Appends the chain of a lane to the output.
    #[inline]
    pub(super) fn encode(&mut self, id: LaneId, lane: &mut Lane) {
        let Lane { chain, lent, buffers, .. } = lane;
        let deadline = match chain.deadline {
            Nanos::MAX => Nanos::MAX,
            deadline => self.clock_bound.at(deadline),
        };
        record::encode_request(id, chain.verbs(), deadline, &mut self.output.words);
        let Self { stream, output, .. } = self;
        let stream = stream.as_ref();
        for verb in chain.verbs() {
            let payload = match *verb {
                Verb::Write { from, bytes, .. } => {
                    words_mut(&mut buffers[from as usize], bytes).as_bytes()
                }
                Verb::WriteSplit { from, head_bytes, .. } => {
                    let head = words_mut(&mut buffers[from as usize], head_bytes);
                    push(output, stream, head.as_bytes());
                    lent.content()
                }
                Verb::WritePart { from: Buffer::Lent, at, bytes, .. } => lent.part(at, bytes),
                Verb::WritePart { from, at, bytes, .. } => part_mut(buffers, from, at, bytes),
                _ => continue,
            };
            push(output, stream, payload);
        }
    }

    /// Ends the connection.
    pub(super) fn end(&mut self) {
        self.stream = None;
        self.output.clear();
        // What is left is a part of an answer.
        self.discard_input();
        self.flight.clear();
        self.in_flight = 0;
    }

    /// Forgets what was received and not processed: nothing after a malformed record is an answer.
    pub(super) fn discard_input(&mut self) {
        (self.received, self.processed, self.direct) = (0, 0, None);
    }

    /// Sends what the socket has room for. Returns false if the connection broke.
    #[inline]
    pub(super) fn send(&mut self) -> bool {
        match &mut self.stream {
            Some(stream) => self.output.send(stream).is_ok(),
            None => true,
        }
    }

    /// Has `watched` report when the socket has room, if there is output.
    pub(super) fn watch_for_room(&mut self, watched: &OwnedFd, data: u64) {
        let wants_room = !self.output.is_empty();
        let Some(stream) = self.stream.as_ref().filter(|_| wants_room != self.watches_room) else {
            return;
        };
        let room = if wants_room { EventFlags::OUT } else { EventFlags::empty() };
        let events = EventFlags::IN | room;
        // If this fails, the session looks again after its longest sleep.
        let _ = epoll::modify(watched, stream, epoll::EventData::new_u64(data), events);
        self.watches_room = wants_room;
    }

    /// Whether there are bytes that the socket does not report.
    pub(super) fn has_received(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::has_received)
    }

    /// Receives bytes once. Returns whether there were any.
    ///
    /// # Errors
    /// The connection has ended.
    #[inline]
    pub(super) fn receive(
        &mut self,
        lanes: &mut [Lane],
        wait: bool,
        now: impl Fn() -> Nanos,
    ) -> io::Result<bool> {
        let Some(stream) = &mut self.stream else { return Ok(false) };
        let received = match &mut self.direct {
            Some(DirectReply { lane, bytes, filled }) => {
                let lane = &mut lanes[usize::from(lane.0)];
                let target = target_of(lane, *filled);
                if target.is_empty() || target.len() > *bytes - *filled {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let piece_bytes = target.len().min(PIECE_BYTES);
                let received = stream.receive_all(&mut target[..piece_bytes], wait);
                *filled += *received.as_ref().unwrap_or(&0);
                lane.sum_arrived(*filled);
                received
            }
            None => {
                let room = &mut self.input.as_mut_bytes()[self.received..];
                let bytes = if self.reads_long { INPUT_BYTES_OF_READER } else { room.len() };
                let bytes = bytes.min(room.len());
                let received = stream.receive(&mut room[..bytes], wait);
                self.received += received.as_ref().unwrap_or(&0);
                received
            }
        };
        match received {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                self.heard_at = now();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Processes the next answer among the received bytes; `None` if no whole one is left.
    ///
    /// # Errors
    /// The bytes are no answer to a chain in flight.
    #[inline]
    pub(super) fn next_answer(
        &mut self,
        lanes: &mut [Lane],
        own_region: RegionIndex,
        now: impl Fn() -> Nanos,
    ) -> Result<Option<Answer>, RecordError> {
        if let Some(DirectReply { lane, bytes, filled }) = self.direct {
            if filled < bytes {
                return Ok(None);
            }
            (self.direct, self.reads_long) = (None, true);
            return Ok(Some((lane, Ok(0))));
        }
        loop {
            let words = &self.input[self.processed / WORD_BYTES..self.received / WORD_BYTES];
            let Some((header, rest)) = words.split_first() else {
                self.make_room(1);
                return Ok(None);
            };
            let header = Header::of(*header)?;
            let body_words = header.words as usize;
            let kind = reply_kind(header)?;
            let Some(body) = rest.get(..body_words) else {
                let begun = self.begin_long((header, kind), lanes, own_region);
                return begun.map(|()| None);
            };
            self.processed += (1 + body_words) * WORD_BYTES;
            let (ReplyKind::Executed(id) | ReplyKind::Failed(id)) = kind else {
                let (server_ns, now) = (body[0], now());
                if std::mem::take(&mut self.asks_for_clock) {
                    self.clock_bound = ClockBound::new(server_ns, now);
                } else {
                    self.clock_bound.improve(server_ns, now);
                }
                continue;
            };
            let lane = lane_of(id, lanes, own_region)?;
            if matches!(kind, ReplyKind::Failed(_)) {
                return Ok(Some((id, Err(decode_failure(header, body)))));
            }
            if body_words != record::reply_words(lane.chain.verbs()) {
                return Err(RecordError);
            }
            self.reads_long = false;
            return Ok(Some((id, Ok(take_results(lane, body)))));
        }
    }

    /// Prepares to receive the rest of a reply: where the READs go if they are long, otherwise
    /// behind its beginning.
    #[cold]
    fn begin_long(
        &mut self,
        (header, kind): (Header, ReplyKind),
        lanes: &mut [Lane],
        own_region: RegionIndex,
    ) -> Result<(), RecordError> {
        let body_words = header.words as usize;
        if let ReplyKind::Executed(id) = kind {
            let lane = lane_of(id, lanes, own_region)?;
            if body_words != record::reply_words(lane.chain.verbs()) {
                return Err(RecordError);
            }
            let bytes = body_words * WORD_BYTES;
            if bytes >= DIRECT_BYTES_MIN && !record::has_atomic(lane.chain.verbs()) {
                let from = self.processed + WORD_BYTES;
                let begun = &self.input.as_bytes()[from..self.received];
                let filled = fill(lane, begun);
                if filled < begun.len() {
                    return Err(RecordError);
                }
                self.direct = Some(DirectReply { lane: id, bytes, filled });
                (self.received, self.processed) = (0, 0);
                return Ok(());
            }
        }
        self.make_room(1 + body_words);
        Ok(())
    }

    /// Makes room for a record of this many words, of which a part may be there already.
    #[inline]
    fn make_room(&mut self, words: usize) {
        if self.processed == self.received {
            (self.received, self.processed) = (0, 0);
        } else if self.processed + words.max(INPUT_WORDS / 2) * WORD_BYTES
            > self.input.len() * WORD_BYTES
        {
            self.input.as_mut_bytes().copy_within(self.processed..self.received, 0);
            self.received -= self.processed;
            self.processed = 0;
            if self.input.len() < words {
                self.input.resize(words.next_power_of_two(), 0);
            }
        }
    }

    /// Removes the first posted chain, with this payload.
    #[inline]
    pub(super) fn unpost(&mut self, bytes: u64) {
        self.posted.pop_front();
        self.posted_bytes -= bytes;
    }
}

/// The lane of an answer, if its chain is in flight to this region.
#[inline]
fn lane_of(
    id: LaneId,
    lanes: &mut [Lane],
    own_region: RegionIndex,
) -> Result<&mut Lane, RecordError> {
    let lane = lanes.get_mut(usize::from(id.0)).ok_or(RecordError)?;
    let is_awaited = lane.chain.stage == Stage::InFlight && lane.chain.region == own_region;
    if is_awaited { Ok(lane) } else { Err(RecordError) }
}

/// Appends a payload of a lane's chain, and zeros to the end of its last word.
#[inline]
fn push(output: &mut Output, stream: Option<&Stream>, payload: &[u8]) {
    let (words, tail) = payload.as_chunks();
    let may_be_direct = |stream: &Stream| output.has_room_for_direct(stream);
    if payload.len() >= DIRECT_BYTES_MIN && stream.is_some_and(may_be_direct) {
        // SAFETY: the buffer of a lane changes and moves only while no chain of the lane is in
        // flight (`TcpFabric::buffer_mut`, `TcpFabric::reserve`). Memory of the caller stays as
        // long (`TcpFabric::lend`). The output is cleared before a chain in flight is given up
        // (`TcpFabric::break_link`).
        unsafe { output.push_direct(payload.as_ptr(), size_of_val(words)) };
    } else {
        output.words.extend(words.iter().map(|word| u64::from_ne_bytes(*word)));
    }
    if !tail.is_empty() {
        let mut word = [0; WORD_BYTES];
        word[..tail.len()].copy_from_slice(tail);
        output.words.push(u64::from_ne_bytes(word));
    }
}

/// Where a READ puts its bytes: buffer, offset and length.
#[inline]
fn target_of_read(verb: Verb) -> Option<(Buffer, u32, u32)> {
    match verb {
        Verb::Read { into, bytes, .. } => Some((into, 0, bytes)),
        Verb::ReadPart { into, at, bytes, .. } => Some((into, at, bytes)),
        _ => None,
    }
}

/// The memory for these bytes of a READ; none if lent memory is shorter.
#[inline]
fn read_memory<'m>(
    buffers: &'m mut Buffers,
    lent: &'m mut Lent,
    (into, at, bytes): (Buffer, u32, u32),
) -> &'m mut [u8] {
    match into {
        Buffer::Lent => lent.part_mut(at, bytes),
        own => {
            let end = at + bytes;
            &mut words_mut(&mut buffers[own as usize], end).as_mut_bytes()
                [at as usize..end as usize]
        }
    }
}

/// Copies the first bytes of the results of READs to where they belong. Returns how many there was
/// memory for.
fn fill(lane: &mut Lane, begun: &[u8]) -> usize {
    let mut filled = 0;
    while filled < begun.len() {
        let target = target_of(lane, filled);
        let here = target.len().min(begun.len() - filled);
        if here == 0 {
            break;
        }
        target[..here].copy_from_slice(&begun[filled..][..here]);
        filled += here;
    }
    filled
}

/// The rest of the READ, among those of the lane's chain, to which the byte with this number goes.
fn target_of(lane: &mut Lane, mut number: usize) -> &mut [u8] {
    let Lane { chain, lent, arrived, buffers, .. } = lane;
    if let Some(Verb::ReadSplit { into, head_bytes, bytes, .. }) = chain.verbs().first() {
        let (head_bytes, split_bytes) = (*head_bytes as usize, arrived.split_bytes);
        let own = *bytes - split_bytes as u32;
        return match number.checked_sub(head_bytes) {
            Some(at) if at < split_bytes => &mut lent.content_mut()[at..split_bytes],
            at => {
                let (at, end) = match at {
                    Some(at) => (head_bytes + at - split_bytes, own),
                    None => (number, head_bytes as u32),
                };
                let own = read_memory(buffers, lent, (*into, 0, end));
                own.get_mut(at..).unwrap_or_default()
            }
        };
    }
    for verb in chain.verbs() {
        let Some(target) = target_of_read(*verb) else { continue };
        match number.checked_sub(target.2 as usize) {
            Some(later) => number = later,
            None => {
                return read_memory(buffers, lent, target).get_mut(number..).unwrap_or_default();
            }
        }
    }
    &mut []
}

/// Copies the results of READs into the lane's buffers. Returns the word that the last atomic verb
/// found.
#[inline]
fn take_results(lane: &mut Lane, body: &[u64]) -> u64 {
    if let Some(Verb::ReadSplit { .. }) = lane.chain.verbs().first() {
        fill(lane, body.as_bytes());
        return 0;
    }
    let Lane { chain, lent, buffers, .. } = lane;
    let chain = chain.verbs();
    let (found, mut rest) = match body.split_first() {
        Some((found, rest)) if record::has_atomic(chain) => (*found, rest),
        _ => (0, body),
    };
    for verb in chain {
        let Some(target) = target_of_read(*verb) else { continue };
        let words = target.2 as usize / WORD_BYTES;
        // The caller has compared the lengths.
        let (payload, later) = rest.split_at(words.min(rest.len()));
        let target = read_memory(buffers, lent, target);
        if target.len() == size_of_val(payload) {
            target.copy_from_slice(payload.as_bytes());
        }
        rest = later;
    }
    found
}
