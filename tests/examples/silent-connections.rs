//! Opens connections to a server that never become clients, and keeps them open, to measure or test
//! what they cost other clients.
//!
//! `silent-connections ADDRESS COUNT KIND` prints `open` when all are, and ends when stdin does.
//! Once a second it opens those again that the server has closed. The kinds:
//!
//! - `silent`: they send nothing.
//! - `half`: they send half of a client's first message at once.
//! - `trickle`: they send this message byte by byte, ten bytes a second, but never the last byte.
//! - `unproven`: they send this message, but do not answer the server's challenge.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use farside_control::address::Address;
use farside_control::{Purpose, Role};
use farside_tests::{handshake, raise_descriptor_limit};

/// The time between two bytes of a connection.
const STEP: Duration = Duration::from_millis(100);
/// After so many steps, connections that have ended are opened again.
const STEPS_PER_LOOK: u64 = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection, `None` if it could not be opened; and how many bytes it has sent.
#[derive(Default)]
struct SilentConnection {
    stream: Option<TcpStream>,
    sent: usize,
}

impl SilentConnection {
    /// Opens it, and sends the first bytes.
    fn open(address: SocketAddr, first: &[u8]) -> Self {
        let connect = || {
            let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
            stream.set_nonblocking(true)?;
            stream.write_all(first)?;
            std::io::Result::Ok(stream)
        };
        Self { stream: connect().ok(), sent: first.len() }
    }

    /// Whether the server has closed it, or has never accepted it.
    fn is_closed(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return true };
        loop {
            match stream.read(&mut [0; 64]) {
                // A challenge.
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                _ => return true,
            }
        }
    }

    fn send_next(&mut self, message: &[u8]) {
        if let (Some(stream), Some(byte)) = (&mut self.stream, message.get(self.sent)) {
            // A failure shows at the next look.
            self.sent += stream.write(&[*byte]).unwrap_or(0);
        }
    }
}

/// A client's first message, with its length before it.
fn first_message() -> Vec<u8> {
    let request = handshake::hello(Role::Reader, Purpose::Control).encode();
    [&(request.len() as u32).to_le_bytes()[..], &request].concat()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, count, kind] = &arguments[..] else {
        eprintln!("silent-connections ADDRESS COUNT silent|half|trickle|unproven");
        std::process::exit(2);
    };
    let address = address.parse::<Address>().unwrap().resolve(CONNECT_TIMEOUT).unwrap()[0];
    let message = first_message();
    // The number of bytes to send at once, and in all.
    let (at_once, in_all) = match &kind[..] {
        "silent" => (0, 0),
        "half" => (message.len() / 2, message.len() / 2),
        "trickle" => (0, message.len() - 1),
        "unproven" => (message.len(), message.len()),
        _ => panic!("{kind} is no kind of connection"),
    };
    raise_descriptor_limit();
    let mut connections = Vec::new();
    connections.resize_with(count.parse().unwrap(), SilentConnection::default);
    std::thread::spawn(|| {
        // Until the end of stdin, or an error.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let mut has_printed = false;
    for step in 0_u64.. {
        if step.is_multiple_of(STEPS_PER_LOOK) {
            for connection in &mut connections {
                if connection.is_closed() {
                    *connection = SilentConnection::open(address, &message[..at_once]);
                }
            }
            let all_open = connections.iter().all(|connection| connection.stream.is_some());
            if all_open && !has_printed {
                println!("open");
                has_printed = true;
            }
        }
        connections.iter_mut().for_each(|connection| connection.send_next(&message[..in_all]));
        std::thread::sleep(STEP);
    }
}
