//! Registered buffers, as objects with the buffer protocol.
#![allow(unsafe_code, reason = "the buffer protocol hands out a pointer")]

use std::ffi::c_int;

use farside::RegisteredBuffer;
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::fork::ProcessLocal;

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
