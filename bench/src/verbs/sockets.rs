//! The rates of plain sockets of this host, which a report over TCP shows beside a result: what a
//! program reaches that only moves the bytes.
//!
//! Each connection has a thread at both ends. The client keeps as many requests in flight as the
//! result's pipeline. A READ is a short request and a long reply, a WRITE a long request and a
//! short reply. The same memory is sent again and again, and received into the same memory.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use farside_config::ClientConfig;
use farside_control::address::Address;
use farside_control::attach::CONNECT_TIMEOUT;
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};

use crate::command::Interrupt;
use crate::phases::start;
use crate::recorder::Recorder;
use crate::workload::Kind;
use crate::{Error, Result};

/// The length of the short messages: that of a READ's request over TCP.
const SHORT_BYTES: usize = 24;

/// The rates of plain sockets, in messages a second, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SocketRates {
    /// Short requests with long replies.
    #[serde(rename = "socket_read_ops_s")]
    pub read: f64,
    /// Long requests with short replies.
    #[serde(rename = "socket_write_ops_s")]
    pub write: f64,
}

/// What each connection does.
#[derive(Clone, Copy)]
pub struct SocketLoad {
    /// The length of a long message, in bytes.
    pub bytes: usize,
    /// The number of connections.
    pub connections: usize,
    /// How many requests of each are in flight.
    pub depth: u16,
    /// How long to measure, both directions together.
    pub duration: Duration,
}

/// Whether plain sockets of this host can be compared with the server's: it is at an address of TCP
/// that does not leave the host.
pub fn are_comparable(config: &ClientConfig) -> bool {
    let address = config.server.as_deref().and_then(|server| server.parse().ok());
    let Some(address @ Address::Tcp { .. }) = address else { return false };
    if config.tls.is_used() {
        return false;
    }
    let resolved = address.resolve(CONNECT_TIMEOUT);
    resolved.is_ok_and(|all| all.first().is_some_and(|address| address.ip().is_loopback()))
}

impl SocketRates {
    /// Measures both directions, one after the other.
    pub fn measure(load: SocketLoad, interrupt: &Interrupt) -> Result<Self> {
        let half = SocketLoad { duration: load.duration / 2, ..load };
        Ok(Self {
            read: rate(half, (SHORT_BYTES, load.bytes), interrupt)?,
            write: rate(half, (load.bytes, SHORT_BYTES), interrupt)?,
        })
    }

    /// The rate that these operations would have, in operations a second, if each were one message.
    pub fn mix_ops_s(&self, recorder: &Recorder) -> f64 {
        let seconds = recorder.kinds().map(|(kind, record)| {
            let seconds_each = match kind {
                Kind::Get => 1.0 / self.read,
                Kind::Put | Kind::Insert => 1.0 / self.write,
                Kind::Rmw => 1.0 / self.read + 1.0 / self.write,
            };
            record.latencies.count() as f64 * seconds_each
        });
        recorder.operations() as f64 / seconds.sum::<f64>()
    }
}

/// Plain sockets on which values go to and fro, one after the other. Threads at the other ends
/// answer until this is dropped.
pub(super) struct ValueSockets {
    /// Short requests with long replies.
    reading: TcpStream,
    /// Long requests with short replies.
    writing: TcpStream,
}

impl ValueSockets {
    /// Sockets for values of this length.
    pub(super) fn connect(value_bytes: usize) -> Result<Self> {
        let connect = |lengths| -> Result<TcpStream> {
            let (client, server) = connected_pair().map_err(failed())?;
            let answering = thread::Builder::new().spawn(move || answer(server, lengths));
            answering.map_err(failed())?;
            Ok(client)
        };
        let reading = connect((SHORT_BYTES, value_bytes))?;
        Ok(Self { reading, writing: connect((value_bytes, SHORT_BYTES))? })
    }

    /// Receives a value.
    pub(super) fn read(&mut self, value: &mut [u8]) -> Result<()> {
        self.reading.write_all(&[1; SHORT_BYTES]).map_err(failed())?;
        receive(&self.reading, value).map_err(failed())
    }

    /// Sends a value, and waits for the answer.
    pub(super) fn write(&mut self, value: &[u8]) -> Result<()> {
        self.writing.write_all(value).map_err(failed())?;
        receive(&self.writing, &mut [0; SHORT_BYTES]).map_err(failed())
    }
}

fn failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::system("measuring plain sockets")
}

/// Both ends of a connection.
fn connected_pair() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    Ok((client, server))
}

/// Requests a second, of all connections together.
fn rate(load: SocketLoad, lengths: (usize, usize), interrupt: &Interrupt) -> Result<f64> {
    let connect = |_| connected_pair();
    let pairs = (0..load.connections).map(connect).collect::<std::io::Result<Vec<_>>>();
    let pairs = pairs.map_err(failed())?;
    let rates = thread::scope(|scope| {
        let begin = |(client, server)| {
            start(scope, move || answer(server, lengths))?;
            start(scope, move || ask(client, lengths, load, interrupt))
        };
        let clients = pairs.into_iter().map(begin).collect::<Result<Vec<_>>>()?;
        let join = |client: thread::ScopedJoinHandle<'_, Result<f64>>| {
            client.join().unwrap_or(Err(Error::Panicked))
        };
        clients.into_iter().map(join).collect::<Result<Vec<f64>>>()
    })?;
    Ok(rates.iter().sum())
}

/// Answers requests until the client hangs up.
fn answer(mut stream: TcpStream, (request_bytes, reply_bytes): (usize, usize)) {
    let (mut request, reply) = (vec![0; request_bytes], vec![1; reply_bytes]);
    while receive(&stream, &mut request).is_ok() && stream.write_all(&reply).is_ok() {}
}

/// Keeps requests in flight for the load's time. Returns the replies a second.
fn ask(
    mut stream: TcpStream,
    (request_bytes, reply_bytes): (usize, usize),
    load: SocketLoad,
    interrupt: &Interrupt,
) -> Result<f64> {
    let (request, mut reply) = (vec![1; request_bytes], vec![0; reply_bytes]);
    for _ in 0..load.depth {
        stream.write_all(&request).map_err(failed())?;
    }
    let (started, mut replies) = (Instant::now(), 0);
    while started.elapsed() < load.duration {
        receive(&stream, &mut reply).map_err(failed())?;
        stream.write_all(&request).map_err(failed())?;
        replies += 1;
        interrupt.check()?;
    }
    Ok(f64::from(replies) / started.elapsed().as_secs_f64())
}

/// Receives until `into` is full, with as few system calls as possible.
fn receive(stream: &TcpStream, into: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        match recv(stream.as_fd(), &mut into[filled..], RecvFlags::WAITALL) {
            Ok((_, 0)) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok((_, bytes)) => filled += bytes,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_have_a_rate_and_end() {
        let duration = Duration::from_millis(60);
        for depth in [1, 8] {
            let load = SocketLoad { bytes: 1 << 20, connections: 2, depth, duration };
            let rates = SocketRates::measure(load, &Interrupt::default()).unwrap();
            assert!(rates.read > 0.0 && rates.write > 0.0, "{rates:?}");
        }
    }

    #[test]
    fn values_go_to_and_fro() {
        let bytes = 3 << 20;
        let mut sockets = ValueSockets::connect(bytes).unwrap();
        let mut value = vec![0; bytes];
        for _ in 0..2 {
            sockets.read(&mut value).unwrap();
            assert!(value.iter().all(|byte| *byte == 1));
            value.fill(0);
            sockets.write(&value).unwrap();
        }
    }

    #[test]
    fn only_a_server_of_this_host_is_comparable() {
        let config = |server: &str| ClientConfig {
            server: Some(server.to_owned()),
            ..ClientConfig::default()
        };
        assert!(are_comparable(&config("tcp://127.0.0.1:7400")));
        for other in ["tcp://192.0.2.1:7400", "shm:///run/kv.sock", "rdma://127.0.0.1:7400"] {
            assert!(!are_comparable(&config(other)), "{other}");
        }
    }
}
