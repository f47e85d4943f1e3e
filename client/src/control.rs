//! The control channel: one background thread per connection that talks to the server, so that no
//! operation waits for a socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside_common::control::{
    Channel, FreeBlock, MESSAGE_BYTES_MAX, Reply, Request, ServerStatistics,
};
use farside_common::layout::SizeClass;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::allocator::{Delivery, Depot};
use crate::growth::Prefix;
use crate::{Error, Result};

/// How long somebody who asked for statistics waits.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last messages of a client that ends may take.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How many requests may wait for their replies: more would fill the socket with replies that
/// nobody reads while this side still sends.
const OUTSTANDING_MAX: usize = 4;

/// A lock whose holder cannot leave what it guards half changed: every critical section here is a
/// push or a pop.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who is waiting for a reply.
enum Waiter {
    /// Nobody: the request has no reply.
    None,
    Session(Arc<Inbox>),
    Statistics(Arc<Slot>),
}

/// Answers on their way to a session.
#[derive(Default)]
pub(crate) struct Inbox {
    waiting: AtomicUsize,
    deliveries: Mutex<Deliveries>,
}

#[derive(Default)]
struct Deliveries {
    answers: VecDeque<Delivery>,
    /// The session has ended: what comes now goes back.
    closed: bool,
}

/// A place for one answer.
#[derive(Default)]
struct Slot {
    answer: Mutex<Option<ServerStatistics>>,
    answered: Condvar,
}

struct Shared {
    outbox: Mutex<VecDeque<(Request, Waiter)>>,
    /// Wakes the thread when the outbox has something.
    wake: OwnedFd,
    lost: AtomicBool,
    /// The client ends: send what is left, and goodbye.
    closing: AtomicBool,
}

/// The client's end of a control channel. Says goodbye when dropped.
pub(crate) struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread that serves this connection.
    pub(crate) fn start(channel: Channel) -> Result<Self> {
        let failed = |doing| move |source: io::Error| Error::System { doing, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed("making an eventfd")(errno.into()))?;
        let outbox = Mutex::default();
        let (lost, closing) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { outbox, wake, lost, closing });
        let service = Service {
            shared: shared.clone(),
            channel,
            waiters: VecDeque::new(),
            unsent: None,
            closing_since: None,
            buffer: vec![0; MESSAGE_BYTES_MAX],
        };
        let thread = std::thread::Builder::new()
            .name("farside-control".into())
            .spawn(move || service.run())
            .map_err(failed("starting the control thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Whether the server is gone, or broke the protocol.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// The lease is gone, or the server does not answer: sessions connect anew. The server is not
    /// told goodbye, so that it looks for what was left behind.
    pub(crate) fn give_up(&self) {
        self.shared.lost.store(true, Ordering::Relaxed);
    }

    /// What the server knows; `None` if it did not answer.
    pub(crate) fn statistics(&self) -> Option<ServerStatistics> {
        let slot = Arc::new(Slot::default());
        self.shared.send(Request::Statistics, Waiter::Statistics(slot.clone()));
        let answer = lock(&slot.answer);
        let (mut answer, _) = slot
            .answered
            .wait_timeout_while(answer, ANSWER_TIMEOUT, |answer| {
                answer.is_none() && !self.is_lost()
            })
            .unwrap_or_else(PoisonError::into_inner);
        answer.take()
    }

    /// A depot for one session.
    pub(crate) fn depot(&self) -> ControlDepot {
        ControlDepot { shared: self.shared.clone(), inbox: Arc::default() }
    }
}

impl Drop for Control {
    /// Takes [`FLUSH_TIMEOUT`] at most.
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, the server sees the socket close.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn send(&self, request: Request, waiter: Waiter) {
        lock(&self.outbox).push_back((request, waiter));
        self.wake();
    }

    fn wake(&self) {
        // The counter of an eventfd cannot overflow here; being set already is as good.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// A session's way to the server's depot.
pub(crate) struct ControlDepot {
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
}

impl Depot for ControlDepot {
    fn request(&mut self, class: SizeClass, count: u32) {
        let waiter = Waiter::Session(self.inbox.clone());
        self.shared.send(Request::TakeBlocks { class, count }, waiter);
    }

    fn request_split(&mut self, prefix: Prefix) {
        let (directory_hash, local_depth) = (prefix.directory_hash(), prefix.local_depth);
        let waiter = Waiter::Session(self.inbox.clone());
        self.shared.send(Request::Split { directory_hash, local_depth }, waiter);
    }

    #[inline]
    fn receive(&mut self) -> Option<Delivery> {
        if self.inbox.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let delivery = lock(&self.inbox.deliveries).answers.pop_front()?;
        self.inbox.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(delivery)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        self.shared.send(Request::GiveBlocks { class, rested, blocks }, Waiter::None);
    }

    fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Relaxed)
    }
}

impl Drop for ControlDepot {
    /// What was delivered too late for the session goes back, now and later.
    fn drop(&mut self) {
        let late = {
            let mut deliveries = lock(&self.inbox.deliveries);
            deliveries.closed = true;
            std::mem::take(&mut deliveries.answers)
        };
        for delivery in late {
            if let Delivery::Blocks(class, blocks) = delivery
                && !blocks.is_empty()
            {
                self.give(class, true, blocks);
            }
        }
    }
}

/// The background thread's side.
struct Service {
    shared: Arc<Shared>,
    channel: Channel,
    /// Who gets the next replies: the server answers in order.
    waiters: VecDeque<Waiter>,
    /// A message the socket had no room for.
    unsent: Option<Vec<u8>>,
    /// When the client began to end.
    closing_since: Option<Instant>,
    buffer: Vec<u8>,
}

/// Why the thread ends.
enum End {
    /// This side said goodbye.
    Goodbye,
    /// The server is gone, or cannot be understood.
    Lost(String),
}

impl Service {
    fn run(mut self) {
        let end = loop {
            if let Err(end) = self.turn() {
                break end;
            }
        };
        self.shared.lost.store(true, Ordering::Relaxed);
        if let End::Lost(why) = end {
            tracing::warn!(%why, "lost the connection to the server");
        }
        let unsent = std::mem::take(&mut *lock(&self.shared.outbox));
        let unsent = unsent.into_iter().map(|(_, waiter)| waiter);
        for waiter in self.waiters.drain(..).chain(unsent) {
            if let Waiter::Statistics(slot) = waiter {
                // Under the lock, so that the waiter is not between its look and its sleep.
                let _answer = lock(&slot.answer);
                slot.answered.notify_all();
            }
        }
    }

    /// Sleeps until there is something to send or to receive, and does it.
    fn turn(&mut self) -> std::result::Result<(), End> {
        let (readable, woken) = self.sleep()?;
        if woken {
            let mut count = [0; 8];
            // Only clears the counter; outbox and flags say what there is to do.
            let _ = rustix::io::read(&self.shared.wake, &mut count);
        }
        if readable {
            self.receive()?;
        }
        self.send_all()?;
        if self.shared.closing.load(Ordering::Acquire) {
            self.close()?;
        }
        Ok(())
    }

    /// Whether there is something to receive, and whether somebody woke this thread.
    fn sleep(&self) -> std::result::Result<(bool, bool), End> {
        let events = match self.unsent {
            Some(_) if self.channel.is_writable_with_room() => PollFlags::IN | PollFlags::OUT,
            _ => PollFlags::IN,
        };
        let left = self.closing_since.map(|since| FLUSH_TIMEOUT.saturating_sub(since.elapsed()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [
            PollFd::from_borrowed_fd(self.channel.as_fd(), events),
            PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN),
        ];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(End::Lost(io::Error::from(errno).to_string())),
        }
        let [channel, wake] = polled.map(|fd| fd.revents());
        let closed = PollFlags::HUP | PollFlags::ERR;
        Ok((channel.intersects(PollFlags::IN | closed), wake.contains(PollFlags::IN)))
    }

    /// Goodbye, once everything is sent and everything asked for has come and gone back.
    fn close(&mut self) -> std::result::Result<(), End> {
        let since = *self.closing_since.get_or_insert_with(Instant::now);
        if self.shared.lost.load(Ordering::Relaxed) {
            // Given up: the server has to find out by itself, and to look after what was left.
            return Err(End::Goodbye);
        }
        let is_flushed = self.unsent.is_none()
            && self.waiters.is_empty()
            && lock(&self.shared.outbox).is_empty();
        if is_flushed {
            let mut message = Vec::new();
            Request::Goodbye.encode(&mut message);
            // Without room for it the server treats this client as one that died.
            let _ = self.channel.send(&message);
            let _ = self.channel.flush(FLUSH_TIMEOUT);
            return Err(End::Goodbye);
        }
        if since.elapsed() > FLUSH_TIMEOUT {
            return Err(End::Lost("it does not take the last messages".into()));
        }
        Ok(())
    }

    fn receive(&mut self) -> std::result::Result<(), End> {
        loop {
            match self.channel.receive(&mut self.buffer) {
                Ok(None) => return Ok(()),
                Ok(Some(0)) => return Err(End::Lost("it closed the connection".into())),
                Ok(Some(bytes)) => self.take(bytes)?,
                Err(error) => return Err(End::Lost(error.to_string())),
            }
        }
    }

    /// Hands an answer to whoever waits for it.
    fn take(&mut self, bytes: usize) -> std::result::Result<(), End> {
        let reply = Reply::decode(&self.buffer[..bytes]);
        match (reply, self.waiters.pop_front()) {
            (Ok(Reply::Blocks { class, blocks }), Some(Waiter::Session(inbox))) => {
                self.deliver(&inbox, Delivery::Blocks(class, blocks));
                Ok(())
            }
            (
                Ok(Reply::Split { directory_hash, local_depth, outcome }),
                Some(Waiter::Session(inbox)),
            ) => {
                let prefix = Prefix::of(directory_hash, local_depth);
                self.deliver(&inbox, Delivery::Split(prefix, outcome));
                Ok(())
            }
            (Ok(Reply::Statistics(statistics)), Some(Waiter::Statistics(slot))) => {
                *lock(&slot.answer) = Some(statistics);
                slot.answered.notify_all();
                Ok(())
            }
            (Ok(_), _) => Err(End::Lost("it answered what was not asked".into())),
            (Err(error), _) => Err(End::Lost(error.to_string())),
        }
    }

    fn deliver(&self, inbox: &Inbox, delivery: Delivery) {
        let mut deliveries = lock(&inbox.deliveries);
        if !deliveries.closed {
            deliveries.answers.push_back(delivery);
            inbox.waiting.fetch_add(1, Ordering::AcqRel);
        } else if let Delivery::Blocks(class, blocks) = delivery
            && !blocks.is_empty()
        {
            self.shared.send(Request::GiveBlocks { class, rested: true, blocks }, Waiter::None);
        }
    }

    fn send_all(&mut self) -> std::result::Result<(), End> {
        while self.unsent.is_some() || self.waiters.len() < OUTSTANDING_MAX {
            let message = match self.unsent.take() {
                Some(message) => message,
                None => {
                    let Some((request, waiter)) = lock(&self.shared.outbox).pop_front() else {
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
                Err(error) => return Err(End::Lost(error.to_string())),
            }
        }
        Ok(())
    }
}
