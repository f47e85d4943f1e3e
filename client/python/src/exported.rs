//! The memory of an object with the buffer protocol, and registered buffers as such objects.
//!
//! pyo3's `PyUntypedBuffer` refuses arrays of ctypes and arrays without dimensions, whose strides
//! or shape are null.
#![allow(unsafe_code, reason = "the buffer protocol is a structure of C with a pointer")]

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;

use farside::RegisteredBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::fork::ProcessLocal;

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

/// Memory for values. An RDMA device transfers between it and a server without a copy.
///
/// It has the buffer protocol: `memoryview(buffer)` and `numpy.frombuffer(buffer, ...)` share its
/// memory. Over shared memory and TCP it is memory as any other, except that the child of a fork
/// does not have it.
///
/// >>> buffer = client.buffer(1 << 20)
/// >>> len(buffer)
/// 1048576
/// >>> memoryview(buffer)[:5] = b"hello"
/// >>> client.put("greeting", memoryview(buffer)[:5])
/// >>> client.get_into("greeting", buffer)
/// 5
#[pyclass(frozen, module = "farside", name = "Buffer")]
pub(crate) struct Buffer {
    memory: ProcessLocal<RegisteredBuffer>,
    /// The start of the memory. Rust has no reference into it while Python can change it.
    start: usize,
    bytes: usize,
}

impl Buffer {
    pub(crate) fn new(bytes: usize) -> PyResult<Self> {
        let failed = |error| PyMemoryError::new_err(format!("a buffer of {bytes} bytes: {error}"));
        let mut memory = RegisteredBuffer::new(bytes).map_err(failed)?;
        let start = memory.as_mut_ptr() as usize;
        Ok(Self { memory: ProcessLocal::new(memory), start, bytes })
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.bytes
    }

    fn __repr__(&self) -> String {
        format!("<farside.Buffer of {} bytes>", self.bytes)
    }

    /// # Safety
    /// As the buffer protocol demands: `view` is a buffer to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // A child of a fork does not have the memory.
        if let Err(forked) = this.memory.get() {
            // SAFETY: it is a view to fill. After an error it must refer to nothing.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(forked.into());
        }
        let (start, bytes) = (this.start as *mut _, this.bytes as ffi::Py_ssize_t);
        // SAFETY: the view holds a reference to this object, so the memory stays mapped as long as
        // the view is in use.
        let code = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 0, flags) };
        if code == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
