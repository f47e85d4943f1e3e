//! Commands on several keys.

use farside::{Limits, OperationError, Pipeline};
use farside_resp::ReplyWriter;

use super::{Begun, Executor, Pause, connection_of};
use crate::commands::arguments::Arguments;
use crate::commands::error;
use crate::commands::plan::plan_part;
use crate::commands::table::{Command, CommandSpec};
use crate::connection::Connection;
use crate::empty_key;
use crate::helper::LONG_VALUE_BYTES;

impl Executor {
    /// Begins a command on several keys, or goes on with it.
    pub(super) fn begin_several(
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
            let key = empty_key::to_store(request.get(at));
            let started = self.start(connection_of(connection, place), key, part, pipeline)?;
            let reply = if is_mget { connection.await_reply() } else { connection.sum };
            self.settle(started, connection, reply);
            connection.next_argument = at + step;
        }
        Ok(())
    }
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
