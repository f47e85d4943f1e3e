//! Memcached, by its text protocol ("basic text" in <https://docs.memcached.org/protocols/>). A
//! client library that could have requests of different kinds in flight would bring an async
//! runtime.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use farside_bench::keys::Key;
use farside_bench::store::Action;

use super::ServiceError;
use super::requests::Protocol;

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
    pub fn connect(socket: &Path) -> Result<Self, ServiceError> {
        let stream = BufReader::with_capacity(BUFFER_BYTES, UnixStream::connect(socket)?);
        Ok(Self { stream, requests: Vec::new(), line: Vec::new() })
    }

    /// The number of stored values.
    ///
    /// # Errors
    /// Also if requests without an answer are in flight.
    pub fn items(&mut self) -> Result<u64, ServiceError> {
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

    fn read_line(&mut self) -> Result<(), ServiceError> {
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

    fn send(&mut self) -> Result<(), ServiceError> {
        self.stream.get_mut().write_all(&self.requests)?;
        self.requests.clear();
        Ok(())
    }

    fn answer(&mut self, action: Action, value: &mut Vec<u8>) -> Result<bool, ServiceError> {
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
