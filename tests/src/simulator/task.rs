//! What a process does: its script, one operation after another, as a future.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Poll;

use farside::Version;
use farside::chores::{Mover, Progress};
use farside::testing::{Call, Reply, Rig};
use farside_common::fabric::LaneId;
use farside_common::layout::STATE_OFFSET;

use super::fabric::SimFabric;
use super::ground::keys;
use super::monitor::Asked;
use super::scenario::Op;
use super::world::World;

/// What a process tells whoever polls it.
pub(super) enum Event {
    Invoke(Asked),
    Respond(usize, Result<Reply, Option<farside::Error>>),
    /// Nothing to do after all.
    Skip,
    /// A split has gone as far as it could.
    Split(Progress),
    Over,
}

pub(super) type Events = Rc<RefCell<VecDeque<Event>>>;

/// Splits as the server does. Before it begins it waits to be polled.
pub(super) async fn run_split(
    rig: Rc<Rig<SimFabric>>,
    world: Rc<RefCell<World>>,
    lanes: u16,
    events: Events,
) {
    begin().await;
    let (split, format, depth, rows) = {
        let world = world.borrow();
        let depth = world.memory.word(STATE_OFFSET) >> 32;
        let ground = &world.ground;
        (ground.split(), ground.format, depth as u8, ground.rows())
    };
    let mover = Mover::new(rig.endpoint(), lanes, &format).with_rows(rows);
    let progress = mover.split(&split).await.expect("the fabric reaches all of it");
    if progress == Progress::Done {
        mover.publish(&split, depth).await.expect("there is a directory that deep");
    }
    events.borrow_mut().extend([Event::Split(progress), Event::Over]);
}

/// Ready when it is polled again, which is when the scheduler says so.
async fn begin() {
    let mut began = false;
    std::future::poll_fn(|_| match std::mem::replace(&mut began, true) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

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
        begin().await;
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
