//! A worker: a thread that serves its share of the connections, with a session and a deep pipeline.
//!
//! In each turn it takes the events of its sockets, begins requests of all connections that can go
//! on, and polls the pipeline, so that their operations share doorbells. Then it sends replies.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use farside::{Pipeline, Session};
use farside_resp::{ParserLimits, Protocol};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::commands::{ClientState, error};
use crate::connection::{Connection, Overdue};
use crate::executor::{Executor, Pause};
use crate::gateway::{ClientRecord, Gateway};
use crate::helper::{Helper, HelperKind, Results};
use crate::stream::Stream;

/// The number of the wake-up in epoll's events; others are places of connections.
const WAKE: u64 = u64::MAX;
/// The events that one system call takes at most.
const EVENTS: usize = 256;
/// How often one turn begins requests and polls, if connections wait for the same keys.
const ROUNDS_PER_TURN: usize = 16;
/// Turns without any progress before a turn sleeps, while operations are in flight.
const SPINS: u32 = 200;
/// How long such a turn sleeps at first.
const NAP: Duration = Duration::from_micros(20);
/// After so many such turns they sleep twice as long.
const NAPS: u32 = 50;
/// The longest nap. Events of sockets end it, unlike shorter ones.
const NAP_MAX: Duration = Duration::from_millis(1);
/// How long a worker looks for events before it sleeps, if its last wait was as short. To wake a
/// processor takes a client several microseconds.
const LOOK: Duration = Duration::from_micros(50);
const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Output of more bytes is sent before all requests of the connection have begun.
const OUTPUT_BYTES_EARLY: usize = 64 << 10;
/// How often a worker looks for connections that have to end.
const TICK: Duration = Duration::from_secs(1);
/// How long a thread waits before it tries again to reach the store.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// A new connection for a worker.
pub(crate) struct Arrival {
    pub(crate) socket: OwnedFd,
    pub(crate) record: Arc<ClientRecord>,
    pub(crate) uses_tls: bool,
}

/// How other threads reach a worker.
#[derive(Clone)]
pub(crate) struct WorkerHandle {
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    /// Connections whose places others get.
    unwanted: Arc<Mutex<Vec<Arc<ClientRecord>>>>,
    wake: Arc<OwnedFd>,
}

impl WorkerHandle {
    /// Gives the worker a connection.
    pub(crate) fn give(&self, arrival: Arrival) {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(arrival);
        self.wake();
    }

    /// Makes the worker close a connection of its own.
    pub(crate) fn close(&self, record: Arc<ClientRecord>) {
        self.unwanted.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        self.wake();
    }

    /// Wakes the worker, so that it takes its messages.
    pub(crate) fn wake(&self) {
        // It fails only if the worker was woken very often and has not slept since.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

/// Why a worker stops to serve with its pipeline.
enum Break {
    /// The gateway ends.
    Stop,
    /// The connection to the store is lost.
    Lost,
    /// The session's buffers are too long.
    Replace,
    /// The session is back.
    Connected(Box<Session>),
}

/// A worker.
pub(crate) struct Worker {
    executor: Executor,
    handle: WorkerHandle,
    results: Results,
    epoll: OwnedFd,
    connections: Vec<Option<Box<Connection>>>,
    free_places: Vec<usize>,
    /// Connections that can go on.
    runnable: VecDeque<usize>,
    /// Connections that wait for an operation.
    blocked: Vec<usize>,
    /// Connections that wait for a lock of a key, by its number.
    key_waiters: HashMap<usize, VecDeque<usize>>,
    /// Connections with new replies.
    touched: Vec<usize>,
    /// Memory for the connections whose replies are being sent.
    sending: Vec<usize>,
    /// Turns without progress while operations are in flight.
    idle_turns: u32,
    /// Whether events are likely within [`LOOK`].
    looks: bool,
    /// When it looked last for connections that have to end.
    ticked: Instant,
    limits: ParserLimits,
    /// The session comes from here when it has reconnected.
    reconnecting: Option<Receiver<Session>>,
}

impl Worker {
    pub(crate) fn new(gateway: Arc<Gateway>) -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let results = Results::default();
        let helpers = HelperKind::ALL
            .map(|kind| Helper::new(kind, gateway.clone(), results.clone(), wake.clone()));
        let longest = gateway.limits.value_bytes_max.max(gateway.limits.key_bytes_max);
        let limits = ParserLimits { kept_bytes_max: longest, ..ParserLimits::default() };
        Ok(Self {
            executor: Executor::new(gateway, helpers),
            handle: WorkerHandle { arrivals: Arc::default(), unwanted: Arc::default(), wake },
            results,
            epoll,
            connections: Vec::new(),
            free_places: Vec::new(),
            runnable: VecDeque::new(),
            blocked: Vec::new(),
            key_waiters: HashMap::new(),
            touched: Vec::new(),
            sending: Vec::new(),
            idle_turns: 0,
            looks: false,
            ticked: Instant::now(),
            limits,
            reconnecting: None,
        })
    }

    pub(crate) fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }

    fn gateway(&self) -> &Arc<Gateway> {
        &self.executor.gateway
    }

    /// Serves until the gateway ends.
    ///
    /// # Errors
    /// The error of epoll.
    pub(crate) fn run(mut self, session: Session) -> io::Result<()> {
        let mut session = Some(session);
        loop {
            let ended = match &mut session {
                Some(session) => match session.pipeline() {
                    Ok(pipeline) => self.serve(Some(pipeline))?,
                    Err(error) => {
                        self.executor.away = Some(error::of_operation(&error));
                        Break::Lost
                    }
                },
                None => self.serve(None)?,
            };
            match ended {
                Break::Stop => return Ok(()),
                Break::Connected(connected) => {
                    tracing::info!("FS-062 the store answers again");
                    self.executor.session_is_new();
                    session = Some(*connected);
                }
                Break::Replace => {
                    let opened = self.gateway().client.session();
                    if let Ok(opened) = opened {
                        session = Some(opened);
                    }
                    self.executor.session_is_new();
                }
                Break::Lost => {
                    if let Some(session) = session.take() {
                        self.reconnect(session);
                    }
                }
            }
        }
    }

    /// Lets a thread reconnect the session.
    fn reconnect(&mut self, mut session: Session) {
        tracing::warn!(
            "FS-061 lost the connection to the store; clients get errors until it is back"
        );
        let (sender, receiver): (Sender<Session>, _) = channel();
        let (gateway, handle) = (self.gateway().clone(), self.handle());
        let thread = thread::Builder::new().name("resp-reconnect".into());
        let started = thread.spawn(move || {
            while session.pipeline().is_err() && !gateway.is_stopping() {
                thread::sleep(RECONNECT_INTERVAL);
            }
            // The worker may have ended.
            let _ = sender.send(session);
            handle.wake();
        });
        // Without a thread the receiver is closed, and the worker opens another session later.
        drop(started);
        self.reconnecting = Some(receiver);
    }

    /// Returns the session that has reconnected, if it has.
    fn reconnected(&mut self) -> Option<Session> {
        match self.reconnecting.as_ref()?.try_recv() {
            Ok(session) => {
                self.reconnecting = None;
                Some(session)
            }
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let session = self.gateway().client.session().ok()?;
                self.reconnecting = None;
                Some(session)
            }
        }
    }

    /// Serves with this pipeline, or without one while the store is away.
    fn serve(&mut self, mut pipeline: Option<Pipeline<'_>>) -> io::Result<Break> {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let in_flight = pipeline.as_ref().map_or(0, Pipeline::in_flight);
            if self.gateway().is_stopping() {
                return Ok(Break::Stop);
            }
            if in_flight == 0 {
                if let Some(session) = self.reconnected() {
                    return Ok(Break::Connected(Box::new(session)));
                }
                if self.executor.away.is_some() && pipeline.is_some() {
                    return Ok(Break::Lost);
                }
                if self.executor.must_replace_session() {
                    return Ok(Break::Replace);
                }
            }
            self.wait(&mut events, in_flight)?;
            for event in events.drain(..) {
                self.take_event(event.data.u64(), event.flags);
            }
            for _ in 0..ROUNDS_PER_TURN {
                self.run_connections(&mut pipeline);
                if let Some(pipeline) = &mut pipeline {
                    self.poll(pipeline);
                }
                // Without a free lane none of them could go on, and their order would be lost.
                let is_full = pipeline.as_ref().is_some_and(|pipeline| pipeline.free_lanes() == 0);
                if is_full || !self.wake_key_waiters() {
                    break;
                }
            }
            self.tick();
            self.send_replies();
        }
    }

    /// Waits for events, if there is nothing else to do.
    fn wait(&mut self, events: &mut Vec<epoll::Event>, in_flight: usize) -> io::Result<()> {
        let timeout = if !self.runnable.is_empty() {
            Some(NO_TIME)
        } else if in_flight > 0 {
            let nap = nap(self.idle_turns);
            if nap == NAP_MAX {
                Some(Timespec { tv_sec: 0, tv_nsec: i64::from(NAP_MAX.subsec_nanos()) })
            } else {
                // Timeouts of epoll are whole milliseconds before Linux 5.11.
                if nap > Duration::ZERO {
                    thread::sleep(nap);
                }
                Some(NO_TIME)
            }
        } else if self.reconnecting.is_some() {
            // The thread wakes this one, if it could be started.
            Some(Timespec { tv_sec: 0, tv_nsec: i64::from(RECONNECT_INTERVAL.subsec_nanos()) })
        } else {
            let began = Instant::now();
            while self.looks && began.elapsed() < LOOK {
                self.take_events(events, Some(&NO_TIME))?;
                if !events.is_empty() {
                    return Ok(());
                }
            }
            // After a look in vain the next wait begins with sleep.
            let is_empty = self.connections.len() == self.free_places.len();
            let tick = Timespec { tv_sec: TICK.as_secs() as i64, tv_nsec: 0 };
            self.take_events(events, (!is_empty).then_some(&tick))?;
            self.looks = began.elapsed() < LOOK;
            return Ok(());
        };
        self.take_events(events, timeout.as_ref())
    }

    fn take_events(
        &self,
        events: &mut Vec<epoll::Event>,
        timeout: Option<&Timespec>,
    ) -> io::Result<()> {
        let space = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, space, timeout) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn take_event(&mut self, data: u64, flags: EventFlags) {
        if data == WAKE {
            return self.take_messages();
        }
        let place = data as usize;
        let Some(Some(connection)) = self.connections.get_mut(place) else { return };
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
        {
            connection.is_readable = true;
        }
        // No other event tells of it.
        connection.end_is_near |=
            flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        if flags.contains(EventFlags::OUT) {
            connection.set_writable();
            self.touch(place);
        }
        self.list(place);
    }

    /// Makes a connection go on in the next turn.
    fn list(&mut self, place: usize) {
        let Some(Some(connection)) = self.connections.get_mut(place) else { return };
        if !connection.is_listed {
            connection.is_listed = true;
            self.runnable.push_back(place);
        }
    }

    /// Makes the replies of a connection be sent in this turn.
    fn touch(&mut self, place: usize) {
        let Some(Some(connection)) = self.connections.get_mut(place) else { return };
        if !connection.is_touched {
            connection.is_touched = true;
            self.touched.push(place);
        }
    }

    /// Takes what other threads have sent.
    fn take_messages(&mut self) {
        // It fails only if another wake-up was read with this one.
        let _ = rustix::io::read(&*self.handle.wake, &mut [0; 8]);
        for arrival in take_all(&self.handle.arrivals.clone()) {
            let id = arrival.record.id;
            if let Err(error) = self.add(arrival) {
                tracing::warn!("FS-063 cannot serve a connection: {error}");
                self.gateway().dismiss(id);
            }
        }
        // After the arrivals, which may be among them.
        for record in take_all(&self.handle.unwanted.clone()) {
            let place = record.place.load(Ordering::Relaxed);
            if let Some(Some(connection)) = self.connections.get_mut(place)
                && connection.id() == record.id
            {
                connection.has_ended = true;
                self.touch(place);
            }
        }
        for executed in take_all(&self.results.clone()) {
            if let Some(key) = &executed.short_key {
                self.executor.forget_long(key);
            }
            let place = executed.origin.place;
            if let Some(Some(connection)) = self.connections.get_mut(place)
                && connection.id() == executed.origin.id
            {
                connection.awaits_helper = false;
                connection.finish_with(executed.origin.reply, executed.reply);
                self.touch(place);
                self.list(place);
            }
        }
    }

    fn add(&mut self, arrival: Arrival) -> io::Result<()> {
        let Arrival { socket, record, uses_tls } = arrival;
        let gateway = self.gateway();
        let tls = gateway.tls.as_ref().filter(|_| uses_tls);
        let stream = Stream::new(socket, tls.map(|tls| tls.config_of_next()))?;
        let is_authenticated = gateway.password.is_none();
        let protocol = Protocol::Two;
        let client = ClientState {
            record,
            protocol,
            is_authenticated,
            is_in_transaction: false,
            is_delayed: false,
            is_closing: false,
        };
        let waiting = gateway.waiting_input();
        let connection = Box::new(Connection::new(stream, client, self.limits, waiting));
        let place = self.free_places.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(place as u64);
        if let Err(error) = epoll::add(&self.epoll, connection.stream.as_fd(), data, flags) {
            self.free_places.push(place);
            return Err(error.into());
        }
        connection.client.record.place.store(place, Ordering::Relaxed);
        self.connections[place] = Some(connection);
        self.list(place);
        Ok(())
    }

    /// Begins requests of all connections that can go on.
    fn run_connections(&mut self, pipeline: &mut Option<Pipeline<'_>>) {
        if !self.runnable.is_empty() {
            self.idle_turns = 0;
        }
        for _ in 0..self.runnable.len() {
            if pipeline.as_ref().is_some_and(|pipeline| pipeline.free_lanes() == 0) {
                // Most would only find that out.
                break;
            }
            let Some(place) = self.runnable.pop_front() else { break };
            let Some(Some(connection)) = self.connections.get_mut(place) else { continue };
            connection.is_listed = false;
            connection.goes_on = false;
            let pause = self.executor.run(connection, place, pipeline);
            connection.is_paused = pause == Pause::Output;
            match pause {
                Pause::Turn => {
                    connection.is_listed = true;
                    connection.goes_on = !connection.client.is_closing;
                    self.runnable.push_back(place);
                }
                Pause::Operation => {
                    connection.is_listed = true;
                    // A full pipeline has room again soon. A key may be in use for longer.
                    connection.goes_on =
                        pipeline.as_ref().is_some_and(|pipeline| pipeline.free_lanes() == 0);
                    self.blocked.push(place);
                }
                Pause::Key(lock) => {
                    connection.is_listed = true;
                    self.key_waiters.entry(lock).or_default().push_back(place);
                }
                Pause::Event | Pause::Output => {}
            }
            self.touch(place);
        }
    }

    /// Posts operations, and takes the completed ones.
    fn poll(&mut self, pipeline: &mut Pipeline<'_>) {
        self.executor.lanes.next_epoch();
        let mut has_progress = false;
        while pipeline.in_flight() > 0 {
            let Some(completed) = pipeline.poll() else { break };
            has_progress = true;
            let number = completed.ticket.lane();
            let place = self.executor.lanes.lane(number).origin.place;
            let connection = self.connections.get_mut(place).and_then(Option::as_deref_mut);
            let next = self.executor.complete(completed, connection);
            if let Some((operation, number)) = next {
                let connection = self.connections.get_mut(place).and_then(Option::as_deref_mut);
                self.executor.go_on(operation, number, pipeline, connection);
            }
            self.touch(place);
        }
        if has_progress {
            self.idle_turns = 0;
        } else if pipeline.in_flight() > 0 {
            self.idle_turns = self.idle_turns.saturating_add(1);
        }
        if has_progress || pipeline.in_flight() == 0 {
            // Behind those that had no lane yet, so that each gets some.
            self.runnable.extend(self.blocked.drain(..));
        }
    }

    /// Lets one connection for each free lock go on. Returns whether there was any.
    fn wake_key_waiters(&mut self) -> bool {
        let Self { key_waiters, executor, runnable, .. } = self;
        let mut has_woken = false;
        key_waiters.retain(|lock, places| {
            if !executor.lanes.is_held(*lock)
                && let Some(place) = places.pop_front()
            {
                runnable.push_front(place);
                has_woken = true;
            }
            !places.is_empty()
        });
        has_woken
    }

    /// Sends the replies of the connections with new ones.
    fn send_replies(&mut self) {
        if !self.blocked.is_empty() && self.executor.away.is_some() {
            self.runnable.extend(self.blocked.drain(..));
        }
        let mut touched = std::mem::take(&mut self.sending);
        std::mem::swap(&mut touched, &mut self.touched);
        for place in touched.drain(..) {
            let Some(Some(connection)) = self.connections.get_mut(place) else { continue };
            connection.is_touched = false;
            // More replies of a connection that goes on at once leave with the same system call.
            let goes_on = connection.goes_on && !connection.has_ended && self.blocked.is_empty();
            if !goes_on || connection.output_bytes() >= OUTPUT_BYTES_EARLY {
                connection.send();
            } else {
                // If it does not get its turn then, they are sent in the next one.
                connection.goes_on = false;
                connection.is_touched = true;
                self.touched.push(place);
            }
            if connection.is_done() {
                self.remove(place);
            } else if connection.is_paused && (!connection.is_full() || connection.reads_ahead()) {
                connection.is_paused = false;
                self.list(place);
            }
        }
        self.sending = touched;
    }

    fn remove(&mut self, place: usize) {
        let Some(Some(mut connection)) = self.connections.get_mut(place).map(Option::take) else {
            return;
        };
        connection.stream.close();
        self.executor.gateway.dismiss(connection.id());
        // A list may still name this place. Then the place is empty, or its new connection runs
        // twice, which is harmless.
        self.free_places.push(place);
    }

    /// Ends the connections that are overdue, once a second.
    fn tick(&mut self) {
        if self.ticked.elapsed() < TICK {
            return;
        }
        self.ticked = Instant::now();
        let idle_s_max = self.gateway().idle_s_max;
        let idle_ticks_max = (idle_s_max > 0).then_some(idle_s_max);
        let (mut stalled, mut last) = (0, None);
        for place in 0..self.connections.len() {
            let Some(Some(connection)) = self.connections.get_mut(place) else { continue };
            let overdue = connection.tick(idle_ticks_max);
            if overdue == Some(Overdue::Replies) {
                (stalled, last) = (stalled + 1, Some(connection.client.record.clone()));
            }
            connection.has_ended |= overdue.is_some();
            let was_delayed = std::mem::take(&mut connection.client.is_delayed);
            let goes_on = was_delayed || connection.is_paused && connection.reads_ahead();
            if connection.has_ended || was_delayed {
                self.touch(place);
            }
            if goes_on {
                self.list(place);
            }
        }
        if let Some(record) = last {
            let address = &record.address;
            tracing::warn!(
                "FS-065 closed a connection whose client sends requests and takes no replies \
                 address={address} others={}",
                stalled - 1
            );
        }
        let (wrong, address) = self.gateway().take_wrong_passwords();
        if wrong > 0 {
            let others = wrong - 1;
            tracing::warn!(
                "FS-066 a client gave a wrong password address={address} others={others}"
            );
        }
    }
}

/// The sleep of a turn after so many turns without progress.
fn nap(idle_turns: u32) -> Duration {
    let Some(naps) = idle_turns.checked_sub(SPINS) else { return Duration::ZERO };
    NAP.saturating_mul(1 << (naps / NAPS).min(16)).min(NAP_MAX)
}

/// Empties a list that another thread fills.
fn take_all<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner))
}
