//! Memory of the caller for values that are read.

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

    /// [`Session::get_into`] memory of a fixed length.
    fn get_fixed(&mut self, key: &[u8], mut value: &mut [u8]) -> Result<Option<ReadValue>> {
        self.run(key, |handle, key| handle.get_into(key, &mut value))
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
