//! How requests of connections become operations of the pipeline, and outcomes become replies.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use farside::{Completed, Error, Limits, OperationError, Pipeline};
use farside_resp::{Protocol, ReplyWriter};

use crate::commands::operation::{Operation, ms_of};
use crate::commands::plan::{Plan, plan, plan_part};
use crate::commands::table::{Command, CommandSpec, find};
use crate::commands::task::Task;
use crate::commands::{
    Arguments, connection as connection_commands, error, introspection, key_in_store,
};
use crate::connection::{Connection, Input};
use crate::gateway::{Gateway, note_away_shard};
use crate::helper::{Helper, HelperKind, Job, LONG_VALUE_BYTES, Origin, OwnedArguments};
use crate::lanes::{Access, LaneLock, Lanes, LockKind};

/// Requests of one connection that begin before those of others have a turn.
const REQUESTS_PER_TURN: usize = 256;
/// How many keys with long values a worker remembers.
const LONG_KEYS_MAX: usize = 4096;
/// The bytes of long values that lanes may have read before the session is replaced, because lanes
/// keep their buffers.
const LANE_BYTES_MAX: usize = 256 << 20;

/// Replies with values of so many bytes are shared by the GETs that have the same one.
const SHARED_BYTES_MIN: usize = 4 << 10;

/// Why a connection does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Its turn is over.
    Turn,
    /// It needs bytes, or the helper's answer: an event will come.
    Event,
    /// An operation in flight has to complete first.
    Operation,
    /// The operation that has this lock of its key has to complete first.
    Key(usize),
    /// Its client has to take output first.
    Output,
}

/// The state of a worker, except for its connections and its pipeline.
pub(crate) struct Executor {
    pub(crate) gateway: Arc<Gateway>,
    helpers: [Helper; HelperKind::ALL.len()],
    pub(crate) lanes: Lanes,
    /// Hashes of keys whose values are long.
    long_keys: HashSet<u64>,
    /// The bytes of long values that lanes have read.
    lane_bytes: usize,
    /// Why the store cannot be reached, as an error reply. Then commands fail with it.
    pub(crate) away: Option<String>,
    /// Commands that were not counted yet.
    commands: u64,
}

/// `Ok` if the next request can begin; otherwise why the connection pauses.
type Begun = Result<(), Pause>;

impl Executor {
    pub(crate) fn new(gateway: Arc<Gateway>, helpers: [Helper; HelperKind::ALL.len()]) -> Self {
        Self {
            gateway,
            helpers,
            lanes: Lanes::new(),
            long_keys: HashSet::new(),
            lane_bytes: 0,
            away: None,
            commands: 0,
        }
    }

    /// Whether the session has to be replaced once no operation is in flight.
    pub(crate) fn must_replace_session(&mut self) -> bool {
        self.lane_bytes > LANE_BYTES_MAX
    }

    /// Notes that the session was replaced.
    pub(crate) fn session_is_new(&mut self) {
        self.lane_bytes = 0;
        self.away = None;
    }

    /// Notes that the value of this key is not long any more.
    pub(crate) fn forget_long(&mut self, key: &[u8]) {
        self.long_keys.remove(&self.lanes.key_hash(key_in_store(key)));
    }

    /// Begins requests of a connection, until it has to pause.
    pub(crate) fn run(
        &mut self,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Pause {
        let pause = self.run_some(connection, place, pipeline);
        if self.commands > 0 {
            self.gateway.counts.commands.fetch_add(self.commands, Ordering::Relaxed);
            self.commands = 0;
            connection.note_waiting();
            if !connection.is_known && connection.has_logged_in() {
                connection.is_known = true;
                self.gateway.note_known(&connection.client.record);
            }
            let record = &connection.client.record;
            record.active_ms.store(record.age_ms(), Ordering::Relaxed);
        }
        pause
    }

    fn run_some(
        &mut self,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Pause {
        for _ in 0..REQUESTS_PER_TURN {
            let must_wait = connection.awaits_helper || connection.client.is_delayed;
            if must_wait || connection.has_ended {
                return Pause::Event;
            }
            let is_closing = connection.client.is_closing;
            let input = if is_closing {
                connection.discard_input()
            } else if connection.is_full() {
                connection.read_ahead()
            } else {
                connection.next_request()
            };
            match input {
                Input::Request => {}
                Input::Awaited if is_closing || !connection.is_full() => return Pause::Event,
                Input::Awaited => return Pause::Output,
                Input::Ended => {
                    // The client gets the replies to what it has sent.
                    connection.client.is_closing = true;
                    return Pause::Event;
                }
                Input::Broken => {
                    connection.has_ended = true;
                    return Pause::Event;
                }
                Input::TurnOver => return Pause::Turn,
                Input::Wrong(wrong) => {
                    connection.error_now(format!("ERR {wrong}"));
                    connection.client.is_closing = true;
                    continue;
                }
            }
            if let Err(pause) = self.begin(connection, place, pipeline) {
                return pause;
            }
            connection.end_request();
            self.commands += 1;
        }
        Pause::Turn
    }

    /// Begins the present request.
    fn begin(
        &mut self,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Begun {
        let request = connection.request();
        let count = request.count();
        if count == 0 {
            return Ok(());
        }
        let spec = find(request.get(0));
        if (spec.is_none() || connection.client.is_in_transaction)
            && connection.try_reply_now(|request, client| {
                connection_commands::in_transaction(request, client)
            })
        {
            return Ok(());
        }
        let request = connection.request();
        let Some(spec) = spec else {
            if ["post", "host:"].iter().any(|name| request.is(0, name)) {
                // A browser that was made to send a request to this port: its body would follow.
                connection.has_ended = true;
                return Err(Pause::Event);
            }
            let arguments = (1..count).map(|at| request.get(at));
            let text = error::unknown_command(request.get(0), arguments);
            connection.error_now(text);
            return Ok(());
        };
        connection.client.record.command.store(spec.command as u8, Ordering::Relaxed);
        if let Some(bytes) = request.too_long() {
            let max = self.gateway.limits.value_bytes_max;
            connection.error_now(error::too_long(bytes, max));
            return Ok(());
        }
        if !spec.takes(count) {
            connection.error_now(error::wrong_arity(spec.name));
            return Ok(());
        }
        if !connection.client.is_authenticated && !spec.is_open() {
            connection.error_now(error::NO_AUTH);
            return Ok(());
        }
        match spec.command {
            Command::MGet
            | Command::MSet
            | Command::Del
            | Command::Unlink
            | Command::Exists
            | Command::Touch => self.begin_several(spec, connection, place, pipeline),
            Command::Scan
            | Command::Keys
            | Command::DbSize
            | Command::RandomKey
            | Command::FlushDb
            | Command::FlushAll => self.help(spec.command, connection, place),
            Command::Info | Command::Config if self.away.is_none() => {
                self.help(spec.command, connection, place)
            }
            Command::Memory => self.begin_memory(connection, place, pipeline),
            Command::Ping
            | Command::Echo
            | Command::Time
            | Command::Select
            | Command::Quit
            | Command::Reset
            | Command::Auth
            | Command::Hello
            | Command::Client
            | Command::Config
            | Command::Command
            | Command::Info => {
                let gateway = &self.gateway;
                connection.reply_now(|request, client, out| {
                    connection_commands::run(spec, request, gateway, client, out);
                });
                Ok(())
            }
            _ => self.begin_one(spec, connection, place, pipeline),
        }
    }

    /// Begins a command on one key.
    #[inline]
    fn begin_one(
        &mut self,
        spec: &CommandSpec,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Begun {
        let request = connection.request();
        match plan(spec.command, spec.name, &request) {
            Err(text) => {
                connection.error_now(text);
                Ok(())
            }
            Ok(plan) => {
                let key = key_in_store(request.get(1));
                if self.is_long(&plan, key) {
                    return self.help(spec.command, connection, place);
                }
                let started = self.start(connection_of(connection, place), key, plan, pipeline)?;
                let reply = connection.await_reply();
                self.settle(started, connection, reply);
                Ok(())
            }
        }
    }

    /// Whether a helper runs this: the value is long, or likely so.
    fn is_long(&self, plan: &Plan<'_>, key: &[u8]) -> bool {
        let stored = match &plan.task {
            Task::Modify(modify) => modify.bytes(),
            _ => plan.value.len(),
        };
        stored >= LONG_VALUE_BYTES
            || plan.operation.reads_value()
                && !self.long_keys.is_empty()
                && self.long_keys.contains(&self.lanes.key_hash(key))
    }

    /// MEMORY USAGE.
    fn begin_memory(
        &mut self,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Begun {
        let request = connection.request();
        if let Err(text) = introspection::check_memory_usage(&request) {
            connection.error_now(text);
            return Ok(());
        }
        let key = key_in_store(request.get(2));
        let plan = Plan::new(Operation::Get, &[], Task::Memory(key.len()));
        let started = self.start(connection_of(connection, place), key, plan, pipeline)?;
        let reply = connection.await_reply();
        self.settle(started, connection, reply);
        Ok(())
    }

    /// Starts an operation, if none of the same connection on the same key is in flight.
    #[inline]
    fn start(
        &mut self,
        (origin, protocol): (Origin, Protocol),
        key: &[u8],
        plan: Plan<'_>,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Result<Started, Pause> {
        let Some(pipeline) = pipeline.as_mut().filter(|_| self.away.is_none()) else {
            return Ok(Started::Away);
        };
        if self.must_replace_session() {
            // Once nothing is in flight, the worker replaces it.
            return Err(Pause::Operation);
        }
        let Plan { operation, value, task } = plan;
        let is_get = matches!((operation, &task), (Operation::Get, Task::Value));
        let kind = match is_get {
            true => LockKind::Get(protocol),
            _ if operation.derives_value() || matches!(task, Task::Modify(_)) => {
                LockKind::Exclusive
            }
            _ => LockKind::Other,
        };
        let lock = match self.lanes.access(origin.id, key, kind) {
            Access::Free(lock) => lock,
            Access::Follows(lane) => return Ok(Started::Follows(lane)),
            Access::Held => return Err(Pause::Operation),
            Access::HeldByOther(lock) => return Err(Pause::Key(lock)),
        };
        let started = operation.start(pipeline, key, value);
        let lane = started.map_err(|_| Pause::Operation)?.lane();
        Ok(Started::Lane { lane, lock, origin, operation, task, is_get })
    }

    /// Notes which reply a started operation has.
    #[inline]
    fn settle(&mut self, started: Started, connection: &mut Connection, reply: u64) {
        let protocol = connection.client.protocol;
        match started {
            Started::Away => {
                let text = self.away.clone().unwrap_or_default();
                if connection.is_sum(reply) {
                    connection.add_to_sum(reply, Err(text));
                } else {
                    connection.finish(reply, |out| ReplyWriter::new(out, protocol).error(text));
                }
            }
            Started::Follows(lane) => {
                self.lanes.lane(lane).followers.push(reply);
                connection.in_flight += 1;
            }
            Started::Lane { lane, lock, mut origin, operation, task, is_get } => {
                origin.reply = reply;
                let request = connection.request();
                let at = if connection.next_argument > 0 { connection.next_argument } else { 1 };
                let at = if matches!(task, Task::Memory(_)) { 2 } else { at };
                let key = key_in_store(request.get(at));
                let task = (operation, task, is_get);
                self.lanes.fill(lane, lock, origin, protocol, key, task);
                connection.in_flight += 1;
            }
        }
    }

    /// Has the helper run the present request, once no operation of the connection is in flight:
    /// it may concern any key.
    fn help(&mut self, command: Command, connection: &mut Connection, place: usize) -> Begun {
        if connection.in_flight > 0 {
            return Err(Pause::Operation);
        }
        if let Some(text) = self.away.clone() {
            connection.error_now(text);
            return Ok(());
        }
        let arguments = OwnedArguments::of(&connection.request());
        let protocol = connection.client.protocol;
        let reply = connection.await_reply();
        let origin = Origin { place, id: connection.id(), reply };
        let client = Arc::clone(&connection.client.record);
        let helper = &mut self.helpers[HelperKind::of(command) as usize];
        if helper.submit(Job { origin, client, protocol, command, arguments }) {
            connection.awaits_helper = true;
        } else {
            let text = "ERR the system refuses another thread: try again later";
            connection.finish(reply, |out| ReplyWriter::new(out, protocol).error(text));
        }
        Ok(())
    }

    /// Takes a completed operation. Returns the next one of the same command, which the caller
    /// starts, and the place of its lane.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        completed: Completed<'_>,
        connection: Option<&mut Connection>,
    ) -> Option<(Operation, usize)> {
        let number = completed.ticket.lane();
        let expires_at_ms = completed.expires_at().map(ms_of);
        let result = completed.result;
        match &result {
            Err(error @ Error::Disconnected { .. }) => self.away = Some(error::of_operation(error)),
            Err(error) => note_away_shard(&self.gateway, error),
            Ok(_) => {}
        }
        if let Ok(outcome) = &result
            && let Some(value) = &outcome.value
            && value.len() >= LONG_VALUE_BYTES
        {
            self.note_long(number, value.len());
        }
        let lane = self.lanes.lane(number);
        // The connection may have ended, and another one may have its place.
        let connection = connection.filter(|connection| connection.id() == lane.origin.id);
        let Some(connection) = connection else {
            // A command with a second operation ends here: its client does not know of it.
            self.lanes.release(number);
            return None;
        };
        if let Err(Error::Operation(OperationError::Contended { .. })) = &result
            && let Some(next) = lane.next_attempt()
        {
            return Some((next, number));
        }
        let (reply, protocol) = (lane.origin.reply, lane.protocol);
        if connection.is_sum(reply) {
            let result = result.map(|outcome| lane.task.count(&outcome));
            connection.add_to_sum(reply, result.map_err(|error| error::of_operation(&error)));
        } else {
            match &result {
                Ok(outcome) if lane.is_single() => {
                    connection.finish(reply, |out| {
                        let mut reply = ReplyWriter::new(out, protocol);
                        lane.task.advance(outcome, expires_at_ms, &mut reply);
                    });
                }
                Ok(outcome) => {
                    let mut out = Vec::new();
                    let mut writer = ReplyWriter::new(&mut out, protocol);
                    if let Some(next) = lane.task.advance(outcome, expires_at_ms, &mut writer) {
                        return Some((next, number));
                    }
                    connection.finish_with(reply, out);
                }
                Err(failure) => {
                    let text = error::of_operation(failure);
                    connection.finish(reply, |out| ReplyWriter::new(out, protocol).error(text));
                }
            }
            let mut shared = None;
            for follower in std::mem::take(&mut lane.followers) {
                connection.in_flight -= 1;
                if let Ok(outcome) = &result
                    && outcome.value.is_some_and(|value| value.len() >= SHARED_BYTES_MIN)
                {
                    let reply = shared.get_or_insert_with(|| {
                        let mut out = Vec::new();
                        let mut reply = ReplyWriter::new(&mut out, protocol);
                        lane.task.advance(outcome, expires_at_ms, &mut reply);
                        Arc::from(out)
                    });
                    connection.finish_shared(follower, Arc::clone(reply));
                    continue;
                }
                connection.finish(follower, |out| {
                    let mut reply = ReplyWriter::new(out, protocol);
                    match &result {
                        Ok(outcome) => {
                            lane.task.advance(outcome, expires_at_ms, &mut reply);
                        }
                        Err(failure) => reply.error(error::of_operation(failure)),
                    }
                });
            }
        }
        connection.in_flight -= 1;
        self.lanes.release(number);
        None
    }

    /// Starts the next operation of the command on this lane, which has just become free.
    pub(crate) fn go_on(
        &mut self,
        operation: Operation,
        number: usize,
        pipeline: &mut Pipeline<'_>,
        connection: Option<&mut Connection>,
    ) {
        let lane = self.lanes.lane(number);
        match operation.start(pipeline, &lane.key, lane.task.next_value()) {
            Ok(ticket) => self.lanes.relocate(number, ticket.lane(), operation),
            // Its own lane is free, so this does not happen.
            Err(full) => {
                let (reply, protocol) = (lane.origin.reply, lane.protocol);
                if let Some(connection) = connection {
                    connection.in_flight -= 1;
                    let text = error::of_operation(&full.into());
                    connection.finish(reply, |out| ReplyWriter::new(out, protocol).error(text));
                }
                self.lanes.release(number);
            }
        }
    }

    #[cold]
    fn note_long(&mut self, lane: usize, bytes: usize) {
        self.lane_bytes += bytes;
        if self.long_keys.len() >= LONG_KEYS_MAX
            && let Some(any) = self.long_keys.iter().next().copied()
        {
            self.long_keys.remove(&any);
        }
        let key = std::mem::take(&mut self.lanes.lane(lane).key);
        self.long_keys.insert(self.lanes.key_hash(&key));
        self.lanes.lane(lane).key = key;
    }

    /// Begins a command on several keys, or goes on with it.
    fn begin_several(
        &mut self,
        spec: &CommandSpec,
        connection: &mut Connection,
        place: usize,
        pipeline: &mut Option<Pipeline<'_>>,
    ) -> Begun {
        let command = spec.command;
        let (is_mget, is_mset) = (command == Command::MGet, command == Command::MSet);
        let (count, step) = (connection.request().count(), if is_mset { 2 } else { 1 });
        let done = match command {
            Command::MSet => Some("stored"),
            Command::Del | Command::Unlink => Some("removed"),
            _ => None,
        };
        if connection.next_argument == 0 {
            if is_mset && count % 2 == 0 {
                connection.error_now(error::wrong_arity(spec.name));
                return Ok(());
            }
            let request = connection.request();
            // Otherwise it would be found when other keys have been changed.
            let wrong = too_long(&request, is_mset, &self.gateway.limits);
            if let Some(wrong) = wrong.filter(|_| done.is_some()) {
                connection.error_now(error::of_operation(&wrong.into()));
                return Ok(());
            }
            let is_long = |at| request.get(at).len() >= LONG_VALUE_BYTES;
            if is_mset && (2..count).step_by(2).any(is_long) {
                return self.help(command, connection, place);
            }
            if is_mget {
                connection.reply_now(|_, client, out| {
                    ReplyWriter::new(out, client.protocol).array(count - 1);
                });
            } else {
                connection.sum = connection.await_sum((count - 1) / step, is_mset, done);
            }
            connection.next_argument = 1;
        }
        while connection.next_argument < count {
            if is_mget && connection.is_full() {
                return Err(Pause::Output);
            }
            let at = connection.next_argument;
            let request = connection.request();
            let part = plan_part(command, &request, at);
            let key = key_in_store(request.get(at));
            let started = self.start(connection_of(connection, place), key, part, pipeline)?;
            let reply = if is_mget { connection.await_reply() } else { connection.sum };
            self.settle(started, connection, reply);
            connection.next_argument = at + step;
        }
        Ok(())
    }
}

/// A started operation.
enum Started {
    Lane {
        lane: usize,
        lock: LaneLock,
        origin: Origin,
        operation: Operation,
        task: Task,
        is_get: bool,
    },
    /// It has the reply of the GET on this lane.
    Follows(usize),
    /// The store cannot be reached.
    Away,
}

/// The origin of an operation, without its reply, and the protocol of the reply.
fn connection_of(connection: &Connection, place: usize) -> (Origin, Protocol) {
    (Origin { place, id: connection.id(), reply: 0 }, connection.client.protocol)
}

/// The error for the first key or value of a command on several keys that is longer than the store
/// allows.
fn too_long(request: &impl Arguments, is_mset: bool, limits: &Limits) -> Option<OperationError> {
    (1..request.count()).find_map(|at| {
        let (bytes, is_key) = (request.get(at).len(), !is_mset || at % 2 == 1);
        let max = if is_key { limits.key_bytes_max } else { limits.value_bytes_max };
        (bytes > max).then_some(match is_key {
            true => OperationError::KeyTooLong { bytes, max },
            false => OperationError::ValueTooLong { bytes, max },
        })
    })
}
