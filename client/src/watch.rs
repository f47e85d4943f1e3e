//! Waiting for a change of keys, by READs of their slots: no message, and no server CPU.

use std::time::{Duration, Instant};

use farside_protocol::Version;

use crate::{Result, Session};

/// The pause between two polls of the watched keys.
const WATCH_INTERVAL: Duration = Duration::from_millis(1);

/// A key that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The key's index in the list of watched keys.
    pub index: usize,
    /// The version of its value now; `None` if the key is absent.
    pub version: Option<Version>,
}

impl Session {
    /// Waits until one of the keys is stored or removed, from this call on. Returns the first one
    /// found, or `None` after `timeout`.
    ///
    /// Polls every millisecond. Each poll costs a key what [`Session::version`] costs: one READ of
    /// 8 bytes if the location is cached and the value does not expire. Up to `pipeline_depth` of
    /// them share a doorbell. A key that changes and changes back between two polls still counts,
    /// because its version differs; one that is removed and was absent at both does not.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    ///
    /// match session.watch(&["config", "flags"], Duration::from_millis(10))? {
    ///     Some(changed) => println!("key {} now has {:?}", changed.index, changed.version),
    ///     None => println!("no change"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn watch<K: AsRef<[u8]>>(
        &mut self,
        keys: &[K],
        timeout: Duration,
    ) -> Result<Option<Changed>> {
        let known = self.versions(keys)?;
        self.watch_since(keys, &known, timeout)
    }

    /// As [`Session::watch`], for changes since the keys had these versions, which earlier GETs
    /// returned. `None` stands for an absent key. Of two lists of different lengths the longer is
    /// cut.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    ///
    /// let version = session.get_or_insert("config", "1")?.version;
    /// session.put("config", "2")?; // usually another client does this
    /// let changed = session.watch_since(&["config"], &[Some(version)], Duration::from_secs(1))?;
    /// assert_eq!(changed.expect("it has changed").index, 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn watch_since<K: AsRef<[u8]>>(
        &mut self,
        keys: &[K],
        known: &[Option<Version>],
        timeout: Duration,
    ) -> Result<Option<Changed>> {
        let started = Instant::now();
        loop {
            let present = self.versions(keys)?;
            let changed = present.iter().zip(known).position(|(present, known)| present != known);
            if let Some(index) = changed {
                return Ok(Some(Changed { index, version: present[index] }));
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(WATCH_INTERVAL.min(left));
        }
    }

    /// Returns the versions of several keys, in their order.
    fn versions<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<Vec<Option<Version>>> {
        let batch = keys.iter().fold(self.batch(), |batch, key| batch.version(key));
        batch.run()?.into_iter().map(|outcome| Ok(outcome?.version)).collect()
    }
}
