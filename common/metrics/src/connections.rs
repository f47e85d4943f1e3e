//! The connections of the metrics thread, which polls them all.
//!
//! Clients cost little whatever they do. There are at most [`CONNECTIONS_MAX`] connections, each
//! with a request of bounded length, and each ends after [`LIFE_MAX`]. If there is one more, the
//! oldest is closed, so that silent ones do not keep others out.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::MetricsFormat;
use crate::http::{REQUEST_BYTES_MAX, Received, Refusal, metrics_response, parse};

/// Limit on connections.
const CONNECTIONS_MAX: usize = 32;
/// How long a connection may take, from its first byte to its end.
const LIFE_MAX: Duration = Duration::from_secs(10);
/// How long the thread accepts no connection after the system refused it a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Limit on the bytes that are read and ignored after the request, so that the response arrives.
const IGNORED_BYTES_MAX: usize = 64 << 10;

/// The listener and its connections.
pub(crate) struct MetricsConnections {
    listener: TcpListener,
    /// The oldest first.
    connections: Vec<Connection>,
    /// When to accept again, after a failure.
    accept_at: Option<Instant>,
}

impl MetricsConnections {
    /// The listener must not block.
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, connections: Vec::with_capacity(CONNECTIONS_MAX), accept_at: None }
    }

    /// Waits until a connection can go on, or until `stop` is readable. Lets all connections go on
    /// that can. `answer` returns the text of the metrics; `None` if there is none at present.
    /// Returns false if `stop` is readable.
    pub(crate) fn step(
        &mut self,
        stop: &impl std::os::fd::AsFd,
        answer: &mut impl FnMut(MetricsFormat) -> Option<String>,
    ) -> io::Result<bool> {
        let (accepts, ready) = {
            let is_paused = self.accept_at.is_some();
            let accepted = if is_paused { PollFlags::empty() } else { PollFlags::IN };
            let mut polled = Vec::with_capacity(2 + self.connections.len());
            polled.push(PollFd::new(stop, PollFlags::IN));
            polled.push(PollFd::new(&self.listener, accepted));
            let wanted = self.connections.iter();
            polled.extend(wanted.map(|it| PollFd::new(&it.stream, it.phase.wants())));
            match poll(&mut polled, self.timeout().as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if !polled[0].revents().is_empty() {
                return Ok(false);
            }
            let ready: Vec<bool> =
                polled[2..].iter().map(|polled| !polled.revents().is_empty()).collect();
            (!is_paused && !polled[1].revents().is_empty(), ready)
        };
        let now = Instant::now();
        let mut ready = ready.into_iter();
        self.connections.retain_mut(|connection| {
            let is_ready = ready.next().unwrap_or_default();
            let goes_on = !is_ready || connection.go_on(answer);
            goes_on && now < connection.ends_at
        });
        self.accept_at = self.accept_at.filter(|at| now < *at);
        if accepts {
            self.accept(now);
        }
        Ok(true)
    }

    /// How long to wait for an event; `None` if nothing else is due.
    fn timeout(&self) -> Option<Timespec> {
        let due = self.connections.iter().map(|connection| connection.ends_at);
        let left = due.chain(self.accept_at).min()?.saturating_duration_since(Instant::now());
        Timespec::try_from(left).ok()
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.connections.remove(0);
                    }
                    self.connections.push(Connection::new(stream, now + LIFE_MAX));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The client has gone before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // Probably the process is out of descriptors.
                Err(error) => {
                    tracing::debug!("cannot accept a request for metrics: {error}");
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }
}

struct Connection {
    stream: TcpStream,
    ends_at: Instant,
    phase: Phase,
}

/// What happens next on a connection.
enum Phase {
    /// The rest of its request comes.
    Reading(Vec<u8>),
    /// The rest of its response goes.
    Writing { response: Vec<u8>, sent: usize },
    /// The client closes. If the server did before, bytes of the client that come later would make
    /// the system drop what the client has not read of the response.
    Draining { ignored: usize },
}

impl Phase {
    fn wants(&self) -> PollFlags {
        match self {
            Self::Reading(_) | Self::Draining { .. } => PollFlags::IN,
            Self::Writing { .. } => PollFlags::OUT,
        }
    }
}

impl Connection {
    fn new(stream: TcpStream, ends_at: Instant) -> Self {
        Self { stream, ends_at, phase: Phase::Reading(Vec::new()) }
    }

    /// Goes on until it would block. Returns false at the end.
    fn go_on(&mut self, answer: &mut impl FnMut(MetricsFormat) -> Option<String>) -> bool {
        loop {
            match self.advance(answer) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }

    /// Does one system call, and what follows from it. Returns false at the end.
    fn advance(
        &mut self,
        answer: &mut impl FnMut(MetricsFormat) -> Option<String>,
    ) -> io::Result<bool> {
        let mut buffer = [0; 1024];
        match &mut self.phase {
            Phase::Reading(request) => {
                let room = buffer.len().min(REQUEST_BYTES_MAX - request.len());
                let read = self.stream.read(&mut buffer[..room])?;
                request.extend_from_slice(&buffer[..read]);
                let response = match parse(request) {
                    Received::Incomplete => return Ok(read > 0),
                    Received::Refused(refusal) => refusal.response(),
                    Received::Metrics(format) => match answer(format) {
                        Some(text) => metrics_response(format, &text),
                        None => Refusal::Unavailable.response(),
                    },
                };
                self.phase = Phase::Writing { response, sent: 0 };
                Ok(true)
            }
            Phase::Writing { response, sent } => {
                *sent += self.stream.write(&response[*sent..])?;
                if *sent == response.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.phase = Phase::Draining { ignored: 0 };
                }
                Ok(true)
            }
            Phase::Draining { ignored } => {
                let read = self.stream.read(&mut buffer)?;
                *ignored += read;
                Ok(read > 0 && *ignored < IGNORED_BYTES_MAX)
            }
        }
    }
}
