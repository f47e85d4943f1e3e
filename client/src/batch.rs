//! A list of operations that share doorbells.

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
    operations: Vec<BatchOperation<'d>>,
}

impl fmt::Debug for Batch<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operations = self.operations.len();
        f.debug_struct("Batch").field("operations", &operations).finish_non_exhaustive()
    }
}

/// An operation with its key and value.
type BatchOperation<'d> = (Action<'d>, &'d [u8], &'d [u8]);

/// The result of a batch's operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// GET: the value, `None` if the key is absent.
    Value(Option<Value>),
    /// PUT: the value was stored.
    Stored,
    /// All other operations: whether the condition held, and so the change was made.
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

    /// Adds a store with a condition, a TTL, or both.
    pub fn store(&mut self, key: &'d [u8], value: &'d [u8], store: Store<'d>) -> &mut Self {
        self.add(store.action(), key, value)
    }

    /// Adds an INSERT: a PUT that takes effect only if the key is absent.
    pub fn insert(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.add(Action::Insert(Lifetime::Forever), key, value)
    }

    /// Adds an UPDATE: a PUT that takes effect only if the key is present.
    pub fn update(&mut self, key: &'d [u8], value: &'d [u8]) -> &mut Self {
        self.add(Action::Update(Lifetime::Forever), key, value)
    }

    /// Adds a DELETE.
    pub fn delete(&mut self, key: &'d [u8]) -> &mut Self {
        self.add(Action::Delete, key, &[])
    }

    /// Runs all operations and waits for them. Returns their results in the order of the
    /// operations. Up to `pipeline_depth` of them share each doorbell.
    ///
    /// Operations that had no effect because the connection was lost run again on a new one. If an
    /// operation fails as [`ConnectError::Unreachable`], because the server did not answer, the
    /// operations that were not started yet fail in the same way.
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if there is no connection at the start. Each
    /// operation has a result of its own.
    pub fn run(self) -> Result<Vec<Result<BatchOutcome>>> {
        let Self { session, operations } = self;
        let mut results: Vec<_> = operations.iter().map(|_| None).collect();
        let mut silent_for = run_remaining(session, &operations, &mut results)?;
        let (mut budget, mut cause) = (ReconnectBudget::default(), None);
        while cause.is_none() && silent_for.is_none() && results.iter().any(Option::is_none) {
            let may_retry = session.shared.count_loss(&mut budget);
            match may_retry.and_then(|()| run_remaining(session, &operations, &mut results)) {
                Ok(waited) => silent_for = waited,
                Err(error) => cause = Some(error),
            }
        }
        let (contact, tried) = match silent_for {
            Some(waited) => (Contact::Silent, waited),
            None => (Contact::Lost, budget.since_first_loss()),
        };
        // The first operation without a result gets the cause itself, which cannot be copied.
        let mut error =
            || cause.take().unwrap_or_else(|| session.shared.unreachable(contact, tried));
        Ok(results.into_iter().map(|result| result.unwrap_or_else(|| Err(error()))).collect())
    }
}

/// Runs the operations that have no result yet.
///
/// An operation that had no effect because the connection was lost still has no result afterwards.
/// If an operation waits for the server in vain, no more are started. Returns how long it waited.
fn run_remaining(
    session: &mut Session,
    operations: &[BatchOperation<'_>],
    results: &mut [Option<Result<BatchOutcome>>],
) -> Result<Option<Duration>> {
    let remaining: Vec<usize> = (0..results.len()).filter(|&n| results[n].is_none()).collect();
    let mut pipeline = session.pipeline_of(remaining.len())?;
    let mut silent_for = None;
    for &index in &remaining {
        let (action, key, value) = operations[index];
        while silent_for.is_none() && pipeline.start(action, key, value).is_err() {
            silent_for = take_result(&mut pipeline, &remaining, results);
        }
    }
    while pipeline.in_flight() > 0 {
        silent_for = take_result(&mut pipeline, &remaining, results).or(silent_for);
    }
    Ok(silent_for)
}

/// Waits for one result of the pipeline, and stores it unless the connection was lost. Returns how
/// long its operation waited for the server, if it did so in vain.
fn take_result(
    pipeline: &mut Pipeline<'_>,
    remaining: &[usize],
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
    let silent_for = match &result {
        Err(Error::Connect(ConnectError::Unreachable { tried, .. })) => Some(*tried),
        _ => None,
    };
    // Tickets are numbered from 0 in the order in which `remaining` was started.
    results[remaining[completed.ticket.number() as usize]] = Some(result);
    silent_for
}
