//! Shared memory: server and clients are on one host, and a client's CPU executes its verbs.
//!
//! A region must not be reached over this fabric and over RDMA at the same time. The atomics of a
//! CPU and of a network card are not atomic with each other (invariant I11).

mod connect;
mod control_channel;
mod data_path;
#[allow(unsafe_code, reason = "two socket options that rustix does not have")]
mod descriptors;
mod listen;

pub use connect::Connection;
pub use control_channel::ShmChannel;
pub use data_path::{LATENESS_MAX_NS, ROUND_TRIP_MIN_NS, ShmFabric};
pub use listen::{Listener, SocketOptions, lock_path};
