//! Operations on one key.

use std::ffi::c_void;
use std::time::Duration;

use client::{Error, OperationError, Session, Store, Ttl, Version};

use crate::error::Failure;
use crate::farside_status::{
    self, FARSIDE_ABSENT, FARSIDE_NOT_APPLIED, FARSIDE_OK, FARSIDE_TOO_SHORT,
};
use crate::memory::{bytes, bytes_mut, store};
use crate::session::{farside_session, on_session};

/// When farside_store() stores a value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum farside_condition {
    /// Always.
    FARSIDE_ALWAYS = 0,
    /// Only if the key is absent.
    FARSIDE_IF_ABSENT = 1,
    /// Only if the key is present.
    FARSIDE_IF_PRESENT = 2,
    /// Only if the key's value is `expected`.
    FARSIDE_IF_VALUE = 3,
    /// Only if the key's version is `version`.
    FARSIDE_IF_VERSION = 4,
}

/// How farside_store() stores a value. All zeros stand for a put. Set all of it to zero first:
/// later versions may give `reserved` a meaning.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farside_store_options {
    /// A farside_condition.
    pub condition: u32,
    /// If not 0, the value is never evicted.
    pub pinned: u32,
    /// The TTL in milliseconds. FARSIDE_FOREVER: the value does not expire. FARSIDE_KEEP_TTL: it
    /// expires when the present value does.
    pub ttl_ms: u64,
    /// For FARSIDE_IF_VERSION: the version that the key must have.
    pub version: u64,
    /// For FARSIDE_IF_VALUE: the value that the key must have.
    pub expected: *const c_void,
    /// The length of `expected`, in bytes.
    pub expected_bytes: usize,
    /// Zeros.
    pub reserved: [u64; 2],
}

impl farside_store_options {
    const PUT: Self = Self {
        condition: 0,
        pinned: 0,
        ttl_ms: 0,
        version: 0,
        expected: std::ptr::null(),
        expected_bytes: 0,
        reserved: [0; 2],
    };
}

/// A TTL: the value does not expire.
pub const FARSIDE_FOREVER: u64 = 0;

/// A TTL of farside_store_options: the value expires when the present one does.
pub const FARSIDE_KEEP_TTL: u64 = u64::MAX;

/// Reads a value. Returns the status, the value's length and its version.
pub(crate) fn read(
    session: &mut Session,
    key: &[u8],
    buffer: &mut [u8],
) -> client::Result<(farside_status, usize, u64)> {
    match session.get_into(key, buffer) {
        Ok(Some(read)) => Ok((FARSIDE_OK, read.bytes, read.version.to_u64())),
        Ok(None) => Ok((FARSIDE_ABSENT, 0, 0)),
        Err(Error::Operation(OperationError::TargetTooShort { needed, .. })) => {
            Ok((FARSIDE_TOO_SHORT, needed, 0))
        }
        Err(error) => Err(error),
    }
}

/// Copies the value of a key to a buffer, which may be NULL if it has no bytes. Stores the value's
/// length and version, unless these are NULL; both are 0 with FARSIDE_ABSENT. FARSIDE_TOO_SHORT
/// with the length if the buffer is too short. The rest of the buffer is undefined, and all of it
/// after any other result than FARSIDE_OK.
///
/// One READ and one round trip if the key's location is cached; two of each if not.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_get(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    buffer: *mut c_void,
    buffer_bytes: usize,
    value_bytes: *mut usize,
    version: *mut u64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(key, key_bytes) }?;
        // SAFETY: likewise.
        let buffer = unsafe { bytes_mut(buffer, buffer_bytes) }?;
        let (status, length, number) = read(session, key, buffer)?;
        // SAFETY: likewise.
        unsafe { store(value_bytes, length) };
        // SAFETY: likewise.
        unsafe { store(version, number) };
        Ok(status)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Stores a value, whether or not the key is present.
///
/// One round trip if the key's location is cached, two if not, three if the key is absent.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_put(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    value: *const c_void,
    value_bytes: usize,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(key, key_bytes) }?;
        // SAFETY: likewise.
        session.put(key, unsafe { bytes(value, value_bytes) }?)?;
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// How to store a value: the options, and the expected value.
#[derive(Clone, Copy)]
pub(crate) struct How<'e> {
    options: farside_store_options,
    pub(crate) expected: &'e [u8],
}

impl<'e> How<'e> {
    /// Reads the options of a store; NULL stands for a put.
    ///
    /// # Safety
    /// The pointers are valid.
    pub(crate) unsafe fn read(options: *const farside_store_options) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        let Some(options) = (unsafe { options.as_ref() }) else {
            return Ok(Self { options: farside_store_options::PUT, expected: &[] });
        };
        if options.reserved != [0; 2] {
            return Err(Failure::argument(
                "reserved is not zero: set all of the options to zero first",
            ));
        }
        let expected = match options.condition {
            3 => (options.expected, options.expected_bytes),
            0..5 => (std::ptr::null(), 0),
            _ => return Err(Failure::argument("condition is none of farside_condition")),
        };
        // SAFETY: likewise.
        Ok(Self { options: *options, expected: unsafe { bytes(expected.0, expected.1) }? })
    }

    /// With an expected value that is kept elsewhere.
    pub(crate) fn with(self, expected: &[u8]) -> How<'_> {
        How { options: self.options, expected }
    }

    pub(crate) fn store(self) -> Store<'e> {
        let farside_store_options { condition, pinned, ttl_ms, version, .. } = self.options;
        let store = match condition {
            0 => Store::always(),
            1 => Store::if_absent(),
            2 => Store::if_present(),
            3 => Store::if_value(self.expected),
            _ => Store::if_version(Version::from_u64(version)),
        };
        let store = if pinned == 0 { store } else { store.pinned() };
        match ttl_ms {
            FARSIDE_FOREVER => store,
            FARSIDE_KEEP_TTL => store.keep_ttl(),
            ttl_ms => store.ttl(Duration::from_millis(ttl_ms)),
        }
    }
}

/// Stores a value with a condition, a TTL, or both. Without options (NULL) it is a put. Stores the
/// version of the value, unless that is NULL; 0 if another client has replaced the value already.
/// FARSIDE_NOT_APPLIED if the condition did not hold.
///
/// Round trips as for farside_put(); with FARSIDE_IF_VALUE, FARSIDE_IF_VERSION and FARSIDE_KEEP_TTL
/// two if the key's location is cached, and three if not.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_store(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    value: *const c_void,
    value_bytes: usize,
    options: *const farside_store_options,
    version: *mut u64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(key, key_bytes) }?;
        // SAFETY: likewise.
        let value = unsafe { bytes(value, value_bytes) }?;
        // SAFETY: likewise.
        let outcome = session.store(key, value, unsafe { How::read(options) }?.store())?;
        if !outcome.applied {
            return Ok(FARSIDE_NOT_APPLIED);
        }
        // SAFETY: likewise.
        unsafe { store(version, outcome.version.map_or(0, Version::to_u64)) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// The time that a touch lets a value live.
pub(crate) fn ttl_of(ttl_ms: u64) -> Result<Duration, Failure> {
    match ttl_ms {
        FARSIDE_FOREVER => Err(Failure::argument("ttl_ms is 0: call farside_persist() instead")),
        FARSIDE_KEEP_TTL => {
            Err(Failure::argument("ttl_ms is FARSIDE_KEEP_TTL, which changes nothing"))
        }
        _ => Ok(Duration::from_millis(ttl_ms)),
    }
}

/// Calls a function with a key, which returns whether the key was present.
///
/// # Safety
/// The arguments are valid.
unsafe fn on_key(
    session: *mut farside_session,
    (key, key_bytes): (*const c_void, usize),
    call: impl FnOnce(&mut Session, &[u8]) -> client::Result<bool>,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let is_present = call(session, unsafe { bytes(key, key_bytes) }?)?;
        Ok(if is_present { FARSIDE_OK } else { FARSIDE_ABSENT })
    };
    // SAFETY: likewise.
    unsafe { on_session(session, call) }
}

/// Removes a key. FARSIDE_ABSENT if it was absent.
///
/// One round trip if the key's location is cached, two if not.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_delete(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { on_key(session, (key, key_bytes), |session, key| session.delete(key)) }
}

/// Returns FARSIDE_OK if the key is present, and FARSIDE_ABSENT if not. Round trips as for
/// farside_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_exists(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { on_key(session, (key, key_bytes), |session, key| session.exists(key)) }
}

/// Removes a key if it has this version. FARSIDE_ABSENT if it has another one or is absent.
///
/// Two round trips if the key's location is cached, three if not.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_delete_if_version(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    version: u64,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe {
        on_key(session, (key, key_bytes), |session, key| {
            session.delete_if_version(key, Version::from_u64(version))
        })
    }
}

/// Makes the value of a key expire after `ttl_ms` milliseconds, at least 1. FARSIDE_ABSENT if the
/// key is absent.
///
/// Two round trips if the key's location is cached, three if not.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_touch(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    ttl_ms: u64,
) -> farside_status {
    let touch = |session: &mut Session| {
        let ttl = ttl_of(ttl_ms)?;
        // SAFETY: by the caller's promise.
        let is_present = session.touch(unsafe { bytes(key, key_bytes) }?, ttl)?;
        Ok(if is_present { FARSIDE_OK } else { FARSIDE_ABSENT })
    };
    // SAFETY: likewise.
    unsafe { on_session(session, touch) }
}

/// Makes the value of a key stay forever. FARSIDE_ABSENT if the key is absent. Round trips as for
/// farside_touch().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_persist(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
) -> farside_status {
    // SAFETY: by the caller's promise.
    unsafe { on_key(session, (key, key_bytes), |session, key| session.persist(key)) }
}

/// Adds `delta` to the decimal number that is the key's value. An absent key counts as 0. Stores
/// the sum, unless that is NULL. Round trips as for farside_touch().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_increment(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    delta: i64,
    sum: *mut i64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let number = session.increment(unsafe { bytes(key, key_bytes) }?, delta)?;
        // SAFETY: likewise.
        unsafe { store(sum, number) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Appends bytes to the value of a key. An absent key counts as an empty value. Stores the new
/// length, unless that is NULL. Round trips as for farside_touch().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_append(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    more: *const c_void,
    more_bytes: usize,
    value_bytes: *mut usize,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let key = unsafe { bytes(key, key_bytes) }?;
        // SAFETY: likewise.
        let length = session.append(key, unsafe { bytes(more, more_bytes) }?)?;
        // SAFETY: likewise.
        unsafe { store(value_bytes, length) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Stores in how many milliseconds the value expires, at least 1, or FARSIDE_FOREVER.
/// FARSIDE_ABSENT if the key is absent. Round trips as for farside_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_ttl_ms(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    ttl_ms: *mut u64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let left = match session.ttl(unsafe { bytes(key, key_bytes) }?)? {
            None => return Ok(FARSIDE_ABSENT),
            Some(Ttl::For(time)) => u64::try_from(time.as_millis()).unwrap_or(u64::MAX - 1).max(1),
            Some(_) => FARSIDE_FOREVER,
        };
        // SAFETY: likewise.
        unsafe { store(ttl_ms, left) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}

/// Stores the version of the key's value. FARSIDE_ABSENT if the key is absent. Round trips as for
/// farside_get().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_key_version(
    session: *mut farside_session,
    key: *const c_void,
    key_bytes: usize,
    version: *mut u64,
) -> farside_status {
    let call = |session: &mut Session| {
        // SAFETY: by the caller's promise.
        let Some(found) = session.version(unsafe { bytes(key, key_bytes) }?)? else {
            return Ok(FARSIDE_ABSENT);
        };
        // SAFETY: likewise.
        unsafe { store(version, found.to_u64()) };
        Ok(FARSIDE_OK)
    };
    // SAFETY: by the caller's promise.
    unsafe { on_session(session, call) }
}
