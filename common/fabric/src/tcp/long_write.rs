//! A long WRITE whose payload arrives in the region, without a copy in this process.
//!
//! The beginning of the request arrives with others in a buffer. It has the chain, and the first
//! words of the payload, with the block's header, which are stored word by word. A checksum covers
//! the rest, so the system may copy that in any order. The other verbs of the chain are executed
//! when the payload is complete.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::output::{COPIED_WORDS, DIRECT_BYTES_MIN};
use super::record::{Header, WORD_BYTES, decode_begun_request};
use super::stream::Stream;
use crate::lane_chain::NO_VERB;
use crate::shm::Executor;
use crate::{CHAIN_VERBS_MAX, ChainError, Nanos, Verb};

/// The bytes that one system call copies into the region, between two checks of lease and clock.
const PART_BYTES: usize = 64 << 10;

/// A WRITE whose payload has begun to arrive.
pub(super) struct LongWrite {
    pub(super) header: Header,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    pub(super) deadline: Nanos,
    remote: u64,
    bytes: usize,
    /// How many bytes of the payload have arrived.
    filled: usize,
    /// After an error the rest of the payload is received and dropped.
    result: Result<(), ChainError>,
}

impl LongWrite {
    /// Begins to execute the request at the front of `words`, of which `bytes` bytes have arrived.
    /// `None` if it has to arrive as a whole: its first verb is no long WRITE, there is another
    /// WRITE, it is complete already, or it is malformed.
    pub(super) fn begin(executor: &Executor, words: &[u64], bytes: usize) -> Option<Self> {
        let (first, rest) = words.split_first()?;
        let header = Header::of(*first).ok()?;
        if bytes >= header.request_words().ok()? * WORD_BYTES {
            return None;
        }
        let whole_words = (bytes / WORD_BYTES).checked_sub(1)?;
        let request = decode_begun_request(header, &rest[..whole_words]).ok()?;
        let [Verb::Write { remote, bytes: payload_bytes, .. }, others @ ..] = request.chain()
        else {
            return None;
        };
        let is_other_write = |verb: &Verb| matches!(verb, Verb::Write { .. });
        let (remote, payload_bytes) = (*remote, *payload_bytes as usize);
        if payload_bytes < DIRECT_BYTES_MIN
            || request.payload.len() < COPIED_WORDS
            || others.iter().any(is_other_write)
        {
            return None;
        }
        let mut write = Self {
            header,
            chain: [NO_VERB; CHAIN_VERBS_MAX],
            verbs: request.chain().len(),
            deadline: request.deadline,
            remote,
            bytes: payload_bytes,
            filled: size_of_val(request.payload),
            result: Ok(()),
        };
        write.chain[..write.verbs].copy_from_slice(request.chain());
        write.result = executor
            .address_to_write(remote, payload_bytes / WORD_BYTES, write.deadline)
            .and_then(|_| executor.write_words(remote, request.payload, write.deadline));
        let begun_bytes = bytes % WORD_BYTES;
        if begun_bytes > 0 && write.result.is_ok() {
            // The rest of this word arrives behind it.
            let word = rest[whole_words] & ((1 << (8 * begun_bytes)) - 1);
            let at = remote + write.filled as u64;
            write.result = executor.write_words(at, &[word], write.deadline);
        }
        write.filled += begun_bytes;
        Some(write)
    }

    /// The chain.
    pub(super) fn chain(&self) -> &[Verb] {
        &self.chain[..self.verbs]
    }

    /// The result of the WRITE, after its payload has arrived.
    pub(super) fn result(&self) -> Result<(), ChainError> {
        self.result
    }

    /// Receives as much of the payload as has arrived. Returns whether it is complete. After an
    /// error the bytes go to `dropped`.
    ///
    /// # Errors
    /// The connection has ended.
    pub(super) fn receive(
        &mut self,
        executor: &Executor,
        stream: &mut Stream,
        dropped: &mut [u8],
    ) -> io::Result<bool> {
        while self.filled < self.bytes {
            let wanted = (self.bytes - self.filled).min(PART_BYTES);
            let received = match self.target(executor) {
                Ok(target) => receive_at(stream, target.cast(), wanted),
                Err(error) => {
                    self.result = Err(error);
                    let wanted = wanted.min(dropped.len());
                    stream.receive(&mut dropped[..wanted], false)
                }
            };
            match received {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    self.filled += bytes;
                    if bytes < wanted {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.filled == self.bytes)
    }

    /// The address of the next bytes, if the client may still write there.
    fn target(&self, executor: &Executor) -> Result<*mut u8, ChainError> {
        self.result?;
        let start =
            executor.address_to_write(self.remote, self.bytes / WORD_BYTES, self.deadline)?;
        Ok(start.cast::<u8>().wrapping_add(self.filled))
    }
}

/// Receives up to `bytes` bytes into the region. Never waits.
fn receive_at(stream: &Stream, target: *mut libc::c_void, bytes: usize) -> io::Result<usize> {
    let socket = stream.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open. The target is in the region, which the caller's executor
    // holds. This process accesses it only as atomics, and expects changes at any time as by
    // another process. The kernel is one.
    let received = unsafe { libc::recv(socket, target, bytes, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}
