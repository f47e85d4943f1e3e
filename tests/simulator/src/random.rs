//! Long scenarios at random: a seed decides everything, and repeats it exactly.

use super::failure::Failure;
use super::memory::mix;
use super::monitor::Violation;
use super::prepared::Prepared;
use super::process::Action;
use super::scenario::Scenario;

/// Random numbers that depend on nothing but the seed.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(mix(seed, 0x5eed))
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0, 1) % bound.max(1) as u64) as usize
    }
}

/// How many steps an execution may take.
const STEPS_MAX: usize = 100_000;
/// How many shorter executions are tried when one goes wrong.
const SHORTER_MAX: usize = 4000;

impl Scenario {
    /// One execution, every word accessed by itself, in an order that follows from the seed.
    ///
    /// # Errors
    /// What went wrong, made shorter.
    pub fn run_seed(&self, seed: u64) -> Result<(), Box<Failure>> {
        self.run_seeds([seed]).map(drop)
    }

    /// [`Scenario::run_seed`] for all of these; how many there were.
    ///
    /// # Errors
    /// The first that went wrong.
    pub fn run_seeds(&self, seeds: impl IntoIterator<Item = u64>) -> Result<u64, Box<Failure>> {
        let prepared = Prepared::new(self);
        let mut count = 0;
        for seed in seeds {
            try_seed(&prepared, seed)?;
            count += 1;
        }
        Ok(count)
    }
}

fn try_seed(prepared: &Prepared<'_>, seed: u64) -> Result<(), Box<Failure>> {
    let mut taken = Vec::new();
    match roll(prepared, seed, &mut taken) {
        Ok(()) => Ok(()),
        Err(violation) => {
            let (actions, violation) = shorten(prepared, taken, violation);
            let mut failure = Failure::new(prepared, None, actions, violation);
            failure.seed = Some(seed);
            Err(Box::new(failure))
        }
    }
}

/// Chooses at random, but stays with a process for a while: only long detours find what an
/// interleaving word by word would not.
fn roll(prepared: &Prepared<'_>, seed: u64, taken: &mut Vec<Action>) -> Result<(), Violation> {
    let mut dice = Dice::new(seed);
    let mut execution = prepared.begin(None, false);
    let stretch = [1, 4, 16, 64][dice.below(4)];
    let mut actions = Vec::new();
    for _ in 0..STEPS_MAX {
        execution.actions(&mut actions);
        if actions.is_empty() {
            return execution.finish();
        }
        let stay = dice.below(stretch) != 0;
        let own = actions.iter().filter(|action| !execution.preempts(**action)).count();
        let is_rare = |action: &Action| {
            matches!(
                action,
                Action::Jump(_)
                    | Action::Pause(_)
                    | Action::Resume(_)
                    | Action::Die(_)
                    | Action::Lose(..)
                    | Action::Restart(_)
                    | Action::Renew
                    | Action::Wake(..)
            )
        };
        let mut action = actions[dice.below(actions.len())];
        if stay && own > 0 {
            actions.retain(|action| !execution.preempts(*action));
            action = actions[dice.below(actions.len())];
        }
        // Time passes and clients die now and then only.
        if is_rare(&action) && dice.below(8) != 0 {
            actions.retain(|action| !is_rare(action));
            if !actions.is_empty() {
                action = actions[dice.below(actions.len())];
            }
        }
        taken.push(action);
        execution.act(action)?;
    }
    Ok(())
}

/// Repeats as much of these actions as is possible, skipping what is not; whether it still goes
/// wrong, and by which actions.
fn repeat(prepared: &Prepared<'_>, wanted: &[Action]) -> Option<(Vec<Action>, Violation)> {
    let mut execution = prepared.begin(None, false);
    let (mut taken, mut actions) = (Vec::new(), Vec::new());
    for action in wanted {
        execution.actions(&mut actions);
        if actions.contains(action) {
            taken.push(*action);
            if let Err(violation) = execution.act(*action) {
                return Some((taken, violation));
            }
        }
    }
    None
}

/// Leaves out ever smaller parts as long as it still goes wrong. What goes wrong only at the end
/// stays as it is.
fn shorten(
    prepared: &Prepared<'_>,
    mut actions: Vec<Action>,
    mut violation: Violation,
) -> (Vec<Action>, Violation) {
    let mut part = actions.len() / 2;
    let mut tried = 0;
    while part > 0 && tried < SHORTER_MAX {
        let mut start = 0;
        let mut shorter = false;
        while start < actions.len() && tried < SHORTER_MAX {
            tried += 1;
            let end = (start + part).min(actions.len());
            let rest = [&actions[..start], &actions[end..]].concat();
            match repeat(prepared, &rest) {
                Some((taken, found)) => {
                    (actions, violation, shorter) = (taken, found, true);
                }
                None => start = end,
            }
        }
        if !shorter || part > 1 {
            part /= 2;
        }
    }
    (actions, violation)
}
