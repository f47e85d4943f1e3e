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
mod tests {
    use farside_control::{FabricKind, Purpose, Versions};

    use super::*;

    fn request(role: Role, purpose: Purpose) -> ConnectRequest {
        let nonce = Nonce::random().unwrap();
        ConnectRequest { versions: Versions::OWN, role, purpose, view: None, nonce }
    }

    fn handshake(role: Role) -> Handshake {
        let request = request(role, Purpose::Control);
        Handshake::answering(request, FabricKind::Tcp, Nonce::random().unwrap())
    }

    fn keys(secret: Option<&str>, reader_secret: Option<&str>) -> SecretKeys {
        let secret_of = |text: &str| Secret(text.to_owned());
        let (secret, reader_secret) = (secret.map(secret_of), reader_secret.map(secret_of));
        SecretKeys::new(&ServerConfig { secret, reader_secret, ..ServerConfig::default() })
    }

    /// Each side proves a secret to the other, or neither does.
    #[test]
    fn a_secret_admits_to_its_role_and_proves_the_server_to_its_clients() {
        use Refusal::{Credentials, NoSecret};
        use Role::{Reader, Writer};
        let none = || keys(None, None);
        let both = || keys(Some("w"), Some("r"));
        let one = || keys(Some("w"), None);
        for (server, client, role, expected) in [
            (none(), SecretKey::NONE, Writer, None),
            (none(), SecretKey::of("w"), Writer, Some(NoSecret)),
            (one(), SecretKey::of("w"), Writer, None),
            (one(), SecretKey::of("w"), Reader, None),
            (one(), SecretKey::of("r"), Reader, Some(Credentials)),
            (one(), SecretKey::NONE, Reader, Some(Credentials)),
            (both(), SecretKey::of("w"), Writer, None),
            (both(), SecretKey::of("w"), Reader, None),
            (both(), SecretKey::of("r"), Reader, None),
            (both(), SecretKey::of("r"), Writer, Some(Credentials)),
            (both(), SecretKey::NONE, Writer, Some(Credentials)),
        ] {
            let handshake = handshake(role);
            let checked = server.check(&handshake, handshake.client_proof(&client));
            assert_eq!(checked.err(), expected, "{role:?}");
            let challenge = server.challenge(&handshake);
            let is_known =
                challenge.proofs.iter().any(|proof| handshake.is_of_server(&client, *proof));
            assert_eq!(is_known, expected.is_none(), "{role:?}");
        }
        assert_eq!(none().check(&handshake(Writer), Proof::NONE).err(), Some(NoSecret));
        assert_eq!(both().check(&handshake(Writer), Proof::NONE).err(), Some(Credentials));
    }

    /// A client, and the server's gate for its sessions.
    struct World {
        key: SessionKey,
        gate: SessionGate,
    }

    impl World {
        fn new() -> Self {
            let key = handshake(Role::Writer).session_key(&SecretKey::of("secret"));
            Self { key, gate: SessionGate::new(key, 0).unwrap() }
        }

        /// Returns a hello and its proof.
        fn hello(&self, nonce: Nonce) -> (ConnectRequest, Proof) {
            let data = Purpose::Data { client_id: 7, proof: Proof::NONE };
            let hello = request(Role::Writer, data);
            (hello, self.key.data_proof(&hello, nonce))
        }

        fn check(
            &mut self,
            (hello, proof): (ConnectRequest, Proof),
            now: Nanos,
        ) -> Option<Refusal> {
            let checked = self.gate.check(&hello, proof, now).unwrap();
            let accepted = checked.inspect(|answer| {
                assert!(self.key.is_data_answer(&hello, self.gate.nonce, *answer));
            });
            accepted.err()
        }
    }

    #[test]
    fn a_sessions_hello_counts_once() {
        let mut world = World::new();
        let nonce = world.gate.nonce();
        let (first, second) = (world.hello(nonce), world.hello(nonce));
        assert_eq!(world.check(first, 1), None);
        assert_eq!(world.check(second, 1), None);
        let refusal = Some(Refusal::OldNonce { nonce });
        assert_eq!(world.check(first, 1), refusal, "a recorded hello");
        let (third, _) = world.hello(nonce);
        assert_eq!(world.check((third, second.1), 1), refusal, "the proof of another hello");
        // Not even after the server has replaced the nonce.
        let late = NONCE_NS_MAX + 1;
        assert!(world.check(first, late).is_some() && world.gate.nonce() != nonce);
    }

    #[test]
    fn a_nonce_ends_after_its_time_and_after_its_hellos() {
        let mut world = World::new();
        let first = world.gate.nonce();
        let unused = world.hello(first);
        assert_eq!(world.check(world.hello(first), NONCE_NS_MAX), None);
        let refusal = world.check(unused, NONCE_NS_MAX + 1);
        let second = world.gate.nonce();
        assert!(refusal == Some(Refusal::OldNonce { nonce: second }) && first != second);
        for _ in 0..HELLOS_MAX {
            assert_eq!(world.check(world.hello(second), NONCE_NS_MAX + 1), None);
        }
        assert!(world.gate.used.len() <= HELLOS_MAX);
        assert!(world.check(world.hello(second), NONCE_NS_MAX + 1).is_some());
        let third = world.gate.nonce();
        assert_eq!(world.check(world.hello(third), NONCE_NS_MAX + 1), None);
    }

    /// A stranger must not be able to make a client's hello fail again and again.
    #[test]
    fn hellos_without_a_proof_replace_no_nonce() {
        let mut world = World::new();
        let nonce = world.gate.nonce();
        for _ in 0..2 * HELLOS_MAX {
            let (hello, _) = world.hello(nonce);
            assert!(world.check((hello, Proof([1; 16])), 1).is_some());
        }
        assert_eq!(world.check(world.hello(nonce), 1), None);
    }
}
