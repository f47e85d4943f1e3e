//! The fabric of one session: its set-up, its sleep, and its handling of broken connections. The
//! data path is in `data_path.rs`.
//!
//! Each region has a [`Link`] with a queue pair of its own. All are on one device, and share the
//! protection domain, the completion queue and the registered memory of the lanes. The completion
//! queue cannot overflow, because its size bounds the work requests in flight on all links.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::direct::Registration;
use super::ffi::{self, ibv_wc_status, rdma_cm_event_type, system};
use super::handles::CompletionQueue;
use super::lanes::Lanes;
use super::link::{DataLink, Link};
use super::work::classify_failure;
use crate::clock::Clock;
use crate::lane_state::{SleepingLanes, Stage};
use crate::rdma::{RemoteRegion, VerbsError};
use crate::{Completion, LaneId, Nanos, RegionIndex, Wakeup, interrupt};

const WATCHING: &str = "watching a connection";
/// Completions of one poll.
const COMPLETIONS_MAX: usize = 32;
/// The longest sleep. A lost wakeup delays the session by as much. So does the end of a trust.
const SLEEP_NS_MAX: Nanos = 100_000_000;
/// The time in which a broken queue pair must complete all its work. Afterwards it is destroyed.
const FLUSH_NS_MAX: Nanos = 1_000_000_000;

/// Executes chains through one device, with one `ibv_post_send` for each doorbell and region.
///
/// The device may repeat a verb for a bounded time. A chain whose deadline would pass before is
/// refused at its doorbell. A queue pair is closed if its oldest chain that changes the region is
/// in flight for longer than this time. One gap remains: the process may stop between the reading
/// of the clock and the doorbell, or while such a chain is in flight.
///
/// The bytes in flight to a region are limited by the measured rate of its link
/// ([`Flight`](crate::Flight)).
///
/// After the first error of a queue pair, every chain that is posted for its region fails at once
/// with [`ChainError::Fenced`](crate::ChainError::Fenced), and is not executed. The other regions
/// are not affected.
pub struct VerbsFabric {
    /// The buffers of the caller that the device knows.
    pub(super) registrations: Vec<Registration>,
    pub(super) lanes: Lanes,
    /// One for each region.
    pub(super) links: Vec<Link>,
    /// `None` after it failed, which also breaks all links.
    pub(super) completions: Option<Arc<CompletionQueue>>,
    /// Watches the events of all links.
    watched: OwnedFd,
    pub(super) clock: Clock,
    pub(super) spin_ns: Nanos,
    pub(super) completed: VecDeque<Completion>,
    pub(super) waiting: SleepingLanes,
    /// Ends a sleep when another thread has work for this one.
    pub(super) wakeup: Option<Arc<Wakeup>>,
    /// Work requests for which the completion queue has room.
    pub(super) room: usize,
    /// Chains that the device has, of all links.
    pub(super) in_flight: usize,
    pub(super) arrived: Arrived,
    pub(super) spins: u32,
    /// Polls that found no completion.
    pub(super) empty_polls: u32,
    /// When `relax` was first called since the last completion or doorbell; 0 before that.
    pub(super) idle_since: Nanos,
    pub(super) doorbells: u64,
}

/// Completions that were polled and not yet processed.
pub(super) struct Arrived {
    pub(super) all: Box<[ffi::ibv_wc]>,
    pub(super) next: usize,
    pub(super) count: usize,
}

// SAFETY: the C structures have no pointer to data of another thread.
unsafe impl Send for Arrived {}

impl DataLink {
    /// Makes a fabric whose first region is the one that the reply describes.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`] if the system does not allow the lanes' memory to be registered.
    pub fn into_fabric(self, region: RemoteRegion) -> Result<VerbsFabric, VerbsError> {
        let count = usize::from(self.lanes);
        // SAFETY: a structure of numbers.
        let completion = |_| unsafe { ffi::zeroed::<ffi::ibv_wc>() };
        let all = (0..COMPLETIONS_MAX).map(completion).collect();
        let watched = epoll::create(epoll::CreateFlags::CLOEXEC);
        let mut fabric = VerbsFabric {
            registrations: Vec::new(),
            lanes: Lanes::new(self.domain.clone(), self.lanes)?,
            links: Vec::new(),
            completions: Some(self.completions().clone()),
            watched: watched.map_err(system(WATCHING))?,
            clock: Clock::new(),
            spin_ns: self.options.spin.as_nanos() as Nanos,
            completed: VecDeque::with_capacity(count),
            waiting: SleepingLanes::with_capacity(count),
            wakeup: None,
            room: self.sends as usize,
            in_flight: 0,
            arrived: Arrived { all, next: 0, count: 0 },
            spins: 0,
            empty_polls: 0,
            idle_since: 0,
            doorbells: 0,
        };
        fabric.add_region(self, region, None)?;
        Ok(fabric)
    }
}

impl VerbsFabric {
    /// Adds a region, over a connection of [`VerbsFabric::connect_data`]. With `replaces` it takes
    /// the place of that region, whose queue pair is destroyed. Chains of the former region fail as
    /// if the connection had broken.
    ///
    /// # Errors
    /// [`VerbsError::System`] if the system does not watch the connection's events. Then the fabric
    /// is as it was.
    pub fn add_region(
        &mut self,
        link: DataLink,
        remote: RemoteRegion,
        replaces: Option<RegionIndex>,
    ) -> Result<RegionIndex, VerbsError> {
        let is_own =
            self.completions.as_ref().is_some_and(|own| Arc::ptr_eq(own, link.completions()));
        assert!(is_own, "the connection belongs to this session");
        let index = replaces.unwrap_or(RegionIndex(self.links.len() as u16));
        let (events, data) = (&*link.connected.events, epoll::EventData::new_u64(index.0.into()));
        epoll::add(&self.watched, events, data, epoll::EventFlags::IN).map_err(system(WATCHING))?;
        let link = Link::new(link, remote);
        match replaces {
            None => self.links.push(link),
            Some(replaced) => {
                self.destroy(replaced);
                // On a broken connection, the posted chains fail.
                self.ring_for(replaced);
                // The events would end every sleep, because they are not taken any more. The first
                // region's identifier lives as long as the fabric, and with it this channel.
                let _ = epoll::delete(&self.watched, &*self.links[replaced.index()].events);
                self.links[replaced.index()] = link;
            }
        }
        Ok(index)
    }

    /// Whether the connection to this region is broken: every further chain fails.
    pub fn is_broken(&self, region: RegionIndex) -> bool {
        self.links[region.index()].broken_at.is_some()
    }

    /// Destroys the queue pair of a region. From then on no verb of this session is executed there,
    /// and the device accesses no buffer for it. Chains in flight have an unknown outcome.
    #[cold]
    pub(super) fn destroy(&mut self, region: RegionIndex) {
        let link = &mut self.links[region.index()];
        link.broken_at.get_or_insert(self.clock.now());
        if let Some(queue_pair) = link.queue_pair.take() {
            // The peer learns it now. The first region's identifier lives as long as the fabric.
            queue_pair.id.disconnect();
        }
        // A completion names its lane only. So this takes the region's completions from the queue
        // before the lanes get other chains.
        self.process_arrived();
        self.links[region.index()].flight.clear();
        for number in 0..self.lanes.all.len() {
            let lane = &self.lanes.all[number];
            if lane.chain.stage == Stage::InFlight && lane.chain.region == region {
                let unknown =
                    classify_failure(ibv_wc_status::IBV_WC_WR_FLUSH_ERR, lane.chain.verbs(), 0);
                let error = lane.result.err().unwrap_or(unknown);
                let verbs = lane.chain.verbs().len();
                self.remove_chain(region, verbs);
                self.finish(LaneId(number as u16), Err(error));
            }
        }
    }

    /// Breaks all connections, because the completion queue has failed.
    #[cold]
    pub(super) fn fail(&mut self) {
        self.completions = None;
        (0..self.links.len()).for_each(|at| self.destroy(RegionIndex(at as u16)));
    }

    /// Disconnects a region, so that the device completes all its work for it.
    #[cold]
    pub(super) fn break_link(&mut self, region: RegionIndex) {
        let link = &mut self.links[region.index()];
        if link.broken_at.is_none() {
            link.broken_at = Some(self.clock.now());
            link.queue_pair.as_ref().inspect(|queue_pair| queue_pair.id.disconnect());
        }
    }

    /// Sleeps until a completion, an event of a connection, the end of a lane's wait, or a signal
    /// of the wakeup.
    #[cold]
    pub(super) fn sleep(&mut self, now: Nanos) {
        let due = self.waiting.first().unwrap_or(Nanos::MAX);
        let left = due.saturating_sub(now).min(SLEEP_NS_MAX);
        let Some(completions) = self.completions.clone() else {
            let left = std::time::Duration::from_nanos(left);
            return match &self.wakeup {
                Some(wakeup) => wakeup.sleep(Some(left)),
                None => std::thread::sleep(left),
            };
        };
        let armed = completions.take_wakeups().and_then(|()| completions.request_wakeup());
        // Completions before the request cause no wakeup.
        match armed.and_then(|()| completions.poll(&mut self.arrived.all)) {
            Ok(0) => {}
            Ok(count) => return (self.arrived.next, self.arrived.count) = (0, count),
            Err(_) => return self.fail(),
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: left as i64 };
        let wakeup = self.wakeup.as_deref();
        if wakeup.is_some_and(|wakeup| !wakeup.begin_sleep()) {
            return;
        }
        // Without a wakeup, the same descriptor twice.
        let signal = wakeup.map_or(self.watched.as_fd(), |wakeup| wakeup.as_fd());
        let mut polled = [completions.as_fd(), self.watched.as_fd(), signal]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let slept = poll(&mut polled, Some(&timeout));
        let [_, event, _] = polled.map(|fd| fd.revents());
        wakeup.inspect(|wakeup| wakeup.end_sleep());
        if interrupt::gives_up() {
            return (0..self.links.len()).for_each(|at| self.break_link(RegionIndex(at as u16)));
        }
        if slept.is_ok() && event.contains(PollFlags::IN) {
            self.take_events();
        }
    }

    /// Breaks the connections whose peers have disconnected: their chains will not complete.
    #[cold]
    fn take_events(&mut self) {
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
                self.break_link(RegionIndex(at as u16));
            }
        }
    }

    /// Breaks connections that are overdue. Destroys queue pairs that broke and did not complete
    /// all their work in time.
    #[inline]
    pub(super) fn check_ages(&mut self, now: Nanos) {
        for at in 0..self.links.len() {
            let (region, link) = (RegionIndex(at as u16), &mut self.links[at]);
            if link.in_flight == 0 {
                continue;
            }
            if link.silent_since == 0 {
                link.silent_since = now;
            }
            match link.broken_at {
                Some(at) if now.saturating_sub(at) > FLUSH_NS_MAX => self.destroy(region),
                Some(_) => {}
                None if link.is_overdue(now) => self.break_link(region),
                None => {}
            }
        }
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        // The queue pairs are destroyed before the lanes are dropped, so that no device accesses
        // the lanes' memory.
        self.links.iter_mut().for_each(|link| link.queue_pair = None);
    }
}
