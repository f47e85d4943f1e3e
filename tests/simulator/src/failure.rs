//! The report of an execution that went wrong.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;

use farside_linearizability::Record;

use crate::execution::Execution;
use crate::monitor::Violation;
use crate::mutant::Mutant;
use crate::prepared::{Prepared, name};
use crate::process::SchedulerAction;
use crate::trace::Line;

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
