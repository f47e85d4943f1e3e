//! The control channel over TCP: each message has its length before it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::other_protocol::OtherProtocol;
use super::stream::Stream;
use super::tls::{is_alert, server_uses_tls};
use crate::rdma::ConnectionId;
use crate::{ControlChannel, MESSAGE_BYTES_MAX};

/// The length of a message's length, in bytes.
const LENGTH_BYTES: usize = size_of::<u32>();
/// How long [`ControlChannel::flush`] sleeps between two looks.
const FLUSH_PAUSE: Duration = Duration::from_millis(1);

/// One end of a control channel over TCP.
pub struct TcpChannel {
    stream: Stream,
    id: ConnectionId,
    /// Bytes that were received: a part of a message, or several.
    input: Vec<u8>,
    /// The rest of a message for which the socket had no room.
    output: Vec<u8>,
    has_ended: bool,
}

impl TcpChannel {
    pub(super) fn over(stream: Stream, id: ConnectionId) -> Self {
        Self { stream, id, input: Vec::new(), output: Vec::new(), has_ended: false }
    }

    /// The number of this connection.
    pub fn id(&self) -> ConnectionId {
        self.id
    }

    /// The bytes that were received and are no message yet, and the stream.
    pub(super) fn into_parts(self) -> (Vec<u8>, Stream) {
        (self.input, self.stream)
    }

    /// Sends the rest of a message. Returns whether nothing is left.
    fn send_rest(&mut self) -> io::Result<bool> {
        while !self.output.is_empty() {
            match self.stream.send(&[IoSlice::new(&self.output)]) {
                Ok(bytes) => drop(self.output.drain(..bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(disconnected(error)),
            }
        }
        self.stream.flush().map_err(disconnected)
    }

    /// Takes a whole message from the input, if there is one.
    fn take_message(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some((length, rest)) = self.input.split_first_chunk() else { return Ok(None) };
        if is_alert(length) {
            return Err(server_uses_tls());
        }
        if let Some(other) = OtherProtocol::of_answer(length) {
            return Err(other.into_io_error());
        }
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes == 0 || bytes > buffer.len().min(MESSAGE_BYTES_MAX) {
            let why = format!("a message of {bytes} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let Some(message) = rest.get(..bytes) else { return Ok(None) };
        buffer[..bytes].copy_from_slice(message);
        self.input.drain(..LENGTH_BYTES + bytes);
        Ok(Some(bytes))
    }
}

/// A reset is an end like any other. On one host it proves that the peer did not read the last
/// message; here it does not.
fn disconnected(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::ConnectionReset => io::ErrorKind::BrokenPipe.into(),
        _ => error,
    }
}

impl ControlChannel for TcpChannel {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if !self.send_rest()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let length = (message.len() as u32).to_le_bytes();
        let sent = match self.stream.send(&[IoSlice::new(&length), IoSlice::new(message)]) {
            Ok(sent) => sent,
            Err(error) => return Err(disconnected(error)),
        };
        // The rest leaves when the socket has room. A failure shows when something is received.
        let _ = self.stream.flush();
        let in_length = sent.min(LENGTH_BYTES);
        self.output.extend_from_slice(&length[in_length..]);
        self.output.extend_from_slice(&message[sent - in_length..]);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        // A failure shows when the end is received, too, after the messages before it.
        let _ = self.send_rest();
        let mut received = [0; 4096];
        loop {
            if let Some(bytes) = self.take_message(buffer)? {
                return Ok(Some(bytes));
            }
            if self.has_ended {
                return Ok(Some(0));
            }
            match self.stream.receive(&mut received, false) {
                Ok(0) => self.has_ended = true,
                Ok(bytes) => self.input.extend_from_slice(&received[..bytes]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                        self.has_ended = true;
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    fn signals_room_as_writable(&self) -> bool {
        true
    }

    fn has_unsent(&self) -> bool {
        !self.output.is_empty() || self.stream.has_unsent()
    }

    fn flush(&mut self, timeout: Duration) -> io::Result<()> {
        let started = Instant::now();
        while !self.send_rest()? || self.stream.unacknowledged_bytes()? > 0 {
            if started.elapsed() >= timeout {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(FLUSH_PAUSE);
        }
        Ok(())
    }

    fn hang_up(&mut self) -> bool {
        self.stream.hang_up();
        true
    }
}

impl AsFd for TcpChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
