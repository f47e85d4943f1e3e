//! The threads of a server that execute the chains of sessions.
//!
//! Each thread waits in epoll. While events come at short intervals, it polls and does not sleep:
//! to wake it takes its client more time than the verbs take.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::output::Output;
use super::record::{WORD_BYTES, encode_clock};
use super::session::{Broken, Device, Session};
use super::stream::Stream;
use crate::rdma::ConnectionId;
use crate::shm::{Executor, Lease, Region};

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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves no list half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connections of sessions that have ended. Its descriptor is readable while there are some.
pub(super) struct EndedConnections {
    ids: Mutex<VecDeque<ConnectionId>>,
    event: OwnedFd,
}

impl EndedConnections {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { ids: Mutex::default(), event })
    }

    fn add(&self, id: ConnectionId) {
        lock(&self.ids).push_back(id);
        signal(&self.event);
    }

    pub(super) fn take(&self) -> Option<ConnectionId> {
        let mut ids = lock(&self.ids);
        let first = ids.pop_front();
        if ids.is_empty() {
            // It fails if nothing was written.
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        first
    }
}

impl AsFd for EndedConnections {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Makes an eventfd readable.
fn signal(event: &OwnedFd) {
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

/// Threads that execute chains. Dropping this ends them, and their connections.
pub struct Executors {
    threads: Vec<(Arc<Shared>, Option<JoinHandle<()>>)>,
    next: AtomicUsize,
}

impl Executors {
    /// Starts a thread for each of these. Each polls for at most `spin` before it sleeps.
    pub(super) fn start(
        devices: impl Iterator<Item = Device>,
        spin: Duration,
        ended: &Arc<EndedConnections>,
    ) -> io::Result<Self> {
        let mut executors = Self { threads: Vec::new(), next: AtomicUsize::new(0) };
        for (number, device) in devices.enumerate() {
            let thread = Thread::new(ended.clone(), device, spin)?;
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
    ended: Arc<EndedConnections>,
    epoll: OwnedFd,
    sessions: Vec<Option<Session>>,
    buffer: Vec<u64>,
    output: Output,
    device: Device,
    spin: Duration,
    /// Whether the last events came within `spin`, so that the next ones may.
    spins: bool,
}

impl Thread {
    pub(super) fn new(
        ended: Arc<EndedConnections>,
        device: Device,
        spin: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(WAKEUP);
        epoll::add(&epoll, &shared.wakeup, data, EventFlags::IN)?;
        let (sessions, output) = (Vec::new(), Output::default());
        let buffer = vec![0; INPUT_WORDS];
        Ok(Self { shared, ended, epoll, sessions, buffer, output, device, spin, spins: false })
    }

    /// Serves sessions until it is to stop. Before it sleeps it polls for at most `spin`, if the
    /// last events came as soon.
    fn run(mut self) {
        while !self.shared.stops.load(Ordering::Acquire) {
            if self.spins && self.serve_waiting() {
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

    /// Serves the sessions that have events already. Returns whether there are any.
    pub(super) fn serve_waiting(&mut self) -> bool {
        let mut room = NO_EVENTS;
        let events = self.wait(&mut room, Some(&AT_ONCE));
        self.serve_all(events);
        !events.is_empty()
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
            self.serve(slot, flags.contains(EventFlags::RDHUP));
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
        // The client waits for the clock before it sends anything.
        encode_clock(session.executor.clock.now(), &mut session.output.words);
        let greeted = session.output.send(&mut session.stream);
        let id = session.id;
        self.sessions[slot] = Some(session);
        if watched.is_err() || greeted.is_err() {
            self.sessions[slot] = None;
            self.ended.add(id);
        }
    }

    /// Serves a session. Ends it if its connection is broken, or if no more arrives and the client
    /// does not take its replies.
    fn serve(&mut self, slot: usize, has_ended: bool) {
        let Some(session) = self.sessions.get_mut(slot).and_then(Option::as_mut) else { return };
        let mut served = session.serve(&mut self.buffer, &mut self.output, &mut self.device);
        if has_ended && !session.output.is_empty() {
            served = Err(Broken);
        }
        while served.is_ok() && session.output.is_empty() {
            served = match session.has_whole_request() {
                true => session.execute_input(&mut self.output, &mut self.device),
                false if session.stream.has_received() => {
                    session.serve(&mut self.buffer, &mut self.output, &mut self.device)
                }
                false => break,
            };
        }
        let wants_room = !session.output.is_empty();
        if served.is_ok() && wants_room != session.watches_room {
            // Without room for replies, requests stay unread.
            let events =
                if wants_room { EventFlags::OUT | EventFlags::RDHUP } else { EventFlags::IN };
            let data = epoll::EventData::new_u64(slot as u64);
            let changed = epoll::modify(&self.epoll, &session.stream, data, events);
            (session.watches_room, served) = (wants_room, changed.map_err(|_| Broken));
        }
        if served.is_err() {
            self.output.clear();
            let id = session.id;
            // The control thread may hold the socket, so closing is not enough.
            let _ = epoll::delete(&self.epoll, &session.stream);
            Stream::shut_down(&session.stream.socket());
            self.sessions[slot] = None;
            self.ended.add(id);
        }
    }
}
