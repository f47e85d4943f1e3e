//! The operations that pipelines and batches offer, written once for both.

/// Defines the methods of a pipeline or batch that begin operations. `$self`, of type `$this`,
/// begins each with `begin(action, key, value)`, which returns `$result`. `$store` is the lifetime
/// of a store's expected value.
macro_rules! define_operations {
    ($this:ty, $result:ty, $store:lifetime) => {
        /// A GET.
        pub fn get(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Get, key.as_ref(), &[])
        }

        /// A GET of the version only, as [`Session::version`](crate::Session::version).
        pub fn version(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Version, key.as_ref(), &[])
        }

        /// A PUT: stores a value, whether or not the key is present.
        pub fn put(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Put(Lifetime::Forever), key.as_ref(), value.as_ref())
        }

        /// A store with a condition, a TTL, or both.
        pub fn store(
            self: $this,
            key: impl AsRef<[u8]>,
            value: impl AsRef<[u8]>,
            store: Store<$store>,
        ) -> $result {
            self.begin(store.action(), key.as_ref(), value.as_ref())
        }

        /// An INSERT: a PUT that takes effect only if the key is absent.
        pub fn insert(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Insert(Lifetime::Forever), key.as_ref(), value.as_ref())
        }

        /// An UPDATE: a PUT that takes effect only if the key is present.
        pub fn update(self: $this, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Update(Lifetime::Forever), key.as_ref(), value.as_ref())
        }

        /// A DELETE.
        pub fn delete(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::Delete, key.as_ref(), &[])
        }

        /// A DELETE that returns the value, as [`Session::take`](crate::Session::take).
        pub fn take(self: $this, key: impl AsRef<[u8]>) -> $result {
            self.begin(Action::take(), key.as_ref(), &[])
        }

        /// An increment, as [`Session::increment`](crate::Session::increment).
        pub fn increment(self: $this, key: impl AsRef<[u8]>, delta: i64) -> $result {
            self.begin(Action::increment(delta), key.as_ref(), &[])
        }

        /// An append, as [`Session::append`](crate::Session::append). Its outcome has the value
        /// before it.
        pub fn append(self: $this, key: impl AsRef<[u8]>, bytes: impl AsRef<[u8]>) -> $result {
            self.begin(Action::append(), key.as_ref(), bytes.as_ref())
        }

        /// A new TTL for the present value, as [`Session::touch`](crate::Session::touch).
        pub fn touch(self: $this, key: impl AsRef<[u8]>, ttl: std::time::Duration) -> $result {
            self.begin(Action::touch(Lifetime::For(ttl)), key.as_ref(), &[])
        }
    };
}
pub(crate) use define_operations;
