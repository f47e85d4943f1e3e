//! The accepting side: a listener, and the connections that have not said yet what they are.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::control_channel::TcpChannel;
use super::device_atomics::DeviceAtomics;
use super::executors::{DataConnection, EndedConnections, Executors};
use super::stream::Stream;
use super::tls::TlsServer;
use crate::rdma::ConnectionId;
use crate::shm::{Lease, Region};
use crate::{ControlChannel, REQUEST_BYTES_MAX};

/// Limit on connections that have not sent their request. Above it the oldest is closed.
const GREETING_MAX: usize = 256;
/// How long a connection may take to send its request. It is closed when another one arrives.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of the listening socket in epoll's events.
const LISTENER: u64 = 0;
/// The number of the ended connections' descriptor in epoll's events.
const ENDED: u64 = 1;
const EVENTS_MAX: usize = 64;
/// Limit on connections that one event accepts at each address. With more than [`GREETING_MAX`],
/// one could be closed before its request is read.
const ACCEPTS_MAX: usize = 64;

/// Accepts connections at one port. Its descriptor is readable when there is an [`Event`].
pub struct Listener {
    sockets: Vec<OwnedFd>,
    watched: OwnedFd,
    events: VecDeque<u64>,
    /// Connections that have not sent their request, the oldest first.
    greeting: VecDeque<Greeting>,
    /// The number of the next connection.
    next_id: u64,
    ended: Arc<EndedConnections>,
    tls: Option<Arc<TlsServer>>,
}

struct Greeting {
    id: ConnectionId,
    channel: TcpChannel,
    since: Instant,
}

/// An event of a listener.
pub enum Event {
    /// A connection sent its request.
    Request(Incoming),
    /// The connection of a session has ended.
    Ended(ConnectionId),
}

/// A connection with its request, until it is accepted or refused.
pub struct Incoming {
    channel: TcpChannel,
    request: Vec<u8>,
}

impl Listener {
    /// Listens at these addresses.
    ///
    /// # Errors
    /// The system's error: `AddrInUse` if another program listens there, `AddrNotAvailable` if no
    /// address is of this host.
    pub fn bind(addresses: &[SocketAddr]) -> io::Result<Self> {
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let ended = Arc::new(EndedConnections::new()?);
        let watch = |fd: BorrowedFd<'_>, number| {
            epoll::add(&watched, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
        };
        let mut sockets = Vec::new();
        for address in addresses {
            let socket = TcpListener::bind(address)?;
            socket.set_nonblocking(true)?;
            watch(socket.as_fd(), LISTENER)?;
            sockets.push(socket.into());
        }
        watch(ended.as_fd(), ENDED)?;
        Ok(Self {
            sockets,
            watched,
            events: VecDeque::new(),
            greeting: VecDeque::new(),
            next_id: ENDED + 1,
            ended,
            tls: None,
        })
    }

    /// The port of the first address.
    #[cfg(test)]
    pub(super) fn port(&self) -> u16 {
        let address = rustix::net::getsockname(&self.sockets[0]).ok();
        let address = address.and_then(|address| SocketAddr::try_from(address).ok());
        address.map_or(0, |address| address.port())
    }

    /// Requires TLS of the connections that are accepted from now on.
    pub fn require_tls(&mut self, tls: Arc<TlsServer>) {
        self.tls = Some(tls);
    }

    /// Starts the threads that execute the chains of sessions. While requests come at intervals
    /// below `spin`, a thread polls instead of sleeping between them.
    ///
    /// # Errors
    /// The system's error.
    pub fn start_executors(&self, threads: usize, spin: Duration) -> io::Result<Executors> {
        Executors::start((0..threads.max(1)).map(|_| None), spin, &self.ended)
    }

    /// As [`Listener::start_executors`], one thread for each of these, which executes the thread's
    /// atomic verbs. For a region that an RDMA device serves, too.
    ///
    /// # Errors
    /// The system's error.
    pub fn start_executors_beside_device(
        &self,
        devices: Vec<Box<dyn DeviceAtomics>>,
        spin: Duration,
    ) -> io::Result<Executors> {
        Executors::start(devices.into_iter().map(Some), spin, &self.ended)
    }

    /// The next event; `None` if there is none at present.
    ///
    /// # Errors
    /// The system cannot accept a connection at present. Most likely it is out of descriptors.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        if let Some(id) = self.ended.take() {
            return Ok(Some(Event::Ended(id)));
        }
        if self.events.is_empty() {
            let mut events = Vec::with_capacity(EVENTS_MAX);
            let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&self.watched, spare_capacity(&mut events), Some(&at_once))?;
            self.events.extend(events.iter().map(|event| event.data.u64()));
        }
        while let Some(number) = self.events.pop_front() {
            match number {
                LISTENER => self.accept_all()?,
                ENDED => {
                    if let Some(id) = self.ended.take() {
                        return Ok(Some(Event::Ended(id)));
                    }
                }
                number => {
                    if let Some(incoming) = self.read_request(ConnectionId(number)) {
                        return Ok(Some(Event::Request(incoming)));
                    }
                }
            }
        }
        Ok(None)
    }

    fn accept_all(&mut self) -> io::Result<()> {
        for at in 0..self.sockets.len() {
            for _ in 0..ACCEPTS_MAX {
                let flags = rustix::net::SocketFlags::CLOEXEC;
                let socket = match rustix::net::accept_with(&self.sockets[at], flags) {
                    Ok(socket) => socket,
                    Err(rustix::io::Errno::AGAIN) => break,
                    // The peer has given up already.
                    Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                };
                // A socket that cannot be set up is gone again.
                let Ok(mut stream) = Stream::over(socket) else { continue };
                if let Some(tls) = &self.tls
                    && stream.expect_tls(tls).is_err()
                {
                    continue;
                }
                self.greet(stream)?;
            }
        }
        Ok(())
    }

    /// Waits for the request of a new connection.
    fn greet(&mut self, stream: Stream) -> io::Result<()> {
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        let data = epoll::EventData::new_u64(id.0);
        epoll::add(&self.watched, &stream, data, epoll::EventFlags::IN)?;
        while self.greeting.len() >= GREETING_MAX
            || self.greeting.front().is_some_and(|first| first.since.elapsed() > GREETING_TIMEOUT)
        {
            self.greeting.pop_front();
        }
        let channel = TcpChannel::over(stream, id);
        self.greeting.push_back(Greeting { id, channel, since: Instant::now() });
        Ok(())
    }

    /// Reads the request of a connection. Returns the connection once the request is complete.
    fn read_request(&mut self, id: ConnectionId) -> Option<Incoming> {
        let at = self.greeting.iter().position(|greeting| greeting.id == id)?;
        let mut request = vec![0; REQUEST_BYTES_MAX];
        match self.greeting[at].channel.receive(&mut request) {
            Ok(None) => None,
            Ok(Some(0)) | Err(_) => {
                self.greeting.remove(at);
                None
            }
            Ok(Some(bytes)) => {
                request.truncate(bytes);
                let Greeting { channel, .. } = self.greeting.remove(at)?;
                // Another thread, or another epoll, watches it from now on.
                let _ = epoll::delete(&self.watched, &channel);
                Some(Incoming { channel, request })
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }
}

impl Incoming {
    /// The encoded connection request.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// Refuses the connection with a reason. If the reason does not reach the peer, it sees only
    /// the end.
    pub fn reject(mut self, reason: &[u8]) {
        let _ = self.channel.send(reason);
        self.channel.hang_up();
    }

    /// Accepts the connection as a control channel.
    ///
    /// # Errors
    /// The system's error.
    pub fn accept_control(mut self, reply: &[u8]) -> io::Result<TcpChannel> {
        self.channel.send(reply)?;
        Ok(self.channel)
    }

    /// Accepts the connection as a session's, whose chains the executors run while the lease is
    /// valid. `region` decides the rights: a reader's is mapped for reading.
    ///
    /// # Errors
    /// The system's error.
    pub fn accept_data(
        mut self,
        executors: &Executors,
        region: &Arc<Region>,
        lease: Lease,
        reply: &[u8],
    ) -> io::Result<DataConnection> {
        self.channel.send(reply)?;
        let id = self.channel.id();
        let (_, stream) = self.channel.into_parts();
        executors.add(id, stream, region, lease)
    }
}
