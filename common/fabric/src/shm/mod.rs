//! Shared memory: server and clients on one host, the client's CPU executes the verbs.
//!
//! A region on this fabric must not be reached over another one at the same time. A CPU's atomics
//! and those of a network card do not see each other (invariant I11).

mod control;
#[allow(unsafe_code, reason = "two socket options that rustix does not have")]
mod descriptors;
mod fabric;
mod huge_pages;
#[allow(unsafe_code, reason = "it maps a file at an address of its choice")]
mod mapping;
mod memory;
mod own_file;
#[allow(unsafe_code, reason = "the mapping is shared with other processes")]
mod region;
mod socket;
mod words;

pub use control::ShmChannel;
pub use fabric::{Lease, ShmFabric};
pub use huge_pages::{Collapse, Pages, collapse_refusal};
pub use memory::{HugePages, MemoryError, RegionMemory};
pub use region::{Region, prefetch};
pub use socket::{Connection, Listener, SocketOptions, lock_path};
