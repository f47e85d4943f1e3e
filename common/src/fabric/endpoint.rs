use std::cell::{Cell, Ref, RefCell, RefMut};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use super::{Buffer, ChainError, Completion, Fabric, LaneId, Nanos, Verb};

/// What became of a chain.
type ChainResult = Result<u64, ChainError>;

/// A fabric that async functions run on: each awaits its own lane, [`Endpoint::drive`] or
/// [`Endpoint::step`] rings the doorbell for all of them and hands out completions.
///
/// No executor and no wakers: a future is polled again when its lane completed.
pub struct Endpoint<F> {
    fabric: RefCell<F>,
    results: Box<[Cell<Option<ChainResult>>]>,
}

impl<F: Fabric> Endpoint<F> {
    /// An endpoint for this many lanes, which the fabric must have.
    pub fn new(fabric: F, lanes: u16) -> Self {
        Self {
            fabric: RefCell::new(fabric),
            results: (0..lanes).map(|_| Cell::new(None)).collect(),
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

    /// The time.
    pub fn now(&self) -> Nanos {
        self.fabric.borrow().now()
    }

    /// What a buffer of a lane holds; never across an `.await`.
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        Ref::map(self.fabric.borrow(), |fabric| fabric.buffer(lane, buffer))
    }

    /// One round trip: posts the chain, completes with what its atomic verb found (0 without one).
    pub fn chain<'a>(
        &'a self,
        lane: LaneId,
        verbs: &'a [Verb],
        deadline: Nanos,
    ) -> impl Future<Output = Result<u64, ChainError>> + 'a {
        self.lane_future(lane, move |fabric: &mut F| fabric.post(lane, verbs, deadline))
    }

    /// Waits until the clock reads `until`.
    pub async fn sleep_until(&self, lane: LaneId, until: Nanos) {
        // A wait has no verb that could fail.
        let _ = self.lane_future(lane, move |fabric: &mut F| fabric.wait(lane, until)).await;
    }

    fn lane_future<S: FnOnce(&mut F) + Unpin>(&self, lane: LaneId, start: S) -> OnLane<'_, F, S> {
        OnLane { endpoint: self, lane, start: Some(start) }
    }

    /// Rings, and hands completions to their lanes; calls `completed` with each lane that can go on.
    /// Does not wait: false when none completed.
    pub fn try_step(&self, mut completed: impl FnMut(LaneId)) -> bool {
        self.fabric.borrow_mut().ring();
        let mut any = false;
        while let Some(Completion { lane, result }) = self.poll() {
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

    fn poll(&self) -> Option<Completion> {
        self.fabric.borrow_mut().poll()
    }

    /// Runs one future to its end. It must await nothing but this endpoint.
    #[inline]
    pub fn drive<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => self.step(|_| ()),
            }
        }
    }
}

/// Starts something on a lane when first polled, and is ready when the lane completed.
struct OnLane<'a, F, S> {
    endpoint: &'a Endpoint<F>,
    lane: LaneId,
    start: Option<S>,
}

impl<F: Fabric, S: FnOnce(&mut F) + Unpin> Future for OnLane<'_, F, S> {
    type Output = Result<u64, ChainError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(start) = self.start.take() {
            start(&mut self.endpoint.fabric.borrow_mut());
            return Poll::Pending;
        }
        match self.endpoint.results[usize::from(self.lane.0)].take() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}
