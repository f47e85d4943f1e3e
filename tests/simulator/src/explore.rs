//! Explores every execution of a small scenario, one after another.
//!
//! Futures cannot be copied. So each execution starts anew, and repeats the choices of the previous
//! one up to the last choice with an untried alternative. An execution that reaches a known state
//! ends there. A state is a hash of the region's memory, of each client's observations, and of the
//! checker's configurations. The observations stand for the client's own memory. The search learns
//! which words are preemptible. When a process writes a word that another one has accessed, the
//! word gets steps of its own, and the search starts over.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use crate::execution::Execution;
use crate::failure::Failure;
use crate::monitor::Violation;
use crate::mutant::Mutant;
use crate::prepared::Prepared;
use crate::process::SchedulerAction;
use crate::scenario::Scenario;

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
