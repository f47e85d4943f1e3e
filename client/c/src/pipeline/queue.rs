//! Operations that a thread of the library drives, and an eventfd that tells of their end.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::future::Future;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use client::{AsyncClient, Client, PipelineFull, Result, Value, Version};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::{Start, farside_completed, status_of};
use crate::error::Failure;
use crate::farside_status::FARSIDE_ERROR_SYSTEM;

/// How many operations can be in flight: as many as an [`AsyncClient`] has under way at once.
const DEPTH: usize = 16_384;

/// The operations in flight, and those that have completed.
pub(crate) struct Queue {
    client: AsyncClient,
    slots: Vec<Slot>,
    free: Vec<usize>,
    completed: VecDeque<Done>,
    awakened: Arc<Awakened>,
    /// Memory for the slots that are taken from `awakened`.
    taken: Vec<usize>,
    started: u64,
    /// The value of the operation taken last.
    value: Option<Value>,
}

/// An operation in flight.
struct Slot {
    /// `None` if the slot is free.
    operation: Option<Operation>,
    waker: Waker,
}

type Operation = Pin<Box<dyn Future<Output = Done>>>;

/// A completed operation: what the caller sees of it, and its value.
struct Done {
    ticket: u64,
    result: Result<(farside_completed, Option<Value>)>,
}

/// Which slots' operations go on, and an eventfd that is readable while there may be any.
struct Awakened {
    slots: Mutex<Vec<usize>>,
    descriptor: OwnedFd,
}

impl Awakened {
    fn slots(&self) -> MutexGuard<'_, Vec<usize>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the descriptor readable.
    fn signal(&self) {
        // It cannot fail: nothing counts to the end of 64 bits.
        let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable. What is awakened from now on makes it readable again; what
    /// was before may not, so look for it after this.
    fn clear(&self) {
        let _ = rustix::io::read(&self.descriptor, &mut [0; 8]);
    }

    /// Adds a slot. Only the first one after the slots were taken needs a signal.
    fn add(&self, slot: usize) {
        let is_first = {
            let mut slots = self.slots();
            slots.push(slot);
            slots.len() == 1
        };
        if is_first {
            self.signal();
        }
    }
}

/// Awakens the operation of a slot.
struct SlotWaker {
    slot: usize,
    awakened: Arc<Awakened>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.awakened.add(self.slot);
    }
}

/// An operation on copies of key and values, because the caller's may change.
fn operation(client: AsyncClient, ticket: u64, key: &[u8], start: Start<'_>) -> Operation {
    let key = key.to_vec();
    let (value, expected) = match start {
        Start::Store(value, how) => (value.to_vec(), how.expected.to_vec()),
        _ => Default::default(),
    };
    let start = start.with(&[], &[]);
    Box::pin(async move {
        let result = execute(&client, &key, start.with(&value, &expected)).await;
        Done { ticket, result }
    })
}

/// Runs an operation.
async fn execute(
    client: &AsyncClient,
    key: &[u8],
    start: Start<'_>,
) -> Result<(farside_completed, Option<Value>)> {
    let (applied, version, number, value) = match start {
        Start::Get => {
            let value = client.get(key).await?;
            (value.is_some(), value.as_ref().map(|value| value.version), 0, value)
        }
        Start::Store(value, how) => {
            let outcome = client.store(key, value, how.store()).await?;
            (outcome.applied, outcome.version, 0, None)
        }
        Start::Delete => (client.delete(key).await?, None, 0, None),
        Start::DeleteIfVersion(version) => {
            (client.delete_if_version(key, version).await?, None, 0, None)
        }
        Start::Increment(delta) => (true, None, client.increment(key, delta).await?, None),
        Start::Touch(ttl) => (client.touch(key, ttl).await?, None, 0, None),
    };
    let status = status_of(applied, matches!(start, Start::Store(..)));
    let mut completed = farside_completed::new(0, status);
    (completed.version, completed.number) = (version.map_or(0, Version::to_u64), number);
    Ok((completed, value))
}

impl Queue {
    pub(crate) fn new(client: &Client) -> std::result::Result<Self, Failure> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let descriptor = descriptor.map_err(|error| Failure {
            status: FARSIDE_ERROR_SYSTEM,
            text: format!("the system has no eventfd for a pipeline: {error}"),
        })?;
        Ok(Self {
            client: client.async_client()?,
            slots: Vec::new(),
            free: Vec::new(),
            completed: VecDeque::new(),
            awakened: Arc::new(Awakened { slots: Mutex::default(), descriptor }),
            taken: Vec::new(),
            started: 0,
            value: None,
        })
    }

    pub(crate) fn descriptor(&self) -> c_int {
        self.awakened.descriptor.as_raw_fd()
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.completed.len()
    }

    /// Starts an operation. Returns its ticket.
    pub(crate) fn start(
        &mut self,
        key: &[u8],
        start: Start<'_>,
    ) -> std::result::Result<u64, PipelineFull> {
        if self.in_flight() >= DEPTH {
            return Err(PipelineFull);
        }
        let ticket = self.started;
        self.started += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            let (slot, awakened) = (self.slots.len(), self.awakened.clone());
            let waker = Arc::new(SlotWaker { slot, awakened }).into();
            self.slots.push(Slot { operation: None, waker });
            slot
        });
        self.slots[slot].operation = Some(operation(self.client.clone(), ticket, key, start));
        // An operation begins when it is first polled.
        let completed = self.completed.len();
        self.advance(slot);
        if completed == 0 && !self.completed.is_empty() {
            self.awakened.signal();
        }
        Ok(ticket)
    }

    /// Polls the operation of a slot, if it has one. If it panics the slot is free.
    fn advance(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        let Some(mut operation) = slot.operation.take() else { return };
        self.free.push(number);
        match operation.as_mut().poll(&mut Context::from_waker(&slot.waker)) {
            Poll::Ready(done) => self.completed.push_back(done),
            Poll::Pending => {
                slot.operation = Some(operation);
                self.free.pop();
            }
        }
    }

    fn poll(&mut self) -> Option<Done> {
        if self.completed.is_empty() {
            self.awakened.clear();
            let mut slots = std::mem::take(&mut self.taken);
            std::mem::swap(&mut slots, &mut *self.awakened.slots());
            slots.drain(..).for_each(|slot| self.advance(slot));
            self.taken = slots;
            if !self.completed.is_empty() {
                // Readable, until none is left.
                self.awakened.signal();
            }
        }
        self.completed.pop_front()
    }

    fn wait(&mut self) -> Option<Done> {
        while self.in_flight() > 0 {
            if let Some(done) = self.poll() {
                return Some(done);
            }
            // A signal to the process ends it early, which does no harm.
            let _ = poll(&mut [PollFd::new(&self.awakened.descriptor, PollFlags::IN)], None);
        }
        None
    }

    /// Takes a completed operation, and the text of its error.
    pub(crate) fn take(&mut self, waits: bool) -> Option<(farside_completed, Option<String>)> {
        let done = if waits { self.wait() } else { self.poll() }?;
        match done.result {
            Ok((mut completed, value)) => {
                completed.ticket = done.ticket;
                self.value = value;
                if let Some(value) = &self.value {
                    (completed.value, completed.value_bytes) = (value.as_ptr().cast(), value.len());
                }
                Some((completed, None))
            }
            Err(error) => {
                let completed = farside_completed::new(done.ticket, (&error).into());
                Some((completed, Some(error.to_string())))
            }
        }
    }
}

impl Drop for Queue {
    /// Completes the operations in flight.
    fn drop(&mut self) {
        while self.take(true).is_some() {}
    }
}
