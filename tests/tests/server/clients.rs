//! Taking and giving blocks over the wire; clients that break the rules are fenced.

use farside_layout::{BlockAddress, HeaderWord};

use super::*;

#[test]
fn a_block_is_delivered_to_one_client_and_can_be_given_back() {
    let (folder, _server) = serving();
    let (one, two) = (folder.writer(), folder.writer());
    let class = class(1000);
    let (first, second) = (one.take(class, 100), two.take(class, 100));
    assert_eq!((first.len(), second.len()), (100, 100));
    let fresh = first[0].generation;
    assert!(first.iter().all(|block| !second.contains(block) && block.generation == fresh));
    let before = one.statistics();
    assert_eq!((before.clients, before.blocks_taken, before.blocks_returned), (2, 200, 0));
    assert_eq!(before.classes[0].blocks - before.classes[0].blocks_free, 200);
    one.give(class, first, true);
    let after = one.statistics();
    assert_eq!(after.blocks_returned, 100);
    assert_eq!(after.classes[0].blocks - after.classes[0].blocks_free, 100);
    assert_eq!(after.chunks, after.chunks_free + after.chunks_index + 1);
    assert!(after.subtables > 0 && after.incarnation == 1);
}

#[test]
fn all_blocks_can_be_taken_and_then_the_request_is_denied() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let class = class(2 << 20);
    let mut blocks = Vec::new();
    loop {
        match client.take(class, 64) {
            taken if taken.is_empty() => break,
            taken => blocks.extend(taken),
        }
    }
    let statistics = client.statistics();
    assert_eq!(blocks.len() as u64, statistics.chunks - statistics.chunks_index);
    assert_eq!((statistics.chunks_free, statistics.requests_denied), (0, 1));
    client.give(class, blocks.split_off(1), false);
    eventually("the blocks have rested for GRACE", || !client.take(class, 1).is_empty());
}

#[test]
fn an_invalid_message_ends_only_its_sender() {
    let (folder, _server) = serving();
    let good = folder.writer();
    for bytes in 0..=200 {
        let bad = folder.writer();
        bad.connection.send(&vec![0xee; bytes], None).unwrap();
        assert_eq!(bad.receive(), None);
    }
    let statistics = good.statistics();
    assert_eq!((statistics.clients_lost, statistics.clients), (201, 1));
}

#[test]
fn both_chunks_of_a_large_block_are_resting() {
    let mut folder = TestFolder::new();
    // With a short GRACE the chunks could be free before the statistics are read.
    folder.config.grace_ms = 1000;
    let _server = folder.start();
    let (client, class) = (folder.writer(), class(4 << 20));
    let blocks = client.take(class, 1);
    assert_eq!((blocks.len(), client.statistics().chunks_emptying), (1, 0));
    client.give(class, blocks, true);
    assert_eq!(client.statistics().chunks_emptying, 2);
}

#[test]
fn a_client_that_gives_a_block_it_does_not_hold_is_fenced() {
    let (folder, _server) = serving();
    let (good, class) = (folder.writer(), class(64));
    let lies: [fn(FreeBlock) -> Vec<FreeBlock>; 3] = [
        |block| vec![block, block],
        |block| vec![FreeBlock { address: BlockAddress(0), ..block }],
        |block| vec![FreeBlock { address: BlockAddress(u32::MAX), ..block }],
    ];
    for (lost, lie) in (1..).zip(lies) {
        let bad = folder.writer();
        let block = bad.take(class, 1)[0];
        bad.give(class, lie(block), true);
        assert_eq!(bad.receive(), None);
        assert_eq!(bad.lease(), 0);
        assert_eq!(good.statistics().clients_lost, lost);
    }
    // The server has the block that was given twice only once.
    let mut taken = Vec::new();
    for _ in 0..4 {
        taken.extend(good.take(class, 4096));
    }
    assert_distinct(&taken);
}

#[test]
fn answers_wait_for_a_client_that_reads_slowly() {
    const REQUESTS: u64 = 40;
    let mut folder = TestFolder::new();
    // An answer has at most a quarter of the free blocks: that must fill every message.
    folder.config.memory = Some(ByteSize::mib(64));
    let _server = folder.start();
    let (good, slow) = (folder.writer(), folder.writer());
    let class = class(64);
    let all = REQUESTS * BLOCKS_PER_MESSAGE_MAX as u64;
    for _ in 0..REQUESTS {
        slow.send(&Request::TakeBlocks { class, count: BLOCKS_PER_MESSAGE_MAX as u32 });
    }
    eventually("a request is answered", || good.statistics().blocks_taken > 0);
    std::thread::sleep(Duration::from_millis(20));
    let mut taken = Vec::new();
    for _ in 0..REQUESTS {
        match slow.receive() {
            Some(ServerMessage::Blocks { blocks, .. }) => taken.extend(blocks),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(taken.len() as u64, all);
    assert_distinct(&taken);
    let statistics = slow.statistics();
    assert_eq!((statistics.clients, statistics.clients_lost), (2, 0));
    assert_eq!(statistics.blocks_taken, all);
}

#[test]
fn the_server_reads_no_requests_of_a_client_that_reads_no_answers() {
    let (folder, _server) = serving();
    let (good, not_reading) = (folder.writer(), folder.writer());
    let mut bytes = Vec::new();
    Request::TakeBlocks { class: class(64), count: 4096 }.encode(&mut bytes);
    let mut requests_sent = 0;
    let mut is_full = false;
    loop {
        match not_reading.connection.send(&bytes, None) {
            Ok(()) => (requests_sent, is_full) = (requests_sent + 1, false),
            // The socket is still full a while later: the server does not read from it.
            Err(_) if is_full => break,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                is_full = true;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    assert_eq!(good.statistics().clients_lost, 0, "no client is fenced");
    assert!(!good.take(class(1000), 1).is_empty());
    for _ in 0..requests_sent {
        assert!(matches!(not_reading.receive(), Some(ServerMessage::Blocks { .. })));
    }
    assert_eq!(not_reading.statistics().clients, 2);
}

/// Returns the number of blocks that are not with the depot.
fn blocks_out(client: &Client) -> u64 {
    client.statistics().classes.iter().map(|class| class.blocks - class.blocks_free).sum()
}

/// The server reads a goodbye that follows a request although the client is gone, and takes back
/// the blocks of the answer. By chance the answer is sent before or after the client closes, so
/// there are many rounds.
#[test]
fn a_client_that_signs_off_without_reading_keeps_no_block() {
    let (folder, _server) = serving();
    let (good, class) = (folder.writer(), class(64));
    for round in 0..200 {
        let hasty = folder.writer();
        let blocks = hasty.take(class, 100);
        assert_eq!(blocks.len(), 100);
        hasty.send(&Request::TakeBlocks { class, count: 50 });
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(round * 5));
        }
        hasty.give(class, blocks, true);
        hasty.send(&Request::Goodbye);
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_micros(round * 5));
        }
    }
    eventually("all blocks are back", || blocks_out(&good) == 0);
    eventually("the hasty clients are gone", || good.statistics().clients == 1);
    let statistics = good.statistics();
    assert_eq!(statistics.clients_lost, 0);
    assert_eq!(statistics.blocks_taken, statistics.blocks_returned);
}

#[test]
fn blocks_in_answers_that_cannot_be_sent_are_taken_back() {
    let (folder, _server) = serving();
    let (good, class) = (folder.writer(), class(64));
    for says_goodbye in [true, false] {
        let hasty = folder.writer();
        let blocks = hasty.take(class, 100);
        // As if the client had closed before the server read its requests.
        rustix::net::shutdown(&hasty.connection, rustix::net::Shutdown::Read).unwrap();
        for _ in 0..3 {
            hasty.send(&Request::TakeBlocks { class, count: 50 });
        }
        hasty.give(class, blocks, true);
        if says_goodbye {
            hasty.send(&Request::Goodbye);
        }
        eventually("all blocks are back", || blocks_out(&good) == 0);
        drop(hasty);
        eventually("the client is gone", || good.statistics().clients == 1);
        assert_eq!(good.statistics().clients_lost, u64::from(!says_goodbye));
    }
}

/// A writer disconnects in the middle of many answers. The blocks in unsent ones are taken back.
#[test]
fn blocks_in_unsent_answers_to_a_lost_client_are_taken_back() {
    let mut folder = TestFolder::new();
    folder.config.memory = Some(ByteSize::mib(64));
    let _server = folder.start();
    let (good, not_reading) = (folder.writer(), folder.writer());
    for _ in 0..40 {
        not_reading.send(&Request::TakeBlocks { class: class(64), count: 4096 });
    }
    eventually("a request is answered", || good.statistics().blocks_taken > 0);
    drop(not_reading);
    eventually("the client is lost", || good.statistics().clients_lost == 1);
    let statistics = good.statistics();
    assert_eq!(statistics.blocks_taken - statistics.blocks_returned, blocks_out(&good));
    assert!(statistics.blocks_returned >= 4096, "at least the blocks of one answer");
}

#[test]
fn after_a_restart_a_fresh_block_has_the_generation_after_its_headers() {
    let folder = TestFolder::with_file();
    let server = folder.start();
    let client = folder.writer();
    let class = class(64);
    let block = client.take(class, 1)[0];
    let slot = client.slot(0, 0);
    client.place_word(slot, class, FreeBlock { generation: 7, ..block }, |word| word.emptied());
    server.stop();
    let _server = folder.start();
    let retaken = folder.writer().take(class, 1)[0];
    assert_eq!(retaken, FreeBlock { generation: 8, ..block });
    let header = HeaderWord::from_bits(client.region.load(block.address.claimed_offset()).unwrap());
    assert_eq!(header.generation, 7);
}

/// The index never shrinks, so a client may not turn the heap into index by mere requests.
#[test]
fn only_a_subtable_with_a_full_window_is_split() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let before = client.statistics();
    let depth = before.directory_depth as u8;
    for (prefix, depth) in subtables_from(depth).take_while(|(_, depth)| *depth < 12) {
        assert_eq!(
            client.split(prefix, depth),
            SplitOutcome::Done,
            "its window has room: the client looks again"
        );
    }
    let after = client.statistics();
    assert_eq!((after.splits, after.chunks_index), (0, before.chunks_index));
    client.fill_window(0, depth);
    assert_eq!(client.split(0, depth), SplitOutcome::Done);
    assert_eq!(client.split(0, depth + 1), SplitOutcome::Done, "the new subtable has room");
    assert_eq!(client.statistics().splits, 1);
}
