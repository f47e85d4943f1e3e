//! The bytes that a side has yet to send.
//!
//! Long payloads are sent from where they are, without a copy in this process: at a client from a
//! lane's buffer, at a server from the region.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use zerocopy::IntoBytes;

use super::record::WORD_BYTES;
use super::stream::Stream;

/// The shortest payload that is sent from where it is.
pub const DIRECT_BYTES_MIN: usize = 16 << 10;
/// The first words of a long block, which has the block's header: they are copied word by word.
pub(super) const COPIED_WORDS: usize = 8;
/// Limit on the payloads that one system call sends from where they are.
pub(super) const DIRECT_MAX: usize = 16;

/// A payload that is sent from where it is.
#[derive(Clone, Copy)]
struct Direct {
    /// How many words of the output come before it.
    at: usize,
    start: *const u8,
    bytes: usize,
}

/// How far an output was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    All,
    /// As far as the socket had room.
    NoRoom,
    /// As far as the caller allowed.
    Limit,
}

/// Words, and payloads between them.
#[derive(Default)]
pub(super) struct Output {
    pub(super) words: Vec<u64>,
    direct: Vec<Direct>,
    /// How many bytes, of words and payloads together, were sent.
    sent: usize,
}

// SAFETY: see `Output::push_direct`: the memory of a payload stays mapped until it was sent or the
// output was cleared, whichever thread does it.
unsafe impl Send for Output {}

impl Output {
    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Whether payloads are left that are sent from where they are.
    pub(super) fn has_direct(&self) -> bool {
        !self.direct.is_empty()
    }

    /// The bytes that are not sent yet.
    pub(super) fn bytes(&self) -> usize {
        let direct: usize = self.direct.iter().map(|direct| direct.bytes).sum();
        self.words.len() * WORD_BYTES + direct - self.sent
    }

    /// Whether another payload can be sent to this stream from where it is.
    pub(super) fn has_room_for_direct(&self, stream: &Stream) -> bool {
        self.direct.len() < DIRECT_MAX && !stream.is_encrypted()
    }

    /// Appends a payload without a copy.
    ///
    /// # Safety
    /// `start..start + bytes` stays mapped until [`Output::send`] returned true or
    /// [`Output::clear`] was called. Other threads and processes may change the bytes meanwhile.
    pub(super) unsafe fn push_direct(&mut self, start: *const u8, bytes: usize) {
        self.direct.push(Direct { at: self.words.len(), start, bytes });
    }

    /// Forgets what was not sent.
    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.direct.clear();
        self.sent = 0;
    }

    /// Sends as much as the socket has room for. Returns whether everything was sent, and is then
    /// empty.
    ///
    /// # Errors
    /// The system's error, if the connection has ended.
    pub(super) fn send(&mut self, stream: &mut Stream) -> io::Result<bool> {
        Ok(self.send_up_to(stream, &mut { usize::MAX })? == Sent::All)
    }

    /// As [`Output::send`], but sends at most `left` bytes, and takes their number from it.
    ///
    /// # Errors
    /// As [`Output::send`].
    pub(super) fn send_up_to(&mut self, stream: &mut Stream, left: &mut usize) -> io::Result<Sent> {
        while !self.is_empty() {
            // All bytes may be encrypted, and some of them not sent.
            if self.bytes() > 0 {
                if *left == 0 {
                    return Ok(Sent::Limit);
                }
                match self.send_once(stream, *left) {
                    Ok(bytes) => {
                        self.sent += bytes;
                        *left = left.saturating_sub(bytes);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(Sent::NoRoom);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if self.bytes() == 0 {
                if !stream.flush()? {
                    return Ok(Sent::NoRoom);
                }
                self.clear();
            }
        }
        Ok(Sent::All)
    }

    fn send_once(&self, stream: &mut Stream, bytes_max: usize) -> io::Result<usize> {
        if stream.is_encrypted() {
            let unsent = &self.words.as_bytes()[self.sent..];
            return stream.send(&[IoSlice::new(&unsent[..unsent.len().min(bytes_max)])]);
        }
        let all = [EMPTY; 2 * DIRECT_MAX + 1];
        let mut parts = Parts { all, count: 0, skip: self.sent, left: bytes_max };
        let mut from = 0;
        for direct in &self.direct {
            parts.push_words(&self.words[from..direct.at]);
            parts.push(direct.start, direct.bytes);
            from = direct.at;
        }
        parts.push_words(&self.words[from..]);
        parts.send(stream.as_fd())
    }
}

const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The parts of one system call.
struct Parts {
    all: [libc::iovec; 2 * DIRECT_MAX + 1],
    count: usize,
    /// How many bytes, of the parts to come, were sent before.
    skip: usize,
    /// How many bytes may be sent.
    left: usize,
}

impl Parts {
    fn push_words(&mut self, words: &[u64]) {
        self.push(words.as_ptr().cast(), size_of_val(words));
    }

    fn push(&mut self, start: *const u8, bytes: usize) {
        let skipped = self.skip.min(bytes);
        self.skip -= skipped;
        let sent = (bytes - skipped).min(self.left);
        self.left -= sent;
        if sent > 0 {
            let start = start.wrapping_add(skipped).cast_mut().cast();
            self.all[self.count] = libc::iovec { iov_base: start, iov_len: sent };
            self.count += 1;
        }
    }

    fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: a structure of numbers and pointers, for which zeros are valid.
        let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
        message.msg_iov = self.all.as_mut_ptr();
        message.msg_iovlen = self.count;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the descriptor is open. The parts are words of a vector that is borrowed, and
        // payloads that are mapped, by the duty of `push_direct`. The kernel only reads them.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// The number of bytes that the peer's host has not acknowledged.
///
/// # Errors
/// The system's error.
pub(super) fn unacknowledged_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    let result =
        // SAFETY: the descriptor is open, and this request writes one number to the pointer.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { Ok(bytes as u64) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The socket has room for a part at a time. Words and payloads arrive in their order.
    #[test]
    fn everything_arrives_in_order_through_a_full_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        far.set_nonblocking(true).unwrap();
        let (near, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&near, 4096).unwrap();
        let mut near = Stream::over(near.into()).unwrap();
        let payload = vec![0x5a_u8; 8_000_000];
        let mut output = Output::default();
        output.words.extend(0..1000);
        // SAFETY: `payload` lives until everything is sent.
        unsafe { output.push_direct(payload.as_ptr(), payload.len()) };
        output.words.extend(1000..70_000);
        let words: Vec<u64> = (0..70_000).collect();
        let expected = [words[..1000].as_bytes(), &payload, words[1000..].as_bytes()].concat();
        assert_eq!(output.bytes(), expected.len());
        let mut received = Vec::new();
        let mut buffer = [0; 50_000];
        let mut waits = 0;
        while !output.send(&mut near).unwrap() {
            waits += 1;
            // It would block if the room were only missing until an acknowledgement.
            if let Ok(bytes) = far.read(&mut buffer) {
                received.extend_from_slice(&buffer[..bytes]);
            }
        }
        assert!(waits > 1 && output.is_empty() && output.bytes() == 0);
        drop(near);
        far.set_nonblocking(false).unwrap();
        far.read_to_end(&mut received).unwrap();
        assert!(received == expected);
    }
}
