//! What acts in an execution: a lane of a client with a script, or the server with its chores.

use std::pin::Pin;
use std::task::{Context, Waker};

use farside_fabric::{LaneId, Nanos};

use super::task::Events;

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    /// A process begins its next operation.
    Begin(usize),
    /// It accesses this group of words.
    Access(usize, LaneId, usize),
    /// It stops waiting.
    Wake(usize, LaneId),
    /// It learns that its chain is over.
    Complete(usize, LaneId),
    /// The clock jumps.
    Jump(Nanos),
    /// A client's virtual machine is paused.
    Pause(usize),
    /// It goes on.
    Resume(usize),
    /// A client dies.
    Die(usize),
    /// A client's connection breaks: what is under way ends here, or, if so, goes on to its end,
    /// which no session learns of.
    Lose(usize, bool),
    /// The server is killed and started again: it accepts no client from before.
    Renew,
    /// The server is killed and started again: another goes on with the split.
    Restart(usize),
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Between two operations.
    Between,
    Working,
    Over,
    /// It died, but what it had under way may still be executed: the server has not noticed.
    Dying,
    /// It died, or has used up its chains.
    Gone,
}

pub(super) struct Process {
    pub(super) client: usize,
    /// Its first lane, and how many it has.
    pub(super) lane: LaneId,
    pub(super) lanes: u16,
    pub(super) task: Pin<Box<dyn Future<Output = ()>>>,
    pub(super) events: Events,
    pub(super) state: State,
    pub(super) chains: u32,
    /// How many operations it began.
    pub(super) began: u32,
    /// A hash of what its script remembers.
    pub(super) seen: u64,
    /// What there was when this operation began its last wait, and when the one before.
    pub(super) waits: [Option<u64>; 2],
}

impl Process {
    pub(super) fn new(
        client: usize,
        lanes: (LaneId, u16),
        mut task: Pin<Box<dyn Future<Output = ()>>>,
        events: Events,
    ) -> Self {
        // Up to where its first operation begins.
        let _ = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let (state, (lane, lanes)) = (State::Between, lanes);
        let (chains, began, seen, waits) = (0, 0, 0, [None; 2]);
        Self { client, lane, lanes, task, events, state, chains, began, seen, waits }
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        (self.lane.0..self.lane.0 + self.lanes).map(LaneId)
    }
}
