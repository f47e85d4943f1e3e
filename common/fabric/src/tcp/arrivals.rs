//! The thread that accepts connections, and reads their first messages.
//!
//! Strangers can make this work: they connect, begin handshakes of TLS, and send what they like. So
//! the thread that answers clients has no part in it, and takes the connections that are whole.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::executors::{Event, News, lock, signal};
use super::listen::Listener;

/// Limit on the requests that wait to be taken. Above it no more are read.
const REQUESTS_MAX: usize = 64;
/// How long no connection is accepted after a failure of the system.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The connections that arrive at a [`Listener`], and the ends of its sessions. Its descriptor is
/// readable when there is an [`Event`]. Dropping it ends the listener.
pub struct Arrivals {
    news: Arc<News>,
    room: Arc<Room>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread waits for, beside connections.
struct Room {
    /// How many requests wait to be taken.
    waiting: Mutex<usize>,
    has_changed: Condvar,
    stops: AtomicBool,
    /// Readable when the thread has to stop.
    stop: OwnedFd,
}

impl Room {
    /// Waits until there is room for a request. Returns false if the thread has to stop.
    fn take(&self) -> bool {
        let mut waiting = lock(&self.waiting);
        while *waiting >= REQUESTS_MAX && !self.stops.load(Ordering::Acquire) {
            waiting = self.has_changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        *waiting += 1;
        !self.stops.load(Ordering::Acquire)
    }

    fn give_back(&self) {
        *lock(&self.waiting) -= 1;
        self.has_changed.notify_all();
    }
}

impl Arrivals {
    pub(super) fn start(listener: Listener) -> io::Result<Self> {
        let room = Arc::new(Room {
            waiting: Mutex::new(0),
            has_changed: Condvar::new(),
            stops: AtomicBool::new(false),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let (news, own) = (listener.news.clone(), room.clone());
        let thread = std::thread::Builder::new()
            .name("farside-accept".to_owned())
            .spawn(move || accept(listener, &own))?;
        Ok(Self { news, room, thread: Some(thread) })
    }

    /// The next event; `None` if there is none at present.
    ///
    /// # Errors
    /// The system cannot accept a connection at present. Most likely it is out of descriptors.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        let event = self.news.take().transpose()?;
        if let Some(Event::Request(_)) = event {
            self.room.give_back();
        }
        Ok(event)
    }

    /// How many requests wait to be taken.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        *lock(&self.room.waiting)
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.room.stops.store(true, Ordering::Release);
        signal(&self.room.stop);
        // With the lock, so that the thread is not between its look and its sleep.
        drop(lock(&self.room.waiting));
        self.room.has_changed.notify_all();
        // A thread that panicked has ended as well.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl AsFd for Arrivals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

/// Accepts connections until it has to stop.
fn accept(mut listener: Listener, room: &Room) {
    while !room.stops.load(Ordering::Acquire) {
        match listener.next_request() {
            Ok(Some(incoming)) => {
                if room.take() {
                    listener.news.add(Ok(Event::Request(incoming)));
                }
            }
            Ok(None) => {
                let listening = PollFd::new(&listener, PollFlags::IN);
                let stop = PollFd::new(&room.stop, PollFlags::IN);
                // An interrupted wait is a short one.
                let _ = poll(&mut [listening, stop], None);
            }
            Err(error) => {
                listener.news.add(Err(error));
                let stop = PollFd::new(&room.stop, PollFlags::IN);
                let _ = poll(&mut [stop], Some(&PAUSE));
            }
        }
    }
}
