//! The slots of requests: none is lost, and tasks that wait for one get it in turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Wake;

use super::*;

#[derive(Default)]
struct CountedWaker(AtomicU64);

impl Wake for CountedWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn counted() -> (Arc<CountedWaker>, Waker) {
    let counter = Arc::new(CountedWaker::default());
    (counter.clone(), counter.into())
}

const REQUEST: Request = Request { action: Action::Get, key_bytes: 3, value_bytes: 0 };
const ANSWER: Outcome<Version> = Outcome { applied: false, version: None, value: None, number: 0 };

fn submit(state: &mut State, waker: &Waker) -> SlotId {
    let id = state.take_slot().unwrap();
    state.submit(id, REQUEST, [b"key", b"", b""], None, waker);
    id
}

fn answer(state: &mut State, job: Job) {
    state.answer(job.slot, job.bytes, Ok(ANSWER));
}

/// Whether all slots are free and none is reserved.
fn is_idle(state: &State) -> bool {
    state.free.len() == state.slots.len() && state.notified == 0 && state.waiters.is_empty()
}

#[test]
fn a_request_can_be_given_up_at_each_stage() {
    let (count, waker) = counted();
    let mut state = State::default();
    let queued = submit(&mut state, &waker);
    state.give_up(queued);
    assert!(state.take_job().is_none());
    let started = submit(&mut state, &waker);
    let job = state.take_job().unwrap();
    state.give_up(started);
    answer(&mut state, job);
    let retried = submit(&mut state, &waker);
    let job = state.take_job().unwrap();
    state.give_up(retried);
    assert!(state.unless_abandoned(job).is_none());
    state.take_ready().wake();
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    let answered = submit(&mut state, &waker);
    let job = state.take_job().unwrap();
    answer(&mut state, job);
    state.give_up(answered);
    state.take_ready().wake();
    assert_eq!((count.0.load(Ordering::Relaxed), state.slots.len()), (1, 1));
    assert!(is_idle(&state));
}

#[test]
fn a_freed_slot_goes_to_the_task_that_waits_longest() {
    let (_, busy) = counted();
    let mut state = State::default();
    let ids: Vec<_> = (0..SLOTS_MAX).map(|_| submit(&mut state, &busy)).collect();
    assert!(state.take_slot().is_none());
    let waiting: Vec<_> = (0..3).map(|_| counted()).collect();
    let tickets: Vec<_> = waiting.iter().map(|(_, waker)| state.wait(waker.clone())).collect();
    let woken = |state: &mut State| {
        state.take_ready().wake();
        waiting.iter().map(|(count, _)| count.0.load(Ordering::Relaxed)).collect::<Vec<_>>()
    };
    let job = state.take_job().unwrap();
    state.give_up(ids[0]);
    answer(&mut state, job);
    assert_eq!(woken(&mut state), [1, 0, 0]);
    // The slot is reserved, and passed on when its task gives up.
    assert!(state.take_slot().is_none());
    state.stop_waiting(tickets[0]);
    assert_eq!(woken(&mut state), [1, 1, 0]);
    assert!(state.stop_waiting(tickets[2]).is_some());
    assert!(state.take_slot().is_none());
    let slot = state.take_reserved(tickets[1], &busy).unwrap();
    state.submit(slot, REQUEST, [b"key", b"", b""], None, &busy);
    for id in ids.into_iter().skip(1).chain([slot]) {
        state.give_up(id);
    }
    assert!(state.take_job().is_none());
    assert!(is_idle(&state));
}

#[test]
fn long_bytes_are_moved_and_not_kept() {
    let (_, waker) = counted();
    let mut state = State::default();
    let id = state.take_slot().unwrap();
    let long = vec![7; KEPT_BYTES_MAX + 1];
    state.submit(id, REQUEST, [b"", b"", b""], Some(long.clone()), &waker);
    let job = state.take_job().unwrap();
    assert_eq!(job.bytes, long);
    let found = Outcome { value: Some(Version::from_u64(1)), ..ANSWER };
    state.answer(id, job.bytes, Ok(found));
    let mut value = Vec::new();
    assert!(matches!(state.ask(id, &waker, &mut value), Asked::Answer(Ok(_))));
    assert_eq!(value, long);
    assert_eq!(state.slots[0].bytes.capacity(), 0);
}
