//! Handshakes message by message, for tests that speak to a server or a client without the library.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use farside_control::{
    Challenge, ConnectRequest, DataAccepted, FabricKind, Handshake, Nonce, Proof, ProofMessage,
    Purpose, Refusal, Role, SecretKey, SessionKey, Versions, Welcome,
};

use crate::TEST_TIMEOUT;

/// Returns a client's hello.
pub fn hello(role: Role, purpose: Purpose) -> ConnectRequest {
    let (versions, nonce) = (Versions::OWN, Nonce::random().unwrap());
    ConnectRequest { versions, role, purpose, view: None, nonce }
}

/// Returns a client's answer to a challenge, and the key for its sessions.
pub fn answer(
    request: &ConnectRequest,
    fabric: FabricKind,
    key: &SecretKey,
    challenge: &Challenge,
) -> (Vec<u8>, SessionKey) {
    let Challenge { version, nonce: server_nonce, .. } = *challenge;
    let handshake = Handshake { request: *request, fabric, version, server_nonce };
    (ProofMessage(handshake.client_proof(key)).encode(), handshake.session_key(key))
}

/// Returns a server's challenge for a client's hello, and the key for the client's sessions.
pub fn challenge(
    hello: &[u8],
    fabric: FabricKind,
    key: &SecretKey,
) -> (ConnectRequest, Vec<u8>, SessionKey) {
    let request = ConnectRequest::decode(hello).expect("a client's hello is malformed");
    let handshake = Handshake::answering(request, fabric, Nonce::random().unwrap());
    let Handshake { version, server_nonce: nonce, .. } = handshake;
    let challenge = Challenge { version, nonce, proofs: [handshake.server_proof(key); 2] };
    (request, challenge.encode(), handshake.session_key(key))
}

/// Sends a message of a control channel over TCP.
pub fn send(stream: &mut TcpStream, message: &[u8]) {
    let length = (message.len() as u32).to_le_bytes();
    stream.write_all(&[&length[..], message].concat()).unwrap();
}

/// Returns the next message of a control channel over TCP; `None` at its end.
pub fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}

/// A client over TCP whose connections are plain sockets.
pub struct RawClient {
    /// The control connection, without answers to read.
    pub control: TcpStream,
    /// The server's welcome.
    pub welcome: Welcome,
    address: SocketAddr,
    role: Role,
    key: SessionKey,
    nonce: Cell<Nonce>,
}

impl RawClient {
    /// Connects to a server with this secret.
    ///
    /// # Errors
    /// The server's refusal.
    pub fn connect(address: SocketAddr, role: Role, key: &SecretKey) -> Result<Self, Refusal> {
        let mut control = TcpStream::connect(address).unwrap();
        let request = hello(role, Purpose::Control);
        send(&mut control, &request.encode());
        let challenge = Challenge::decode(&receive(&mut control).unwrap()).unwrap()?;
        let (proof, key) = answer(&request, FabricKind::Tcp, key, &challenge);
        send(&mut control, &proof);
        let welcome = Welcome::decode(&receive(&mut control).unwrap()).unwrap()?;
        let nonce = Cell::new(welcome.data_nonce);
        Ok(Self { control, welcome, address, role, key, nonce })
    }

    /// Returns a hello of a session's connection, with a proof over the server's last nonce.
    pub fn data_hello(&self) -> ConnectRequest {
        let client_id = self.welcome.client_id;
        let request = hello(self.role, Purpose::Data { client_id, proof: Proof::NONE });
        let proof = self.key.data_proof(&request, self.nonce.get());
        ConnectRequest { purpose: Purpose::Data { client_id, proof }, ..request }
    }

    /// Opens a session's connection, and receives the server's clock.
    ///
    /// # Errors
    /// The server's refusal.
    pub fn session(&self) -> Result<TcpStream, Refusal> {
        loop {
            let mut stream = TcpStream::connect(self.address).unwrap();
            send(&mut stream, &self.data_hello().encode());
            match DataAccepted::decode(&receive(&mut stream).unwrap()).unwrap() {
                Ok(_) => {
                    stream.read_exact(&mut [0; 16]).unwrap();
                    return Ok(stream);
                }
                Err(Refusal::OldNonce { nonce }) => self.nonce.set(nonce),
                Err(refusal) => return Err(refusal),
            }
        }
    }
}
