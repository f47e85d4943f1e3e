//! Targets: the messages between client and server.

use farside_control::cluster::Id;
use farside_control::{
    BLOCKS_PER_MESSAGE_MAX, CLIENTS_PER_MESSAGE_MAX, ClassStatistics, ClientDescription,
    ConnectRequest, ConnectedClient, DESCRIPTION_TEXT_BYTES_MAX, FabricKind, FreeBlock,
    HELD_PER_MESSAGE_MAX, HOT_PER_MESSAGE_MAX, HotBlock, KnownView, MESSAGE_BYTES_MAX, Purpose,
    READS_PER_MESSAGE_MAX, REPLY_BYTES_MAX, Refusal, Request, Role, ServerMessage, ServerRequest,
    ServerStatistics, SplitOutcome, Token, Welcome, decode_reply, encode_reply,
};
use farside_fabric::rdma::Rkeys;
use farside_layout::{BlockAddress, SizeClass};

use crate::{check_error_line, decoded};

fn class() -> SizeClass {
    SizeClass::from_index(7).unwrap()
}

fn some_blocks() -> Vec<FreeBlock> {
    (1..4).map(|n| FreeBlock { address: BlockAddress(n), generation: n * 3 }).collect()
}

/// Returns the bytes of each message.
fn encoded<M>(messages: &[M], encode: impl Fn(&M, &mut Vec<u8>)) -> Vec<Vec<u8>> {
    let encoded = |message| {
        let mut bytes = Vec::new();
        encode(message, &mut bytes);
        bytes
    };
    messages.iter().map(encoded).collect()
}

fn description() -> ClientDescription {
    let (host, program) = ("host-7".to_owned(), "kv-cli".to_owned());
    ClientDescription { pid: 4711, host, program, operations: 1 << 40, ..Default::default() }
}

/// Checks that the texts of a description are within their bounds.
fn check_description(description: &ClientDescription) {
    assert!(description.host.len() <= DESCRIPTION_TEXT_BYTES_MAX);
    assert!(description.program.len() <= DESCRIPTION_TEXT_BYTES_MAX);
}

pub(crate) fn requests() -> Vec<Vec<u8>> {
    let (class, blocks) = (class(), some_blocks());
    let addresses: Vec<_> = blocks.iter().map(|block| block.address).collect();
    let requests = [
        Request::TakeBlocks { class, count: 512 },
        Request::GiveBlocks { class, rested: true, blocks },
        Request::Held { collection: 7, last: true, blocks: addresses.clone() },
        Request::Reads { found: 1 << 40, absent: 3, blocks: addresses.clone() },
        Request::Samples { blocks: addresses },
        Request::Description(description()),
        Request::Clients { from_id: 7 },
        Request::Kick { client_id: 4095 },
        Request::Hot { for_ms: 5000 },
        Request::Collect,
        Request::Split { directory_hash: 0xdead_beef, local_depth: 32 },
        Request::Statistics,
        Request::Expires,
        Request::Snapshot { permille: 1000 },
        Request::Alive { clock_ns: 1 << 40 },
        Request::Heartbeat { clock_ns: 1 << 41, operations: 1 << 42 },
        Request::Map,
        Request::NewerMap { map: b"{}".to_vec() },
        Request::Goodbye,
    ];
    encoded(&requests, Request::encode)
}

/// A request of a client.
pub(crate) fn request(bytes: &[u8]) -> bool {
    let Some(request) = decoded(Request::decode(bytes)) else { return false };
    match &request {
        Request::GiveBlocks { blocks, .. } => assert!(blocks.len() <= BLOCKS_PER_MESSAGE_MAX),
        Request::Held { blocks, .. } => assert!(blocks.len() <= HELD_PER_MESSAGE_MAX),
        Request::Reads { blocks, .. } | Request::Samples { blocks } => {
            assert!(blocks.len() <= READS_PER_MESSAGE_MAX);
        }
        Request::Description(description) => check_description(description),
        Request::Split { local_depth, .. } => assert!(*local_depth <= 32),
        Request::Snapshot { permille } => assert!(*permille <= 1000),
        _ => {}
    }
    assert_eq!(encoded(&[request], Request::encode), [bytes]);
    assert!(bytes.len() <= MESSAGE_BYTES_MAX);
    true
}

fn class_statistics(class: SizeClass) -> ClassStatistics {
    ClassStatistics {
        class,
        blocks: 9,
        blocks_free: 4,
        blocks_resting: 1,
        evicted: 7,
        evicted_after_ms: 60_000,
    }
}

pub(crate) fn replies() -> Vec<Vec<u8>> {
    let (class, blocks) = (class(), some_blocks());
    let classes = vec![class_statistics(class)];
    let client = ConnectedClient {
        id: 7,
        role: Role::Writer,
        fabric: FabricKind::Tcp,
        is_asking: true,
        user: Some(1000),
        connected_ms: 1 << 40,
        description: Some(description()),
        description_age_ms: 7,
    };
    let other = ConnectedClient { user: None, description: None, ..client.clone() };
    let hot = HotBlock { address: BlockAddress(7), class, reads: 1 << 40 };
    let messages = [
        ServerMessage::Blocks { class, rested: true, soon: false, blocks },
        ServerMessage::Blocks { class, rested: false, soon: true, blocks: Vec::new() },
        ServerMessage::AllPinned { class },
        ServerMessage::Split { directory_hash: 7, local_depth: 3, outcome: SplitOutcome::Later },
        ServerMessage::Request(ServerRequest::Report { collection: 9 }),
        ServerMessage::Request(ServerRequest::Return),
        ServerMessage::Request(ServerRequest::Reads),
        ServerMessage::Request(ServerRequest::Samples),
        ServerMessage::Request(ServerRequest::Describe),
        ServerMessage::Clients { last: true, clients: vec![client, other] },
        ServerMessage::Kicked { was_connected: true },
        ServerMessage::Hot { samples: 7, blocks: vec![hot, hot] },
        ServerMessage::Statistics(ServerStatistics { clients: 3, classes, ..Default::default() }),
        ServerMessage::Statistics(ServerStatistics::default()),
        ServerMessage::Heartbeat { clock_ns: 1 << 40 },
        ServerMessage::Map { map: b"{}".to_vec() },
    ];
    encoded(&messages, ServerMessage::encode)
}

/// A message of the server.
pub(crate) fn reply(bytes: &[u8]) -> bool {
    let Some(reply) = decoded(ServerMessage::decode(bytes)) else { return false };
    match &reply {
        ServerMessage::Blocks { blocks, .. } => assert!(blocks.len() <= BLOCKS_PER_MESSAGE_MAX),
        ServerMessage::Split { local_depth, .. } => assert!(*local_depth <= 32),
        ServerMessage::Clients { clients, .. } => {
            assert!(clients.len() <= CLIENTS_PER_MESSAGE_MAX);
            clients.iter().filter_map(|it| it.description.as_ref()).for_each(check_description);
        }
        ServerMessage::Hot { blocks, .. } => assert!(blocks.len() <= HOT_PER_MESSAGE_MAX),
        _ => {}
    }
    assert_eq!(encoded(&[reply], ServerMessage::encode), [bytes]);
    assert!(bytes.len() <= MESSAGE_BYTES_MAX);
    true
}

pub(crate) fn hellos() -> Vec<Vec<u8>> {
    let data = Purpose::Data { client_id: 7, session_secret: 1 << 40 };
    let map = ConnectRequest {
        role: Role::Reader,
        purpose: Purpose::Map,
        view: None,
        token: Token::NONE,
    };
    let hellos = [
        map,
        ConnectRequest {
            role: Role::Writer,
            purpose: Purpose::Control,
            view: None,
            token: Token::NONE,
        },
        ConnectRequest {
            role: Role::Reader,
            purpose: data,
            view: Some(KnownView { shard: 7, number: 1 << 20 }),
            token: Token::of("secret"),
        },
    ];
    hellos.map(|request| request.encode().to_vec()).into()
}

/// A client's first message: private data of RDMA-CM, or the first message on a socket.
pub(crate) fn hello(bytes: &[u8]) -> bool {
    match ConnectRequest::decode(bytes) {
        Ok(request) => {
            assert_eq!(&request.encode()[..], bytes);
            assert!(request.token.matches(&request.token));
            true
        }
        Err(refusal) => {
            // The refusal that the server sends back.
            check_error_line(&refusal);
            assert_eq!(decode_reply(&encode_reply(&Err(refusal))), Ok(Err(refusal)));
            false
        }
    }
}

pub(crate) fn welcomes() -> Vec<Vec<u8>> {
    let over_rdma = Welcome {
        client_id: 7,
        lease: 1 << 40,
        region_id: [3; 16],
        incarnation: 2,
        base_address: 0x7f00_0000_0000,
        region_bytes: 64 << 20,
        rkeys: Rkeys::whole(0x1234),
        round_trip_min_ns: 900,
        session_secret: 1 << 50,
        ..Welcome::default()
    };
    let (cluster, shard, view_number) = (Id([9; 16]), 5, 1 << 40);
    let slice_bytes = 24 << 20;
    let mut keys = Rkeys::whole(0x1234).keys;
    keys[1..3].copy_from_slice(&[0x1235, 0x1236]);
    let in_slices = Welcome { rkeys: Rkeys { slice_bytes, keys }, ..over_rdma };
    let whole = Rkeys::default();
    let over_tcp =
        Welcome { base_address: 0, rkeys: whole, cluster, shard, view_number, ..over_rdma };
    let shared = Welcome { round_trip_min_ns: 0, session_secret: 0, ..over_tcp };
    let refusals = [
        Refusal::Version { server: 1, client: 2 },
        Refusal::Full { clients: 5 },
        Refusal::UnknownClient { client: 12 },
    ];
    let for_map = Welcome::for_map(cluster, shard, view_number);
    let welcomes = [over_rdma, in_slices, over_tcp, shared, for_map];
    let replies = welcomes.into_iter().map(Ok).chain(refusals.map(Err));
    let mut encoded: Vec<_> = replies.map(|reply| encode_reply(&reply)).collect();
    let mut padded = encoded[0].clone();
    padded.resize(REPLY_BYTES_MAX, 0);
    encoded.push(padded);
    encoded
}

/// A server's answer to a hello. A refusal may come from a server of another version. So the bytes
/// may differ from the encoding of this version, and only the decoded refusal must round-trip.
pub(crate) fn welcome(bytes: &[u8]) -> bool {
    match decode_reply(bytes) {
        Ok(reply @ Ok(_)) => {
            let mut encoded_again = encode_reply(&reply);
            encoded_again.resize(bytes.len(), 0);
            assert_eq!(encoded_again, bytes);
            true
        }
        Ok(Err(refusal)) => {
            check_error_line(&refusal);
            assert_eq!(decode_reply(&encode_reply(&Err(refusal))), Ok(Err(refusal)));
            true
        }
        Err(error) => {
            check_error_line(&error);
            false
        }
    }
}
