//! A list of operations that share doorbells.

mod memory;

use std::fmt;
use std::time::Duration;

use farside_protocol::{Action, Lifetime, OperationKind, Version};

pub(crate) use self::memory::BatchMemory;
use self::memory::BatchOperation;
use crate::reconnecting::ReconnectBudget;
use crate::{
    ConnectError, Contact, Error, Outcome, Pipeline, PipelineFull, Result, Session, Store, Value,
    ValueRef,
};

/// Collects operations; [`Batch::run`] runs them together. The batch copies keys and values, and
/// its session keeps the memory for the next one.
///
/// The operations of a batch are concurrent with each other: two on the same key take effect in any
/// order, and may share a chain as in a [`Pipeline`](crate::Pipeline).
///
/// ```no_run
/// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
/// # let mut session = client.session()?;
/// let outcomes = session.batch().put("one", "1").increment("count", 1).get("two").run()?;
/// for outcome in outcomes {
///     println!("{:?}", outcome?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'s, 'd> {
    session: &'s mut Session,
    operations: Vec<BatchOperation<'d>>,
    /// The keys and values of all operations, one after another.
    bytes: Vec<u8>,
}

impl fmt::Debug for Batch<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operations = self.operations.len();
        f.debug_struct("Batch").field("operations", &operations).finish_non_exhaustive()
    }
}

/// The most memory for keys and values that a session keeps for its next batch, in bytes.
const KEPT_BYTES_MAX: usize = 16 << 20;

impl Session {
    /// Returns an empty batch: it collects operations, which then run together.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// for outcome in session.batch().put("one", "1").increment("two", 2).run()? {
    ///     assert!(outcome?.applied);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn batch<'d>(&mut self) -> Batch<'_, 'd> {
        Batch::new(self)
    }
}

impl<'s, 'd> Batch<'s, 'd> {
    fn new(session: &'s mut Session) -> Self {
        let operations = std::mem::take(&mut session.batch_memory.operations);
        let bytes = std::mem::take(&mut session.batch_memory.bytes);
        Self { session, operations, bytes }
    }

    fn begin(mut self, action: Action<'d>, key: &[u8], value: &[u8]) -> Self {
        let start = self.bytes.len();
        let (key_end, end) = (start + key.len(), start + key.len() + value.len());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.operations.push(BatchOperation { action, start, key_end, end });
        self
    }

    fn begin_get(self, key: &[u8]) -> Self {
        self.begin(Action::Get, key, &[])
    }

    fn begin_put(self, key: &[u8], value: &[u8]) -> Self {
        self.begin(Action::Put(Lifetime::FOREVER), key, value)
    }

    crate::operations::define_operations!(Self, Self, 'd);

    /// Runs all operations and waits for them. Returns their results in the order of the
    /// operations. Up to `pipeline_depth` of them share each doorbell.
    ///
    /// Operations that had no effect because the connection was lost run again on a new one. If an
    /// operation fails as [`ConnectError::Unreachable`], because the server did not answer, the
    /// operations that were not started yet fail in the same way.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// let outcomes = session.batch().put("one", "1").delete("two").get("three").run()?;
    /// for (outcome, is_applied) in outcomes.into_iter().zip([true, false, false]) {
    ///     assert_eq!(outcome?.applied, is_applied);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if there is no connection at the start. Each
    /// operation has a result of its own.
    pub fn run(self) -> Result<Vec<Result<Outcome>>> {
        self.run_with(&mut |_, outcome| Ok(outcome.map(Value::from)))
    }

    /// As [`Batch::run`]. `take` gets each outcome, with the number of its operation.
    pub(crate) fn run_with(self, take: &mut TakeOutcome<'_>) -> Result<Vec<Result<Outcome>>> {
        let Self { session, mut operations, mut bytes } = self;
        let results = run_all(
            session,
            operations.len(),
            &|number| {
                let BatchOperation { action, start, key_end, end } = operations[number];
                (action, &bytes[start..key_end], &bytes[key_end..end])
            },
            take,
        );
        operations.clear();
        bytes.clear();
        bytes.shrink_to(KEPT_BYTES_MAX);
        // Of an empty vector only the memory is left, which needs no lifetime.
        session.batch_memory.operations =
            operations.into_iter().map(|_| unreachable!("the batch is empty")).collect();
        session.batch_memory.bytes = bytes;
        results
    }
}

/// The operation with this number: its action, key and value.
type GetOperation<'d, 'b> = dyn Fn(usize) -> (Action<'d>, &'b [u8], &'b [u8]) + 'b;
/// Converts the outcome of the operation with this number. Its value is in the lane's memory.
type TakeOutcome<'t> = dyn FnMut(usize, Outcome<ValueRef<'_>>) -> Result<Outcome> + 't;

/// Stands for the result of an operation that has none yet. No operation ends with this error.
const NO_RESULT: Error = Error::PipelineFull(PipelineFull);

fn has_none(result: &Result<Outcome>) -> bool {
    matches!(result, Err(Error::PipelineFull(_)))
}

/// Runs this many operations, as [`Batch::run`].
pub(crate) fn run_all(
    session: &mut Session,
    count: usize,
    operation: &GetOperation<'_, '_>,
    take: &mut TakeOutcome<'_>,
) -> Result<Vec<Result<Outcome>>> {
    let mut results: Vec<_> = (0..count).map(|_| Err(NO_RESULT)).collect();
    let mut silent_for = run_remaining(session, operation, &mut results, take)?;
    let (mut budget, mut cause) = (ReconnectBudget::default(), None);
    while cause.is_none() && silent_for.is_none() && results.iter().any(has_none) {
        let may_retry = session.shared.count_loss(0, &mut budget);
        let again = |()| run_remaining(session, operation, &mut results, take);
        match may_retry.and_then(again) {
            Ok(waited) => silent_for = waited,
            Err(error) => cause = Some(error),
        }
    }
    let (contact, tried) = match silent_for {
        Some(waited) => (Contact::Silent, waited),
        None => (Contact::Lost, budget.since_first_loss()),
    };
    for (number, result) in results.iter_mut().enumerate().filter(|(_, it)| has_none(it)) {
        let unreachable = || session.shared.unreachable(0, contact, tried);
        let error = cause.get_or_insert_with(unreachable).clone();
        session.count_error(OperationKind::of(operation(number).0), &error);
        *result = Err(error);
    }
    Ok(results)
}

/// Runs the operations that have no result yet.
///
/// An operation that had no effect because the connection was lost still has no result afterwards.
/// If an operation waits for the server in vain, no more are started. Returns how long it waited.
fn run_remaining(
    session: &mut Session,
    operation: &GetOperation<'_, '_>,
    results: &mut [Result<Outcome>],
    take: &mut TakeOutcome<'_>,
) -> Result<Option<Duration>> {
    let mut remaining = std::mem::take(&mut session.batch_memory.remaining);
    remaining.clear();
    remaining.extend((0..results.len()).filter(|&n| has_none(&results[n])));
    let mut pipeline = session.pipeline_of(remaining.len())?;
    pipeline.wait_for_all();
    let mut silent_for = None;
    for &index in &remaining {
        let (action, key, value) = operation(index);
        while silent_for.is_none() && pipeline.begin(action, key, value).is_err() {
            silent_for = take_result(&mut pipeline, &remaining, results, take);
        }
    }
    while pipeline.in_flight() > 0 {
        silent_for = take_result(&mut pipeline, &remaining, results, take).or(silent_for);
    }
    drop(pipeline);
    session.batch_memory.remaining = remaining;
    Ok(silent_for)
}

/// Waits for one result of the pipeline, and stores it unless the connection was lost. Returns how
/// long its operation waited for the server, if it did so in vain.
fn take_result(
    pipeline: &mut Pipeline<'_>,
    remaining: &[usize],
    results: &mut [Result<Outcome>],
    take: &mut TakeOutcome<'_>,
) -> Option<Duration> {
    let completed = pipeline.wait()?;
    // Tickets are numbered from 0 in the order in which `remaining` was started.
    let number = remaining[completed.ticket.number() as usize];
    let result = match completed.result {
        Err(Error::Disconnected { .. }) => return None,
        result => result.and_then(|outcome| take(number, outcome)),
    };
    let silent_for = match &result {
        Err(Error::Connect(ConnectError::Unreachable { tried, .. })) => Some(*tried),
        _ => None,
    };
    results[number] = result;
    silent_for
}
