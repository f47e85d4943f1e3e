//! Blocks in and out over the wire, and that clients who break the rules are let go.

use farside_common::layout::{BlockAddress, HeaderWord};

use super::*;

#[test]
fn blocks_are_handed_out_once_and_come_back() {
    let place = Place::new();
    let _server = place.start();
    let (one, two) = (place.writer(), place.writer());
    let class = class(1000);
    let (first, second) = (one.take(class, 100), two.take(class, 100));
    assert_eq!((first.len(), second.len()), (100, 100));
    assert!(first.iter().all(|block| !second.contains(block) && block.generation == 1));
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
fn garbage_on_the_control_channel_ends_only_its_sender() {
    let place = Place::new();
    let _server = place.start();
    let good = place.writer();
    for bytes in 0..=200 {
        let bad = place.writer();
        bad.connection.send(&vec![0xee; bytes], None).unwrap();
        assert_eq!(bad.receive(), None);
    }
    assert_eq!(good.statistics().clients_lost, 201);
    assert_eq!(good.statistics().clients, 1);
}

#[test]
fn a_client_that_does_not_take_its_answers_is_let_go() {
    let place = Place::new();
    let _server = place.start();
    let (good, deaf) = (place.writer(), place.writer());
    let mut bytes = Vec::new();
    Request::TakeBlocks { class: class(64), count: 4096 }.encode(&mut bytes);
    eventually("the server has enough of it", || {
        deaf.connection
            .send(&bytes, None)
            .is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    });
    assert_eq!(good.statistics().clients_lost, 1);
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
