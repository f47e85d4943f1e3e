//! What a pipeline returns: the ticket of an operation, and the operation once it has completed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_fabric::{Counters, LaneId};

use crate::{Outcome, Result, ValueRef};

/// Identifies an operation of a pipeline. Tickets are numbered in the order of the starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub(crate) number: u64,
    pub(crate) lane: LaneId,
}

impl Ticket {
    /// Returns the number of operations that were started in the pipeline before this one.
    pub const fn number(self) -> u64 {
        self.number
    }

    /// Returns the number of the operation's lane, below
    /// [`Pipeline::depth`](crate::Pipeline::depth). No other operation uses the lane until the
    /// [`Completed`] of this one is taken. So the number can index an array of data for each
    /// operation.
    pub const fn lane(self) -> usize {
        self.lane.0 as usize
    }
}

/// A completed operation of a pipeline.
#[derive(Debug)]
pub struct Completed<'p> {
    /// The operation's ticket.
    pub ticket: Ticket,
    /// Its result. A value's bytes are valid until the pipeline is used again.
    pub result: Result<Outcome<ValueRef<'p>>>,
    /// The verbs of this operation; none if it shared another operation's chain. Doorbells are not
    /// counted here, because operations share them. `None` without
    /// [`ClientBuilder::operation_counters`](crate::ClientBuilder::operation_counters).
    pub counters: Option<&'p Counters>,
    /// In milliseconds since 1970; 0 for never.
    pub(super) expires_at_ms: u64,
}

impl Completed<'_> {
    /// When the value in the result expires, a full millisecond. `None` for never, and if the
    /// result has no value.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// let mut pipeline = session.pipeline()?;
    /// pipeline.get("greeting")?;
    /// assert_eq!(pipeline.wait().expect("one is in flight").expires_at(), None);
    /// # Ok(()) }
    /// ```
    pub fn expires_at(&self) -> Option<SystemTime> {
        let since = Duration::from_millis(self.expires_at_ms);
        (self.expires_at_ms != 0).then(|| UNIX_EPOCH + since)
    }
}
