//! What calls return, and the library's errors as exceptions. Their classes are in
//! `farside/_errors.py`.

use farside::{ConnectError, Error, OperationError, Outcome, ReadValue, SetupError, Ttl, Value};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyModule};

use crate::fork::Forked;

/// The module with the classes.
static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Returns an exception of the class with this name.
fn raise(py: Python<'_>, class: &str, text: String) -> PyErr {
    let exception = || {
        let import = || Ok::<_, PyErr>(py.import("farside._errors")?.unbind());
        CLASSES.get_or_try_init(py, import)?.bind(py).getattr(class)?.call1((text,))
    };
    exception().map_or_else(|error| error, PyErr::from_value)
}

/// The exception of a call in a child of the process that made the client.
impl From<Forked> for PyErr {
    fn from(Forked: Forked) -> Self {
        let text = "this process is a fork of the one that made the client: make a client in each \
                    process, after the fork";
        Python::attach(|py| raise(py, "ForkError", text.into()))
    }
}

/// The exception of a client without an address.
pub(crate) fn no_address(py: Python<'_>) -> PyErr {
    let text = "which server? Pass its address, such as \"shm:///run/farside/kv.sock\", or set \
                FARSIDE_SERVER";
    raise(py, "AddressError", text.into())
}

/// The exception of a call on a closed client.
pub(crate) fn closed(py: Python<'_>) -> PyErr {
    raise(py, "ClosedError", "the client is closed".into())
}

/// The exception of an operation that was under way when its client was closed.
pub(crate) fn closed_under_way(py: Python<'_>) -> PyErr {
    let text = "the client was closed during the operation, which may have taken effect";
    let error = raise(py, "ClosedError", text.into());
    match error.value(py).setattr("is_indeterminate", true) {
        Ok(()) => error,
        Err(failed) => failed,
    }
}

/// The exception of an operation.
#[cold]
pub(crate) fn of_operation(py: Python<'_>, error: &Error) -> PyErr {
    use OperationError as Failed;
    let class = match error {
        Error::Operation(failed) => match failed {
            Failed::KeyEmpty | Failed::KeyTooLong { .. } => "KeyLengthError",
            Failed::ValueTooLong { .. } => "ValueTooLongError",
            Failed::TargetTooShort { .. } => "BufferTooShortError",
            Failed::ExpiryTooLate => "ExpiryError",
            Failed::NotANumber => "NotANumberError",
            Failed::NumberOverflow => "NumberOverflowError",
            Failed::OutOfSpace { .. } => "OutOfSpaceError",
            Failed::Contended { .. } => "ContendedError",
            Failed::Indeterminate => "IndeterminateError",
            Failed::Denied => "DeniedError",
            Failed::Layout(_) => "DamagedError",
            Failed::Unregistered(_) => "UnregisteredError",
            _ => "OperationError",
        },
        Error::Connect(failed) => of_connect(failed),
        Error::Unavailable { .. } => "UnavailableError",
        Error::Disconnected { .. } => "DisconnectedError",
        Error::Lateness { .. } => "SettingsError",
        _ => "Error",
    };
    raise(py, class, error.to_string())
}

/// The exception of a client that could not be made.
pub(crate) fn of_setup(py: Python<'_>, error: &SetupError) -> PyErr {
    let class = match error {
        SetupError::PipelineDepth { .. } => "SettingsError",
        SetupError::Address(_) => "AddressError",
        SetupError::Connect(failed) => of_connect(failed),
        _ => "Error",
    };
    raise(py, class, error.to_string())
}

fn of_connect(error: &ConnectError) -> &'static str {
    match error {
        ConnectError::Unreachable { .. } => "UnreachableError",
        ConnectError::Refused { .. }
        | ConnectError::Untrusted { .. }
        | ConnectError::Unproven { .. }
        | ConnectError::Forbidden { .. } => "RefusedError",
        ConnectError::Layout(_) => "DamagedError",
        _ => "ConnectError",
    }
}

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
