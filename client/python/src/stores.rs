//! Stores, from the arguments of calls.

use std::time::Duration;

use farside::{Session, Store, Version};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyMapping, PyTuple};

use crate::arguments::Seconds;

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
