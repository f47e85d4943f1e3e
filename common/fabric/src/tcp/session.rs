//! The connection of a session at the server: requests, their execution and replies.
//!
//! A thread serves a session in turns: it receives once, executes whole chains, and sends all
//! replies at once. A turn ends with the requests, or when the session has touched enough bytes. A
//! session that does not read its replies gets no chain executed meanwhile, so its bytes in this
//! process are bounded. A chain with long payloads is executed in parts (`long_chain`).

use std::io;

use zerocopy::IntoBytes;

use super::device_atomics::{self, DeviceAtomics};
use super::executors::INPUT_WORDS;
use super::long_chain::{LongChain, Stop};
use super::output::{Output, Sent};
use super::record::{
    Header, PendingReply, RecordError, Request, WORD_BYTES, decode_begun_request, decode_request,
    encode_clock, has_atomic,
};
use super::stream::Stream;
use crate::memory::{ChainMemory, Executor};
use crate::rdma::ConnectionId;
use crate::{Buffer, ChainError, Nanos, Verb};

/// The bytes that a session may touch in its turn: those that its verbs READ and WRITE, whatever
/// they answer. The last chain of a turn may exceed it by a part.
pub(super) const TURN_BYTES: usize = 256 << 10;
/// The bytes that a session may send in its turn.
const SENT_BYTES_MAX: usize = 512 << 10;
/// What a verb counts for in a turn beside its payload.
const VERB_BYTES: usize = 64;
/// What a chain counts for whose atomic verbs a device executes.
const DEVICE_BYTES: usize = 16 << 10;
/// The bytes that one system call receives after a long WRITE. Another one may follow, of which no
/// more than its chain and its beginning should arrive in the buffer.
const INPUT_WORDS_OF_WRITER: usize = (4 << 10) / WORD_BYTES;
/// The least room for a record that has begun and is no shorter.
const ROOM_WORDS_MIN: usize = 4096 / WORD_BYTES;
/// The bytes of replies above which no further chain is executed before they are sent.
pub(super) const OUTPUT_BYTES_MAX: usize = 256 << 10;
/// A longer buffer of words does not stay with a thread.
const SPARE_WORDS_MAX: usize = (1 << 20) / WORD_BYTES;

/// The device that executes the atomic verbs of a thread's sessions; `None` if the thread does it.
pub(super) type Device = Option<Box<dyn DeviceAtomics>>;

/// What a thread lends to the session whose turn it is.
#[derive(Default)]
pub(super) struct Tools {
    pub(super) device: Device,
    /// How many bytes the session may still touch in this turn.
    pub(super) left: usize,
    /// How many bytes it may still send.
    sent_left: usize,
    /// Memory for replies and for requests, so that a session without any keeps none.
    spare_output: Output,
    spare_input: Vec<u64>,
    spare_encrypted: Vec<u8>,
}

impl Tools {
    pub(super) fn new(device: Device) -> Self {
        Self { device, ..Self::default() }
    }

    /// How many bytes the last session has touched and sent in its turn.
    pub(super) fn used(&self) -> usize {
        TURN_BYTES - self.left + SENT_BYTES_MAX - self.sent_left
    }

    /// Counts bytes that the session has touched.
    #[inline]
    pub(super) fn spend(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// A session's connection.
pub(super) struct Session {
    pub(super) id: ConnectionId,
    pub(super) stream: Stream,
    pub(super) executor: Executor,
    /// Bytes that were received and not executed: a part of a request, or requests that wait for
    /// another turn.
    input: Vec<u64>,
    received: usize,
    /// A chain that is being executed.
    long_chain: Option<LongChain>,
    /// Whether the last request was a long WRITE.
    writes_long: bool,
    /// Replies for which the socket had no room.
    pub(super) output: Output,
    pub(super) watches_room: bool,
    /// Whether the session waits for its turn.
    pub(super) is_queued: bool,
    /// Whether the client has ended its direction.
    pub(super) has_ended: bool,
    /// The bytes that the thread has noted as kept by this session.
    pub(super) noted_bytes: usize,
}

/// A connection has to end.
pub(super) struct Broken;

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl From<RecordError> for Broken {
    fn from(_: RecordError) -> Self {
        Self
    }
}

/// The payloads of a request, and the reply, as the memory of a chain.
pub(super) struct RequestMemory<'m> {
    pub(super) payload: &'m [u64],
    pub(super) reply: &'m mut Vec<u64>,
}

impl ChainMemory for RequestMemory<'_> {
    #[inline]
    fn target(&mut self, _: Buffer, bytes: u32) -> &mut [u64] {
        let at = self.reply.len();
        self.reply.resize(at + bytes as usize / WORD_BYTES, 0);
        &mut self.reply[at..]
    }

    #[inline]
    fn source(&mut self, _: Buffer, bytes: u32) -> &[u64] {
        // The decoder has compared the lengths.
        let words = (bytes as usize / WORD_BYTES).min(self.payload.len());
        let (source, rest) = self.payload.split_at(words);
        self.payload = rest;
        source
    }
}

/// Executes a request without long payloads, and appends its reply.
#[inline]
fn execute(
    executor: &Executor,
    header: Header,
    request: &Request<'_>,
    words: &mut Vec<u64>,
    device: &mut Device,
) {
    let chain = request.chain();
    if chain.is_empty() {
        // The clock record before all replies answers it.
        return;
    }
    let reply = PendingReply::begin(chain, words);
    if chain.len() > 1 {
        executor.prefetch_chain(chain);
    }
    let memory = RequestMemory { payload: request.payload, reply: words };
    let result = run(executor, memory, chain, request.deadline, device);
    reply.finish(header.lane, chain, &result, 0, words);
}

/// Executes a chain, with its atomic verbs through the device, if there is one.
#[inline]
pub(super) fn run(
    executor: &Executor,
    mut memory: RequestMemory<'_>,
    chain: &[Verb],
    deadline: Nanos,
    device: &mut Device,
) -> Result<u64, ChainError> {
    match device {
        Some(device) if has_atomic(chain) => {
            device_atomics::execute(&mut **device, executor, &mut memory, chain, deadline)
        }
        _ => executor.execute(&mut memory, chain, deadline),
    }
}

/// What a request counts for in a turn before its long payloads are touched.
#[inline]
fn cost(request: &Request<'_>, device: &Device) -> usize {
    let chain = request.chain();
    let mut bytes = (1 + chain.len()) * VERB_BYTES;
    if !LongChain::is_long(request) {
        bytes += request.payload_bytes;
    }
    if device.is_some() && has_atomic(chain) {
        bytes += DEVICE_BYTES;
    }
    bytes
}

impl Session {
    pub(super) fn new(id: ConnectionId, stream: Stream, executor: Executor) -> Self {
        Self {
            id,
            stream,
            executor,
            input: Vec::new(),
            received: 0,
            long_chain: None,
            writes_long: false,
            output: Output::default(),
            watches_room: false,
            is_queued: false,
            has_ended: false,
            noted_bytes: 0,
        }
    }

    /// The memory that the session keeps between its turns: requests and replies.
    pub(super) fn kept_bytes(&self) -> usize {
        let words = self.input.capacity() + self.output.words.capacity();
        words * WORD_BYTES + self.stream.kept_bytes()
    }

    /// Sends the time of the server's clock, for which the client waits before it sends anything.
    pub(super) fn greet(&mut self, tools: &mut Tools) -> Result<(), Broken> {
        std::mem::swap(&mut self.output, &mut tools.spare_output);
        encode_clock(self.executor.clock.now(), &mut self.output.words);
        self.output.send(&mut self.stream)?;
        self.give_back(tools);
        Ok(())
    }

    /// Serves the session. `buffer` and `tools` are the thread's. Returns whether there is more to
    /// do without another event.
    pub(super) fn take_turn(
        &mut self,
        buffer: &mut [u64],
        tools: &mut Tools,
    ) -> Result<bool, Broken> {
        if self.output.words.capacity() == 0 {
            std::mem::swap(&mut self.output, &mut tools.spare_output);
        }
        self.stream.borrow(&mut tools.spare_encrypted);
        (tools.left, tools.sent_left) = (TURN_BYTES, SENT_BYTES_MAX);
        let has_more = self.work(buffer, tools)?;
        self.give_back(tools);
        Ok(has_more)
    }

    /// Executes and answers requests until none is left, the socket has no room, or the turn is
    /// over.
    fn work(&mut self, buffer: &mut [u64], tools: &mut Tools) -> Result<bool, Broken> {
        // After replies that waited, an event reports further bytes.
        let mut receives = self.output.is_empty();
        loop {
            match self.output.send_up_to(&mut self.stream, &mut tools.sent_left)? {
                Sent::All => {}
                Sent::NoRoom => return Ok(false),
                Sent::Limit => return Ok(true),
            }
            if tools.left == 0 {
                return Ok(self.has_work());
            }
            let is_idle = if self.long_chain.is_some() {
                self.continue_chain(buffer, tools)? == Stop::Arrival
            } else if self.has_whole_request() {
                self.execute_input(tools)?;
                false
            } else if std::mem::take(&mut receives) || self.stream.has_received() {
                !self.receive(buffer, tools)?
            } else {
                true
            };
            if is_idle && self.output.is_empty() {
                return Ok(false);
            }
        }
    }

    /// Whether requests wait for nothing but their turn, or may.
    fn has_work(&self) -> bool {
        self.long_chain.is_some() || self.has_whole_request() || self.stream.has_received()
    }

    /// Receives once, and executes what has arrived. Returns false if nothing has.
    fn receive(&mut self, buffer: &mut [u64], tools: &mut Tools) -> Result<bool, Broken> {
        let begun = self.received;
        let target = match begun {
            0 if self.writes_long => buffer[..INPUT_WORDS_OF_WRITER].as_mut_bytes(),
            0 => buffer[..INPUT_WORDS].as_mut_bytes(),
            _ => {
                self.make_room()?;
                &mut self.input.as_mut_bytes()[begun..]
            }
        };
        let received = match self.stream.receive(target, false) {
            Ok(0) => return Err(Broken),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if begun > 0 {
            self.received += received;
            self.execute_input(tools)?;
            return Ok(true);
        }
        let words = &buffer[..received.div_ceil(WORD_BYTES)];
        let executed = self.execute_all(words, received, tools)?;
        if executed < received {
            self.keep(&words[executed / WORD_BYTES..], received - executed, tools);
        }
        Ok(true)
    }

    /// Keeps requests that wait for their turn, and the beginning of one.
    fn keep(&mut self, words: &[u64], bytes: usize, tools: &mut Tools) {
        if self.input.capacity() == 0 {
            self.input = std::mem::take(&mut tools.spare_input);
        }
        if self.input.len() < words.len() {
            self.input.resize(words.len().next_power_of_two(), 0);
        }
        self.input[..words.len()].copy_from_slice(words);
        self.received = bytes;
    }

    /// Gives memory back to the thread that has no content any more.
    fn give_back(&mut self, tools: &mut Tools) {
        if self.output.is_empty() && self.output.words.capacity() > 0 {
            let output = std::mem::take(&mut self.output);
            if output.words.capacity() <= SPARE_WORDS_MAX {
                tools.spare_output = output;
            }
        }
        if self.received == 0 && self.input.capacity() > 0 {
            tools.spare_input = std::mem::take(&mut self.input);
        }
        self.stream.give_back(&mut tools.spare_encrypted);
    }

    /// Executes the requests in the session's own input.
    fn execute_input(&mut self, tools: &mut Tools) -> Result<(), RecordError> {
        let input = std::mem::take(&mut self.input);
        let words = &input[..self.received.div_ceil(WORD_BYTES)];
        let executed = self.execute_all(words, self.received, tools);
        self.input = input;
        let executed = executed?;
        self.input.as_mut_bytes().copy_within(executed..self.received, 0);
        self.received -= executed;
        Ok(())
    }

    /// Makes room for the rest of the first record, but at most for as much as has arrived of it:
    /// a header alone takes no memory for the record that it announces.
    fn make_room(&mut self) -> Result<(), RecordError> {
        let received_words = self.received / WORD_BYTES;
        let record_words = match received_words {
            0 => 1,
            _ => Header::of(self.input[0])?.request_words()?,
        };
        let words = record_words.min((2 * received_words).max(ROOM_WORDS_MIN));
        // More than the first record may have arrived.
        let words = words.max(received_words + 1);
        if self.input.len() < words {
            self.input.resize(words.next_power_of_two(), 0);
        }
        Ok(())
    }

    /// Executes the whole requests among these words, and begins the long one behind them, until
    /// the replies are long enough or the turn is over. Returns how many of the bytes were taken.
    fn execute_all(
        &mut self,
        words: &[u64],
        bytes: usize,
        tools: &mut Tools,
    ) -> Result<usize, RecordError> {
        encode_clock(self.executor.clock.now(), &mut self.output.words);
        let (mut at, mut has_answered) = (0, false);
        let whole_words = bytes / WORD_BYTES;
        while let Some((first, rest)) = words[at..whole_words].split_first()
            && tools.left > 0
            && self.output.bytes() < OUTPUT_BYTES_MAX
        {
            let header = Header::of(*first)?;
            let record_words = header.request_words()?;
            let Some(body) = rest.get(..record_words - 1) else {
                let begun = decode_begun_request(header, rest)?;
                let Some(request) = begun.filter(LongChain::is_long) else { break };
                let payload_at = whole_words - request.payload.len();
                let payload = (&words[payload_at..], bytes - payload_at * WORD_BYTES);
                self.begin_long(header, &request, payload, tools);
                self.writes_long = true;
                at = words.len();
                break;
            };
            let request = decode_request(header, body)?;
            at += record_words;
            (has_answered, self.writes_long) = (true, false);
            if LongChain::is_long(&request) {
                let payload = (request.payload, size_of_val(request.payload));
                self.begin_long(header, &request, payload, tools);
                if self.long_chain.is_some() {
                    break;
                }
            } else {
                tools.spend(cost(&request, &tools.device));
                let words = &mut self.output.words;
                execute(&self.executor, header, &request, words, &mut tools.device);
            }
        }
        if !has_answered {
            self.output.clear();
        }
        Ok((at * WORD_BYTES).min(bytes))
    }

    /// Begins a request with long payloads, of which these words and bytes have arrived.
    #[cold]
    fn begin_long(
        &mut self,
        header: Header,
        request: &Request<'_>,
        (payload, bytes): (&[u64], usize),
        tools: &mut Tools,
    ) {
        tools.spend(cost(request, &tools.device) + bytes);
        let Self { executor, stream, output, .. } = self;
        let mut chain = LongChain::begin(executor, header.lane, request, payload, bytes);
        if chain.awaits_payload() || chain.reply(executor, stream, output, tools) != Stop::Complete
        {
            self.long_chain = Some(chain);
        }
    }

    /// Continues the chain that is being executed.
    fn continue_chain(&mut self, buffer: &mut [u64], tools: &mut Tools) -> io::Result<Stop> {
        let Self { executor, stream, output, long_chain, .. } = self;
        let Some(chain) = long_chain else { return Ok(Stop::Complete) };
        let mut stop = chain.receive(executor, stream, buffer, tools)?;
        if stop == Stop::Complete {
            stop = chain.reply(executor, stream, output, tools);
        }
        if stop == Stop::Complete {
            *long_chain = None;
        }
        Ok(stop)
    }

    /// Whether the input begins with a whole request.
    fn has_whole_request(&self) -> bool {
        let words = &self.input[..self.received / WORD_BYTES];
        words.first().is_some_and(|first| {
            let length = Header::of(*first).and_then(Header::request_words);
            length.is_ok_and(|length| length <= words.len())
        })
    }
}
