use std::cell::{Cell, Ref, RefCell, RefMut};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use super::{Buffer, ChainError, Completion, Fabric, LaneId, Nanos, RegionIndex, Verb};

/// What became of a chain.
type ChainResult = Result<u64, ChainError>;

/// A chain, or a wait, that a lane has in flight.
#[must_use = "a lane has one chain in flight at a time: await it"]
pub struct InFlight<'e> {
    /// Where the endpoint puts what became of it.
    result: &'e Cell<Option<ChainResult>>,
    /// It was waited for on the spot.
    at_once: Option<ChainResult>,
}

impl Future for InFlight<'_> {
    type Output = ChainResult;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<ChainResult> {
        match self.at_once.take().or_else(|| self.result.take()) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

/// A fabric that async functions run on: each awaits its own lane, [`Endpoint::drive`] or
/// [`Endpoint::step`] rings the doorbell for all of them and hands out completions.
///
/// No executor and no wakers: a future is polled again when its lane completed.
pub struct Endpoint<F> {
    fabric: RefCell<F>,
    results: Box<[Cell<Option<ChainResult>>]>,
    /// [`Endpoint::drive`] is running its only future.
    alone: Cell<bool>,
    ticked_at: Cell<Nanos>,
}

impl<F: Fabric> Endpoint<F> {
    /// An endpoint for this many lanes, which the fabric must have.
    pub fn new(fabric: F, lanes: u16) -> Self {
        Self {
            fabric: RefCell::new(fabric),
            results: (0..lanes).map(|_| Cell::new(None)).collect(),
            alone: Cell::new(false),
            ticked_at: Cell::new(0),
        }
    }

    /// The fabric, for a moment; never across an `.await`.
    pub fn fabric(&self) -> Ref<'_, F> {
        self.fabric.borrow()
    }

    /// The fabric, to change something, for a moment; never across an `.await`.
    pub fn fabric_mut(&self) -> RefMut<'_, F> {
        self.fabric.borrow_mut()
    }

    /// The time. Among other futures it is that of the last [`Endpoint::tick`]: not before the
    /// completions that were handed out, not after the chains that are posted next.
    #[inline]
    pub fn now(&self) -> Nanos {
        if self.alone.get() { self.fabric.borrow().now() } else { self.ticked_at.get() }
    }

    /// Looks at the clock, once for all futures that are about to be polled.
    #[inline]
    pub fn tick(&self) {
        self.ticked_at.set(self.fabric.borrow().now());
    }

    /// Whether a chain posted now for this region goes with the next doorbell, where the operations
    /// under way will have about so many bytes in flight.
    #[inline]
    pub fn has_room(&self, region: RegionIndex, under_way_bytes: u64) -> bool {
        self.fabric.borrow().has_room(region, under_way_bytes)
    }

    /// What a buffer of a lane holds; never across an `.await`.
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        Ref::map(self.fabric.borrow(), |fabric| fabric.buffer(lane, buffer))
    }

    /// One round trip to a region. Posts the chain now; the future returns the word that its last
    /// atomic verb found, or 0 without one. Inside [`Endpoint::drive`] the chain is executed at
    /// once, before the future is awaited.
    #[inline]
    pub fn chain(
        &self,
        lane: LaneId,
        region: RegionIndex,
        verbs: &[Verb],
        deadline: Nanos,
    ) -> InFlight<'_> {
        let mut fabric = self.fabric.borrow_mut();
        let (result, mut at_once) = (&self.results[usize::from(lane.0)], None);
        if self.alone.get() {
            at_once = Some(fabric.run(lane, region, verbs, deadline));
        } else {
            // A future that was dropped leaves the result of its chain.
            result.set(None);
            fabric.post(lane, region, verbs, deadline);
        }
        InFlight { result, at_once }
    }

    /// What became of a lane's chain that is not awaited; `None` while it is in flight.
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
        let _ = InFlight { result: &self.results[usize::from(lane.0)], at_once: None }.await;
    }

    /// Rings, and hands completions to their lanes; calls `completed` with each lane that can go
    /// on. Does not wait: false when none completed.
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

    /// [`Endpoint::try_step`] until at least one lane completed.
    pub fn step(&self, mut completed: impl FnMut(LaneId)) {
        while !self.try_step(&mut completed) {
            self.fabric.borrow_mut().relax();
        }
    }

    /// Runs one future to its end, when no other is under way. It must await nothing but this
    /// endpoint, so each of its round trips can be waited for on the spot.
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

    /// Runs one future to its end that may have chains on several lanes in flight, when no other is
    /// under way: they share doorbells.
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
