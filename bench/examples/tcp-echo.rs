//! The floor of a round trip over TCP: a server that counts requests and answers as many bytes, and
//! a client that only sends and receives.
//!
//! - `tcp-echo serve ADDRESS REQUEST_BYTES REPLY_BYTES` answers each request of REQUEST_BYTES with
//!   REPLY_BYTES, in one thread with epoll, as a thread of kv-server does.
//! - `tcp-echo ask ADDRESS CONNECTIONS DEPTH SECONDS REPLY_BYTES REQUEST` has one thread for each
//!   connection. It sends DEPTH requests with one system call, and receives the DEPTH replies. It
//!   prints the requests a second of all threads. REQUEST is a number of bytes, or a text for redis
//!   and memcached: with the escapes `\r` and `\n`, and with `%` in place of a key. The keys are
//!   those of `kv-bench ycsb --workload c --records 100000`.
//! - `tcp-echo fill ADDRESS REPLY_BYTES REQUEST` asks once for each of these keys.
//!
//! `tools/scripts/bench-tcp.sh` runs it.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside_bench::distribution::{Distribution, Shape, Skew};
use farside_bench::operations::{Generator, Loader, Source};
use farside_bench::pattern::Pattern;
use farside_bench::records::{RecordCounter, ValueSize};
use farside_bench::workload::{Kind, Workload};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const BUFFER_BYTES: usize = 256 << 10;
const EVENTS_MAX: usize = 64;
const RECORDS: u64 = 100_000;
/// How many batches a connection has. It sends them again and again.
const BATCHES: usize = 1000;
/// The number of the listener in epoll's events. Connections have their indices.
const LISTENER: u64 = u64::MAX;

#[allow(clippy::print_stdout, reason = "the result")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", address, request, reply] => serve(address, request.parse()?, reply.parse()?),
        ["ask", address, connections, depth, seconds, reply, request] => {
            let (depth, reply) = (depth.parse::<usize>()?, reply.parse::<usize>()?);
            let time = Duration::from_secs_f64(seconds.parse()?);
            let distribution = Distribution::new(Shape::Zipfian, &Skew::default(), RECORDS).into();
            let sizes = ValueSize::Constant(64);
            let pattern = Pattern { mix: Workload::C.mix(), distribution, sizes };
            let records = Arc::new(RecordCounter::new(RECORDS));
            let ask = |seed| {
                let source = Generator::new(pattern.clone(), records.clone(), seed);
                let batches: Vec<_> = batches(source, request, depth).take(BATCHES).collect();
                let (mut asked, started) = (0, Instant::now());
                ask(address, depth * reply, batches.iter().cycle(), || {
                    asked += depth;
                    started.elapsed() < time
                })?;
                Ok(asked)
            };
            let asked = std::thread::scope(|scope| {
                let seeds = 0..connections.parse::<u64>()?;
                let threads: Vec<_> = seeds.map(|seed| scope.spawn(move || ask(seed))).collect();
                let join = |thread: std::thread::ScopedJoinHandle<'_, Result<usize>>| {
                    thread.join().map_err(|_| "a thread panicked")?
                };
                threads.into_iter().map(join).sum::<Result<usize>>()
            })?;
            println!("{:.0}", asked as f64 / time.as_secs_f64());
            Ok(())
        }
        ["fill", address, reply, request] => {
            let source = Loader::new(Kind::Put, ValueSize::Constant(64), RECORDS, (0, 1));
            let batches: Vec<_> = batches(source, request, 1).collect();
            ask(address, reply.parse()?, batches.iter(), || true)
        }
        _ => Err("the first lines of this program's source say how to call it".into()),
    }
}

/// Requests in batches of `depth`, as long as the source has operations.
fn batches(mut source: impl Source, request: &str, depth: usize) -> impl Iterator<Item = Vec<u8>> {
    let request = match request.parse() {
        Ok(bytes) => "x".repeat(bytes),
        Err(_) => request.replace("\\r", "\r").replace("\\n", "\n"),
    };
    std::iter::from_fn(move || {
        let operations = (0..depth).map_while(|_| source.next());
        let keys = operations.map(|operation| String::from_utf8_lossy(&operation.key).into_owned());
        let batch: String = keys.map(|key| request.replace('%', &key)).collect();
        (!batch.is_empty()).then(|| batch.into_bytes())
    })
}

/// Sends a batch and receives its replies, then the next one, as long as `go_on` returns true.
fn ask<'b>(
    address: &str,
    reply_bytes: usize,
    batches: impl Iterator<Item = &'b Vec<u8>>,
    mut go_on: impl FnMut() -> bool,
) -> Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; reply_bytes.min(BUFFER_BYTES)];
    for batch in batches {
        stream.write_all(batch)?;
        let mut left = reply_bytes;
        while left > 0 {
            let room = left.min(buffer.len());
            match stream.read(&mut buffer[..room])? {
                0 => return Err("the server closed the connection".into()),
                received => left -= received,
            }
        }
        if !go_on() {
            break;
        }
    }
    Ok(())
}

/// A client of the server: its socket, and how many bytes of an unfinished request have arrived.
struct Connection(TcpStream, usize);

fn serve(address: &str, request_bytes: usize, reply_bytes: usize) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, listener.as_fd(), EventData::new_u64(LISTENER), EventFlags::IN)?;
    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let replies = vec![b'y'; BUFFER_BYTES.div_ceil(request_bytes) * reply_bytes];
    let mut events = Vec::with_capacity(EVENTS_MAX);
    loop {
        events.clear();
        epoll::wait(&epoll, spare_capacity(&mut events), None)?;
        for event in &events {
            let number = event.data.u64();
            if number == LISTENER {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                let data = EventData::new_u64(connections.len() as u64);
                epoll::add(&epoll, stream.as_fd(), data, EventFlags::IN)?;
                connections.push(Some(Connection(stream, 0)));
                continue;
            }
            let slot = &mut connections[number as usize];
            let Some(Connection(stream, begun)) = slot else { continue };
            match stream.read(&mut buffer) {
                Ok(received @ 1..) => {
                    let bytes = *begun + received;
                    *begun = bytes % request_bytes;
                    stream.write_all(&replies[..bytes / request_bytes * reply_bytes])?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => *slot = None,
            }
        }
    }
}
