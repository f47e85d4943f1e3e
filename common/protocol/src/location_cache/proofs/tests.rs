//! Executions that the memory model allows, by loom, and twins that must fail.

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64 as LoomWord;
use loom::thread;

use super::*;

impl Base for LoomWord {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, units: u64, order: Ordering) {
        self.store(units, order);
    }
}

/// The half with the stamp; the address is 1 where that is not 0.
fn half(bits: u128) -> u64 {
    (bits >> 64) as u64
}

fn whole(half: u64) -> u128 {
    u128::from(half) << 64 | u128::from(half != 0)
}

impl Place for LoomWord {
    fn load(&self, order: Ordering) -> u128 {
        whole(self.load(order))
    }

    fn store(&self, bits: u128, order: Ordering) {
        self.store(half(bits), order);
    }

    fn swap(&self, known: u128, bits: u128) -> bool {
        let (taken, lost) = (Ordering::AcqRel, Ordering::Relaxed);
        self.compare_exchange(half(known), half(bits), taken, lost).is_ok()
    }

    /// Each of them is a state to look at.
    const PAUSES_MAX: u32 = 2;

    fn pause() {
        thread::yield_now();
    }
}

/// What is wrong with a twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The base is looked at before the entry is locked.
    BaseBeforeLock,
    /// Places without an entry are left out when the base moves.
    EmptyLeftOut,
    /// So are those that are locked.
    LockedLeftOut,
    /// Readers get the new base before all entries go by it.
    ReadersFirst,
    /// They look at an entry first, and then at the base.
    EntryFirst,
    /// A thread that replaces an entry does not release what it saw before.
    Untold,
}

struct Model {
    proofs: ProofClock<LoomWord>,
    place: LoomWord,
}

/// When the entry was proved, and when the base moves, far too late for that.
const PROVED_AT: Nanos = 100;
const NOW: Nanos = 2000;

impl Model {
    fn new(was_proved: bool) -> Self {
        let proofs =
            ProofClock { unit_shift: 0, writers: LoomWord::new(0), readers: LoomWord::new(0) };
        let there = if was_proved { proofs.by(0).stamp(PROVED_AT) } else { 0 };
        let place = LoomWord::new(half(PackedLocation::default().stamped(there).bits()));
        Self { proofs, place }
    }

    fn write(&self, wrong: Wrong) {
        let known = entry(&self.place);
        let early = self.proofs.for_writing();
        let (proofs, order) = match wrong {
            Wrong::BaseBeforeLock => (Some(early), Ordering::Release),
            Wrong::Untold => (None, Ordering::Relaxed),
            _ => {
                self.proofs.replace(&self.place, known, known, PROVED_AT);
                return;
            }
        };
        if lock(&self.place, known) {
            let proofs = proofs.unwrap_or_else(|| self.proofs.for_writing());
            let stamp = proofs.stamp(PROVED_AT);
            Place::store(&self.place, known.stamped(stamp).bits(), order);
        }
    }

    fn rebase(&self, wrong: Wrong) {
        let known = entry(&self.place);
        let leave_out = wrong == Wrong::EmptyLeftOut && known.is_empty()
            || wrong == Wrong::LockedLeftOut && known.is_locked();
        if wrong == Wrong::ReadersFirst {
            self.proofs.readers.store(NOW, Ordering::Release);
        }
        self.proofs.rebase(NOW, (!leave_out).then_some(&self.place).into_iter());
    }

    /// What no thread may ever see.
    fn check(&self, wrong: Wrong) {
        let early = entry(&self.place);
        let proofs = self.proofs.for_reading();
        let known = if wrong == Wrong::EntryFirst { early } else { entry(&self.place) };
        assert!(proofs.at(known.stamp()) <= PROVED_AT, "{TAKEN}");
    }
}

const TAKEN: &str = "an old proof is taken for a later one";

/// How often a thread loses the processor in the executions looked at.
const PREEMPTIONS_MAX: usize = 2;

/// One thread moves the base, others write the entry; with one writer another one looks.
fn threads(writers: usize, was_proved: bool, wrong: Wrong) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(move || {
        let model = Arc::new(Model::new(was_proved));
        let spawn = |work: fn(&Model, Wrong)| {
            let model = model.clone();
            thread::spawn(move || work(&model, wrong))
        };
        let mut threads: Vec<_> = (0..writers).map(|_| spawn(Model::write)).collect();
        threads.push(spawn(Model::rebase));
        threads.extend((writers < 2).then(|| spawn(Model::check)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        model.check(wrong);
    });
}

#[test]
fn no_proof_is_ever_taken_for_a_later_one() {
    for was_proved in [false, true] {
        threads(1, was_proved, Wrong::Nothing);
    }
    threads(2, false, Wrong::Nothing);
}

#[test]
fn twins_that_take_a_proof_for_a_later_one_are_caught() {
    use Wrong::*;
    let twins = [
        (1, false, BaseBeforeLock),
        (1, false, EmptyLeftOut),
        (1, true, LockedLeftOut),
        (1, true, ReadersFirst),
        (0, true, EntryFirst),
        (2, false, Untold),
    ];
    for (writers, was_proved, wrong) in twins {
        let caught =
            catch_unwind(|| threads(writers, was_proved, wrong)).expect_err(&format!("{wrong:?}"));
        let why = caught.downcast_ref::<String>().map_or("", String::as_str);
        assert_eq!(why, TAKEN, "{wrong:?}");
    }
}
