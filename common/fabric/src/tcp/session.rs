//! The connection of a session at the server: requests, their execution and replies.
//!
//! For a session with requests a thread receives once, executes all whole chains, and sends all
//! replies at once. A session that does not read its replies gets none executed meanwhile, so its
//! bytes in this process are bounded. The payload of a long WRITE arrives in the region, and that
//! of a long READ is sent from there.

use std::io;

use zerocopy::IntoBytes;

use super::device_atomics::{self, DeviceAtomics};
use super::executors::INPUT_WORDS;
use super::long_write::LongWrite;
use super::output::{COPIED_WORDS, DIRECT_BYTES_MIN, Output};
use super::record::{
    Header, PendingReply, RecordError, Request, WORD_BYTES, decode_request, encode_clock,
    has_atomic,
};
use super::stream::Stream;
use crate::rdma::ConnectionId;
use crate::shm::{ChainMemory, Executor};
use crate::{Buffer, ChainError, Nanos, Verb};

/// The bytes that one system call receives after a long WRITE. Another one may follow, of which no
/// more than its chain and its beginning should arrive in the buffer.
const INPUT_WORDS_OF_WRITER: usize = (4 << 10) / WORD_BYTES;
/// The least room for a record that has begun and is no shorter.
const ROOM_WORDS_MIN: usize = 4096 / WORD_BYTES;
/// The bytes of replies above which no further chain is executed before they are sent.
const OUTPUT_BYTES_MAX: usize = 256 << 10;

/// The device that executes the atomic verbs of a thread's sessions; `None` if the thread does it.
pub(super) type Device = Option<Box<dyn DeviceAtomics>>;

/// A session's connection.
pub(super) struct Session {
    pub(super) id: ConnectionId,
    pub(super) stream: Stream,
    pub(super) executor: Executor,
    /// Bytes that were received and not executed: a part of a request, or requests whose replies
    /// would be too long.
    input: Vec<u64>,
    received: usize,
    /// A WRITE whose payload arrives in the region. `input` is empty meanwhile.
    long_write: Option<LongWrite>,
    /// Whether the last request was a long WRITE.
    writes_long: bool,
    /// Replies for which the socket had no room.
    pub(super) output: Output,
    pub(super) watches_room: bool,
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
struct RequestMemory<'m> {
    payload: &'m [u64],
    reply: &'m mut Vec<u64>,
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

/// Executes a request, and appends its reply.
#[inline]
fn execute(
    (stream, executor): (&Stream, &Executor),
    header: Header,
    request: &Request<'_>,
    output: &mut Output,
    device: &mut Device,
) {
    let chain = request.chain();
    if chain.is_empty() {
        // The clock record before all replies answers it.
        return;
    }
    let reply = PendingReply::begin(chain, &mut output.words);
    if let [Verb::Read { remote, bytes, .. }] = *chain
        && bytes as usize >= DIRECT_BYTES_MIN
        && output.has_room_for_direct(stream)
    {
        let result = read_long(executor, remote, bytes, output);
        let (words, result) = (result.unwrap_or(0), result.map(|_| 0));
        return reply.finish(header.lane, chain, &result, words, &mut output.words);
    }
    if chain.len() > 1 {
        executor.prefetch_chain(chain);
    }
    let memory = RequestMemory { payload: request.payload, reply: &mut output.words };
    let result = run(executor, memory, chain, request.deadline, device);
    reply.finish(header.lane, chain, &result, 0, &mut output.words);
}

/// Executes a chain, with its atomic verbs through the device, if there is one.
#[inline]
fn run(
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

/// READs a block: copies its header, and leaves the rest to be sent from the region. A checksum
/// covers the rest, so it may be read in any order. Returns the length of the rest, in words.
#[cold]
fn read_long(
    executor: &Executor,
    remote: u64,
    bytes: u32,
    output: &mut Output,
) -> Result<usize, ChainError> {
    executor.check_lease()?;
    let words = bytes as usize / WORD_BYTES;
    let range = executor.region.address_of(remote, words)?;
    let mut copied = [0; COPIED_WORDS];
    executor.region.read(remote, &mut copied)?;
    output.words.extend_from_slice(&copied);
    let rest = words - COPIED_WORDS;
    let start = range.wrapping_add(COPIED_WORDS).cast();
    // SAFETY: the range was checked, and the session holds the region until its output is dropped.
    unsafe { output.push_direct(start, rest * WORD_BYTES) };
    Ok(rest)
}

impl Session {
    pub(super) fn new(id: ConnectionId, stream: Stream, executor: Executor) -> Self {
        let (input, output) = (Vec::new(), Output::default());
        Self {
            id,
            stream,
            executor,
            input,
            received: 0,
            long_write: None,
            writes_long: false,
            output,
            watches_room: false,
        }
    }

    /// The memory that the session has for requests.
    #[cfg(test)]
    pub(super) fn input_bytes(&self) -> usize {
        self.input.capacity() * WORD_BYTES
    }

    /// Serves the session after an event. `buffer`, `output` and `device` are the thread's.
    pub(super) fn serve(
        &mut self,
        buffer: &mut [u64],
        output: &mut Output,
        device: &mut Device,
    ) -> Result<(), Broken> {
        if !self.output.is_empty() {
            if !self.output.send(&mut self.stream)? {
                return Ok(());
            }
            // Requests may have waited for this. Afterwards an event reports further bytes.
            if self.received > 0 {
                return self.execute_input(output, device);
            }
            return Ok(());
        }
        if let Some(write) = &mut self.long_write {
            let dropped = buffer.as_mut_bytes();
            if !write.receive(&self.executor, &mut self.stream, dropped)? {
                return Ok(());
            }
            self.finish_long_write(output, device);
            return self.reply(output);
        }
        if self.received > 0 {
            self.make_room()?;
            let target = &mut self.input.as_mut_bytes()[self.received..];
            match self.stream.receive(target, false) {
                Ok(0) => return Err(Broken),
                Ok(bytes) => self.received += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            return self.execute_input(output, device);
        }
        let room = if self.writes_long { INPUT_WORDS_OF_WRITER } else { INPUT_WORDS };
        let received = match self.stream.receive(buffer[..room].as_mut_bytes(), false) {
            Ok(0) => return Err(Broken),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let executed = self.execute_all(&buffer[..received / WORD_BYTES], output, device)?;
        let left = received - executed * WORD_BYTES;
        self.writes_long &= executed == 0;
        if left > 0 && !self.begin_long_write(&buffer[executed..], left) {
            // Room for the rest of a record that has begun.
            let words = left.div_ceil(WORD_BYTES);
            if self.input.len() < words {
                self.input.resize(words.next_power_of_two(), 0);
            }
            self.input[..words].copy_from_slice(&buffer[executed..executed + words]);
            self.received = left;
        }
        self.reply(output)
    }

    /// Executes the requests in the session's own input.
    pub(super) fn execute_input(
        &mut self,
        output: &mut Output,
        device: &mut Device,
    ) -> Result<(), Broken> {
        let input = std::mem::take(&mut self.input);
        let executed = self.execute_all(&input[..self.received / WORD_BYTES], output, device);
        let begun = executed.as_ref().is_ok_and(|executed| {
            self.begin_long_write(&input[*executed..], self.received - executed * WORD_BYTES)
        });
        self.input = input;
        let executed_bytes = executed? * WORD_BYTES;
        if begun {
            self.received = 0;
        } else {
            self.input.as_mut_bytes().copy_within(executed_bytes..self.received, 0);
            self.received -= executed_bytes;
        }
        self.reply(output)
    }

    /// Begins a long WRITE, if one is at the front of these words, of which `bytes` bytes have
    /// arrived.
    fn begin_long_write(&mut self, words: &[u64], bytes: usize) -> bool {
        if !self.stream.is_encrypted() {
            self.long_write = LongWrite::begin(&self.executor, words, bytes);
            self.writes_long |= self.long_write.is_some();
        }
        self.long_write.is_some()
    }

    /// Executes the other verbs of a long WRITE whose payload has arrived, and appends the reply.
    fn finish_long_write(&mut self, output: &mut Output, device: &mut Device) {
        let Some(write) = self.long_write.take() else { return };
        encode_clock(self.executor.clock.now(), &mut output.words);
        let chain = write.chain();
        let reply = PendingReply::begin(chain, &mut output.words);
        let memory = RequestMemory { payload: &[], reply: &mut output.words };
        let result = write
            .result()
            .and_then(|()| run(&self.executor, memory, &chain[1..], write.deadline, device));
        reply.finish(write.header.lane, chain, &result, 0, &mut output.words);
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

    /// Executes the whole requests among these words, until the replies are long enough. Returns
    /// the number of words that they had.
    fn execute_all(
        &self,
        words: &[u64],
        output: &mut Output,
        device: &mut Device,
    ) -> Result<usize, RecordError> {
        encode_clock(self.executor.clock.now(), &mut output.words);
        let mut executed = 0;
        while let Some((first, rest)) = words[executed..].split_first()
            && output.bytes() < OUTPUT_BYTES_MAX
        {
            let header = Header::of(*first)?;
            let record_words = header.request_words()?;
            let Some(body) = rest.get(..record_words - 1) else { break };
            let request = decode_request(header, body)?;
            execute((&self.stream, &self.executor), header, &request, output, device);
            executed += record_words;
        }
        if executed == 0 {
            output.clear();
        }
        Ok(executed)
    }

    /// Sends the replies. Keeps those for which the socket has no room.
    fn reply(&mut self, output: &mut Output) -> Result<(), Broken> {
        if !output.is_empty() && !output.send(&mut self.stream)? {
            std::mem::swap(output, &mut self.output);
        }
        Ok(())
    }

    /// Whether requests wait for nothing but their turn.
    pub(super) fn has_whole_request(&self) -> bool {
        let words = &self.input[..self.received / WORD_BYTES];
        words.first().is_some_and(|first| {
            let length = Header::of(*first).and_then(Header::request_words);
            length.is_ok_and(|length| length <= words.len())
        })
    }
}
