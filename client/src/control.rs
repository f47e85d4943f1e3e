//! The control channel: one background thread per connection talks to the server, so that no
//! operation waits for a socket.

mod channel_blocks;
mod description;
mod heartbeats;
mod operator;
mod session_counts;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside_control::{ControlChannel, MESSAGE_BYTES_MAX, Request, ServerMessage, ServerRequest};
use farside_fabric::{Nanos, Trust, boot_time_ns};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use farside_protocol::allocator::{BlockDelivery, Delivery};
use farside_protocol::{Lookups, Prefix};

use self::channel_blocks::{ControlChannelBlocks, Inbox, ReportingSession};
pub(crate) use self::heartbeats::ClusterLink;
use self::heartbeats::Heartbeats;
pub(crate) use self::operator::ANSWER_TIMEOUT;
use self::operator::ReplyCell;
use self::session_counts::SessionCounts;
use crate::ConnectError;
use crate::metrics::ClientMetrics;

/// Timeout for sending the last messages when the client is dropped.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit on requests that await their replies. With more, unread replies could fill the socket
/// while this side still sends.
const OUTSTANDING_MAX: usize = 4;
/// The progress of a complete snapshot, in thousandths.
pub(crate) const PERMILLE_COMPLETE: u32 = 1000;

/// Locks, and ignores poisoning. A panic cannot leave the data half changed: each critical section
/// here is a push or a pop, or changes one message.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The receiver of the reply to a request.
enum Waiter {
    /// The request has no reply.
    None,
    Session(Arc<Inbox>),
    Operator(Arc<ReplyCell>),
}

/// The state that the control thread shares with the client and its sessions.
pub(crate) struct ControlQueue {
    /// Requests to send, in order.
    outbox: Mutex<VecDeque<(Request, Waiter)>>,
    /// The sessions whose blocks are reported when the server asks.
    sessions: Mutex<Vec<ReportingSession>>,
    counts: Mutex<SessionCounts>,
    /// The metrics of the client, if it has any, once a session uses this connection.
    pub(crate) metrics: OnceLock<Arc<ClientMetrics>>,
    /// Wakes the thread: the outbox or a flag has changed.
    wake: OwnedFd,
    lost: AtomicBool,
    /// Ends when the connection is lost.
    trust: Trust,
    /// The client is being dropped: send the rest of the outbox, then goodbye.
    closing: AtomicBool,
}

/// The client's end of a control channel. Says goodbye when dropped.
pub(crate) struct Control {
    queue: Arc<ControlQueue>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread that serves this connection.
    pub(crate) fn start(
        channel: Box<dyn ControlChannel>,
        trust: Trust,
        cluster: Option<ClusterLink>,
    ) -> Result<Self, ConnectError> {
        let failed = |doing| {
            move |source: io::Error| ConnectError::System { doing, source: Arc::new(source) }
        };
        let queue = ControlQueue::new(trust.clone());
        let queue = Arc::new(queue.map_err(failed("making an eventfd"))?);
        let control_thread = ControlThread {
            queue: queue.clone(),
            channel,
            heartbeats: cluster.map(|link| Heartbeats::new(link, trust)),
            waiters: VecDeque::new(),
            unsent: None,
            closing_since: None,
            has_said_goodbye: false,
            buffer: vec![0; MESSAGE_BYTES_MAX],
        };
        let thread = std::thread::Builder::new()
            .name("farside-control".into())
            .spawn(move || control_thread.run())
            .map_err(failed("starting the control thread"))?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// Whether the connection has ended: the server is gone or broke the protocol, or this client
    /// gave the connection up.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.queue.is_lost()
    }

    /// Gives the connection up: sessions reconnect. Sends no goodbye, so that the server cleans up
    /// what this client's operations may have left.
    pub(crate) fn give_up(&self) {
        self.queue.give_up();
    }

    /// Returns what gives the connection up and asks for maps, for the cluster.
    pub(crate) fn queue(&self) -> &Arc<ControlQueue> {
        &self.queue
    }

    /// Reports the progress of a snapshot to the server, which does not answer.
    pub(crate) fn report_snapshot(&self, permille: u32) {
        self.queue.send_snapshot_report(permille);
    }

    /// Returns one session's access to the server's depot.
    pub(crate) fn blocks(&self) -> ControlChannelBlocks {
        ControlChannelBlocks::new(self.queue.clone())
    }
}

impl Drop for Control {
    /// Takes at most [`FLUSH_TIMEOUT`].
    fn drop(&mut self) {
        self.queue.closing.store(true, Ordering::Release);
        self.queue.wake();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic. If it did, the server would see the socket close.
            let _ = thread.join();
        }
    }
}

impl ControlQueue {
    fn new(trust: Trust) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (outbox, sessions, counts, metrics) = Default::default();
        let (lost, closing) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { outbox, sessions, counts, metrics, wake, lost, trust, closing })
    }

    /// As [`Control::give_up`].
    pub(crate) fn give_up(&self) {
        self.note_lost();
        self.wake();
    }

    /// Asks the server for its map.
    pub(crate) fn ask_for_map(&self) {
        self.send(Request::Map, Waiter::None);
    }

    /// Reports to the server what a session counts here, and which blocks it reads.
    pub(crate) fn count(&self, lookups: Arc<Lookups>) {
        lock(&self.counts).add(lookups);
    }

    /// Sends a heartbeat with the operations that were not reported yet.
    fn send_heartbeat(&self, now: Nanos) {
        let operations = lock(&self.counts).take_operations();
        self.send(Request::Heartbeat { clock_ns: now, operations }, Waiter::None);
    }

    /// Sends a report of reads.
    fn report_reads(&self) {
        self.send_if_none_is_queued(
            |request| matches!(request, Request::Reads { .. }),
            || lock(&self.counts).take_reads(),
        );
    }

    /// Sends a sample of reads.
    fn report_samples(&self) {
        self.send_if_none_is_queued(
            |request| matches!(request, Request::Samples { .. }),
            || lock(&self.counts).take_samples(),
        );
    }

    /// Sends a request, unless one of its kind is queued, so that a server that asks and does not
    /// read takes no memory of the client.
    fn send_if_none_is_queued(
        &self,
        is_of_kind: impl Fn(&Request) -> bool,
        request: impl FnOnce() -> Request,
    ) {
        if !lock(&self.outbox).iter().any(|(queued, _)| is_of_kind(queued)) {
            self.send(request(), Waiter::None);
        }
    }

    fn note_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
        self.trust.end();
    }

    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Appends a message to the outbox.
    fn send(&self, request: Request, waiter: Waiter) {
        lock(&self.outbox).push_back((request, waiter));
        self.wake();
    }

    /// Replaces the queued report of an incomplete snapshot, or queues this one. So at most one
    /// such report is queued, even if the server does not read for a long time. The report of a
    /// complete snapshot stays, because the server counts complete snapshots.
    fn send_snapshot_report(&self, permille: u32) {
        let mut outbox = lock(&self.outbox);
        let report = Request::Snapshot { permille };
        let is_incomplete = |request: &&mut Request| match request {
            Request::Snapshot { permille } => *permille < PERMILLE_COMPLETE,
            _ => false,
        };
        match outbox.iter_mut().map(|(request, _)| request).find(is_incomplete) {
            Some(request) => *request = report,
            None => outbox.push_back((report, Waiter::None)),
        }
        drop(outbox);
        self.wake();
    }

    fn wake(&self) {
        // Ignored: the write fails only if the counter is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The background thread's side.
struct ControlThread {
    queue: Arc<ControlQueue>,
    channel: Box<dyn ControlChannel>,
    /// `None` without a cluster.
    heartbeats: Option<Heartbeats>,
    /// The receivers of the next replies: the server answers in order.
    waiters: VecDeque<Waiter>,
    /// A message that the socket had no room for.
    unsent: Option<Vec<u8>>,
    /// When this thread saw that the client is being dropped.
    closing_since: Option<Instant>,
    /// Goodbye, the last message, was sent or is in `unsent`.
    has_said_goodbye: bool,
    buffer: Vec<u8>,
}

/// Why the thread ends.
enum ThreadEnd {
    /// This side said goodbye.
    Goodbye,
    /// The connection was given up. The server sees it end without a goodbye and cleans up.
    GivenUp,
    /// The server is gone, or sent a message that cannot be understood.
    Lost(String),
}

impl ControlThread {
    fn run(mut self) {
        let end = loop {
            if let Err(end) = self.run_once() {
                break end;
            }
        };
        self.queue.note_lost();
        if let ThreadEnd::Lost(why) = end {
            tracing::warn!(%why, "lost the connection to the server");
        }
        let unsent = std::mem::take(&mut *lock(&self.queue.outbox));
        let unsent = unsent.into_iter().map(|(_, waiter)| waiter);
        for waiter in self.waiters.drain(..).chain(unsent) {
            if let Waiter::Operator(cell) = waiter {
                cell.wake();
            }
        }
    }

    /// Sleeps until there is something to send or to receive. Then sends and receives all of it.
    fn run_once(&mut self) -> Result<(), ThreadEnd> {
        let (readable, woken) = self.sleep()?;
        if woken {
            let mut count = [0; 8];
            // This only clears the counter: the outbox and the flags say what there is to do.
            let _ = rustix::io::read(&self.queue.wake, &mut count);
        }
        if readable || self.channel.has_unsent() {
            self.receive()?;
        }
        if self.queue.is_lost() {
            return Err(ThreadEnd::GivenUp);
        }
        self.send_heartbeat()?;
        self.send_all()?;
        if self.queue.closing.load(Ordering::Acquire) {
            self.close()?;
        }
        Ok(())
    }

    /// Sends a heartbeat if it is time.
    fn send_heartbeat(&mut self) -> Result<(), ThreadEnd> {
        let Some(heartbeats) = &mut self.heartbeats else { return Ok(()) };
        let now = boot_time_ns();
        if now >= heartbeats.trusted_until {
            let ms = heartbeats.link.trust_ns / 1_000_000;
            return Err(ThreadEnd::Lost(format!("it has answered no heartbeat for {ms} ms")));
        }
        if now >= heartbeats.sent_at.saturating_add(heartbeats.period_ns()) {
            heartbeats.sent_at = now;
            self.queue.send_heartbeat(now);
        }
        Ok(())
    }

    /// Returns whether there is something to receive, and whether another thread woke this one.
    fn sleep(&self) -> Result<(bool, bool), ThreadEnd> {
        let waits_for_room = self.unsent.is_some() || self.channel.has_unsent();
        let events = match waits_for_room && self.channel.signals_room_as_writable() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        };
        let closing = self.closing_since.map(|since| FLUSH_TIMEOUT.saturating_sub(since.elapsed()));
        let heartbeat = self.heartbeats.as_ref().map(|heartbeats| {
            Duration::from_nanos(heartbeats.next_step_at().saturating_sub(boot_time_ns()))
        });
        let left = closing.into_iter().chain(heartbeat).min();
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [
            PollFd::from_borrowed_fd(self.channel.as_fd(), events),
            PollFd::from_borrowed_fd(self.queue.wake.as_fd(), PollFlags::IN),
        ];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ThreadEnd::Lost(io::Error::from(errno).to_string())),
        }
        let [channel, wake] = polled.map(|fd| fd.revents());
        let closed = PollFlags::HUP | PollFlags::ERR;
        Ok((channel.intersects(PollFlags::IN | closed), wake.contains(PollFlags::IN)))
    }

    /// Says goodbye once everything is sent and every reply has arrived. By then all blocks of
    /// ended sessions have been given back.
    fn close(&mut self) -> Result<(), ThreadEnd> {
        if self.closing_since.is_none() {
            // The last heartbeat reports the last operations.
            if self.heartbeats.is_some() {
                self.queue.send_heartbeat(boot_time_ns());
            }
            if lock(&self.queue.counts).reports_reads {
                self.queue.report_reads();
            }
        }
        let since = *self.closing_since.get_or_insert_with(Instant::now);
        let is_flushed =
            self.unsent.is_none() && self.waiters.is_empty() && lock(&self.queue.outbox).is_empty();
        if is_flushed && !self.has_said_goodbye {
            let mut message = Vec::new();
            Request::Goodbye.encode(&mut message);
            (self.unsent, self.has_said_goodbye) = (Some(message), true);
            self.send_all()?;
        }
        if self.has_said_goodbye && self.unsent.is_none() {
            // If the goodbye does not arrive, the server treats this client as one that died.
            let _ = self.channel.flush(FLUSH_TIMEOUT.saturating_sub(since.elapsed()));
            return Err(ThreadEnd::Goodbye);
        }
        if since.elapsed() > FLUSH_TIMEOUT {
            return Err(ThreadEnd::Lost(
                "the server did not accept the last messages in time".into(),
            ));
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), ThreadEnd> {
        loop {
            match self.channel.receive(&mut self.buffer) {
                Ok(None) => return Ok(()),
                Ok(Some(0)) => {
                    return Err(ThreadEnd::Lost("the server closed the connection".into()));
                }
                Ok(Some(bytes)) => self.handle(bytes)?,
                Err(error) => return Err(ThreadEnd::Lost(error.to_string())),
            }
        }
    }

    /// Delivers a reply to the request that awaits it, or answers a request of the server.
    fn handle(&mut self, bytes: usize) -> Result<(), ThreadEnd> {
        let reply = match ServerMessage::decode(&self.buffer[..bytes]) {
            Ok(ServerMessage::Request(ServerRequest::Report { collection })) => {
                self.queue.report(collection);
                return Ok(());
            }
            Ok(ServerMessage::Request(ServerRequest::Return)) => {
                self.queue.give_spare();
                return Ok(());
            }
            Ok(ServerMessage::Request(ServerRequest::Alive)) => {
                self.queue.send(Request::Alive { clock_ns: boot_time_ns() }, Waiter::None);
                return Ok(());
            }
            Ok(ServerMessage::Request(ServerRequest::Reads)) => {
                self.queue.report_reads();
                return Ok(());
            }
            Ok(ServerMessage::Request(ServerRequest::Samples)) => {
                self.queue.report_samples();
                return Ok(());
            }
            Ok(ServerMessage::Request(ServerRequest::Describe)) => {
                self.queue.describe();
                return Ok(());
            }
            Ok(ServerMessage::Heartbeat { clock_ns }) => {
                if let Some(heartbeats) = &mut self.heartbeats {
                    heartbeats.answered(clock_ns.min(heartbeats.sent_at));
                }
                return Ok(());
            }
            Ok(ServerMessage::Map { map }) => {
                if let Some(heartbeats) = &self.heartbeats {
                    (heartbeats.link.take_map)(&map);
                }
                return Ok(());
            }
            Ok(reply) => reply,
            Err(error) => return Err(ThreadEnd::Lost(error.to_string())),
        };
        match (reply, self.waiters.pop_front()) {
            (
                ServerMessage::Blocks { class, rested, soon, blocks },
                Some(Waiter::Session(inbox)),
            ) => {
                let blocks = BlockDelivery { class, rested, soon, blocks };
                inbox.deliver(Delivery::Blocks(blocks), &self.queue);
                Ok(())
            }
            (ServerMessage::AllPinned { class }, Some(Waiter::Session(inbox))) => {
                inbox.deliver(Delivery::AllPinned(class), &self.queue);
                Ok(())
            }
            (ServerMessage::Larger { class, larger }, Some(Waiter::Session(inbox))) => {
                inbox.deliver(Delivery::Larger(class, larger), &self.queue);
                Ok(())
            }
            (ServerMessage::RoomLater { class, in_ms }, Some(Waiter::Session(inbox))) => {
                inbox.deliver(Delivery::RoomLater(class, in_ms), &self.queue);
                Ok(())
            }
            (
                ServerMessage::Split { directory_hash, local_depth, outcome },
                Some(Waiter::Session(inbox)),
            ) => {
                let prefix = Prefix::of(directory_hash, local_depth);
                inbox.deliver(Delivery::Split(prefix, outcome), &self.queue);
                Ok(())
            }
            (answer, Some(Waiter::Operator(cell))) => {
                cell.fill(answer);
                Ok(())
            }
            _ => Err(ThreadEnd::Lost("the server sent a reply that matches no request".into())),
        }
    }

    fn send_all(&mut self) -> Result<(), ThreadEnd> {
        while self.unsent.is_some() || self.waiters.len() < OUTSTANDING_MAX {
            let message = match self.unsent.take() {
                Some(message) => message,
                None => {
                    let Some((request, waiter)) = lock(&self.queue.outbox).pop_front() else {
                        break;
                    };
                    if !matches!(waiter, Waiter::None) {
                        self.waiters.push_back(waiter);
                    }
                    let mut message = Vec::new();
                    request.encode(&mut message);
                    message
                }
            };
            match self.channel.send(&message) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unsent = Some(message);
                    break;
                }
                Err(error) => return Err(ThreadEnd::Lost(error.to_string())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_unsent_report_is_kept() {
        let queue = ControlQueue::new(Trust::forever()).unwrap();
        (0..500).for_each(|permille| queue.send_snapshot_report(permille));
        queue.send(Request::Expires, Waiter::None);
        // The second snapshot begins before the first one's completion was sent.
        (500..=PERMILLE_COMPLETE)
            .chain(0..=7)
            .for_each(|permille| queue.send_snapshot_report(permille));
        let outbox = lock(&queue.outbox);
        let queued: Vec<_> = outbox.iter().map(|(request, _)| request).collect();
        let snapshot = |permille| Request::Snapshot { permille };
        assert_eq!(queued, [&snapshot(PERMILLE_COMPLETE), &Request::Expires, &snapshot(7)]);
    }
}
