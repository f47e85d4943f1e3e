//! The arguments of calls: keys, values, buffers and times.
//!
//! A key or value that is a `str` or `bytes` is read where it is. So is an object with the buffer
//! protocol, which stays exported for the call.
#![allow(unsafe_code, reason = "the memory of Python's objects as slices")]

use std::time::Duration;

use farside::{Session, Store, Version};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyMapping, PyString, PyTuple};

use crate::exported::Exported;

/// Returns the bytes of a `str` or `bytes`, if the object is one.
#[inline]
fn immutable<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a [u8]>> {
    if let Ok(text) = object.cast::<PyString>() {
        Ok(Some(text.to_str()?.as_bytes()))
    } else if let Ok(bytes) = object.cast::<PyBytes>() {
        Ok(Some(bytes.as_bytes()))
    } else {
        Ok(None)
    }
}

/// Returns the bytes of a key.
#[inline]
pub(crate) fn key<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    immutable(object)?.ok_or_else(|| {
        let name = object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string());
        PyTypeError::new_err(format!("a key is a str or bytes, not {name}"))
    })
}

/// Several keys, which are kept while their bytes are in use.
pub(crate) struct Keys<'py>(Vec<Bound<'py, PyAny>>);

impl<'py> Keys<'py> {
    /// The keys of an iterable, but not the letters of a text.
    pub(crate) fn new(keys: &Bound<'py, PyAny>) -> PyResult<Self> {
        if immutable(keys)?.is_some() {
            return Err(PyTypeError::new_err("pass a list of keys, not one key"));
        }
        keys.try_iter()?.collect::<PyResult<_>>().map(Self)
    }

    pub(crate) fn bytes(&self) -> PyResult<Vec<&[u8]>> {
        self.0.iter().map(key).collect()
    }
}

/// The bytes of a value to store.
pub(crate) enum Source<'a> {
    Immutable(&'a [u8]),
    Exported(Exported),
}

impl<'a> Source<'a> {
    #[inline]
    pub(crate) fn new(object: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        match immutable(object)? {
            Some(bytes) => Ok(Self::Immutable(bytes)),
            None => export(object).map(Self::Exported),
        }
    }
}

impl AsRef<[u8]> for Source<'_> {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Immutable(bytes) => bytes,
            Self::Exported(buffer) => exported_bytes(buffer),
        }
    }
}

/// The bytes of a value to store, kept beyond the call.
pub(crate) enum KeptSource {
    Text(PyBackedStr),
    Bytes(PyBackedBytes),
    Exported(Exported),
}

impl KeptSource {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            PyBackedStr::try_from(text.clone()).map(Self::Text)
        } else if let Ok(bytes) = object.cast::<PyBytes>() {
            Ok(Self::Bytes(bytes.clone().into()))
        } else {
            export(object).map(Self::Exported)
        }
    }
}

impl AsRef<[u8]> for KeptSource {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
            Self::Exported(buffer) => exported_bytes(buffer),
        }
    }
}

fn exported_bytes(buffer: &Exported) -> &[u8] {
    let Some((start, bytes)) = buffer.span() else { return &[] };
    // SAFETY: the exporter keeps the memory in place until the buffer is released. The package's
    // documentation forbids changes by other threads during the call, as for `socket.send`. With
    // one, the stored value may differ from its checksum: GETs of it then fail.
    unsafe { std::slice::from_raw_parts(start, bytes) }
}

/// Memory for a value that is read.
pub(crate) struct Target(Exported);

impl Target {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = export(object)?;
        if buffer.is_read_only() {
            return Err(PyBufferError::new_err("the buffer is read-only: pass a writable one"));
        }
        Ok(Self(buffer))
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let Some((start, bytes)) = self.0.span() else { return &mut [] };
        // SAFETY: the exporter keeps the memory in place until the buffer is released, and it is
        // writable. The package's documentation forbids its use by other threads during the call,
        // as for `socket.recv_into`.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }
}

/// Refuses buffers that share memory: each has its own value.
pub(crate) fn check_apart(targets: &[Target]) -> PyResult<()> {
    let mut spans: Vec<_> = targets.iter().filter_map(|Target(buffer)| buffer.span()).collect();
    spans.sort_unstable();
    let is_apart = |pair: &[(*mut u8, usize)]| pair[0].0 as usize + pair[0].1 <= pair[1].0 as usize;
    if spans.windows(2).all(is_apart) {
        return Ok(());
    }
    Err(PyValueError::new_err("two of the buffers share memory: pass one for each key"))
}

/// Exports an object's memory.
fn export(object: &Bound<'_, PyAny>) -> PyResult<Exported> {
    match Exported::new(object) {
        Err(error) => match tensor_memory(object)? {
            Some(memory) => Exported::new(&memory),
            None => Err(error),
        },
        exported => exported,
    }
}

/// Returns an array of bytes that shares the memory of a torch tensor, if the object is one.
/// Tensors have no buffer protocol, and numpy has none of their shorter floating-point types.
fn tensor_memory<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let modules = object.py().import("sys")?.getattr("modules")?;
    let Some(torch) = modules.cast::<PyDict>()?.get_item("torch")? else { return Ok(None) };
    if !object.is_instance(&torch.getattr("Tensor")?)? {
        return Ok(None);
    }
    let flat = object.call_method0("detach")?.call_method1("view", (-1,))?;
    flat.call_method1("view", (torch.getattr("uint8")?,))?.call_method0("numpy").map(Some)
}

/// A duration in seconds, or a `datetime.timedelta`.
pub(crate) struct Seconds(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let is_number = object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>();
        let number = if is_number && !object.is_instance_of::<PyBool>() {
            object.extract::<f64>()?
        } else {
            let wrong = |_| PyTypeError::new_err("a time is a number of seconds or a timedelta");
            object.call_method0("total_seconds").map_err(wrong)?.extract::<f64>()?
        };
        let duration = Duration::try_from_secs_f64(number);
        let wrong =
            || format!("{number} seconds: pass a time that is not negative, and below 1e19");
        duration.map(Self).map_err(|_| PyValueError::new_err(wrong()))
    }
}

/// The length from which a copy of a value takes longer than a round trip saves, in bytes.
const LONG_BYTES: usize = 64 << 10;

/// How long a value lives.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lifetime {
    ttl: Option<Duration>,
    keep_ttl: bool,
    pinned: bool,
}

impl Lifetime {
    pub(crate) fn new(ttl: Option<Seconds>, keep_ttl: bool, pinned: bool) -> PyResult<Self> {
        if ttl.is_some() && keep_ttl {
            return Err(PyValueError::new_err("pass either ttl or keep_ttl"));
        }
        Ok(Self { ttl: ttl.map(|Seconds(ttl)| ttl), keep_ttl, pinned })
    }

    /// Whether the value lives until it is replaced, removed or evicted.
    pub(crate) fn is_plain(self) -> bool {
        self.ttl.is_none() && !self.keep_ttl && !self.pinned
    }

    /// Gives the value of a store this lifetime.
    pub(crate) fn of<'e>(self, mut store: Store<'e>) -> Store<'e> {
        if let Some(ttl) = self.ttl {
            store = store.ttl(ttl);
        }
        if self.keep_ttl {
            store = store.keep_ttl();
        }
        if self.pinned { store.pinned() } else { store }
    }
}

/// The condition of a store.
#[derive(Clone, Copy)]
pub(crate) enum Condition {
    Always,
    Absent,
    Present,
    /// The key has the expected value, which is passed separately.
    Value,
    Version(u64),
}

impl Condition {
    /// The condition that is given, of which there must not be two.
    pub(crate) fn new(
        if_absent: bool,
        if_present: bool,
        if_value: bool,
        if_version: Option<u64>,
    ) -> PyResult<Self> {
        match (if_absent, if_present, if_value, if_version) {
            (false, false, false, None) => Ok(Self::Always),
            (true, false, false, None) => Ok(Self::Absent),
            (false, true, false, None) => Ok(Self::Present),
            (false, false, true, None) => Ok(Self::Value),
            (false, false, false, Some(version)) => Ok(Self::Version(version)),
            _ => Err(PyValueError::new_err("pass one condition at most")),
        }
    }

    /// A store with this condition. `value` is the expected one.
    pub(crate) fn store(self, value: Option<&[u8]>) -> Store<'_> {
        match self {
            Self::Always => Store::always(),
            Self::Absent => Store::if_absent(),
            Self::Present => Store::if_present(),
            Self::Value => Store::if_value(value.unwrap_or_default()),
            Self::Version(version) => Store::if_version(Version::from_u64(version)),
        }
    }
}

/// Pairs of a key and a value, from a mapping or an iterable of pairs.
pub(crate) fn pairs<'py>(entries: &Bound<'py, PyAny>) -> PyResult<Vec<[Bound<'py, PyAny>; 2]>> {
    if let Ok(mapping) = entries.cast::<PyMapping>() {
        return mapping.items()?.iter().map(|item| pair(&item)).collect();
    }
    entries.try_iter()?.map(|item| pair(&item?)).collect()
}

fn pair<'py>(item: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 2]> {
    if let Ok(tuple) = item.cast::<PyTuple>()
        && tuple.len() == 2
    {
        return Ok([tuple.get_item(0)?, tuple.get_item(1)?]);
    }
    Err(PyTypeError::new_err("pass a mapping, or tuples of a key and a value"))
}

/// Stores several values.
pub(crate) fn put_many(
    session: &mut Session,
    entries: Vec<(&[u8], &[u8])>,
    lifetime: Lifetime,
) -> farside::Result<()> {
    if lifetime.is_plain() {
        return session.put_many(entries);
    }
    let store = lifetime.of(Store::always());
    // A batch copies values, so long ones are stored by themselves.
    let (long, short): (Vec<_>, Vec<_>) =
        entries.into_iter().partition(|(_, value)| value.len() >= LONG_BYTES);
    let batch = session.batch();
    let batch = short.iter().fold(batch, |batch, (key, value)| batch.store(key, value, store));
    batch.run()?.into_iter().try_for_each(|outcome| outcome.map(drop))?;
    long.into_iter().try_for_each(|(key, value)| session.store(key, value, store).map(drop))
}
