//! Servers whose CPU executes every operation: redis, valkey and memcached, if they are installed.
//! The driver reaches them over a Unix socket. A pipeline sends its requests together when one is
//! waited for, and reads the answers together, so one system call serves many requests.
//!
//! Memcached is used by its text protocol ("basic text" in
//! <https://docs.memcached.org/protocols/>). A client library that could have requests of different
//! kinds in flight would bring an async runtime.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use farside::{Counters, PipelineFull};
use farside_bench::command::Interrupt;
use farside_bench::daemon::{Daemon, find_program};
use farside_bench::records::{KEY_BYTES, Key};
use farside_bench::store::{Action, Completed, MeasuredStore, Outcome, Pipelined};
use redis::{Client, Cmd, Connection, Value};

/// Why an operation of a service fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The socket broke, or the server closed it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// An error of the client library of redis and valkey.
    #[error(transparent)]
    Redis(#[from] ::redis::RedisError),
    /// An answer that does not fit the request.
    #[error("the server answered {0}, which does not fit the request")]
    Answer(String),
}

/// How many bytes a server stores for a record at most, besides its key and value.
const RECORD_OVERHEAD_BYTES: u64 = 256;
const MIB: u64 = 1 << 20;
/// The memory of memcached that is not for records, in MiB.
const MEMCACHED_MIB: u64 = 64;

/// Whether the server program of this name is installed.
pub fn is_installed(program: &str) -> bool {
    find_program(program, None).is_some()
}

/// Starts a server with room for this number of records. It stores nothing on disk.
pub fn start(
    program: &str,
    records: u64,
    value_bytes: u32,
    interrupt: &Interrupt,
) -> farside_bench::Result<Daemon> {
    let record = KEY_BYTES as u64 + u64::from(value_bytes) + RECORD_OVERHEAD_BYTES;
    start_with(program, records * record / MIB + MEMCACHED_MIB, interrupt)
}

/// Starts a server. The memory is that of memcached; the others have no limit.
pub fn start_with(
    program: &str,
    memory_mib: u64,
    interrupt: &Interrupt,
) -> farside_bench::Result<Daemon> {
    let path = find_program(program, None).unwrap_or_else(|| program.into());
    let arguments = |socket: &Path| {
        let socket = socket.display().to_string();
        let mib = memory_mib.to_string();
        let arguments = match program {
            // As root memcached starts only with -u. Everything else is memcached's default.
            "memcached" => vec!["-s", &socket, "-m", &mib, "-u", "root"],
            _ => vec!["--port", "0", "--unixsocket", &socket, "--save", "", "--appendonly", "no"],
        };
        arguments.into_iter().map(str::to_owned).collect()
    };
    let answers = |socket: &Path| UnixStream::connect(socket).is_ok();
    Daemon::start(path, arguments, answers, interrupt)
}

type Result<T> = std::result::Result<T, ServiceError>;

/// The protocol of a server.
pub trait Protocol {
    /// Prepares a request. It is sent after the requests that were prepared before.
    fn request(&mut self, action: Action, key: &Key, value: &[u8]);

    /// Sends the prepared requests.
    fn send(&mut self) -> Result<()>;

    /// Waits for the answer to the oldest request without one. Returns whether the key was as
    /// required. The value of a GET goes into the buffer.
    fn answer(&mut self, action: Action, value: &mut Vec<u8>) -> Result<bool>;
}

/// A store: a connection to a server of this protocol.
pub struct Requests<P> {
    protocol: P,
    depth: usize,
    value: Vec<u8>,
    /// Always zero, because no request uses a fabric.
    counters: Counters,
}

impl<P: Protocol> Requests<P> {
    /// A store with up to `depth` requests in flight in a pipeline.
    pub fn new(protocol: P, depth: u16) -> Self {
        let counters = Counters::default();
        Self { protocol, depth: depth.into(), value: Vec::new(), counters }
    }
}

impl<P: Protocol> MeasuredStore for Requests<P> {
    type Error = ServiceError;
    type Pipeline<'s>
        = RequestPipeline<'s, P>
    where
        P: 's;

    fn perform<'v>(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
        found: &'v mut Vec<u8>,
    ) -> Result<Outcome<'v>> {
        self.protocol.request(action, key, value);
        self.protocol.send()?;
        let applied = self.protocol.answer(action, found)?;
        Ok(action.outcome(applied, found))
    }

    fn pipeline(&mut self) -> Result<RequestPipeline<'_, P>> {
        let depth = self.depth;
        Ok(RequestPipeline {
            requests: self,
            started: VecDeque::with_capacity(depth),
            sent: 0,
            free: (0..depth).rev().collect(),
        })
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// Requests in flight.
pub struct RequestPipeline<'s, P: Protocol> {
    requests: &'s mut Requests<P>,
    /// The lanes and actions of the requests without an answer, the oldest first.
    started: VecDeque<(usize, Action)>,
    /// How many of these requests were sent.
    sent: usize,
    /// The lanes without a request.
    free: Vec<usize>,
}

impl<P: Protocol> RequestPipeline<'_, P> {
    fn take(&mut self) -> Option<Completed<'_, ServiceError>> {
        let (lane, action) = self.started.pop_front()?;
        self.sent -= 1;
        self.free.push(lane);
        let Requests { protocol, value, counters, .. } = &mut *self.requests;
        let applied = protocol.answer(action, value);
        let result = applied.map(|applied| action.outcome(applied, value));
        Some(Completed { lane, result, counters: Some(counters) })
    }
}

impl<P: Protocol> Pipelined for RequestPipeline<'_, P> {
    type Error = ServiceError;

    fn start(
        &mut self,
        action: Action,
        key: &Key,
        value: &[u8],
    ) -> std::result::Result<usize, PipelineFull> {
        let lane = self.free.pop().ok_or(PipelineFull)?;
        self.requests.protocol.request(action, key, value);
        self.started.push_back((lane, action));
        Ok(lane)
    }

    fn wait(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 && !self.started.is_empty() {
            if let Err(error) = self.requests.protocol.send() {
                let (lane, _) = self.started.pop_front()?;
                let counters = Some(&self.requests.counters);
                return Some(Completed { lane, result: Err(error), counters });
            }
            self.sent = self.started.len();
        }
        self.take()
    }

    /// Takes an answer to a request that was sent. Such an answer comes soon, because requests that
    /// are sent together are answered together.
    fn poll(&mut self) -> Option<Completed<'_, ServiceError>> {
        if self.sent == 0 { None } else { self.take() }
    }

    fn in_flight(&self) -> usize {
        self.started.len()
    }

    fn depth(&self) -> usize {
        self.requests.depth
    }
}

impl<P: Protocol> Drop for RequestPipeline<'_, P> {
    /// Reads the answers that are still due, so that no later request takes one of these answers
    /// for its own.
    fn drop(&mut self) {
        while let Some(Completed { result: Ok(_), .. }) = self.wait() {}
    }
}

/// A connection to redis or valkey.
pub struct RedisProtocol {
    connection: Connection,
    command: Cmd,
    packed: Vec<u8>,
}

impl RedisProtocol {
    /// Connects to the server that listens at this socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let client = Client::open(format!("unix://{}", socket.display()))?;
        let connection = client.get_connection()?;
        Ok(Self { connection, command: Cmd::new(), packed: Vec::new() })
    }
}

impl Protocol for RedisProtocol {
    fn request(&mut self, action: Action, key: &Key, value: &[u8]) {
        let command = &mut self.command;
        command.clear();
        match action {
            Action::Get => command.arg("GET").arg(&key[..]),
            Action::Put => command.arg("SET").arg(&key[..]).arg(value),
            Action::Insert => command.arg("SETNX").arg(&key[..]).arg(value),
        };
        command.write_packed_command(&mut self.packed);
    }

    fn send(&mut self) -> Result<()> {
        self.connection.send_packed_command(&self.packed)?;
        self.packed.clear();
        Ok(())
    }

    fn answer(&mut self, _: Action, value: &mut Vec<u8>) -> Result<bool> {
        match self.connection.recv_response()? {
            Value::BulkString(found) => {
                *value = found;
                Ok(true)
            }
            Value::Nil => Ok(false),
            Value::Okay => Ok(true),
            Value::Int(count) => Ok(count > 0),
            other => Err(ServiceError::Answer(format!("{other:?}"))),
        }
    }
}

/// A connection to memcached.
pub struct MemcachedProtocol {
    stream: BufReader<UnixStream>,
    requests: Vec<u8>,
    line: Vec<u8>,
}

/// The end of every line and value.
const LINE_END: &[u8] = b"\r\n";
/// The size of the read buffer, in bytes, as in the client library of redis.
const BUFFER_BYTES: usize = 16 << 10;

impl MemcachedProtocol {
    /// Connects to the server that listens at this socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = BufReader::with_capacity(BUFFER_BYTES, UnixStream::connect(socket)?);
        Ok(Self { stream, requests: Vec::new(), line: Vec::new() })
    }

    /// The number of stored values.
    ///
    /// # Errors
    /// Also if requests without an answer are in flight.
    pub fn items(&mut self) -> Result<u64> {
        self.stream.get_mut().write_all(b"stats\r\n")?;
        let mut items = None;
        loop {
            self.read_line()?;
            match self.line.strip_prefix(b"STAT ") {
                Some(line) => {
                    let count = line.strip_prefix(b"curr_items ");
                    let count = count.and_then(|count| str::from_utf8(count).ok()?.parse().ok());
                    items = items.or(count);
                }
                None if self.line == b"END" => return items.ok_or_else(|| self.unexpected()),
                None => return Err(self.unexpected()),
            }
        }
    }

    fn read_line(&mut self) -> Result<()> {
        self.line.clear();
        self.stream.read_until(b'\n', &mut self.line)?;
        match self.line.strip_suffix(LINE_END) {
            Some(line) => self.line.truncate(line.len()),
            None => return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()),
        }
        Ok(())
    }

    fn unexpected(&self) -> ServiceError {
        ServiceError::Answer(self.line.escape_ascii().to_string())
    }
}

impl Protocol for MemcachedProtocol {
    fn request(&mut self, action: Action, key: &Key, value: &[u8]) {
        let command: &[u8] = match action {
            Action::Get => b"get ",
            Action::Put => b"set ",
            Action::Insert => b"add ",
        };
        let requests = &mut self.requests;
        requests.extend_from_slice(command);
        requests.extend_from_slice(key);
        if matches!(action, Action::Put | Action::Insert) {
            // The zeros are flags and expiry. Writing to a Vec does not fail.
            let _ = write!(requests, " 0 0 {}\r\n", value.len());
            requests.extend_from_slice(value);
        }
        requests.extend_from_slice(LINE_END);
    }

    fn send(&mut self) -> Result<()> {
        self.stream.get_mut().write_all(&self.requests)?;
        self.requests.clear();
        Ok(())
    }

    fn answer(&mut self, action: Action, value: &mut Vec<u8>) -> Result<bool> {
        self.read_line()?;
        match (action, &self.line[..]) {
            (Action::Get, b"END") | (Action::Insert, b"NOT_STORED") => Ok(false),
            (Action::Put | Action::Insert, b"STORED") => Ok(true),
            (Action::Get, line) => {
                // VALUE <key> <flags> <bytes>
                let bytes = line.strip_prefix(b"VALUE ").and_then(|line| {
                    let length = line.rsplit(|byte| *byte == b' ').next()?;
                    std::str::from_utf8(length).ok()?.parse::<u32>().ok()
                });
                let bytes = bytes.ok_or_else(|| self.unexpected())? as usize;
                value.resize(bytes + LINE_END.len(), 0);
                self.stream.read_exact(value)?;
                value.truncate(bytes);
                self.read_line()?;
                if self.line == b"END" { Ok(true) } else { Err(self.unexpected()) }
            }
            _ => Err(self.unexpected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use farside_bench::records;
    use farside_bench::store::{Action, MeasuredStore, Pipelined};

    use super::{MemcachedProtocol, Requests, *};
    use crate::test_operations::TestOperations;

    /// Sends these answers to the first client, whatever it asks. Returns the body's result and
    /// what the client sent.
    fn with_answers<T>(answers: &str, body: impl FnOnce(&Path) -> T) -> (T, String) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(answers.as_bytes()).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut sent = String::new();
                stream.read_to_string(&mut sent).unwrap();
                sent
            });
            let result = body(&socket);
            (result, server.join().unwrap())
        })
    }

    fn memcached(socket: &Path) -> Requests<MemcachedProtocol> {
        Requests::new(MemcachedProtocol::connect(socket).unwrap(), 8)
    }

    #[test]
    fn memcached_answers_one_by_one() {
        let key = &records::key_of(7);
        let name = str::from_utf8(key).unwrap();
        let answers =
            format!("END\r\nSTORED\r\nVALUE {name} 0 5\r\na\r\nbc\r\nEND\r\nNOT_STORED\r\n");
        let ((), sent) = with_answers(&answers, |socket| {
            let mut store = memcached(socket);
            let mut value = b"old".to_vec();
            assert!(!store.get(key, &mut value).unwrap());
            store.change(Action::Put, key, b"a\r\nbc").unwrap();
            assert!(store.get(key, &mut value).unwrap());
            assert_eq!(value, b"a\r\nbc");
            assert!(!store.change(Action::Insert, key, b"").unwrap());
            assert!(
                store.change(Action::Put, key, b"").is_err(),
                "the server closed the connection"
            );
        });
        let asked = format!(
            "get {name}\r\nset {name} 0 0 5\r\na\r\nbc\r\nget {name}\r\nadd {name} 0 0 0\r\n\r\n\
         set {name} 0 0 0\r\n\r\n"
        );
        assert_eq!(sent, asked);
    }

    #[test]
    fn memcached_answers_in_flight_come_in_order() {
        let (found, _) = with_answers("STORED\r\nEND\r\nVALUE k 0 1\r\nx\r\nEND\r\n", |socket| {
            let mut store = memcached(socket);
            let mut pipeline = store.pipeline().unwrap();
            let lanes = [
                pipeline.start(Action::Put, &records::key_of(1), b"x"),
                pipeline.start(Action::Get, &records::key_of(2), &[]),
            ]
            .map(std::result::Result::unwrap);
            assert!(pipeline.poll().is_none(), "nothing is sent before a wait");
            let stored = pipeline.wait().unwrap();
            assert_eq!((stored.lane, stored.result.unwrap().applied), (lanes[0], true));
            // This request is sent at the next wait.
            let third = pipeline.start(Action::Get, &records::key_of(1), &[]).unwrap();
            let absent = pipeline.poll().unwrap();
            assert_eq!((absent.lane, absent.result.unwrap().value), (lanes[1], None));
            assert!(pipeline.poll().is_none());
            assert_eq!(pipeline.in_flight(), 1);
            let found = pipeline.wait().unwrap();
            assert_eq!(found.lane, third);
            found.result.unwrap().value.unwrap().to_vec()
        });
        assert_eq!(found, b"x");
    }

    #[test]
    fn an_answer_that_cannot_be_understood_is_an_error() {
        for answer in ["ERROR\r\n", "VALUE k 0 x\r\n", "VALUE k 0 2\r\nabc\r\nEND\r\n", "END", ""] {
            let (result, _) = with_answers(answer, |socket| {
                memcached(socket).get(&records::key_of(1), &mut Vec::new())
            });
            assert!(result.is_err(), "{answer:?}");
        }
    }

    #[test]
    fn a_server_that_cannot_start_says_why() {
        let interrupt = Interrupt::default();
        let arguments = |_: &Path| vec!["nonsense".to_owned()];
        let failed = Daemon::start("/bin/ls".into(), arguments, |_| false, &interrupt);
        let message = failed.err().unwrap().to_string();
        assert!(message.contains("nonsense"), "{message}");
    }
}
