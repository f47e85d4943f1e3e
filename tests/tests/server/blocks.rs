//! Blocks in and out over the wire, and that clients that break the rules are fenced.

use farside_layout::{BlockAddress, HeaderWord};

use super::*;

#[test]
fn blocks_are_handed_out_once_and_come_back() {
    let place = Place::new();
    let _server = place.start();
    let (one, two) = (place.writer(), place.writer());
    let class = class(1000);
    let (first, second) = (one.take(class, 100), two.take(class, 100));
    assert_eq!((first.len(), second.len()), (100, 100));
    let fresh = first[0].generation;
    assert!(first.iter().all(|block| !second.contains(block) && block.generation == fresh));
    let before = one.statistics();
    assert_eq!((before.clients, before.blocks_taken, before.blocks_given), (2, 200, 0));
    assert_eq!(before.classes[0].blocks - before.classes[0].blocks_free, 200);
    one.give(class, first, true);
    let after = one.statistics();
    assert_eq!(after.blocks_given, 100);
    assert_eq!(after.classes[0].blocks - after.classes[0].blocks_free, 100);
    assert_eq!(after.chunks, after.chunks_free + after.chunks_index + 1);
    assert!(after.subtables > 0 && after.incarnation == 1);
}

#[test]
fn the_last_block_can_be_had_and_then_there_are_none() {
    let place = Place::new();
    let _server = place.start();
    let client = place.writer();
    let class = class(2 << 20);
    let mut blocks = Vec::new();
    loop {
        match client.take(class, 64) {
            none if none.is_empty() => break,
            some => blocks.extend(some),
        }
    }
    let statistics = client.statistics();
    assert_eq!(blocks.len() as u64, statistics.chunks - statistics.chunks_index);
    assert_eq!((statistics.chunks_free, statistics.requests_denied), (0, 1));
    client.give(class, blocks.split_off(1), false);
    eventually("they have rested for GRACE", || !client.take(class, 1).is_empty());
}

#[test]
fn both_chunks_of_a_large_block_are_emptying() {
    let mut place = Place::new();
    // So that they do not get free meanwhile.
    place.config.grace_ms = 1000;
    let _server = place.start();
    let (client, class) = (place.writer(), class(4 << 20));
    let blocks = client.take(class, 1);
    assert_eq!((blocks.len(), client.statistics().chunks_resting), (1, 0));
    client.give(class, blocks, true);
    assert_eq!(client.statistics().chunks_resting, 2);
}

#[test]
fn a_client_that_gives_what_it_has_not_is_let_go() {
    let place = Place::new();
    let _server = place.start();
    let (good, class) = (place.writer(), class(64));
    let lies: [fn(FreeBlock) -> Vec<FreeBlock>; 3] = [
        |block| vec![block, block],
        |block| vec![FreeBlock { address: BlockAddress(0), ..block }],
        |block| vec![FreeBlock { address: BlockAddress(u32::MAX), ..block }],
    ];
    for (lost, lie) in (1..).zip(lies) {
        let bad = place.writer();
        let block = bad.take(class, 1)[0];
        bad.give(class, lie(block), true);
        assert_eq!(bad.receive(), None);
        assert_eq!(bad.lease(), 0);
        assert_eq!(good.statistics().clients_lost, lost);
    }
    // The block given twice is there once.
    let mut taken = Vec::new();
    for _ in 0..4 {
        taken.extend(good.take(class, 4096));
    }
    let mut addresses: Vec<_> = taken.iter().map(|block| block.address).collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), taken.len());
}

#[test]
fn answers_wait_for_a_client_that_is_slow_to_take_them() {
    const REQUESTS: u64 = 40;
    let mut place = Place::new();
    // A quarter of what is left has to be a full message to the end.
    place.config.memory = Some(ByteSize::mib(64));
    let _server = place.start();
    let (good, slow) = (place.writer(), place.writer());
    let class = class(64);
    let all = REQUESTS * BLOCKS_PER_MESSAGE_MAX as u64;
    for _ in 0..REQUESTS {
        slow.send(&Request::TakeBlocks { class, count: BLOCKS_PER_MESSAGE_MAX as u32 });
    }
    eventually("it was answered", || good.statistics().blocks_taken > 0);
    std::thread::sleep(Duration::from_millis(20));
    let mut taken = Vec::new();
    for _ in 0..REQUESTS {
        match slow.receive() {
            Some(Reply::Blocks { blocks, .. }) => taken.extend(blocks),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(taken.len() as u64, all);
    let mut addresses: Vec<_> = taken.iter().map(|block| block.address).collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len() as u64, all);
    let statistics = slow.statistics();
    assert_eq!((statistics.clients, statistics.clients_lost), (2, 0));
    assert_eq!(statistics.blocks_taken, all);
}

#[test]
fn a_client_that_takes_no_answers_is_not_read_from_until_it_does() {
    let place = Place::new();
    let _server = place.start();
    let (good, deaf) = (place.writer(), place.writer());
    let mut bytes = Vec::new();
    Request::TakeBlocks { class: class(64), count: 4096 }.encode(&mut bytes);
    let mut asked = 0;
    let mut is_full = false;
    loop {
        match deaf.connection.send(&bytes, None) {
            Ok(()) => (asked, is_full) = (asked + 1, false),
            // Full, and still full a while later: the server does not read from it.
            Err(_) if is_full => break,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                is_full = true;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    assert_eq!(good.statistics().clients_lost, 0, "it hurts no client");
    assert!(!good.take(class(1000), 1).is_empty());
    for _ in 0..asked {
        assert!(matches!(deaf.receive(), Some(Reply::Blocks { .. })));
    }
    assert_eq!(deaf.statistics().clients, 2);
}

/// What is not with the depot, of the one class in use.
fn out(client: &Client) -> u64 {
    client.statistics().classes.iter().map(|class| class.blocks - class.blocks_free).sum()
}

/// A goodbye that stands behind a request is read although the client of its answer is gone, and
/// what the answer carried is not lost. Whether the answer was sent before or after the client
/// closed is chance, so there are many rounds.
#[test]
fn a_client_that_leaves_without_reading_leaves_nothing_behind() {
    let place = Place::new();
    let _server = place.start();
    let (good, class) = (place.writer(), class(64));
    for round in 0..200 {
        let hasty = place.writer();
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
    eventually("all blocks are back", || out(&good) == 0);
    eventually("all are gone", || good.statistics().clients == 1);
    let statistics = good.statistics();
    assert_eq!(statistics.clients_lost, 0);
    assert_eq!(statistics.blocks_taken, statistics.blocks_given);
}

#[test]
fn answers_that_cannot_be_sent_are_taken_back() {
    let place = Place::new();
    let _server = place.start();
    let (good, class) = (place.writer(), class(64));
    for says_goodbye in [true, false] {
        let hasty = place.writer();
        let blocks = hasty.take(class, 100);
        // As if it had closed already, and what it sends had been on its way.
        rustix::net::shutdown(&hasty.connection, rustix::net::Shutdown::Read).unwrap();
        for _ in 0..3 {
            hasty.send(&Request::TakeBlocks { class, count: 50 });
        }
        hasty.give(class, blocks, true);
        if says_goodbye {
            hasty.send(&Request::Goodbye);
        }
        eventually("all blocks are back", || out(&good) == 0);
        drop(hasty);
        eventually("it is gone", || good.statistics().clients == 1);
        assert_eq!(good.statistics().clients_lost, u64::from(!says_goodbye));
    }
}

/// A writer that hangs up in the middle of a long list of answers: those that never left come back.
#[test]
fn the_answer_that_waited_for_a_lost_client_is_taken_back() {
    let mut place = Place::new();
    place.config.memory = Some(ByteSize::mib(64));
    let _server = place.start();
    let (good, deaf) = (place.writer(), place.writer());
    for _ in 0..40 {
        deaf.send(&Request::TakeBlocks { class: class(64), count: 4096 });
    }
    eventually("it was answered", || good.statistics().blocks_taken > 0);
    drop(deaf);
    eventually("it is lost", || good.statistics().clients_lost == 1);
    let statistics = good.statistics();
    assert_eq!(statistics.blocks_taken - statistics.blocks_given, out(&good));
    assert!(statistics.blocks_given >= 4096, "the last one sent, or more");
}

#[test]
fn fresh_blocks_get_the_generation_behind_their_header() {
    let place = Place::with_file();
    let server = place.start();
    let client = place.writer();
    let class = class(64);
    let block = client.take(class, 1)[0];
    let slot = client.slot(0, 0);
    client.link(slot, class, FreeBlock { generation: 7, ..block }, |word| word.emptied());
    server.stop();
    let _server = place.start();
    let again = place.writer().take(class, 1)[0];
    assert_eq!(again, FreeBlock { generation: 8, ..block });
    let header = HeaderWord::from_bits(client.region.load(block.address.offset()).unwrap());
    assert_eq!(header.generation, 7);
}

/// The index never shrinks, so no client may turn the heap into index just by asking.
#[test]
fn only_a_subtable_with_a_full_window_is_split() {
    let place = Place::new();
    let _server = place.start();
    let client = place.writer();
    let before = client.statistics();
    let depth = before.directory_depth as u8;
    let subtables = || (depth..12).flat_map(|depth| (0..1 << depth).map(move |of| (of, depth)));
    for (prefix, depth) in subtables() {
        assert_eq!(client.split(prefix, depth), SplitOutcome::Done, "there is room: look again");
    }
    let after = client.statistics();
    assert_eq!((after.splits, after.chunks_index), (0, before.chunks_index));
    client.fill_window(0, depth);
    assert_eq!(client.split(0, depth), SplitOutcome::Done);
    assert_eq!(client.split(0, depth + 1), SplitOutcome::Done, "what it became has room");
    assert_eq!(client.statistics().splits, 1);
}
