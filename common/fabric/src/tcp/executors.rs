//! The threads of a server that execute the chains of sessions.
//!
//! Each thread waits in epoll. While events come at short intervals, it polls and does not sleep:
//! to wake it takes its client more time than the verbs take.
//!
//! Sessions with requests take turns, which end when they have touched enough bytes. Of each client
//! one session has a turn before another one has its second.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::kept_bytes::KeptBytes;
use super::listen::Incoming;
use super::record::WORD_BYTES;
use super::session::{Broken, Device, Session, TURN_BYTES, Tools};
use super::stream::Stream;
use crate::memory::{Executor, Lease, Region};
use crate::rdma::ConnectionId;

/// The bytes that one system call receives.
pub(super) const INPUT_WORDS: usize = (256 << 10) / WORD_BYTES;
const EVENTS_MAX: usize = 64;
/// Room for the events of one wait.
type Room = [MaybeUninit<epoll::Event>; EVENTS_MAX];
const NO_EVENTS: Room = [const { MaybeUninit::uninit() }; EVENTS_MAX];
/// The number of the wakeup in epoll's events. Sessions have the numbers of their slots.
const WAKEUP: u64 = u64::MAX;
/// The timeout of a wait that only looks.
pub(super) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves no list half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event for the thread that admits clients.
pub enum Event {
    /// A connection sent its request.
    Request(Incoming),
    /// The connection of a session has ended.
    Ended(ConnectionId),
}

/// The events that wait for the thread that admits clients. Its descriptor is readable while there
/// are some.
pub(super) struct News {
    waiting: Mutex<VecDeque<io::Result<Event>>>,
    event: OwnedFd,
}

impl News {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waiting: Mutex::default(), event })
    }

    pub(super) fn add(&self, news: io::Result<Event>) {
        lock(&self.waiting).push_back(news);
        signal(&self.event);
    }

    pub(super) fn take(&self) -> Option<io::Result<Event>> {
        let mut waiting = lock(&self.waiting);
        let first = waiting.pop_front();
        if waiting.is_empty() {
            // It fails if nothing was written.
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        first
    }
}

impl AsFd for News {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Makes an eventfd readable.
pub(super) fn signal(event: &OwnedFd) {
    // It fails only if the counter is full: then the descriptor is readable anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// The state that a thread shares with the others.
struct Shared {
    /// Sessions for the thread to take over.
    new: Mutex<Vec<Session>>,
    stops: AtomicBool,
    wakeup: OwnedFd,
}

impl Shared {
    fn new() -> io::Result<Self> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { new: Mutex::default(), stops: AtomicBool::new(false), wakeup })
    }
}

/// How executors work.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorOptions {
    /// While requests come at shorter intervals, a thread polls instead of sleeping between them.
    pub spin: Duration,
    /// Limit on the memory for requests and replies that wait. Above it sessions end.
    pub kept_bytes_max: usize,
}

/// Threads that execute chains. Dropping this ends them, and their connections.
pub struct Executors {
    threads: Vec<(Arc<Shared>, Option<JoinHandle<()>>)>,
    next: AtomicUsize,
}

impl Executors {
    /// Starts a thread for each of these.
    pub(super) fn start(
        devices: impl Iterator<Item = Device>,
        options: ExecutorOptions,
        news: &Arc<News>,
    ) -> io::Result<Self> {
        let mut executors = Self { threads: Vec::new(), next: AtomicUsize::new(0) };
        let kept = Arc::new(KeptBytes::new(options.kept_bytes_max));
        for (number, device) in devices.enumerate() {
            let thread = Thread::new(news.clone(), device, options.spin, kept.clone())?;
            let shared = thread.shared.clone();
            let handle = std::thread::Builder::new()
                .name(format!("farside-tcp-{number}"))
                .spawn(move || thread.run())?;
            executors.threads.push((shared, Some(handle)));
        }
        Ok(executors)
    }

    /// Hands a session to one of the threads, in turn.
    pub(super) fn add(
        &self,
        id: ConnectionId,
        stream: Stream,
        region: &Arc<Region>,
        lease: Lease,
    ) -> io::Result<DataConnection> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len();
        let (shared, _) = &self.threads[number];
        let connection = DataConnection { id, socket: stream.socket() };
        let executor = Executor::new(region.clone(), Some(lease));
        lock(&shared.new).push(Session::new(id, stream, executor));
        signal(&shared.wakeup);
        Ok(connection)
    }
}

impl Drop for Executors {
    fn drop(&mut self) {
        for (shared, _) in &self.threads {
            shared.stops.store(true, Ordering::Release);
            signal(&shared.wakeup);
        }
        for (_, handle) in &mut self.threads {
            // A thread that panicked has ended as well.
            let _ = handle.take().map(JoinHandle::join);
        }
    }
}

/// The control thread's end of a session's connection. Dropping it ends the connection: requests
/// that have arrived are still answered. The lease, not this, is the fence.
pub struct DataConnection {
    id: ConnectionId,
    socket: Arc<OwnedFd>,
}

impl DataConnection {
    /// The number of the connection.
    pub fn id(&self) -> ConnectionId {
        self.id
    }
}

impl Drop for DataConnection {
    fn drop(&mut self) {
        Stream::stop_receiving(&self.socket);
    }
}

/// A thread, with its sessions.
pub(super) struct Thread {
    shared: Arc<Shared>,
    news: Arc<News>,
    epoll: OwnedFd,
    sessions: Vec<Option<Session>>,
    /// The sessions that wait for their turn.
    queue: VecDeque<usize>,
    /// Those that had a turn in this round, and wait for another one.
    later: VecDeque<usize>,
    /// The clients of which a session had a turn in this round, by the offsets of their leases.
    served: HashSet<u64>,
    buffer: Vec<u64>,
    tools: Tools,
    kept: Arc<KeptBytes>,
    spin: Duration,
    /// Whether the last events came within `spin`, so that the next ones may.
    spins: bool,
}

impl Thread {
    pub(super) fn new(
        news: Arc<News>,
        device: Device,
        spin: Duration,
        kept: Arc<KeptBytes>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(WAKEUP);
        epoll::add(&epoll, &shared.wakeup, data, EventFlags::IN)?;
        Ok(Self {
            shared,
            news,
            epoll,
            sessions: Vec::new(),
            queue: VecDeque::new(),
            later: VecDeque::new(),
            served: HashSet::new(),
            buffer: vec![0; INPUT_WORDS],
            tools: Tools::new(device),
            kept,
            spin,
            spins: false,
        })
    }

    /// Serves sessions until it is to stop. Before it sleeps it polls for at most `spin`, if the
    /// last events came as soon.
    fn run(mut self) {
        while !self.shared.stops.load(Ordering::Acquire) {
            if (self.spins || !self.queue.is_empty()) && self.serve_waiting() {
                continue;
            }
            let (started, mut room) = (Instant::now(), NO_EVENTS);
            let mut has_served = false;
            while self.spins && !has_served && started.elapsed() < self.spin {
                // Other threads may need this processor, the clients' too.
                std::thread::yield_now();
                has_served = self.serve_waiting();
            }
            if !has_served {
                let events = self.wait(&mut room, None);
                self.spins = started.elapsed() < self.spin;
                self.serve_all(events);
            }
        }
    }

    /// Serves the sessions that have events already, and those that wait for a turn. Returns
    /// whether there are any.
    pub(super) fn serve_waiting(&mut self) -> bool {
        let mut room = NO_EVENTS;
        let events = self.wait(&mut room, Some(&AT_ONCE));
        let has_work = !events.is_empty() || !self.queue.is_empty();
        self.serve_all(events);
        has_work
    }

    /// Waits for events of sessions, or of the wakeup.
    fn wait<'r>(&self, room: &'r mut Room, timeout: Option<&Timespec>) -> &'r [epoll::Event] {
        // An interrupted wait is a short one.
        epoll::wait(&self.epoll, &mut room[..], timeout).map_or(&[], |(events, _)| events)
    }

    fn serve_all(&mut self, events: &[epoll::Event]) {
        let is_wakeup = |event: &&epoll::Event| event.data.u64() == WAKEUP;
        for event in events.iter().filter(|event| !is_wakeup(event)) {
            let (slot, flags) = (event.data.u64() as usize, event.flags);
            let Some(Some(session)) = self.sessions.get_mut(slot) else { continue };
            session.has_ended = flags.contains(EventFlags::RDHUP);
            if !std::mem::replace(&mut session.is_queued, true) {
                self.queue.push_back(slot);
            }
        }
        // Sessions that touch much let others in before all have had their turns.
        let mut used = 0;
        while used < TURN_BYTES && !self.queue.is_empty() {
            used += self.serve_round();
        }
        // Afterwards, because a new session may get the slot of one that has just ended.
        if events.iter().any(|event| is_wakeup(&event)) {
            self.take_new();
        }
    }

    /// Takes over new sessions.
    fn take_new(&mut self) {
        let _ = rustix::io::read(&self.shared.wakeup, &mut [0; 8]);
        let new = std::mem::take(&mut *lock(&self.shared.new));
        new.into_iter().for_each(|session| self.begin(session));
    }

    /// Begins to serve a session.
    pub(super) fn begin(&mut self, mut session: Session) {
        let slot = self.sessions.iter().position(Option::is_none);
        let slot = slot.unwrap_or_else(|| {
            self.sessions.push(None);
            self.sessions.len() - 1
        });
        let data = epoll::EventData::new_u64(slot as u64);
        let watched = epoll::add(&self.epoll, &session.stream, data, EventFlags::IN);
        let greeted = session.greet(&mut self.tools);
        let id = session.id;
        self.sessions[slot] = Some(session);
        if watched.is_err() || greeted.is_err() {
            self.sessions[slot] = None;
            self.news.add(Ok(Event::Ended(id)));
        }
    }

    /// Gives a turn to one session of each client in the queue. Returns how many bytes they have
    /// touched and sent.
    fn serve_round(&mut self) -> usize {
        let (mut used, waiting) = (0, self.queue.len());
        self.served.clear();
        for _ in 0..waiting {
            let Some(slot) = self.queue.pop_front() else { break };
            let Some(Some(session)) = self.sessions.get_mut(slot) else { continue };
            if waiting > 1 && !self.served.insert(session.executor.client()) {
                self.queue.push_back(slot);
                continue;
            }
            session.is_queued = false;
            if self.serve(slot) {
                self.later.push_back(slot);
            }
            used += self.tools.used();
        }
        self.queue.append(&mut self.later);
        used
    }

    /// Serves a session. Ends it if its connection is broken, if no more arrives and the client
    /// does not take its replies, or if too much waits. Returns whether it needs another turn.
    fn serve(&mut self, slot: usize) -> bool {
        let Some(Some(session)) = self.sessions.get_mut(slot) else { return false };
        let mut served = session.take_turn(&mut self.buffer, &mut self.tools);
        let waits_for_room = !session.output.is_empty() && matches!(served, Ok(false));
        if session.has_ended && waits_for_room {
            served = Err(Broken);
        }
        if served.is_ok() && waits_for_room != session.watches_room {
            // Without room for replies, requests stay unread.
            let events =
                if waits_for_room { EventFlags::OUT | EventFlags::RDHUP } else { EventFlags::IN };
            let data = epoll::EventData::new_u64(slot as u64);
            let changed = epoll::modify(&self.epoll, &session.stream, data, events);
            session.watches_room = waits_for_room;
            served = served.and_then(|more| changed.map(|()| more).map_err(|_| Broken));
        }
        let kept_bytes = session.kept_bytes();
        if kept_bytes != session.noted_bytes {
            let (client, socket) = (session.executor.client(), session.stream.socket());
            session.noted_bytes = kept_bytes;
            if !self.kept.note(client, session.id, &socket, kept_bytes) {
                served = Err(Broken);
            }
        }
        match served {
            Ok(more) => {
                session.is_queued = more;
                more
            }
            Err(Broken) => {
                self.end(slot);
                false
            }
        }
    }

    /// Ends a session.
    fn end(&mut self, slot: usize) {
        let Some(session) = self.sessions[slot].take() else { return };
        let socket = session.stream.socket();
        // The control thread may hold the socket, so closing is not enough.
        let _ = epoll::delete(&self.epoll, &session.stream);
        Stream::shut_down(&socket);
        if session.noted_bytes > 0 {
            self.kept.note(session.executor.client(), session.id, &socket, 0);
        }
        self.news.add(Ok(Event::Ended(session.id)));
    }
}

/// The work of one thread of [`Executors`], without the thread: a test decides when it goes on. The
/// other ends of the sessions' sockets play clients.
#[doc(hidden)]
pub struct SteppedExecutor {
    thread: Thread,
    news: Arc<News>,
}

impl SteppedExecutor {
    /// Without a session and without a device.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> io::Result<Self> {
        let news = Arc::new(News::new()?);
        let kept = Arc::new(KeptBytes::new(usize::MAX));
        let thread = Thread::new(news.clone(), None, Duration::ZERO, kept)?;
        Ok(Self { thread, news })
    }

    /// Begins to serve the session of a client with this lease.
    pub fn begin(&mut self, id: ConnectionId, socket: OwnedFd, region: Arc<Region>, lease: Lease) {
        let executor = Executor::new(region, Some(lease));
        self.thread.begin(Session::new(id, Stream::unchanged(socket), executor));
    }

    /// Serves sessions once. Returns whether any had something to do.
    pub fn step(&mut self) -> bool {
        self.thread.serve_waiting()
    }

    /// The next event, if there is one.
    pub fn next_event(&self) -> Option<io::Result<Event>> {
        self.news.take()
    }
}
