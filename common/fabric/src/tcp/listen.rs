//! The accepting side: a listener, and the connections that have not said yet what they are. All of
//! it runs on a thread of its own ([`Arrivals`]), because strangers can make it work.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::arrivals::Arrivals;
use super::control_channel::TcpChannel;
use super::device_atomics::DeviceAtomics;
use super::executors::{AT_ONCE, DataConnection, ExecutorOptions, Executors, News};
use super::stream::Stream;
use super::tls::TlsServer;
use crate::memory::{Lease, Region};
use crate::rdma::ConnectionId;
use crate::{ControlChannel, REQUEST_BYTES_MAX};

/// Limit on connections that have not sent their request. Above it the host with most of them loses
/// the oldest of its own, so that no host crowds out another.
pub const GREETING_MAX: usize = 256;
/// How long a connection may take to send its request before it is closed.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit on connections that the system holds until they are accepted. It drops the packets of
/// further ones, and their clients repeat them after a second. The system has a limit of its own.
const BACKLOG: i32 = 4096;
/// The number of the listening socket in epoll's events.
const LISTENER: u64 = 0;
/// The number of the timer in epoll's events.
const TIMER: u64 = 1;
/// Room for the events of all connections that have not sent their request, so that none hides
/// behind those of others.
const EVENTS_MAX: usize = GREETING_MAX + 2;
/// How many of these events are handled before others are looked for. A step of a handshake may
/// take a millisecond.
const STEPS_MAX: usize = 16;
/// Limit on connections that one event accepts at each address.
const ACCEPTS_MAX: usize = 64;

/// Accepts connections at one port, once it is started.
pub struct Listener {
    sockets: Vec<OwnedFd>,
    watched: OwnedFd,
    events: VecDeque<u64>,
    /// Connections whose request was found just before they would have been closed.
    arrived: VecDeque<Incoming>,
    /// Connections that have not sent their request, the oldest first.
    greeting: VecDeque<Greeting>,
    /// Expires when the oldest of them may be overdue.
    timer: OwnedFd,
    /// The number of the next connection.
    next_id: u64,
    pub(super) news: Arc<News>,
    tls: Option<Arc<TlsServer>>,
}

struct Greeting {
    id: ConnectionId,
    channel: TcpChannel,
    host: IpAddr,
    since: Instant,
}

/// A connection with its request, until it is accepted or refused.
pub struct Incoming {
    channel: TcpChannel,
    request: Vec<u8>,
    host: IpAddr,
}

impl Listener {
    /// Accepts connections of these sockets, which are bound.
    ///
    /// # Errors
    /// The system's error.
    pub fn over(bound: Vec<TcpListener>) -> io::Result<Self> {
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let news = Arc::new(News::new()?);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let watch = |fd: BorrowedFd<'_>, number| {
            epoll::add(&watched, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
        };
        let mut sockets = Vec::new();
        for socket in bound {
            socket.set_nonblocking(true)?;
            // The standard library's backlog is shorter.
            rustix::net::listen(&socket, BACKLOG)?;
            watch(socket.as_fd(), LISTENER)?;
            sockets.push(socket.into());
        }
        watch(timer.as_fd(), TIMER)?;
        Ok(Self {
            sockets,
            watched,
            events: VecDeque::new(),
            arrived: VecDeque::new(),
            greeting: VecDeque::new(),
            timer,
            next_id: TIMER + 1,
            news,
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

    /// Starts the threads that execute the chains of sessions.
    ///
    /// # Errors
    /// The system's error.
    pub fn start_executors(
        &self,
        threads: usize,
        options: ExecutorOptions,
    ) -> io::Result<Executors> {
        Executors::start((0..threads.max(1)).map(|_| None), options, &self.news)
    }

    /// As [`Listener::start_executors`], one thread for each of these, which executes the thread's
    /// atomic verbs. For a region that an RDMA device serves, too.
    ///
    /// # Errors
    /// The system's error.
    pub fn start_executors_beside_device(
        &self,
        devices: Vec<Box<dyn DeviceAtomics>>,
        options: ExecutorOptions,
    ) -> io::Result<Executors> {
        Executors::start(devices.into_iter().map(Some), options, &self.news)
    }

    /// Begins to accept connections, on a thread of its own.
    ///
    /// # Errors
    /// The system's error.
    pub fn start(self) -> io::Result<Arrivals> {
        Arrivals::start(self)
    }

    /// The next connection whose request has arrived; `None` if there is none at present.
    ///
    /// # Errors
    /// The system cannot accept a connection at present. Most likely it is out of descriptors.
    pub(super) fn next_request(&mut self) -> io::Result<Option<Incoming>> {
        if let Some(incoming) = self.arrived.pop_front() {
            return Ok(Some(incoming));
        }
        if self.events.is_empty() {
            let mut events = Vec::with_capacity(EVENTS_MAX);
            epoll::wait(&self.watched, spare_capacity(&mut events), Some(&AT_ONCE))?;
            self.events = self.in_turn(events.iter().map(|event| event.data.u64()));
        }
        while let Some(number) = self.events.pop_front() {
            match number {
                LISTENER => {
                    let accepted = self.accept_all();
                    if let Some(incoming) = self.arrived.pop_front() {
                        return Ok(Some(incoming));
                    }
                    accepted?;
                }
                TIMER => self.close_overdue()?,
                number => {
                    if let Some(incoming) = self.read_request(ConnectionId(number)) {
                        return Ok(Some(incoming));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Puts events in the order in which they are handled: of each host one before another one gets
    /// its second. Those that find no place are reported again.
    fn in_turn(&self, events: impl Iterator<Item = u64>) -> VecDeque<u64> {
        let hosts: HashMap<u64, IpAddr> =
            self.greeting.iter().map(|greeting| (greeting.id.0, greeting.host)).collect();
        let mut counts = HashMap::new();
        let mut ranked: Vec<(usize, u64)> = events
            .map(|event| {
                let Some(host) = hosts.get(&event) else { return (0, event) };
                let count = counts.entry(*host).or_insert(0);
                *count += 1;
                (*count, event)
            })
            .collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        ranked.into_iter().map(|(_, event)| event).take(STEPS_MAX).collect()
    }

    fn accept_all(&mut self) -> io::Result<()> {
        for at in 0..self.sockets.len() {
            for _ in 0..ACCEPTS_MAX {
                let flags = rustix::net::SocketFlags::CLOEXEC;
                let (socket, peer) = match rustix::net::acceptfrom_with(&self.sockets[at], flags) {
                    Ok(accepted) => accepted,
                    Err(Errno::AGAIN) => break,
                    // The peer has given up already.
                    Err(Errno::CONNABORTED | Errno::INTR) => continue,
                    // The descriptor of a connection without a request serves the new one.
                    Err(Errno::MFILE | Errno::NFILE) if self.close_one() => continue,
                    Err(error) => return Err(error.into()),
                };
                let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                let host = peer.map_or(Ipv4Addr::UNSPECIFIED.into(), |peer| host_of(peer.ip()));
                // A socket that cannot be set up is gone again.
                let Ok(mut stream) = Stream::over(socket) else { continue };
                if let Some(tls) = &self.tls
                    && stream.expect_tls(tls).is_err()
                {
                    continue;
                }
                self.greet(stream, host)?;
            }
        }
        Ok(())
    }

    /// Waits for the request of a new connection.
    fn greet(&mut self, stream: Stream, host: IpAddr) -> io::Result<()> {
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        let data = epoll::EventData::new_u64(id.0);
        epoll::add(&self.watched, &stream, data, epoll::EventFlags::IN)?;
        if self.greeting.len() >= GREETING_MAX {
            self.close_one();
        }
        let is_first = self.greeting.is_empty();
        let channel = TcpChannel::over(stream, id);
        self.greeting.push_back(Greeting { id, channel, host, since: Instant::now() });
        // While there are others, the timer is set.
        if is_first { self.set_timer() } else { Ok(()) }
    }

    /// Closes a connection whose request has not arrived: the oldest one of the host with most of
    /// them. Returns whether there was one.
    fn close_one(&mut self) -> bool {
        while let Some(id) = self.oldest_of_most() {
            // The request may have arrived, but its event may not have had its turn.
            let Some(incoming) = self.read_request(id) else {
                self.greeting.retain(|greeting| greeting.id != id);
                return true;
            };
            self.arrived.push_back(incoming);
        }
        false
    }

    /// The oldest connection without a request of the host that has most of them.
    fn oldest_of_most(&self) -> Option<ConnectionId> {
        let mut counts = HashMap::new();
        for greeting in &self.greeting {
            *counts.entry(greeting.host).or_insert(0) += 1;
        }
        // The newest first, because the last of equals counts.
        let oldest = self.greeting.iter().rev().max_by_key(|greeting| counts.get(&greeting.host));
        oldest.map(|greeting| greeting.id)
    }

    /// Closes the connections that have not sent their request in time.
    fn close_overdue(&mut self) -> io::Result<()> {
        let is_overdue = |first: &Greeting| first.since.elapsed() >= GREETING_TIMEOUT;
        while self.greeting.front().is_some_and(is_overdue) {
            self.greeting.pop_front();
        }
        self.set_timer()
    }

    /// Sets the timer for the oldest connection. Without one it does not expire.
    fn set_timer(&self) -> io::Result<()> {
        const NEVER: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = self.greeting.front().map_or(NEVER, |first| {
            let left = GREETING_TIMEOUT.saturating_sub(first.since.elapsed());
            // Not 0, which would stop the timer.
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().max(1).into() }
        });
        let time = Itimerspec { it_interval: NEVER, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time)?;
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
                let Greeting { channel, host, .. } = self.greeting.remove(at)?;
                // Another thread, or another epoll, watches it from now on.
                let _ = epoll::delete(&self.watched, &channel);
                Some(Incoming { channel, request, host })
            }
        }
    }
}

/// The host of an address, which has a whole network of addresses in IPv6.
fn host_of(address: IpAddr) -> IpAddr {
    const NETWORK: u128 = !0 << 64;
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
        address => address,
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

    /// The host that it comes from: of IPv6 the network of 64 bits.
    pub fn host(&self) -> IpAddr {
        self.host
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    /// Both connections wait for the same event, and one has to go.
    #[test]
    fn a_connection_whose_request_has_arrived_is_not_closed_for_another() {
        let mut listener = Listener::over(vec![TcpListener::bind("127.0.0.1:0").unwrap()]).unwrap();
        let connect = || TcpStream::connect(("127.0.0.1", listener.port())).unwrap();
        let (mut genuine, _silent) = (connect(), connect());
        genuine.write_all(b"\x05\0\0\0hello").unwrap();
        while listener.greeting.len() < 2 {
            listener.accept_all().unwrap();
        }
        assert!(listener.close_one() && listener.greeting.is_empty());
        let Ok(Some(incoming)) = listener.next_request() else { panic!("closed") };
        assert_eq!(incoming.request(), b"hello");
        assert!(!listener.close_one(), "there is none");
    }

    /// The events of one host are many, and that of the other is behind them.
    #[test]
    fn a_host_with_many_connections_does_not_delay_another() {
        let mut listener = Listener::over(vec![TcpListener::bind("127.0.0.1:0").unwrap()]).unwrap();
        let connect = || TcpStream::connect(("127.0.0.1", listener.port())).unwrap();
        let connections: Vec<_> = (0..100).map(|_| connect()).collect();
        while listener.greeting.len() < connections.len() {
            listener.accept_all().unwrap();
        }
        listener.greeting[99].host = "10.0.0.1".parse().unwrap();
        let numbers: Vec<u64> = listener.greeting.iter().map(|greeting| greeting.id.0).collect();
        let order = listener.in_turn(numbers.iter().copied().chain([LISTENER]));
        assert_eq!(order.len(), STEPS_MAX);
        assert_eq!(
            order.iter().take(3).collect::<Vec<_>>(),
            [&LISTENER, &numbers[0], &numbers[99]]
        );
    }

    #[test]
    fn addresses_of_one_network_are_one_host() {
        let host = |address: &str| host_of(address.parse().unwrap());
        assert_eq!(host("2001:db8::1"), host("2001:db8::ffff:1:2"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_eq!(host("::ffff:10.0.0.1"), host("10.0.0.1"));
        assert_ne!(host("10.0.0.1"), host("10.0.0.2"));
    }
}
