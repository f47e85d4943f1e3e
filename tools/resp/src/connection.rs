//! A connection: its input, the replies that it awaits in the order of its requests, its output.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use farside_resp::{ParserLimits, Progress, ProtocolError, ReplyWriter, RequestParser};

use crate::commands::{Arguments, ClientState, error};
use crate::gateway::WaitingInput;
use crate::stream::Stream;

/// The bytes that one call receives at most, unless a longer argument is on its way.
const READ_BYTES: usize = 16 << 10;
/// The longest room that is made for an argument before its bytes come.
const READ_BYTES_MAX: usize = 4 << 20;
/// Replies beyond these bytes wait until the client has taken some: no request is begun meanwhile.
/// Their bytes are received all the same, because a client may send all of its requests first.
const OUTPUT_BYTES_MAX: usize = 1 << 20;
/// The bytes that are received at most while the client takes no replies.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// A client that takes no replies for so many seconds loses its connection, if it has to take some
/// before the gateway reads on or closes it.
const STALL_TICKS_MAX: u32 = 10;
/// How many seconds a TLS handshake and the password may take together.
const LOGIN_TICKS_MAX: u32 = 10;
/// The replies of a connection that are awaited at once, at most.
const REPLIES_MAX: usize = 512;
/// Sent bytes beyond these are removed from the output, if they are the greater part of it.
const SENT_BYTES_MAX: usize = 64 << 10;
/// The bytes that a connection receives in one turn.
const RECEIVED_BYTES_MAX: usize = 1 << 20;
/// A buffer with more room than this is freed when it is empty. Ten thousand idle connections keep
/// two buffers each.
const KEPT_BYTES: usize = 32 << 10;
/// A reply of more bytes is moved to an empty output instead of copied.
const MOVED_BYTES_MIN: usize = 32 << 10;
/// The moving average of reply lengths covers about this many replies.
const REPLIES_AVERAGED: usize = 8;

/// Why a connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overdue {
    /// Its TLS handshake is not done, or its password is missing.
    Login,
    /// Its client does nothing.
    Idle,
    /// Its client has to take replies, and takes none.
    Replies,
}

/// What [`Connection::next_request`] found.
pub(crate) enum Input {
    /// A request is complete.
    Request,
    /// Bytes are missing.
    Awaited,
    /// No more bytes come.
    Ended,
    /// The connection is broken.
    Broken,
    /// Other connections have a turn before more bytes are received.
    TurnOver,
    /// The bytes are no request.
    Wrong(ProtocolError),
}

/// A connection.
pub(crate) struct Connection {
    pub(crate) stream: Stream,
    pub(crate) client: ClientState,
    parser: RequestParser,
    input: Vec<u8>,
    /// The place in the input where the present request begins.
    start: usize,
    /// The end of the present request, if it is complete.
    end: Option<usize>,
    /// What it has of the input that waits in all connections.
    waiting: WaitingInput,
    /// Nothing more is received before the client takes replies: too much input waits.
    is_held: bool,
    /// The next argument of the present request that a command on several keys begins.
    pub(crate) next_argument: usize,
    /// The reply of such a command.
    pub(crate) sum: u64,
    replies: VecDeque<Reply>,
    /// The number of the first of these replies.
    first_reply: u64,
    output: Vec<u8>,
    sent: usize,
    /// The bytes of replies that are ready, behind others that are not.
    ready_bytes: usize,
    /// Moving average of the bytes of a reply.
    reply_bytes: usize,
    /// Operations in flight.
    pub(crate) in_flight: usize,
    pub(crate) is_readable: bool,
    /// The end of the bytes has come, perhaps behind others.
    pub(crate) end_is_near: bool,
    is_writable: bool,
    has_unsent: bool,
    /// Whether bytes were sent in this second, and for how many before it none were.
    has_sent: bool,
    stalled_ticks: u32,
    /// Whether bytes came in this second, and for how many before it nothing has happened.
    has_received: bool,
    idle_ticks: u32,
    /// For how many seconds its client has not been logged in.
    login_ticks: u32,
    /// A helper runs a command of this connection.
    pub(crate) awaits_helper: bool,
    /// It is none of a stranger: its client has logged in, and sent a request.
    pub(crate) is_known: bool,
    /// The worker has it in one of its lists.
    pub(crate) is_listed: bool,
    /// It begins more requests in the next turn.
    pub(crate) goes_on: bool,
    /// The worker has it in the list of those with new replies.
    pub(crate) is_touched: bool,
    /// It does not go on before output is sent.
    pub(crate) is_paused: bool,
    /// It is broken, or the client has closed it.
    pub(crate) has_ended: bool,
}

impl Connection {
    pub(crate) fn new(
        stream: Stream,
        client: ClientState,
        limits: ParserLimits,
        waiting: WaitingInput,
    ) -> Self {
        Self {
            stream,
            client,
            parser: RequestParser::new(limits),
            input: Vec::new(),
            start: 0,
            end: None,
            waiting,
            is_held: false,
            next_argument: 0,
            sum: 0,
            replies: VecDeque::new(),
            first_reply: 0,
            output: Vec::new(),
            sent: 0,
            ready_bytes: 0,
            reply_bytes: 0,
            in_flight: 0,
            is_readable: true,
            end_is_near: false,
            is_writable: true,
            has_unsent: false,
            has_sent: false,
            stalled_ticks: 0,
            has_received: false,
            idle_ticks: 0,
            login_ticks: 0,
            awaits_helper: false,
            is_known: false,
            is_listed: false,
            goes_on: false,
            is_touched: false,
            is_paused: false,
            has_ended: false,
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.client.record.id
    }

    /// Finds the next request, or the present one again. Receives bytes if it has to.
    pub(crate) fn next_request(&mut self) -> Input {
        if self.end.is_some() {
            return Input::Request;
        }
        let mut received = 0;
        loop {
            let mut wanted = 1;
            if self.start < self.input.len() {
                let Self { parser, input, start, client, .. } = self;
                match parser.parse(input, *start, client.is_authenticated) {
                    Ok(Progress::Complete(end)) => {
                        self.end = Some(self.start + end);
                        return Input::Request;
                    }
                    Ok(Progress::Incomplete(bytes)) => wanted = bytes,
                    Err(error) => return Input::Wrong(error),
                }
            }
            if !self.is_readable {
                return Input::Awaited;
            }
            if received >= RECEIVED_BYTES_MAX {
                return Input::TurnOver;
            }
            match self.receive(wanted) {
                Ok(0) => return Input::Ended,
                Ok(bytes) => received += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_readable = false;
                    return Input::Awaited;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Input::Broken,
            }
        }
    }

    /// Whether bytes can be received although no request may begin: the client has not taken its
    /// replies. Awaited replies alone are no reason, because they come without the client's help.
    pub(crate) fn reads_ahead(&self) -> bool {
        self.is_readable && !self.is_writable && !self.is_held
    }

    /// Receives bytes that wait until the client has taken replies.
    pub(crate) fn read_ahead(&mut self) -> Input {
        let mut received = 0;
        while self.reads_ahead() {
            self.is_held = !self.has_room();
            if self.is_held {
                break;
            }
            if received >= RECEIVED_BYTES_MAX {
                return Input::TurnOver;
            }
            match self.receive(READ_BYTES) {
                // The next request finds the end again.
                Ok(0) => break,
                Ok(bytes) => received += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Input::Broken,
            }
            self.waiting.set(self.input.capacity());
        }
        Input::Awaited
    }

    /// Whether more input may wait.
    fn has_room(&self) -> bool {
        self.input.len() - self.start < WAITING_BYTES_MAX && self.waiting.has_room()
    }

    /// Notes that requests begin again: input that waited was used.
    pub(crate) fn note_waiting(&mut self) {
        self.is_held = false;
        if self.waiting.is_some() {
            let is_short = self.input.capacity() <= KEPT_BYTES;
            self.waiting.set(if is_short { 0 } else { self.input.capacity() });
        }
    }

    /// Receives bytes and forgets them: the connection ends when its replies are sent, and its
    /// client may send all of its requests first.
    pub(crate) fn discard_input(&mut self) -> Input {
        let mut received = 0;
        while self.is_readable {
            if received >= RECEIVED_BYTES_MAX {
                return Input::TurnOver;
            }
            (self.start, self.end) = (0, None);
            self.input.clear();
            match self.receive(READ_BYTES) {
                Ok(0) => self.is_readable = false,
                Ok(bytes) => received += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Input::Broken,
            }
        }
        Input::Awaited
    }

    /// Receives bytes, with room for this many.
    fn receive(&mut self, wanted: usize) -> io::Result<usize> {
        // What is left of the input is a part of one request, unless the connection reads ahead:
        // then it may be long, and is moved only if as much before it was used.
        if self.start > 0 && self.start >= self.input.len() - self.start {
            self.input.drain(..self.start);
            self.end = self.end.map(|end| end - self.start);
            self.start = 0;
        }
        self.input.reserve(wanted.clamp(READ_BYTES, READ_BYTES_MAX));
        let room = self.input.capacity() - self.input.len();
        let bytes = self.stream.read(&mut self.input)?;
        self.has_received = true;
        if bytes < room && bytes > 0 && !self.end_is_near && self.stream.short_read_is_all() {
            // The next bytes, or the end, come with another event.
            self.is_readable = false;
        }
        Ok(bytes)
    }

    /// The arguments of the present request.
    pub(crate) fn request(&self) -> Request<'_> {
        Request { parser: &self.parser, input: self.input.get(self.start..).unwrap_or_default() }
    }

    /// Calls `run` with the present request, and the client's state and output to change.
    /// The reply goes to its place behind those that are awaited.
    pub(crate) fn reply_now<T>(
        &mut self,
        run: impl FnOnce(&Request<'_>, &mut ClientState, &mut Vec<u8>) -> T,
    ) -> T {
        let Self { parser, input, start, client, output, replies, ready_bytes, .. } = self;
        let request = Request { parser, input: input.get(*start..).unwrap_or_default() };
        if replies.is_empty() {
            return run(&request, client, output);
        }
        let mut reply = Vec::new();
        let result = run(&request, client, &mut reply);
        *ready_bytes += reply.len();
        replies.push_back(Reply::Ready(reply));
        result
    }

    /// Replies with a simple string or an error, if `reply` returns one.
    pub(crate) fn try_reply_now(
        &mut self,
        reply: impl FnOnce(&Request<'_>, &mut ClientState) -> Option<Result<&'static str, String>>,
    ) -> bool {
        let Self { parser, input, start, client, .. } = self;
        let request = Request { parser, input: input.get(*start..).unwrap_or_default() };
        let Some(reply) = reply(&request, client) else { return false };
        self.reply_now(|_, client, out| {
            let mut out = ReplyWriter::new(out, client.protocol);
            match reply {
                Ok(text) => out.simple(text),
                Err(text) => out.error(text),
            }
        });
        true
    }

    /// Replies with an error.
    pub(crate) fn error_now(&mut self, text: impl AsRef<[u8]>) {
        self.reply_now(|_, client, out| ReplyWriter::new(out, client.protocol).error(text));
    }

    /// Ends the present request: its reply is awaited or written.
    pub(crate) fn end_request(&mut self) {
        if let Some(end) = self.end.take() {
            self.start = end;
        }
        if self.start >= self.input.len() {
            self.input.clear();
            self.start = 0;
            if self.input.capacity() > KEPT_BYTES {
                self.input = Vec::new();
            }
        }
        self.parser.reset();
        self.next_argument = 0;
    }

    /// Whether no request may begin, because too many replies wait to be sent, or are awaited.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        let awaited_bytes = self.in_flight * self.reply_bytes;
        let bytes = self.output.len() - self.sent + self.ready_bytes + awaited_bytes;
        bytes >= OUTPUT_BYTES_MAX || self.replies.len() >= REPLIES_MAX
    }

    pub(crate) fn has_output(&self) -> bool {
        self.output.len() > self.sent || self.has_unsent
    }

    /// The bytes that wait to be sent.
    pub(crate) fn output_bytes(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Notes that the socket has room again.
    pub(crate) fn set_writable(&mut self) {
        self.is_writable = true;
    }

    /// Sends output, as much as there is room for.
    pub(crate) fn send(&mut self) {
        // An answer of a handshake may wait without any output.
        self.has_unsent |= self.stream.wants_flush();
        let has_to_wait = self.has_ended || self.client.is_delayed;
        while self.is_writable && self.has_output() && !has_to_wait {
            let sent = match self.has_unsent {
                true => self.stream.flush().map(|()| 0),
                false => self.stream.write(&self.output[self.sent..]),
            };
            match sent {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.has_unsent = false;
                    self.has_sent = true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_writable = false,
                Err(_) => {
                    self.has_ended = true;
                    return;
                }
            }
            self.forget_sent();
        }
    }

    /// Removes output that was sent, and makes room for replies that are ready.
    fn forget_sent(&mut self) {
        if self.sent == self.output.len() {
            self.sent = 0;
            self.output.clear();
            if self.output.capacity() > KEPT_BYTES {
                self.output = Vec::new();
            }
            // Encrypted bytes may still wait for room.
            self.has_unsent = self.stream.wants_flush();
        } else if self.sent >= SENT_BYTES_MAX && self.sent * 2 >= self.output.len() {
            // A client that is slower than its replies never takes all of them.
            self.output.drain(..self.sent);
            self.sent = 0;
        }
        self.take_ready();
    }

    /// Notes that a second has passed. Returns why the connection has to end, if it has to.
    pub(crate) fn tick(&mut self, idle_ticks_max: Option<u32>) -> Option<Overdue> {
        self.login_ticks = if self.has_logged_in() { 0 } else { self.login_ticks + 1 };
        if self.login_ticks > LOGIN_TICKS_MAX {
            return Some(Overdue::Login);
        }
        let has_sent = std::mem::take(&mut self.has_sent);
        let is_at_work = self.in_flight > 0 || self.awaits_helper;
        let has_moved = std::mem::take(&mut self.has_received) || has_sent || is_at_work;
        self.idle_ticks = if has_moved { 0 } else { self.idle_ticks.saturating_add(1) };
        if idle_ticks_max.is_some_and(|max| self.idle_ticks > max) {
            return Some(Overdue::Idle);
        }
        let is_stalled = !has_sent && self.has_output();
        self.stalled_ticks = if is_stalled { self.stalled_ticks.saturating_add(1) } else { 0 };
        self.is_held &= !self.has_room();
        let has_to_take = self.is_held || self.client.is_closing;
        (has_to_take && self.stalled_ticks > STALL_TICKS_MAX).then_some(Overdue::Replies)
    }

    /// Whether the handshake is done, and the password given, as far as they are needed.
    pub(crate) fn has_logged_in(&self) -> bool {
        self.client.is_authenticated && !self.stream.is_handshaking()
    }

    /// Whether nothing is left to do before it is closed.
    pub(crate) fn is_done(&self) -> bool {
        let is_quiet = self.replies.is_empty() && !self.has_output() && !self.awaits_helper;
        self.has_ended || self.client.is_closing && is_quiet
    }
}

/// A request of a connection.
pub(crate) struct Request<'c> {
    parser: &'c RequestParser,
    input: &'c [u8],
}

impl Request<'_> {
    /// The length of an argument that is too long for the store, if there is one.
    pub(crate) fn too_long(&self) -> Option<usize> {
        self.parser.too_long()
    }
}

impl Arguments for Request<'_> {
    #[inline]
    fn count(&self) -> usize {
        self.parser.count()
    }

    #[inline]
    fn get(&self, number: usize) -> &[u8] {
        self.parser.argument(self.input, number)
    }
}

/// A reply that is due.
enum Reply {
    /// It waits for an operation.
    Awaited,
    Ready(Vec<u8>),
    /// As `Ready`, of several requests.
    Shared(Arc<[u8]>),
    /// It waits for operations, whose results are added up.
    Sum(Sum),
}

/// The reply of a command on several keys.
struct Sum {
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
    fn take_ready(&mut self) {
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
