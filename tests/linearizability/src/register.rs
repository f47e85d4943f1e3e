//! What one key may do, and which orders of its operations explain what was seen so far.
//!
//! The algorithm is Wing and Gong's search with Lowe's memo, made incremental. It keeps a set of
//! configurations. Each is an order of the operations so far that explains every answer. Of an
//! order it keeps what matters for the rest: the key's value, and which of the unanswered
//! operations have taken effect already, with which answer. An answer that no configuration can
//! give is a violation.

use std::collections::{BTreeMap, HashSet};

use crate::HistoryOperation;

/// A value, as a number.
pub type Value = u32;

/// What was asked of the key, with values as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryCall {
    /// The operation.
    pub operation: HistoryOperation,
    /// The value to be stored, if the operation stores one.
    pub argument: Value,
    /// The value that an exchange requires; `None` for a version that no operation saw, which
    /// stands for an unknown value.
    pub expected: Option<Value>,
}

/// What the caller was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HistoryAnswer {
    /// A GET found the key, or the change was made.
    pub done: bool,
    /// What a GET found, or an exchange instead of what it expected.
    pub found: Option<Value>,
}

impl HistoryCall {
    /// What happens to a key with this value: what it has then, and what the caller is told.
    pub(super) fn apply(self, held: Option<Value>) -> (Option<Value>, HistoryAnswer) {
        let stored = || (Some(self.argument), HistoryAnswer { done: true, found: None });
        let refused = |found| (held, HistoryAnswer { done: false, found });
        match self.operation {
            HistoryOperation::Get => (held, HistoryAnswer { done: held.is_some(), found: held }),
            HistoryOperation::Put => stored(),
            HistoryOperation::Insert if held.is_none() => stored(),
            HistoryOperation::Update if held.is_some() => stored(),
            HistoryOperation::Delete if held.is_some() => {
                (None, HistoryAnswer { done: true, found: None })
            }
            HistoryOperation::Insert | HistoryOperation::Update | HistoryOperation::Delete => {
                refused(None)
            }
            HistoryOperation::Exchange | HistoryOperation::ExchangeVersion => {
                if self.expected.is_some() && held == self.expected {
                    stored()
                } else {
                    refused(held)
                }
            }
        }
    }

    /// All that may happen, given what the caller is told, where that is known.
    fn outcomes(
        self,
        held: Option<Value>,
        told: Option<HistoryAnswer>,
    ) -> impl Iterator<Item = (Option<Value>, HistoryAnswer)> {
        // A version that no operation saw might be that of any value.
        let is_unseen =
            self.operation == HistoryOperation::ExchangeVersion && self.expected.is_none();
        let unseen = (is_unseen && held.is_some())
            .then_some((Some(self.argument), HistoryAnswer { done: true, found: None }));
        let all = [Some(self.apply(held)), unseen];
        all.into_iter().flatten().filter(move |(_, answer)| told.is_none_or(|told| told == *answer))
    }
}

/// One way to explain what was seen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Configuration {
    held: Option<Value>,
    /// Operations without an answer that have taken effect, and what they will be told.
    applied: Vec<(u32, HistoryAnswer)>,
}

impl Configuration {
    fn has_applied(&self, id: u32) -> Option<HistoryAnswer> {
        let at = self.applied.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(self.applied[at].1)
    }

    fn apply(&self, id: u32, (held, answer): (Option<Value>, HistoryAnswer)) -> Self {
        let mut applied = self.applied.clone();
        let at = applied.partition_point(|(other, _)| *other < id);
        applied.insert(at, (id, answer));
        Self { held, applied }
    }

    fn without(mut self, id: u32) -> Self {
        self.applied.retain(|(other, _)| *other != id);
        self
    }
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    call: HistoryCall,
    /// What it will be told, if that is known already.
    told: Option<HistoryAnswer>,
}

/// What is wrong with a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterFault {
    /// No order of the operations explains the answer of this one.
    NotLinearizable(u32),
    /// There are more explanations than [`CONFIGURATIONS_MAX`]: nothing is known.
    TooMany(u32),
}

/// How many explanations are kept.
pub const CONFIGURATIONS_MAX: usize = 200_000;

/// The history of one key so far.
#[derive(Clone, Debug)]
pub struct Register {
    configurations: HashSet<Configuration>,
    pending: BTreeMap<u32, Pending>,
}

impl Register {
    /// A key with this value.
    pub fn new(held: Option<Value>) -> Self {
        let start = Configuration { held, applied: Vec::new() };
        Self { configurations: [start].into(), pending: BTreeMap::new() }
    }

    /// An operation begins. Ids are the caller's and differ. Telling the answer ahead of time
    /// saves work.
    pub fn invoke(&mut self, id: u32, call: HistoryCall, told: Option<HistoryAnswer>) {
        self.pending.insert(id, Pending { call, told });
    }

    /// An operation turned out to have no effect, now or ever.
    pub fn cancel(&mut self, id: u32) {
        self.pending.remove(&id);
        self.configurations.retain(|configuration| configuration.has_applied(id).is_none());
    }

    /// An operation ends.
    ///
    /// # Errors
    /// See [`RegisterFault`].
    pub fn respond(&mut self, id: u32, answer: HistoryAnswer) -> Result<(), RegisterFault> {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.told = Some(answer);
        }
        self.settle(id, Some(answer))
    }

    /// An operation ends without an answer: it has taken effect by now, or never will.
    ///
    /// # Errors
    /// [`RegisterFault::TooMany`].
    pub fn give_up(&mut self, id: u32) -> Result<(), RegisterFault> {
        self.settle(id, None)
    }

    fn settle(&mut self, id: u32, answer: Option<HistoryAnswer>) -> Result<(), RegisterFault> {
        let mut next = match answer {
            Some(_) => HashSet::new(),
            None => {
                let not_applied = |of: &&Configuration| of.has_applied(id).is_none();
                self.configurations.iter().filter(not_applied).cloned().collect()
            }
        };
        let mut stack: Vec<_> = self.configurations.drain().collect();
        let mut seen: HashSet<_> = stack.iter().cloned().collect();
        while let Some(configuration) = stack.pop() {
            let configuration = self.look_around(configuration);
            if let Some(predicted) = configuration.has_applied(id) {
                if answer.is_none_or(|answer| answer == predicted) {
                    next.insert(configuration.without(id));
                }
                continue;
            }
            for (other, pending) in &self.pending {
                if configuration.has_applied(*other).is_some() {
                    continue;
                }
                for outcome in pending.call.outcomes(configuration.held, pending.told) {
                    let applied = configuration.apply(*other, outcome);
                    if seen.insert(applied.clone()) {
                        stack.push(applied);
                    }
                }
            }
            if seen.len() > CONFIGURATIONS_MAX {
                return Err(RegisterFault::TooMany(id));
            }
        }
        self.pending.remove(&id);
        self.configurations = next;
        if self.configurations.is_empty() {
            return Err(RegisterFault::NotLinearizable(id));
        }
        Ok(())
    }

    /// Operations that change nothing and whose answer is known take effect as soon as they can:
    /// waiting gains them nothing.
    fn look_around(&self, mut configuration: Configuration) -> Configuration {
        for (id, pending) in &self.pending {
            let Some(told) = pending.told else { continue };
            if configuration.has_applied(*id).is_some() {
                continue;
            }
            let (held, answer) = pending.call.apply(configuration.held);
            if held == configuration.held && answer == told && pending.call.is_harmless(told) {
                configuration = configuration.apply(*id, (held, answer));
            }
        }
        configuration
    }

    /// A hash of everything that decides about the rest of the history.
    pub fn state(&self) -> u64 {
        use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
        let build = BuildHasherDefault::<DefaultHasher>::default();
        let all = self.configurations.iter().map(|configuration| build.hash_one(configuration));
        let pending: Vec<u32> = self.pending.keys().copied().collect();
        all.fold(build.hash_one(pending), u64::wrapping_add)
    }
}

impl HistoryCall {
    /// Whether with this answer it changes nothing.
    fn is_harmless(self, told: HistoryAnswer) -> bool {
        self.operation == HistoryOperation::Get || !told.done
    }
}
