//! The methods of the client that store and remove.

use farside::{Session, Store, Version};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::Client;
use crate::arguments::{self, Keys, Seconds, Source};
use crate::results::PyOutcome;
use crate::stores::{self, Condition, Lifetime};

#[pymethods]
impl Client {
    /// Stores a value, whether or not the key is present. With `ttl` it expires after so many
    /// seconds. With `keep_ttl` it expires when the former value would have. The server never
    /// evicts a `pinned` value.
    ///
    /// >>> client.put("greeting", "hello")
    /// >>> client.put("session:42", b"\x00\xff", ttl=15 * 60)
    #[pyo3(signature = (key, value, /, *, ttl=None, keep_ttl=false, pinned=false))]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
    ) -> PyResult<()> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let value = value.as_ref();
        let lifetime = Lifetime::new(ttl, keep_ttl, pinned)?;
        if lifetime.is_plain() {
            return self.state().run(py, |session| session.put(key, value));
        }
        let store = lifetime.of(Store::always());
        self.state().run(py, |session| session.store(key, value, store).map(drop))
    }

    /// Stores several values, from a mapping or pairs of keys and values. Each of these stores is
    /// atomic; the call as a whole is not. After an error, any of them may have taken effect.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob"})
    /// >>> client.put_many([("user:3", "carol")], ttl=60)
    #[pyo3(signature = (entries, /, *, ttl=None))]
    fn put_many(
        &self,
        py: Python<'_>,
        entries: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
    ) -> PyResult<()> {
        let entries = stores::pairs(entries)?;
        let sources =
            entries.iter().map(|[key, value]| Ok((arguments::key(key)?, Source::new(value)?)));
        let sources = sources.collect::<PyResult<Vec<_>>>()?;
        let slices: Vec<_> = sources.iter().map(|(key, value)| (*key, value.as_ref())).collect();
        let lifetime = Lifetime::new(ttl, false, false)?;
        self.state().run(py, |session| stores::put_many(session, slices, lifetime))
    }

    /// Stores a value only if the key is absent. Returns whether it did.
    ///
    /// >>> client.insert("owner", "first", ttl=60)
    /// True
    /// >>> client.insert("owner", "second", ttl=60)
    /// False
    #[pyo3(signature = (key, value, /, *, ttl=None, pinned=false))]
    fn insert(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
        pinned: bool,
    ) -> PyResult<bool> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let value = value.as_ref();
        let store = Lifetime::new(ttl, false, pinned)?.of(Store::if_absent());
        self.state().run(py, |session| Ok(session.store(key, value, store)?.applied))
    }

    /// Stores a value only if the key is present. Returns whether it did.
    ///
    /// >>> client.update("absent", "value")
    /// False
    #[pyo3(signature = (key, value, /, *, ttl=None, keep_ttl=false, pinned=false))]
    fn update(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
    ) -> PyResult<bool> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let value = value.as_ref();
        let store = Lifetime::new(ttl, keep_ttl, pinned)?.of(Store::if_present());
        self.state().run(py, |session| Ok(session.store(key, value, store)?.applied))
    }

    /// Stores a value if the conditions hold, and returns an `Outcome`. Pass one condition at most:
    /// `if_absent`, `if_present`, `if_value` or `if_version`. With `returning` the outcome has the
    /// value before.
    ///
    /// >>> client.put("state", "new")
    /// >>> client.store("state", "open", if_value="new", returning=True).value
    /// b'new'
    /// >>> client.store("state", "open", if_absent=True).applied
    /// False
    #[pyo3(signature = (
        key, value, /, *, if_absent=false, if_present=false, if_value=None, if_version=None,
        ttl=None, keep_ttl=false, pinned=false, returning=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn store(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        if_absent: bool,
        if_present: bool,
        if_value: Option<&Bound<'_, PyAny>>,
        if_version: Option<u64>,
        ttl: Option<Seconds>,
        keep_ttl: bool,
        pinned: bool,
        returning: bool,
    ) -> PyResult<PyOutcome> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let if_value = if_value.map(Source::new).transpose()?;
        let condition = Condition::new(if_absent, if_present, if_value.is_some(), if_version)?;
        let store = condition.store(if_value.as_ref().map(Source::as_ref));
        let store = Lifetime::new(ttl, keep_ttl, pinned)?.of(store);
        let store = if returning { store.returning() } else { store };
        let value = value.as_ref();
        let outcome = self.state().run(py, |session| session.store(key, value, store))?;
        Ok(PyOutcome::of(py, outcome))
    }

    /// Replaces the value `expected` by `new`, and returns an `Outcome`. `None` stands for an
    /// absent key. The outcome of a failure has the value that was found.
    ///
    /// >>> client.put("state", "new")
    /// >>> bool(client.compare_exchange("state", "new", "open"))
    /// True
    /// >>> client.compare_exchange("state", "new", "open").value
    /// b'open'
    #[pyo3(signature = (key, expected, new, /))]
    fn compare_exchange(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        expected: &Bound<'_, PyAny>,
        new: &Bound<'_, PyAny>,
    ) -> PyResult<PyOutcome> {
        let (key, new) = (arguments::key(key)?, Source::new(new)?);
        let expected = (!expected.is_none()).then(|| Source::new(expected)).transpose()?;
        let (expected, new) = (expected.as_ref().map(Source::as_ref), new.as_ref());
        let exchange = |session: &mut Session| session.compare_exchange(key, expected, new);
        Ok(PyOutcome::of(py, self.state().run(py, exchange)?))
    }

    /// Replaces the value of this version by `new`, and returns an `Outcome`.
    ///
    /// >>> client.put("state", "new")
    /// >>> version = client.version("state")
    /// >>> bool(client.compare_exchange_version("state", version, "open"))
    /// True
    #[pyo3(signature = (key, version, new, /))]
    fn compare_exchange_version(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        version: u64,
        new: &Bound<'_, PyAny>,
    ) -> PyResult<PyOutcome> {
        let (key, new) = (arguments::key(key)?, Source::new(new)?);
        let (version, new) = (Version::from_u64(version), new.as_ref());
        let exchange = |session: &mut Session| session.compare_exchange_version(key, version, new);
        Ok(PyOutcome::of(py, self.state().run(py, exchange)?))
    }

    /// Returns the value of a key, or stores `value` if the key is absent and returns that.
    ///
    /// >>> client.get_or_insert("owner", "first")
    /// b'first'
    /// >>> client.get_or_insert("owner", "second")
    /// b'first'
    #[pyo3(signature = (key, value, /))]
    fn get_or_insert<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let value = value.as_ref();
        let found = self.state().run(py, |session| session.get_or_insert(key, value))?;
        Ok(PyBytes::new(py, &found.data))
    }

    /// Adds `delta` to the decimal number in the value, and returns the sum. An absent key counts
    /// as 0.
    ///
    /// >>> client.increment("visits")
    /// 1
    /// >>> client.increment("visits", -3)
    /// -2
    #[pyo3(signature = (key, delta=1, /))]
    fn increment(&self, py: Python<'_>, key: &Bound<'_, PyAny>, delta: i64) -> PyResult<i64> {
        let key = arguments::key(key)?;
        self.state().run(py, |session| session.increment(key, delta))
    }

    /// Appends bytes to the value, and returns its new length.
    ///
    /// >>> client.append("log", "one,")
    /// 4
    /// >>> client.append("log", "two,")
    /// 8
    #[pyo3(signature = (key, value, /))]
    fn append(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let (key, value) = (arguments::key(key)?, Source::new(value)?);
        let value = value.as_ref();
        self.state().run(py, |session| session.append(key, value))
    }

    /// Has the value expire after `ttl` seconds from now. Returns false if the key is absent.
    ///
    /// >>> client.put("session:42", "alice")
    /// >>> client.touch("session:42", 60)
    /// True
    #[pyo3(signature = (key, ttl, /))]
    fn touch(&self, py: Python<'_>, key: &Bound<'_, PyAny>, ttl: Seconds) -> PyResult<bool> {
        let key = arguments::key(key)?;
        self.state().run(py, |session| session.touch(key, ttl.0))
    }

    /// Has the value never expire. Returns false if the key is absent.
    ///
    /// >>> client.put("session:42", "alice", ttl=60)
    /// >>> client.persist("session:42")
    /// True
    /// >>> client.ttl("session:42")
    /// inf
    #[pyo3(signature = (key, /))]
    fn persist(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = arguments::key(key)?;
        self.state().run(py, |session| session.persist(key))
    }

    /// Removes a key. Returns false if it was absent.
    ///
    /// >>> client.put("greeting", "hello")
    /// >>> client.delete("greeting")
    /// True
    /// >>> client.delete("greeting")
    /// False
    #[pyo3(signature = (key, /))]
    fn delete(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = arguments::key(key)?;
        self.state().run(py, |session| session.delete(key))
    }

    /// Removes a key only if its value has this version. Returns whether it did.
    ///
    /// >>> client.put("job", "build")
    /// >>> client.delete_if_version("job", client.version("job"))
    /// True
    #[pyo3(signature = (key, version, /))]
    fn delete_if_version(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        version: u64,
    ) -> PyResult<bool> {
        let key = arguments::key(key)?;
        self.state().run(py, |session| session.delete_if_version(key, Version::from_u64(version)))
    }

    /// Removes a key and returns its value; `None` if the key was absent.
    ///
    /// >>> client.put("job", "build")
    /// >>> client.take("job")
    /// b'build'
    /// >>> client.take("job") is None
    /// True
    #[pyo3(signature = (key, /))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = arguments::key(key)?;
        let taken = self.state().run(py, |session| session.take(key))?;
        Ok(taken.map(|value| PyBytes::new(py, &value.data)))
    }

    /// Removes several keys, and returns how many of them were present. After an error, any of them
    /// may be removed.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob"})
    /// >>> client.delete_many(["user:1", "user:2", "user:3"])
    /// 2
    #[pyo3(signature = (keys, /))]
    fn delete_many(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let keys = Keys::new(keys)?;
        let keys = keys.bytes()?;
        self.state().run(py, |session| session.delete_many(keys))
    }

    /// Removes all keys with a prefix, and returns how many there were. Reads the whole index.
    /// After an error, any of them may be removed.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob", "order:1": "tea"})
    /// >>> client.delete_prefix("user:")
    /// 2
    #[pyo3(signature = (prefix, /))]
    fn delete_prefix(&self, py: Python<'_>, prefix: &Bound<'_, PyAny>) -> PyResult<u64> {
        let prefix = arguments::key(prefix)?;
        self.state().run(py, |session| session.delete_prefix(prefix))
    }
}
