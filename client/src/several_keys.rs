//! Operations of a session on several keys.

use farside_control::Role;
use farside_protocol::{Action, Lifetime};

use crate::batch::run_all;
use crate::long_values::{ManyGet, ManyPut};
use crate::{OperationError, Outcome, ReadValue, Result, Session, Value, ValueRef};

/// Limit on the DELETEs of one batch of [`Session::delete_prefix`].
const DELETES_PER_BATCH: usize = 1024;

impl Session {
    /// Returns the values of several keys, in their order. Up to `pipeline_depth` GETs share a
    /// doorbell.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob")])?;
    /// let values = session.get_many(["user:2", "user:3"])?;
    /// assert_eq!(values[0].as_ref().expect("it was just put"), "bob");
    /// assert!(values[1].is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first error of a GET; see [`Session::get`].
    pub fn get_many<K: AsRef<[u8]>>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let batch = keys.into_iter().fold(self.batch(), |batch, key| batch.get(key));
        batch.run()?.into_iter().map(|outcome| Ok(outcome?.value)).collect()
    }

    /// As [`Session::get_many`], into the caller's memory. A long value at a cached location goes
    /// there directly, as by [`Session::get_into`]; up to 32 of these READs share a doorbell. Other
    /// values are copied there once.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob")])?;
    /// let mut names = [[0; 16]; 2];
    /// let targets = names.iter_mut().map(|name| &mut name[..]);
    /// let read = session.get_many_into(["user:1", "user:2"].into_iter().zip(targets))?;
    /// assert_eq!(read[1].expect("it was just put").bytes, 3);
    /// assert_eq!(&names[1][..3], b"bob");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first error of a GET; see [`Session::get_into`].
    pub fn get_many_into<'t, K: AsRef<[u8]>>(
        &mut self,
        entries: impl IntoIterator<Item = (K, &'t mut [u8])>,
    ) -> Result<Vec<Option<ReadValue>>> {
        let mut entries: Vec<_> = entries.into_iter().collect();
        let mut gets: Vec<_> = Vec::with_capacity(entries.len());
        for (key, target) in &mut entries {
            gets.push(ManyGet { key: (*key).as_ref(), target, read: None });
        }
        self.get_long(&mut gets)?;
        self.get_rest(&mut gets)?;
        Ok(gets.into_iter().map(|get| get.read.flatten()).collect())
    }

    /// Gets what has no result yet, by a batch.
    fn get_rest(&mut self, gets: &mut [ManyGet<'_>]) -> Result<()> {
        let is_left = |get: &&mut ManyGet<'_>| get.read.is_none();
        let mut left: Vec<_> = gets.iter_mut().filter(is_left).collect();
        if left.is_empty() {
            return Ok(());
        }
        let batch = left.iter().fold(self.batch(), |batch, get| batch.get(get.key));
        let outcomes = batch.run_with(&mut |number, outcome| {
            let ManyGet { target, read, .. } = &mut *left[number];
            let Outcome { applied, version, value, number } = outcome;
            let copy = |ValueRef { data, version }: ValueRef<'_>| {
                let (needed, bytes) = (data.len(), target.len());
                let room = target.get_mut(..needed);
                let too_short = OperationError::TargetTooShort { needed, bytes };
                room.ok_or(too_short)?.copy_from_slice(data);
                Result::Ok(ReadValue::new(needed, version))
            };
            *read = Some(value.map(copy).transpose()?);
            Ok(Outcome { applied, version, value: None, number })
        })?;
        outcomes.into_iter().try_for_each(|outcome| outcome.map(drop))
    }

    /// Stores several values. Up to `pipeline_depth` PUTs share a doorbell. Each of them is atomic;
    /// all of them are not, and of several PUTs of one key any may be the last. A long value at a
    /// cached location is transferred directly, as by [`Session::put`]; up to 32 of these PUTs
    /// share a doorbell. Values with extents are stored one after the other.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob")])?;
    /// let numbers = (0..100_u32).map(|n| (n.to_le_bytes(), n.to_string()));
    /// session.put_many(numbers)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first error of a PUT; see [`Session::put`]. The others may have taken effect.
    pub fn put_many<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &mut self,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<()> {
        let entries: Vec<_> = entries.into_iter().collect();
        let mut puts: Vec<_> = Vec::with_capacity(entries.len());
        for (key, value) in &entries {
            puts.push(ManyPut { key: key.as_ref(), value: value.as_ref(), is_done: false });
        }
        self.put_long(&mut puts)?;
        puts.retain(|put| !put.is_done);
        if puts.is_empty() {
            return Ok(());
        }
        let operation = |number: usize| {
            let ManyPut { key, value, .. } = puts[number];
            (Action::Put(Lifetime::FOREVER), key, value)
        };
        let take = &mut |_, outcome: Outcome<ValueRef<'_>>| Ok(outcome.map(Value::from));
        let outcomes = run_all(self, puts.len(), &operation, take)?;
        outcomes.into_iter().try_for_each(|outcome| outcome.map(drop))
    }

    /// Removes several keys, and returns how many of them were present. Up to `pipeline_depth`
    /// DELETEs share a doorbell.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob")])?;
    /// assert_eq!(session.delete_many(["user:1", "user:2", "user:3"])?, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first error of a DELETE; see [`Session::delete`]. The others may have taken effect.
    pub fn delete_many<K: AsRef<[u8]>>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<u64> {
        let batch = keys.into_iter().fold(self.batch(), |batch, key| batch.delete(key));
        let outcomes = batch.run()?.into_iter();
        outcomes.map(|outcome| Ok(u64::from(outcome?.applied))).sum()
    }

    /// Removes all keys that begin with `prefix`, and returns how many there were. A key that is
    /// inserted meanwhile may stay.
    ///
    /// Scans all keys, because the index has no order: the round trips of [`Session::scan_keys`],
    /// and a DELETE for each key that is removed.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob"), ("order:1", "tea")])?;
    /// assert_eq!(session.delete_prefix("user:")?, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`Session::scan`], and the first error of a DELETE.
    pub fn delete_prefix(&mut self, prefix: impl AsRef<[u8]>) -> Result<u64> {
        if self.shared.role() == Role::Reader {
            return Err(OperationError::Denied.into());
        }
        let mut removed = 0;
        // A batch needs the session, which the scan has.
        let mut deleting = Session::open(self.shared.clone())?;
        let mut scan = self.scan_keys(prefix)?;
        loop {
            let entries = scan.by_ref().take(DELETES_PER_BATCH);
            let keys: Vec<_> = entries.map(|entry| Ok(entry?.key)).collect::<Result<_>>()?;
            if keys.is_empty() {
                return Ok(removed);
            }
            removed += deleting.delete_many(keys)?;
        }
    }
}
