use proptest::prelude::*;

use super::*;

fn welcome() -> Welcome {
    Welcome {
        client_id: 3,
        lease: 17,
        region_id: [7; 16],
        incarnation: 2,
        base_address: 0x7000_0000_0000,
        region_bytes: 1 << 30,
        rkey: 99,
        round_trip_min_ns: 500,
    }
}

fn request() -> ConnectRequest {
    ConnectRequest { role: Role::Writer, purpose: Purpose::Control, token: Token::NONE }
}

#[test]
fn a_purpose_that_cannot_be_is_refused() {
    let data = Purpose::Data { client_id: 0, lease: 5 };
    let nobodys = ConnectRequest { purpose: data, ..request() }.encode();
    assert!(ConnectRequest::decode(&nobodys).is_err());
    for (at, value) in [(7, DATA + 1), (8, 1), (10, 1)] {
        let mut bytes = request().encode();
        bytes[at] = value;
        assert!(ConnectRequest::decode(&bytes).is_err(), "byte {at}");
    }
    for bytes in (0..REQUEST_BYTES_MAX).chain([REQUEST_BYTES_MAX + 1]) {
        let mut wrong = request().encode().to_vec();
        wrong.resize(bytes, 0);
        let malformed = Refusal::Malformed { bytes: bytes as u64 };
        assert!(ConnectRequest::decode(&wrong) == Err(malformed));
    }
}

#[test]
fn requests_and_replies_come_back() {
    let data = Purpose::Data { client_id: 7, lease: 1 << 40 };
    let (reader, writer) = (Role::Reader, Role::Writer);
    for (role, purpose) in [(reader, Purpose::Control), (writer, data)] {
        let request = ConnectRequest { role, purpose, token: Token::of("secret") };
        let decoded = ConnectRequest::decode(&request.encode()).unwrap();
        assert!(decoded == request);
        assert!(decoded.token.matches(&Token::of("secret")));
        assert!(!decoded.token.matches(&Token::of("Secret")));
    }
    let refusals = [
        Refusal::Version { server: 1, client: 2 },
        Refusal::Credentials,
        Refusal::Full { clients: 5 },
        Refusal::Malformed { bytes: 3 },
        Refusal::ShuttingDown,
        Refusal::UnknownClient { client: 12 },
        Refusal::Device,
        Refusal::Unknown { code: 77 },
    ];
    for reply in refusals.into_iter().map(Err).chain([Ok(welcome())]) {
        let mut padded = encode_reply(&reply).to_vec();
        padded.resize(REPLY_BYTES_MAX, 0);
        assert_eq!(decode_reply(&padded).unwrap(), reply);
    }
}

#[test]
fn a_request_of_another_version_is_told_both_versions() {
    let mut bytes = request().encode();
    bytes[4] = 9;
    let refusal = ConnectRequest::decode(&bytes).err().unwrap();
    assert_eq!(refusal, Refusal::Version { server: PROTOCOL_VERSION.into(), client: 9 });
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer_or_an_error(bytes: Vec<u8>) {
        let _ = ConnectRequest::decode(&bytes);
        let _ = decode_reply(&bytes);
    }

    #[test]
    fn damaged_messages_do_not_panic(at in 0..REPLY_BYTES, value: u8) {
        let mut reply = encode_reply(&Ok(welcome()));
        reply[at] = value;
        let _ = decode_reply(&reply);
        let mut request = request().encode();
        request[at % REQUEST_BYTES_MAX] = value;
        let _ = ConnectRequest::decode(&request);
    }
}
