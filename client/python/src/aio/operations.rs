//! The operations that asyncio programs can await.

use farside::{Store, Version};
use pyo3::prelude::*;

use super::{AsyncEngine, Operation, Reply};
use crate::arguments::{self, KeptSource, Keys, Seconds};
use crate::stores::{self, Condition, Lifetime};

/// Returns a copy of a key: the operation outlives the call.
fn kept_key(key: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    arguments::key(key).map(<[u8]>::to_vec)
}

#[pymethods]
impl AsyncEngine {
    fn get(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.get(key).await.map(Reply::Bytes) })
    }

    fn get_versioned(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.get(key).await.map(Reply::Versioned) })
    }

    fn get_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (keys, client) = (Keys::new(keys)?, self.client(py)?);
        let operation = |key: &[u8]| -> Operation {
            let (client, key) = (client.clone(), key.to_vec());
            Box::pin(async move { client.get(key).await.map(Reply::Bytes) })
        };
        let operations = keys.bytes()?.into_iter().map(operation).collect();
        self.submit_all(py, operations)
    }

    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.exists(key).await.map(Reply::Flag) })
    }

    fn version(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move {
            let version = client.version(key).await?;
            Ok(Reply::Version(version.map(Version::to_u64)))
        })
    }

    #[pyo3(signature = (key, value, ttl=None, keep_ttl=false, pinned=false))]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        let store = Lifetime::new(ttl, keep_ttl, pinned)?.of(Store::always());
        self.submit(py, |client| async move {
            client.store(key, value, store).await.map(|_| Reply::Done)
        })
    }

    #[pyo3(signature = (entries, ttl=None))]
    fn put_many(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
    ) -> PyResult<Py<PyAny>> {
        let client = self.client(py)?;
        let store = Lifetime::new(ttl, false, false)?.of(Store::always());
        let operation = |[key, value]: [Bound<'_, PyAny>; 2]| -> PyResult<Operation> {
            let (client, key, value) = (client.clone(), kept_key(&key)?, KeptSource::new(&value)?);
            Ok(Box::pin(async move { client.store(key, value, store).await.map(|_| Reply::Done) }))
        };
        let operations = stores::pairs(entries)?.into_iter().map(operation);
        self.submit_all(py, operations.collect::<PyResult<_>>()?)
    }

    #[pyo3(signature = (key, value, conditions, if_value, ttl, keep_ttl, pinned, returning))]
    #[expect(clippy::too_many_arguments, reason = "as the method in Python")]
    fn store(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        conditions: (bool, bool, Option<u64>),
        if_value: Option<&Bound<'_, PyAny>>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
        returning: bool,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        let expected = if_value.map(KeptSource::new).transpose()?;
        let (if_absent, if_present, if_version) = conditions;
        let condition = Condition::new(if_absent, if_present, expected.is_some(), if_version)?;
        let lifetime = Lifetime::new(ttl, keep_ttl, pinned)?;
        self.submit(py, move |client| async move {
            let store = condition.store(expected.as_ref().map(AsRef::as_ref));
            let store = lifetime.of(store);
            let store = if returning { store.returning() } else { store };
            client.store(key, value, store).await.map(Reply::Outcome)
        })
    }

    fn delete(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.delete(key).await.map(Reply::Flag) })
    }

    fn delete_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (keys, client) = (Keys::new(keys)?, self.client(py)?);
        let operation = |key: &[u8]| -> Operation {
            let (client, key) = (client.clone(), key.to_vec());
            Box::pin(async move { client.delete(key).await.map(Reply::Flag) })
        };
        let operations = keys.bytes()?.into_iter().map(operation).collect();
        self.submit_all(py, operations)
    }

    fn delete_if_version(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        version: u64,
    ) -> PyResult<Py<PyAny>> {
        let (key, version) = (kept_key(key)?, Version::from_u64(version));
        self.submit(py, move |client| async move {
            client.delete_if_version(key, version).await.map(Reply::Flag)
        })
    }

    fn take(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, |client| async move { client.take(key).await.map(Reply::Bytes) })
    }

    fn increment(&self, py: Python<'_>, key: &Bound<'_, PyAny>, delta: i64) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(py, move |client| async move {
            client.increment(key, delta).await.map(Reply::Integer)
        })
    }

    fn append(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (kept_key(key)?, KeptSource::new(value)?);
        self.submit(py, |client| async move { client.append(key, value).await.map(Reply::Length) })
    }

    fn touch(&self, py: Python<'_>, key: &Bound<'_, PyAny>, ttl: Seconds) -> PyResult<Py<PyAny>> {
        let key = kept_key(key)?;
        self.submit(
            py,
            move |client| async move { client.touch(key, ttl.0).await.map(Reply::Flag) },
        )
    }
}
