//! Targets: the messages between client and server, the map of a cluster, and its records.

use farside_cluster::{
    ClusterRecord, Memory, Records, ServedCopy, ServerRecord, ShardRecord, Versioned,
};
use farside_control::address::Address;
use farside_control::cluster::{ClusterMap, Id, ShardCopy, ShardView};
use farside_control::{
    BLOCKS_PER_MESSAGE_MAX, CLIENTS_PER_MESSAGE_MAX, Challenge, ClassStatistics, ClientDescription,
    ConnectRequest, ConnectedClient, ControlError, DESCRIPTION_TEXT_BYTES_MAX, DataAccepted,
    FabricKind, FreeBlock, HELD_PER_MESSAGE_MAX, HOT_PER_MESSAGE_MAX, HotBlock, KnownView,
    MESSAGE_BYTES_MAX, Nonce, PROTOCOL_VERSION, Proof, ProofMessage, Purpose,
    READS_PER_MESSAGE_MAX, REPLY_BYTES_MAX, Refusal, Request, Role, ServerMessage, ServerRequest,
    ServerStatistics, SplitOutcome, Versions, Welcome,
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
        Request::GiveHeads { class, blocks: blocks.clone() },
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
        Request::GiveBlocks { blocks, .. } | Request::GiveHeads { blocks, .. } => {
            assert!(blocks.len() <= BLOCKS_PER_MESSAGE_MAX)
        }
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
        ServerMessage::RoomLater { class, in_ms: 7 },
        ServerMessage::Larger { class, larger: SizeClass::EXTENT },
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
    let data = Purpose::Data { client_id: 7, proof: Proof([4; 16]) };
    let (versions, role, view) = (Versions::OWN, Role::Writer, None);
    let (purpose, nonce) = (Purpose::Control, Nonce([7; 16]));
    let control = ConnectRequest { versions, role, purpose, view, nonce };
    let versions = Versions { lowest: 0, highest: u16::MAX };
    let view = Some(KnownView { shard: 7, number: 1 << 20 });
    let hellos = [
        control,
        ConnectRequest { role: Role::Reader, purpose: Purpose::Map, ..control },
        ConnectRequest { versions, role: Role::Reader, purpose: data, view, nonce },
    ];
    hellos.map(|request| request.encode().to_vec()).into()
}

/// A client's first message: private data of RDMA-CM, or the first message on a socket.
pub(crate) fn hello(bytes: &[u8]) -> bool {
    match ConnectRequest::decode(bytes) {
        Ok(request) => {
            assert_eq!(&request.encode()[..], bytes);
            true
        }
        Err(refusal) => {
            // The refusal that the server sends back.
            check_refusal(refusal);
            false
        }
    }
}

/// A refusal may come from a server of another version. So the bytes may differ from the encoding
/// of this version, and only the decoded refusal must round-trip.
fn check_refusal(refusal: Refusal) {
    check_error_line(&refusal);
    assert_eq!(Challenge::decode(&refusal.encode()), Ok(Err(refusal)));
}

/// Checks an answer of a server, which RDMA-CM may have padded with zeros.
fn is_answer<M>(
    decoded: Result<Result<M, Refusal>, ControlError>,
    encode: impl Fn(&M) -> Vec<u8>,
    bytes: &[u8],
) -> bool {
    match decoded {
        Ok(Ok(message)) => {
            let mut encoded_again = encode(&message);
            encoded_again.resize(bytes.len(), 0);
            assert_eq!(encoded_again, bytes);
            true
        }
        Ok(Err(refusal)) => {
            check_refusal(refusal);
            true
        }
        Err(error) => {
            check_error_line(&error);
            false
        }
    }
}

pub(crate) fn proofs() -> Vec<Vec<u8>> {
    let proofs = [Proof([1; 16]), Proof([2; 16])];
    let challenge = Challenge { version: PROTOCOL_VERSION, nonce: Nonce([3; 16]), proofs };
    let refusal = Refusal::OldNonce { nonce: Nonce([5; 16]) };
    let mut messages = vec![
        challenge.encode(),
        DataAccepted { proof: proofs[0] }.encode(),
        ProofMessage(proofs[1]).encode(),
        refusal.encode(),
    ];
    let mut padded = messages[0].clone();
    padded.resize(REPLY_BYTES_MAX, 0);
    messages.push(padded);
    messages
}

/// A server's answer to a hello, or a client's proof.
pub(crate) fn proof(bytes: &[u8]) -> bool {
    let is_proof = match decoded(ProofMessage::decode(bytes)) {
        Some(proof) => {
            assert_eq!(proof.encode(), bytes);
            true
        }
        None => false,
    };
    is_proof
        | is_answer(Challenge::decode(bytes), Challenge::encode, bytes)
        | is_answer(DataAccepted::decode(bytes), DataAccepted::encode, bytes)
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
        data_nonce: Nonce([6; 16]),
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
    let shared = Welcome { round_trip_min_ns: 0, data_nonce: Nonce::default(), ..over_tcp };
    let older = Versions { lowest: 1, highest: 2 };
    let refusals = [
        Refusal::Version { server: Versions::OWN, client: older },
        Refusal::Full { clients: 5 },
        Refusal::UnknownClient { client: 12 },
    ];
    let for_map = Welcome::for_map(cluster, shard, view_number);
    let welcomes = [over_rdma, in_slices, over_tcp, shared, for_map].map(|it| it.encode());
    welcomes.into_iter().chain(refusals.map(|refusal| refusal.encode())).collect()
}

/// A server's answer to a proof.
pub(crate) fn welcome(bytes: &[u8]) -> bool {
    is_answer(Welcome::decode(bytes), Welcome::encode, bytes)
}

fn addresses() -> Vec<Address> {
    ["rdma://[fe80::1]:7400", "tcp://kv-1.rack:7400"].map(|text| text.parse().unwrap()).into()
}

fn copy() -> ShardCopy {
    let (server, region_id) = (Id([1; 16]), Id([2; 16]));
    ShardCopy { server, region_id, incarnation: 3, addresses: addresses(), host: "here".into() }
}

fn map_of(shards: Vec<ShardView>) -> ClusterMap {
    ClusterMap { cluster: Id([3; 16]), hash_key: Id([4; 16]), trust_ms: 2000, shards }
}

pub(crate) fn maps() -> Vec<Vec<u8>> {
    let served = ShardView { number: 7, copies: vec![copy()] };
    let maps = [map_of(vec![ShardView::default()]), map_of(vec![served.clone(), served])];
    maps.map(|map| map.encode()).into()
}

/// A server's message with the map of its cluster.
pub(crate) fn map(bytes: &[u8]) -> bool {
    let Some(map) = decoded(ClusterMap::decode(bytes)) else { return false };
    check_map(&map);
    let mut other = map_of(vec![ShardView { number: u64::MAX, copies: vec![copy()] }]);
    other.cluster = map.cluster;
    let before = other.number();
    other.merge(&map);
    assert!(other.number() >= before);
    true
}

/// Checks what clients rely on.
fn check_map(map: &ClusterMap) {
    assert_eq!(ClusterMap::decode(&map.encode()).as_ref(), Ok(map));
    let router = map.router();
    for key in 0..64_u32 {
        assert!(router.shard(router.hasher.hash(&key.to_le_bytes())) < map.shards.len());
    }
    for copy in map.shards.iter().flat_map(|view| &view.copies) {
        assert!(copy.reachable().count() <= copy.addresses.len());
    }
}

/// All records of a cluster: a line for each, with the key, a space and the value.
pub(crate) fn some_cluster_records() -> Vec<Vec<u8>> {
    let memory = Memory::File { file: "host 8 9".into() };
    let (copy, serving) = (copy(), Some(Id([5; 16])));
    let served = ServedCopy { copy, memory, serving, is_stopped: false, distrust_ms: 2100 };
    let record = |copies: &[ServedCopy], revoked: Option<&ServedCopy>| {
        let mut record = ShardRecord::default();
        (record.number, record.copies, record.revoked) = (5, copies.to_vec(), revoked.cloned());
        record
    };
    let label = Some("rack 1".into());
    let server = ServerRecord::new(Id([1; 16]), addresses(), label, 64 << 20, Some(0));
    let lines = |shards: &[ShardRecord]| {
        let count = shards.len() as u16;
        let cluster = ClusterRecord::new(Id([3; 16]), Id([4; 16]), count, 2000).change();
        let shards = shards.iter().zip(0..).map(|(record, shard)| record.change(shard));
        let changes = [cluster, (server.key(), Some(server.value()))].into_iter().chain(shards);
        let lines = changes.map(|(key, value)| [key.as_bytes(), b" ", &value.unwrap()].concat());
        lines.collect::<Vec<_>>().join(&b'\n')
    };
    vec![
        lines(&[ShardRecord::default()]),
        lines(&[record(std::slice::from_ref(&served), None), record(&[], Some(&served))]),
    ]
}

/// The records of a cluster, of which other programs may have changed each.
pub(crate) fn cluster_records(bytes: &[u8]) -> bool {
    let lines = bytes.split(|byte| *byte == b'\n').filter_map(|line| {
        let space = line.iter().position(|byte| *byte == b' ')?;
        let key = String::from_utf8(line[..space].to_vec()).ok()?;
        Some((key, Versioned { revision: 1, value: line[space + 1..].to_vec() }))
    });
    let records = Records { revision: 1, by_key: lines.collect() };
    records.servers().filter_map(Result::err).for_each(|error| check_error_line(&error));
    let Some(map) = decoded(records.map()) else { return false };
    check_map(&map);
    true
}
