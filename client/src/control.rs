//! The control channel: one background thread per connection that talks to the server, so that no
//! operation waits for a socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use farside_common::control::{FreeBlock, MESSAGE_BYTES_MAX, Reply, Request, ServerStatistics};
use farside_common::fabric::shm::Connection;
use farside_common::layout::SizeClass;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::allocator::Depot;
use crate::{Error, Result};

/// How long somebody who asked for statistics waits.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last messages of a client that ends may take.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

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

/// Blocks on their way to a session.
#[derive(Default)]
pub(crate) struct Inbox {
    waiting: AtomicUsize,
    deliveries: Mutex<VecDeque<(SizeClass, Vec<FreeBlock>)>>,
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
}

/// The client's end of a control channel. Says goodbye when dropped.
pub(crate) struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread that serves this connection.
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let failed = |doing| move |source: io::Error| Error::System { doing, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed("making an eventfd")(errno.into()))?;
        connection.set_receive_timeout(None).map_err(failed("setting up the socket"))?;
        let outbox = Mutex::default();
        let shared = Arc::new(Shared { outbox, wake, lost: AtomicBool::new(false) });
        let service = Service {
            shared: shared.clone(),
            connection,
            waiters: VecDeque::new(),
            unsent: None,
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

    /// The lease is gone, or the server does not answer: sessions connect anew.
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
    fn drop(&mut self) {
        self.shared.send(Request::Goodbye, Waiter::None);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; if it did, the server sees the socket close.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn send(&self, request: Request, waiter: Waiter) {
        lock(&self.outbox).push_back((request, waiter));
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

    #[inline]
    fn receive(&mut self) -> Option<(SizeClass, Vec<FreeBlock>)> {
        if self.inbox.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let delivery = lock(&self.inbox.deliveries).pop_front()?;
        self.inbox.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(delivery)
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        self.shared.send(Request::GiveBlocks { class, rested, blocks }, Waiter::None);
    }
}

impl Drop for ControlDepot {
    /// What was delivered too late for the session goes back.
    fn drop(&mut self) {
        while let Some((class, blocks)) = self.receive() {
            if !blocks.is_empty() {
                self.give(class, true, blocks);
            }
        }
    }
}

/// The background thread's side.
struct Service {
    shared: Arc<Shared>,
    connection: Connection,
    /// Who gets the next replies: the server answers in order.
    waiters: VecDeque<Waiter>,
    /// A message the socket had no room for.
    unsent: Option<Vec<u8>>,
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
        for waiter in self.waiters.drain(..) {
            if let Waiter::Statistics(slot) = waiter {
                // Under the lock, so that the waiter is not between its look and its sleep.
                let _answer = lock(&slot.answer);
                slot.answered.notify_all();
            }
        }
    }

    /// Sleeps until there is something to send or to receive, and does it.
    fn turn(&mut self) -> std::result::Result<(), End> {
        let lost = |error: io::Error| End::Lost(error.to_string());
        let events =
            if self.unsent.is_some() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let (readable, woken) = {
            let mut polled = [
                PollFd::from_borrowed_fd(self.connection.as_fd(), events),
                PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(lost(errno.into())),
            }
            let ready = |at: usize, flags| polled[at].revents().intersects(flags);
            let closed = PollFlags::HUP | PollFlags::ERR;
            (ready(0, PollFlags::IN | closed), ready(1, PollFlags::IN))
        };
        if woken {
            let mut count = [0; 8];
            // Only clears the counter; the outbox says what there is to do.
            let _ = rustix::io::read(&self.shared.wake, &mut count);
        }
        if readable {
            self.receive()?;
        }
        self.send_all()
    }

    fn receive(&mut self) -> std::result::Result<(), End> {
        let (bytes, _) = match self.connection.receive(&mut self.buffer) {
            Ok((0, _)) => return Err(End::Lost("it closed the connection".into())),
            Ok(received) => received,
            Err(error) => return Err(End::Lost(error.to_string())),
        };
        let reply = Reply::decode(&self.buffer[..bytes]);
        match (reply, self.waiters.pop_front()) {
            (Ok(Reply::Blocks { class, blocks }), Some(Waiter::Session(inbox))) => {
                self.deliver(&inbox, class, blocks);
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

    fn deliver(&self, inbox: &Arc<Inbox>, class: SizeClass, blocks: Vec<FreeBlock>) {
        if Arc::strong_count(inbox) == 1 && !blocks.is_empty() {
            // The session has ended meanwhile.
            self.shared.send(Request::GiveBlocks { class, rested: true, blocks }, Waiter::None);
            return;
        }
        lock(&inbox.deliveries).push_back((class, blocks));
        inbox.waiting.fetch_add(1, Ordering::AcqRel);
    }

    fn send_all(&mut self) -> std::result::Result<(), End> {
        loop {
            let (message, last) = match self.unsent.take() {
                Some(message) => (message, false),
                None => {
                    let Some((request, waiter)) = lock(&self.shared.outbox).pop_front() else {
                        return Ok(());
                    };
                    if !matches!(waiter, Waiter::None) {
                        self.waiters.push_back(waiter);
                    }
                    let mut message = Vec::new();
                    request.encode(&mut message);
                    (message, request == Request::Goodbye)
                }
            };
            match self.connection.send(&message, None) {
                Ok(()) if last => return Err(End::Goodbye),
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && last => {
                    self.wait_for_room();
                    // A goodbye that does not fit is one the server does not need.
                    let _ = self.connection.send(&message, None);
                    return Err(End::Goodbye);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unsent = Some(message);
                    return Ok(());
                }
                Err(error) => return Err(End::Lost(error.to_string())),
            }
        }
    }

    fn wait_for_room(&self) {
        let mut polled = [PollFd::new(&self.connection, PollFlags::OUT)];
        let timeout = rustix::event::Timespec::try_from(FLUSH_TIMEOUT).ok();
        // Whatever it says, the next thing is a last attempt.
        let _ = poll(&mut polled, timeout.as_ref());
    }
}
