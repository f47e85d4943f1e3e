//! The fabric of one session: setting it up, sleeping, and what happens when a connection breaks.
//! What happens when none does is in `datapath.rs`.
//!
//! Each region has a [`Link`] with a queue pair of its own. All of them are on one device, and
//! share the protection domain, the completion queue and the registered memory of the lanes. The
//! completion queue cannot overrun: the work requests under way on all links together are bounded
//! by its size.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::ffi::{self, ibv_wc_status, rdma_cm_event_type, system};
use super::handles::{CompletionQueue, ProtectionDomain};
use super::lanes::{Lanes, Stage};
use super::link::{DataLink, Link};
use super::work::classify_failure;
use crate::clock::Clock;
use crate::rdma::{RemoteRegion, VerbsError};
use crate::waits::SleepingLanes;
use crate::{Completion, LaneId, Nanos, RegionIndex};

const WATCHING: &str = "watching a connection";
/// Completions taken at a time.
const COMPLETIONS_MAX: usize = 32;
/// The longest sleep: whatever should have woken this session is found then.
const SLEEP_NS_MAX: Nanos = 100_000_000;
/// How long a broken queue pair may take to hand everything back, before it is destroyed.
const FLUSH_NS_MAX: Nanos = 1_000_000_000;

/// Executes chains through one device, one `ibv_post_send` a doorbell and region.
///
/// A chain whose deadline would pass before the device must have given up is refused at its
/// doorbell, and a queue pair is broken off when its oldest chain that changes the region is
/// older than that. What remains open is a process that stops: between that look at the clock and
/// the doorbell, or with such a chain in flight.
///
/// The bytes in flight to a region are bounded by the rate that its link was seen to have
/// ([`Flight`](crate::Flight)).
///
/// A queue pair that reported an error is finished: whatever is posted later for its region fails
/// at once with [`ChainError::Fenced`](crate::ChainError::Fenced), without having been executed.
/// The other regions go on.
pub struct VerbsFabric {
    pub(super) lanes: Lanes,
    /// One for each region.
    pub(super) links: Vec<Link>,
    /// `None` once it failed, and all links with it.
    pub(super) completions: Option<Arc<CompletionQueue>>,
    /// Watches the events of all links.
    watched: OwnedFd,
    pub(super) clock: Clock,
    pub(super) spin_ns: Nanos,
    pub(super) completed: VecDeque<Completion>,
    pub(super) waiting: SleepingLanes,
    /// Work requests for which the completion queue has room.
    pub(super) room: usize,
    /// Chains with the device.
    pub(super) flying: usize,
    pub(super) arrived: Arrived,
    pub(super) spins: u32,
    /// Looks at the completion queue that found nothing.
    pub(super) looks: u32,
    /// When the caller began to find nothing; 0 when it does not.
    pub(super) idle_since: Nanos,
    pub(super) doorbells: u64,
}

/// What the queue pairs of a session share.
pub(super) struct Queues {
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) completions: Arc<CompletionQueue>,
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
    /// A fabric for the first region, over this connection.
    pub(super) fn new(link: DataLink, remote: RemoteRegion) -> Result<Self, VerbsError> {
        let (lanes, count) = (link.lanes, usize::from(link.lanes));
        // SAFETY: a structure of numbers.
        let completion = |_| unsafe { ffi::zeroed::<ffi::ibv_wc>() };
        let all = (0..COMPLETIONS_MAX).map(completion).collect();
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC);
        let mut fabric = Self {
            lanes: Lanes::new(link.domain.clone(), lanes)?,
            links: Vec::new(),
            completions: Some(link.completions().clone()),
            watched: watched.map_err(|error| system(WATCHING)(error.into()))?,
            clock: Clock::new(),
            spin_ns: link.options.spin.as_nanos() as Nanos,
            completed: VecDeque::with_capacity(count),
            waiting: SleepingLanes::with_capacity(count),
            room: link.sends as usize,
            flying: 0,
            arrived: Arrived { all, next: 0, count: 0 },
            spins: 0,
            looks: 0,
            idle_since: 0,
            doorbells: 0,
        };
        fabric.add_region(link, remote)?;
        Ok(fabric)
    }

    /// One region more, over a connection that [`VerbsFabric::connect_data`] made.
    ///
    /// # Errors
    /// [`VerbsError::System`], when the system has no room to watch the connection.
    pub fn add_region(
        &mut self,
        link: DataLink,
        remote: RemoteRegion,
    ) -> Result<RegionIndex, VerbsError> {
        let is_ours =
            self.completions.as_ref().is_some_and(|own| Arc::ptr_eq(own, link.completions()));
        assert!(is_ours, "the connection is another session's");
        let index = RegionIndex(self.links.len() as u16);
        let (events, data) = (&*link.connected.events, epoll::EventData::new_u64(index.0.into()));
        epoll::add(&self.watched, events, data, epoll::EventFlags::IN)
            .map_err(|error| system(WATCHING)(error.into()))?;
        self.links.push(Link::new(link, remote));
        Ok(index)
    }

    /// What queue pairs of further regions share with the first.
    pub(super) fn queues(&self) -> Option<Queues> {
        let (domain, completions) = (self.lanes.domain.clone(), self.completions.clone()?);
        Some(Queues { domain, completions })
    }

    /// Whether the connection to this region is finished: every further chain fails.
    pub fn is_broken(&self, region: RegionIndex) -> bool {
        self.links[region.index()].broken_at.is_some()
    }

    /// Destroys the queue pair of a region: nothing of this session is executed there any more, and
    /// no buffer is touched for it. What was under way there has an unknown outcome.
    #[cold]
    pub(super) fn destroy(&mut self, region: RegionIndex) {
        let link = &mut self.links[region.index()];
        link.broken_at.get_or_insert(self.clock.now());
        link.queue_pair = None;
        // Its completions leave the queue before its lanes get other chains: a work request is
        // known by its lane.
        self.settle_arrived();
        self.links[region.index()].flight.clear();
        for number in 0..self.lanes.all.len() {
            let lane = &self.lanes.all[number];
            if lane.stage == Stage::Flying && lane.region == region {
                let unknown = classify_failure(ibv_wc_status::IBV_WC_WR_FLUSH_ERR, lane.chain(), 0);
                let error = lane.result.clone().err().unwrap_or(unknown);
                let verbs = lane.verbs;
                self.land(region, verbs);
                self.finish(LaneId(number as u16), Err(error));
            }
        }
    }

    /// The completion queue cannot be read any more: no region can be reached.
    #[cold]
    pub(super) fn fail(&mut self) {
        self.completions = None;
        (0..self.links.len()).for_each(|at| self.destroy(RegionIndex(at as u16)));
    }

    /// After a region's first error: makes the device hand back what it still has for it.
    #[cold]
    pub(super) fn break_off(&mut self, region: RegionIndex) {
        let link = &mut self.links[region.index()];
        if link.broken_at.is_none() {
            link.broken_at = Some(self.clock.now());
            link.queue_pair.as_ref().inspect(|queue_pair| queue_pair.disconnect());
        }
    }

    /// Sleeps until a completion, an event of a connection, or the next lane's wait.
    #[cold]
    pub(super) fn sleep(&mut self, now: Nanos) {
        let due = self.waiting.first().unwrap_or(Nanos::MAX);
        let left = due.saturating_sub(now).min(SLEEP_NS_MAX);
        let Some(completions) = self.completions.clone() else {
            return std::thread::sleep(std::time::Duration::from_nanos(left));
        };
        let armed = completions.take_wakeups().and_then(|()| completions.request_wakeup());
        // What came before the request causes no wakeup.
        match armed.and_then(|()| completions.poll(&mut self.arrived.all)) {
            Ok(0) => {}
            Ok(count) => return (self.arrived.next, self.arrived.count) = (0, count),
            Err(_) => return self.fail(),
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: left as i64 };
        let mut polled =
            [PollFd::new(&*completions, PollFlags::IN), PollFd::new(&self.watched, PollFlags::IN)];
        let slept = poll(&mut polled, Some(&timeout));
        let [_, event] = polled.map(|fd| fd.revents());
        if slept.is_ok() && event.contains(PollFlags::IN) {
            self.look_at_events();
        }
    }

    /// A peer hung up, or its host said that it died: what is under way there will not complete.
    #[cold]
    fn look_at_events(&mut self) {
        for at in 0..self.links.len() {
            let mut ended = false;
            while let Ok(Some(event)) = self.links[at].events.next() {
                ended |= matches!(
                    event.kind(),
                    rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED
                        | rdma_cm_event_type::RDMA_CM_EVENT_DEVICE_REMOVAL
                );
            }
            if ended {
                self.break_off(RegionIndex(at as u16));
            }
        }
    }

    /// Gives up on a device that does not hand back what it has, and on connections that are
    /// overdue.
    #[inline]
    pub(super) fn look_at_clock(&mut self, now: Nanos) {
        for at in 0..self.links.len() {
            let (region, link) = (RegionIndex(at as u16), &mut self.links[at]);
            if link.flying == 0 {
                continue;
            }
            if link.silent_since == 0 {
                link.silent_since = now;
            }
            match link.broken_at {
                Some(at) if now.saturating_sub(at) > FLUSH_NS_MAX => self.destroy(region),
                Some(_) => {}
                None if link.is_overdue(now) => self.break_off(region),
                None => {}
            }
        }
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        // Before the lanes: from here on no device touches their memory.
        self.links.iter_mut().for_each(|link| link.queue_pair = None);
    }
}
