//! The C libraries, and the meaning of their return values. These follow four conventions. To
//! confuse two of them turns an error into a success. Only this file names `rdma_sys`.

use std::ffi::{CStr, c_int};
use std::io;
use std::ptr::NonNull;

use crate::rdma::VerbsError;

pub(super) use rdma_sys::*;

/// Most of `ibv_*`: 0, or a positive errno.
pub(super) fn ibv(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some providers return the negative errno.
        errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
    }
}

/// `ibv_poll_cq`: the number of completions, or a negative number that is no errno.
#[inline]
pub(super) fn polled(count: c_int) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::other("the completion queue cannot be polled"))
}

/// Constructors: a pointer, or null and errno.
pub(super) fn constructed<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// `rdma_*`, and `ibv_get_cq_event`: 0, or -1 and errno.
pub(super) fn cm(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes an error of a system error and the action that failed.
pub(super) fn system<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> VerbsError {
    move |source| VerbsError::System { doing, source: source.into() }
}

/// The name of a device.
pub(super) fn device_name(device: *mut ibv_device) -> String {
    // SAFETY: the device is of an open context, or of a list not yet freed.
    let name = unsafe { ibv_get_device_name(device) };
    if name.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the name is a C string that lives as long as the device.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// A zeroed C structure, of which the caller sets some fields.
///
/// # Safety
/// Zero must be a valid value of every field. It is for numbers, raw pointers and optional
/// functions.
pub(super) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller guarantees that zero is valid, by this function's contract.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_errno(errno: rustix::io::Errno) {
        // A system call that fails with this error.
        let failed = match errno {
            rustix::io::Errno::NOENT => std::fs::metadata("/nonexistent").map(|_| ()),
            _ => std::fs::read_dir("/dev/null").map(|_| ()),
        };
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(errno.raw_os_error()));
    }

    #[test]
    fn each_return_convention_becomes_a_result() {
        assert!(ibv(0).is_ok());
        assert_eq!(ibv(12).unwrap_err().raw_os_error(), Some(12));
        assert_eq!(ibv(-12).unwrap_err().raw_os_error(), Some(12));
        assert_eq!(polled(0).unwrap(), 0);
        assert_eq!(polled(7).unwrap(), 7);
        assert!(polled(-1).is_err());
        assert!(cm(0).is_ok());
        set_errno(rustix::io::Errno::NOENT);
        assert_eq!(cm(-1).unwrap_err().kind(), io::ErrorKind::NotFound);
        set_errno(rustix::io::Errno::NOTDIR);
        let null = constructed::<u8>(std::ptr::null_mut());
        assert_eq!(null.unwrap_err().raw_os_error(), Some(20));
        let mut object = 0u8;
        assert!(constructed(&raw mut object).is_ok());
    }
}
