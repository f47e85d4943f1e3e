//! Loom runs the executions that the memory model allows. Mutants, each with one error, must fail.

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

/// The half with the stamp. The other half is 1, or 0 if this one is 0.
fn half(bits: u128) -> u64 {
    (bits >> 64) as u64
}

fn whole(half: u64) -> u128 {
    u128::from(half) << 64 | u128::from(half != 0)
}

impl CacheCell for LoomWord {
    fn load(&self, order: Ordering) -> u128 {
        whole(self.load(order))
    }

    fn store(&self, bits: u128, order: Ordering) {
        self.store(half(bits), order);
    }

    fn swap(&self, known: u128, bits: u128) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.compare_exchange(half(known), half(bits), success, failure).is_ok()
    }

    /// Each pause is one more state for loom to explore.
    const PAUSES_MAX: u32 = 2;

    fn pause() {
        thread::yield_now();
    }
}

/// A version of the code: the correct one, or a mutant with one error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    Correct,
    /// The base is read before the entry is locked.
    BaseBeforeLock,
    /// Cells without an entry are left out when the base moves.
    EmptyLeftOut,
    /// Locked cells are left out when the base moves.
    LockedLeftOut,
    /// Readers get the new base before all entries have stamps of it.
    ReadersFirst,
    /// Readers load an entry before the base.
    EntryFirst,
    /// A thread that replaces an entry stores it without release.
    Unreleased,
}

struct Model {
    proofs: ProofClock<LoomWord>,
    cell: LoomWord,
}

/// The time of the entry's proof, and the time at which the base moves, when that proof is far too
/// old to be used.
const PROVED_AT: Nanos = 100;
const NOW: Nanos = 2000;

impl Model {
    fn new(was_proved: bool) -> Self {
        let proofs =
            ProofClock { unit_shift: 0, writers: LoomWord::new(0), readers: LoomWord::new(0) };
        let stamp = if was_proved { proofs.time_base(0).stamp(PROVED_AT) } else { 0 };
        let cell = LoomWord::new(half(PackedLocation::default().stamped(stamp).bits()));
        Self { proofs, cell }
    }

    fn write(&self, mutant: Mutant) {
        let known = entry(&self.cell);
        let early_base = self.proofs.for_writing();
        let (proofs, order) = match mutant {
            Mutant::BaseBeforeLock => (Some(early_base), Ordering::Release),
            Mutant::Unreleased => (None, Ordering::Relaxed),
            _ => {
                self.proofs.replace(&self.cell, known, known, PROVED_AT);
                return;
            }
        };
        if lock(&self.cell, known) {
            let proofs = proofs.unwrap_or_else(|| self.proofs.for_writing());
            let stamp = proofs.stamp(PROVED_AT);
            CacheCell::store(&self.cell, known.stamped(stamp).bits(), order);
        }
    }

    fn rebase(&self, mutant: Mutant) {
        let known = entry(&self.cell);
        let leave_out = mutant == Mutant::EmptyLeftOut && known.is_empty()
            || mutant == Mutant::LockedLeftOut && known.is_locked();
        if mutant == Mutant::ReadersFirst {
            self.proofs.readers.store(NOW, Ordering::Release);
        }
        self.proofs.rebase(NOW, (!leave_out).then_some(&self.cell).into_iter());
    }

    /// Panics if the proof looks later than it is, which no thread may ever see.
    fn check(&self, mutant: Mutant) {
        let early_entry = entry(&self.cell);
        let proofs = self.proofs.for_reading();
        let known = if mutant == Mutant::EntryFirst { early_entry } else { entry(&self.cell) };
        assert!(proofs.at(known.stamp()) <= PROVED_AT, "{LOOKS_LATER}");
    }
}

const LOOKS_LATER: &str = "a proof looks later than it is";

/// The maximum number of preemptions in an execution that loom explores.
const PREEMPTIONS_MAX: usize = 2;

/// Explores a thread that moves the base beside writers of the entry. With fewer than two writers,
/// another thread reads the entry.
fn explore(writers: usize, was_proved: bool, mutant: Mutant) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(move || {
        let model = Arc::new(Model::new(was_proved));
        let spawn = |work: fn(&Model, Mutant)| {
            let model = model.clone();
            thread::spawn(move || work(&model, mutant))
        };
        let mut threads: Vec<_> = (0..writers).map(|_| spawn(Model::write)).collect();
        threads.push(spawn(Model::rebase));
        threads.extend((writers < 2).then(|| spawn(Model::check)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        model.check(mutant);
    });
}

#[test]
fn no_proof_looks_later_than_it_is() {
    for was_proved in [false, true] {
        explore(1, was_proved, Mutant::Correct);
    }
    explore(2, false, Mutant::Correct);
}

#[test]
fn mutants_that_make_a_proof_look_later_are_caught() {
    use Mutant::*;
    let mutants = [
        (1, false, BaseBeforeLock),
        (1, false, EmptyLeftOut),
        (1, true, LockedLeftOut),
        (1, true, ReadersFirst),
        (0, true, EntryFirst),
        (2, false, Unreleased),
    ];
    for (writers, was_proved, mutant) in mutants {
        let caught = catch_unwind(|| explore(writers, was_proved, mutant))
            .expect_err(&format!("{mutant:?}"));
        let why = caught.downcast_ref::<String>().map_or("", String::as_str);
        assert_eq!(why, LOOKS_LATER, "{mutant:?}");
    }
}
