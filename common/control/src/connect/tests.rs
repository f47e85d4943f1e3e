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
        ticket: 41,
    }
}

fn request() -> ConnectRequest {
    ConnectRequest { role: Role::Writer, purpose: Purpose::Control, token: Token::NONE }
}

#[test]
fn a_purpose_that_cannot_be_is_refused() {
    let data = Purpose::Data { client_id: 0, ticket: 5 };
    let nobodys = ConnectRequest { purpose: data, ..request() }.encode();
    assert!(ConnectRequest::decode(&nobodys).is_err());
    let without = Purpose::Data { client_id: 3, ticket: 0 };
    let without = ConnectRequest { purpose: without, ..request() }.encode();
    assert!(ConnectRequest::decode(&without).is_err());
    // The role, the purpose, the client, its ticket, and what is reserved.
    for (at, value) in [(6, 3), (7, DATA + 1), (8, 1), (10, 1), (18, 1), (23, 128)] {
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
    let data = Purpose::Data { client_id: 7, ticket: 1 << 40 };
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
        Refusal::FullOfReaders { readers: 7 },
        Refusal::FullForUser { clients: 7 },
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

#[test]
fn a_welcome_that_cannot_be_is_an_error() {
    let wrong = |change: fn(&mut Welcome)| {
        let mut welcome = welcome();
        change(&mut welcome);
        decode_reply(&encode_reply(&Ok(welcome))).unwrap_err().to_string()
    };
    for (field, says) in [
        ("client id", wrong(|of| of.client_id = 0)),
        ("client id", wrong(|of| of.client_id = CLIENTS_MAX as u16)),
        ("lease", wrong(|of| of.lease = 0)),
        ("incarnation", wrong(|of| of.incarnation = 0)),
        ("region length", wrong(|of| of.region_bytes = 0)),
        ("region length", wrong(|of| of.region_bytes = u64::MAX)),
        ("region length", wrong(|of| of.region_bytes += 8)),
        ("base address", wrong(|of| of.base_address += 4)),
        ("base address", wrong(|of| of.base_address = u64::MAX - 7)),
        ("rkey", wrong(|of| of.base_address = 0)),
        ("round trip", wrong(|of| of.round_trip_min_ns = 0)),
        ("round trip", wrong(|of| of.round_trip_min_ns = u32::MAX)),
        ("round trip", wrong(|of| (of.base_address, of.rkey) = (0, 0))),
        ("ticket", wrong(|of| of.ticket = 0)),
        ("ticket", wrong(|of| (of.base_address, of.rkey, of.round_trip_min_ns) = (0, 0, 0))),
    ] {
        assert!(says.starts_with(field), "{field}: {says}");
    }
    let on_shared_memory =
        Welcome { base_address: 0, rkey: 0, round_trip_min_ns: 0, ticket: 0, ..welcome() };
    assert_eq!(decode_reply(&encode_reply(&Ok(on_shared_memory))).unwrap(), Ok(on_shared_memory));
    let mut padded = encode_reply(&Ok(welcome())).to_vec();
    padded.resize(REPLY_BYTES_MAX, 0);
    *padded.last_mut().unwrap() = 1;
    assert!(decode_reply(&padded).is_err());
    padded.push(0);
    assert!(decode_reply(&padded).is_err());
}

/// Bytes that are understood are those that would be sent: no bit of them goes unchecked.
fn understood_only_as_sent(bytes: &[u8]) {
    if let Ok(request) = ConnectRequest::decode(bytes) {
        assert_eq!(&request.encode()[..], bytes);
    }
    if let Ok(Ok(welcome)) = decode_reply(bytes) {
        let mut again = encode_reply(&Ok(welcome)).to_vec();
        again.resize(bytes.len(), 0);
        assert_eq!(again, bytes);
    }
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer_or_an_error(bytes: Vec<u8>) {
        understood_only_as_sent(&bytes);
    }

    #[test]
    fn damaged_messages_are_errors_or_other_messages(
        at in 0..REPLY_BYTES_MAX,
        value: u8,
        bytes in 0..=REPLY_BYTES_MAX,
    ) {
        let mut reply = encode_reply(&Ok(welcome())).to_vec();
        reply.resize(REPLY_BYTES_MAX, 0);
        reply[at] = value;
        understood_only_as_sent(&reply);
        understood_only_as_sent(&reply[..bytes]);
        let data = Purpose::Data { client_id: 7, ticket: 1 << 40 };
        for purpose in [Purpose::Control, data] {
            let mut request = ConnectRequest { purpose, ..request() }.encode();
            request[at % REQUEST_BYTES_MAX] = value;
            understood_only_as_sent(&request);
            understood_only_as_sent(&request[..bytes % REQUEST_BYTES_MAX]);
        }
    }
}
