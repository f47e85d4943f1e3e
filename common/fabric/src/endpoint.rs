//! Chains as futures, which the protocol's async functions await.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use super::{
    Buffer, ChainError, Completion, Fabric, LaneId, Lent, LentMemory, Nanos, RegionIndex, Verb,
    wait_for,
};

/// The word that the chain's last atomic verb found, or 0 without one; or why the chain failed.
type ChainResult = Result<u64, ChainError>;

/// The future of a chain, or of a wait, that a lane has in flight.
#[must_use = "a lane has one chain in flight at a time: await it"]
pub struct InFlight<'e> {
    /// The lane's cell, into which the endpoint puts the result.
    result: &'e Cell<Option<ChainResult>>,
}

impl Future for InFlight<'_> {
    type Output = ChainResult;

    #[inline]
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<ChainResult> {
        self.result.take().map_or(Poll::Pending, Poll::Ready)
    }
}

/// A fabric, and the results of its lanes' chains. An async function awaits chains of its own lane.
/// [`Endpoint::drive`] or [`Endpoint::step`] rings the doorbell for all lanes and distributes the
/// completions.
///
/// There is no executor and no waker: a future is polled again when its lane has completed.
pub struct Endpoint<F> {
    fabric: RefCell<F>,
    results: Box<[Cell<Option<ChainResult>>]>,
    /// Whether [`Endpoint::drive`] runs its future, so that no other future is in progress.
    alone: Cell<bool>,
    /// The clock's reading at the last [`Endpoint::tick`].
    ticked_at: Cell<Nanos>,
}

impl<F: Fabric> Endpoint<F> {
    /// An endpoint for `lanes` lanes. The fabric must have the same number.
    pub fn new(fabric: F, lanes: u16) -> Self {
        Self {
            fabric: RefCell::new(fabric),
            results: (0..lanes).map(|_| Cell::new(None)).collect(),
            alone: Cell::new(false),
            ticked_at: Cell::new(0),
        }
    }

    /// Borrows the fabric; never across an `.await`.
    pub fn fabric(&self) -> Ref<'_, F> {
        self.fabric.borrow()
    }

    /// Borrows the fabric to change it; never across an `.await`.
    pub fn fabric_mut(&self) -> RefMut<'_, F> {
        self.fabric.borrow_mut()
    }

    /// The time. Inside [`Endpoint::drive`] this reads the clock. Elsewhere it is the time of the
    /// last [`Endpoint::tick`]: not before the completions that were distributed, and not after the
    /// chains that are posted next.
    #[inline]
    pub fn now(&self) -> Nanos {
        if self.alone.get() { self.fabric.borrow().now() } else { self.ticked_at.get() }
    }

    /// Reads the clock once for all futures that are about to be polled.
    #[inline]
    pub fn tick(&self) {
        self.ticked_at.set(self.fabric.borrow().now());
    }

    /// As [`Fabric::has_room`].
    #[inline]
    pub fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        self.fabric.borrow().has_room(region, under_way_bytes)
    }

    /// Borrows the content of a lane's buffer; never across an `.await`.
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        Ref::map(self.fabric.borrow(), |fabric| fabric.buffer(lane, buffer))
    }

    /// Posts a chain to a region now: one round trip. The future returns the word that the last
    /// atomic verb found, or 0 without one. Inside [`Endpoint::drive`] the chain is executed before
    /// this returns.
    // Without `always` the compiler makes a call of it, in every PUT.
    #[inline(always)]
    pub fn chain(
        &self,
        lane: LaneId,
        region: RegionIndex,
        verbs: &[Verb],
        deadline: Nanos,
    ) -> InFlight<'_> {
        let mut fabric = self.fabric.borrow_mut();
        let result = &self.results[usize::from(lane.0)];
        if self.alone.get() {
            result.set(Some(fabric.run(lane, region, verbs, deadline)));
        } else {
            // A dropped future leaves its chain's result. The new future must not return it.
            result.set(None);
            fabric.post(lane, region, verbs, deadline);
        }
        InFlight { result }
    }

    /// The result of a chain that was not posted, for this reason.
    #[cold]
    pub fn refuse(&self, lane: LaneId, reason: ChainError) -> InFlight<'_> {
        let result = &self.results[usize::from(lane.0)];
        result.set(Some(Err(reason)));
        InFlight { result }
    }

    /// As [`Endpoint::chain`], for a chain of one READ without a deadline.
    #[inline]
    pub fn read(
        &self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> InFlight<'_> {
        let mut fabric = self.fabric.borrow_mut();
        let result = &self.results[usize::from(lane.0)];
        if self.alone.get() {
            let read = fabric.run_read(lane, region, remote, into, bytes);
            result.set(Some(read.map(|()| 0)));
        } else {
            result.set(None);
            fabric.post_read(lane, region, remote, into, bytes);
        }
        InFlight { result }
    }

    /// Takes the result of a lane's chain that no future awaits; `None` while it is in flight.
    #[inline]
    pub fn take_result(&self, lane: LaneId) -> Option<Result<u64, ChainError>> {
        self.results[usize::from(lane.0)].take()
    }

    /// Waits until the clock reads `until`.
    pub async fn sleep_until(&self, lane: LaneId, until: Nanos) {
        self.fabric.borrow_mut().wait(lane, until);
        if self.alone.get() {
            self.step(|_| ());
        }
        // A wait has no verb that could fail.
        let _ = InFlight { result: &self.results[usize::from(lane.0)] }.await;
    }

    /// Rings the doorbell, stores each completion's result for its lane, and calls `completed` with
    /// the lane. Does not wait. Returns whether any lane completed.
    pub fn try_step(&self, mut completed: impl FnMut(LaneId)) -> bool {
        let mut fabric = self.fabric.borrow_mut();
        fabric.ring();
        let mut any = false;
        while let Some(Completion { lane, result }) = fabric.poll() {
            self.results[usize::from(lane.0)].set(Some(result));
            any = true;
            completed(lane);
        }
        any
    }

    /// Repeats [`Endpoint::try_step`] until at least one lane has completed.
    #[inline]
    pub fn step(&self, mut completed: impl FnMut(LaneId)) {
        while !self.try_step(&mut completed) {
            self.fabric.borrow_mut().relax();
        }
    }

    /// Whether no future is in progress, so that each chain is executed when it is posted.
    #[inline]
    pub fn is_alone(&self) -> bool {
        self.alone.get()
    }

    /// Runs a part of an operation while no future is in progress: each chain is executed when it
    /// is posted. [`Endpoint::take_result`] returns its result.
    #[inline]
    pub fn alone<T>(&self, part: impl FnOnce() -> T) -> T {
        self.alone.set(true);
        let output = part();
        self.alone.set(false);
        output
    }

    /// Runs one future to its end, while no other is in progress. The future must await chains of
    /// this endpoint only: each is executed when it is posted.
    #[inline]
    pub fn drive<T>(&self, future: impl Future<Output = T>) -> T {
        self.alone.set(true);
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        let output = loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => break output,
                Poll::Pending => self.step(|_| ()),
            }
        };
        self.alone.set(false);
        output
    }

    /// As [`Endpoint::drive_lanes`], while the first lanes, `lanes` of them, have this memory as
    /// [`Buffer::Lent`]. `None` if the fabric cannot use it.
    pub fn drive_lending<T>(
        &self,
        lanes: u16,
        memory: LentMemory<'_>,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let lent = Lent::of(memory);
        self.lending(|loan| {
            let lend = |lane| loan.lend_again(LaneId(lane), lent.again());
            (0..lanes).all(lend).then(|| self.drive_lanes(future))
        })
    }

    /// Calls `part`, which may lend memory of the caller to lanes, and takes it back.
    pub fn lending<'m, T>(&self, part: impl FnOnce(&Loan<'_, 'm, F>) -> T) -> T {
        debug_assert!(!self.is_alone(), "a chain is completed after its post");
        part(&Loan { fabric: &self.fabric, lanes: Cell::new(0), memory: PhantomData })
    }

    /// Waits for the chain that the lane has posted, while no other lane has one in flight.
    /// [`Endpoint::take_result`] returns its result.
    pub fn wait_for(&self, lane: LaneId) {
        let result = wait_for(&mut *self.fabric.borrow_mut(), lane);
        self.results[usize::from(lane.0)].set(Some(result));
        self.tick();
    }

    /// Runs one future to its end, while no other is in progress. The future may have chains of
    /// several lanes in flight, which share doorbells.
    pub fn drive_lanes<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            self.tick();
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => self.step(|_| ()),
            }
        }
    }
}

/// Takes memory of the caller back when it ends, also if a function panics.
pub struct Loan<'e, 'm, F: Fabric> {
    fabric: &'e RefCell<F>,
    /// No lane from this one on has lent memory.
    lanes: Cell<u16>,
    /// Exactly this lifetime: memory that is lent for less does not live until the end.
    memory: PhantomData<Cell<&'m ()>>,
}

impl<'m, F: Fabric> Loan<'_, 'm, F> {
    /// As [`Fabric::lend`].
    pub fn lend(&self, lane: LaneId, memory: LentMemory<'m>) -> bool {
        self.lend_again(lane, Lent::of(memory))
    }

    fn lend_again(&self, lane: LaneId, memory: Lent) -> bool {
        self.lanes.set(self.lanes.get().max(lane.0 + 1));
        self.fabric.borrow_mut().lend(lane, memory)
    }
}

impl<F: Fabric> Drop for Loan<'_, '_, F> {
    fn drop(&mut self) {
        let mut fabric = self.fabric.borrow_mut();
        for lane in 0..self.lanes.get() {
            fabric.lend(LaneId(lane), Lent::NONE);
        }
    }
}
