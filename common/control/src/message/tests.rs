use proptest::prelude::*;

use super::*;
use crate::{ClassStatistics, DESCRIPTION_TEXT_BYTES_MAX, FabricKind, MESSAGE_BYTES_MAX, Role};

fn some_blocks(count: u32) -> Vec<FreeBlock> {
    let block = |n| FreeBlock { address: BlockAddress(n), generation: n * 3 };
    (1..=count).map(block).collect()
}

fn class(index: u8) -> SizeClass {
    SizeClass::from_index(index).unwrap()
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

fn description(text: &str) -> ClientDescription {
    ClientDescription {
        pid: u32::MAX,
        host: text.to_owned(),
        program: text.chars().rev().collect(),
        sessions: 4096,
        blocks_held: 1 << 40,
        operations: u64::MAX,
        reads_found: 1,
        reads_absent: 2,
        get_p50_ns: 3,
        get_p99_ns: 4,
    }
}

fn clients(count: usize) -> Vec<ConnectedClient> {
    let text = "x".repeat(DESCRIPTION_TEXT_BYTES_MAX);
    let client = |at: usize| ConnectedClient {
        id: at as u16,
        role: if at.is_multiple_of(2) { Role::Reader } else { Role::Writer },
        fabric: [FabricKind::Shm, FabricKind::Tcp, FabricKind::Rdma][at % 3],
        is_asking: at == 7,
        user: (!at.is_multiple_of(5)).then_some(u32::MAX),
        connected_ms: u64::MAX,
        description: (at % 4 != 1).then(|| description(&text)),
        description_age_ms: 1 << 50,
    };
    (0..count).map(client).collect()
}

fn hot_blocks(count: usize) -> Vec<HotBlock> {
    let block = |at: usize| HotBlock {
        address: BlockAddress(u32::MAX - at as u32),
        class: class((at % 60) as u8),
        reads: u64::MAX - at as u64,
    };
    (0..count).map(block).collect()
}

#[test]
fn a_text_is_shortened_between_two_characters() {
    let umlauts = "\u{e4}".repeat(DESCRIPTION_TEXT_BYTES_MAX);
    for text in [umlauts.clone(), format!("x{umlauts}"), "short".into(), String::new()] {
        let mut bytes = Vec::new();
        Request::Description(description(&text)).encode(&mut bytes);
        let Request::Description(decoded) = Request::decode(&bytes).unwrap() else { panic!() };
        assert!(text.starts_with(&decoded.host), "{text}");
        assert!(decoded.host.len() + 1 >= text.len().min(DESCRIPTION_TEXT_BYTES_MAX), "{text}");
    }
}

#[test]
fn messages_round_trip() {
    let mut bytes = Vec::new();
    let full = some_blocks(BLOCKS_PER_MESSAGE_MAX as u32);
    for request in [
        Request::TakeBlocks { class: class(59), count: 512 },
        Request::GiveBlocks { class: class(0), rested: true, blocks: full.clone() },
        Request::GiveBlocks { class: class(1), rested: false, blocks: Vec::new() },
        Request::GiveHeads { class: class(60), blocks: full.clone() },
        Request::Held {
            collection: 7,
            last: true,
            blocks: (0..HELD_PER_MESSAGE_MAX as u32).map(BlockAddress).collect(),
        },
        Request::Held { collection: u32::MAX, last: false, blocks: Vec::new() },
        Request::Reads {
            found: u64::MAX,
            absent: 7,
            blocks: (0..READS_PER_MESSAGE_MAX as u32).map(BlockAddress).collect(),
        },
        Request::Reads { found: 0, absent: 0, blocks: Vec::new() },
        Request::Samples { blocks: (0..READS_PER_MESSAGE_MAX as u32).map(BlockAddress).collect() },
        Request::Samples { blocks: Vec::new() },
        Request::Description(description("host-7")),
        Request::Description(ClientDescription::default()),
        Request::Clients { from_id: u16::MAX },
        Request::Kick { client_id: 4095 },
        Request::Hot { for_ms: u32::MAX },
        Request::Collect,
        Request::Split { directory_hash: 0xdead_beef, local_depth: 32 },
        Request::Statistics,
        Request::Expires,
        Request::Snapshot { permille: 1000 },
        Request::Alive { clock_ns: u64::MAX - 7 },
        Request::Goodbye,
    ] {
        request.encode(&mut bytes);
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Request::decode(&bytes).unwrap(), request);
        assert!(Request::decode(&bytes[..bytes.len() - 1]).is_err());
    }
    let classes = SizeClass::all().map(class_statistics).collect();
    let statistics =
        ServerStatistics { clients: 3, clients_lost: 8, classes, ..Default::default() };
    for reply in [
        ServerMessage::Blocks { class: class(3), rested: true, soon: false, blocks: full },
        ServerMessage::Blocks { class: class(4), rested: true, soon: true, blocks: Vec::new() },
        ServerMessage::Blocks {
            class: class(4),
            rested: false,
            soon: false,
            blocks: some_blocks(2),
        },
        ServerMessage::AllPinned { class: class(4) },
        ServerMessage::RoomLater { class: class(4), in_ms: 29_000 },
        ServerMessage::Larger { class: class(4), larger: class(9) },
        ServerMessage::Split {
            directory_hash: 7,
            local_depth: 3,
            outcome: SplitOutcome::Impossible,
        },
        ServerMessage::Request(ServerRequest::Report { collection: 9 }),
        ServerMessage::Request(ServerRequest::Return),
        ServerMessage::Request(ServerRequest::Alive),
        ServerMessage::Request(ServerRequest::Reads),
        ServerMessage::Request(ServerRequest::Samples),
        ServerMessage::Request(ServerRequest::Describe),
        ServerMessage::Clients { last: false, clients: clients(CLIENTS_PER_MESSAGE_MAX) },
        ServerMessage::Clients { last: true, clients: Vec::new() },
        ServerMessage::Kicked { was_connected: true },
        ServerMessage::Hot { samples: u64::MAX, blocks: hot_blocks(HOT_PER_MESSAGE_MAX) },
        ServerMessage::Hot { samples: 0, blocks: Vec::new() },
        ServerMessage::Statistics(statistics),
        ServerMessage::Statistics(ServerStatistics::default()),
    ] {
        reply.encode(&mut bytes);
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(ServerMessage::decode(&bytes).unwrap(), reply);
        assert!(ServerMessage::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}

/// Checks that bytes that decode are exactly those that encoding makes, so that every bit counts.
fn assert_decodes_only_what_encodes(bytes: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = Request::decode(bytes) {
        request.encode(&mut again);
        assert_eq!(again, bytes);
    }
    if let Ok(reply) = ServerMessage::decode(bytes) {
        reply.encode(&mut again);
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
        kind in 0usize..20,
        at in 0usize..300,
        value: u8,
        cut in 0usize..40,
    ) {
        let mut bytes = Vec::new();
        let (class, blocks) = (class(7), some_blocks(3));
        let classes = vec![class_statistics(class)];
        match kind {
            0 => Request::TakeBlocks { class, count: 3 }.encode(&mut bytes),
            1 => Request::GiveBlocks { class, rested: true, blocks }.encode(&mut bytes),
            2 => Request::Statistics.encode(&mut bytes),
            3 => Request::Goodbye.encode(&mut bytes),
            4 => {
                let message = ServerMessage::Blocks { class, rested: false, soon: true, blocks };
                message.encode(&mut bytes);
            }
            5 => {
                let blocks = blocks.iter().map(|block| block.address).collect();
                Request::Held { collection: 7, last: true, blocks }.encode(&mut bytes);
            }
            6 => Request::Collect.encode(&mut bytes),
            11 => Request::Snapshot { permille: 7 }.encode(&mut bytes),
            7 => ServerMessage::Request(ServerRequest::Report { collection: 9 }).encode(&mut bytes),
            8 => ServerMessage::Request(ServerRequest::Return).encode(&mut bytes),
            9 => Request::Split { directory_hash: 9, local_depth: 4 }.encode(&mut bytes),
            10 => {
                let outcome = SplitOutcome::Later;
                let message = ServerMessage::Split { directory_hash: 9, local_depth: 4, outcome };
                message.encode(&mut bytes);
            }
            12 => ServerMessage::Request(ServerRequest::Reads).encode(&mut bytes),
            13 => {
                let blocks = blocks.iter().map(|block| block.address).collect();
                Request::Reads { found: 9, absent: 1 << 40, blocks }.encode(&mut bytes);
            }
            15 => Request::Description(description("host-7")).encode(&mut bytes),
            16 => ServerMessage::Clients { last: true, clients: clients(3) }.encode(&mut bytes),
            17 => ServerMessage::Hot { samples: 7, blocks: hot_blocks(2) }.encode(&mut bytes),
            18 => ServerMessage::Kicked { was_connected: true }.encode(&mut bytes),
            19 => Request::Kick { client_id: 7 }.encode(&mut bytes),
            _ => ServerMessage::Statistics(ServerStatistics { classes, ..Default::default() })
                .encode(&mut bytes),
        }
        assert_decodes_only_what_encodes(&bytes[..bytes.len().saturating_sub(cut)]);
        let at = at % bytes.len();
        bytes[at] = value;
        assert_decodes_only_what_encodes(&bytes);
    }
}

#[test]
fn a_report_of_any_length_is_divided_into_messages() {
    for count in [0, 1, HELD_PER_MESSAGE_MAX, HELD_PER_MESSAGE_MAX + 1, 2 * HELD_PER_MESSAGE_MAX] {
        let blocks: Vec<_> = (0..count as u32).map(BlockAddress).collect();
        let mut reported = Vec::new();
        let mut last_flags = Vec::new();
        for message in Request::held(7, &blocks) {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let Request::Held { collection: 7, last, blocks } = Request::decode(&bytes).unwrap()
            else {
                panic!("{message:?}");
            };
            reported.extend(blocks);
            last_flags.push(last);
        }
        assert_eq!(reported, blocks);
        assert!(last_flags.pop().unwrap() && !last_flags.contains(&true), "{last_flags:?}");
    }
}
