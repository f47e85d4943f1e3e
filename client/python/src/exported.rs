//! The memory of an object with the buffer protocol.
//!
//! pyo3's `PyUntypedBuffer` refuses arrays of ctypes and arrays without dimensions, whose strides
//! or shape are null.
#![allow(unsafe_code, reason = "the buffer protocol is a structure of C")]

use std::ffi::CStr;
use std::mem::MaybeUninit;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Memory that an object keeps in place, in one piece, until this is dropped.
pub(crate) struct Exported {
    /// Boxed, because its exporter may have put pointers to itself into it.
    view: Box<ffi::Py_buffer>,
}

// SAFETY: any thread may read the view. `drop` takes the GIL.
unsafe impl Send for Exported {}
// SAFETY: as above.
unsafe impl Sync for Exported {}

impl Exported {
    /// Exports an object's memory. Refuses memory that is not in one piece, and memory with
    /// pointers: a value that is read into it would let the program follow any address.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(MaybeUninit::<ffi::Py_buffer>::zeroed());
        // SAFETY: it is a view to fill, of an object that lives.
        let code = unsafe {
            ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), ffi::PyBUF_FULL_RO)
        };
        if code != 0 {
            return Err(with_advice(object, PyErr::fetch(object.py())));
        }
        // SAFETY: it was filled.
        let exported = Self { view: unsafe { view.assume_init() } };
        // SAFETY: the view is filled.
        if unsafe { ffi::PyBuffer_IsContiguous(&*exported.view, b'C' as _) } == 0 {
            let text = "the buffer is not contiguous: pass a contiguous one, or a copy";
            return Err(PyBufferError::new_err(text));
        }
        if has_pointers(exported.format()) {
            let format = exported.format().escape_ascii();
            let text = format!(
                "the buffer has pointers (format '{format}'), which mean nothing outside of this \
                 process: pass an array of numbers, or bytes, such as those of pickle.dumps"
            );
            return Err(PyBufferError::new_err(text));
        }
        Ok(exported)
    }

    /// The format of an item, as by the module `struct`.
    fn format(&self) -> &[u8] {
        if self.view.format.is_null() {
            return b"B";
        }
        // SAFETY: a text of C, which lives as long as the view.
        unsafe { CStr::from_ptr(self.view.format) }.to_bytes()
    }

    /// Whether the memory must not be written.
    pub(crate) fn is_read_only(&self) -> bool {
        self.view.readonly != 0
    }

    /// The start of the memory, and its length in bytes; `None` if it is empty.
    #[inline]
    pub(crate) fn span(&self) -> Option<(*mut u8, usize)> {
        let (start, bytes) = (self.view.buf.cast::<u8>(), self.view.len as usize);
        (bytes > 0 && !start.is_null()).then_some((start, bytes))
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        // Without an interpreter its memory is gone.
        let _ = Python::try_attach(|_| {
            // SAFETY: the view is filled, and released only here.
            unsafe { ffi::PyBuffer_Release(&mut *self.view) };
        });
    }
}

/// Whether items of this format have pointers, to objects of Python or to anything else.
fn has_pointers(format: &[u8]) -> bool {
    let mut is_name = false;
    format.iter().enumerate().any(|(at, kind)| {
        // The name of a field stands between colons.
        is_name ^= *kind == b':';
        let is_complex = || matches!(format.get(at + 1), Some(b'f' | b'd' | b'g'));
        match kind {
            _ if is_name => false,
            // A text of C; before a floating-point type a complex number.
            b'Z' => !is_complex(),
            b'O' | b'P' | b'&' | b'X' | b'z' => true,
            _ => false,
        }
    })
}

/// The error of an object whose memory cannot be exported. Adds what to do about items that the
/// buffer protocol has no format for.
#[cold]
fn with_advice(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    // SAFETY: an object that lives.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 0 {
        return error;
    }
    let text = format!(
        "{}: pass an array of bytes that shares its memory, such as array.view(\"uint8\")",
        error.value(object.py())
    );
    let advice = PyBufferError::new_err(text);
    advice.set_cause(object.py(), Some(error));
    advice
}
