//! A gateway or a redis-server under test, and a client that shows the bytes of replies.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use farside_tests::command::command;
use farside_tests::{ServerProcess, free_tcp_address, send_signal, wait_until};
use rustix::process::Signal;

/// How long a reply or a start may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A process that serves clients of redis at a port.
pub(super) struct RespServer {
    pub(super) child: Child,
    /// `127.0.0.1` and the port.
    pub(super) address: String,
    /// What a gateway has logged.
    log: Option<File>,
}

impl RespServer {
    /// A gateway with these arguments, and the server of 64 MiB that it uses.
    pub(super) fn with_server(arguments: &[&str]) -> (ServerProcess, Self) {
        let server = ServerProcess::start("--memory 64MiB");
        let gateway = Self::gateway(&server, arguments);
        (server, gateway)
    }

    /// Starts kv-resp for this server, with more arguments.
    pub(super) fn gateway<A: AsRef<OsStr>>(server: &ServerProcess, arguments: &[A]) -> Self {
        Self::gateway_of(&server.address(), arguments)
    }

    /// As [`RespServer::gateway`], for a store at this address.
    pub(super) fn gateway_of<A: AsRef<OsStr>>(store: &str, arguments: &[A]) -> Self {
        let address = free_tcp_address();
        let mut gateway = command("kv-resp");
        gateway.args(["--server", store, "--listen", &address]).args(arguments);
        let log = tempfile::tempfile().unwrap();
        gateway.stderr(log.try_clone().unwrap());
        let mut started = Self::spawn(&mut gateway, &address);
        started.log = Some(log);
        started
    }

    /// Starts a redis-server; `None` without the program.
    pub(super) fn redis(folder: &Path) -> Option<Self> {
        let address = free_tcp_address();
        let port = address.rsplit(':').next().unwrap();
        let mut redis = Command::new("redis-server");
        redis.args(["--port", port, "--save", "", "--databases", "1"]).current_dir(folder);
        redis.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null());
        let is_there = Command::new("redis-server").arg("--version").output().is_ok();
        is_there.then(|| Self::spawn(&mut redis, &address))
    }

    fn spawn(program: &mut Command, address: &str) -> Self {
        let address = address.strip_prefix("tcp://").unwrap().to_owned();
        let child = program.spawn().unwrap();
        wait_until("it listens", TIMEOUT, || TcpStream::connect(&address).is_ok());
        Self { child, address, log: None }
    }

    /// The memory that the process uses for itself, in bytes.
    pub(super) fn own_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        field.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    /// What a gateway has logged so far.
    pub(super) fn log(&self) -> String {
        let log = self.log.as_ref().unwrap();
        let mut bytes = vec![0; log.metadata().unwrap().len() as usize];
        // Not from the position, at which the gateway goes on writing.
        log.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn port(&self) -> &str {
        self.address.rsplit(':').next().unwrap()
    }

    pub(super) fn connect(&self) -> RespClient {
        let socket = TcpStream::connect(&self.address).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.set_write_timeout(Some(TIMEOUT)).unwrap();
        RespClient { socket, received: Vec::new() }
    }
}

impl Drop for RespServer {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            send_signal(&self.child, Signal::TERM);
            self.child.wait().unwrap();
        }
        if self.log.is_some() && thread::panicking() {
            println!("the gateway's log: {}", self.log());
        }
    }
}

/// A connection that shows the bytes of replies.
pub(super) struct RespClient {
    pub(super) socket: TcpStream,
    received: Vec<u8>,
}

impl RespClient {
    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Receives more bytes. Returns false at the end.
    fn fill(&mut self) -> bool {
        let mut bytes = [0; 1 << 16];
        let read = match self.socket.read(&mut bytes) {
            Ok(read) => read,
            // The server has closed the connection before it has read everything.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => 0,
            Err(error) => panic!("{error} after {}", self.received.escape_ascii()),
        };
        self.received.extend_from_slice(&bytes[..read]);
        read > 0
    }

    /// All bytes until the server closes the connection.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.received)
    }

    /// The bytes of the next reply.
    pub(super) fn reply(&mut self) -> Vec<u8> {
        loop {
            if let Some(end) = reply_end(&self.received, 0) {
                return self.received.drain(..end).collect();
            }
            assert!(self.fill(), "closed after {}", self.received.escape_ascii());
        }
    }

    /// The keys of all calls of SCAN with these options.
    pub(super) fn scan(&mut self, options: &str) -> Vec<String> {
        let (mut cursor, mut keys) = ("0".to_owned(), Vec::new());
        loop {
            let reply = self.say(&format!("SCAN {cursor} {options}"));
            let mut lines = reply.split("\r\n").filter(|line| !line.starts_with(['$', '*']));
            cursor = lines.next().unwrap().to_owned();
            keys.extend(lines.filter(|line| !line.is_empty()).map(str::to_owned));
            if cursor == "0" {
                return keys;
            }
        }
    }

    /// Sends a request of these words and returns the bytes of its reply.
    pub(super) fn ask<W: AsRef<[u8]>>(&mut self, words: &[W]) -> Vec<u8> {
        self.send(&request(words));
        self.reply()
    }

    /// As [`RespClient::ask`], for words between spaces, and a reply that is text.
    pub(super) fn say(&mut self, words: &str) -> String {
        let reply = self.ask(&words.split(' ').collect::<Vec<_>>());
        String::from_utf8_lossy(&reply).into_owned()
    }
}

/// Encodes a request.
pub(super) fn request<W: AsRef<[u8]>>(words: &[W]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        let word = word.as_ref();
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// The end of the reply that begins at `start`; `None` if it is not complete.
fn reply_end(bytes: &[u8], start: usize) -> Option<usize> {
    let line = bytes[start..].windows(2).position(|two| two == b"\r\n")?;
    let end = start + line + 2;
    let number = || str::from_utf8(&bytes[start + 1..start + line]).unwrap().parse::<i64>();
    let elements = match bytes[start] {
        b'$' | b'=' => {
            let Ok(length) = usize::try_from(number().unwrap()) else { return Some(end) };
            let end = end + length + 2;
            return (bytes.len() >= end).then_some(end);
        }
        b'*' | b'~' => number().unwrap(),
        b'%' => 2 * number().unwrap(),
        _ => 0,
    };
    (0..elements)
        .try_fold(end, |end, _| if end < bytes.len() { reply_end(bytes, end) } else { None })
}
