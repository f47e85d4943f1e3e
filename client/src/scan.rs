//! Iteration over all entries.

use std::fmt;
use std::ops::Range;

use farside_protocol::{Failure, HASHES, LANE, ScanCursor, count_part, next_entry, next_key};

use crate::connection::SessionRegion;
use crate::{Entry, KeyEntry, Result, Session};

/// A position between two parts of the index. It stays valid if the index grows, and in another
/// session, but means nothing in another store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScanPosition(u64);

impl ScanPosition {
    /// The position of this number. Every number is one; those behind the last entry are the end.
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    /// The position as a number; 0 is the start.
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl Session {
    /// Iterates over all keys and values, in no particular order.
    ///
    /// Weakly consistent: a key that is present during the whole scan is returned exactly once,
    /// also if the index grows meanwhile, with a value that it had at some moment of the scan. A
    /// key that is inserted or deleted meanwhile is returned at most once. If the connection is
    /// lost, the scan continues on a new one.
    ///
    /// One round trip for each entry, more if its value is replaced meanwhile; and one for each
    /// subtable, more while it is split.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("one", "1")?;
    /// for entry in session.scan()? {
    ///     let entry = entry?;
    ///     println!("{}: {} bytes", entry.key.escape_ascii(), entry.value.len());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Client::session`](crate::Client::session), if the call reconnects. Of the scan's own
    /// errors, those about one entry do not end it: [`Error::Operation`](crate::Error::Operation)
    /// with `Layout`, `Contended` or `Unregistered`. All others do, among them
    /// [`Error::Disconnected`](crate::Error::Disconnected) when the server has another region now.
    pub fn scan(&mut self) -> Result<Scan<'_>> {
        Ok(Scan(Walk::new(self, &[])))
    }

    /// Iterates over the keys that begin with `prefix`, and their values. It costs as much as
    /// [`Session::scan`], because the index has no order; only the other entries are left out.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob"), ("order:1", "tea")])?;
    /// assert_eq!(session.scan_prefix("user:")?.count(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`].
    pub fn scan_prefix(&mut self, prefix: impl AsRef<[u8]>) -> Result<Scan<'_>> {
        Ok(Scan(Walk::new(self, prefix.as_ref())))
    }

    /// Iterates over the keys and values of one shard, as [`Session::scan`] over all. So a program
    /// can read the shards in parallel, with a session for each. Without a cluster shard 0 has all
    /// keys. A number that no shard has stands for the last shard.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("one", "1")?;
    /// assert_eq!(session.scan_shard(0)?.count(), 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`]. [`Error::Unavailable`](crate::Error::Unavailable) if the shard cannot
    /// be reached; it ends the scan.
    pub fn scan_shard(&mut self, shard: u16) -> Result<Scan<'_>> {
        Ok(Scan(Walk::of_shard(self, shard)))
    }

    /// Iterates over the keys and values behind a position, as [`Session::scan`] over all. So a
    /// program can iterate in pieces, and keep nothing but a number between them.
    ///
    /// A key that is present from the first piece to the last is returned exactly once.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::ScanPosition;
    ///
    /// session.put_many((0..1000_u32).map(|n| (n.to_le_bytes(), "value")))?;
    /// let (mut position, mut entries) = (Some(ScanPosition::default()), 0);
    /// while let Some(start) = position {
    ///     let mut scan = session.scan_from(start)?;
    ///     while let Some(entry) = scan.next() {
    ///         entry?;
    ///         entries += 1;
    ///         if scan.position().is_some() {
    ///             break;
    ///         }
    ///     }
    ///     position = scan.position();
    /// }
    /// assert!(entries >= 1000);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`].
    pub fn scan_from(&mut self, position: ScanPosition) -> Result<Scan<'_>> {
        Ok(Scan(Walk::of_position(self, position)))
    }

    /// Iterates over the keys that begin with `prefix`, without their values: otherwise as
    /// [`Session::scan_prefix`]. Of a block at most 256 bytes are read, or header and key if the
    /// key is longer.
    ///
    /// A hash of 64 bits proves each key. Length, version and times of the value are as its header
    /// says: if the value is damaged, a GET notices, and this does not.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("user:1", "alice"), ("user:2", "bob"), ("order:1", "tea")])?;
    /// for entry in session.scan_keys("user:")? {
    ///     let entry = entry?;
    ///     println!("{}: {} bytes", entry.key.escape_ascii(), entry.value_bytes);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`].
    pub fn scan_keys(&mut self, prefix: impl AsRef<[u8]>) -> Result<KeyScan<'_>> {
        Ok(KeyScan(Walk::new(self, prefix.as_ref())))
    }

    /// Iterates over the keys behind a position, without their values: as [`Session::scan_from`]
    /// and [`Session::scan_keys`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("one", "1")?;
    /// assert_eq!(session.scan_keys_from(farside::ScanPosition::default())?.count(), 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`].
    pub fn scan_keys_from(&mut self, position: ScanPosition) -> Result<KeyScan<'_>> {
        Ok(KeyScan(Walk::of_position(self, position)))
    }

    /// Counts all keys, by the index alone: one round trip for each subtable, more while it is
    /// split. Keys that are inserted or deleted meanwhile may count or not. A key whose value has
    /// expired counts until the server removes it, some seconds later.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_many([("one", "1"), ("two", "2")])?;
    /// assert_eq!(session.count_keys()?, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::scan`].
    pub fn count_keys(&mut self) -> Result<u64> {
        let mut walk = Walk::new(self, &[]);
        let mut keys = 0;
        while !walk.shards.is_empty() {
            let mut from = 0;
            while from < HASHES {
                let part = walk.step(|handle, _| {
                    let count = count_part(handle, LANE, from as u32);
                    handle.engine.endpoint.drive(count).map(Some)
                });
                let Some((found, end)) = part?? else { break };
                (keys, from) = (keys + found, end);
            }
            walk.next_shard();
        }
        Ok(keys)
    }
}

/// Iterates over all entries; see [`Session::scan`](crate::Session::scan).
#[derive(Debug)]
pub struct Scan<'s>(Walk<'s>);

/// Iterates over all keys; see [`Session::scan_keys`](crate::Session::scan_keys).
#[derive(Debug)]
pub struct KeyScan<'s>(Walk<'s>);

impl Scan<'_> {
    /// Returns where another scan can go on, with [`Session::scan_from`]. `None` if the scan has
    /// ended, or stands within a part of the index: then take another entry first. A part has some
    /// hundred entries at most.
    pub fn position(&self) -> Option<ScanPosition> {
        self.0.position()
    }
}

impl KeyScan<'_> {
    /// Returns where another scan can go on, as [`Scan::position`].
    pub fn position(&self) -> Option<ScanPosition> {
        self.0.position()
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Entry>;

    /// Returns the next entry. After an error about one entry the scan continues with the others.
    fn next(&mut self) -> Option<Self::Item> {
        self.0.next(
            |handle, cursor| handle.engine.endpoint.drive(next_entry(handle, LANE, cursor)),
            |entry| &entry.key,
        )
    }
}

impl Iterator for KeyScan<'_> {
    type Item = Result<KeyEntry>;

    /// Returns the next key. After an error about one key the scan continues with the others.
    fn next(&mut self) -> Option<Self::Item> {
        self.0.next(
            |handle, cursor| handle.engine.endpoint.drive(next_key(handle, LANE, cursor)),
            |entry| &entry.key,
        )
    }
}

/// What a READ of the next entry returns; `None` at the end.
type Read<T> = std::result::Result<Option<T>, Failure>;

/// How far a scan has come.
struct Walk<'s> {
    session: &'s mut Session,
    /// The shards that were not read completely. The first one is being read.
    shards: Range<usize>,
    /// The region of the shard, once it was read.
    region_id: Option<[u8; 16]>,
    cursor: ScanCursor,
    /// Only keys that begin with these bytes are returned.
    prefix: Vec<u8>,
    has_ended: bool,
}

impl fmt::Debug for Walk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Walk").field("has_ended", &self.has_ended).finish_non_exhaustive()
    }
}

impl<'s> Walk<'s> {
    /// A scan of all shards.
    pub(crate) fn new(session: &'s mut Session, prefix: &[u8]) -> Self {
        let (shards, cursor, prefix) =
            (0..session.shards(), ScanCursor::default(), prefix.to_vec());
        Self { session, shards, region_id: None, cursor, prefix, has_ended: false }
    }

    /// A scan of one shard, or of the last one if there is none with this number.
    pub(crate) fn of_shard(session: &'s mut Session, shard: u16) -> Self {
        let shard = usize::from(shard).min(session.shards() - 1);
        Self { shards: shard..shard + 1, ..Self::new(session, &[]) }
    }

    /// A scan from a position on.
    pub(crate) fn of_position(
        session: &'s mut Session,
        ScanPosition(position): ScanPosition,
    ) -> Self {
        let (shard, from) = ((position / HASHES) as usize, (position % HASHES) as u32);
        let shards = shard.min(session.shards())..session.shards();
        let has_ended = shards.is_empty();
        Self { shards, cursor: ScanCursor::starting_at(from), has_ended, ..Self::new(session, &[]) }
    }

    fn position(&self) -> Option<ScanPosition> {
        let completed_to = self.cursor.completed_to()?;
        let position = self.shards.start as u64 * HASHES + completed_to;
        let is_end = position == self.shards.end as u64 * HASHES;
        (!self.has_ended && !is_end).then_some(ScanPosition(position))
    }

    /// Reads the next entry of the shard. The inner error concerns that entry only, and the scan
    /// continues. The outer error is the connection's, and ends the scan.
    fn step<T>(
        &mut self,
        read: impl Fn(SessionRegion<'_>, &mut ScanCursor) -> Read<T>,
    ) -> Result<Result<Option<T>>> {
        let Self { session, shards, region_id, cursor, .. } = self;
        let step = session.run_on_shard(shards.start, |handle| {
            // The cursor's positions mean nothing in another region.
            let found_id = handle.region.format.region_id;
            if *region_id.get_or_insert(found_id) != found_id {
                return Ok(None);
            }
            match read(handle, cursor) {
                Ok(entry) => Ok(Some(Ok(entry))),
                Err(Failure::Error(error)) => Ok(Some(Err((*error).into()))),
                Err(failure) => {
                    cursor.restart_part();
                    Err(failure)
                }
            }
        })?;
        step.ok_or_else(|| session.shared.disconnected(shards.start))
    }

    /// Goes on to the next shard. Returns false if there is none.
    fn next_shard(&mut self) -> bool {
        (self.region_id, self.cursor) = (None, ScanCursor::default());
        self.shards.next();
        !self.shards.is_empty()
    }

    /// Returns the next entry that `read` finds and whose key begins with the prefix.
    fn next<T>(
        &mut self,
        read: impl Fn(SessionRegion<'_>, &mut ScanCursor) -> Read<T>,
        key_of: impl Fn(&T) -> &[u8],
    ) -> Option<Result<T>> {
        while !self.has_ended {
            let step = self.step(&read);
            self.has_ended = match step {
                Err(_) => true,
                Ok(Ok(None)) => !self.next_shard(),
                _ => false,
            };
            match step.flatten().transpose() {
                Some(Ok(entry)) if !key_of(&entry).starts_with(&self.prefix) => {}
                None => {}
                step => return step,
            }
        }
        None
    }
}
