use farside_fabric::rdma::{REASON_BYTES_MAX, Rkeys, SLICES_MAX};
use farside_layout::CHUNK_BYTES;
use proptest::prelude::*;

use super::*;
use crate::REPLY_BYTES_MAX;
use crate::cluster::Id;

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
        data_nonce: Nonce([41; 16]),
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
    ConnectRequest {
        versions: Versions::OWN,
        role: Role::Writer,
        purpose: Purpose::Control,
        view: None,
        nonce: Nonce([6; 16]),
    }
}

const DATA: Purpose = Purpose::Data { client_id: 7, proof: Proof([9; 16]) };

fn challenge() -> Challenge {
    let proofs = [Proof([2; 16]), Proof([3; 16])];
    Challenge { version: PROTOCOL_VERSION, nonce: Nonce([1; 16]), proofs }
}

#[test]
fn an_impossible_request_is_refused() {
    let data = Purpose::Data { client_id: 0, proof: Proof([5; 16]) };
    let without_client = ConnectRequest { purpose: data, ..request() }.encode();
    assert!(ConnectRequest::decode(&without_client).is_err());
    // Role, purpose, client id, shard, reserved, the number of a view without a shard, and a proof
    // of a control connection.
    let wrong = [(8, 3), (9, MAP + 1), (10, 1), (13, 2), (14, 1), (19, 1), (20, 1), (40, 1)];
    for (at, value) in wrong {
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
    let (reader, writer) = (Role::Reader, Role::Writer);
    let view = Some(KnownView { shard: SHARDS_MAX - 1, number: u32::MAX });
    for (role, purpose, view) in [
        (reader, Purpose::Control, None),
        (writer, DATA, None),
        (writer, Purpose::Control, view),
        (reader, Purpose::Map, None),
    ] {
        let request = ConnectRequest { role, purpose, view, ..request() };
        assert_eq!(ConnectRequest::decode(&request.encode()), Ok(request));
    }
    let versions = Versions { lowest: 3, highest: u16::MAX };
    let refusals = [
        Refusal::Version { server: Versions::OWN, client: versions },
        Refusal::Credentials,
        Refusal::Clustered,
        Refusal::NoCluster,
        Refusal::Spare,
        Refusal::OtherView { shard: 3, number: 1 << 40 },
        Refusal::Unconfirmed,
        Refusal::OutOfDescriptors { connections: 900 },
        Refusal::Full { clients: 5 },
        Refusal::Malformed { bytes: 3 },
        Refusal::ShuttingDown,
        Refusal::FullOfReaders { readers: 7 },
        Refusal::FullForUser { clients: 7 },
        Refusal::TooManySessions { sessions: 8 },
        Refusal::UnknownClient { client: 12 },
        Refusal::Device,
        Refusal::OldNonce { nonce: Nonce(std::array::from_fn(|at| at as u8)) },
        Refusal::NoSecret,
        Refusal::Unknown { code: 77 },
    ];
    for refusal in refusals {
        let mut padded = refusal.encode();
        padded.resize(REASON_BYTES_MAX, 0);
        assert_eq!(Challenge::decode(&padded), Ok(Err(refusal)));
        assert_eq!(DataAccepted::decode(&padded), Ok(Err(refusal)));
        assert_eq!(Welcome::decode(&refusal.encode()), Ok(Err(refusal)));
    }
    for welcome in [welcome(), in_slices(), Welcome::for_map(Id([5; 16]), 0, 0)] {
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(Ok(welcome)));
    }
    let padded = |mut bytes: Vec<u8>| {
        bytes.resize(REPLY_BYTES_MAX, 0);
        bytes
    };
    assert_eq!(Challenge::decode(&padded(challenge().encode())), Ok(Ok(challenge())));
    let accepted = DataAccepted { proof: Proof([8; 16]) };
    assert_eq!(DataAccepted::decode(&padded(accepted.encode())), Ok(Ok(accepted)));
    let proof = ProofMessage(Proof([8; 16]));
    assert_eq!(ProofMessage::decode(&proof.encode()), Ok(proof));
}

#[test]
fn a_refusal_for_versions_without_overlap_names_both_ranges() {
    let of = |lowest, highest| Versions { lowest, highest };
    let refusal = |client| {
        // What follows the versions need not mean anything to this program.
        let mut bytes = ConnectRequest { versions: client, ..request() }.encode();
        bytes[8..].fill(0xa5);
        ConnectRequest::decode(&bytes).unwrap_err()
    };
    let own = PROTOCOL_VERSION;
    for client in [of(1, own - 1), of(own + 1, own + 3), of(own + 1, own + 1)] {
        assert_eq!(refusal(client), Refusal::Version { server: Versions::OWN, client });
    }
    assert_eq!(
        refusal(of(own + 1, own + 3)).to_string(),
        format!(
            "the server speaks protocol version {own}, this client versions {} to {}: upgrade the \
             older",
            own + 1,
            own + 3
        )
    );
    // A range that is none, and one with a version of this program.
    assert!(matches!(refusal(of(own + 1, own)), Refusal::Malformed { .. }));
    let versions = of(own - 1, own + 1);
    let request = ConnectRequest { versions, ..request() };
    assert_eq!(ConnectRequest::decode(&request.encode()), Ok(request));
}

#[test]
fn a_challenge_in_another_version_is_an_error() {
    for version in [Versions::OWN.lowest - 1, Versions::OWN.highest + 1] {
        let error = Challenge::decode(&Challenge { version, ..challenge() }.encode()).unwrap_err();
        assert!(error.to_string().starts_with("protocol version"), "{error}");
    }
}

#[test]
fn an_impossible_welcome_is_an_error() {
    let error_after = |change: fn(&mut Welcome)| {
        let mut welcome = welcome();
        change(&mut welcome);
        Welcome::decode(&welcome.encode()).unwrap_err().to_string()
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
        ("round trip", error_after(|welcome| welcome.data_nonce = Nonce::default())),
        (
            "base address",
            error_after(|welcome| {
                (welcome.data_nonce, welcome.round_trip_min_ns) = (Nonce::default(), 0);
            }),
        ),
    ] {
        assert!(error.starts_with(field), "{field}: {error}");
    }
    let sliced = |change: fn(&mut Rkeys)| {
        let mut welcome = in_slices();
        change(&mut welcome.rkeys);
        Welcome::decode(&welcome.encode()).unwrap_err().to_string()
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
    let on_shared_memory =
        Welcome { round_trip_min_ns: 0, data_nonce: Nonce::default(), ..over_tcp };
    let for_map = Welcome::for_map(Id([5; 16]), 3, 1 << 33);
    for valid in [over_tcp, on_shared_memory, for_map] {
        assert_eq!(Welcome::decode(&valid.encode()), Ok(Ok(valid)));
    }
    for not_quite in [
        Welcome { incarnation: 1, ..for_map },
        Welcome { region_bytes: CHUNK_BYTES, ..for_map },
        Welcome { data_nonce: Nonce([1; 16]), ..for_map },
        Welcome { cluster: Id::default(), ..for_map },
        Welcome { shard: SHARDS_MAX, ..for_map },
    ] {
        assert!(Welcome::decode(&not_quite.encode()).is_err());
    }
    let mut longer = welcome().encode();
    longer.push(0);
    assert!(Welcome::decode(&longer).is_err());
}

/// Checks that bytes that decode are exactly those that encoding makes, so that every bit counts.
fn assert_decodes_only_what_encodes(bytes: &[u8]) {
    // RDMA-CM pads these.
    let padded = |mut encoded: Vec<u8>| {
        encoded.resize(bytes.len(), 0);
        encoded
    };
    if let Ok(request) = ConnectRequest::decode(bytes) {
        assert_eq!(&request.encode()[..], bytes);
    }
    if let Ok(Ok(challenge)) = Challenge::decode(bytes) {
        assert_eq!(padded(challenge.encode()), bytes);
    }
    if let Ok(Ok(accepted)) = DataAccepted::decode(bytes) {
        assert_eq!(padded(accepted.encode()), bytes);
    }
    if let Ok(proof) = ProofMessage::decode(bytes) {
        assert_eq!(proof.encode(), bytes);
    }
    if let Ok(Ok(welcome)) = Welcome::decode(bytes) {
        assert_eq!(welcome.encode(), bytes);
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
        let padded = |mut bytes: Vec<u8>| {
            bytes.resize(REPLY_BYTES_MAX, 0);
            bytes
        };
        let data = ConnectRequest { purpose: DATA, ..request() };
        for mut message in [
            welcome().encode(),
            in_slices().encode(),
            request().encode().to_vec(),
            data.encode().to_vec(),
            challenge().encode(),
            padded(challenge().encode()),
            padded(DataAccepted { proof: Proof([4; 16]) }.encode()),
            ProofMessage(Proof([4; 16])).encode(),
            padded(Refusal::Credentials.encode()),
        ] {
            let length = message.len();
            message[at % length] = value;
            assert_decodes_only_what_encodes(&message);
            assert_decodes_only_what_encodes(&message[..bytes % length]);
        }
    }
}
