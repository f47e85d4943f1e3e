//! Many operations, one doorbell.

use std::fmt;
use std::time::Duration;

use farside_protocol::{Action, Lifetime};

use crate::reconnecting::ReconnectBudget;
use crate::{ConnectError, Contact, Error, Outcome, Pipeline, Result, Session, Store, Value};

/// Collects operations; [`Batch::run`] runs them together.
///
/// The operations of a batch are concurrent with each other: two on the same key take effect in any
/// order, and may share a chain as in a [`Pipeline`](crate::Pipeline).
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'s, 'd> {
    session: &'s mut Session,
    operations: Vec<Planned<'d>>,
}

impl fmt::Debug for Batch<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operations = self.operations.len();
        f.debug_struct("Batch").field("operations", &operations).finish_non_exhaustive()
    }
}

/// An operation with its key and value.
type Planned<'d> = (Action<'d>, &'d [u8], &'d [u8]);

/// What an operation of a batch came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// GET: the value, `None` if the key is absent.
    Value(Option<Value>),
    /// PUT: stored.
    Stored,
    /// Every other: whether the key was as required, and so the change made.
    Applied(bool),
}

impl<'s, 'd> Batch<'s, 'd> {
    pub(crate) fn new(session: &'s mut Session) -> Self {
        Self { session, operations: Vec::new() }
    }

    fn add(&mut self, action: Action<'d>, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.operations.push((action, key, value));
        self
    }

    /// Adds a GET.
    pub fn get(&mut self, key: &'d [u8]) -> &mut Self {
        self.add(Action::Get, key, &[])
    }

    /// Adds a PUT.
    pub fn put(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.add(Action::Put(Lifetime::Forever), key, value)
    }

    /// Adds a store under a condition, for ever or for a time.
    pub fn store(&mut self, key: &'d [u8], value: &'d [u8], store: Store<'d>) -> &mut Self {
        self.add(store.action(), key, value)
    }

    /// Adds a PUT that happens only if the key is absent.
    pub fn insert(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.add(Action::Insert(Lifetime::Forever), key, value)
    }

    /// Adds a PUT that happens only if the key is there.
    pub fn update(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.add(Action::Update(Lifetime::Forever), key, value)
    }

    /// Adds a DELETE.
    pub fn delete(&mut self, key: &'d [u8]) -> &mut Self {
        self.add(Action::Delete, key, &[])
    }

    /// Runs all of them and waits for all; the results stand in the order of the operations. Up to
    /// `pipeline_depth` operations share each doorbell. What a lost connection kept from happening
    /// runs again on a new one. Where one waits for the server in vain, those that were not started
    /// by then fail with it, as [`ConnectError::Unreachable`].
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if there is no connection to run them on;
    /// what becomes of each operation is its own result.
    pub fn run(self) -> Result<Vec<Result<BatchOutcome>>> {
        let Self { session, operations } = self;
        let mut results: Vec<_> = operations.iter().map(|_| None).collect();
        let mut in_vain = run_left(session, &operations, &mut results)?;
        let (mut losses, mut why) = (ReconnectBudget::default(), None);
        while why.is_none() && in_vain.is_none() && results.iter().any(Option::is_none) {
            let lost = session.lost(&mut losses);
            match lost.and_then(|()| run_left(session, &operations, &mut results)) {
                Ok(waited) => in_vain = waited,
                Err(error) => why = Some(error),
            }
        }
        let (contact, tried) = match in_vain {
            Some(waited) => (Contact::Silent, waited),
            None => (Contact::Lost, losses.lasted()),
        };
        // The first of those that are left says why.
        let mut left = || why.take().unwrap_or_else(|| session.unreachable(contact, tried));
        Ok(results.into_iter().map(|result| result.unwrap_or_else(|| Err(left()))).collect())
    }
}

/// Runs the operations that have no result. Those that are lost with the connection, before they
/// happened, have none behind it either; nor have those that were not started because another one
/// had waited for the server in vain: for how long, if one did.
fn run_left(
    session: &mut Session,
    operations: &[Planned<'_>],
    results: &mut [Option<Result<BatchOutcome>>],
) -> Result<Option<Duration>> {
    let left: Vec<usize> = (0..results.len()).filter(|&at| results[at].is_none()).collect();
    let mut pipeline = session.pipeline_of(left.len())?;
    let mut in_vain = None;
    for &at in &left {
        let (action, key, value) = operations[at];
        while in_vain.is_none() && pipeline.start(action, key, value).is_err() {
            in_vain = take(&mut pipeline, &left, results);
        }
    }
    while pipeline.in_flight() > 0 {
        in_vain = take(&mut pipeline, &left, results).or(in_vain);
    }
    Ok(in_vain)
}

/// Takes a result; for how long it waited for the server, if that was in vain. Tickets count from 0
/// in the order of the starts, which is that of `left`.
fn take(
    pipeline: &mut Pipeline<'_>,
    left: &[usize],
    results: &mut [Option<Result<BatchOutcome>>],
) -> Option<Duration> {
    let completed = pipeline.wait()?;
    let result = match completed.result {
        Err(Error::Disconnected { .. }) => return None,
        result => result.map(|outcome| match outcome {
            Outcome::Value(value) => BatchOutcome::Value(
                value.map(|(data, version)| Value { data: data.to_vec(), version }),
            ),
            Outcome::Stored => BatchOutcome::Stored,
            Outcome::Applied(applied) => BatchOutcome::Applied(applied),
        }),
    };
    let in_vain = match &result {
        Err(Error::Connect(ConnectError::Unreachable { tried, .. })) => Some(*tried),
        _ => None,
    };
    results[left[completed.ticket.number() as usize]] = Some(result);
    in_vain
}
