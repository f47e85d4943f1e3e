//! Memory of the caller for values that are read.

use farside_protocol::{LONG_VALUE_BYTES, OperationKind, Version};

use crate::{ReadValue, RegisteredBuffer, Result, Session};

impl Session {
    /// As [`Session::get`], into the caller's memory. Allocates nothing, except for a vector that
    /// is too short. A vector is empty afterwards if the key is absent. If the key is absent or the
    /// call fails, the content of a slice is undefined. So is what follows the value in a slice.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// let mut buffer = Vec::new(); // for many calls
    /// assert!(session.get_into("greeting", &mut buffer)?.is_some());
    /// assert_eq!(buffer, b"hello");
    /// let mut page = [0; 4096];
    /// let read = session.get_into("greeting", &mut page)?.expect("it was just put");
    /// assert_eq!(page[..read.bytes], *b"hello");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`]; and `TargetTooShort` with the value's length, if a slice is too short
    /// for it.
    #[inline]
    pub fn get_into<T: Target + ?Sized>(
        &mut self,
        key: impl AsRef<[u8]>,
        target: &mut T,
    ) -> Result<Option<ReadValue>> {
        target.read(self, key.as_ref())
    }

    /// Appends a value to `value` if a READ of the cached location, of less than `long_bytes`,
    /// answers it.
    #[inline]
    pub(crate) fn get_cached(
        &self,
        key: &[u8],
        long_bytes: u32,
        value: &mut Vec<u8>,
    ) -> Option<Version> {
        let (hash, shard) = self.regions.route(key);
        let region = self.regions.at(self.regions.latest(shard)?);
        let found = region.get_cached((hash, key), long_bytes)?;
        self.copy(&found, value);
        Some(found.version)
    }

    /// As [`Session::get_into`] a vector, but only if it takes about a microsecond and never waits:
    /// on shared memory, of a short value whose location is cached. Otherwise returns `None`, which
    /// does not tell whether the key is present, and leaves the vector empty. Without a cached
    /// location this posts nothing. If the cached one is out of date it costs one READ, which the
    /// GET that follows does not save.
    ///
    /// For callers that prepare a wait, such as bindings that release a lock of their language.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("greeting", "hello")?;
    /// let mut buffer = Vec::new();
    /// if session.get_without_waiting("greeting", &mut buffer).is_none() {
    ///     session.get_into("greeting", &mut buffer)?;
    /// }
    /// assert_eq!(buffer, b"hello");
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn get_without_waiting(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &mut Vec<u8>,
    ) -> Option<ReadValue> {
        value.clear();
        if self.regions.engine.pipelined.get() || !self.executes_at_once() {
            return None;
        }
        let version = self.get_cached(key.as_ref(), LONG_VALUE_BYTES as u32, value)?;
        Some(ReadValue::new(value.len(), version))
    }

    /// [`Session::get_into`] memory of a fixed length.
    fn get_fixed(&mut self, key: &[u8], mut value: &mut [u8]) -> Result<Option<ReadValue>> {
        self.run(OperationKind::Get, key, |handle, key| handle.get_into(key, &mut value))
    }
}

/// Memory for the value that [`Session::get_into`] reads.
///
/// - A `Vec<u8>` becomes as long as the value.
/// - A slice, an array or a [`RegisteredBuffer`] has the value at its start. What follows is
///   undefined. Over RDMA the device copies a long value directly to a registered buffer, or to a
///   part of one.
pub trait Target: sealed::Sealed {}

impl Target for Vec<u8> {}
impl Target for [u8] {}
impl Target for RegisteredBuffer {}
impl<const BYTES: usize> Target for [u8; BYTES] {}

mod sealed {
    use super::{ReadValue, Result, Session};

    pub trait Sealed {
        /// Reads the value of a key into this memory.
        fn read(&mut self, session: &mut Session, key: &[u8]) -> Result<Option<ReadValue>>;
    }
}

impl sealed::Sealed for Vec<u8> {
    #[inline]
    fn read(&mut self, session: &mut Session, key: &[u8]) -> Result<Option<ReadValue>> {
        session.get_bytes(key, self)
    }
}

impl sealed::Sealed for [u8] {
    fn read(&mut self, session: &mut Session, key: &[u8]) -> Result<Option<ReadValue>> {
        session.get_fixed(key, self)
    }
}

impl sealed::Sealed for RegisteredBuffer {
    fn read(&mut self, session: &mut Session, key: &[u8]) -> Result<Option<ReadValue>> {
        session.get_fixed(key, self)
    }
}

impl<const BYTES: usize> sealed::Sealed for [u8; BYTES] {
    fn read(&mut self, session: &mut Session, key: &[u8]) -> Result<Option<ReadValue>> {
        session.get_fixed(key, self)
    }
}
