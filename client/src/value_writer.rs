//! Values that are stored part by part, and read part by part.

use std::io;
use std::time::Duration;

use farside_fabric::Fabric;
use farside_layout::hash::KeyHash;
use farside_protocol::{Action, ExtentWriter, Failure, Lifetime, OperationKind};

use crate::connection::SessionRegion;
use crate::{Error, ReadRange, Result, Session};

/// How many extents are written together.
const EXTENTS_TOGETHER: usize = 8;

impl Session {
    /// Reads bytes of a value from `start` on, as many as `target` has room for, or fewer if the
    /// value ends before. `None` if the key is absent. READs only the extents concerned; a value of
    /// up to 4 MiB has none, and is READ as a whole.
    ///
    /// Two round trips if the key's location is cached, one less if the session knows the value's
    /// extents, one more if the location is not cached. One more for an extent at each end of which
    /// only a part is asked for.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello, world")?;
    /// let mut word = [0; 5];
    /// let read = session.get_range("greeting", 7, &mut word)?.expect("it was just put");
    /// assert_eq!((&word, read.bytes, read.value_bytes), (b"world", 5, 12));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn get_range(
        &mut self,
        key: impl AsRef<[u8]>,
        start: usize,
        target: &mut [u8],
    ) -> Result<Option<ReadRange>> {
        self.run(OperationKind::GetRange, key.as_ref(), |handle, key| {
            handle.get_range(key, start, target)
        })
    }

    /// Begins to store a value part by part. No other client sees it before
    /// [`ValueWriter::finish`]. Needs memory for some MiB, however long the value is.
    ///
    /// One round trip for each 8 MiB, and then those of [`Session::put`]. A value of up to 4 MiB
    /// takes those of [`Session::put`] only.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::io::Write;
    ///
    /// let mut writer = session.writer("report");
    /// writer.add(b"first part, ")?;
    /// write!(writer, "part {}", 2)?; // or as any `std::io::Write`
    /// writer.finish()?;
    /// assert_eq!(session.get("report")?.expect("it was just put"), "first part, part 2");
    /// # Ok(()) }
    /// ```
    pub fn writer(&mut self, key: impl AsRef<[u8]>) -> ValueWriter<'_> {
        ValueWriter {
            session: self,
            key: key.as_ref().to_vec(),
            lifetime: Lifetime::FOREVER,
            pending: Vec::new(),
            begun: None,
            part_bytes: 0,
            failed: None,
        }
    }
}

/// A value that is being stored part by part: [`Session::writer`]. Without
/// [`ValueWriter::finish`] nothing is stored.
///
/// If the connection is lost, what was added is lost with it
/// ([`Error::Disconnected`]): begin again.
#[must_use = "without `finish` nothing is stored"]
pub struct ValueWriter<'s> {
    session: &'s mut Session,
    key: Vec<u8>,
    lifetime: Lifetime,
    /// The end of the value so far, which is not written yet.
    pending: Vec<u8>,
    /// The extents that are written, if there are any.
    begun: Option<ExtentWriter>,
    /// The length of the part that an extent has, in bytes; set when the first one is begun.
    part_bytes: usize,
    /// The first error.
    failed: Option<Error>,
}

impl std::fmt::Debug for ValueWriter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.bytes();
        f.debug_struct("ValueWriter").field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl ValueWriter<'_> {
    /// The value will expire after `ttl`, as [`Store::ttl`](crate::Store::ttl) describes. To be
    /// called before the first part.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lifetime = self.lifetime.expiring_as(Lifetime::lasting(ttl));
        self
    }

    /// The value will be [pinned](crate::Store::pinned). To be called before the first part.
    pub fn pinned(mut self) -> Self {
        self.lifetime = self.lifetime.pinned(true);
        self
    }

    /// The length of the value so far, in bytes.
    pub fn bytes(&self) -> usize {
        self.begun.as_ref().map_or(0, ExtentWriter::value_bytes) + self.pending.len()
    }

    /// Stores the value, whether or not the key is present.
    ///
    /// # Errors
    /// As [`Session::put`], and that of the first part that failed.
    pub fn finish(mut self) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.begun.is_none() {
            let action = Action::Put(self.lifetime);
            return self.session.change(action, &self.key, &self.pending).map(drop);
        }
        if !self.pending.is_empty() {
            let last = std::mem::take(&mut self.pending);
            self.write(&last)?;
        }
        let Some(writer) = self.begun.take() else { return Ok(()) };
        let lifetime = self.lifetime;
        self.step(|handle, key| {
            let since = handle.engine.endpoint.fabric().now();
            let linked = handle.link_value(&writer, key, lifetime)?;
            if let Some(metrics) = handle.metrics() {
                let latency = handle.engine.endpoint.fabric().now().saturating_sub(since);
                metrics.add(OperationKind::Put, true, latency);
            }
            Ok(linked)
        })
        .map(drop)
    }

    /// Adds the next part.
    ///
    /// # Errors
    /// As [`Session::put`]. Then nothing is stored, and all further calls return this error.
    pub fn add(&mut self, mut part: &[u8]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.begun.is_none() {
            let shard = self.shard();
            let handle = self.session.handle(shard)?;
            if handle.is_short(&self.key, self.pending.len() + part.len()) {
                self.pending.extend_from_slice(part);
                return Ok(());
            }
            self.part_bytes = handle.part_bytes(&self.key);
            self.session.check_role(OperationKind::Put)?;
            self.begun = Some(self.step(|handle, key| handle.begin_value(key))?);
        }
        let part_bytes = self.part_bytes;
        let together = EXTENTS_TOGETHER * part_bytes;
        while self.pending.len() + part.len() >= together {
            if self.pending.is_empty() {
                let (whole, rest) = part.split_at(part.len() / part_bytes * part_bytes);
                self.write(whole)?;
                part = rest;
            } else {
                let (next, rest) = part.split_at(together - self.pending.len());
                self.pending.extend_from_slice(next);
                let mut full = std::mem::take(&mut self.pending);
                self.write(&full)?;
                full.clear();
                (self.pending, part) = (full, rest);
            }
        }
        self.pending.extend_from_slice(part);
        Ok(())
    }

    /// Writes whole extents, or the end of the value.
    fn write(&mut self, part: &[u8]) -> Result<()> {
        let Some(mut writer) = self.begun.take() else { return Ok(()) };
        let lifetime = self.lifetime;
        self.step(|handle, key| handle.write_value(&mut writer, key, part, lifetime))?;
        self.begun = Some(writer);
        Ok(())
    }

    fn shard(&self) -> usize {
        self.session.regions.route(&self.key).1
    }

    /// Runs a step on the connection on which the value was begun.
    fn step<T>(
        &mut self,
        step: impl FnOnce(SessionRegion<'_>, (KeyHash, &[u8])) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let (hash, shard) = self.session.regions.route(&self.key);
        let (regions, shared) = (&self.session.regions, &self.session.shared);
        let done = match regions.live(shard) {
            Some(open) => step(regions.at(open), (hash, &self.key)).map_err(|failure| {
                let error = shared.handle_failure(shard, &open.connection, failure);
                error.unwrap_or_else(|| shared.disconnected(shard))
            }),
            None => Err(shared.disconnected(shard)),
        };
        done.inspect_err(|error| {
            self.session.count_error(OperationKind::Put, error);
            self.failed = Some(error.clone());
        })
    }
}

impl io::Write for ValueWriter<'_> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.add(part).map_err(io::Error::other)?;
        Ok(part.len())
    }

    /// Does nothing: the end of the value is written by [`ValueWriter::finish`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ValueWriter<'_> {
    fn drop(&mut self) {
        self.session.regions.count_traffic();
        let shard = self.shard();
        if self.begun.is_some()
            && let Some(open) = self.session.regions.live(shard)
        {
            self.session.regions.at(open).give_up_value();
        }
    }
}
