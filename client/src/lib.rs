//! The client library of Farside, a one-sided key-value store on far memory.
//!
//! A memory server (`kv-server`) owns a region; clients read and change it with one-sided verbs:
//! GET is a READ, PUT a chain of WRITE, WRITE and compare-and-swap. No server CPU runs for either.
//! On one host, without any RDMA hardware, the `shm` fabric executes the same verbs on shared
//! memory. RDMA, for `rdma://` addresses, takes the feature `verbs`, which is off by default: it
//! needs the headers of libibverbs and librdmacm, and clang.
//!
//! # A first program
//!
//! Start a server: `kv-server --listen shm:///run/farside/kv.sock --memory 256MiB`. Then:
//!
//! ```no_run
//! use farside::Client;
//!
//! let client = Client::builder().server("shm:///run/farside/kv.sock").connect()?;
//! let mut session = client.session()?;
//!
//! session.put("greeting", "hello")?;
//! let value = session.get("greeting")?.expect("it was just put");
//! assert_eq!(value, "hello");
//!
//! assert!(!session.insert("greeting", "only if absent")?);
//! assert!(session.compare_exchange_version("greeting", value.version, "hi")?.applied);
//! assert!(session.delete("greeting")?);
//! assert_eq!(session.get("greeting")?, None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Keys and values
//!
//! A key is any bytes but none at all, and a value any bytes: texts, arrays and vectors are passed
//! as they are. [`Session::limits`] tells how long they may be. What is read is a [`Value`]: bytes
//! that compare with texts, and the [`Version`] of the write that stored them. Conditional stores
//! and removals return an [`Outcome`], or whether they applied.
//!
//! # Operations
//!
//! Each method has an example, and says how many round trips it takes.
//!
//! | to | methods of [`Session`] |
//! |---|---|
//! | read a value | [`get`](Session::get), [`get_into`](Session::get_into) |
//! | read a short value that is at hand | [`get_without_waiting`](Session::get_without_waiting) |
//! | read several | [`get_many`](Session::get_many) |
//! | read a part of a value | [`get_range`](Session::get_range) |
//! | ask whether a key is present | [`exists`](Session::exists) |
//! | ask for its version, its TTL | [`version`](Session::version), [`ttl`](Session::ttl) |
//! | store a value | [`put`](Session::put), [`put_with_ttl`](Session::put_with_ttl) |
//! | store several | [`put_many`](Session::put_many) |
//! | store a value part by part | [`writer`](Session::writer), which returns a [`ValueWriter`] |
//! | store if the key is absent | [`insert`](Session::insert) |
//! | read, or store if the key is absent | [`get_or_insert`](Session::get_or_insert) |
//! | read, or fetch from elsewhere | [`get_or_fetch`](Session::get_or_fetch) |
//! | store if the key is present | [`update`](Session::update) |
//! | store with any [condition and TTL](Store) | [`store`](Session::store) |
//! | exchange a known value | [`compare_exchange`](Session::compare_exchange) |
//! | exchange a known version | [`compare_exchange_version`](Session::compare_exchange_version) |
//! | change a value | [`increment`](Session::increment), [`append`](Session::append) |
//! | change when it expires | [`touch`](Session::touch), [`persist`](Session::persist) |
//! | remove a key | [`delete`](Session::delete), [`take`](Session::take) |
//! | remove a known version | [`delete_if_version`](Session::delete_if_version) |
//! | remove several | [`delete_many`](Session::delete_many) |
//! | remove all with a prefix | [`delete_prefix`](Session::delete_prefix) |
//! | iterate | [`scan`](Session::scan), [`scan_prefix`](Session::scan_prefix) |
//! | iterate over one shard | [`scan_shard`](Session::scan_shard) |
//! | iterate over the keys alone | [`scan_keys`](Session::scan_keys) |
//! | iterate in pieces | [`scan_from`](Session::scan_from) |
//! | iterate over the keys in pieces | [`scan_keys_from`](Session::scan_keys_from) |
//! | count the keys | [`count_keys`](Session::count_keys) |
//! | wait for a change | [`watch`](Session::watch), [`watch_since`](Session::watch_since) |
//! | run a list at once | [`batch`](Session::batch), which returns a [`Batch`] |
//! | keep many in flight | [`pipeline`](Session::pipeline), which returns a [`Pipeline`] |
//!
//! The conditions of [`Session::store`] are [`if_absent`](Store::if_absent),
//! [`if_present`](Store::if_present), [`if_value`](Store::if_value) and
//! [`if_version`](Store::if_version). A [`ttl`](Store::ttl) or [`until`](Store::until) limits the
//! value's life, [`keep_ttl`](Store::keep_ttl) keeps the present limit, and
//! [`returning`](Store::returning) asks for the value before. A server that is a cache never evicts
//! a [`pinned`](Store::pinned) value.
//!
//! An [`AsyncClient`] has most of these methods as futures. [`Client::admin`] returns an [`Admin`],
//! with what an operator does: statistics, the list of clients, hot keys, collection and
//! compaction. [`Client::render_metrics`] has metrics of a client.
//!
//! The folder `examples` of this crate has whole programs: `cache_aside`, `counter`, `lock`,
//! `feature_store` and, with async tasks, `web_handler`.
//!
//! # Threads
//!
//! All threads share a [`Client`]; each thread that works has a [`Session`] with its own lanes and
//! free blocks. All sessions share the client's location cache. Sessions are `Send`, but not
//! `Sync`. No operation takes a lock that another session may hold for long.
//!
//! After a `fork` the child must neither use nor drop the clients of its parent.
//! [`std::process::Command`] is fine.
//!
//! # Many operations at once
//!
//! [`Session::pipeline`] keeps up to `pipeline_depth` operations in flight; [`Session::batch`] runs
//! a list of them, up to `pipeline_depth` per doorbell. Both run the same code as the calls that
//! wait.
//!
//! ```no_run
//! # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
//! # let mut session = client.session()?;
//! for outcome in session.batch().put("one", "1").put("two", "2").delete("three").run()? {
//!     println!("{:?}", outcome?);
//! }
//!
//! let mut pipeline = session.pipeline()?;
//! let ticket = pipeline.get("two")?;
//! while let Some(completed) = pipeline.wait() {
//!     assert_eq!(completed.ticket, ticket);
//!     let value = completed.result?.value.expect("it was just put");
//!     assert_eq!(*value, *b"2");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Async
//!
//! [`Client::async_client`] returns an [`AsyncClient`] for the tasks of any async runtime. All of
//! them share one pipeline.
//!
//! # Consistency
//!
//! Operations on one key are linearizable, across all clients, even if some of them die at any
//! moment. [`Session::scan`] is weakly consistent. The argument, with numbered invariants, is in
//! `docs/protocol.md`.
//!
//! # Errors
//!
//! [`Error`] says what failed and what the caller can do. Unless the variant says otherwise, a
//! failed operation has had no effect.
//!
//! - [`Error::is_retryable`]: the cause passes, so the same call may succeed later.
//! - [`Error::is_indeterminate`]: the connection broke while a write was on its way. It has taken
//!   effect, or never will.
//! - All others: the message says what to change.
//!
//! A write by version settles an indeterminate error. If the key still has the old version, the
//! write had no effect, and can be repeated. If the key has the new value, the write took effect,
//! provided that no other write stores the same bytes: they hold a number of the request. If the
//! key has neither, another client has changed it since, and the error stays.
//!
//! ```no_run
//! use farside::{Client, OperationError, Result, Session};
//!
//! const ATTEMPTS_MAX: u32 = 10;
//!
//! /// Replaces the present value by `new`, which holds the number of this request. Returns false
//! /// if the key is absent or another client was faster.
//! fn replace(session: &mut Session, key: &str, new: &str) -> Result<bool> {
//!     let Some(old) = session.version(key)? else { return Ok(false) };
//!     for _ in 0..ATTEMPTS_MAX {
//!         match session.compare_exchange_version(key, old, new) {
//!             Err(error) if error.is_indeterminate() => {}
//!             result => return Ok(result?.applied),
//!         }
//!         match session.get(key)? {
//!             Some(present) if present.version == old => {} // no effect: again
//!             Some(present) if present == new => return Ok(true),
//!             _ => break,
//!         }
//!     }
//!     Err(OperationError::Indeterminate.into())
//! }
//!
//! let client = Client::builder().server("shm:///run/farside/kv.sock").connect()?;
//! let mut session = client.session()?;
//! session.put("balance", "100, request 1 of writer 7")?;
//! assert!(replace(&mut session, "balance", "80, request 2 of writer 7")?);
//! assert!(!replace(&mut session, "absent", "60, request 3 of writer 7")?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Stability
//!
//! The minimum supported Rust version is 1.93. The file `public-api.txt` lists the API, and a test
//! compares it.
#![deny(unsafe_code)]
#![warn(missing_debug_implementations)]

mod async_client;
mod batch;
mod client;
mod client_inner;
mod cluster;
mod compact;
mod connection;
mod control;
mod error;
mod fetches;
mod hot_keys;
mod long_values;
mod metrics;
mod operations;
mod outcome;
mod pipeline;
mod present_value;
mod reconnecting;
mod scan;
mod session;
mod session_regions;
mod several_keys;
mod shard_link;
mod shards;
mod store;
mod target;
mod value_writer;
mod watch;

pub use async_client::AsyncClient;
pub use batch::Batch;
pub use client::{Admin, Client, ClientBuilder};
pub use compact::Compaction;
pub use error::{Error, PipelineFull, Result, SetupError};
pub use farside_config::size::ByteSize;
pub use farside_config::{ClientConfig, ConfigError, PIPELINE_DEPTH_RANGE, RdmaConfig, Secret};
pub use farside_control::address::AddressError;
pub use farside_control::attach::{ConnectError, Contact};
pub use farside_control::{
    ClassStatistics, ClientDescription, ConnectedClient, ControlError, FabricKind, Nonce, Refusal,
    Role, ServerStatistics, Versions,
};
pub use farside_fabric::interrupt::interruptible;
pub use farside_fabric::rdma::{Options as RdmaOptions, VerbsError};
pub use farside_fabric::tcp::{OtherProtocol, TlsError, TlsFiles};
pub use farside_fabric::{Counters, RegisteredBuffer};
pub use farside_layout::{LayoutError, SizeClass};
pub use farside_metrics::MetricsFormat;
pub use farside_protocol::{
    CacheStatistics, Entry, Exhausted, KeyEntry, OperationError, ReadRange, ReadValue, Value,
    Version,
};
pub use hot_keys::{HotKey, HotKeys};
pub use outcome::{Outcome, ValueRef};
pub use pipeline::{Completed, Pipeline, Ticket};
pub use present_value::Ttl;
pub use scan::{KeyScan, Scan, ScanPosition};
pub use session::{Limits, Session};
pub use store::Store;
pub use target::Target;
pub use value_writer::ValueWriter;
pub use watch::Changed;
