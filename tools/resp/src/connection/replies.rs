//! The replies of a connection, in the order of its requests.

use std::sync::Arc;

use farside_resp::ReplyWriter;

use super::{Connection, OUTPUT_BYTES_MAX};
use crate::commands::error;

/// A reply of more bytes is moved to an empty output instead of copied.
const MOVED_BYTES_MIN: usize = 32 << 10;
/// The moving average of reply lengths covers about this many replies.
const REPLIES_AVERAGED: usize = 8;

/// A reply that is due.
pub(super) enum Reply {
    /// It waits for an operation.
    Awaited,
    Ready(Vec<u8>),
    /// As `Ready`, of several requests.
    Shared(Arc<[u8]>),
    /// It waits for operations, whose results are added up.
    Sum(Sum),
}

/// The reply of a command on several keys.
pub(super) struct Sum {
    /// The operations that it waits for.
    left: usize,
    /// All operations.
    of: usize,
    total: i64,
    /// Whether the reply is `OK` instead of the total.
    is_ok: bool,
    /// What the operations that count did to their keys, if they change any.
    done: Option<&'static str>,
    error: Option<String>,
}

impl Connection {
    /// Adds a reply that is awaited. Returns its number.
    pub(crate) fn await_reply(&mut self) -> u64 {
        self.replies.push_back(Reply::Awaited);
        self.first_reply + self.replies.len() as u64 - 1
    }

    /// Adds a reply that awaits the sum of so many operations: their number, or `OK`. An error says
    /// how many keys are `done` all the same.
    pub(crate) fn await_sum(&mut self, of: usize, is_ok: bool, done: Option<&'static str>) -> u64 {
        let number = self.await_reply();
        if let Some(reply) = self.replies.back_mut() {
            *reply = Reply::Sum(Sum { left: of, of, total: 0, is_ok, done, error: None });
        }
        number
    }

    /// Whether this reply is a sum.
    pub(crate) fn is_sum(&self, number: u64) -> bool {
        let at = (number - self.first_reply) as usize;
        matches!(self.replies.get(at), Some(Reply::Sum(_)))
    }

    /// Adds the result of an operation to a sum.
    pub(crate) fn add_to_sum(&mut self, number: u64, result: Result<i64, String>) {
        let at = (number - self.first_reply) as usize;
        let Some(Reply::Sum(sum)) = self.replies.get_mut(at) else { return };
        sum.left -= 1;
        match result {
            Ok(one) => sum.total += one,
            Err(text) => sum.error = sum.error.take().or(Some(text)),
        }
        if sum.left > 0 {
            return;
        }
        let Sum { of, total, is_ok, done, .. } = *sum;
        let error = sum.error.take().map(|text| error::after(text, total, of, done));
        let protocol = self.client.protocol;
        self.finish(number, |out| {
            let mut reply = ReplyWriter::new(out, protocol);
            match error {
                Some(error) => reply.error(error),
                None if is_ok => reply.ok(),
                None => reply.integer(total),
            }
        });
    }

    /// Writes a reply that was awaited.
    #[inline]
    pub(crate) fn finish<T>(&mut self, number: u64, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let at = (number - self.first_reply) as usize;
        let (result, bytes);
        if at == 0 {
            let before = self.output.len();
            result = write(&mut self.output);
            bytes = self.output.len() - before;
            self.replies.pop_front();
            self.first_reply += 1;
            self.take_ready();
        } else {
            let mut reply = Vec::new();
            result = write(&mut reply);
            bytes = reply.len();
            self.ready_bytes += bytes;
            if let Some(place) = self.replies.get_mut(at) {
                *place = Reply::Ready(reply);
            }
        }
        self.note_bytes(bytes);
        result
    }

    /// As [`Connection::finish`], for a reply that is encoded already.
    pub(crate) fn finish_with(&mut self, number: u64, reply: Vec<u8>) {
        let at = (number - self.first_reply) as usize;
        self.note_bytes(reply.len());
        self.ready_bytes += reply.len();
        if let Some(place) = self.replies.get_mut(at) {
            *place = Reply::Ready(reply);
        }
        self.take_ready();
    }

    /// As [`Connection::finish_with`], for a reply that other requests have, too.
    pub(crate) fn finish_shared(&mut self, number: u64, reply: Arc<[u8]>) {
        let at = (number - self.first_reply) as usize;
        self.note_bytes(reply.len());
        if let Some(place) = self.replies.get_mut(at) {
            *place = Reply::Shared(reply);
        }
        self.take_ready();
    }

    fn note_bytes(&mut self, bytes: usize) {
        let average = self.reply_bytes - self.reply_bytes / REPLIES_AVERAGED;
        self.reply_bytes = average + bytes / REPLIES_AVERAGED;
    }

    /// Moves replies that are next to the output, unless it is long.
    pub(super) fn take_ready(&mut self) {
        while self.output_bytes() < OUTPUT_BYTES_MAX {
            match self.replies.front_mut() {
                Some(Reply::Ready(reply)) => {
                    let reply = std::mem::take(reply);
                    self.ready_bytes -= reply.len();
                    if self.output.is_empty() && reply.len() >= MOVED_BYTES_MIN {
                        self.output = reply;
                    } else {
                        self.output.extend_from_slice(&reply);
                    }
                }
                Some(Reply::Shared(reply)) => self.output.extend_from_slice(reply),
                _ => return,
            }
            self.replies.pop_front();
            self.first_reply += 1;
        }
    }
}
