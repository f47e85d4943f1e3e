//! The data path: from chains of verbs to work requests and doorbells, and from completions to
//! results. Nothing allocates, except a buffer that has to grow.

use std::ptr::null_mut;
use std::sync::Arc;

use super::fabric::VerbsFabric;
use super::ffi::ibv_wc_status;
use super::link::Link;
use super::work::{WorkRequestId, buffer_of, classify_failure, request};
use crate::lane_state::Stage;
use crate::lent::sum_after;
use crate::rdma::LOOK_NS_MAX;
use crate::{
    Buffer, CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, LaneId, Lent, Nanos,
    RegionIndex, Timing, Verb, Wakeup,
};

/// Spins between two readings of the clock, in [`Fabric::relax`].
const SPINS_PER_LOOK: u32 = 16;
/// Polls without a completion between two readings of the clock, in [`Fabric::poll`]. They serve a
/// caller that never calls `relax`.
const POLLS_PER_LOOK: u32 = 64;

impl VerbsFabric {
    /// Fills in the lane's work requests. Returns the payload of the chain, in bytes.
    #[inline]
    fn prepare(
        &mut self,
        lane_id: LaneId,
        region: RegionIndex,
        chain: &[Verb],
    ) -> Result<u64, ChainError> {
        let link = &self.links[region.index()];
        let payload_bytes = self.lanes.all[usize::from(lane_id.0)].counters.count(chain);
        for verb in chain {
            let Some((buffer, bytes)) = buffer_of(*verb) else { continue };
            let own_bytes = self.own_bytes(lane_id, *verb).unwrap_or(bytes);
            if !self.lanes.provide(lane_id.0, buffer, own_bytes as usize) {
                return Err(ChainError::Unregistered { bytes: bytes.into() });
            }
        }
        for at in 0..chain.len() {
            let memory = &self.lanes.all[usize::from(lane_id.0)].memory;
            let request = request(chain, at, &link.remote, memory, link.inline_bytes_max)?;
            if let Some(word) = request.word {
                self.lanes.put_word(lane_id.0, at, word);
            }
            if at > 0 {
                let next = self.lanes.work_pointer(lane_id.0, at);
                self.lanes.work(lane_id.0, at - 1).0.next = next;
            }
            let (work, entry) = self.lanes.work(lane_id.0, at);
            request.fill(work, entry);
        }
        if let first @ (Verb::ReadSplit { .. } | Verb::WriteSplit { .. }) = chain[0] {
            self.split_first(lane_id, first)?;
        }
        Ok(payload_bytes)
    }

    #[inline]
    pub(super) fn finish(&mut self, lane: LaneId, result: Result<u64, ChainError>) {
        self.lanes.all[usize::from(lane.0)].chain.stage = Stage::Idle;
        self.completed.push_back(Completion { lane, result });
    }

    /// Counts a chain of `verbs` verbs that the device no longer has.
    #[inline]
    pub(super) fn remove_chain(&mut self, region: RegionIndex, verbs: usize) {
        self.links[region.index()].in_flight -= 1;
        (self.in_flight, self.room) = (self.in_flight - 1, self.room + verbs);
    }

    /// Posts a list of work requests for a region. The last request of each chain is signaled, and
    /// an error of another request causes a completion, too. So every chain ends with a completion.
    #[inline]
    fn post_list(&mut self, region: RegionIndex, first: LaneId) {
        self.doorbells += 1;
        (self.idle_since, self.spins) = (0, 0);
        let head = self.lanes.work_pointer(first.0, 0);
        let link = &mut self.links[region.index()];
        link.silent_since = 0;
        let Some(queue_pair) = &link.queue_pair else { return };
        // SAFETY: the list consists of work requests of `self.lanes`, and ends in null. The memory
        // of their entries is registered, and does not change while the lanes are `InFlight`.
        if unsafe { queue_pair.post_sends(head) }.is_err() {
            // It is unknown how many requests the device has. A destroyed queue pair has none.
            self.destroy(region);
        }
    }

    /// The next completion of the device. They are polled in batches.
    #[inline]
    fn next_arrived(&mut self) -> Option<(WorkRequestId, ibv_wc_status::Type)> {
        if self.arrived.next == self.arrived.count {
            match self.completions.as_ref()?.poll(&mut self.arrived.all) {
                Ok(count) => (self.arrived.next, self.arrived.count) = (0, count),
                Err(_) => self.fail(),
            }
            if self.arrived.next == self.arrived.count {
                return None;
            }
        }
        let completion = &self.arrived.all[self.arrived.next];
        self.arrived.next += 1;
        Some((WorkRequestId::from_id(completion.wr_id), completion.status))
    }

    /// Processes one completion of the device. Returns the chain's completion, or `None` if the
    /// chain's last verb has not completed yet.
    #[inline]
    fn process_completion(
        &mut self,
        origin: WorkRequestId,
        status: ibv_wc_status::Type,
    ) -> Option<Completion> {
        let (lane, at) = (LaneId(origin.lane), usize::from(origin.verb));
        let is_ok = status == ibv_wc_status::IBV_WC_SUCCESS;
        let region = self.lanes.all[usize::from(origin.lane)].chain.region;
        if !is_ok {
            self.break_link(region);
        }
        let owner = &mut self.lanes.all[usize::from(origin.lane)];
        if !is_ok && owner.result.is_ok() {
            owner.result = Err(classify_failure(status, owner.chain.verbs(), at));
        }
        if at + 1 < owner.chain.verbs().len() {
            return None;
        }
        let result = std::mem::replace(&mut owner.result, Ok(0));
        owner.chain.stage = Stage::Idle;
        let (link, clock) = (&mut self.links[region.index()], &self.clock);
        link.silent_since = 0;
        let chain = &owner.chain;
        link.flight.arrive(lane, chain.payload_bytes, chain.has_deadline(), || clock.now());
        let has_atomic = chain.verbs().iter().any(|verb| verb.is_atomic());
        let verbs = chain.verbs().len();
        self.remove_chain(region, verbs);
        let result = result.map(|_| if has_atomic { self.lanes.found(origin.lane) } else { 0 });
        Some(Completion { lane, result })
    }

    /// Processes all completions that have arrived.
    #[cold]
    pub(super) fn process_arrived(&mut self) {
        while let Some((origin, status)) = self.next_arrived() {
            if let Some(completion) = self.process_completion(origin, status) {
                self.completed.push_back(completion);
            }
        }
    }

    /// Rings the doorbell of one region.
    #[inline]
    pub(super) fn ring_for(&mut self, region: RegionIndex) {
        let mut now = None;
        let (mut first, mut last) = (None, None);
        while let Some(&id) = self.links[region.index()].posted.front() {
            let chain = &mut self.lanes.all[usize::from(id.0)].chain;
            let (verbs, bytes, deadline) =
                (chain.verbs().len(), chain.payload_bytes, chain.deadline);
            let changes = chain.has_deadline();
            let mut now = || *now.get_or_insert_with(|| self.clock.now());
            let link = &mut self.links[region.index()];
            // A chain that the device gets now may still take effect after this sum.
            let is_late = changes && now() + link.delivery_max_ns + LOOK_NS_MAX > deadline;
            let is_broken = link.broken_at.is_some();
            if is_broken || is_late {
                link.unpost(bytes);
                let error = if is_broken { ChainError::Fenced } else { ChainError::Late };
                self.finish(id, Err(error));
                continue;
            }
            if verbs > self.room || !link.flight.admits(0) {
                break;
            }
            link.flight.leave(id, bytes, changes, now);
            link.unpost(bytes);
            link.in_flight += 1;
            (self.in_flight, self.room) = (self.in_flight + 1, self.room - verbs);
            if self.lanes.all[usize::from(id.0)].loan.gathers {
                self.gather(id, 0);
            }
            self.lanes.all[usize::from(id.0)].chain.stage = Stage::InFlight;
            let head = self.lanes.work_pointer(id.0, 0);
            if let Some((lane, verb)) = last.replace((id.0, verbs - 1)) {
                self.lanes.work(lane, verb).0.next = head;
            }
            first.get_or_insert(id);
        }
        if let (Some(first), Some((lane, verb))) = (first, last) {
            self.lanes.work(lane, verb).0.next = null_mut();
            self.post_list(region, first);
        }
    }
}

impl Fabric for VerbsFabric {
    fn timing(&self, region: RegionIndex) -> Timing {
        let Link { remote, lateness_max_ns, .. } = &self.links[region.index()];
        let round_trip_min_ns = remote.round_trip_min_ns.into();
        Timing { round_trip_min_ns, lateness_max_ns: *lateness_max_ns }
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    #[inline]
    fn post(&mut self, lane_id: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        assert!((1..=CHAIN_VERBS_MAX).contains(&chain.len()), "a chain has 1 to 4 verbs");
        if self.lanes.all[usize::from(lane_id.0)].chain.stage != Stage::Idle {
            // The device may access the lane's buffers and work requests.
            let result = Err(ChainError::Busy);
            return self.completed.push_back(Completion { lane: lane_id, result });
        }
        if !self.lanes.all[usize::from(lane_id.0)].loan.memory.suits(chain) {
            // It was taken back.
            return self.finish(lane_id, Err(ChainError::Fenced));
        }
        let bounced;
        let mut chain = chain;
        if self.lanes.all[usize::from(lane_id.0)].loan.bounces {
            match self.bounce(lane_id, chain) {
                Ok(verbs) => bounced = verbs,
                Err(error) => return self.finish(lane_id, Err(error)),
            }
            chain = &bounced[..chain.len()];
        }
        let payload_bytes = match self.prepare(lane_id, region, chain) {
            Ok(payload_bytes) => payload_bytes,
            Err(error) => return self.finish(lane_id, Err(error)),
        };
        let lane = &mut self.lanes.all[usize::from(lane_id.0)];
        lane.chain.post(region, chain, payload_bytes, deadline);
        lane.result = Ok(0);
        let link = &mut self.links[region.index()];
        link.posted_bytes += payload_bytes;
        link.posted.push_back(lane_id);
    }

    /// Room depends on the send queue, which on some devices is too short for all lanes, and on the
    /// budget of bytes in flight.
    #[inline]
    fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        let link = &self.links[region.index()];
        let posted: usize = self.links.iter().map(|link| link.posted.len()).sum();
        (posted + 1) * CHAIN_VERBS_MAX <= self.room
            && link.flight.admits(link.posted_bytes)
            && link.flight.admits_all(under_way_bytes)
    }

    fn set_patience(&mut self, region: RegionIndex, patience: Nanos) {
        self.links[region.index()].flight.set_patience(patience);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.waiting.add(lane, until);
    }

    fn ring(&mut self) {
        for at in 0..self.links.len() {
            if !self.links[at].posted.is_empty() {
                self.ring_for(RegionIndex(at as u16));
            }
        }
    }

    #[inline]
    fn poll(&mut self) -> Option<Completion> {
        if let Some(completion) = self.completed.pop_front() {
            return Some(completion);
        }
        if self.in_flight > 0 {
            while let Some((origin, status)) = self.next_arrived() {
                if let Some(completion) = self.process_completion(origin, status) {
                    (self.idle_since, self.spins) = (0, 0);
                    return Some(completion);
                }
            }
            self.empty_polls = self.empty_polls.wrapping_add(1);
            if self.empty_polls.is_multiple_of(POLLS_PER_LOOK) {
                self.check_ages(self.clock.now());
            }
        }
        let clock = &self.clock;
        self.waiting.due(|| clock.now())
    }

    fn relax(&mut self) {
        self.spins += 1;
        if !self.spins.is_multiple_of(SPINS_PER_LOOK) {
            // No pause instruction: polling the completion queue takes long enough.
            return;
        }
        let now = self.now();
        if self.idle_since == 0 {
            self.idle_since = now;
        }
        if self.in_flight > 0 {
            self.check_ages(now);
        }
        if now.saturating_sub(self.idle_since) > self.spin_ns {
            if self.completed.is_empty() {
                self.sleep(now);
            }
            // The second call from here reads the clock again, and may sleep.
            self.spins = SPINS_PER_LOOK - 2;
        }
    }

    fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        self.wakeup = Some(wakeup);
    }

    #[inline]
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.lanes.buffer(lane.0, buffer)
    }

    #[inline]
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.lanes.buffer_mut(lane.0, buffer)
    }

    #[inline]
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        self.lanes.provide(lane.0, buffer, bytes)
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
            Buffer::Lent => self.sum_lent(lane, verb, (at, bytes), before),
            own => sum_after(before, &self.buffer(lane, own)[at as usize..][..bytes as usize]),
        }
    }

    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        self.replace_loan(lane, memory);
        true
    }

    fn disconnect(&mut self, region: RegionIndex) {
        self.break_link(region);
    }

    fn counters(&self) -> Counters {
        Counters::sum(self.doorbells, self.lanes.all.iter().map(|lane| &lane.counters))
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lanes.all[usize::from(lane.0)].counters
    }
}
