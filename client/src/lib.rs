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
#![deny(unsafe_code)]
#![warn(missing_debug_implementations)]

mod batch;
mod client;
mod compact;
mod connection;
mod control;
mod error;
mod fetches;
mod more_operations;
mod operations;
mod outcome;
mod pipeline;
mod reconnecting;
mod scan;
mod session;
mod store;
mod watch;

pub use batch::Batch;
pub use client::{Admin, Client, ClientBuilder, Limits};
pub use compact::Compaction;
pub use error::{Error, Result, SetupError};
pub use farside_config::size::ByteSize;
pub use farside_config::{ClientConfig, ConfigError, PIPELINE_DEPTH_RANGE, RdmaConfig, Secret};
pub use farside_control::address::AddressError;
pub use farside_control::attach::{ConnectError, Contact};
pub use farside_control::{ClassStatistics, ControlError, Refusal, Role, ServerStatistics};
pub use farside_fabric::Counters;
pub use farside_fabric::rdma::{Options as RdmaOptions, VerbsError};
pub use farside_layout::{LayoutError, SizeClass};
pub use farside_protocol::{CacheStatistics, Entry, Exhausted, OperationError, Value, Version};
pub use more_operations::Ttl;
pub use outcome::{Outcome, ValueRef};
pub use pipeline::{Completed, Pipeline, PipelineFull, Ticket};
pub use scan::Scan;
pub use session::Session;
pub use store::Store;
pub use watch::Changed;
