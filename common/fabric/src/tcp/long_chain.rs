//! A chain with a long payload, which is executed in parts: it takes neither memory for its
//! payloads nor the thread for all of its time.
//!
//! 1. The payloads of its WRITEs go to the region as they arrive. The system copies those of long
//!    blocks there.
//! 2. Then its other verbs are executed, and the reply begins.
//! 3. The READs at its end are executed while the socket takes what they bring. The system copies
//!    from the region.
//!
//! The system may copy a payload in any order, because a checksum covers it. The first words of a
//! block, which have its header, are stored and loaded word by word.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{Ordering, fence};

use zerocopy::IntoBytes;

use super::output::{COPIED_WORDS, DIRECT_BYTES_MIN, Output};
use super::record::{
    PendingReply, Request, WORD_BYTES, changes, encode_clock, has_atomic, reply_words,
};
use super::session::{OUTPUT_BYTES_MAX, RequestMemory, Tools, run};
use super::stream::Stream;
use crate::lane_state::NO_VERB;
use crate::memory::Executor;
use crate::{CHAIN_VERBS_MAX, ChainError, Nanos, Verb};

/// The bytes of a payload that are copied at once: between two checks of lease and clock, and
/// between two looks at what is left of the session's turn.
const PART_BYTES: usize = 64 << 10;

/// What stops a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Nothing: it is complete.
    Complete,
    /// More of its payload has to arrive.
    Arrival,
    /// Its replies so far have to be sent.
    Room,
    /// The session's turn is over.
    Turn,
}

/// A long chain that has begun.
pub(super) struct LongChain {
    lane: u16,
    /// First WRITEs, then other verbs, then the READs that are executed while they are sent. By the
    /// contract of [`crate::Fabric`] a WRITE may be executed before an earlier READ or swap.
    verbs: [Verb; CHAIN_VERBS_MAX],
    writes: usize,
    reads_from: usize,
    count: usize,
    deadline: Nanos,
    /// The verb that is being executed, and how many bytes of its payload are copied.
    next: usize,
    copied: usize,
    /// After an error the rest of the payload is received and dropped.
    result: Result<(), ChainError>,
    replies: bool,
    /// A payload is sent from the region. What follows is READ after it.
    sends_direct: bool,
}

impl LongChain {
    /// Whether the chain of this request is one.
    #[inline]
    pub(super) fn is_long(request: &Request<'_>) -> bool {
        request.payload_bytes >= DIRECT_BYTES_MIN
    }

    /// Begins to execute a request, of whose payload this many bytes have arrived. A chain that is
    /// not allowed, or has a payload outside of the region, is not executed at all.
    pub(super) fn begin(
        executor: &Executor,
        lane: u16,
        request: &Request<'_>,
        payload: &[u64],
        payload_bytes: usize,
    ) -> Self {
        let chain = request.chain();
        let last_write = chain.iter().rposition(|verb| matches!(verb, Verb::Write { .. }));
        let is_first = |at: usize, verb: &Verb| {
            last_write.is_some_and(|last| at <= last) && verb.changes_region() && !verb.is_atomic()
        };
        let (mut verbs, mut count) = ([NO_VERB; CHAIN_VERBS_MAX], 0);
        let mut writes = 0;
        for writing in [true, false] {
            for (at, verb) in chain.iter().enumerate() {
                if is_first(at, verb) == writing {
                    verbs[count] = *verb;
                    count += 1;
                }
            }
            if writing {
                writes = count;
            }
        }
        let is_read = |verb: &Verb| matches!(verb, Verb::Read { .. });
        let reads = verbs[writes..count].iter().rev().take_while(|verb| is_read(verb)).count();
        let is_short = |verb: &&Verb| payload_bytes_of(**verb) < DIRECT_BYTES_MIN;
        let short = verbs[count - reads..count].iter().take_while(is_short).count();
        let mut begun = Self {
            lane,
            verbs,
            writes,
            reads_from: count - reads + short,
            count,
            deadline: request.deadline,
            next: 0,
            copied: 0,
            result: check(executor, chain),
            replies: false,
            sends_direct: false,
        };
        begun.take_arrived(executor, payload, payload_bytes);
        begun
    }

    /// Whether a part of its payload has to arrive.
    pub(super) fn awaits_payload(&self) -> bool {
        self.next < self.writes
    }

    /// Takes the payload that arrived with the request.
    fn take_arrived(&mut self, executor: &Executor, mut payload: &[u64], mut bytes: usize) {
        while let Some(wanted) = self.next_payload(executor)
            && bytes > 0
        {
            // The payloads of all WRITEs are whole words.
            let now = wanted.min(bytes);
            self.store(executor, &payload[..now.div_ceil(WORD_BYTES)], now);
            payload = &payload[now / WORD_BYTES..];
            bytes -= now;
        }
    }

    /// The number of bytes that the payload of the next WRITE lacks; `None` after the last one.
    /// Executes shorter WRITEs before it.
    fn next_payload(&mut self, executor: &Executor) -> Option<usize> {
        while self.next < self.writes {
            match self.verbs[self.next] {
                Verb::Write { bytes, .. } if self.copied < bytes as usize => {
                    return Some(bytes as usize - self.copied);
                }
                Verb::Write { .. } => {}
                verb => {
                    let memory = &mut RequestMemory { payload: &[], reply: &mut Vec::new() };
                    let execute = |()| executor.execute(memory, &[verb], self.deadline).map(drop);
                    self.result = self.result.and_then(execute);
                }
            }
            (self.next, self.copied) = (self.next + 1, 0);
        }
        None
    }

    /// WRITEs the next bytes of a payload, which these words begin with, word by word. In the
    /// region zeros follow a part of a word, until the rest of it arrives.
    fn store(&mut self, executor: &Executor, words: &[u64], bytes: usize) {
        let begun = self.copied % WORD_BYTES;
        if let Verb::Write { remote, .. } = self.verbs[self.next]
            && self.result.is_ok()
        {
            let at = remote + (self.copied - begun) as u64;
            let (whole, rest) = words.split_at(bytes / WORD_BYTES);
            self.result = executor.write_words(at, whole, self.deadline);
            if let Some(word) = rest.first()
                && self.result.is_ok()
            {
                let word = word & ((1 << (8 * (bytes % WORD_BYTES))) - 1);
                let at = at + size_of_val(whole) as u64;
                self.result = executor.write_words(at, &[word], self.deadline);
            }
        }
        self.copied += bytes - begun;
    }

    /// Receives as much of the payload as has arrived.
    ///
    /// # Errors
    /// The connection has ended.
    pub(super) fn receive(
        &mut self,
        executor: &Executor,
        stream: &mut Stream,
        buffer: &mut [u64],
        tools: &mut Tools,
    ) -> io::Result<Stop> {
        while let Some(missing) = self.next_payload(executor) {
            if tools.left == 0 {
                return Ok(Stop::Turn);
            }
            let wanted = missing.min(PART_BYTES);
            match self.receive_part(executor, stream, buffer, wanted) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((bytes, wanted)) => {
                    tools.spend(bytes);
                    if bytes < wanted && !stream.has_received() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(if self.next_payload(executor).is_some() { Stop::Arrival } else { Stop::Complete })
    }

    /// Receives a part of a payload. Returns its length, and how long it could have been.
    fn receive_part(
        &mut self,
        executor: &Executor,
        stream: &mut Stream,
        buffer: &mut [u64],
        wanted: usize,
    ) -> io::Result<(usize, usize)> {
        if self.result.is_err() {
            let wanted = wanted.min(size_of_val(buffer));
            let bytes = stream.receive(&mut buffer.as_mut_bytes()[..wanted], false)?;
            self.copied += bytes;
            return Ok((bytes, wanted));
        }
        let Verb::Write { remote, bytes, .. } = self.verbs[self.next] else { return Ok((0, 0)) };
        let begun = self.copied % WORD_BYTES;
        let copied_bytes = COPIED_WORDS * WORD_BYTES;
        let is_long = bytes as usize >= DIRECT_BYTES_MIN;
        if is_long && !stream.is_encrypted() && self.copied >= copied_bytes {
            let words = bytes as usize / WORD_BYTES;
            let bytes = match executor.address_to_write(remote, words, self.deadline) {
                Ok(start) => {
                    receive_at(stream, start.cast::<u8>().wrapping_add(self.copied), wanted)?
                }
                Err(error) => {
                    self.result = Err(error);
                    return self.receive_part(executor, stream, buffer, wanted);
                }
            };
            self.copied += bytes;
            return Ok((bytes, wanted));
        }
        let wanted = match stream.is_encrypted() || !is_long {
            true => wanted.min(size_of_val(buffer) - WORD_BYTES),
            false => wanted.min(copied_bytes - self.copied),
        };
        if begun > 0 {
            // The bytes of this word that have arrived.
            buffer[0] = executor.region.load(remote + (self.copied - begun) as u64).unwrap_or(0);
        }
        let received = stream.receive(&mut buffer.as_mut_bytes()[begun..begun + wanted], false)?;
        let arrived = begun + received;
        self.store(executor, &buffer[..arrived.div_ceil(WORD_BYTES)], arrived);
        Ok((received, wanted))
    }

    /// Executes the verbs behind the payload, and appends the reply.
    pub(super) fn reply(
        &mut self,
        executor: &Executor,
        stream: &Stream,
        output: &mut Output,
        tools: &mut Tools,
    ) -> Stop {
        if !std::mem::replace(&mut self.replies, true) {
            self.begin_reply(executor, output, tools);
        }
        while self.next < self.count {
            let Verb::Read { remote, bytes, .. } = self.verbs[self.next] else { break };
            if self.copied == bytes as usize {
                (self.next, self.copied) = (self.next + 1, 0);
                continue;
            }
            let waits = self.sends_direct && output.has_direct();
            if waits || output.bytes() >= OUTPUT_BYTES_MAX {
                return Stop::Room;
            }
            if tools.left == 0 {
                return Stop::Turn;
            }
            let is_direct = bytes as usize >= DIRECT_BYTES_MIN && !stream.is_encrypted();
            if is_direct && !output.has_room_for_direct(stream) {
                return Stop::Room;
            }
            if is_direct && self.copied > 0 {
                self.send_direct(executor, output, remote, bytes as usize);
                continue;
            }
            let part = if is_direct { COPIED_WORDS } else { PART_BYTES / WORD_BYTES };
            let left = (bytes as usize - self.copied) / WORD_BYTES;
            self.copy(executor, output, remote, part.min(left));
            tools.spend(part.min(left) * WORD_BYTES);
        }
        Stop::Complete
    }

    fn begin_reply(&mut self, executor: &Executor, output: &mut Output, tools: &mut Tools) {
        let device = &mut tools.device;
        let (chain, words) = (&self.verbs[..self.count], &mut output.words);
        if words.is_empty() {
            encode_clock(executor.clock.now(), words);
        }
        let reply = PendingReply::begin(chain, words);
        let (others, reads) = chain[self.writes..].split_at(self.reads_from - self.writes);
        let memory = RequestMemory { payload: &[], reply: words };
        let result =
            self.result.and_then(|()| run(executor, memory, others, self.deadline, device));
        let later_words = if result.is_ok() { reply_words(reads) } else { 0 };
        reply.finish(self.lane, chain, &result, later_words, words);
        self.next = if result.is_ok() { self.reads_from } else { self.count };
        if has_atomic(others) {
            // The READs behind return no word from before the swap (I8).
            fence(Ordering::SeqCst);
        }
        tools.spend(reply_words(others) * WORD_BYTES);
    }

    /// READs the next words, word by word.
    fn copy(&mut self, executor: &Executor, output: &mut Output, remote: u64, count: usize) {
        let words = &mut output.words;
        let at = words.len();
        words.resize(at + count, 0);
        // The range was checked before the reply began.
        let _ = executor.region.read(remote + self.copied as u64, &mut words[at..]);
        self.copied += count * WORD_BYTES;
    }

    /// Has the rest of a READ sent from the region.
    fn send_direct(&mut self, executor: &Executor, output: &mut Output, remote: u64, bytes: usize) {
        let rest = bytes - self.copied;
        let start = executor.region.address_of(remote + self.copied as u64, rest / WORD_BYTES);
        (self.copied, self.sends_direct) = (bytes, true);
        // The range was checked before the reply began.
        let Ok(start) = start else { return };
        // SAFETY: the range is inside the region, which the session holds until its output is
        // dropped.
        unsafe { output.push_direct(start.cast(), rest) };
    }
}

fn payload_bytes_of(verb: Verb) -> usize {
    match verb {
        Verb::Read { bytes, .. } | Verb::Write { bytes, .. } => bytes as usize,
        _ => 0,
    }
}

/// Checks what can be checked before anything of a chain is executed.
fn check(executor: &Executor, chain: &[Verb]) -> Result<(), ChainError> {
    executor.check_lease()?;
    if changes(chain) && !executor.region.is_writable() {
        return Err(ChainError::Denied);
    }
    chain.iter().try_for_each(|verb| match *verb {
        Verb::Read { remote, .. } | Verb::Write { remote, .. } => {
            executor.region.check_range(remote, payload_bytes_of(*verb) / WORD_BYTES)
        }
        _ => Ok(()),
    })
}

/// Receives up to `bytes` bytes into the region. Never waits.
fn receive_at(stream: &Stream, target: *mut u8, bytes: usize) -> io::Result<usize> {
    let socket = stream.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open. The target is in the region, which the caller's executor
    // holds. This process accesses it only as atomics, and expects changes at any time as by
    // another process. The kernel is one.
    let received = unsafe { libc::recv(socket, target.cast(), bytes, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}
