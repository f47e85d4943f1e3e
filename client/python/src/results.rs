//! What calls return.

use farside::{Outcome, ReadValue, Ttl, Value};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A value and its version.
///
/// `version` is a number of 64 bits that identifies the write.
#[pyclass(frozen, module = "farside", name = "Value")]
pub(crate) struct PyValue {
    #[pyo3(get)]
    data: Py<PyBytes>,
    #[pyo3(get)]
    version: u64,
}

impl PyValue {
    pub(crate) fn new(py: Python<'_>, read: ReadValue, data: &[u8]) -> Self {
        Self { data: PyBytes::new(py, data).unbind(), version: read.version.to_u64() }
    }

    pub(crate) fn of(py: Python<'_>, value: &Value) -> Self {
        Self { data: PyBytes::new(py, &value.data).unbind(), version: value.version.to_u64() }
    }
}

#[pymethods]
impl PyValue {
    fn __bytes__(&self, py: Python<'_>) -> Py<PyBytes> {
        self.data.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let data = self.data.bind(py).repr()?;
        Ok(format!("Value(data={data}, version={:#x})", self.version))
    }
}

/// What a conditional store did.
///
/// It is true if the store took effect. `version` is that of the key's present value, and `value`
/// the bytes that were found, where the call says so; otherwise they are `None`.
#[pyclass(frozen, module = "farside", name = "Outcome")]
pub(crate) struct PyOutcome {
    #[pyo3(get)]
    applied: bool,
    #[pyo3(get)]
    version: Option<u64>,
    #[pyo3(get)]
    value: Option<Py<PyBytes>>,
}

impl PyOutcome {
    pub(crate) fn of(py: Python<'_>, outcome: Outcome) -> Self {
        let Outcome { applied, version, value, .. } = outcome;
        let value = value.map(|value| PyBytes::new(py, &value.data).unbind());
        Self { applied, version: version.map(farside::Version::to_u64), value }
    }
}

#[pymethods]
impl PyOutcome {
    fn __bool__(&self) -> bool {
        self.applied
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let version = self.version.map_or("None".into(), |version| format!("{version:#x}"));
        let value = match &self.value {
            Some(value) => value.bind(py).repr()?.to_string(),
            None => "None".into(),
        };
        let applied = if self.applied { "True" } else { "False" };
        Ok(format!("Outcome(applied={applied}, version={version}, value={value})"))
    }
}

/// Seconds until a value expires; infinity if it does not.
pub(crate) fn seconds(ttl: Ttl) -> f64 {
    match ttl {
        Ttl::For(left) => left.as_secs_f64(),
        _ => f64::INFINITY,
    }
}
