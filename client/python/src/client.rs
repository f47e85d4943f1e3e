//! The client that waits.

use farside::{MetricsFormat, Session, Store, Version};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::arguments::{self, Condition, Keys, Lifetime, Seconds, Source, Target};
use crate::errors::{self, PyOutcome, PyValue};
use crate::exported::Buffer;
use crate::scan::PyScan;
use crate::state::{self, State, Worker};

/// How many keys are looked for without a release of the GIL: about ten microseconds of work.
const KEYS_AT_ONCE: usize = 128;

/// A connection to a server, or to the servers of a cluster. All threads of a process share it.
///
/// `server` is the address, or several with commas between them; without it the environment's
/// `FARSIDE_SERVER`. The settings are `role` ("writer" or "reader"), `secret`, `cache_bytes`,
/// `pipeline_depth`, `connect_timeout`, `metrics`, `tls_ca`, `tls_certificate`, `tls_key`,
/// `rdma_retry_count`, `rdma_ack_timeout` and `rdma_spin`.
///
/// A key is a `str`, which stands for its UTF-8, or `bytes`. A value is either of them, or an
/// object with the buffer protocol, such as a `bytearray`, `memoryview` or numpy array, or a torch
/// tensor on the CPU. No other thread may change a buffer during the call: the stored value may
/// then be damaged, and GETs of it fail. Times are seconds or `datetime.timedelta`.
///
/// Calls release the GIL while they wait. A GET of a short value at a known place in shared memory
/// keeps it, because it takes less time than a release.
///
/// >>> client.put("greeting", "hello")
/// >>> client.get("greeting")
/// b'hello'
/// >>> with farside.Client(server) as other:
/// ...     other.get("greeting")
/// b'hello'
#[pyclass(frozen, weakref, module = "farside")]
pub(crate) struct Client {
    state: State,
}

impl Client {
    pub(crate) fn state(&self) -> &State {
        &self.state
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (server=None, **settings))]
    fn new(
        py: Python<'_>,
        server: Option<String>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let client = state::connect(py, server, settings)?;
        Ok(Self { state: State::new(client) })
    }

    /// Returns the value of a key; `None` if the key is absent.
    ///
    /// >>> client.put("greeting", "hello")
    /// >>> client.get("greeting")
    /// b'hello'
    /// >>> client.get("absent") is None
    /// True
    #[pyo3(signature = (key, /))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = arguments::key(key)?;
        let found = self.state.get_at_once(key, |_, value| PyBytes::new(py, value))?;
        if found.is_some() {
            return Ok(found);
        }
        let read = |Worker { session, value }: &mut Worker| session.get_into(key, value);
        self.state.run_then(py, read, |read, value| Ok(read.map(|_| PyBytes::new(py, value))))
    }

    /// Returns the value of a key and its version, as a `Value`; `None` if the key is absent.
    ///
    /// >>> client.put("greeting", "hello")
    /// >>> found = client.get_versioned("greeting")
    /// >>> found.data
    /// b'hello'
    /// >>> bool(client.compare_exchange_version("greeting", found.version, "hi"))
    /// True
    #[pyo3(signature = (key, /))]
    fn get_versioned(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<PyValue>> {
        let key = arguments::key(key)?;
        let read = |Worker { session, value }: &mut Worker| session.get_into(key, value);
        let take = |read: Option<_>, data: &[u8]| Ok(read.map(|read| PyValue::new(py, read, data)));
        self.state.run_then(py, read, take)
    }

    /// Reads the value of a key into a writable buffer, and returns the value's length in bytes;
    /// `None` if the key is absent. What follows the value in the buffer is undefined.
    ///
    /// A value of 4 KiB or more is copied once, from the server's memory to the buffer. Over RDMA
    /// that takes a registered buffer.
    ///
    /// >>> client.put("greeting", "hello")
    /// >>> buffer = bytearray(16)
    /// >>> client.get_into("greeting", buffer)
    /// 5
    /// >>> buffer[:5]
    /// bytearray(b'hello')
    #[pyo3(signature = (key, buffer, /))]
    fn get_into(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<Option<usize>> {
        let key = arguments::key(key)?;
        let mut target = Target::new(buffer)?;
        let target = target.bytes_mut();
        let read = self.state.run(py, |session| session.get_into(key, target))?;
        Ok(read.map(|read| read.bytes))
    }

    /// Returns `length` bytes of a value from `start` on, or fewer if it ends before; `None` if the
    /// key is absent. Takes memory for `length` bytes meanwhile.
    ///
    /// >>> client.put("greeting", "hello, world")
    /// >>> client.get_range("greeting", 7, 5)
    /// b'world'
    #[pyo3(signature = (key, start, length, /))]
    fn get_range<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        start: usize,
        length: usize,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = arguments::key(key)?;
        let read = |Worker { session, value }: &mut Worker| {
            let length = length.min(session.limits().value_bytes_max);
            value.clear();
            value.resize(length, 0);
            session.get_range(key, start, value)
        };
        let take = |read: Option<farside::ReadRange>, value: &[u8]| {
            Ok(read.map(|read| PyBytes::new(py, &value[..read.bytes])))
        };
        self.state.run_then(py, read, take)
    }

    /// Returns the values of several keys as a list, in their order, with `None` for absent ones.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob"})
    /// >>> client.get_many(["user:2", "user:3"])
    /// [b'bob', None]
    #[pyo3(signature = (keys, /))]
    fn get_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::new(keys)?;
        let keys = keys.bytes()?;
        let mut values = Vec::with_capacity(keys.len());
        let (mut places, mut left) = (Vec::new(), Vec::new());
        for keys in keys.chunks(KEYS_AT_ONCE) {
            if !values.is_empty() {
                // Other threads have their turn.
                py.detach(|| ());
            }
            self.state.get_many_at_once(keys, |key, value| {
                if value.is_none() {
                    places.push(values.len());
                    left.push(key);
                }
                values.push(value.map(|value| PyBytes::new(py, value)));
            })?;
        }
        if !left.is_empty() {
            let found = self.state.run(py, |session| session.get_many(left))?;
            for (place, found) in places.into_iter().zip(found) {
                values[place] = found.map(|value| PyBytes::new(py, &value.data));
            }
        }
        PyList::new(py, values)
    }

    /// Reads the values of several keys into buffers, of which there are as many. Returns a list
    /// with each value's length in bytes, or `None` for an absent key.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob"})
    /// >>> buffers = [bytearray(16), bytearray(16)]
    /// >>> client.get_many_into(["user:1", "user:2"], buffers)
    /// [5, 3]
    #[pyo3(signature = (keys, buffers, /))]
    fn get_many_into(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Option<usize>>> {
        let keys = Keys::new(keys)?;
        let keys = keys.bytes()?;
        let targets = buffers.try_iter()?.map(|buffer| Target::new(&buffer?));
        let mut targets = targets.collect::<PyResult<Vec<_>>>()?;
        if keys.len() != targets.len() {
            return Err(PyValueError::new_err("pass as many buffers as keys"));
        }
        arguments::check_apart(&targets)?;
        let targets: Vec<_> = targets.iter_mut().map(Target::bytes_mut).collect();
        let entries = keys.into_iter().zip(targets);
        let read = self.state.run(py, |session| session.get_many_into(entries))?;
        Ok(read.into_iter().map(|read| read.map(|read| read.bytes)).collect())
    }

    /// Whether the key is present.
    ///
    /// >>> client.exists("absent")
    /// False
    #[pyo3(signature = (key, /))]
    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = arguments::key(key)?;
        self.state.run(py, |session| session.exists(key))
    }

    /// Returns the version of the key's value; `None` if the key is absent.
    ///
    /// >>> client.version("absent") is None
    /// True
    #[pyo3(signature = (key, /))]
    fn version(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let key = arguments::key(key)?;
        Ok(self.state.run(py, |session| session.version(key))?.map(Version::to_u64))
    }

    /// Returns the seconds until the value expires, `math.inf` if it does not; `None` if the key is
    /// absent.
    ///
    /// >>> client.put("session:42", "alice", ttl=60)
    /// >>> 0 < client.ttl("session:42") < 61
    /// True
    #[pyo3(signature = (key, /))]
    fn ttl(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
        let key = arguments::key(key)?;
        Ok(self.state.run(py, |session| session.ttl(key))?.map(errors::seconds))
    }

    /// Iterates over keys and values in no particular order, as pairs of `bytes`. With a prefix the
    /// others are left out, but the whole index is read.
    ///
    /// >>> client.put_many({"user:1": "alice", "user:2": "bob"})
    /// >>> sorted(client.scan("user:"))
    /// [(b'user:1', b'alice'), (b'user:2', b'bob')]
    #[pyo3(signature = (prefix=None, /))]
    fn scan(&self, py: Python<'_>, prefix: Option<&Bound<'_, PyAny>>) -> PyResult<PyScan> {
        let prefix = prefix.map(arguments::key).transpose()?.unwrap_or_default();
        PyScan::new(py, self.state.session(py)?, prefix)
    }

    /// Returns a registered buffer of so many bytes, all zero.
    ///
    /// >>> client.buffer(4096)
    /// <farside.Buffer of 4096 bytes>
    #[pyo3(signature = (bytes, /))]
    fn buffer(&self, py: Python<'_>, bytes: usize) -> PyResult<Buffer> {
        self.state.client(py)?;
        Buffer::new(bytes)
    }

    /// Returns the limits of the server, as a `dict`.
    ///
    /// >>> sorted(client.limits())
    /// ['grace', 'key_bytes_max', 'region_bytes', 'value_bytes_max']
    fn limits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let limits = self.state.run(py, |session| Ok(session.limits()))?;
        let found = PyDict::new(py);
        found.set_item("key_bytes_max", limits.key_bytes_max)?;
        found.set_item("value_bytes_max", limits.value_bytes_max)?;
        found.set_item("region_bytes", limits.region_bytes)?;
        found.set_item("grace", limits.grace.as_secs_f64())?;
        Ok(found)
    }

    /// Returns the metrics of the client as a text for Prometheus; `None` unless the client was
    /// made with the setting `metrics=True`.
    ///
    /// >>> with farside.Client(server, metrics=True) as other:
    /// ...     other.put("greeting", "hello")
    /// ...     text = other.metrics()
    /// >>> 'farside_client_operations_total{operation="put",result="applied"} 1' in text
    /// True
    fn metrics(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let client = self.state.client(py)?;
        Ok(py.detach(|| client.render_metrics(MetricsFormat::Prometheus)))
    }

    /// Closes the client. Its connection ends when calls under way, scans and clients for asyncio
    /// have ended, too.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.state.close(py)
    }

    /// Whether the client is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        self.state.is_closed()
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        // In the child of a fork, which may just be ending, there is nothing to close.
        if self.state.is_of_parent() { Ok(()) } else { self.close(py) }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.state.is_of_parent() {
            return Ok("<farside.Client of the parent process>".into());
        }
        if self.state.is_closed()? {
            return Ok("<farside.Client, closed>".into());
        }
        Ok(format!("<farside.{:?}>", self.state.client(py)?))
    }

    /// A client has connections, which another process cannot use.
    fn __reduce__(&self) -> PyResult<()> {
        let text = "a client cannot be pickled: make one in each process";
        Err(PyTypeError::new_err(text))
    }
}

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
        let entries = arguments::pairs(entries)?;
        let sources =
            entries.iter().map(|[key, value]| Ok((arguments::key(key)?, Source::new(value)?)));
        let sources = sources.collect::<PyResult<Vec<_>>>()?;
        let slices: Vec<_> = sources.iter().map(|(key, value)| (*key, value.as_ref())).collect();
        let lifetime = Lifetime::new(ttl, false, false)?;
        self.state().run(py, |session| arguments::put_many(session, slices, lifetime))
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
