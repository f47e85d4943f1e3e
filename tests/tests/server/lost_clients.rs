//! That nothing of a vanished client is in the way of others, and nothing of the living is touched.

use farside_layout::HINT_OFFSET;
use farside_layout::hash::NO_HINT;

use super::*;

#[test]
fn unfinished_inserts_of_the_lost_are_emptied_and_of_the_living_kept() {
    let place = Place::new();
    let _server = place.start();
    let (lost, living) = (place.writer(), place.writer());
    let class = class(64);
    let (theirs, mine) = (lost.take(class, 3), living.take(class, 2));
    let slots: Vec<u64> = (0..5).map(|n| lost.slot(n, n)).collect();
    lost.link(slots[0], class, theirs[0], |word| word);
    lost.link(slots[1], class, theirs[1], |word| word.with_state(SlotState::Aborted));
    let kept = [
        lost.link(slots[2], class, theirs[2], |word| word.with_state(SlotState::Live)),
        living.link(slots[3], class, mine[0], |word| word),
        living.link(slots[4], class, mine[1], |word| word.with_state(SlotState::Aborted)),
    ];
    for slot in &slots {
        living.region.store(slot + HINT_OFFSET, 99).unwrap();
    }
    let entry = lost.geometry().client_entry(lost.welcome.client_id).unwrap();
    drop(lost);
    eventually("it is fenced", || living.region.load(entry).unwrap() == 0);
    for slot in &slots[..2] {
        eventually("its slot is empty", || living.word(*slot) == SlotWord::empty(2));
        assert_eq!(living.region.load(slot + HINT_OFFSET).unwrap(), NO_HINT);
    }
    for (slot, word) in slots[2..].iter().zip(kept) {
        assert_eq!(living.word(*slot), word);
        assert_eq!(living.region.load(slot + HINT_OFFSET).unwrap(), 99);
    }
    assert_eq!(living.statistics().clients_lost, 1);
}

#[test]
fn many_lost_at_once_are_all_swept_and_their_ids_come_back() {
    let place = Place::new();
    let _server = place.start();
    let living = place.writer();
    let class = class(64);
    for round in 0..3 {
        let lost: Vec<Client> = (0..20).map(|_| place.writer()).collect();
        let slot_of = |n: usize| living.slot(n, round);
        for (n, client) in lost.iter().enumerate() {
            client.link(slot_of(n), class, client.take(class, 1)[0], |word| word);
        }
        drop(lost);
        for n in 0..20 {
            eventually("it is swept", || living.word(slot_of(n)).state() == SlotState::Empty);
        }
    }
    assert_eq!(living.statistics().clients_lost, 60);
    assert_eq!(living.statistics().clients, 1);
}

/// A stopped client keeps one place from being used again, for as long as it is stopped. That must
/// not keep the index from what sessions have and do not need.
#[test]
fn a_place_that_rests_for_ever_does_not_stand_for_memory_that_can_be_had() {
    let place = Place::new();
    let _server = place.start();
    let (hoarder, stopped) = (place.writer(), place.writer());
    let block = stopped.take(class(64), 1)[0];
    while !hoarder.take(class(2 << 20), 64).is_empty() {}
    let asked = hoarder.statistics();
    let split = |prefix: u32, depth: u8| {
        hoarder.fill_window(prefix, depth);
        hoarder.split(prefix, depth)
    };
    let (slot, depth) = (stopped.slot(0, 0), asked.directory_depth as u8);
    assert_eq!(split(0, depth), SplitOutcome::Done);
    // As the split leaves what the client was inserting.
    stopped.link(slot, class(64), block, |word| word.with_state(SlotState::Aborted));
    let mut subtables =
        (depth..).flat_map(|depth| (0..1 << depth).map(move |prefix| (prefix, depth)));
    let (mut prefix, mut depth) = subtables.next().unwrap();
    eventually("the index has all clients asked", || {
        let outcome = loop {
            match split(prefix, depth) {
                SplitOutcome::Done => (prefix, depth) = subtables.next().unwrap(),
                other => break other,
            }
        };
        assert_eq!(outcome, SplitOutcome::Later, "the place may get free any time");
        hoarder.statistics().recalls > asked.recalls
    });
}
