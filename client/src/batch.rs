//! Many operations, one doorbell.

use crate::protocol::Action;
use crate::store::Lifetime;
use crate::{Outcome, Result, Session, Store, Value};

/// Collects operations; [`Batch::run`] runs them together.
///
/// The operations of a batch are concurrent with each other: two on the same key take effect in any
/// order, and may share a chain as in a [`Pipeline`](crate::Pipeline).
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'s, 'd> {
    session: &'s mut Session,
    operations: Vec<(Action<'static>, &'d [u8], &'d [u8])>,
}

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

    fn add(&mut self, action: Action<'static>, key: &'d [u8], value: &'d [u8]) -> &mut Self {
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
    pub fn store(&mut self, key: &'d [u8], value: &'d [u8], store: Store<'static>) -> &mut Self {
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
    /// `pipeline_depth` operations share each doorbell.
    ///
    /// # Errors
    /// [`Error::Unreachable`](crate::Error::Unreachable) if there is no connection to run them on;
    /// what becomes of each operation is its own result.
    pub fn run(self) -> Result<Vec<Result<BatchOutcome>>> {
        let mut pipeline = self.session.pipeline()?;
        let mut results: Vec<_> = self.operations.iter().map(|_| None).collect();
        // Tickets count from 0 in the order of the starts.
        let mut tickets = Vec::with_capacity(results.len());
        for (action, key, value) in self.operations {
            loop {
                match pipeline.start(action, key, value) {
                    Ok(ticket) => break tickets.push(ticket),
                    Err(_) => take(&mut pipeline, &tickets, &mut results),
                }
            }
        }
        while pipeline.in_flight() > 0 {
            take(&mut pipeline, &tickets, &mut results);
        }
        Ok(results.into_iter().flatten().collect())
    }
}

fn take(
    pipeline: &mut crate::Pipeline<'_>,
    tickets: &[crate::Ticket],
    results: &mut [Option<Result<BatchOutcome>>],
) {
    let Some(completed) = pipeline.wait() else { return };
    if let Ok(at) = tickets.binary_search(&completed.ticket) {
        results[at] = Some(completed.result.map(|outcome| match outcome {
            Outcome::Value(value) => BatchOutcome::Value(
                value.map(|(data, version)| Value { data: data.to_vec(), version }),
            ),
            Outcome::Stored => BatchOutcome::Stored,
            Outcome::Applied(applied) => BatchOutcome::Applied(applied),
        }));
    }
}
