//! A proxy that resets the connections which it forwards, as a firewall does that has forgotten
//! them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A proxy on this host. Its threads end with the process.
pub(super) struct ResetProxy {
    address: SocketAddr,
    /// The two sockets of each connection, in the order in which the connections were made.
    connections: Arc<Mutex<Vec<[TcpStream; 2]>>>,
}

/// Copies bytes until one of both connections ends. Then ends the other one in the same direction.
fn forward(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

impl ResetProxy {
    /// Starts a proxy that forwards to this server.
    pub(super) fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let accepted = connections.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(server) else { continue };
                [&client, &server].iter().for_each(|it| it.set_nodelay(true).unwrap());
                let copy = |socket: &TcpStream| socket.try_clone().unwrap();
                forward(copy(&client), copy(&server));
                forward(copy(&server), copy(&client));
                accepted.lock().unwrap().push([client, server]);
            }
        });
        Self { address, connections }
    }

    /// Returns the address of the server, by way of this proxy.
    pub(super) fn server_address(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// Returns the number of connections since the last reset.
    pub(super) fn connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    /// Resets one connection, or all of them. Forgets the others.
    pub(super) fn reset(&self, only: Option<usize>) {
        let connections = std::mem::take(&mut *self.connections.lock().unwrap());
        for (number, sockets) in connections.iter().enumerate() {
            if only.is_none_or(|only| only == number) {
                // This sends a reset, although threads still hold the sockets.
                sockets.iter().for_each(|it| rustix::net::connect_unspec(it).unwrap());
            }
        }
    }
}
