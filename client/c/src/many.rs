//! Operations on several keys, which share doorbells.

use std::ffi::c_void;

use client::{Error, OperationError, Session};

use crate::error::Failure;
use crate::farside_status::{self, FARSIDE_ABSENT, FARSIDE_OK};
use crate::memory::{bytes, bytes_mut, store};
use crate::operations::read;
use crate::session::{farside_session, on_session};

/// A key, and memory for its value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farside_get_entry {
    /// The key.
    pub key: *const c_void,
    /// The length of the key, in bytes.
    pub key_bytes: usize,
    /// The memory for the value.
    pub buffer: *mut c_void,
    /// The length of the memory, in bytes.
    pub buffer_bytes: usize,
    /// The length of the value, in bytes. Set by the call.
    pub value_bytes: usize,
    /// The version of the value. Set by the call.
    pub version: u64,
    /// FARSIDE_OK, FARSIDE_ABSENT or FARSIDE_TOO_SHORT. Set by the call.
    pub status: i32,
}

/// A key and its value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farside_put_entry {
    /// The key.
    pub key: *const c_void,
    /// The length of the key, in bytes.
    pub key_bytes: usize,
    /// The value.
    pub value: *const c_void,
    /// The length of the value, in bytes.
    pub value_bytes: usize,
}

/// A key.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farside_key {
    /// The key.
    pub key: *const c_void,
    /// The length of the key, in bytes.
    pub key_bytes: usize,
}

/// The entries of an argument.
///
/// # Safety
/// Unless NULL, the pointer leads to so many entries that do not change during the call.
unsafe fn slice<'a, T>(entries: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if entries.is_null() || count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::argument("entries is NULL, and count is not 0"));
    }
    // SAFETY: by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(entries, count) })
}

impl farside_get_entry {
    /// The key, and the memory for the value.
    ///
    /// # Safety
    /// The pointers are valid, and only this call uses the memory for the value.
    unsafe fn parts<'a>(&self) -> Result<(&'a [u8], &'a mut [u8]), Failure> {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(self.key, self.key_bytes) }?;
        // SAFETY: likewise.
        Ok((key, unsafe { bytes_mut(self.buffer, self.buffer_bytes) }?))
    }

    fn set(&mut self, status: farside_status, value_bytes: usize, version: u64) {
        (self.status, self.value_bytes, self.version) = (status as i32, value_bytes, version);
    }
}

/// Copies the values of several keys to the memory of their entries, and sets `value_bytes`,
/// `version` and `status` of each entry. The rest of the memory is undefined, and all of it after
/// FARSIDE_ABSENT, FARSIDE_TOO_SHORT or an error. After an error the entries are undefined, too.
///
/// The READs share doorbells: one round trip for up to as many keys as the pipeline is deep, if
/// their locations are cached; two if not.
///
/// # Safety
/// The arguments are valid, and no two buffers overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_get_many(
    session: *mut farside_session,
    entries: *mut farside_get_entry,
    count: usize,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise. It ends before an entry changes.
        let given = unsafe { slice(entries, count) }?;
        // SAFETY: likewise.
        let pairs = given.iter().map(|entry| unsafe { entry.parts() });
        let pairs = pairs.collect::<Result<Vec<_>, Failure>>()?;
        let found = match session.get_many_into(pairs) {
            Ok(read) => read
                .into_iter()
                .map(|read| match read {
                    Some(read) => (FARSIDE_OK, read.bytes, read.version.to_u64()),
                    None => (FARSIDE_ABSENT, 0, 0),
                })
                .collect(),
            Err(Error::Operation(OperationError::TargetTooShort { .. })) => {
                let mut found = Vec::with_capacity(count);
                for entry in given {
                    // SAFETY: likewise. The call before has ended.
                    let (key, buffer) = unsafe { entry.parts() }?;
                    found.push(read(session, key, buffer)?);
                }
                found
            }
            Err(error) => return Err(error.into()),
        };
        for (n, (status, value_bytes, version)) in found.into_iter().enumerate() {
            // SAFETY: there are so many entries.
            let entry = unsafe { entries.add(n) };
            // SAFETY: likewise; nothing else refers to it any more.
            unsafe { &mut *entry }.set(status, value_bytes, version);
        }
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Stores several values, which share doorbells. Each store is atomic; the call as a whole is not.
/// After an error, any of the stores may have taken effect.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_put_many(
    session: *mut farside_session,
    entries: *const farside_put_entry,
    count: usize,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let entries = unsafe { slice(entries, count) }?;
        let pairs = entries.iter().map(|entry| {
            // SAFETY: likewise.
            let key = unsafe { bytes(entry.key, entry.key_bytes) }?;
            // SAFETY: likewise.
            Ok((key, unsafe { bytes(entry.value, entry.value_bytes) }?))
        });
        session.put_many(pairs.collect::<Result<Vec<_>, Failure>>()?)?;
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Removes several keys, with operations that share doorbells. Stores how many keys were present,
/// unless that is NULL. After an error, any of the keys may have been removed.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_delete_many(
    session: *mut farside_session,
    entries: *const farside_key,
    count: usize,
    deleted: *mut u64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let entries = unsafe { slice(entries, count) }?;
        // SAFETY: likewise.
        let keys = entries.iter().map(|entry| unsafe { bytes(entry.key, entry.key_bytes) });
        let present = session.delete_many(keys.collect::<Result<Vec<_>, Failure>>()?)?;
        // SAFETY: likewise.
        unsafe { store(deleted, present) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}
