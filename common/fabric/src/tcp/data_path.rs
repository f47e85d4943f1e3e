//! The fabric of a session over TCP. Nothing allocates, except a buffer that has to grow.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use zerocopy::IntoBytes;

use super::LATENESS_MAX_NS;
use super::connect::DataLink;
use super::link::{ArrivedSum, Lane, Link, WAIT_MAX};
use super::record::{RecordError, changes};
use crate::clock::Clock;
use crate::lane_state::{LaneChain, SleepingLanes, Stage};
use crate::lent::sum_after;
use crate::memory::words_mut;
use crate::rdma::RemoteRegion;
use crate::{
    Buffer, CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, LaneId, Lent, Nanos,
    RegionIndex, Timing, Verb, Wakeup, interrupt,
};

/// Polls without a completion between two readings of the clock, in [`Fabric::poll`]. They serve a
/// caller that never calls `relax`.
const POLLS_PER_LOOK: u32 = 64;

/// Sends chains to servers, which execute them. The chains of one doorbell leave with one system
/// call for each region.
///
/// The server refuses a chain that changes the region after the chain's deadline. So when a
/// connection breaks, its chains in flight complete as [`ChainError::Unknown`] only after their
/// deadlines: then each verb has taken effect, or never will. One gap remains: a stop of the
/// server's process between its check of the clock and the instruction that follows it.
///
/// After a connection broke, every chain that is posted for its region fails at once with
/// [`ChainError::Fenced`], and is not executed. The other regions are not affected.
pub struct TcpFabric {
    lanes: Box<[Lane]>,
    /// One for each region.
    links: Vec<Link>,
    clock: Clock,
    completed: VecDeque<Completion>,
    waiting: SleepingLanes,
    /// The lanes whose connection broke, until the deadlines of their chains.
    unknown: SleepingLanes,
    wakeup: Option<Arc<Wakeup>>,
    /// Watches the sockets of all regions.
    watched: OwnedFd,
    /// Whether the next poll does not look at the sockets: chains have just left, or all bytes that
    /// had arrived were just received.
    skips_look: bool,
    empty_polls: u32,
    doorbells: u64,
}

impl TcpFabric {
    pub(super) fn new(link: DataLink, region: RemoteRegion, lanes: u16) -> io::Result<Self> {
        let count = usize::from(lanes);
        let lane = |_| Lane {
            chain: LaneChain::NONE,
            lent: Lent::NONE,
            arrived: ArrivedSum::default(),
            buffers: Default::default(),
            counters: Counters::default(),
        };
        let mut fabric = Self {
            lanes: (0..lanes).map(lane).collect(),
            links: Vec::new(),
            clock: Clock::new(),
            completed: VecDeque::with_capacity(count),
            waiting: SleepingLanes::with_capacity(count),
            unknown: SleepingLanes::with_capacity(count),
            wakeup: None,
            watched: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            skips_look: false,
            empty_polls: 0,
            doorbells: 0,
        };
        fabric.add_region(link, region, None)?;
        Ok(fabric)
    }

    /// Adds a region, over a connection of its own. With `replaces` it takes the place of that
    /// region, whose connection is ended. Chains of the former region fail as if the connection had
    /// broken.
    ///
    /// # Errors
    /// The system's error. Then the fabric is as it was.
    pub fn add_region(
        &mut self,
        link: DataLink,
        region: RemoteRegion,
        replaces: Option<RegionIndex>,
    ) -> io::Result<RegionIndex> {
        let index = replaces.unwrap_or(RegionIndex(self.links.len() as u16));
        let data = epoll::EventData::new_u64(index.0.into());
        epoll::add(&self.watched, &link.stream, data, epoll::EventFlags::IN)?;
        let link = Link::new(link, region, self.lanes.len() as u16)?;
        match replaces {
            None => self.links.push(link),
            Some(replaced) => {
                self.break_link(replaced);
                // Without a connection, the posted chains fail.
                self.ring_for(replaced);
                self.links[replaced.index()] = link;
            }
        }
        Ok(index)
    }

    #[inline]
    fn finish(&mut self, lane: LaneId, result: Result<u64, ChainError>) {
        self.lanes[usize::from(lane.0)].chain.stage = Stage::Idle;
        self.completed.push_back(Completion { lane, result });
    }

    /// Ends the connection to a region. Its chains in flight fail: those that only READ at once.
    #[cold]
    fn break_link(&mut self, region: RegionIndex) {
        // Answers that have arrived are valid.
        while let Ok(Some(completion)) = self.next_answer(region) {
            self.completed.push_back(completion);
        }
        self.links[region.index()].end();
        let latest = self.clock.now() + LATENESS_MAX_NS;
        for number in 0..self.lanes.len() {
            let (id, chain) = (LaneId(number as u16), &mut self.lanes[number].chain);
            if chain.stage != Stage::InFlight || chain.region != region {
                continue;
            }
            match chain.deadline {
                Nanos::MAX if !changes(chain.verbs()) => {
                    self.finish(id, Err(ChainError::Fenced));
                }
                deadline => {
                    chain.stage = Stage::Lost;
                    self.unknown.add(id, deadline.min(latest));
                }
            }
        }
    }

    /// Rings the doorbell of one region.
    #[inline]
    fn ring_for(&mut self, region: RegionIndex) {
        let at = region.index();
        let mut now = None;
        let mut has_left = false;
        while let Some(&id) = self.links[at].posted.front() {
            let clock = &self.clock;
            let mut now = || *now.get_or_insert_with(|| clock.now());
            let (link, lane) = (&mut self.links[at], &mut self.lanes[usize::from(id.0)]);
            let bytes = lane.chain.payload_bytes;
            let has_changes = lane.chain.has_deadline();
            let error = if link.stream.is_none() {
                Some(ChainError::Fenced)
            } else if has_changes && now() > lane.chain.deadline {
                Some(ChainError::Late)
            } else {
                None
            };
            if let Some(error) = error {
                link.unpost(bytes);
                self.finish(id, Err(error));
                continue;
            }
            if has_changes && !link.may_set_deadlines(now()) || !link.flight.admits(0) {
                break;
            }
            if link.in_flight == 0 {
                link.heard_at = now();
            }
            link.flight.leave(id, bytes, has_changes, now);
            link.unpost(bytes);
            link.in_flight += 1;
            lane.chain.stage = Stage::InFlight;
            link.encode(id, lane);
            has_left = true;
        }
        self.doorbells += u64::from(has_left);
        let link = &mut self.links[at];
        if !link.output.is_empty() {
            self.skips_look = true;
            if !link.send() {
                self.break_link(region);
            }
        }
    }

    /// The next answer of a region's server among the bytes that were received.
    #[inline]
    fn next_answer(&mut self, region: RegionIndex) -> Result<Option<Completion>, RecordError> {
        let Self { links, lanes, clock, .. } = self;
        let link = &mut links[region.index()];
        let Some((lane, result)) = link.next_answer(lanes, region, || clock.now())? else {
            return Ok(None);
        };
        let chain = &mut lanes[usize::from(lane.0)].chain;
        chain.stage = Stage::Idle;
        link.in_flight -= 1;
        link.flight.arrive(lane, chain.payload_bytes, chain.has_deadline(), || clock.now());
        Ok(Some(Completion { lane, result }))
    }

    /// The next answer among the bytes that were received.
    #[inline]
    fn next_received(&mut self) -> Option<Completion> {
        for at in 0..self.links.len() {
            let region = RegionIndex(at as u16);
            match self.next_answer(region) {
                Ok(None) => {}
                Ok(completion) => return completion,
                Err(_) => {
                    self.links[at].discard_input();
                    self.break_link(region);
                    return self.completed.pop_front();
                }
            }
        }
        None
    }

    /// Receives once from each region that owes an answer, or from `all`. Returns whether anything
    /// arrived or a connection broke.
    #[inline]
    fn receive(&mut self, wait: bool, all: bool) -> bool {
        let mut has_changed = false;
        for at in 0..self.links.len() {
            let Self { links, lanes, clock, .. } = self;
            if !all && !links[at].awaits_bytes() {
                continue;
            }
            match links[at].receive(lanes, wait, || clock.now()) {
                Ok(received) => has_changed |= received,
                Err(_) => {
                    self.break_link(RegionIndex(at as u16));
                    has_changed = true;
                }
            }
        }
        has_changed
    }

    /// Breaks the connections that are overdue; all that owe an answer if the caller gives up.
    fn check_links(&mut self) {
        let now = if interrupt::gives_up() { Nanos::MAX } else { self.clock.now() };
        for at in 0..self.links.len() {
            if self.links[at].is_overdue(now) {
                self.break_link(RegionIndex(at as u16));
            }
        }
    }

    /// Sleeps until bytes arrive, a socket has room for more, a wait ends, or a signal.
    #[cold]
    fn sleep(&mut self) {
        if self.links.iter().any(Link::has_received) {
            return;
        }
        let due = [self.waiting.first(), self.unknown.first()].into_iter().flatten().min();
        let left = due.map_or(WAIT_MAX, |due| {
            Duration::from_nanos(due.saturating_sub(self.clock.now())).min(WAIT_MAX)
        });
        for (at, link) in self.links.iter_mut().enumerate() {
            link.watch_for_room(&self.watched, at as u64);
        }
        let wakeup = self.wakeup.as_deref();
        if wakeup.is_some_and(|wakeup| !wakeup.begin_sleep()) {
            return;
        }
        // Without a wakeup, the same descriptor twice.
        let signal = wakeup.map_or(self.watched.as_fd(), |wakeup| wakeup.as_fd());
        let mut polled =
            [self.watched.as_fd(), signal].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // An interrupted sleep is a short one.
        let _ = poll(&mut polled, Timespec::try_from(left).ok().as_ref());
        wakeup.inspect(|wakeup| wakeup.end_sleep());
    }

    /// Whether only the bytes of one server can end a sleep.
    fn awaits_one_server(&self) -> bool {
        self.links.len() == 1
            && self.wakeup.is_none()
            && self.waiting.first().or(self.unknown.first()).is_none()
            && self.links.iter().all(|link| link.awaits_bytes() && link.output.is_empty())
    }
}

impl Fabric for TcpFabric {
    fn timing(&self, region: RegionIndex) -> Timing {
        let round_trip_min_ns = self.links[region.index()].region.round_trip_min_ns.into();
        Timing { round_trip_min_ns, lateness_max_ns: LATENESS_MAX_NS }
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    #[inline]
    fn post(&mut self, id: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        assert!((1..=CHAIN_VERBS_MAX).contains(&chain.len()), "a chain has 1 to 4 verbs");
        let lane = &mut self.lanes[usize::from(id.0)];
        let link = &mut self.links[region.index()];
        if lane.chain.stage != Stage::Idle {
            let result = Err(ChainError::Busy);
            return self.completed.push_back(Completion { lane: id, result });
        }
        let payload_bytes = lane.counters.count(chain);
        if changes(chain) && !link.region.writable {
            return self.finish(id, Err(ChainError::Denied));
        }
        if !lane.lent.suits(chain) {
            // It was taken back.
            return self.finish(id, Err(ChainError::Fenced));
        }
        lane.chain.post(region, chain, payload_bytes, deadline);
        lane.begin(chain);
        link.posted_bytes += payload_bytes;
        link.posted.push_back(id);
    }

    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        let (buffer, at, bytes) = part;
        match buffer {
            Buffer::Lent => self.lanes[usize::from(lane.0)].lent_sum(verb, (at, bytes), before),
            own => sum_after(before, &self.buffer(lane, own)[at as usize..][..bytes as usize]),
        }
    }

    /// Room depends on the bytes in flight.
    #[inline]
    fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        let link = &self.links[region.index()];
        link.flight.admits(link.posted_bytes) && link.flight.admits_all(under_way_bytes)
    }

    fn set_patience(&mut self, region: RegionIndex, patience: Nanos) {
        self.links[region.index()].flight.set_patience(patience);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.waiting.add(lane, until);
    }

    #[inline]
    fn ring(&mut self) {
        for at in 0..self.links.len() {
            let link = &self.links[at];
            if !link.posted.is_empty() || !link.output.is_empty() {
                self.ring_for(RegionIndex(at as u16));
            }
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Completion> {
        if let Some(completion) = self.completed.pop_front() {
            return Some(completion);
        }
        if let Some(completion) = self.next_received() {
            return Some(completion);
        }
        if !std::mem::take(&mut self.skips_look)
            && self.receive(false, false)
            && let Some(completion) = self.next_received()
        {
            return Some(completion);
        }
        self.empty_polls = self.empty_polls.wrapping_add(1);
        if self.empty_polls.is_multiple_of(POLLS_PER_LOOK) {
            self.check_links();
        }
        let Self { clock, waiting, unknown, lanes, completed, .. } = self;
        if let Some(Completion { lane, .. }) = unknown.due(|| clock.now()) {
            lanes[usize::from(lane.0)].chain.stage = Stage::Idle;
            return Some(Completion { lane, result: Err(ChainError::Unknown) });
        }
        completed.pop_front().or_else(|| waiting.due(|| clock.now()))
    }

    fn relax(&mut self) {
        // Chains may have waited for room, or for the server's clock.
        self.ring();
        if !self.completed.is_empty() {
            return;
        }
        if self.awaits_one_server() {
            self.receive(true, false);
        } else {
            self.sleep();
            self.receive(false, true);
        }
        // Also after bytes: another server may be silent, while this one answers all the time.
        self.check_links();
        self.skips_look = true;
    }

    fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        self.wakeup = Some(wakeup);
    }

    #[inline]
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        match buffer {
            Buffer::Lent => self.lanes[usize::from(lane.0)].lent.content(),
            own => self.lanes[usize::from(lane.0)].buffers[own as usize].as_bytes(),
        }
    }

    #[inline]
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.lanes[usize::from(lane.0)].buffers[buffer as usize].as_mut_bytes()
    }

    #[inline]
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        let lane = &mut self.lanes[usize::from(lane.0)];
        // While a chain is in flight, a long buffer is sent from where it is.
        let may_move = lane.chain.stage != Stage::InFlight;
        if may_move {
            words_mut(&mut lane.buffers[buffer as usize], bytes as u32);
        }
        may_move
    }

    /// Breaks the links on which bytes of the former memory are still to be sent or to arrive. A
    /// server that answers a WRITE before it has all bytes is at fault.
    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        let number = usize::from(lane.0);
        if self.lanes[number].lent.bytes() > 0 {
            for at in 0..self.links.len() {
                if self.links[at].output.has_direct() {
                    self.break_link(RegionIndex(at as u16));
                }
            }
            let chain = &self.lanes[number].chain;
            let is_pending = matches!(chain.stage, Stage::Posted | Stage::InFlight);
            if is_pending && chain.uses_lent() {
                self.break_link(chain.region);
            }
        }
        self.lanes[number].lent = memory;
        true
    }

    fn disconnect(&mut self, region: RegionIndex) {
        self.break_link(region);
    }

    fn counters(&self) -> Counters {
        Counters::sum(self.doorbells, self.lanes.iter().map(|lane| &lane.counters))
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lanes[usize::from(lane.0)].counters
    }
}
