//! Operations that run beside each other: in a pipeline, in a batch, or as tasks of an async
//! client.

use std::fmt;
use std::time::Duration;

use farside::{AsyncClient, Error, Outcome, Session, Store, Value, ValueRef};
use farside_fabric::boot_time_ns;
use farside_protocol::{Action, Change, Expected, Modification};

/// The time to live that a touch gives.
const TTL: Duration = Duration::from_secs(3600);

/// How operations run beside each other.
#[derive(Clone)]
pub enum Way {
    /// In a pipeline of the session.
    Pipeline,
    /// In a batch of the session.
    Batch,
    /// As tasks of this client.
    Async(AsyncClient),
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipeline => "pipeline",
            Self::Batch => "batch",
            Self::Async(_) => "async client",
        })
    }
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub struct Call<'c> {
    /// What it does.
    pub action: Action<'c>,
    /// Its key.
    pub key: &'c [u8],
    /// The value that it stores or appends.
    pub value: &'c [u8],
}

/// What an operation answered. An async client does not say what was before an append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// As of [`Outcome`].
    pub applied: bool,
    /// As of [`Outcome`].
    pub value: Option<Value>,
    /// As of [`Outcome`].
    pub number: i64,
}

/// When an operation returned, by the time since boot, and its answer.
pub type Returned = (u64, Result<Answered, Error>);

impl From<Outcome> for Answered {
    fn from(Outcome { applied, value, number, .. }: Outcome) -> Self {
        Self { applied, value, number }
    }
}

impl Answered {
    fn of(applied: bool) -> Self {
        Self { applied, value: None, number: 0 }
    }

    fn found(value: Option<Value>) -> Self {
        Self { applied: value.is_some(), value, number: 0 }
    }
}

/// The condition of a store, by the change that it makes.
fn store<'c>(change: Change<'c>) -> Store<'c> {
    match change {
        Change::Store(Some(Expected::Value(value))) => Store::if_value(value).returning(),
        Change::Store(Some(Expected::Version(version))) => Store::if_version(version).returning(),
        Change::Store(None) => Store::always().returning(),
        _ => Store::if_absent().returning(),
    }
}

/// Adds an operation to a pipeline or a batch.
macro_rules! add {
    ($to:expr, $call:expr) => {{
        let Call { action, key, value } = $call;
        match action {
            Action::Get => $to.get(key),
            Action::Version => $to.version(key),
            Action::Put(_) => $to.put(key, value),
            Action::Insert(_) => $to.insert(key, value),
            Action::Update(_) => $to.update(key, value),
            Action::Delete => $to.delete(key),
            Action::Exchange(expected, _) => {
                $to.store(key, value, store(Change::Store(Some(expected))))
            }
            Action::Modify(Modification { change, .. }) => match change {
                Change::Add(delta) => $to.increment(key, delta),
                Change::Append => $to.append(key, value),
                Change::Retain => $to.touch(key, TTL),
                Change::Remove(None) => $to.take(key),
                Change::Remove(Some(version)) => $to.delete_if_version(key, version),
                _ => $to.store(key, value, store(change)),
            },
        }
    }};
}

/// Runs operations beside each other. Returns their answers, in the order of the operations.
///
/// # Errors
/// That of the session, if it has no connection: no operation took effect.
pub fn run(session: &mut Session, way: &Way, calls: &[Call<'_>]) -> Result<Vec<Returned>, Error> {
    match way {
        Way::Pipeline => run_in_pipeline(session, calls),
        Way::Batch => {
            let batch = calls.iter().fold(session.batch(), |batch, call| add!(batch, *call));
            let outcomes = batch.run()?.into_iter();
            let returned = boot_time_ns();
            Ok(outcomes.map(|outcome| (returned, outcome.map(Answered::from))).collect())
        }
        Way::Async(client) => Ok(run_as_tasks(client, calls)),
    }
}

fn run_in_pipeline(session: &mut Session, calls: &[Call<'_>]) -> Result<Vec<Returned>, Error> {
    let mut pipeline = session.pipeline()?;
    let mut answers: Vec<Option<Returned>> = calls.iter().map(|_| None).collect();
    let mut left = calls.iter();
    loop {
        while pipeline.free_lanes() > 0
            && let Some(call) = left.next()
        {
            add!(pipeline, *call).unwrap();
        }
        let Some(completed) = pipeline.wait() else { break };
        let answered = completed.result.map(|Outcome { applied, value, number, .. }| {
            let value =
                value.map(|ValueRef { data, version }| Value { data: data.into(), version });
            Answered { applied, value, number }
        });
        answers[completed.ticket.number() as usize] = Some((boot_time_ns(), answered));
    }
    Ok(answers.into_iter().flatten().collect())
}

fn run_as_tasks(client: &AsyncClient, calls: &[Call<'_>]) -> Vec<Returned> {
    let tasks = smol::LocalExecutor::new();
    let tasks_of_calls: Vec<_> = calls
        .iter()
        .map(|call| {
            tasks.spawn(async move {
                let answered = run_as_task(client, *call).await;
                (boot_time_ns(), answered)
            })
        })
        .collect();
    smol::block_on(tasks.run(async {
        let mut answers = Vec::with_capacity(calls.len());
        for task in tasks_of_calls {
            answers.push(task.await);
        }
        answers
    }))
}

async fn run_as_task(client: &AsyncClient, call: Call<'_>) -> Result<Answered, Error> {
    let Call { action, key, value } = call;
    let change = match action {
        Action::Get => return client.get(key).await.map(Answered::found),
        Action::Version => {
            let version = client.version(key).await?;
            return Ok(Answered::of(version.is_some()));
        }
        Action::Put(_) => return client.put(key, value).await.map(|()| Answered::of(true)),
        Action::Insert(_) => return client.insert(key, value).await.map(Answered::of),
        Action::Update(_) => return client.update(key, value).await.map(Answered::of),
        Action::Delete => return client.delete(key).await.map(Answered::of),
        Action::Exchange(expected, _) => Change::Store(Some(expected)),
        Action::Modify(Modification { change, .. }) => change,
    };
    match change {
        Change::Add(delta) => {
            let number = client.increment(key, delta).await?;
            Ok(Answered { number, ..Answered::of(true) })
        }
        Change::Append => client.append(key, value).await.map(|_| Answered::of(true)),
        Change::Retain => client.touch(key, TTL).await.map(Answered::of),
        Change::Remove(None) => client.take(key).await.map(Answered::found),
        Change::Remove(Some(version)) => {
            client.delete_if_version(key, version).await.map(Answered::of)
        }
        _ => client.store(key, value, store(change)).await.map(Answered::from),
    }
}
