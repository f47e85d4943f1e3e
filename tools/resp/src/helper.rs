//! A helper thread of a worker: commands that take long run there, on a session of its own.
//!
//! These are the commands on all keys, those on long values, and questions about the store. For a
//! long value a pipeline would have to keep a buffer of its length for each of its lanes. The three
//! kinds do not wait for each other.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use farside::{Result, Session};
use farside_resp::{Protocol, ReplyWriter};

use crate::commands::operation::{Operation, ms_of};
use crate::commands::plan::{Plan, plan, plan_part};
use crate::commands::table::{COMMANDS, Command};
use crate::commands::task::Task;
use crate::commands::{Arguments, error, introspection, key_in_store, whole};
use crate::gateway::{ClientRecord, Gateway, note_away_shard};

/// A value of at least so many bytes is long: a helper stores and reads it.
pub(crate) const LONG_VALUE_BYTES: usize = 1 << 20;
/// After a longer value the helper opens a new session, which has short buffers.
const BUFFER_BYTES_MAX: usize = 16 << 20;

/// The place of a connection in its worker, and its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) place: usize,
    pub(crate) id: u64,
    pub(crate) reply: u64,
}

/// A command for the helper.
pub(crate) struct Job {
    pub(crate) origin: Origin,
    pub(crate) client: Arc<ClientRecord>,
    pub(crate) protocol: Protocol,
    pub(crate) command: Command,
    pub(crate) arguments: OwnedArguments,
}

/// The arguments of a request, with memory of their own.
pub(crate) struct OwnedArguments(Vec<Vec<u8>>);

impl OwnedArguments {
    pub(crate) fn of(arguments: &impl Arguments) -> Self {
        Self((0..arguments.count()).map(|at| arguments.get(at).to_vec()).collect())
    }
}

impl Arguments for OwnedArguments {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn get(&self, number: usize) -> &[u8] {
        self.0.get(number).map_or(&[], Vec::as_slice)
    }
}

/// An executed command.
pub(crate) struct Executed {
    pub(crate) origin: Origin,
    pub(crate) reply: Vec<u8>,
    /// The key, if a read found that its value is not long any more.
    pub(crate) short_key: Option<Vec<u8>>,
}

/// The executed commands that the worker has not taken yet.
pub(crate) type Results = Arc<Mutex<Vec<Executed>>>;

/// Which of a worker's helpers runs a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelperKind {
    /// Commands that READ all keys.
    Keys,
    /// Questions about the store, which are answered quickly.
    Store,
    /// Commands on long values.
    Values,
}

impl HelperKind {
    pub(crate) const ALL: [Self; 3] = [Self::Keys, Self::Store, Self::Values];

    pub(crate) fn of(command: Command) -> Self {
        match command {
            Command::Scan
            | Command::Keys
            | Command::RandomKey
            | Command::FlushDb
            | Command::FlushAll => Self::Keys,
            Command::DbSize | Command::Info | Command::Config => Self::Store,
            _ => Self::Values,
        }
    }

    /// The name of its thread.
    fn name(self) -> &'static str {
        match self {
            Self::Keys => "resp-keys",
            Self::Store => "resp-store",
            Self::Values => "resp-values",
        }
    }
}

/// A worker's helper. Its thread starts with the first job.
pub(crate) struct Helper {
    kind: HelperKind,
    gateway: Arc<Gateway>,
    results: Results,
    wake: Arc<OwnedFd>,
    jobs: Option<Sender<Job>>,
}

impl Helper {
    pub(crate) fn new(
        kind: HelperKind,
        gateway: Arc<Gateway>,
        results: Results,
        wake: Arc<OwnedFd>,
    ) -> Self {
        Self { kind, gateway, results, wake, jobs: None }
    }

    /// Gives the helper a job. Returns false if the system refuses a thread.
    pub(crate) fn submit(&mut self, job: Job) -> bool {
        if self.jobs.is_none() {
            let (jobs, received) = channel();
            let (gateway, results, wake) =
                (self.gateway.clone(), self.results.clone(), self.wake.clone());
            let thread = thread::Builder::new().name(self.kind.name().into());
            let started = thread.spawn(move || work(&gateway, &received, &results, &wake));
            if started.is_err() {
                return false;
            }
            self.jobs = Some(jobs);
        }
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            self.jobs = None;
        }
        sent
    }
}

/// Runs jobs until the worker is gone.
fn work(gateway: &Arc<Gateway>, jobs: &Receiver<Job>, results: &Results, wake: &OwnedFd) {
    let mut session = None;
    while let Ok(job) = jobs.recv() {
        let Job { origin, protocol, .. } = job;
        if job.client.has_ended.load(Ordering::Relaxed) {
            // No other connection has to wait for what this one has asked.
            continue;
        }
        let mut reply = Vec::new();
        let mut short_key = None;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            run(gateway, &mut session, &job, &mut reply, &mut short_key)
        }));
        let failure = match ended {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => {
                note_away_shard(gateway, &failure);
                Some(error::of_operation(&failure))
            }
            Err(_) => {
                // The connection gets an answer, and the next job a new session. Nothing is known
                // about this one, so it is not dropped.
                std::mem::forget(session.take());
                let text = "ERR the gateway failed in this command, which may have taken effect: \
                            its log says more";
                Some(text.to_owned())
            }
        };
        if let Some(text) = failure {
            reply.clear();
            short_key = None;
            ReplyWriter::new(&mut reply, protocol).error(text);
        }
        if reply.len() > BUFFER_BYTES_MAX || longest(&job.arguments) > BUFFER_BYTES_MAX {
            session = None;
        }
        let executed = Executed { origin, reply, short_key };
        results.lock().unwrap_or_else(PoisonError::into_inner).push(executed);
        // It fails only if it was not read for very long, and then the worker is awake.
        let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
    }
}

fn longest(arguments: &OwnedArguments) -> usize {
    arguments.0.iter().map(Vec::len).max().unwrap_or(0)
}

fn run(
    gateway: &Gateway,
    opened: &mut Option<Session>,
    job: &Job,
    reply: &mut Vec<u8>,
    short_key: &mut Option<Vec<u8>>,
) -> Result<()> {
    let Job { protocol, command, arguments, .. } = job;
    if matches!(command, Command::Info | Command::Config) {
        // They are answered without the store as well.
        gateway.look_at_store(opened);
        let mut reply = ReplyWriter::new(reply, *protocol);
        match command {
            Command::Info => introspection::info(arguments, gateway, &mut reply),
            _ => introspection::config(arguments, gateway, &mut reply),
        }
        return Ok(());
    }
    let session = match opened {
        Some(session) => session,
        None => opened.insert(gateway.client.session()?),
    };
    let name = COMMANDS[*command as usize].name;
    match command {
        Command::Scan
        | Command::Keys
        | Command::DbSize
        | Command::RandomKey
        | Command::FlushDb
        | Command::FlushAll => {
            whole::run(*command, arguments, session, &mut ReplyWriter::new(reply, *protocol))
        }
        Command::MSet => {
            for (stored, at) in (0..).zip((1..arguments.count()).step_by(2)) {
                let part = plan_part(*command, arguments, at);
                let mut unused = Vec::new();
                let key = arguments.get(at);
                if let Err(failure) = run_plan(session, key, part, *protocol, &mut unused) {
                    let (text, of) = (error::of_operation(&failure), arguments.count() / 2);
                    let text = error::after(text, stored, of, Some("stored"));
                    ReplyWriter::new(reply, *protocol).error(text);
                    return Ok(());
                }
            }
            ReplyWriter::new(reply, *protocol).ok();
            Ok(())
        }
        _ => match plan(*command, name, arguments) {
            Ok(plan) => {
                let key = arguments.get(1);
                let value_bytes = run_plan(session, key, plan, *protocol, reply)?;
                if value_bytes.is_some_and(|bytes| bytes < LONG_VALUE_BYTES) {
                    *short_key = Some(key.to_vec());
                }
                Ok(())
            }
            Err(text) => {
                ReplyWriter::new(reply, *protocol).error(text);
                Ok(())
            }
        },
    }
}

/// Runs a command on one key. Returns the length of the value that it read, if it did.
fn run_plan(
    session: &mut Session,
    key: &[u8],
    plan: Plan<'_>,
    protocol: Protocol,
    reply: &mut Vec<u8>,
) -> Result<Option<usize>> {
    let Plan { mut operation, value, mut task } = plan;
    let key = key_in_store(key);
    // The blocking calls copy these values once less than a pipeline.
    match (operation, &task) {
        (Operation::Get, Task::Value) => {
            let found = session.get(key)?;
            let bytes = found.as_ref().map_or(0, |value| value.len());
            let mut reply = ReplyWriter::new(reply, protocol);
            match found {
                Some(value) => reply.bulk(&*value),
                None => reply.null(),
            }
            return Ok(Some(bytes));
        }
        (Operation::Put, Task::Ok) => {
            session.put(key, value)?;
            ReplyWriter::new(reply, protocol).ok();
            return Ok(None);
        }
        _ => {}
    }
    let mut value_bytes = None;
    let mut value = std::borrow::Cow::Borrowed(value);
    let mut pipeline = session.pipeline()?;
    loop {
        operation.start(&mut pipeline, key, &value)?;
        let Some(completed) = pipeline.wait() else { return Ok(value_bytes) };
        let expires_at_ms = completed.expires_at().map(ms_of);
        let outcome = completed.result?;
        if matches!(operation, Operation::Get) {
            value_bytes = Some(outcome.value.map_or(0, |value| value.len()));
        }
        let mut writer = ReplyWriter::new(reply, protocol);
        match task.advance(&outcome, expires_at_ms, &mut writer) {
            None => return Ok(value_bytes),
            Some(next) => {
                operation = next;
                value = std::borrow::Cow::Owned(task.next_value().to_vec());
            }
        }
    }
}
