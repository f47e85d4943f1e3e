use std::cell::{Cell, Ref, RefCell, RefMut};
use std::future::poll_fn;
use std::pin::pin;
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

    /// What a buffer of a lane holds; never across an `.await`.
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        Ref::map(self.fabric.borrow(), |fabric| fabric.buffer(lane, buffer))
    }

    /// One round trip: posts the chain, completes with what its atomic verb found (0 without one).
    #[inline]
    pub async fn chain(
        &self,
        lane: LaneId,
        verbs: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        if self.alone.get() {
            return self.fabric.borrow_mut().run(lane, verbs, deadline);
        }
        self.fabric.borrow_mut().post(lane, verbs, deadline);
        self.completion(lane).await
    }

    /// Waits until the clock reads `until`.
    pub async fn sleep_until(&self, lane: LaneId, until: Nanos) {
        self.fabric.borrow_mut().wait(lane, until);
        if self.alone.get() {
            self.step(|_| ());
        }
        // A wait has no verb that could fail.
        let _ = self.completion(lane).await;
    }

    /// What became of what the lane has in flight.
    fn completion(&self, lane: LaneId) -> impl Future<Output = ChainResult> {
        poll_fn(move |_| match self.results[usize::from(lane.0)].take() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
    }

    /// Rings, and hands completions to their lanes; calls `completed` with each lane that can go
    /// on. Does not wait: false when none completed.
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
}
