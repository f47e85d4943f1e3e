//! The C libraries, and what their return values mean: they have four conventions, and mixing two
//! up turns an error into a success. The only place that names `rdma_sys`.

use std::ffi::{CStr, c_int};
use std::io;
use std::ptr::NonNull;

use crate::rdma::VerbsError;

pub(super) use rdma_sys::*;

/// `ibv_*` that change something: 0, or a positive errno.
pub(super) fn ibv(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some providers negate it.
        errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
    }
}

/// `ibv_poll_cq`: how many completions, or a negative number that is no errno.
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

/// Attaches what was being done to a system error.
pub(super) fn system(doing: &'static str) -> impl FnOnce(io::Error) -> VerbsError {
    move |source| VerbsError::System { doing, source }
}

/// The name of a device.
pub(super) fn device_name(device: *mut ibv_device) -> String {
    // SAFETY: the device is of an open context, or of a list not yet freed.
    let name = unsafe { ibv_get_device_name(device) };
    if name.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: a C string that lives as long as the device.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// A zeroed C structure, for those that are made to be filled in field by field.
///
/// # Safety
/// Zero must be a valid value for every field: true for numbers, raw pointers and optional
/// functions.
pub(super) unsafe fn zeroed<T>() -> T {
    // SAFETY: by this function's own contract.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_errno(errno: rustix::io::Errno) {
        // A system call that fails with it.
        let failed = match errno {
            rustix::io::Errno::NOENT => std::fs::metadata("/nonexistent").map(|_| ()),
            _ => std::fs::read_dir("/dev/null").map(|_| ()),
        };
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(errno.raw_os_error()));
    }

    #[test]
    fn each_convention_becomes_a_result() {
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
        let mut there = 0u8;
        assert!(constructed(&raw mut there).is_ok());
    }
}
