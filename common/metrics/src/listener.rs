//! The thread that serves metrics over HTTP: `GET /metrics`. It sleeps until a request comes. So
//! metrics cost nothing while no one reads them. It polls all connections, each of which has one
//! request.
//!
//! Clients cost little whatever they do. There are at most [`CONNECTIONS_MAX`] connections, each
//! with a request of bounded length, and each ends after [`LIFE_MAX`]. If there is one more, the
//! oldest is closed, so that silent ones do not keep others out.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use httparse::{EMPTY_HEADER, Error, Status};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::MetricsFormat;

/// A bound listener. Requests that come before [`MetricsListener::serve`] wait.
#[derive(Debug)]
pub struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
}

/// Says why [`MetricsListener::bind`] failed, and what to do.
pub fn why_not_bound(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program listens there: stop it or take another port".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "it is no address of this host: `ip address` shows its addresses".to_owned()
        }
        _ => error.to_string(),
    }
}

impl MetricsListener {
    /// Binds a listener.
    ///
    /// # Errors
    /// The system's; see [`why_not_bound`].
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Starts a thread that answers requests. `text` returns the metrics; `None` if there are none
    /// at present.
    ///
    /// # Errors
    /// The system's, if it makes no thread or descriptor.
    pub fn serve(
        self,
        mut text: impl FnMut(MetricsFormat) -> Option<String> + Send + 'static,
    ) -> io::Result<MetricsServer> {
        let Self { listener, address } = self;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let mut connections = MetricsConnections::new(listener);
        let serve = move || loop {
            match connections.step(&stopped, &mut text) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!("FS-009 there are no metrics any more: {error}");
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("farside-metrics".to_owned()).spawn(serve)?;
        tracing::info!("metrics are at http://{address}{PATH}");
        Ok(MetricsServer { address, stop, thread: Some(thread) })
    }
}

/// The thread that answers requests for metrics. It ends when this is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Returns the address at which requests are answered.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // The write fails only if the counter is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // A panic of the thread has been reported, and the program works without metrics.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

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

/// The only path with an answer.
pub(crate) const PATH: &str = "/metrics";
/// Limit on the line and the headers of a request, in bytes. Prometheus sends some 400.
pub(crate) const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Limit on the headers of a request.
const HEADERS_MAX: usize = 64;

/// What the first bytes of a connection are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// The beginning of a request.
    Incomplete,
    /// A request for the metrics, in this format.
    Metrics(MetricsFormat),
    /// A request that gets an error.
    Refused(Refusal),
}

/// Why a request gets an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Malformed,
    OtherPath,
    OtherMethod,
    TooLarge,
    /// There are no metrics at present.
    Unavailable,
}

impl Refusal {
    /// Returns the response.
    pub(crate) fn response(self) -> Vec<u8> {
        let (status, text) = match self {
            Self::Malformed => ("400 Bad Request", "this is no request of HTTP/1.1\n"),
            Self::OtherPath => ("404 Not Found", "the metrics are at /metrics\n"),
            Self::OtherMethod => ("405 Method Not Allowed", "the metrics are read with GET\n"),
            Self::TooLarge => ("431 Request Header Fields Too Large", "the request is too long\n"),
            Self::Unavailable => ("503 Service Unavailable", "there are no numbers at present\n"),
        };
        let allow = if self == Self::OtherMethod { "Allow: GET\r\n" } else { "" };
        response(status, "text/plain; charset=utf-8", allow, text)
    }
}

/// Returns the response with the metrics.
pub(crate) fn metrics_response(format: MetricsFormat, text: &str) -> Vec<u8> {
    // The same address has two formats.
    response("200 OK", format.content_type(), "Vary: Accept\r\n", text)
}

fn response(status: &str, content_type: &str, headers: &str, text: &str) -> Vec<u8> {
    let bytes = text.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {bytes}\r\n\
         {headers}Connection: close\r\n\r\n{text}"
    )
    .into_bytes()
}

/// Returns what these first bytes of a connection are.
pub(crate) fn parse(bytes: &[u8]) -> Received {
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(Status::Partial) if bytes.len() >= REQUEST_BYTES_MAX => {
            Received::Refused(Refusal::TooLarge)
        }
        Ok(Status::Partial) => Received::Incomplete,
        Err(Error::TooManyHeaders) => Received::Refused(Refusal::TooLarge),
        Err(_) => Received::Refused(Refusal::Malformed),
        Ok(Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            if path.split('?').next() != Some(PATH) {
                return Received::Refused(Refusal::OtherPath);
            }
            if request.method != Some("GET") {
                return Received::Refused(Refusal::OtherMethod);
            }
            let accept =
                request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
            // A value that is no text has no preference.
            let accept = accept.map(|header| str::from_utf8(header.value).unwrap_or_default());
            Received::Metrics(MetricsFormat::preferred(accept))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_refused(bytes: &[u8], refusal: Refusal) -> bool {
        parse(bytes) == Received::Refused(refusal)
    }

    #[test]
    fn a_get_of_the_path_is_a_request_for_metrics() {
        let open = b"GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text\r\n\r\n";
        assert_eq!(parse(open), Received::Metrics(MetricsFormat::OpenMetrics));
        for end in 0..open.len() {
            assert_eq!(parse(&open[..end]), Received::Incomplete, "{end}");
        }
        for request in ["GET /metrics HTTP/1.0\r\n\r\n", "GET /metrics?a=1 HTTP/1.1\r\n\r\nbody"] {
            assert_eq!(parse(request.as_bytes()), Received::Metrics(MetricsFormat::Prometheus));
        }
        let not_text = b"GET /metrics HTTP/1.1\r\nAccept: \xff\r\n\r\n";
        assert_eq!(parse(not_text), Received::Metrics(MetricsFormat::Prometheus));
    }

    #[test]
    fn everything_else_is_refused() {
        for path in ["/", "/metrics/", "/Metrics", "/metrics.txt", "//metrics", "*"] {
            let request = format!("GET {path} HTTP/1.1\r\n\r\n");
            assert!(is_refused(request.as_bytes(), Refusal::OtherPath), "{path}");
        }
        for method in ["POST", "HEAD", "DELETE", "get", "OPTIONS"] {
            let request = format!("{method} /metrics HTTP/1.1\r\n\r\n");
            assert!(is_refused(request.as_bytes(), Refusal::OtherMethod), "{method}");
        }
        for garbage in [&b"\x16\x03\x01\x02\x00\x01"[..], b"GET /metrics\r\n\r\n", b"\0\0\0\0"] {
            assert!(is_refused(garbage, Refusal::Malformed), "{garbage:?}");
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
        assert!(is_refused(many.as_bytes(), Refusal::TooLarge));
        let long = [&b"GET /metrics?"[..], &[b'a'; REQUEST_BYTES_MAX]].concat();
        assert!(is_refused(&long[..REQUEST_BYTES_MAX], Refusal::TooLarge));
    }

    #[test]
    fn a_response_has_the_length_of_its_text() {
        let response = String::from_utf8(Refusal::OtherMethod.response()).unwrap();
        let (head, text) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{head}");
        assert!(head.contains("\r\nAllow: GET\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", text.len())), "{head}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
