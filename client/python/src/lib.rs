//! The Python client of Farside: the native module of the package `farside`.
//!
//! It has no logic of the store. It converts arguments, releases the GIL, calls the library, and
//! converts results.
#![deny(unsafe_code)]

mod aio;
mod arguments;
mod client;
mod errors;
mod exported;
mod fork;
mod interrupts;
mod lmcache;
mod scan;
mod state;

use pyo3::prelude::*;

/// The native part of the package `farside`.
#[pymodule(gil_used = true)]
mod _farside {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::aio::AsyncEngine;
    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::errors::{PyOutcome, PyValue};
    #[pymodule_export]
    use crate::exported::Buffer;
    #[pymodule_export]
    use crate::interrupts::Cancellable;
    #[pymodule_export]
    use crate::lmcache::Connector;
    #[pymodule_export]
    use crate::scan::PyScan;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::fork::watch()?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
