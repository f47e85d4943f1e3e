//! The fabric of one session: setting it up, sleeping, and what happens when the connection breaks.
//! What happens when it does not is in `datapath.rs`.

use std::collections::VecDeque;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ffi::{self, ibv_wc_status, rdma_cm_event_type};
use super::handles::{ProtectionDomain, QueuePair};
use super::identifier::EventChannel;
use super::lanes::{Lanes, Stage};
use super::work::classify_failure;
use crate::clock::Clock;
use crate::rdma::{Options, RemoteRegion, VerbsError};
use crate::waits::SleepingLanes;
use crate::{Completion, Flight, LaneId, Nanos};

/// Completions taken at a time.
const COMPLETIONS_MAX: usize = 32;
/// The longest sleep: whatever should have woken this session is found then.
const SLEEP_NS_MAX: Nanos = 100_000_000;
/// How long a broken queue pair may take to hand everything back, before it is destroyed.
const FLUSH_NS_MAX: Nanos = 1_000_000_000;

/// Executes chains through the device, one `ibv_post_send` a doorbell.
///
/// A chain whose deadline would pass before the device must have given up is refused at its
/// doorbell, and the queue pair is broken off when its oldest chain that changes the region is
/// older than that. What remains open is a process that stops: between that look at the clock and
/// the doorbell, or with such a chain in flight.
///
/// How much is in flight is bounded by what the link was seen to carry ([`Flight`]).
///
/// A queue pair that reported an error is finished: whatever is posted later fails at once with
/// [`ChainError::Fenced`](crate::ChainError::Fenced), without having been executed.
pub struct VerbsFabric {
    pub(super) lanes: Lanes,
    pub(super) remote: RemoteRegion,
    pub(super) inline_bytes_max: u32,
    /// `None` once it had to be destroyed.
    pub(super) queue_pair: Option<Arc<QueuePair>>,
    events: Arc<EventChannel>,
    pub(super) clock: Clock,
    pub(super) delivery_max_ns: Nanos,
    pub(super) lateness_max_ns: Nanos,
    pub(super) spin_ns: Nanos,
    pub(super) posted: VecDeque<LaneId>,
    pub(super) completed: VecDeque<Completion>,
    pub(super) waiting: SleepingLanes,
    /// Payload of the chains that wait for the doorbell.
    pub(super) posted_bytes: u64,
    /// Work requests the queue pair has room for.
    pub(super) room: usize,
    /// Chains with the device: how many, and how much of them there may be.
    pub(super) flying: usize,
    pub(super) flight: Flight,
    /// When the queue pair reported its first error.
    pub(super) broken_at: Option<Nanos>,
    pub(super) arrived: Arrived,
    pub(super) spins: u32,
    /// Looks at the completion queue that found nothing.
    pub(super) looks: u32,
    /// When the caller began to find nothing; 0 when it does not.
    pub(super) idle_since: Nanos,
    pub(super) doorbells: u64,
}

/// Completions that were taken and not yet looked at.
pub(super) struct Arrived {
    pub(super) all: Box<[ffi::ibv_wc]>,
    pub(super) next: usize,
    pub(super) count: usize,
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
            inline_bytes_max: queue_pair.inline_bytes(),
            queue_pair: Some(queue_pair),
            events,
            clock: Clock::new(),
            delivery_max_ns: options.delivery_max_ns(),
            lateness_max_ns: options.lateness_max_ns(),
            spin_ns: options.spin.as_nanos() as Nanos,
            posted: VecDeque::with_capacity(count),
            completed: VecDeque::with_capacity(count),
            waiting: SleepingLanes::with_capacity(count),
            posted_bytes: 0,
            room: sends as usize,
            flying: 0,
            flight: Flight::new(lanes),
            broken_at: None,
            arrived: Arrived { all, next: 0, count: 0 },
            spins: 0,
            looks: 0,
            idle_since: 0,
            doorbells: 0,
        })
    }

    /// Whether the connection is finished: every further chain fails.
    pub fn is_broken(&self) -> bool {
        self.broken_at.is_some()
    }

    /// Destroys the queue pair: nothing of this session is executed any more, and no buffer is
    /// touched. What was under way has an unknown outcome.
    #[cold]
    pub(super) fn destroy(&mut self) {
        self.broken_at.get_or_insert(self.clock.now());
        self.queue_pair = None;
        self.arrived.count = self.arrived.next;
        self.flying = 0;
        self.flight.clear();
        for number in 0..self.lanes.all.len() {
            let lane = &self.lanes.all[number];
            if lane.stage == Stage::Flying {
                self.room += lane.verbs;
                let unknown = classify_failure(ibv_wc_status::IBV_WC_WR_FLUSH_ERR, lane.chain(), 0);
                let error = lane.result.clone().err().unwrap_or(unknown);
                self.finish(LaneId(number as u16), Err(error));
            }
        }
    }

    /// After the first error: makes the device hand back what it still has.
    #[cold]
    pub(super) fn break_off(&mut self) {
        if self.broken_at.is_none() {
            self.broken_at = Some(self.clock.now());
            self.queue_pair.as_ref().inspect(|queue_pair| queue_pair.disconnect());
        }
    }

    /// Sleeps until a completion, an event of the connection, or the next lane's wait.
    #[cold]
    pub(super) fn sleep(&mut self, now: Nanos) {
        let due = self.waiting.first().unwrap_or(Nanos::MAX);
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

    /// Gives up on a device that does not hand back what it has, and on a connection that has
    /// carried a change for so long that it might take effect too late.
    #[inline]
    pub(super) fn look_at_clock(&mut self, now: Nanos) {
        let idle_since = if self.idle_since == 0 { now } else { self.idle_since };
        let delivery = self.delivery_max_ns;
        match self.broken_at {
            Some(at) if now.saturating_sub(at) > FLUSH_NS_MAX => self.destroy(),
            Some(_) => {}
            None => {
                if now.saturating_sub(idle_since) > delivery
                    || self.flight.has_change_older_than(delivery, now)
                {
                    self.break_off();
                }
            }
        }
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        // Before the lanes: from here on no device touches their memory.
        self.queue_pair = None;
    }
}
