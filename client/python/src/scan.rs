//! Scans as Python iterators.
#![allow(unsafe_code, reason = "a scan beside the session that it borrows")]

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use farside::{Entry, Error, Session};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::fork::ProcessLocal;
use crate::interrupts;

/// How many entries are read each time that the GIL is released.
const ENTRIES_PER_PAGE: usize = 64;
/// A page ends when its entries have so many bytes.
const BYTES_PER_PAGE: usize = 1 << 20;

/// A scan and its session.
struct OpenScan {
    /// It borrows the session.
    scan: ManuallyDrop<farside::Scan<'static>>,
    session: NonNull<Session>,
}

// SAFETY: it owns the session, and both may be used by any thread, one at a time.
unsafe impl Send for OpenScan {}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<farside::Scan<'static>>();
    is_send::<Session>();
};

impl OpenScan {
    fn new(session: Session, prefix: &[u8]) -> farside::Result<Self> {
        let session = NonNull::from(Box::leak(Box::new(session)));
        // SAFETY: the session lives until `drop`, which ends the scan first. Nothing else uses it.
        let scan = unsafe { &mut *session.as_ptr() }.scan_prefix(prefix);
        match scan {
            Ok(scan) => Ok(Self { scan: ManuallyDrop::new(scan), session }),
            Err(error) => {
                // SAFETY: the session was leaked above, and no scan borrows it.
                drop(unsafe { Box::from_raw(session.as_ptr()) });
                Err(error)
            }
        }
    }
}

impl Drop for OpenScan {
    fn drop(&mut self) {
        // SAFETY: it is dropped here only, and not used after that.
        unsafe { ManuallyDrop::drop(&mut self.scan) };
        // SAFETY: the session was leaked in `new`, and the scan that borrowed it is gone.
        drop(unsafe { Box::from_raw(self.session.as_ptr()) });
    }
}

#[derive(Default)]
struct Progress {
    /// `None` once the scan has ended.
    open: Option<OpenScan>,
    page: VecDeque<Result<Entry, Error>>,
}

impl Progress {
    fn read_page(&mut self) {
        let Some(open) = &mut self.open else { return };
        let mut bytes = 0;
        while self.page.len() < ENTRIES_PER_PAGE && bytes < BYTES_PER_PAGE {
            let Some(entry) = open.scan.next() else {
                self.open = None;
                return;
            };
            bytes += entry.as_ref().map_or(0, |entry| entry.value.data.len());
            self.page.push_back(entry);
        }
    }
}

/// Iterates over keys and values, as pairs of `bytes`.
#[pyclass(frozen, module = "farside", name = "Scan")]
pub(crate) struct PyScan(ProcessLocal<Mutex<Progress>>);

impl PyScan {
    pub(crate) fn new(py: Python<'_>, session: Session, prefix: &[u8]) -> PyResult<Self> {
        let open = OpenScan::new(session, prefix);
        let open = open.map_err(|error| errors::of_operation(py, &error))?;
        let progress = Progress { open: Some(open), page: VecDeque::new() };
        Ok(Self(ProcessLocal::new(Mutex::new(progress))))
    }
}

#[pymethods]
impl PyScan {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let progress = self.0.get()?;
        // Locked without the GIL: another thread holds the lock while it reads a page.
        let next = interrupts::operate(py, || {
            let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            if progress.page.is_empty() {
                progress.read_page();
            }
            progress.page.pop_front().transpose()
        })?;
        let objects =
            |Entry { key, value, .. }| (PyBytes::new(py, &key), PyBytes::new(py, &value.data));
        Ok(next.map(objects))
    }
}
