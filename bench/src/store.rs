//! The store that the measured loops drive, by one operation after another or with many in flight.
//! A session of Farside is such a store. Calls are generic, not virtual, and none of them
//! allocates.

use farside::{Counters, Pipeline, PipelineFull, Session, Ticket, ValueRef, Version};

use crate::records::Key;

/// An action on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads a value.
    Get,
    /// Stores a value, over an old one if there is one.
    Put,
    /// Stores a value if the key is absent.
    Insert,
}

impl Action {
    /// Returns the outcome of the action. `applied`: the key was as required; `data` is what a GET
    /// found.
    #[inline]
    pub fn outcome(self, applied: bool, data: &[u8]) -> Outcome<'_> {
        let found = applied && self == Self::Get;
        let value = found.then_some(ValueRef { data, version: NO_VERSION });
        Outcome { applied, version: None, value, number: 0 }
    }
}

/// What an operation did, and the value that a GET found.
pub type Outcome<'v> = farside::Outcome<ValueRef<'v>>;

/// The version of a value in stores that have no versions.
const NO_VERSION: Version = Version::from_u64(0);

/// A connection to a store, for one thread.
pub trait MeasuredStore {
    /// Why an operation fails.
    type Error;
    /// The store with many operations in flight.
    type Pipeline<'s>: Pipelined<Error = Self::Error>
    where
        Self: 's;

    /// Does one operation, and waits for it. `value` is empty for a GET. A GET
    /// puts the value that it finds into `found`.
    fn perform<'v>(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
        found: &'v mut Vec<u8>,
    ) -> Result<Outcome<'v>, Self::Error>;

    /// Begins to have many operations in flight.
    fn pipeline(&mut self) -> Result<Self::Pipeline<'_>, Self::Error>;

    /// The fabric's counters so far.
    fn counters(&self) -> Counters;
}

/// A store with many operations in flight. Starting an operation returns its lane, below
/// [`Pipelined::depth`]. No other operation has this lane until the operation is taken.
pub trait Pipelined {
    /// Why an operation fails.
    type Error;

    /// Starts an operation. Returns its lane. `value` is empty for a GET.
    ///
    /// # Errors
    /// [`PipelineFull`]. Every other error is in the operation's [`Completed`].
    fn start(&mut self, action: Action, key: &Key, value: &[u8]) -> Result<usize, PipelineFull>;

    /// Waits for the next finished operation and takes it; `None` if none is in flight.
    fn wait(&mut self) -> Option<Completed<'_, Self::Error>>;

    /// Takes a finished operation if there is one. Does not wait.
    fn poll(&mut self) -> Option<Completed<'_, Self::Error>>;

    /// How many operations were started and not taken yet.
    fn in_flight(&self) -> usize;

    /// How many operations can be in flight.
    fn depth(&self) -> usize;
}

/// A finished operation.
pub struct Completed<'p, E> {
    /// The lane it was on.
    pub lane: usize,
    /// Its outcome.
    pub result: Result<Outcome<'p>, E>,
    /// The verbs, bytes and round trips that it took.
    pub counters: Option<&'p Counters>,
}

impl MeasuredStore for Session {
    type Error = farside::Error;
    type Pipeline<'s> = Pipeline<'s>;

    // Callers pass a constant action. Inlined, the match on it disappears.
    #[inline(always)]
    fn perform<'v>(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
        found: &'v mut Vec<u8>,
    ) -> farside::Result<Outcome<'v>> {
        Ok(match action {
            Action::Get => {
                let version = self.get_into(key, found)?.map(|read| read.version);
                let value = version.map(|version| ValueRef { data: found, version });
                Outcome { applied: version.is_some(), version, value, number: 0 }
            }
            Action::Put => {
                self.put(key, value)?;
                action.outcome(true, &[])
            }
            Action::Insert => action.outcome(self.insert(key, value)?, &[]),
        })
    }

    fn pipeline(&mut self) -> farside::Result<Pipeline<'_>> {
        self.pipeline()
    }

    #[inline]
    fn counters(&self) -> Counters {
        self.counters()
    }
}

impl Pipelined for Pipeline<'_> {
    type Error = farside::Error;

    #[inline]
    fn start(&mut self, action: Action, key: &Key, value: &[u8]) -> Result<usize, PipelineFull> {
        let ticket = match action {
            Action::Get => self.get(key),
            Action::Put => self.put(key, value),
            Action::Insert => self.insert(key, value),
        };
        ticket.map(Ticket::lane)
    }

    #[inline]
    fn wait(&mut self) -> Option<Completed<'_, farside::Error>> {
        self.wait().map(Completed::from)
    }

    #[inline]
    fn poll(&mut self) -> Option<Completed<'_, farside::Error>> {
        self.poll().map(Completed::from)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight()
    }

    fn depth(&self) -> usize {
        self.depth()
    }
}

impl<'p> From<farside::Completed<'p>> for Completed<'p, farside::Error> {
    #[inline]
    fn from(completed: farside::Completed<'p>) -> Self {
        let farside::Completed { ticket, result, counters, .. } = completed;
        Self { lane: ticket.lane(), result, counters }
    }
}
