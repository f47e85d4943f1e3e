//! Explores every execution of a small scenario, one after another, and random executions of long
//! ones.
//!
//! Futures cannot be copied. So each execution starts anew, and repeats the choices of the previous
//! one up to the last choice with an untried alternative. An execution that reaches a known state
//! ends there. A state is a hash of the region's memory, of each client's observations, and of the
//! checker's configurations. The observations stand for the client's own memory. The search learns
//! which words are preemptible. When a process writes a word that another one has accessed, the
//! word gets steps of its own, and the search starts over.
//!
//! Of random executions a seed decides about every step, so it repeats one. What went wrong is
//! reported with the trace.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::rc::Rc;

use farside_linearizability::Record;

use crate::execution::Execution;
use crate::memory::mix;
use crate::monitor::Violation;
use crate::mutant::Mutant;
use crate::prepared::{Prepared, name};
use crate::process::SchedulerAction;
use crate::scenario::Scenario;
use crate::world::Line;

/// The extent of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explored {
    /// Different states.
    pub states: usize,
    /// Executions, most of them short.
    pub executions: u64,
    /// Executions that reached the end.
    pub complete: u64,
    /// Every execution within the bound on preemptions was explored.
    pub exhausted: bool,
    /// Mutants of the scenario that broke no rule in any execution.
    pub unfired: Vec<Mutant>,
}

/// The bounds of a search.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Limit on preemptions: a client has a chain in flight, and another client acts. `None` for no
    /// limit.
    pub preemptions: Option<u8>,
    /// Limit on executions. The search ends there.
    pub executions: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { preemptions: None, executions: u64::MAX }
    }
}

struct Frame {
    actions: Vec<SchedulerAction>,
    chosen: usize,
    /// The number of preemptions that remain before this choice.
    preemptions_left: u8,
}

struct Search<'s> {
    prepared: Prepared<'s>,
    bounds: Bounds,
    preemptible_words: Rc<BTreeSet<usize>>,
    visited: HashMap<u64, u8>,
    frames: Vec<Frame>,
    explored: Explored,
    fired: Vec<Mutant>,
}

impl Scenario {
    /// Tries every execution within the bounds.
    ///
    /// # Errors
    /// The first execution that went wrong.
    pub fn explore(&self, bounds: Bounds) -> Result<Explored, Box<Failure>> {
        let prepared = Prepared::new(self);
        let mut search = Search {
            preemptible_words: Rc::new(prepared.first_preemptible_words()),
            prepared,
            bounds,
            visited: HashMap::new(),
            frames: Vec::new(),
            explored: Explored::default(),
            fired: Vec::new(),
        };
        loop {
            match search.execute() {
                Err(violation) => return Err(Box::new(search.failure(violation))),
                // With the new preemptible words, known states have more executions.
                Ok(Some(preemptible_words)) => {
                    search.preemptible_words =
                        Rc::new(&*search.preemptible_words | &preemptible_words);
                    search.visited.clear();
                    search.frames.clear();
                    let executions = search.explored.executions;
                    search.explored = Explored { executions, ..Explored::default() };
                    continue;
                }
                Ok(None) => {}
            }
            while let Some(frame) = search.frames.last_mut() {
                frame.chosen += 1;
                if frame.chosen < frame.actions.len() {
                    break;
                }
                search.frames.pop();
            }
            search.explored.states = search.visited.len();
            search.explored.exhausted = search.frames.is_empty();
            if search.frames.is_empty() || search.explored.executions >= bounds.executions {
                search.explored.unfired = self.unfired(&search.fired);
                return Ok(search.explored);
            }
        }
    }

    /// Calls [`Scenario::explore`] with more and more preemptions, so that a failure has as few as
    /// possible.
    ///
    /// # Errors
    /// The first execution that went wrong.
    pub fn explore_deeper(&self, bounds: Bounds) -> Result<Explored, Box<Failure>> {
        for preemptions in 0..bounds.preemptions.unwrap_or(4) {
            self.explore(Bounds { preemptions: Some(preemptions), ..bounds })?;
        }
        self.explore(bounds)
    }
}

impl Search<'_> {
    /// Runs one execution: the choices of `frames`, then the first action at each further choice.
    /// Returns the words that became preemptible, if any.
    fn execute(&mut self) -> Result<Option<BTreeSet<usize>>, Violation> {
        self.explored.executions += 1;
        let mut execution =
            Execution::begin(&self.prepared, Some(self.preemptible_words.clone()), false);
        let mut preemptions_left = self.bounds.preemptions.unwrap_or(u8::MAX);
        for frame in &self.frames {
            preemptions_left = frame.preemptions_left;
            let action = frame.actions[frame.chosen];
            preemptions_left -= self.cost(&execution, action);
            execution.act(action)?;
        }
        let mut actions = Vec::new();
        loop {
            let preemptible_words =
                std::mem::take(&mut execution.world.borrow_mut().newly_preemptible);
            if !preemptible_words.is_empty() {
                return Ok(Some(preemptible_words.into_iter().collect()));
            }
            execution.actions(&mut actions);
            actions.retain(|action| self.cost(&execution, *action) <= preemptions_left);
            if actions.is_empty() {
                self.explored.complete += 1;
                let finished = execution.finish();
                self.fired.extend(execution.world.borrow().fired.iter().copied());
                self.fired.dedup();
                return finished.map(|()| None);
            }
            if actions.len() > 1 {
                let bounded = self.bounds.preemptions.is_some();
                let state = execution.state(bounded);
                if self.visited.get(&state).is_some_and(|before| *before >= preemptions_left) {
                    return Ok(None);
                }
                self.visited.insert(state, preemptions_left);
            }
            let action = actions[0];
            self.frames.push(Frame { actions: actions.clone(), chosen: 0, preemptions_left });
            preemptions_left -= self.cost(&execution, action);
            execution.act(action)?;
        }
    }

    fn cost(&self, execution: &Execution<'_>, action: SchedulerAction) -> u8 {
        match self.bounds.preemptions {
            Some(_) => u8::from(execution.preempts(action)),
            None => 0,
        }
    }

    /// Returns the report of the current choices.
    fn failure(&self, violation: Violation) -> Failure {
        let actions = self.frames.iter().map(|frame| frame.actions[frame.chosen]).collect();
        let preemptible_words = Some(self.preemptible_words.clone());
        let mut failure = Failure::new(&self.prepared, preemptible_words, actions, violation);
        failure.executions = self.explored.executions;
        failure
    }
}

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

/// An execution that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The scenario in one line.
    pub scenario: String,
    /// What went wrong.
    pub violation: Violation,
    /// The operations and their answers.
    history: Vec<Record>,
    trace: Vec<Line>,
    /// Mutants of the scenario that broke no rule in this execution.
    pub unfired: Vec<Mutant>,
    /// The number of executions that went well before this one.
    pub executions: u64,
    /// The seed of the execution, if it was a random one.
    pub seed: Option<u64>,
}

impl Failure {
    /// Repeats an execution to record its trace. Without `preemptible_words`, every word that can
    /// change is preemptible.
    pub(crate) fn new(
        prepared: &Prepared<'_>,
        preemptible_words: Option<Rc<BTreeSet<usize>>>,
        actions: Vec<SchedulerAction>,
        violation: Violation,
    ) -> Self {
        let mut execution = Execution::begin(prepared, preemptible_words, true);
        let failed = actions.iter().any(|action| execution.act(*action).is_err());
        if !failed {
            // The checks at the end failed, so the trace needs them.
            let _ = execution.finish();
        }
        let trace = execution.world.borrow_mut().trace.take().unwrap_or_default();
        let history = std::mem::take(&mut execution.monitor.history);
        let unfired = prepared.scenario.unfired(&execution.world.borrow().fired);
        let scenario = prepared.scenario.to_string();
        Self { scenario, violation, history, trace, unfired, executions: 0, seed: None }
    }

    /// Returns the number of lines of the trace.
    pub fn steps(&self) -> usize {
        self.trace.len()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.scenario, self.violation)?;
        if let Some(seed) = self.seed {
            write!(f, " (seed {seed})")?;
        }
        let start = self.trace.first().map_or(0, |line| line.now);
        for line in &self.trace {
            let actor = line.process.map_or(" ".to_owned(), name);
            let indent = line.process.map_or(0, |process| 2 * process);
            let time = line.now - start;
            write!(f, "\n{time:>10} {:indent$}{actor} {}", "", line.text)?;
        }
        write!(f, "\nhistory:")?;
        self.history.iter().try_for_each(|record| write!(f, "\n  {record}"))
    }
}

impl std::error::Error for Failure {}
