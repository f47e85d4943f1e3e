use proptest::prelude::*;

use super::*;

fn some_blocks(count: u32) -> Vec<FreeBlock> {
    let block = |n| FreeBlock { address: BlockAddress(n), generation: n * 3 };
    (1..=count).map(block).collect()
}

fn class(index: u8) -> SizeClass {
    SizeClass::from_index(index).unwrap()
}

#[test]
fn messages_come_back() {
    let mut bytes = Vec::new();
    let full = some_blocks(BLOCKS_PER_MESSAGE_MAX as u32);
    for request in [
        Request::TakeBlocks { class: class(59), count: 512 },
        Request::GiveBlocks { class: class(0), rested: true, blocks: full.clone() },
        Request::GiveBlocks { class: class(1), rested: false, blocks: Vec::new() },
        Request::Statistics,
        Request::Expires,
        Request::Goodbye,
    ] {
        request.encode(&mut bytes);
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Request::decode(&bytes).unwrap(), request);
        assert!(Request::decode(&bytes[..bytes.len() - 1]).is_err());
    }
    let classes = SizeClass::all()
        .map(|class| ClassStatistics { class, blocks: 9, blocks_free: 4 })
        .collect();
    let statistics =
        ServerStatistics { clients: 3, clients_lost: 8, classes, ..Default::default() };
    for reply in [
        Reply::Blocks { class: class(3), rested: true, blocks: full },
        Reply::Statistics(statistics),
        Reply::Statistics(ServerStatistics::default()),
    ] {
        reply.encode(&mut bytes);
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Reply::decode(&bytes).unwrap(), reply);
        assert!(Reply::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
        let _ = Request::decode(&bytes);
        let _ = Reply::decode(&bytes);
    }

    #[test]
    fn damaged_messages_do_not_panic(at in 0usize..32, value: u8) {
        let mut bytes = Vec::new();
        let blocks = some_blocks(3);
        Request::GiveBlocks { class: class(0), rested: true, blocks }.encode(&mut bytes);
        bytes[at] = value;
        let _ = Request::decode(&bytes);
        let _ = Reply::decode(&bytes);
    }
}
