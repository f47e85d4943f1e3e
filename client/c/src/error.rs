//! Texts of errors, and the border that no panic crosses.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use client::{Error, SetupError};

use crate::farside_status::{self, FARSIDE_ERROR_ARGUMENT, FARSIDE_ERROR_INTERNAL};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// An error: its status, and its text.
pub(crate) struct Failure {
    pub(crate) status: farside_status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn argument(text: &str) -> Self {
        Self { status: FARSIDE_ERROR_ARGUMENT, text: text.to_owned() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { status: (&error).into(), text: error.to_string() }
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        Self { status: (&error).into(), text: error.to_string() }
    }
}

/// The text as C has it.
pub(crate) fn c_text(text: String) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// How a call ended: its status, and the text of an error.
pub(crate) struct Ended {
    pub(crate) status: farside_status,
    pub(crate) error: Option<CString>,
    pub(crate) has_panicked: bool,
}

/// Calls a function. A panic becomes an error.
#[inline]
pub(crate) fn run(call: impl FnOnce() -> Result<farside_status, Failure>) -> Ended {
    let (status, error, has_panicked) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(status)) => (status, None, false),
        Ok(Err(failure)) => (failure.status, Some(c_text(failure.text)), false),
        Err(_) => {
            let defect = c"a defect of the library: please report what it printed to stderr";
            (FARSIDE_ERROR_INTERNAL, Some(defect.to_owned()), true)
        }
    };
    Ended { status, error, has_panicked }
}

/// [`run`] without a session: [`farside_error`] returns the text.
pub(crate) fn run_alone(call: impl FnOnce() -> Result<farside_status, Failure>) -> farside_status {
    let Ended { status, error, .. } = run(call);
    if let Some(error) = error {
        // A thread that is ending has no text any more.
        let _ = LAST.try_with(|last| last.replace(error));
    }
    status
}

/// Returns the text of the calling thread's last error in a function without a session or pipeline:
/// those that configure, connect, open a session or open a threaded pipeline. Also in a function
/// whose session or pipeline was NULL. Valid until the thread's next such error; empty if there was
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn farside_error() -> *const c_char {
    LAST.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The version of this header: the first number.
pub const FARSIDE_VERSION_MAJOR: u32 = 0;
/// The version of this header: the second number.
pub const FARSIDE_VERSION_MINOR: u32 = 1;
/// The version of this header: the third number.
pub const FARSIDE_VERSION_PATCH: u32 = 0;

/// Returns the version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn farside_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        let ended = run(|| panic!("for the test"));
        assert_eq!((ended.status, ended.has_panicked), (FARSIDE_ERROR_INTERNAL, true));
        assert!(ended.error.is_some_and(|text| text.to_string_lossy().contains("defect")));
    }

    #[test]
    fn the_header_has_the_version_of_the_library() {
        let numbers = [FARSIDE_VERSION_MAJOR, FARSIDE_VERSION_MINOR, FARSIDE_VERSION_PATCH];
        assert_eq!(numbers.map(|number| number.to_string()).join("."), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn a_text_with_zeros_is_kept() {
        assert_eq!(c_text("a\0b".to_owned()).as_c_str(), c"a b");
    }
}
