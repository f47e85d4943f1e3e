//! Memory that RDMA devices access directly.

use std::ffi::c_void;

use client::RegisteredBuffer;

use crate::connect::farside_client;
use crate::error::{Failure, run_alone};
use crate::farside_status::{self, FARSIDE_ERROR_SYSTEM, FARSIDE_OK};
use crate::fork::Process;
use crate::memory::{set, shared};

/// Memory that an RDMA device accesses directly, so that long values are not copied. Any part of it
/// can be the buffer of a get or the value of a put. Threads may use different parts at once.
pub struct farside_buffer {
    buffer: RegisteredBuffer,
    start: *mut c_void,
    process: Process,
}

/// Makes a buffer of `bytes` zero bytes. Free it with farside_buffer_free(). The text of an error
/// is farside_error().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_buffer_new(
    client: *const farside_client,
    bytes: usize,
    buffer: *mut *mut farside_buffer,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        unsafe { set(buffer, "buffer", std::ptr::null_mut()) }?;
        // SAFETY: likewise.
        let client = unsafe { shared(client, "client") }?;
        client.process.check()?;
        let mut made = client.client.buffer(bytes).map_err(|error| Failure {
            status: FARSIDE_ERROR_SYSTEM,
            text: format!("the system has no memory for a buffer of {bytes} bytes: {error}"),
        })?;
        let start = made.as_mut_ptr().cast();
        let made = farside_buffer { buffer: made, start, process: Process::this() };
        // SAFETY: likewise.
        unsafe { set(buffer, "buffer", Box::into_raw(Box::new(made))) }?;
        Ok(FARSIDE_OK)
    })
}

/// Returns the first byte of a buffer. NULL for NULL, and in a child of fork(), which does not have
/// the memory.
///
/// # Safety
/// `buffer` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_buffer_data(buffer: *const farside_buffer) -> *mut c_void {
    // SAFETY: by the caller's promise.
    let buffer = unsafe { buffer.as_ref() }.filter(|buffer| buffer.process.is_this());
    buffer.map_or(std::ptr::null_mut(), |buffer| buffer.start)
}

/// Returns the length of a buffer in bytes; 0 where farside_buffer_data() is NULL.
///
/// # Safety
/// `buffer` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_buffer_bytes(buffer: *const farside_buffer) -> usize {
    // SAFETY: by the caller's promise.
    let buffer = unsafe { buffer.as_ref() }.filter(|buffer| buffer.process.is_this());
    buffer.map_or(0, |buffer| buffer.buffer.len())
}

/// Frees a buffer. NULL is allowed.
///
/// # Safety
/// `buffer` is from farside_buffer_new(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_buffer_free(buffer: *mut farside_buffer) {
    if buffer.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let buffer = unsafe { Box::from_raw(buffer) };
    run_alone(|| {
        let process = buffer.process;
        process.drop(*buffer);
        Ok(FARSIDE_OK)
    });
}
