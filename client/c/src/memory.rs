//! Arguments that are pointers.

use std::ffi::{CStr, c_char, c_void};

use crate::error::Failure;

/// The bytes of a key or value. Without any bytes the pointer may be NULL.
///
/// # Safety
/// Unless NULL, the pointer leads to so many bytes, which do not change during the call.
pub(crate) unsafe fn bytes<'a>(start: *const c_void, count: usize) -> Result<&'a [u8], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if start.is_null() || count > isize::MAX as usize {
        return Err(Failure::argument("a key or value is NULL, and its length is not 0"));
    }
    // SAFETY: by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), count) })
}

/// Memory for a value. Without any bytes the pointer may be NULL.
///
/// # Safety
/// Unless NULL, the pointer leads to so many bytes, which only this call uses.
pub(crate) unsafe fn bytes_mut<'a>(
    start: *mut c_void,
    count: usize,
) -> Result<&'a mut [u8], Failure> {
    if count == 0 {
        return Ok(&mut []);
    }
    if start.is_null() || count > isize::MAX as usize {
        return Err(Failure::argument("the buffer is NULL, and its length is not 0"));
    }
    // SAFETY: by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.cast(), count) })
}

/// A text that ends in a zero.
///
/// # Safety
/// Unless NULL, the pointer leads to a text that ends in a zero.
pub(crate) unsafe fn text<'a>(start: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if start.is_null() {
        return Err(Failure::argument(&format!("{what} is NULL")));
    }
    // SAFETY: by the caller's promise.
    let text = unsafe { CStr::from_ptr(start) };
    text.to_str().map_err(|_| Failure::argument(&format!("{what} is not UTF-8")))
}

/// What an argument leads to.
///
/// # Safety
/// Unless NULL, the pointer leads to a valid object that only this call uses.
pub(crate) unsafe fn object<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { pointer.as_mut() }.ok_or_else(|| Failure::argument(&format!("{what} is NULL")))
}

/// Sets a result that the caller must want.
///
/// # Safety
/// Unless NULL, the pointer leads to memory for it.
pub(crate) unsafe fn set<T>(target: *mut T, what: &str, value: T) -> Result<(), Failure> {
    if target.is_null() {
        return Err(Failure::argument(&format!("{what} is NULL")));
    }
    // SAFETY: by the caller's promise.
    unsafe { target.write(value) };
    Ok(())
}

/// As [`object`], for an object that other threads may use at the same time.
///
/// # Safety
/// Unless NULL, the pointer leads to a valid object.
pub(crate) unsafe fn shared<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(&format!("{what} is NULL")))
}

/// Stores a result, unless the caller passed NULL because it does not want it.
///
/// # Safety
/// Unless NULL, the pointer leads to memory for it.
pub(crate) unsafe fn store<T>(target: *mut T, value: T) {
    if !target.is_null() {
        // SAFETY: by the caller's promise.
        unsafe { target.write(value) };
    }
}
