//! Proofs that both sides of a connection know a secret, none of which shows the secret. Decision
//! 0025 says what they prove.
//!
//! A proof is an HMAC-SHA256 over all that both sides have said before: the hello with the client's
//! nonce, and the server's nonce. Each kind of proof has a label of its own, so none can be used as
//! another kind.

#[cfg(test)]
mod tests;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use zerocopy::IntoBytes;

use super::{ConnectRequest, FabricKind, Nonce, Proof, Versions};

/// The key of a secret. It never leaves its process.
#[derive(Clone, Copy)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// Returns the key of a secret.
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// The key of a client or server without a secret. It is known to all.
    pub const NONE: Self = Self([0; 32]);
}

/// The key of one client's connection, which its sessions prove to know. It follows from the secret
/// and the nonces of both sides, so neither is it sent, nor has another connection the same.
#[derive(Clone, Copy)]
pub struct SessionKey(SecretKey);

/// What a proof proves.
#[derive(Clone, Copy)]
enum Label {
    Server,
    Client,
    Session,
    Data,
    DataAnswer,
}

impl Label {
    /// Returns its bytes, of which none is the beginning of another.
    fn bytes(self) -> &'static [u8; 24] {
        match self {
            Self::Server => b"Farside server's proof..",
            Self::Client => b"Farside client's proof..",
            Self::Session => b"Farside key of sessions.",
            Self::Data => b"Farside session's proof.",
            Self::DataAnswer => b"Farside session's answer",
        }
    }
}

/// What both sides of a new connection have said before they prove anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// The client's hello, with its nonce.
    pub request: ConnectRequest,
    /// The fabric of the connection.
    pub fabric: FabricKind,
    /// The version of the protocol that the server has chosen.
    pub version: u16,
    /// The server's nonce.
    pub server_nonce: Nonce,
}

impl Handshake {
    /// Begins the server's side, with the highest version that both sides speak.
    pub fn answering(request: ConnectRequest, fabric: FabricKind, server_nonce: Nonce) -> Self {
        let version = request.versions.highest.min(Versions::OWN.highest);
        Self { request, fabric, version, server_nonce }
    }

    fn hmac(&self, key: &SecretKey, label: Label) -> Hmac<Sha256> {
        let mut hmac = hmac(key, label, &self.request, self.server_nonce);
        hmac.update(&[self.fabric as u8]);
        hmac.update(&self.version.to_le_bytes());
        hmac
    }

    /// The proof that the server knows the secret.
    pub fn server_proof(&self, key: &SecretKey) -> Proof {
        first_half(self.hmac(key, Label::Server))
    }

    /// Whether a server with this key made the proof.
    pub fn is_of_server(&self, key: &SecretKey, proof: Proof) -> bool {
        is_first_half(self.hmac(key, Label::Server), proof)
    }

    /// The proof that the client knows the secret.
    pub fn client_proof(&self, key: &SecretKey) -> Proof {
        first_half(self.hmac(key, Label::Client))
    }

    /// Whether a client with this key made the proof.
    pub fn is_of_client(&self, key: &SecretKey, proof: Proof) -> bool {
        is_first_half(self.hmac(key, Label::Client), proof)
    }

    /// The key that the client's sessions prove to know.
    pub fn session_key(&self, key: &SecretKey) -> SessionKey {
        let bytes = self.hmac(key, Label::Session).finalize().into_bytes();
        SessionKey(SecretKey(bytes.into()))
    }
}

impl SessionKey {
    /// The proof in the hello of a session's connection, over a nonce that the server gave the
    /// client before. A proof that the hello has already does not count.
    pub fn data_proof(&self, request: &ConnectRequest, server_nonce: Nonce) -> Proof {
        first_half(hmac(&self.0, Label::Data, request, server_nonce))
    }

    /// Whether the client made the proof.
    pub fn is_of_data(&self, request: &ConnectRequest, server_nonce: Nonce, proof: Proof) -> bool {
        is_first_half(hmac(&self.0, Label::Data, request, server_nonce), proof)
    }

    /// The server's proof in the answer to such a hello.
    pub fn data_answer(&self, request: &ConnectRequest, server_nonce: Nonce) -> Proof {
        first_half(hmac(&self.0, Label::DataAnswer, request, server_nonce))
    }

    /// Whether the client's server made the answer.
    pub fn is_data_answer(
        &self,
        request: &ConnectRequest,
        server_nonce: Nonce,
        proof: Proof,
    ) -> bool {
        is_first_half(hmac(&self.0, Label::DataAnswer, request, server_nonce), proof)
    }
}

fn hmac(
    SecretKey(key): &SecretKey,
    label: Label,
    request: &ConnectRequest,
    server_nonce: Nonce,
) -> Hmac<Sha256> {
    // A key as long as a block of the hash is used as it is.
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    let mut hmac = Hmac::<Sha256>::new(&block.into());
    hmac.update(label.bytes());
    hmac.update(&request.without_proof().encode());
    hmac.update(server_nonce.as_bytes());
    hmac
}

fn first_half(hmac: Hmac<Sha256>) -> Proof {
    let bytes: [u8; 32] = hmac.finalize().into_bytes().into();
    let mut proof = Proof::NONE;
    proof.0.copy_from_slice(&bytes[..16]);
    proof
}

/// Compares in a time that does not depend on where the two differ.
fn is_first_half(hmac: Hmac<Sha256>, Proof(proof): Proof) -> bool {
    hmac.verify_truncated_left(&proof).is_ok()
}
