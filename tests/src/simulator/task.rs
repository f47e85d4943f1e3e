//! What a process does: its script, one operation after another, as a future.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Poll;

use farside::Version;
use farside::testing::{Call, Reply, Rig};
use farside_common::fabric::LaneId;

use super::fabric::SimFabric;
use super::ground::keys;
use super::monitor::Asked;
use super::scenario::Op;

/// What a process tells whoever polls it.
pub(super) enum Event {
    Invoke(Asked),
    Respond(usize, Result<Reply, Option<farside::Error>>),
    /// Nothing to do after all.
    Skip,
    Over,
}

pub(super) type Events = Rc<RefCell<VecDeque<Event>>>;

/// Runs a script. Between operations it waits to be polled.
pub(super) async fn run_script(
    rig: Rc<Rig<SimFabric>>,
    lane: LaneId,
    script: Vec<Op>,
    name: String,
    events: Events,
) {
    let mut seen: Vec<Option<(String, Version)>> = vec![None; super::KEYS];
    for (n, op) in script.into_iter().enumerate() {
        // Begins when the scheduler says so.
        let mut began = false;
        std::future::poll_fn(|_| match std::mem::replace(&mut began, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        let value = format!("{name}{}", n + 1);
        let expected = match op {
            Op::Exchange(_, expected) => Some((expected.to_owned(), None)),
            Op::ExchangeSeen(key) => {
                let Some((value, version)) = seen[key].clone() else {
                    events.borrow_mut().push_back(Event::Skip);
                    continue;
                };
                Some((value, Some(version.to_string())))
            }
            _ => None,
        };
        let asked = Asked { op, value: value.clone(), expected: expected.clone() };
        let key = asked.key();
        events.borrow_mut().push_back(Event::Invoke(asked));
        let value = value.as_bytes();
        let call = match (&op, &expected) {
            (Op::Get(_), _) => Call::Get,
            (Op::Put(_), _) => Call::Put(value),
            (Op::Insert(_), _) => Call::Insert(value),
            (Op::Update(_), _) => Call::Update(value),
            (Op::ExchangeSeen(_), _) => match seen[key] {
                Some((_, expected)) => Call::ExchangeVersion { expected, value },
                None => continue,
            },
            (_, Some((expected, _))) => Call::Exchange { expected: expected.as_bytes(), value },
            (_, None) => Call::Delete,
        };
        let reply = rig.run(lane, call, &keys()[key]).await;
        if let (Op::Get(_), Ok(Reply { found: Some((value, version)), .. })) = (op, &reply) {
            seen[key] = Some((String::from_utf8_lossy(value).into_owned(), *version));
        }
        events.borrow_mut().push_back(Event::Respond(key, reply));
    }
    events.borrow_mut().push_back(Event::Over);
}
