//! RDMA: real queue pairs, on a network card or on soft-RoCE. The only part of Farside that names
//! the C libraries, libibverbs and librdmacm.
//!
//! - Connecting: [`connect_data`] and [`connect_control`], and [`Listener`] on the other side.
//! - The data path: [`VerbsFabric`]. The peers' processors take no part in it. It has a queue pair
//!   for each region, and one completion queue and one protection domain for all.
//! - What a peer may reach: [`Protection`]; dropping a [`DataConnection`] is the fence.
//!
//! Without the feature `verbs` this module is not there; its plain data is in [`crate::rdma`].

#[cfg(target_endian = "big")]
compile_error!(
    "the feature `verbs` needs a little-endian machine: devices compare and swap words in the \
     machine's byte order, and those of a region are little-endian"
);

mod connect;
mod control_channel;
mod data_path;
mod fabric;
mod ffi;
mod handles;
mod identifier;
mod lanes;
mod link;
mod listen;
mod memory;
mod preflight;
#[cfg(test)]
mod structures;
mod work;

pub use connect::{connect_control, connect_data};
pub use control_channel::VerbsChannel;
pub use fabric::VerbsFabric;
pub use link::DataLink;
pub use listen::{DataConnection, Event, Incoming, Listener, Loopback, LoopbackPeer, Protection};
pub(crate) use preflight::ask_all;
