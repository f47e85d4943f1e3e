//! The server's side of the proofs: which clients know a secret, and which connections of sessions
//! are those of a client.

use std::collections::HashSet;
use std::io;

use farside_config::{Secret, ServerConfig};
use farside_control::{
    Challenge, ConnectRequest, Handshake, Nonce, Proof, Refusal, Role, SecretKey, SessionKey,
};
use farside_fabric::Nanos;

/// How long sessions may use a nonce in their hellos. So a hello that was recorded, but that never
/// reached the server, is of no use later.
const NONCE_NS_MAX: Nanos = 5_000_000_000;
/// Limit on the hellos with one nonce, all of which the server remembers.
const HELLOS_MAX: usize = 1024;

/// The keys of the configured secrets. Without a secret every client is admitted.
pub(super) struct SecretKeys {
    full: Option<SecretKey>,
    read_only: Option<SecretKey>,
}

impl SecretKeys {
    pub(super) fn new(config: &ServerConfig) -> Self {
        let key = |secret: &Secret| SecretKey::of(&secret.0);
        Self {
            full: config.secret.as_ref().map(key),
            read_only: config.reader_secret.as_ref().map(key),
        }
    }

    /// Returns the keys of which a client in this role has one.
    fn of_role(&self, role: Role) -> [SecretKey; 2] {
        let full = self.full.unwrap_or(SecretKey::NONE);
        match role {
            Role::Reader => [full, self.read_only.unwrap_or(full)],
            Role::Writer => [full, full],
        }
    }

    /// Returns the challenge for a client, with the server's proofs.
    pub(super) fn challenge(&self, handshake: &Handshake) -> Challenge {
        let proofs = self.of_role(handshake.request.role).map(|key| handshake.server_proof(&key));
        Challenge { version: handshake.version, nonce: handshake.server_nonce, proofs }
    }

    /// Returns the key for the sessions of a client, or refuses a client whose proof does not allow
    /// the role that it asks for.
    pub(super) fn check(&self, handshake: &Handshake, proof: Proof) -> Result<SessionKey, Refusal> {
        let keys = self.of_role(handshake.request.role);
        // Always compares both. Otherwise the time would tell which secret the client has.
        let is_proven = keys.map(|key| handshake.is_of_client(&key, proof));
        match (is_proven, self.full) {
            ([true, _], _) => Ok(handshake.session_key(&keys[0])),
            ([_, true], _) => Ok(handshake.session_key(&keys[1])),
            (_, None) => Err(Refusal::NoSecret),
            (_, Some(_)) => Err(Refusal::Credentials),
        }
    }
}

/// Decides which connections are those of a client's sessions. Each hello counts only once.
pub(super) struct SessionGate {
    key: SessionKey,
    nonce: Nonce,
    since: Nanos,
    /// The nonces of the hellos that were accepted with the server's nonce.
    used: HashSet<Nonce>,
}

impl SessionGate {
    pub(super) fn new(key: SessionKey, now: Nanos) -> io::Result<Self> {
        Ok(Self { key, nonce: Nonce::random()?, since: now, used: HashSet::new() })
    }

    /// Returns the nonce for the next hellos.
    pub(super) fn nonce(&self) -> Nonce {
        self.nonce
    }

    /// Returns the server's proof, if the client made this hello for this connection. Otherwise
    /// refuses it, with a nonce that is not old.
    pub(super) fn check(
        &mut self,
        request: &ConnectRequest,
        proof: Proof,
        now: Nanos,
    ) -> io::Result<Result<Proof, Refusal>> {
        if now.saturating_sub(self.since) > NONCE_NS_MAX || self.used.len() >= HELLOS_MAX {
            self.nonce = Nonce::random()?;
            self.since = now;
            self.used = HashSet::new();
        }
        let is_proven = self.key.is_of_data(request, self.nonce, proof);
        if !is_proven || !self.used.insert(request.nonce) {
            return Ok(Err(Refusal::OldNonce { nonce: self.nonce }));
        }
        Ok(Ok(self.key.data_answer(request, self.nonce)))
    }
}

#[cfg(test)]
mod tests;
