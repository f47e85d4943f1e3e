//! Farside's memory server. It owns a region, and gives clients connections and free blocks. No
//! GET, PUT or DELETE of a client wakes it.
//!
//! The `kv-server` binary is a thin layer over this library. Tests start a [`Server`] in their own
//! process:
//!
//! ```
//! use farside_config::ServerConfig;
//! use farside_config::size::ByteSize;
//! use farside_server::Server;
//!
//! # let folder = tempfile::tempdir()?;
//! # let socket = folder.path().join("kv.sock");
//! let config = ServerConfig {
//!     listen: vec![format!("shm://{}", socket.display()).parse()?],
//!     memory: Some(ByteSize::mib(16)),
//!     ..Default::default()
//! };
//! let server = Server::start(&config)?;
//! println!("clients connect to {}", server.addresses()[0]);
//! server.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod chores;
mod cluster;
mod error;
mod event;
mod metrics;
mod rate_limited_warning;
mod region;
mod server;
mod service;

pub use chores::depot;
pub use cluster::ClusterError;
pub use error::{Damage, RestoreError, ServerError};
pub use server::{Server, Stopper, TlsReloader};
