//! The processes of an execution. A process is one lane of a client, whose future runs the script's
//! operations one after another, or the server with its chores.
//!
//! An operation can change two regions, one after the other, as a change reaches the copies of a
//! region. The two regions, head and tail, hold a count each. A change raises the head's count
//! first, then the tail's.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};
use farside_protocol::split::SplitProgress;
use farside_protocol::{Action, Change, Expected, Lifetime, OperationError};

use crate::cluster::ClusterEvent;
use crate::memory::{EXPIRES_AT_MS, EXPIRY_BASE_MS, Memory, global};
use crate::monitor::{ExpectedContent, RequestedOperation};
use crate::mutant::Mutant;
use crate::region::{HEAD, KEYS, Key, LARGE_BYTES, TAIL, keys};
use crate::script::Op;
use crate::session::{FoundValue, Reply, TestSession};

/// A possible next step of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SchedulerAction {
    /// A process begins its next operation.
    Begin(usize),
    /// A process accesses this group of words.
    Access(usize, LaneId, usize),
    /// A process ends its wait.
    Wake(usize, LaneId),
    /// A process gets the completion of its chain.
    Complete(usize, LaneId),
    /// The clock jumps.
    Jump(Nanos),
    /// A client is paused.
    Pause(usize),
    /// A client's pause ends.
    Resume(usize),
    /// A client dies.
    Die(usize),
    /// A client's connection breaks. If the flag is set, its chains in flight are still executed,
    /// without a completion; otherwise they are cut off.
    Lose(usize, bool),
    /// The server is killed and restarted. It fences all clients that were connected before.
    RestartServer,
    /// The server is killed in a split, and restarted. It continues the split.
    RestartSplit,
    /// A step of a cluster.
    Cluster(ClusterEvent),
}

impl SchedulerAction {
    /// Returns the process that acts; `None` if the clock, a client as a whole or the server
    /// changes.
    pub(crate) fn process(self) -> Option<usize> {
        match self {
            Self::Begin(process)
            | Self::Access(process, ..)
            | Self::Wake(process, _)
            | Self::Complete(process, _) => Some(process),
            _ => None,
        }
    }
}

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Between two operations.
    Between,
    Working,
    /// It waits until its client is connected to a shard's server.
    Offline,
    Finished,
    /// It died, but its chains in flight may still be executed, until the server notices.
    Dying,
    /// It died, or has used up its chains.
    Gone,
}

pub(crate) struct Process {
    pub(crate) client: usize,
    /// The process's first lane, and the number of its lanes.
    pub(crate) lane: LaneId,
    pub(crate) lanes: u16,
    pub(crate) task: Pin<Box<dyn Future<Output = ()>>>,
    pub(crate) events: Events,
    pub(crate) state: State,
    /// The number of polls of the present operation. Each may post a chain.
    pub(crate) chains: u32,
    /// The number of operations that the process has begun.
    pub(crate) operations_begun: u32,
    /// A hash of the versions that its operations found.
    pub(crate) seen: u64,
    /// Hashes of the state that the operation could see when it began its last two waits. The hash
    /// of the earlier wait comes first.
    pub(crate) waits: [Option<u64>; 2],
}

impl Process {
    pub(crate) fn new(
        client: usize,
        (lane, lanes): (LaneId, u16),
        mut task: Pin<Box<dyn Future<Output = ()>>>,
        events: Events,
    ) -> Self {
        // Runs the task up to its first operation.
        let _ = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let state = State::Between;
        Self {
            client,
            lane,
            lanes,
            task,
            events,
            state,
            chains: 0,
            operations_begun: 0,
            seen: 0,
            waits: [None; 2],
        }
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        (self.lane.0..self.lane.0 + self.lanes).map(LaneId)
    }
}

/// A message of a process to the execution that polls it.
pub(crate) enum Event {
    Invoke(RequestedOperation),
    Respond(usize, Result<Reply, Option<OperationError>>),
    /// The present operation or chore ends without an answer.
    Skip,
    /// The server's removal of this key has ended: `Err(None)` if the key had another word by then.
    Removed(Key, Result<Reply, Option<OperationError>>),
    /// A split has ended.
    Split(SplitProgress),
    /// The server has cleared the slots of these clients.
    Swept(Vec<u16>),
    /// The connection is lost. A new connection continues with operation `next` of the script.
    /// `is_invoked`: that operation was invoked on the lost connection.
    Lost {
        next: usize,
        is_invoked: bool,
        seen: Seen,
    },
    /// The client has no connection to the shard of the present operation.
    Offline,
    Finished,
}

/// What a script's last GET of each key found.
pub(crate) type Seen = Vec<Option<FoundValue>>;

pub(crate) type Events = Rc<RefCell<VecDeque<Event>>>;

/// Waits until the scheduler polls the process again.
pub(crate) async fn begin() {
    let mut began = false;
    std::future::poll_fn(|_| match std::mem::replace(&mut began, true) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

/// A script and the progress of a process in it.
pub(crate) struct Reading {
    pub(crate) script: Vec<Op>,
    pub(crate) name: String,
    /// The index of the first operation, and whether it was invoked on an earlier connection.
    pub(crate) next: usize,
    pub(crate) is_invoked: bool,
    pub(crate) seen: Seen,
}

impl Reading {
    pub(crate) fn new(script: Vec<Op>, name: String) -> Self {
        Self { script, name, next: 0, is_invoked: false, seen: vec![None; KEYS] }
    }
}

/// Runs a script. Between operations it waits to be polled.
pub(crate) async fn run_script(
    session: Rc<TestSession>,
    lane: LaneId,
    reading: Reading,
    events: Events,
) {
    let Reading { script, name, next, mut is_invoked, mut seen } = reading;
    for (n, op) in script.into_iter().enumerate().skip(next) {
        begin().await;
        match op {
            Op::GiveBack => session.give_back(),
            Op::RaiseBoth => raise(&session, lane).await,
            Op::Sleep(time) => {
                session.endpoint().sleep_until(lane, session.endpoint().now() + time).await
            }
            _ => {}
        }
        if matches!(op, Op::Yield | Op::GiveBack | Op::Sleep(_) | Op::RaiseBoth) {
            events.borrow_mut().push_back(Event::Skip);
            continue;
        }
        let mut value = format!("{name}{}", n + 1);
        if let Op::Increment(_) = op {
            value = "1".to_owned();
        }
        if let Op::Append(_) = op {
            // Operations that follow each other append different digits: so a part of the present
            // value cannot stand for the operation's own.
            let number = name.bytes().fold(n, |number, byte| number + 3 * usize::from(byte));
            value = (number % 9 + 1).to_string();
        }
        // A number for the expiry of a touch. Scripts have fewer than 16 operations, if they touch
        // a key.
        let expiry = name.bytes().fold(0, |number, byte| number << 8 | u64::from(byte)) << 4;
        let expiry = expiry + n as u64 + 1;
        if let Op::Touch(_) = op {
            value = (EXPIRY_BASE_MS + expiry).to_string();
        }
        if matches!(op, Op::PutLarge(_)) {
            value.extend(std::iter::repeat_n('\0', LARGE_BYTES - value.len()));
        }
        let expected = match op {
            Op::Exchange(_, expected) => Some(ExpectedContent::Value(expected)),
            Op::ExchangeSeen(key) | Op::DeleteSeen(key) => {
                let Some(found) = seen[key].clone() else {
                    events.borrow_mut().push_back(Event::Skip);
                    continue;
                };
                Some(ExpectedContent::Seen(found))
            }
            _ => None,
        };
        let requested = RequestedOperation::of(op, value.clone(), expected);
        let key = requested.key;
        let is_staged = std::mem::take(&mut is_invoked);
        if !is_staged {
            events.borrow_mut().push_back(Event::Invoke(requested));
        }
        let required = match (op, &seen[key]) {
            (Op::Exchange(_, expected), _) => Some(Expected::Value(expected.as_bytes())),
            (Op::ExchangeSeen(_) | Op::DeleteSeen(_), Some(found)) => {
                Some(Expected::Version(found.version))
            }
            _ => None,
        };
        let forever = Lifetime::FOREVER;
        let put_keep_ttl = Action::modify(Change::Store(None), true, Lifetime::KEPT, false);
        let (action, value) = match (op, required) {
            (Op::Get(_), _) => (Action::Get, ""),
            (Op::Put(_) | Op::PutLarge(_), _) => (Action::Put(forever), &*value),
            (Op::Insert(_), _) => (Action::Insert(forever), &*value),
            (Op::PutTtl(_), _) => (Action::Put(Lifetime::until_ms(EXPIRES_AT_MS)), &*value),
            (Op::InsertTtl(_), _) => (Action::Insert(Lifetime::until_ms(EXPIRES_AT_MS)), &*value),
            (Op::Update(_), _) => (Action::Update(forever), &*value),
            (Op::Take(_), _) => (Action::take(), ""),
            (Op::GetOrInsert(_), _) => (Action::get_or_insert(), &*value),
            (Op::Touch(_), _) => (Action::touch(Lifetime::until_ms(EXPIRY_BASE_MS + expiry)), ""),
            (Op::PutKeepTtl(_), _) => (put_keep_ttl, &*value),
            (Op::Increment(_), _) => (Action::increment(1), ""),
            (Op::Append(_), _) => (Action::append(), &*value),
            (Op::DeleteSeen(_), Some(Expected::Version(version))) => {
                (Action::delete_if_version(version), "")
            }
            (_, Some(required)) => (Action::Exchange(required, forever), &*value),
            (_, None) => (Action::Delete, ""),
        };
        let entry = (&keys()[key][..], value.as_bytes());
        let mut reply = match is_staged {
            false => session.run(lane, action, entry).await,
            true => session.run_staged(lane, action, entry).await,
        };
        while matches!(reply, Err(None)) && session.is_offline(&keys()[key]) {
            // As pipelines do: an operation that has not happened is run again on a new connection,
            // from the lane's buffer.
            events.borrow_mut().push_back(Event::Offline);
            begin().await;
            reply = session.run_staged(lane, action, entry).await;
        }
        if let (Op::Get(_), Ok(Reply { found: Some(found), .. })) = (op, &reply) {
            seen[key] = Some(found.clone());
        }
        let mut events = events.borrow_mut();
        let is_invoked = matches!(reply, Err(None));
        if session.endpoint().fabric().is_lost
            && (is_invoked || matches!(reply, Err(Some(OperationError::Indeterminate))))
        {
            // As above. The lane's buffers come along.
            if !is_invoked {
                events.push_back(Event::Respond(key, reply));
            }
            let next = if is_invoked { n } else { n + 1 };
            events.push_back(Event::Lost { next, is_invoked, seen });
            return;
        }
        events.push_back(Event::Respond(key, reply));
    }
    events.borrow_mut().push_back(Event::Finished);
}

fn count(memory: &Memory, region: RegionIndex) -> u64 {
    memory.word_at_offset(global(region, 0))
}

/// READs the tail's count. Raises the head's count from that value by one, then the tail's. Changes
/// nothing if the head has another count.
async fn raise(session: &TestSession, lane: LaneId) {
    let endpoint = session.endpoint();
    let believes_head = endpoint.fabric().has_mutant(Mutant::HeadBelieved);
    let from = if believes_head { HEAD } else { TAIL };
    let read = [Verb::Read { remote: 0, into: Buffer::Window, bytes: 8 }];
    let no_break = "no connection breaks";
    endpoint.chain(lane, from, &read, Nanos::MAX).await.expect(no_break);
    let seen = endpoint.buffer(lane, Buffer::Window).first_chunk().copied();
    let expected = u64::from_le_bytes(seen.unwrap_or_default());
    let swap = async |region| {
        let swap = [Verb::CompareSwap { remote: 0, expected, desired: expected + 1 }];
        endpoint.chain(lane, region, &swap, Nanos::MAX).await.expect(no_break) == expected
    };
    assert!(
        !swap(HEAD).await || swap(TAIL).await || believes_head,
        "the tail refused a change that the head accepted"
    );
}

/// Checks that the head's count is equal to the tail's, or one higher.
pub(crate) fn check_two_regions(memory: &Memory) -> Result<(), String> {
    let (head, tail) = (count(memory, HEAD), count(memory, TAIL));
    match head.checked_sub(tail) {
        Some(0 | 1) => Ok(()),
        _ => Err(format!("the head counts {head}, the tail {tail}")),
    }
}
