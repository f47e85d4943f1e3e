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
        rkeys: Rkeys::whole(99),
        round_trip_min_ns: 500,
        session_secret: 41,
        cluster: Id([5; 16]),
        shard: 3,
        view_number: 1 << 33,
    }
}

/// A region of five slices, of which the last one is short.
fn in_slices() -> Welcome {
    let mut keys = [0; SLICES_MAX];
    keys[..5].copy_from_slice(&[9, 0, 8, u32::MAX, 7]);
    let rkeys = Rkeys { slice_bytes: 250 << 20, keys };
    Welcome { rkeys, ..welcome() }
}

fn request() -> ConnectRequest {
    ConnectRequest { role: Role::Writer, purpose: Purpose::Control, view: None, token: Token::NONE }
}

#[test]
fn an_impossible_request_is_refused() {
    let data = Purpose::Data { client_id: 0, session_secret: 5 };
    let without_client = ConnectRequest { purpose: data, ..request() }.encode();
    assert!(ConnectRequest::decode(&without_client).is_err());
    let data = Purpose::Data { client_id: 3, session_secret: 0 };
    let without_secret = ConnectRequest { purpose: data, ..request() }.encode();
    assert!(ConnectRequest::decode(&without_secret).is_err());
    // Role, purpose, client id, session secret, shard, and the number of a view without a shard.
    for (at, value) in [(6, 3), (7, MAP + 1), (8, 1), (10, 1), (19, 2), (23, 128)] {
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
fn requests_and_replies_round_trip() {
    let data = Purpose::Data { client_id: 7, session_secret: 1 << 40 };
    let (reader, writer) = (Role::Reader, Role::Writer);
    let view = Some(KnownView { shard: SHARDS_MAX - 1, number: u32::MAX });
    for (role, purpose, view) in [
        (reader, Purpose::Control, None),
        (writer, data, None),
        (writer, Purpose::Control, view),
        (reader, Purpose::Map, None),
    ] {
        let request = ConnectRequest { role, purpose, view, token: Token::of("secret") };
        let decoded = ConnectRequest::decode(&request.encode()).unwrap();
        assert!(decoded == request);
        assert!(decoded.token.matches(&Token::of("secret")));
        assert!(!decoded.token.matches(&Token::of("Secret")));
    }
    let refusals = [
        Refusal::Version { server: 1, client: 2 },
        Refusal::Credentials,
        Refusal::Clustered,
        Refusal::NoCluster,
        Refusal::Spare,
        Refusal::OtherView { shard: 3, number: 1 << 40 },
        Refusal::Unconfirmed,
        Refusal::Full { clients: 5 },
        Refusal::Malformed { bytes: 3 },
        Refusal::ShuttingDown,
        Refusal::FullOfReaders { readers: 7 },
        Refusal::FullForUser { clients: 7 },
        Refusal::TooManySessions { sessions: 8 },
        Refusal::UnknownClient { client: 12 },
        Refusal::Device,
        Refusal::Unknown { code: 77 },
    ];
    for reply in refusals.into_iter().map(Err).chain([
        Ok(welcome()),
        Ok(in_slices()),
        Ok(Welcome::for_map(Id([5; 16]), 0, 0)),
    ]) {
        let mut padded = encode_reply(&reply);
        // A rejection has less room than the answer to an accepted request.
        assert!(reply.is_ok() || padded.len() <= REASON_BYTES_MAX);
        padded.resize(REPLY_BYTES_MAX, 0);
        assert_eq!(decode_reply(&padded).unwrap(), reply);
    }
}

#[test]
fn the_refusal_of_another_version_names_both_versions() {
    let mut bytes = request().encode();
    bytes[4] = 9;
    let refusal = ConnectRequest::decode(&bytes).err().unwrap();
    assert_eq!(refusal, Refusal::Version { server: PROTOCOL_VERSION.into(), client: 9 });
}

#[test]
fn an_impossible_welcome_is_an_error() {
    let error_after = |change: fn(&mut Welcome)| {
        let mut welcome = welcome();
        change(&mut welcome);
        decode_reply(&encode_reply(&Ok(welcome))).unwrap_err().to_string()
    };
    for (field, error) in [
        ("client id", error_after(|welcome| welcome.client_id = 0)),
        ("client id", error_after(|welcome| welcome.client_id = CLIENT_IDS as u16)),
        ("lease", error_after(|welcome| welcome.lease = 0)),
        ("incarnation", error_after(|welcome| welcome.incarnation = 0)),
        ("region length", error_after(|welcome| welcome.region_bytes = 0)),
        ("region length", error_after(|welcome| welcome.region_bytes = u64::MAX)),
        ("region length", error_after(|welcome| welcome.region_bytes += 8)),
        ("base address", error_after(|welcome| welcome.base_address += 4)),
        ("base address", error_after(|welcome| welcome.base_address = u64::MAX - 7)),
        ("rkey", error_after(|welcome| welcome.base_address = 0)),
        ("round trip", error_after(|welcome| welcome.round_trip_min_ns = 0)),
        ("round trip", error_after(|welcome| welcome.round_trip_min_ns = u32::MAX)),
        ("round trip", error_after(|welcome| welcome.session_secret = 0)),
        (
            "base address",
            error_after(|welcome| {
                (welcome.session_secret, welcome.round_trip_min_ns) = (0, 0);
            }),
        ),
    ] {
        assert!(error.starts_with(field), "{field}: {error}");
    }
    let sliced = |change: fn(&mut Rkeys)| {
        let mut welcome = in_slices();
        change(&mut welcome.rkeys);
        decode_reply(&encode_reply(&Ok(welcome))).unwrap_err().to_string()
    };
    for error in [
        // A key too many, as many slices as keys are possible and one more, and only one slice.
        sliced(|rkeys| rkeys.keys[5] = 1),
        sliced(|rkeys| rkeys.slice_bytes = 0),
        sliced(|rkeys| rkeys.slice_bytes = 60 << 20),
        sliced(|rkeys| rkeys.slice_bytes = 1 << 30),
        sliced(|rkeys| rkeys.slice_bytes = u64::from(u32::MAX) * CHUNK_BYTES),
    ] {
        assert!(error.starts_with("slice length"), "{error}");
    }
    let over_tcp = Welcome { base_address: 0, rkeys: Rkeys::default(), ..welcome() };
    let on_shared_memory = Welcome { round_trip_min_ns: 0, session_secret: 0, ..over_tcp };
    for valid in [over_tcp, on_shared_memory] {
        assert_eq!(decode_reply(&encode_reply(&Ok(valid))).unwrap(), Ok(valid));
    }
    let for_map = Welcome::for_map(Id([5; 16]), 3, 1 << 33);
    assert_eq!(decode_reply(&encode_reply(&Ok(for_map))).unwrap(), Ok(for_map));
    for not_quite in [
        Welcome { incarnation: 1, ..for_map },
        Welcome { region_bytes: CHUNK_BYTES, ..for_map },
        Welcome { session_secret: 1, ..for_map },
        Welcome { cluster: Id::default(), ..for_map },
        Welcome { shard: SHARDS_MAX, ..for_map },
    ] {
        assert!(decode_reply(&encode_reply(&Ok(not_quite))).is_err());
    }
    let mut padded = encode_reply(&Ok(welcome()));
    padded.resize(REPLY_BYTES_MAX, 0);
    *padded.last_mut().unwrap() = 1;
    assert!(decode_reply(&padded).is_err());
    padded.push(0);
    assert!(decode_reply(&padded).is_err());
}

/// Checks that bytes that decode are exactly those that encoding makes, so that every bit counts.
fn assert_decodes_only_what_encodes(bytes: &[u8]) {
    if let Ok(request) = ConnectRequest::decode(bytes) {
        assert_eq!(&request.encode()[..], bytes);
    }
    if let Ok(Ok(welcome)) = decode_reply(bytes) {
        let mut again = encode_reply(&Ok(welcome));
        again.resize(bytes.len(), 0);
        assert_eq!(again, bytes);
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_to_a_message_or_an_error(bytes: Vec<u8>) {
        assert_decodes_only_what_encodes(&bytes);
    }

    #[test]
    fn damaged_messages_are_errors_or_other_messages(
        at in 0..REPLY_BYTES_MAX,
        value: u8,
        bytes in 0..=REPLY_BYTES_MAX,
    ) {
        for welcome in [welcome(), in_slices()] {
            let mut reply = encode_reply(&Ok(welcome));
            reply.resize(REPLY_BYTES_MAX, 0);
            reply[at] = value;
            assert_decodes_only_what_encodes(&reply);
            assert_decodes_only_what_encodes(&reply[..bytes]);
        }
        let data = Purpose::Data { client_id: 7, session_secret: 1 << 40 };
        for purpose in [Purpose::Control, data] {
            let mut request = ConnectRequest { purpose, ..request() }.encode();
            request[at % REQUEST_BYTES_MAX] = value;
            assert_decodes_only_what_encodes(&request);
            assert_decodes_only_what_encodes(&request[..bytes % REQUEST_BYTES_MAX]);
        }
    }
}
