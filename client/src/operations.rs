//! The operations that pipelines and batches offer, written once for both.

/// Defines the methods of a pipeline or batch that begin operations. `$self`, of type `$this`,
/// begins each with `begin(action, key, value)`, or `begin_get(key)` or `begin_put(key, value)`,
/// which return `$result`. `$store` is the lifetime of a store's expected value.
macro_rules! define_operations {
    ($this:ty, $result:ty, $store:lifetime) => {
        /// A GET.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// session.put("greeting", "hello")?;
        /// let outcome = session.batch().get("greeting").run()?.remove(0)?;
        /// assert_eq!(outcome.value.expect("it was just put"), "hello");
        ///
        /// let mut pipeline = session.pipeline()?;
        /// pipeline.get("greeting")?;
        /// let outcome = pipeline.wait().expect("one is in flight").result?;
        /// assert_eq!(*outcome.value.expect("it was just put"), *b"hello");
        /// # Ok(()) }
        /// ```
        pub fn get(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin_get(key.as_ref())
        }

        /// A GET of the version only, as [`Session::version`](crate::Session::version).
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// let version = session.get_or_insert("greeting", "hello")?.version;
        /// let outcome = session.batch().version("greeting").run()?.remove(0)?;
        /// assert_eq!(outcome.version, Some(version));
        /// session.pipeline()?.version("greeting")?;
        /// # Ok(()) }
        /// ```
        pub fn version(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Version, key.as_ref(), &[])
        }

        /// A PUT: stores a value, whether or not the key is present.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// session.batch().put("one", "1").put("two", "2").run()?;
        /// session.pipeline()?.put("three", "3")?; // complete when the pipeline is dropped
        /// assert!(session.exists("three")?);
        /// # Ok(()) }
        /// ```
        pub fn put(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin_put(key.as_ref(), value.as_ref())
        }

        /// A store with a condition, a TTL, or both.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// use farside::Store;
        ///
        /// let outcome = session.batch().store("a", "1", Store::if_present()).run()?.remove(0)?;
        /// assert!(!outcome.applied);
        /// session.pipeline()?.store("b", "2", Store::if_absent())?;
        /// assert!(session.exists("b")?);
        /// # Ok(()) }
        /// ```
        pub fn store(
            self: $this,
            key: impl AsRef<[u8]>,
            value: impl AsRef<[u8]>,
            store: Store<$store>,
        ) -> $result {
            self.begin(store.action(), key.as_ref(), value.as_ref())
        }

        /// An INSERT: a PUT that takes effect only if the key is absent.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// assert!(session.batch().insert("a", "1").run()?.remove(0)?.applied);
        /// session.pipeline()?.insert("a", "2")?;
        /// assert_eq!(session.get("a")?.expect("it was just put"), "1");
        /// # Ok(()) }
        /// ```
        pub fn insert(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Insert(Lifetime::FOREVER), key.as_ref(), value.as_ref())
        }

        /// An UPDATE: a PUT that takes effect only if the key is present.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// assert!(!session.batch().update("a", "1").run()?.remove(0)?.applied);
        /// session.pipeline()?.update("a", "2")?;
        /// assert!(!session.exists("a")?);
        /// # Ok(()) }
        /// ```
        pub fn update(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Update(Lifetime::FOREVER), key.as_ref(), value.as_ref())
        }

        /// A DELETE.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// session.put_many([("a", "1"), ("b", "2")])?;
        /// assert!(session.batch().delete("a").run()?.remove(0)?.applied);
        /// session.pipeline()?.delete("b")?;
        /// assert!(!session.exists("b")?);
        /// # Ok(()) }
        /// ```
        pub fn delete(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Delete, key.as_ref(), &[])
        }

        /// A DELETE that takes effect only if the key's value is still the one that the write
        /// `expected` stored, as [`Session::delete_if_version`](crate::Session::delete_if_version).
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// let version = session.get_or_insert("a", "1")?.version;
        /// assert!(session.batch().delete_if_version("a", version).run()?.remove(0)?.applied);
        /// session.pipeline()?.delete_if_version("a", version)?; // no effect: it is absent
        /// # Ok(()) }
        /// ```
        pub fn delete_if_version(self: $this, key: impl AsRef<[u8]>, expected: Version) -> $result {
            self.begin(Action::delete_if_version(expected), key.as_ref(), &[])
        }

        /// A DELETE that returns the value, as [`Session::take`](crate::Session::take).
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// session.put_many([("a", "1"), ("b", "2")])?;
        /// let outcome = session.batch().take("a").run()?.remove(0)?;
        /// assert_eq!(outcome.value.expect("it was just put"), "1");
        /// session.pipeline()?.take("b")?;
        /// # Ok(()) }
        /// ```
        pub fn take(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::take(), key.as_ref(), &[])
        }

        /// An increment, as [`Session::increment`](crate::Session::increment).
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// assert_eq!(session.batch().increment("visits", 2).run()?.remove(0)?.number, 2);
        /// session.pipeline()?.increment("visits", 3)?;
        /// assert_eq!(session.increment("visits", 0)?, 5);
        /// # Ok(()) }
        /// ```
        pub fn increment(self: $this, key: impl AsRef<[u8]>, delta: i64) -> $result {
            self.begin(Action::increment(delta), key.as_ref(), &[])
        }

        /// An append, as [`Session::append`](crate::Session::append). Its outcome has the value
        /// before it.
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// session.batch().append("log", "one,").run()?.remove(0)?;
        /// session.pipeline()?.append("log", "two,")?;
        /// assert_eq!(session.get("log")?.expect("it was just put"), "one,two,");
        /// # Ok(()) }
        /// ```
        pub fn append(self: $this, key: impl AsRef<[u8]>, bytes: impl AsRef<[u8]>) -> $result {
            self.begin(Action::append(), key.as_ref(), bytes.as_ref())
        }

        /// A new TTL for the present value, as [`Session::touch`](crate::Session::touch).
        ///
        /// ```
        /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
        /// use std::time::Duration;
        ///
        /// session.put("session:42", "alice")?;
        /// session.batch().touch("session:42", Duration::from_secs(60)).run()?.remove(0)?;
        /// session.pipeline()?.touch("session:42", Duration::from_secs(90))?;
        /// # Ok(()) }
        /// ```
        pub fn touch(self: $this, key: impl AsRef<[u8]>, ttl: std::time::Duration) -> $result {
            self.begin(Action::touch(Lifetime::lasting(ttl)), key.as_ref(), &[])
        }
    };
}
pub(crate) use define_operations;
