//! Proofs that both sides of a connection know a secret, none of which shows the secret. Decision
//! 0025 says what they prove.
//!
//! A proof is an HMAC-SHA256 over all that both sides have said before: the hello with the client's
//! nonce, and the server's nonce. Each kind of proof has a label of its own, so none can be used as
//! another kind.

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Purpose, Role};

    fn request(purpose: Purpose) -> ConnectRequest {
        let (versions, role, view) = (Versions::OWN, Role::Writer, None);
        ConnectRequest { versions, role, purpose, view, nonce: Nonce([1; 16]) }
    }

    fn handshake() -> Handshake {
        Handshake::answering(request(Purpose::Control), FabricKind::Tcp, Nonce([2; 16]))
    }

    /// Everything that both sides have said counts, so that no proof serves in another connection.
    #[test]
    fn a_proof_is_of_one_key_one_side_and_one_handshake() {
        let (key, same) = (SecretKey::of("secret"), handshake());
        let with = |change: fn(&mut Handshake)| {
            let mut other = handshake();
            change(&mut other);
            other
        };
        let others = [
            with(|it| it.request.role = Role::Reader),
            with(|it| it.request.purpose = Purpose::Map),
            with(|it| it.request.view = Some(crate::KnownView { shard: 0, number: 1 })),
            with(|it| it.request.versions.lowest = 1),
            with(|it| it.request.versions.highest += 1),
            with(|it| it.request.nonce.0[15] ^= 1),
            with(|it| it.fabric = FabricKind::Rdma),
            with(|it| it.version += 1),
            with(|it| it.server_nonce.0[15] ^= 1),
        ];
        let (server, client) = (same.server_proof(&key), same.client_proof(&key));
        assert!(same.is_of_server(&key, server) && same.is_of_client(&key, client));
        assert!(
            !same.is_of_server(&key, client) && !same.is_of_client(&key, server),
            "a side counts"
        );
        for wrong in [SecretKey::NONE, SecretKey::of("Secret")] {
            assert!(!same.is_of_server(&wrong, server) && !same.is_of_client(&wrong, client));
        }
        for other in others {
            assert!(!other.is_of_server(&key, server), "{other:?}");
            assert!(!other.is_of_client(&key, client), "{other:?}");
        }
        for byte in 0..16 {
            let mut flipped = client;
            flipped.0[byte] ^= 0x80;
            assert!(!same.is_of_client(&key, flipped));
        }
        assert!(!same.is_of_client(&key, Proof::NONE));
    }

    #[test]
    fn a_sessions_proof_is_of_one_client_one_hello_and_one_nonce() {
        let (secret, server_nonce) = (SecretKey::of("secret"), Nonce([3; 16]));
        let data = |client_id| request(Purpose::Data { client_id, proof: Proof::NONE });
        let (key, hello) = (handshake().session_key(&secret), data(7));
        let proof = key.data_proof(&hello, server_nonce);
        // The proof in a hello does not count, because it is the proof of the rest.
        let proven = request(Purpose::Data { client_id: 7, proof });
        assert!(key.is_of_data(&proven, server_nonce, proof));
        let answer = key.data_answer(&hello, server_nonce);
        assert!(key.is_data_answer(&proven, server_nonce, answer));
        assert!(!key.is_of_data(&hello, server_nonce, answer), "a side counts");
        assert!(!key.is_data_answer(&hello, server_nonce, proof), "a side counts");
        let another_client = Handshake { server_nonce: Nonce([4; 16]), ..handshake() };
        for wrong in
            [another_client.session_key(&secret), handshake().session_key(&SecretKey::NONE)]
        {
            assert!(!wrong.is_of_data(&hello, server_nonce, proof));
        }
        let reader = ConnectRequest { role: Role::Reader, ..hello };
        let another_hello = ConnectRequest { nonce: Nonce([5; 16]), ..hello };
        for (hello, server_nonce) in [
            (data(8), server_nonce),
            (reader, server_nonce),
            (another_hello, server_nonce),
            (hello, Nonce([4; 16])),
        ] {
            assert!(!key.is_of_data(&hello, server_nonce, proof), "{hello:?}");
            assert!(!key.is_data_answer(&hello, server_nonce, answer), "{hello:?}");
        }
    }

    /// Test case 2 of RFC 4231, with the whole key in the first bytes, as HMAC pads it.
    #[test]
    fn the_hmac_is_that_of_the_rfc() {
        let mut key = [0; 64];
        key[..4].copy_from_slice(b"Jefe");
        let mut hmac = Hmac::<Sha256>::new(&key.into());
        hmac.update(b"what do ya want for nothing?");
        let expected = [
            0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95,
            0x75, 0xc7,
        ];
        assert_eq!(first_half(hmac), Proof(expected));
    }
}
