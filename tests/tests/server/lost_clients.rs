//! Proves that a lost client leaves nothing that blocks others, and that the cleanup touches
//! nothing of living clients.

use farside_layout::HINT_OFFSET;
use farside_layout::hash::NO_HINT;

use super::*;

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
