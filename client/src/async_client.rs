//! Operations as futures, for the tasks of any async runtime.
//!
//! A thread, the driver, owns a session and its pipeline. A task hands its request over in a slot
//! of the shared state, and sleeps until the driver has stored the answer there. On shared memory a
//! GET of a cached location needs no driver.

mod direct;
mod driver;
mod operation;
mod shared;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farside_protocol::{Action, Lifetime, Version};

use self::driver::Driver;
use self::operation::AsyncOperation;
use self::shared::Shared;
use crate::{Client, ConnectError, Outcome, Result, Store, Value};

/// A client for async tasks: cheap to clone, and shared by any number of tasks and threads.
///
/// It belongs to no runtime: operations wake the tasks that await them, by their wakers. All
/// operations share one pipeline of `pipeline_depth` lanes, which a thread of the client drives.
/// The thread sleeps while no operation is under way. It inherits the signal mask of the thread
/// that calls [`Client::async_client`].
///
/// On shared memory, a GET whose location is cached runs in the poll of its future, without the
/// thread. One of 128 such GETs lets other tasks run first.
///
/// An operation begins when its future is first polled. Operations of different tasks are
/// concurrent with each other, as in a [`Pipeline`](crate::Pipeline). When the connection is lost,
/// operations without an effect run again on a new one, as in a [`Session`](crate::Session). Up to
/// 16,384 operations are under way at once; the tasks of further ones wait.
///
/// # Dropping a future
///
/// A future can be dropped at any time, for example by a timeout. If its operation was not started
/// yet, it has no effect. Otherwise the operation goes on, and its answer is discarded. **So a PUT,
/// or any other change, whose future is dropped before it is ready may take effect or not, also
/// after the drop.** Another operation on the key can be executed before it, even if it begins
/// after the drop.
///
/// Dropping the last clone ends the thread after the operations that are in flight. It does not
/// wait for them. A process that exits at once may end before its thread: then the server treats it
/// as a client that died.
///
/// ```no_run
/// # async fn run(client: farside::Client) -> farside::Result<()> {
/// let client = client.async_client()?;
/// client.put("greeting", "hello").await?;
/// let value = client.get("greeting").await?.expect("it was just put");
/// assert_eq!(value, "hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient {
    handle: Arc<Handle>,
}

/// Ends the driver when the last clone of the client is dropped.
struct Handle {
    shared: Arc<Shared>,
    client: Client,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient").field("client", &self.handle.client).finish_non_exhaustive()
    }
}

impl Client {
    /// Returns a client for async tasks, with a session and a thread of its own. Waits as
    /// [`Client::session`] does, so call it outside of async code, or where blocking is allowed.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// let for_tasks = client.async_client()?;
    /// let other = for_tasks.clone(); // for another task; both share the session and the thread
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Client::session`].
    pub fn async_client(&self) -> Result<AsyncClient> {
        let failed = |doing| move |source| ConnectError::System { doing, source: Arc::new(source) };
        let session = self.session()?;
        let shared = Arc::new(Shared::new().map_err(failed("making an eventfd"))?);
        let driver = Driver::new(shared.clone());
        std::thread::Builder::new()
            .name("farside-async".into())
            .spawn(move || driver.run(session))
            .map_err(failed("starting the thread of an async client"))?;
        Ok(AsyncClient { handle: Arc::new(Handle { shared, client: self.clone() }) })
    }
}

impl AsyncClient {
    /// Runs an operation. Its value replaces the content of `found`.
    #[inline]
    fn run<'b>(
        &'b self,
        action: Action<'static>,
        parts: [&'b [u8]; 3],
        found: &'b mut Vec<u8>,
    ) -> AsyncOperation<'b, 'b> {
        found.clear();
        AsyncOperation::new(&self.handle.shared, action, parts, found)
    }

    /// Runs an operation, and returns its outcome with the value.
    async fn outcome(&self, action: Action<'static>, parts: [&[u8]; 3]) -> Result<Outcome> {
        let mut data = Vec::new();
        let outcome = self.run(action, parts, &mut data).await?;
        Ok(outcome.map(|version| Value { data, version }))
    }

    /// Runs an operation whose outcome has no value.
    #[inline]
    async fn plain(
        &self,
        action: Action<'static>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Outcome<Version>> {
        self.run(action, [key, value, &[]], &mut Vec::new()).await
    }

    /// Returns the value of a key; `None` if the key is absent. Round trips as for
    /// [`Session::get`](crate::Session::get).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// assert_eq!(client.get("greeting").await?.expect("it was just put"), "hello");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`](crate::Session::get).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        Ok(self.outcome(Action::Get, [key.as_ref(), &[], &[]]).await?.value)
    }

    /// As [`AsyncClient::get`], into the caller's buffer, whose content is replaced. The buffer is
    /// empty afterwards if the key is absent. Allocates nothing in the steady state, if the buffer
    /// is large enough and the value has at most 4 KiB.
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// let mut buffer = Vec::new(); // for many calls
    /// assert!(client.get_into("greeting", &mut buffer).await?.is_some());
    /// assert_eq!(buffer, b"hello");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::get`].
    pub async fn get_into(
        &self,
        key: impl AsRef<[u8]>,
        value: &mut Vec<u8>,
    ) -> Result<Option<Version>> {
        Ok(self.run(Action::Get, [key.as_ref(), &[], &[]], value).await?.value)
    }

    /// Returns the version of the key's value; `None` if the key is absent. Round trips as for
    /// [`Session::version`](crate::Session::version).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// let read = client.get("greeting").await?.expect("it was just put");
    /// assert_eq!(client.version("greeting").await?, Some(read.version));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::get`].
    pub async fn version(&self, key: impl AsRef<[u8]>) -> Result<Option<Version>> {
        Ok(self.plain(Action::Version, key.as_ref(), &[]).await?.version)
    }

    /// Whether the key is present. Round trips as for [`AsyncClient::version`].
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// assert!(client.exists("greeting").await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::get`].
    pub async fn exists(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.version(key).await?.is_some())
    }

    /// Stores a value, whether or not the key is present. Round trips as for
    /// [`Session::put`](crate::Session::put).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// client.put([0x00, 0xff], vec![7; 1000]).await?; // any bytes
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`](crate::Session::put).
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let action = Action::Put(Lifetime::FOREVER);
        self.plain(action, key.as_ref(), value.as_ref()).await.map(drop)
    }

    /// Stores a value with a condition, a TTL, or both. [`Outcome::applied`] is false if the
    /// condition did not hold. Round trips as for [`Session::store`](crate::Session::store).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// use std::time::Duration;
    /// use farside::Store;
    ///
    /// let lock = Store::if_absent().ttl(Duration::from_secs(10)).returning();
    /// assert!(client.store("lock", "first", lock).await?.applied);
    /// let outcome = client.store("lock", "second", lock).await?;
    /// assert_eq!(outcome.value.expect("the key is present"), "first");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::put`].
    pub async fn store(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        store: Store<'_>,
    ) -> Result<Outcome> {
        let (action, expected) = store.detached();
        let parts = [key.as_ref(), value.as_ref(), expected.unwrap_or_default()];
        self.outcome(action, parts).await
    }

    /// Stores a value only if the key is absent. Returns false if it was present. Round trips as
    /// for [`Session::insert`](crate::Session::insert).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// assert!(client.insert("owner", "first").await?);
    /// assert!(!client.insert("owner", "second").await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::put`].
    pub async fn insert(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<bool> {
        let action = Action::Insert(Lifetime::FOREVER);
        Ok(self.plain(action, key.as_ref(), value.as_ref()).await?.applied)
    }

    /// Stores a value only if the key is present. Returns false if it was absent. Round trips as
    /// for [`Session::update`](crate::Session::update).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// assert!(!client.update("owner", "first").await?);
    /// client.put("owner", "first").await?;
    /// assert!(client.update("owner", "second").await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::put`].
    pub async fn update(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<bool> {
        let action = Action::Update(Lifetime::FOREVER);
        Ok(self.plain(action, key.as_ref(), value.as_ref()).await?.applied)
    }

    /// Removes a key. Returns false if it was absent. Round trips as for
    /// [`Session::delete`](crate::Session::delete).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("greeting", "hello").await?;
    /// assert!(client.delete("greeting").await?);
    /// assert!(!client.delete("greeting").await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::delete`](crate::Session::delete).
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.plain(Action::Delete, key.as_ref(), &[]).await?.applied)
    }

    /// Removes a key only if its value is still the one that the write `expected` stored. Returns
    /// false if it is not, or if the key is absent. Round trips as for
    /// [`Session::delete_if_version`](crate::Session::delete_if_version).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("job", "build").await?;
    /// let version = client.version("job").await?.expect("it was just put");
    /// assert!(client.delete_if_version("job", version).await?);
    /// assert!(!client.delete_if_version("job", version).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::delete`].
    pub async fn delete_if_version(
        &self,
        key: impl AsRef<[u8]>,
        expected: Version,
    ) -> Result<bool> {
        let action = Action::delete_if_version(expected);
        Ok(self.plain(action, key.as_ref(), &[]).await?.applied)
    }

    /// Removes a key and returns its value; `None` if the key was absent. Round trips as for
    /// [`Session::take`](crate::Session::take).
    ///
    /// If the future is dropped, the key may be removed and the value lost.
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// client.put("job", "build").await?;
    /// assert_eq!(client.take("job").await?.expect("it was just put"), "build");
    /// assert!(client.take("job").await?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::delete`].
    pub async fn take(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        Ok(self.outcome(Action::take(), [key.as_ref(), &[], &[]]).await?.value)
    }

    /// Adds `delta` to the decimal number in the key's value, and returns the sum. Behaves as
    /// [`Session::increment`](crate::Session::increment), with its round trips.
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// assert_eq!(client.increment("visits", 1).await?, 1);
    /// assert_eq!(client.increment("visits", -3).await?, -2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::increment`](crate::Session::increment).
    pub async fn increment(&self, key: impl AsRef<[u8]>, delta: i64) -> Result<i64> {
        Ok(self.plain(Action::increment(delta), key.as_ref(), &[]).await?.number)
    }

    /// Appends bytes to the key's value, and returns the new length in bytes. Behaves as
    /// [`Session::append`](crate::Session::append), with its round trips.
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// assert_eq!(client.append("log", "one,").await?, 4);
    /// assert_eq!(client.append("log", "two,").await?, 8);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::put`].
    pub async fn append(&self, key: impl AsRef<[u8]>, bytes: impl AsRef<[u8]>) -> Result<usize> {
        let mut before = Vec::new();
        let parts = [key.as_ref(), bytes.as_ref(), &[]];
        self.run(Action::append(), parts, &mut before).await?;
        Ok(before.len() + bytes.as_ref().len())
    }

    /// Makes the key's value expire after `ttl`, instead of when it would have. Returns false if
    /// the key is absent. Round trips as for [`Session::touch`](crate::Session::touch).
    ///
    /// ```
    /// # async fn example(client: &farside::AsyncClient) -> farside::Result<()> {
    /// use std::time::Duration;
    ///
    /// client.put("session:42", "alice").await?;
    /// assert!(client.touch("session:42", Duration::from_secs(15 * 60)).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncClient::put`].
    pub async fn touch(&self, key: impl AsRef<[u8]>, ttl: Duration) -> Result<bool> {
        let action = Action::touch(Lifetime::lasting(ttl));
        Ok(self.plain(action, key.as_ref(), &[]).await?.applied)
    }
}
