//! The client's side of the proofs: of its control channel, and of its sessions' connections.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use farside_fabric::interrupt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{ConnectError, ConnectOptions, Contact, Result, refused, system};
use crate::{
    Challenge, ConnectRequest, ControlChannel, DataAccepted, Handshake, MESSAGE_BYTES_MAX, Nonce,
    Proof, ProofMessage, Purpose, REQUEST_BYTES_MAX, Refusal, SessionKey, Welcome,
};

/// Limit on the hellos for one connection of a session. After the first one the server may have
/// replaced its nonce. The second one comes in time, unless the client or the server stood still.
const DATA_HELLOS_MAX: usize = 3;

impl ConnectOptions {
    /// Takes the server's challenge, and proves that the client knows the secret if the server has
    /// proved it. `exchange` sends a message and returns the answer. Returns the welcome, and the
    /// key for the client's sessions.
    pub(super) fn prove(
        &self,
        request: &ConnectRequest,
        challenge: &[u8],
        exchange: impl FnOnce(&[u8]) -> Result<Vec<u8>>,
    ) -> Result<(Welcome, SessionKey)> {
        let refused = |refusal| refused(&self.address.to_string(), refusal);
        let Challenge { version, nonce, proofs } =
            Challenge::decode(challenge)?.map_err(refused)?;
        let (request, fabric) = (*request, self.address.fabric());
        let handshake = Handshake { request, fabric, version, server_nonce: nonce };
        let key = &self.secret_key;
        let is_proven = proofs.iter().any(|proof| handshake.is_of_server(key, *proof));
        // An imposter gets no proof. A real server refuses a message without one, says why, and
        // logs that a client has a wrong secret.
        let proof = if is_proven { handshake.client_proof(key) } else { Proof::NONE };
        let answer = exchange(&ProofMessage(proof).encode())?;
        let welcome = Welcome::decode(&answer)?.map_err(refused)?;
        if !is_proven {
            return Err(ConnectError::Unproven { server: self.address.to_string() });
        }
        Ok((welcome, handshake.session_key(key)))
    }

    /// As [`ConnectOptions::prove`], over a channel. The whole attempt began at `started`.
    pub(super) fn prove_over(
        &self,
        channel: &mut dyn ControlChannel,
        (request, challenge): (&ConnectRequest, &[u8]),
        (started, timeout): (Instant, Duration),
    ) -> Result<(Welcome, SessionKey)> {
        self.prove(request, challenge, |proof| {
            self.send(channel, proof, started)?;
            self.receive(channel, (started, timeout))
        })
    }

    /// Sends a message of an attempt that began at this time.
    pub(super) fn send(
        &self,
        channel: &mut dyn ControlChannel,
        message: &[u8],
        started: Instant,
    ) -> Result<()> {
        let lost = |error| self.unreachable(Contact::HungUp, started.elapsed(), Some(error));
        channel.send(message).map_err(lost)
    }

    /// Waits for a message, until this time after the attempt began.
    pub(super) fn receive(
        &self,
        channel: &mut dyn ControlChannel,
        (started, timeout): (Instant, Duration),
    ) -> Result<Vec<u8>> {
        let lost = |source| self.unreachable(Contact::HungUp, started.elapsed(), source);
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            match channel.receive(&mut buffer).map_err(|error| lost(Some(error)))? {
                Some(0) => return Err(lost(None)),
                Some(bytes) => {
                    buffer.truncate(bytes);
                    return Ok(buffer);
                }
                None => {}
            }
            let left = timeout.checked_sub(started.elapsed()).filter(|_| !interrupt::gives_up());
            let step = left.and_then(|left| Timespec::try_from(interrupt::step(left)).ok());
            let Some(step) = step else {
                return Err(self.unreachable(Contact::Silent, started.elapsed(), None));
            };
            match poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&step)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(system("waiting for the server")(error.into())),
            }
        }
    }
}

/// What the connections of a client's sessions need, to prove whose they are.
pub(super) struct DataProofs {
    options: ConnectOptions,
    client_id: u16,
    key: SessionKey,
    /// The server's last nonce.
    nonce: Mutex<Nonce>,
}

impl DataProofs {
    pub(super) fn new(options: &ConnectOptions, welcome: &Welcome, key: SessionKey) -> Self {
        let (client_id, nonce) = (welcome.client_id, Mutex::new(welcome.data_nonce));
        Self { options: options.clone(), client_id, key, nonce }
    }

    /// Makes a session's connection. `connect` sends a hello, and returns the link and the answer.
    /// Without a link the answer is a refusal.
    pub(super) fn connect<L>(
        &self,
        connect: impl Fn(&[u8; REQUEST_BYTES_MAX]) -> Result<(L, Vec<u8>)>,
    ) -> Result<L> {
        let server = self.options.address.to_string();
        let client_id = self.client_id;
        for _ in 0..DATA_HELLOS_MAX {
            let server_nonce = *self.nonce();
            let unproven = Purpose::Data { client_id, proof: Proof::NONE };
            let request = self.options.request(unproven)?;
            let proof = self.key.data_proof(&request, server_nonce);
            let purpose = Purpose::Data { client_id, proof };
            let (link, answer) = connect(&ConnectRequest { purpose, ..request }.encode())?;
            match DataAccepted::decode(&answer)? {
                Ok(DataAccepted { proof })
                    if self.key.is_data_answer(&request, server_nonce, proof) =>
                {
                    return Ok(link);
                }
                Ok(_) => return Err(ConnectError::Unproven { server }),
                Err(Refusal::OldNonce { nonce }) => *self.nonce() = nonce,
                Err(refusal) => return Err(refused(&server, refusal)),
            }
        }
        let nonce = *self.nonce();
        Err(refused(&server, Refusal::OldNonce { nonce }))
    }

    fn nonce(&self) -> std::sync::MutexGuard<'_, Nonce> {
        // A nonce is never half written.
        self.nonce.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
