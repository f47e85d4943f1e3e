//! The processes of an execution. A process is one lane of a client with its script, or the server
//! with its chores.

use std::pin::Pin;
use std::task::{Context, Waker};

use farside_fabric::{LaneId, Nanos};

use crate::cluster::ClusterEvent;
use crate::task::Events;

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
