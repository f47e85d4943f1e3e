//! Random executions of long scenarios. A seed decides about every step, so it repeats an
//! execution.

use crate::execution::Execution;
use crate::failure::Failure;
use crate::memory::mix;
use crate::monitor::Violation;
use crate::prepared::Prepared;
use crate::process::SchedulerAction;
use crate::scenario::Scenario;

/// Random numbers that depend on the seed only.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed, 0x5eed))
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0, 1) % bound.max(1) as u64) as usize
    }
}

/// Limit on the steps of an execution. An execution that exceeds it is abandoned, and counts as one
/// that went well.
const STEPS_MAX: usize = 100_000;
/// Limit on the attempts to shorten a failed execution.
const SHORTER_MAX: usize = 4000;

impl Scenario {
    /// Runs one execution. Every word is accessed in a step of its own, in an order that follows
    /// from the seed.
    ///
    /// # Errors
    /// The shortened failure.
    pub fn run_seed(&self, seed: u64) -> Result<(), Box<Failure>> {
        self.run_seeds([seed]).map(drop)
    }

    /// Calls [`Scenario::run_seed`] for all these seeds. Returns their number.
    ///
    /// # Errors
    /// The first failure.
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
    roll(prepared, seed, &mut taken).map_err(|violation| {
        let (actions, violation) = shorten(prepared, taken, violation);
        let mut failure = Failure::new(prepared, None, actions, violation);
        failure.seed = Some(seed);
        Box::new(failure)
    })
}

/// Runs one execution. It stays with a process for a random number of steps, because a uniform
/// choice at every word would almost never let one process run far while the others stand still.
fn roll(
    prepared: &Prepared<'_>,
    seed: u64,
    taken: &mut Vec<SchedulerAction>,
) -> Result<(), Violation> {
    let mut dice = Dice::new(seed);
    let mut execution = Execution::begin(prepared, None, false);
    let stretch = [1, 4, 16, 64][dice.below(4)];
    let mut actions = Vec::new();
    for _ in 0..STEPS_MAX {
        execution.actions(&mut actions);
        if actions.is_empty() {
            return execution.finish();
        }
        let stay = dice.below(stretch) != 0;
        let mut action = actions[dice.below(actions.len())];
        if stay && actions.iter().any(|action| !execution.preempts(*action)) {
            actions.retain(|action| !execution.preempts(*action));
            action = actions[dice.below(actions.len())];
        }
        // Events and the ends of waits are rare.
        let is_rare = |action: &SchedulerAction| {
            action.process().is_none() || matches!(action, SchedulerAction::Wake(..))
        };
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

/// Repeats these actions, and skips those that are not possible. Returns the actions that were
/// taken and the violation, if the execution still goes wrong.
fn repeat(
    prepared: &Prepared<'_>,
    wanted: &[SchedulerAction],
) -> Option<(Vec<SchedulerAction>, Violation)> {
    let mut execution = Execution::begin(prepared, None, false);
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

/// Removes smaller and smaller parts of the actions, while the execution still goes wrong. A
/// failure that only the checks at the end find is not shortened.
fn shorten(
    prepared: &Prepared<'_>,
    mut actions: Vec<SchedulerAction>,
    mut violation: Violation,
) -> (Vec<SchedulerAction>, Violation) {
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
