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
    assert!(!same.is_of_server(&key, client) && !same.is_of_client(&key, server), "a side counts");
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
    for wrong in [another_client.session_key(&secret), handshake().session_key(&SecretKey::NONE)] {
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
        0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75,
        0xc7,
    ];
    assert_eq!(first_half(hmac), Proof(expected));
}
