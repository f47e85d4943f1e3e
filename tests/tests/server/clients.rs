//! Which connections become clients, and that refused connections harm no client. Taking and giving
//! blocks over the wire; clients that break the rules are fenced. A lost client leaves nothing that
//! blocks others, and the cleanup touches nothing of living clients.

use std::os::unix::fs::{FileExt, MetadataExt};

use farside_layout::hash::NO_HINT;
use farside_layout::{BlockAddress, HINT_OFFSET, HeaderWord};

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

#[test]
fn a_writer_gets_a_welcome_a_region_and_a_lease() {
    let (folder, server) = serving();
    assert_eq!(server.addresses(), folder.config.listen);
    let client = folder.writer();
    let (superblock, format) = client.superblock();
    assert_eq!(client.welcome.region_bytes, REGION_BYTES);
    assert_eq!(client.welcome.region_id, format.region_id);
    assert_eq!((client.welcome.incarnation, superblock.incarnation()), (1, 1));
    assert_eq!(client.lease(), client.welcome.lease);
    assert_ne!(format.region_id, [0; 16]);
    assert_ne!(format.hash_key, [0; 16]);
    let other = folder.writer();
    assert_ne!(other.welcome.client_id, client.welcome.client_id);
    assert_eq!(other.lease(), other.welcome.lease);
    server.stop();
    assert_eq!(client.lease(), 0, "a server that stops fences its clients");
    assert_eq!(client.receive(), None);
    assert!(!folder.socket().exists());
}

#[test]
fn garbage_of_every_length_is_refused_and_harms_no_client() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let refusal = |request: &[u8]| Some(answer(&folder.connect(), request)?.err());
    for bytes in 1..=200 {
        let malformed = Refusal::Malformed { bytes: bytes as u64 };
        for byte in [0x00, 0xa5] {
            assert_eq!(refusal(&vec![byte; bytes]), Some(Some(malformed)));
        }
    }
    assert_eq!(refusal(&[]), None);
    assert_eq!(refusal(&vec![1; MESSAGE_BYTES_MAX + 1]), None);
    assert_eq!(client.statistics().clients, 1);
    assert_eq!(client.statistics().clients_lost, 0);
}

/// A program that reaches the socket can get a challenge, and no more.
#[test]
fn a_connection_without_a_proof_is_no_client() {
    let (folder, _server) = serving();
    let client = folder.writer();
    let challenged = |_| {
        let connection = folder.connect();
        assert!(challenge(&connection, &hello(Role::Writer)).unwrap().is_ok());
        connection
    };
    let unproven: Vec<_> = (0..100).map(challenged).collect();
    assert_eq!(unproven[0].receive(&mut [0; 8]).unwrap().0, 0, "the server closes the oldest");
    let last = unproven.last().unwrap();
    let (answer, descriptor) = exchange(last, &ProofMessage(Proof([1; 16])).encode()).unwrap();
    assert_eq!(Welcome::decode(&answer), Ok(Err(Refusal::NoSecret)));
    assert!(descriptor.is_none());
    assert_eq!(last.receive(&mut [0; 8]).unwrap().0, 0, "the server closes it");
    assert_eq!((client.statistics().clients, client.statistics().clients_lost), (1, 0));
    assert_eq!(folder.writer().welcome.client_id, client.welcome.client_id + 1, "no id was given");
}

#[test]
fn a_full_server_refuses_clients_until_one_signs_off() {
    let mut folder = TestFolder::new();
    folder.config.clients_max = 2;
    let _server = folder.start();
    let (first, second) = (folder.writer(), folder.writer());
    let full = Refusal::Full { clients: 2 };
    assert_eq!(folder.attach(Role::Writer).err(), Some(full));
    first.send(&Request::Goodbye);
    assert_eq!(first.receive(), None);
    assert_eq!(first.lease(), 0);
    let third = folder.writer();
    assert_eq!(third.statistics().clients_lost, 0);
    drop(second);
    eventually("the lost client's id is free", || folder.attach(Role::Writer).is_ok());
}

#[test]
fn a_reader_cannot_write() {
    let (folder, _server) = serving();
    let writer = folder.writer();
    let reader = folder.attach(Role::Reader).unwrap();
    let error = Region::map(&reader.file).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(reader.file.write_at(b"x", 0).is_err() && reader.file.set_len(0).is_err());
    assert!(reader.region.store(4096, 1).is_err());
    assert_eq!(reader.superblock().1, writer.superblock().1);
    assert_eq!(reader.statistics().clients, 2);
    reader.send(&Request::TakeBlocks { class: class(64), count: 1 });
    assert_eq!(reader.receive(), None, "a reader that asks for blocks is disconnected");
    assert_eq!(writer.take(class(64), 1).len(), 1);
}

#[test]
fn the_config_sets_the_sockets_mode_and_group() {
    let mut folder = TestFolder::new();
    let group = rustix::process::getgid().as_raw();
    folder.config.socket_mode = Some("0620".parse().unwrap());
    folder.config.socket_group = Some(group.to_string().parse().unwrap());
    let _server = folder.start();
    let found = std::fs::metadata(folder.socket()).unwrap();
    assert_eq!((found.mode() & 0o777, found.gid()), (0o620, group));
    folder.writer();
}

#[test]
fn unfinished_inserts_of_lost_clients_are_emptied_and_of_living_ones_kept() {
    let (folder, _server) = serving();
    let (lost, living) = (folder.writer(), folder.writer());
    let class = class(64);
    let (lost_blocks, living_blocks) = (lost.take(class, 3), living.take(class, 2));
    let slots: Vec<u64> = (0..5).map(|n| lost.slot(n, n)).collect();
    lost.place_word(slots[0], class, lost_blocks[0], |word| word);
    lost.place_word(slots[1], class, lost_blocks[1], |word| word.with_state(SlotState::Aborted));
    let kept = [
        lost.place_word(slots[2], class, lost_blocks[2], |word| word.with_state(SlotState::Live)),
        living.place_word(slots[3], class, living_blocks[0], |word| word),
        living.place_word(slots[4], class, living_blocks[1], |word| {
            word.with_state(SlotState::Aborted)
        }),
    ];
    for slot in &slots {
        living.region.store(slot + HINT_OFFSET, 99).unwrap();
    }
    let entry = lost.geometry().client_entry(lost.welcome.client_id).unwrap();
    drop(lost);
    eventually("the lost client is fenced", || living.region.load(entry).unwrap() == 0);
    for slot in &slots[..2] {
        eventually("the lost client's slot is empty", || living.word(*slot) == SlotWord::empty(2));
        assert_eq!(living.region.load(slot + HINT_OFFSET).unwrap(), NO_HINT);
    }
    for (slot, word) in slots[2..].iter().zip(kept) {
        assert_eq!(living.word(*slot), word);
        assert_eq!(living.region.load(slot + HINT_OFFSET).unwrap(), 99);
    }
    assert_eq!(living.statistics().clients_lost, 1);
}

#[test]
fn many_clients_lost_at_once_are_swept_and_their_ids_are_reused() {
    let (folder, _server) = serving();
    let living = folder.writer();
    let class = class(64);
    for round in 0..3 {
        let lost: Vec<Client> = (0..20).map(|_| folder.writer()).collect();
        let slot_of = |n: usize| living.slot(n, round);
        for (n, client) in lost.iter().enumerate() {
            client.place_word(slot_of(n), class, client.take(class, 1)[0], |word| word);
        }
        drop(lost);
        for n in 0..20 {
            eventually("the slot is swept", || living.word(slot_of(n)).state() == SlotState::Empty);
        }
    }
    assert_eq!(living.statistics().clients_lost, 60);
    assert_eq!(living.statistics().clients, 1);
}

/// While a client is stopped, one subtable's place cannot be reused. The server must not wait for
/// that place: it must also recall blocks that sessions hold and do not need.
#[test]
fn a_place_that_a_stopped_client_blocks_does_not_keep_the_index_from_recalling_blocks() {
    let (folder, _server) = serving();
    let (hoarder, stopped) = (folder.writer(), folder.writer());
    let block = stopped.take(class(64), 1)[0];
    while !hoarder.take(class(2 << 20), 64).is_empty() {}
    let before = hoarder.statistics();
    let split = |prefix: u32, depth: u8| {
        hoarder.fill_window(prefix, depth);
        hoarder.split(prefix, depth)
    };
    let (slot, depth) = (stopped.slot(0, 0), before.directory_depth as u8);
    assert_eq!(split(0, depth), SplitOutcome::Done);
    // The state in which a split leaves the client's unfinished insert.
    stopped.place_word(slot, class(64), block, |word| word.with_state(SlotState::Aborted));
    let mut subtables = subtables_from(depth);
    let (mut prefix, mut depth) = subtables.next().unwrap();
    eventually("the server recalls blocks for the index", || {
        let outcome = loop {
            match split(prefix, depth) {
                SplitOutcome::Done => (prefix, depth) = subtables.next().unwrap(),
                other => break other,
            }
        };
        assert_eq!(outcome, SplitOutcome::Later, "the place may become free at any time");
        hoarder.statistics().recalls > before.recalls
    });
}
