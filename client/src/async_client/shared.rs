//! The state that the tasks of an async client share with its driver: the slots of the requests.
//!
//! Everything is under one lock, which is held for short: bytes above [`KEPT_BYTES_MAX`] are moved,
//! not copied, and nothing is woken or dropped that could run foreign code.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use farside_fabric::Wakeup;
use farside_protocol::{Action, OperationError, Version};

use super::direct::DirectSessions;
use crate::{Error, Outcome};

/// The number of requests that are under way at once. Further tasks wait for a slot, which costs
/// them another wakeup.
const SLOTS_MAX: usize = 16_384;
/// The longest buffer that a free slot keeps, and the longest content that is copied under the
/// lock.
pub(super) const KEPT_BYTES_MAX: usize = 4096;
/// How many other tasks a task wakes when it is polled.
const WAKES_PER_POLL: usize = 8;

/// The state that tasks and driver share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the driver.
    pub(super) wakeup: Arc<Wakeup>,
    pub(super) direct: DirectSessions,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        let (wakeup, direct) = (Arc::new(Wakeup::new()?), DirectSessions::new());
        Ok(Self { state: Mutex::default(), wakeup, direct })
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Poisoning is ignored: no critical section can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the driver end after the requests that are under way.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.wakeup.signal();
    }
}

/// The number of a slot.
pub(super) type SlotId = u32;
/// The number of a waiting task, in the order of their arrival.
pub(super) type WaiterId = u64;
/// The result of an operation. The bytes of a value are in its slot.
pub(super) type SlotResult = std::result::Result<Outcome<Version>, Box<Error>>;

/// An operation. Its key, its value and the value that it expects stand in this order in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Request {
    /// An expected value in it is empty.
    pub(super) action: Action<'static>,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
}

/// A request that the driver has taken, and its slot.
pub(super) struct Job {
    pub(super) slot: SlotId,
    pub(super) request: Request,
    /// The slot's buffer.
    pub(super) bytes: Vec<u8>,
}

/// The progress of a slot's request.
enum Stage {
    Free,
    /// In the queue.
    Queued(Request),
    /// In the queue, but its future was dropped: the driver frees the slot.
    Cancelled,
    /// The driver executes it.
    Started,
    /// The driver executes it, but its future was dropped.
    Abandoned,
    Answered(SlotResult),
}

struct RequestSlot {
    stage: Stage,
    /// The task that waits for the answer.
    waker: Option<Waker>,
    /// The bytes of the request, then those of the value that was found. The driver has them in
    /// between.
    bytes: Vec<u8>,
}

/// The state under the lock.
#[derive(Default)]
pub(super) struct State {
    /// Grows up to [`SLOTS_MAX`].
    slots: Vec<RequestSlot>,
    /// The free ones of them. A stack: the slot that was freed last is likely in the cache.
    free: Vec<SlotId>,
    /// The slots of the requests that the driver has not taken yet.
    queue: VecDeque<SlotId>,
    /// The tasks that wait for a slot.
    waiters: BTreeMap<WaiterId, Waker>,
    waiters_before: WaiterId,
    /// The number of tasks that waited, were notified, and have not taken their slot yet. As many
    /// slots are reserved for them.
    notified: usize,
    /// The tasks that the driver or another task wakes once the lock is released.
    ready: VecDeque<Waker>,
    is_closed: bool,
    /// Whether the driver has panicked.
    is_defective: bool,
}

/// A few tasks that wait to be woken.
#[must_use = "the tasks sleep until they are woken"]
pub(super) struct ReadyTasks([Option<Waker>; WAKES_PER_POLL]);

impl ReadyTasks {
    #[inline]
    pub(super) fn wake(self) {
        self.0.into_iter().flatten().for_each(Waker::wake);
    }
}

/// What a task that asks for its answer gets.
pub(super) enum Asked {
    /// The answer. The slot is free.
    Answer(SlotResult),
    /// None yet. This waker is no longer used: drop it after the lock.
    Pending(Option<Waker>),
}

/// The side of the tasks.
impl State {
    /// Takes a free slot, unless it is reserved.
    #[inline]
    pub(super) fn take_slot(&mut self) -> Option<SlotId> {
        let new = SLOTS_MAX - self.slots.len();
        (self.free.len() + new > self.notified).then(|| self.any_slot())
    }

    /// Takes a free slot, of which there is one.
    #[inline]
    fn any_slot(&mut self) -> SlotId {
        self.free.pop().unwrap_or_else(|| {
            let id = self.slots.len() as SlotId;
            self.slots.push(RequestSlot { stage: Stage::Free, waker: None, bytes: Vec::new() });
            id
        })
    }

    /// Has a task wait for a slot.
    pub(super) fn wait(&mut self, waker: Waker) -> WaiterId {
        let id = self.waiters_before;
        self.waiters_before += 1;
        self.waiters.insert(id, waker);
        id
    }

    /// Takes the slot that is reserved for a waiting task. If it still waits, exchanges its waker,
    /// unless `waker` wakes the same task, and returns the one that is no longer used.
    pub(super) fn take_reserved(
        &mut self,
        waiter: WaiterId,
        waker: &Waker,
    ) -> std::result::Result<SlotId, Option<Waker>> {
        match self.waiters.get_mut(&waiter) {
            Some(kept) => {
                let is_other = !kept.will_wake(waker);
                Err(is_other.then(|| std::mem::replace(kept, waker.clone())))
            }
            None => {
                self.notified -= 1;
                Ok(self.any_slot())
            }
        }
    }

    /// Ends the wait for a slot. A slot that was reserved goes to the next task. Returns the waker
    /// that is no longer used.
    pub(super) fn stop_waiting(&mut self, waiter: WaiterId) -> Option<Waker> {
        let waker = self.waiters.remove(&waiter);
        if waker.is_none() {
            self.notified -= 1;
            self.notify_waiter();
        }
        waker
    }

    /// Reserves a free slot for the task that has waited longest.
    fn notify_waiter(&mut self) {
        if let Some((_, waker)) = self.waiters.pop_first() {
            self.notified += 1;
            self.ready.push_back(waker);
        }
    }

    /// Queues a request. `bytes` are moved into the slot if they are many, otherwise `parts` are
    /// copied.
    #[inline]
    pub(super) fn submit(
        &mut self,
        id: SlotId,
        request: Request,
        parts: [&[u8]; 3],
        bytes: Option<Vec<u8>>,
        waker: &Waker,
    ) {
        let slot = &mut self.slots[id as usize];
        match bytes {
            Some(bytes) => slot.bytes = bytes,
            None => {
                slot.bytes.clear();
                parts.iter().for_each(|part| slot.bytes.extend_from_slice(part));
            }
        }
        slot.stage = Stage::Queued(request);
        slot.waker = Some(waker.clone());
        self.queue.push_back(id);
        if self.is_defective {
            self.fail_queued();
        }
    }

    /// Fails the requests in the queue, which nothing executes.
    #[cold]
    fn fail_queued(&mut self) {
        while let Some(Job { slot, bytes, .. }) = self.take_job() {
            self.answer(slot, bytes, Err(Box::new(Error::Defect)));
        }
    }

    /// Takes the answer, and appends the bytes of its value to `value`.
    #[inline]
    pub(super) fn ask(&mut self, id: SlotId, waker: &Waker, value: &mut Vec<u8>) -> Asked {
        let slot = &mut self.slots[id as usize];
        match std::mem::replace(&mut slot.stage, Stage::Free) {
            Stage::Answered(result) => {
                if result.as_ref().is_ok_and(|outcome| outcome.value.is_some()) {
                    if value.is_empty() && slot.bytes.len() > KEPT_BYTES_MAX {
                        std::mem::swap(value, &mut slot.bytes);
                    } else {
                        value.extend_from_slice(&slot.bytes);
                    }
                }
                self.release(id);
                Asked::Answer(result)
            }
            stage => {
                slot.stage = stage;
                let is_other = !slot.waker.as_ref().is_some_and(|kept| kept.will_wake(waker));
                let unused = is_other.then(|| slot.waker.replace(waker.clone()));
                Asked::Pending(unused.flatten())
            }
        }
    }

    /// Gives a request up. Returns the waker that is no longer used.
    pub(super) fn give_up(&mut self, id: SlotId) -> Option<Waker> {
        let slot = &mut self.slots[id as usize];
        let waker = slot.waker.take();
        match slot.stage {
            Stage::Queued(_) => slot.stage = Stage::Cancelled,
            Stage::Started => slot.stage = Stage::Abandoned,
            _ => self.release(id),
        }
        waker
    }

    /// Takes tasks to wake after the lock is released. The driver wakes those that no
    /// task takes soon. A task does it at a lower cost, because it is on a thread of its runtime.
    #[inline]
    pub(super) fn take_ready(&mut self) -> ReadyTasks {
        ReadyTasks(std::array::from_fn(|_| self.ready.pop_front()))
    }

    fn release(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        slot.stage = Stage::Free;
        if slot.bytes.capacity() > KEPT_BYTES_MAX {
            slot.bytes = Vec::new();
        }
        self.free.push(id);
        self.notify_waiter();
    }
}

/// The side of the driver.
impl State {
    /// Takes the next request.
    #[inline]
    pub(super) fn take_job(&mut self) -> Option<Job> {
        loop {
            let id = self.queue.pop_front()?;
            let slot = &mut self.slots[id as usize];
            if let Stage::Queued(request) = slot.stage {
                slot.stage = Stage::Started;
                return Some(Job { slot: id, request, bytes: std::mem::take(&mut slot.bytes) });
            }
            self.release(id);
        }
    }

    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Returns a started request, unless its future was dropped: then the slot is freed.
    #[inline]
    pub(super) fn unless_abandoned(&mut self, job: Job) -> Option<Job> {
        let slot = &mut self.slots[job.slot as usize];
        if matches!(slot.stage, Stage::Started) {
            return Some(job);
        }
        slot.bytes = job.bytes;
        self.release(job.slot);
        None
    }

    /// Stores the answer of a started request, and its buffer with the value's bytes.
    #[inline]
    pub(super) fn answer(&mut self, id: SlotId, bytes: Vec<u8>, result: SlotResult) {
        let slot = &mut self.slots[id as usize];
        slot.bytes = bytes;
        match slot.stage {
            Stage::Started => {
                slot.stage = Stage::Answered(result);
                self.ready.extend(slot.waker.take());
            }
            _ => self.release(id),
        }
    }

    /// Fails all requests, and those that come: the driver has panicked. Whether the started ones
    /// took effect is unknown.
    pub(super) fn fail_for_ever(&mut self) {
        self.is_defective = true;
        self.fail_queued();
        for id in 0..self.slots.len() {
            if let Stage::Started | Stage::Abandoned = self.slots[id].stage {
                let unknown = Error::Operation(OperationError::Indeterminate);
                self.answer(id as SlotId, Vec::new(), Err(Box::new(unknown)));
            }
        }
    }

    /// Moves all tasks that wait to be woken.
    #[inline]
    pub(super) fn drain_ready(&mut self, into: &mut Vec<Waker>) {
        into.extend(self.ready.drain(..));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }
}

#[cfg(test)]
mod tests;
