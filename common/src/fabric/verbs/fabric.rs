//! The data path: chains of verbs over one reliable connected queue pair.

use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ffi::{self, ibv_wc_status, rdma_cm_event_type};
use super::handles::{ProtectionDomain, QueuePair};
use super::identifier::EventChannel;
use super::lanes::{Lanes, Stage};
use super::types::{Options, RemoteRegion, VerbsError};
use super::work::{Origin, buffer_of, has_deadline, is_atomic, meaning, request};
use crate::fabric::shm::boot_time_ns;
use crate::fabric::{
    Buffer, ChainError, Completion, Counters, Fabric, LaneId, Nanos, Timing, Verb,
};

/// No chain through a network card is faster: its doorbell and its completion cross PCIe here
/// (some 150 ns each way, posted), and the peer's card READs or swaps over PCIe there (some 300 ns
/// at least, for it has to wait for the answer). The fastest cards measured need over 1,000 ns.
const ROUND_TRIP_MIN_NS: Nanos = 500;
/// Completions taken at a time.
const COMPLETIONS_MAX: usize = 32;
/// Looks at the completion queue between two looks at the clock while spinning.
const SPINS_PER_LOOK: u32 = 16;
/// The longest sleep: whatever should have woken this session is found then.
const SLEEP_NS_MAX: Nanos = 100_000_000;
/// How long a broken queue pair may take to hand everything back, before it is destroyed.
const FLUSH_NS_MAX: Nanos = 1_000_000_000;

/// Executes chains through the device, one `ibv_post_send` a doorbell.
///
/// A chain whose deadline would pass before the device must have given up is refused at its
/// doorbell. What remains open is that the process stops between that look at the clock and the
/// doorbell a few instructions later.
///
/// A queue pair that reported an error is finished: whatever is posted later fails at once with
/// [`ChainError::Fenced`], without having been executed.
pub struct VerbsFabric {
    lanes: Lanes,
    remote: RemoteRegion,
    inline_bytes_max: u32,
    /// `None` once it had to be destroyed. The completion queue stays for the descriptor.
    queue_pair: Option<Arc<QueuePair>>,
    events: Arc<EventChannel>,
    delivery_max_ns: Nanos,
    lateness_max_ns: Nanos,
    spin_ns: Nanos,
    posted: VecDeque<LaneId>,
    completed: VecDeque<LaneId>,
    waiting: Vec<(Nanos, LaneId)>,
    /// Work requests the queue pair has room for.
    room: usize,
    /// Chains with the device.
    flying: usize,
    /// When the queue pair reported its first error.
    broken_at: Option<Nanos>,
    arrived: Arrived,
    spins: u32,
    /// When the caller began to find nothing; 0 when it does not.
    idle_since: Nanos,
    doorbells: u64,
}

/// Completions that were taken and not yet looked at.
struct Arrived {
    all: Box<[ffi::ibv_wc]>,
    next: usize,
    count: usize,
}

// SAFETY: the C structures hold no pointer to anything of another thread.
unsafe impl Send for Arrived {}

impl VerbsFabric {
    pub(super) fn new(
        queue_pair: Arc<QueuePair>,
        domain: Arc<ProtectionDomain>,
        events: Arc<EventChannel>,
        remote: RemoteRegion,
        sends: u32,
        lanes: u16,
        options: &Options,
    ) -> Result<Self, VerbsError> {
        let count = usize::from(lanes);
        // SAFETY: a structure of numbers.
        let completion = |_| unsafe { ffi::zeroed::<ffi::ibv_wc>() };
        let all = (0..COMPLETIONS_MAX).map(completion).collect();
        Ok(Self {
            lanes: Lanes::new(domain, lanes)?,
            remote,
            inline_bytes_max: queue_pair.granted().inline_bytes,
            queue_pair: Some(queue_pair),
            events,
            delivery_max_ns: options.delivery_max_ns(),
            lateness_max_ns: options.lateness_max_ns(),
            spin_ns: options.spin.as_nanos() as Nanos,
            posted: VecDeque::with_capacity(count),
            completed: VecDeque::with_capacity(count),
            waiting: Vec::with_capacity(count),
            room: sends as usize,
            flying: 0,
            broken_at: None,
            arrived: Arrived { all, next: 0, count: 0 },
            spins: 0,
            idle_since: 0,
            doorbells: 0,
        })
    }

    /// Whether the connection is finished: every further chain fails.
    pub fn is_broken(&self) -> bool {
        self.broken_at.is_some()
    }

    /// Fills in the lane's work requests.
    #[inline]
    fn prepare(&mut self, lane_id: LaneId, chain: &[Verb]) -> Result<(), ChainError> {
        let lane = &mut self.lanes.all[usize::from(lane_id.0)];
        lane.counters.count(chain);
        for verb in chain {
            if let Some((buffer, bytes)) = buffer_of(*verb)
                && !self.lanes.provide(lane_id.0, buffer, bytes as usize)
            {
                return Err(ChainError::Unregistered { bytes: bytes.into() });
            }
        }
        for at in 0..chain.len() {
            let memory = &self.lanes.all[usize::from(lane_id.0)].memory;
            let request = request(chain, at, &self.remote, memory, self.inline_bytes_max)?;
            if let Some(word) = request.word {
                self.lanes.put_word(lane_id.0, at, word);
            }
            if at > 0 {
                let place = self.lanes.place(lane_id.0, at);
                self.lanes.work(lane_id.0, at - 1).0.next = place;
            }
            let (work, entry) = self.lanes.work(lane_id.0, at);
            request.fill(self.remote.rkey, work, entry);
        }
        Ok(())
    }

    /// Whether the lane's chain could take effect after its deadline if it were posted now.
    #[inline]
    fn is_late(&self, lane: LaneId, now: Nanos) -> bool {
        let lane = &self.lanes.all[usize::from(lane.0)];
        now.saturating_add(self.delivery_max_ns) > lane.deadline
            && lane.chain().iter().any(|verb| has_deadline(*verb))
    }

    #[inline]
    fn finish(&mut self, lane: LaneId, result: Result<u64, ChainError>) {
        let of = &mut self.lanes.all[usize::from(lane.0)];
        (of.result, of.stage) = (result, Stage::Idle);
        self.completed.push_back(lane);
    }

    /// Hands a list to the device. The last work request of each chain is signaled, and the error
    /// of any other names it, so every chain ends with a completion.
    #[inline]
    fn post_list(&mut self, first: LaneId) {
        self.doorbells += 1;
        (self.idle_since, self.spins) = (0, 0);
        let head = self.lanes.place(first.0, 0);
        let Some(queue_pair) = &self.queue_pair else { return };
        // SAFETY: the list goes through work requests of `self.lanes`, null behind the last; what
        // their entries name is registered, and stays as it is while the lanes are `Flying`.
        if unsafe { queue_pair.post_sends(head) }.is_err() {
            // Not known how much of it the device has: destroying the queue pair says.
            self.destroy();
        }
    }

    /// Destroys the queue pair: nothing of this session is executed any more, and no buffer is
    /// touched. What was under way has an unknown outcome.
    #[cold]
    fn destroy(&mut self) {
        self.broken_at.get_or_insert(boot_time_ns());
        self.queue_pair = None;
        self.arrived.count = self.arrived.next;
        self.flying = 0;
        for number in 0..self.lanes.all.len() {
            let lane = &self.lanes.all[number];
            if lane.stage == Stage::Flying {
                let unknown = meaning(ibv_wc_status::IBV_WC_WR_FLUSH_ERR, lane.chain(), 0);
                let error = lane.result.clone().err().unwrap_or(unknown);
                self.finish(LaneId(number as u16), Err(error));
            }
        }
    }

    /// After the first error: makes the device hand back what it still has.
    #[cold]
    fn break_off(&mut self) {
        if self.broken_at.is_none() {
            self.broken_at = Some(boot_time_ns());
            self.queue_pair.as_ref().inspect(|queue_pair| queue_pair.disconnect());
        }
    }

    /// The next completion of the device, taken in batches.
    #[inline]
    fn next_arrived(&mut self) -> Option<(Origin, ibv_wc_status::Type)> {
        if self.arrived.next == self.arrived.count {
            let queue_pair = self.queue_pair.as_ref()?;
            match queue_pair.completions().poll(&mut self.arrived.all) {
                Ok(count) => (self.arrived.next, self.arrived.count) = (0, count),
                Err(_) => self.destroy(),
            }
            if self.arrived.next == self.arrived.count {
                return None;
            }
        }
        let completion = &self.arrived.all[self.arrived.next];
        self.arrived.next += 1;
        Some((Origin::from_id(completion.wr_id), completion.status))
    }

    /// What one of the device's completions means; `None` when the chain's last is still to come.
    #[inline]
    fn settle(&mut self, origin: Origin, status: ibv_wc_status::Type) -> Option<Completion> {
        let (lane, at) = (LaneId(origin.lane), usize::from(origin.verb));
        let is_ok = status == ibv_wc_status::IBV_WC_SUCCESS;
        if !is_ok {
            self.break_off();
        }
        let of = &mut self.lanes.all[usize::from(origin.lane)];
        if !is_ok && of.result.is_ok() {
            of.result = Err(meaning(status, &of.chain[..of.verbs], at));
        }
        if at + 1 < of.verbs {
            return None;
        }
        let result = std::mem::replace(&mut of.result, Ok(0));
        of.stage = Stage::Idle;
        self.flying -= 1;
        self.room += of.verbs;
        let has_atomic = of.chain[..of.verbs].iter().any(|verb| is_atomic(*verb));
        let result = result.map(|_| if has_atomic { self.lanes.found(origin.lane) } else { 0 });
        Some(Completion { lane, result })
    }

    /// Sleeps until a completion, an event of the connection, or the next lane's wait.
    #[cold]
    fn sleep(&mut self, now: Nanos) {
        let due = self.waiting.iter().map(|(until, _)| *until).min().unwrap_or(Nanos::MAX);
        let left = due.saturating_sub(now).min(SLEEP_NS_MAX);
        let Some(queue_pair) = self.queue_pair.clone() else {
            return std::thread::sleep(std::time::Duration::from_nanos(left));
        };
        let completions = queue_pair.completions();
        let armed = completions.take_wakeups().and_then(|()| completions.request_wakeup());
        // What came before the request causes no wakeup.
        match armed.and_then(|()| completions.poll(&mut self.arrived.all)) {
            Ok(0) => {}
            Ok(count) => return (self.arrived.next, self.arrived.count) = (0, count),
            Err(_) => return self.destroy(),
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: left as i64 };
        let events: &EventChannel = &self.events;
        let mut polled =
            [PollFd::new(&**completions, PollFlags::IN), PollFd::new(events, PollFlags::IN)];
        let slept = poll(&mut polled, Some(&timeout));
        let [_, event] = polled.map(|fd| fd.revents());
        if slept.is_ok() && event.contains(PollFlags::IN) {
            self.look_at_events();
        }
    }

    /// The peer hung up, or its host said that it died: what is under way will not complete.
    #[cold]
    fn look_at_events(&mut self) {
        let mut ended = false;
        while let Ok(Some(event)) = self.events.next() {
            ended |= matches!(
                event.kind(),
                rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED
                    | rdma_cm_event_type::RDMA_CM_EVENT_DEVICE_REMOVAL
            );
        }
        if ended {
            self.break_off();
        }
    }

    /// Gives up on a device that does not hand back what it has.
    #[cold]
    fn look_at_clock(&mut self, now: Nanos) {
        let idle = now.saturating_sub(self.idle_since);
        match self.broken_at {
            Some(at) if now.saturating_sub(at) > FLUSH_NS_MAX => self.destroy(),
            None if idle > self.delivery_max_ns => self.break_off(),
            _ => {}
        }
    }
}

impl Fabric for VerbsFabric {
    fn timing(&self) -> Timing {
        Timing { round_trip_min_ns: ROUND_TRIP_MIN_NS, lateness_max_ns: self.lateness_max_ns }
    }

    #[inline]
    fn now(&self) -> Nanos {
        boot_time_ns()
    }

    #[inline]
    fn post(&mut self, lane_id: LaneId, chain: &[Verb], deadline: Nanos) {
        if let Err(error) = self.prepare(lane_id, chain) {
            return self.finish(lane_id, Err(error));
        }
        let lane = &mut self.lanes.all[usize::from(lane_id.0)];
        debug_assert_eq!(lane.stage, Stage::Idle);
        lane.verbs = chain.len();
        lane.chain[..chain.len()].copy_from_slice(chain);
        lane.deadline = deadline;
        lane.stage = Stage::Posted;
        lane.result = Ok(0);
        self.posted.push_back(lane_id);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.waiting.push((until, lane));
    }

    fn ring(&mut self) {
        if self.posted.is_empty() {
            return;
        }
        let now = self.now();
        let (mut first, mut last) = (None, None);
        while let Some(&id) = self.posted.front() {
            let verbs = self.lanes.all[usize::from(id.0)].verbs;
            if self.broken_at.is_some() || self.is_late(id, now) {
                self.posted.pop_front();
                let fenced = self.broken_at.is_some();
                let error = if fenced { ChainError::Fenced } else { ChainError::Late };
                self.finish(id, Err(error));
                continue;
            }
            if verbs > self.room {
                break;
            }
            self.posted.pop_front();
            self.room -= verbs;
            self.flying += 1;
            self.lanes.all[usize::from(id.0)].stage = Stage::Flying;
            let head = self.lanes.place(id.0, 0);
            if let Some((lane, verb)) = last.replace((id.0, verbs - 1)) {
                self.lanes.work(lane, verb).0.next = head;
            }
            first.get_or_insert(id);
        }
        if let (Some(first), Some((lane, verb))) = (first, last) {
            self.lanes.work(lane, verb).0.next = null_mut();
            self.post_list(first);
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Completion> {
        if let Some(lane) = self.completed.pop_front() {
            let result = std::mem::replace(&mut self.lanes.all[usize::from(lane.0)].result, Ok(0));
            return Some(Completion { lane, result });
        }
        if self.flying > 0 {
            while let Some((origin, status)) = self.next_arrived() {
                if let Some(completion) = self.settle(origin, status) {
                    (self.idle_since, self.spins) = (0, 0);
                    return Some(completion);
                }
            }
        }
        if self.waiting.is_empty() {
            return None;
        }
        let now = self.now();
        let due = self.waiting.iter().position(|(until, _)| *until <= now)?;
        let (_, lane) = self.waiting.swap_remove(due);
        Some(Completion { lane, result: Ok(0) })
    }

    fn relax(&mut self) {
        self.spins += 1;
        if !self.spins.is_multiple_of(SPINS_PER_LOOK) {
            return std::hint::spin_loop();
        }
        let now = self.now();
        if self.idle_since == 0 {
            self.idle_since = now;
        }
        if now.saturating_sub(self.idle_since) > self.spin_ns {
            if self.flying > 0 {
                self.look_at_clock(now);
            }
            if self.completed.is_empty() {
                self.sleep(now);
            }
            // After a sleep there may be something at once.
            self.spins = SPINS_PER_LOOK - 2;
        }
    }

    #[inline]
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.lanes.buffer(lane.0, buffer)
    }

    #[inline]
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.lanes.buffer_mut(lane.0, buffer)
    }

    /// Where the system refuses to register a larger buffer, a verb that needs it fails with
    /// [`ChainError::Unregistered`].
    #[inline]
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) {
        let _ = self.lanes.provide(lane.0, buffer, bytes);
    }

    fn counters(&self) -> Counters {
        let mut all = Counters { doorbells: self.doorbells, ..Counters::default() };
        self.lanes.all.iter().for_each(|lane| all += lane.counters);
        all
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lanes.all[usize::from(lane.0)].counters
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        // Before the lanes: from here on no device touches their memory.
        self.queue_pair = None;
    }
}
