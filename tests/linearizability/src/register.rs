//! The orders of the operations on one key that explain the answers so far.
//!
//! The algorithm is Wing and Gong's search with Lowe's memo, made incremental. It keeps a set of
//! configurations. Each configuration stands for orders of the operations so far that explain every
//! answer. These orders agree in all that matters later: the key's value, the unanswered operations
//! that have taken effect, and their answers. An answer that no configuration can give is a
//! violation.

use std::collections::{BTreeMap, HashSet};

use crate::HistoryOperation;

/// A value, as a number. A decimal text stands for itself, so that the checker can add to it.
pub type Value = i64;

/// Every text that is no decimal number, or too large a one, has a number from this one on.
pub const OPAQUE_MIN: Value = 1 << 40;

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held {
    /// The value.
    pub value: Value,
    /// The time at which it expires; 0 for never, and where it is not known.
    pub expiry: Value,
}

impl From<Value> for Held {
    fn from(value: Value) -> Self {
        Self { value, expiry: 0 }
    }
}

/// Returns the value of a decimal text; `None` for any other text.
pub fn numeric(text: &str) -> Option<Value> {
    let value: Value = text.parse().ok()?;
    (value.abs() < OPAQUE_MIN && value.to_string() == text).then_some(value)
}

/// An operation on the key, with values as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryCall {
    /// The operation.
    pub operation: HistoryOperation,
    /// The value to be stored, if the operation stores one. For an increment the addend, for an
    /// append one digit, for a touch the new expiry.
    pub argument: Value,
    /// The time at which the stored value expires; 0 for never.
    pub expiry: Value,
    /// What an exchange or a DELETE requires: of an exchange by value only the value counts. `None`
    /// for a version that no answer contains, so its value is unknown.
    pub expected: Option<Held>,
}

/// The answer of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HistoryAnswer {
    /// A GET found the key, or the change was made.
    pub done: bool,
    /// What a GET or take found, what an exchange found instead of the expected value, what kept a
    /// get-or-insert from storing, or the sum that an increment stored.
    pub found: Option<Held>,
}

/// What the caller knows of an operation's end when the operation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing.
    Unknown,
    /// It will have this answer, which saves work.
    Answer(HistoryAnswer),
    /// It will have no answer. So orders agree that differ only in the answers of such operations:
    /// several on one key would have too many.
    Unanswered,
}

/// Stands for the answers of an operation that ends without one.
const NEVER_SEEN: HistoryAnswer = HistoryAnswer { done: false, found: None };

impl HistoryCall {
    /// Whether an operation with this answer changes nothing.
    fn is_unchanging(self, answer: HistoryAnswer) -> bool {
        self.operation == HistoryOperation::Get || !answer.done
    }

    /// Applies the operation to a key with the value `held`. Returns the new value and the answer.
    pub(super) fn apply(self, held: Option<Held>) -> (Option<Held>, HistoryAnswer) {
        let changed = |new| (new, HistoryAnswer { done: true, found: None });
        let stored = || changed(Some(Held { value: self.argument, expiry: self.expiry }));
        let removed = || changed(None);
        let refused = |found| (held, HistoryAnswer { done: false, found });
        let value = held.map_or(0, |held| held.value);
        let expiry = held.map_or(0, |held| held.expiry);
        let is_expected = |is: fn(Held, Held) -> bool| {
            held.zip(self.expected).is_some_and(|(held, expected)| is(held, expected))
        };
        match self.operation {
            HistoryOperation::Get => (held, HistoryAnswer { done: held.is_some(), found: held }),
            HistoryOperation::Put => stored(),
            HistoryOperation::PutKeepTtl => changed(Some(Held { value: self.argument, expiry })),
            HistoryOperation::Insert | HistoryOperation::GetOrInsert if held.is_none() => stored(),
            HistoryOperation::Update if held.is_some() => stored(),
            HistoryOperation::Touch if held.is_some() => {
                changed(Some(Held { value, expiry: self.argument }))
            }
            HistoryOperation::Delete if held.is_some() => removed(),
            HistoryOperation::DeleteVersion | HistoryOperation::Evict
                if is_expected(|held, it| held == it) =>
            {
                removed()
            }
            HistoryOperation::Take if held.is_some() => {
                (None, HistoryAnswer { done: true, found: held })
            }
            HistoryOperation::Insert
            | HistoryOperation::Update
            | HistoryOperation::Touch
            | HistoryOperation::Delete
            | HistoryOperation::DeleteVersion
            | HistoryOperation::Evict
            | HistoryOperation::Expire
            | HistoryOperation::Take => refused(None),
            // These fail for a value that is no number.
            HistoryOperation::Increment | HistoryOperation::Append if value >= OPAQUE_MIN => {
                refused(None)
            }
            HistoryOperation::Increment => {
                let value = value + self.argument;
                let answer = HistoryAnswer { done: true, found: Some(value.into()) };
                (Some(Held { value, expiry }), answer)
            }
            HistoryOperation::Append => {
                changed(Some(Held { value: value * 10 + self.argument, expiry }))
            }
            HistoryOperation::Exchange if is_expected(|held, it| held.value == it.value) => {
                stored()
            }
            HistoryOperation::ExchangeVersion if is_expected(|held, it| held == it) => stored(),
            HistoryOperation::Exchange
            | HistoryOperation::ExchangeVersion
            | HistoryOperation::GetOrInsert => refused(held),
        }
    }

    /// Whether the operation first looks at the value and then changes it. If the value expires in
    /// between, the operation still counts it as present.
    fn looks_first(self) -> bool {
        !matches!(
            self.operation,
            HistoryOperation::Get
                | HistoryOperation::Put
                | HistoryOperation::Insert
                | HistoryOperation::GetOrInsert
                | HistoryOperation::Delete
                | HistoryOperation::Evict
                | HistoryOperation::Expire
        )
    }

    /// Returns the pairs of new content and answer that are possible because the key's value has
    /// expired, and is still stored.
    fn outcomes_of_expired(
        self,
        expired: Held,
        began_at: Value,
    ) -> impl Iterator<Item = (Content, HistoryAnswer)> {
        let is_removed = match self.operation {
            HistoryOperation::Expire | HistoryOperation::Evict => self.expected == Some(expired),
            HistoryOperation::Delete => true,
            _ => false,
        };
        let done = self.operation != HistoryOperation::Delete;
        let removed = (Content::default(), HistoryAnswer { done, found: None });
        let looked_before = self.looks_first() && began_at < expired.expiry;
        let (held, answer) = self.apply(Some(expired));
        // One that changes nothing, such as a refused exchange, has seen the value before.
        let content = match held == Some(expired) {
            true => Content { held: None, expired: held },
            false => Content { held, expired: None },
        };
        let counted = looked_before.then_some((content, answer));
        is_removed.then_some(removed).into_iter().chain(counted)
    }

    /// Returns all possible pairs of new content and answer. With a known answer, returns only the
    /// pairs with this answer. `now` is the present time.
    fn outcomes(
        self,
        Content { held, expired }: Content,
        pending: Pending,
        now: Value,
    ) -> impl Iterator<Item = (Content, HistoryAnswer)> {
        // The unknown version may be the current value's version.
        let by_version = matches!(
            self.operation,
            HistoryOperation::ExchangeVersion | HistoryOperation::DeleteVersion
        );
        let is_unknown = by_version && self.expected.is_none() && held.is_some();
        let matched = is_unknown.then(|| Self { expected: held, ..self }.apply(held));
        let outcomes = [self.apply(held)].into_iter().chain(matched);
        let outcomes = outcomes.map(move |(new, answer)| {
            let content = if new == held { Content { held, expired } } else { Content::of(new) };
            (content, answer)
        });
        let of_expired = expired.map(|expired| self.outcomes_of_expired(expired, pending.began_at));
        let outcomes = outcomes.chain(of_expired.into_iter().flatten());
        let outcomes = outcomes.map(move |(content, answer)| (content.at(now), answer));
        let before = Content { held, expired };
        outcomes.filter_map(move |(content, answer)| match pending.ending {
            Ending::Unknown => Some((content, answer)),
            Ending::Answer(known) => (known == answer).then_some((content, answer)),
            // Without an operation that changes nothing, more can follow.
            Ending::Unanswered => (content != before).then_some((content, NEVER_SEEN)),
        })
    }
}

/// The content of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Content {
    held: Option<Held>,
    /// A value that has expired. The key is absent, and nothing has replaced or removed the value.
    expired: Option<Held>,
}

impl Content {
    fn of(held: Option<Held>) -> Self {
        Self { held, expired: None }
    }

    /// The same content at this time, at which the value may have expired.
    fn at(self, now: Value) -> Self {
        match self.held {
            Some(held) if held.expiry != 0 && held.expiry <= now => {
                Self { held: None, expired: self.held }
            }
            _ => self,
        }
    }
}

/// One explanation of the answers so far.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Configuration {
    content: Content,
    /// The unanswered operations that have taken effect, and their future answers, sorted by id.
    applied: Vec<(u32, HistoryAnswer)>,
}

impl Configuration {
    /// Returns the answer of an operation that has taken effect.
    fn applied_answer(&self, id: u32) -> Option<HistoryAnswer> {
        let index = self.applied.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(self.applied[index].1)
    }

    fn apply(&self, id: u32, (content, answer): (Content, HistoryAnswer)) -> Self {
        let mut applied = self.applied.clone();
        let index = applied.partition_point(|(other, _)| *other < id);
        applied.insert(index, (id, answer));
        Self { content, applied }
    }

    fn without(mut self, id: u32) -> Self {
        self.applied.retain(|(other, _)| *other != id);
        self
    }
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    call: HistoryCall,
    ending: Ending,
    /// The time at which it began, as far as [`Register::advance`] knows it.
    began_at: Value,
}

/// The reason why a history was not accepted, with the id of the operation that showed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterFault {
    /// No order of the operations explains this operation's answer.
    NotLinearizable(u32),
    /// There are more explanations than [`CONFIGURATIONS_MAX`], so there is no verdict.
    TooMany(u32),
}

/// Limit on the explanations of a history. A history that exceeds it gets no verdict.
pub const CONFIGURATIONS_MAX: usize = 200_000;

/// The history of one key so far.
#[derive(Clone, Debug)]
pub struct Register {
    configurations: HashSet<Configuration>,
    pending: BTreeMap<u32, Pending>,
    /// Values with an expiry up to this time have expired.
    now: Value,
    /// Whether the key may become absent at any moment.
    is_cached: bool,
}

/// The key is absent.
impl Default for Register {
    fn default() -> Self {
        let start = Configuration { content: Content::default(), applied: Vec::new() };
        let (configurations, pending) = ([start].into(), BTreeMap::new());
        Self { configurations, pending, now: 0, is_cached: false }
    }
}

impl Register {
    /// Returns a register of a cache: while the key is present, it may become absent at any moment.
    pub fn cached() -> Self {
        Self { is_cached: true, ..Self::default() }
    }

    /// Begins an operation. The caller chooses a unique id.
    pub fn invoke(&mut self, id: u32, call: HistoryCall, ending: Ending) {
        self.pending.insert(id, Pending { call, ending, began_at: self.now });
    }

    /// Notes the time. From here on, values that have expired by then are absent.
    ///
    /// # Errors
    /// [`RegisterFault::TooMany`], with the id 0.
    pub fn advance(&mut self, now: Value) -> Result<(), RegisterFault> {
        let mut stack: Vec<_> = self.configurations.drain().collect();
        let mut seen: HashSet<_> = stack.iter().cloned().collect();
        while let Some(configuration) = stack.pop() {
            self.apply_each(&configuration, &mut seen, &mut stack);
            if seen.len() > CONFIGURATIONS_MAX {
                return Err(RegisterFault::TooMany(0));
            }
        }
        self.now = now;
        let at = |it: Configuration| Configuration { content: it.content.at(now), ..it };
        self.configurations = seen.into_iter().map(at).collect();
        Ok(())
    }

    /// Applies each operation that has not taken effect yet, or lets a cache remove the key.
    /// Collects the configurations that are not in `seen`.
    fn apply_each(
        &self,
        configuration: &Configuration,
        seen: &mut HashSet<Configuration>,
        stack: &mut Vec<Configuration>,
    ) {
        if self.is_cached && configuration.content.held.is_some() {
            let content = Content::default();
            let vanished = Configuration { content, ..configuration.clone() };
            if seen.insert(vanished.clone()) {
                stack.push(vanished);
            }
        }
        for (id, pending) in &self.pending {
            if configuration.applied_answer(*id).is_some() {
                continue;
            }
            for outcome in pending.call.outcomes(configuration.content, *pending, self.now) {
                let applied = configuration.apply(*id, outcome);
                if seen.insert(applied.clone()) {
                    stack.push(applied);
                }
            }
        }
    }

    /// Removes an operation that certainly has no effect.
    pub fn cancel(&mut self, id: u32) {
        self.pending.remove(&id);
        self.configurations.retain(|configuration| configuration.applied_answer(id).is_none());
    }

    /// Ends an operation with this answer.
    ///
    /// # Errors
    /// See [`RegisterFault`].
    pub fn respond(&mut self, id: u32, answer: HistoryAnswer) -> Result<(), RegisterFault> {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.ending = Ending::Answer(answer);
        }
        self.end(id, Some(answer))
    }

    /// Ends an operation without an answer. The operation has taken effect by now, or never will.
    ///
    /// # Errors
    /// [`RegisterFault::TooMany`].
    pub fn end_without_answer(&mut self, id: u32) -> Result<(), RegisterFault> {
        self.end(id, None)
    }

    /// Keeps the configurations that agree with the end of this operation.
    fn end(&mut self, id: u32, answer: Option<HistoryAnswer>) -> Result<(), RegisterFault> {
        let mut next = match answer {
            Some(_) => HashSet::new(),
            None => {
                let not_applied =
                    |configuration: &&Configuration| configuration.applied_answer(id).is_none();
                self.configurations.iter().filter(not_applied).cloned().collect()
            }
        };
        let mut stack: Vec<_> = self.configurations.drain().collect();
        let mut seen: HashSet<_> = stack.iter().cloned().collect();
        while let Some(configuration) = stack.pop() {
            let configuration = self.apply_unchanging(configuration);
            if let Some(predicted) = configuration.applied_answer(id) {
                if answer.is_none_or(|answer| answer == predicted) {
                    next.insert(configuration.without(id));
                }
                continue;
            }
            self.apply_each(&configuration, &mut seen, &mut stack);
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

    /// Applies all operations that change nothing and have the known answer now. Applying them
    /// later would explain nothing more.
    fn apply_unchanging(&self, mut configuration: Configuration) -> Configuration {
        for (id, pending) in &self.pending {
            let Ending::Answer(known_answer) = pending.ending else { continue };
            if configuration.applied_answer(*id).is_some() {
                continue;
            }
            let content = configuration.content;
            // A DELETE may remove a value that has expired, although it reports no change.
            if content.expired.is_some() && pending.call.operation == HistoryOperation::Delete {
                continue;
            }
            let (held, answer) = pending.call.apply(content.held);
            if held == content.held
                && answer == known_answer
                && pending.call.is_unchanging(known_answer)
            {
                configuration = configuration.apply(*id, (content, answer));
            }
        }
        configuration
    }

    /// Returns a hash of all state on which the verdict about later operations depends.
    pub fn state(&self) -> u64 {
        use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
        let build = BuildHasherDefault::<DefaultHasher>::default();
        let hashes = self.configurations.iter().map(|configuration| build.hash_one(configuration));
        let pending: Vec<_> =
            self.pending.iter().map(|(id, pending)| (*id, pending.began_at)).collect();
        hashes.fold(build.hash_one(pending), u64::wrapping_add)
    }
}
