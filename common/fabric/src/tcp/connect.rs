//! The connecting side. A connection begins with a message of each side, as on the control channel:
//! the connection request and the reply.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::TcpFabric;
use super::clock_bound::ClockBound;
use super::control_channel::TcpChannel;
use super::other_protocol::OtherProtocol;
use super::record::{CLOCK_WORDS, Header, ReplyKind, WORD_BYTES, reply_kind};
use super::stream::Stream;
use super::tls::TlsClient;
use crate::rdma::{ConnectionId, RemoteRegion};
use crate::{ControlChannel, REPLY_BYTES_MAX, Trust, boot_time_ns, interrupt};

/// How long one attempt waits for the server's host. The system repeats the first packet at growing
/// intervals, so that a longer attempt could outlast an outage by as much again.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a program that did not answer gets for the answer to the end of a line.
const LINE_TIMEOUT: Duration = Duration::from_millis(50);
/// The id of connections on this side, which has no events.
const NO_ID: ConnectionId = ConnectionId(0);

/// A session's connection that the server has accepted.
pub struct DataLink {
    pub(super) stream: Stream,
    pub(super) reply: Vec<u8>,
    pub(super) clock_bound: ClockBound,
    pub(super) trust: Trust,
}

impl DataLink {
    /// The connection over a socket whose other end plays a server, for tests.
    #[doc(hidden)]
    pub fn over(socket: OwnedFd) -> Self {
        let (stream, now) = (Stream::unchanged(socket), boot_time_ns());
        let clock_bound = ClockBound::new(now, now);
        Self { stream, reply: Vec::new(), clock_bound, trust: Trust::forever() }
    }

    /// The server's reply to the connection request.
    pub fn reply(&self) -> &[u8] {
        &self.reply
    }

    /// Makes the connection break when this trust ends while chains are in flight.
    pub fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Makes a fabric of this many lanes, whose first region is the one that the reply describes.
    ///
    /// # Errors
    /// The system's error.
    pub fn into_fabric(self, region: RemoteRegion, lanes: u16) -> io::Result<TcpFabric> {
        TcpFabric::new(self, region, lanes)
    }
}

/// Connects a control channel. Returns it with the server's reply, which may be a refusal.
///
/// # Errors
/// The system's error: `WouldBlock` if the server accepted the connection and did not answer in
/// time, `UnexpectedEof` if it closed the connection without an answer, `TimedOut` if its host does
/// not answer. [`TlsError::of`](super::TlsError::of) tells whether TLS failed.
pub fn connect_control(
    address: SocketAddr,
    tls: Option<&TlsClient>,
    request: &[u8],
    timeout: Duration,
) -> io::Result<(TcpChannel, Vec<u8>)> {
    let started = Instant::now();
    let left = || timeout.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
    let stream = Stream::connect(address, tls, left().min(HANDSHAKE_TIMEOUT))?;
    let mut channel = TcpChannel::over(stream, NO_ID);
    channel.send(request)?;
    let mut reply = vec![0; REPLY_BYTES_MAX];
    loop {
        match channel.receive(&mut reply)? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(bytes) => {
                reply.truncate(bytes);
                return Ok((channel, reply));
            }
            None => {}
        }
        let mut polled = [rustix::event::PollFd::new(&channel, rustix::event::PollFlags::IN)];
        let step = rustix::event::Timespec::try_from(interrupt::step(left())).ok();
        let polled = rustix::event::poll(&mut polled, step.as_ref());
        let is_over = started.elapsed() >= timeout || interrupt::gives_up();
        if polled != Ok(1) && is_over {
            return Err(why_silent(channel));
        }
    }
}

/// The error for a program that has not answered in time. One that speaks the protocol of redis, or
/// HTTP, waits for the end of a line, and answers then. A server that was only slow sees a message
/// that is too long, on a connection that is given up anyway.
#[cold]
fn why_silent(channel: TcpChannel) -> io::Error {
    let (_, mut stream) = channel.into_parts();
    let mut answer = [0; 4];
    let mut ask = || -> io::Result<usize> {
        stream.set_wait_max(LINE_TIMEOUT)?;
        stream.send(&[IoSlice::new(b"\r\n\r\n")])?;
        stream.receive(&mut answer, true)
    };
    let answered = !interrupt::is_given_up() && ask().is_ok();
    let other = OtherProtocol::of_answer(&answer).filter(|_| answered);
    other.map_or(io::ErrorKind::WouldBlock.into(), OtherProtocol::into_io_error)
}

/// Makes a session's connection. The reply may be a refusal.
///
/// # Errors
/// As [`connect_control`].
pub fn connect_data(
    address: SocketAddr,
    tls: Option<&TlsClient>,
    request: &[u8],
    timeout: Duration,
) -> io::Result<DataLink> {
    let started = Instant::now();
    let (channel, reply) = connect_control(address, tls, request, timeout)?;
    // The server's clock follows a welcome. Without it, the server refused the session.
    let (buffered, mut stream) = channel.into_parts();
    let mut clock = [0; CLOCK_WORDS * WORD_BYTES];
    let mut filled = buffered.len().min(clock.len());
    clock[..filled].copy_from_slice(&buffered[..filled]);
    while filled < clock.len() {
        let left = timeout.saturating_sub(started.elapsed());
        stream.set_wait_max(interrupt::step(left).max(Duration::from_millis(1)))?;
        match stream.receive(&mut clock[filled..], true) {
            // A refusal.
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    && !left.is_zero()
                    && !interrupt::gives_up() => {}
            Err(error) => return Err(error),
        }
    }
    let word = |at: usize| {
        let bytes = clock[at * WORD_BYTES..].first_chunk();
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let is_clock = Header::of(word(0)).and_then(reply_kind) == Ok(ReplyKind::Clock);
    if filled == clock.len() && !is_clock {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let clock_bound = ClockBound::new(word(1), boot_time_ns());
    Ok(DataLink { stream, reply, clock_bound, trust: Trust::forever() })
}
