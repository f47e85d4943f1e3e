//! RDMA: queue pairs of a network card or of soft-RoCE. Only this module of Farside names the C
//! libraries, libibverbs and librdmacm.
//!
//! - Connecting: [`connect_data`] and [`connect_control`], and [`Listener`] on the other side.
//! - The data path: [`VerbsFabric`]. It has a queue pair for each region, and one completion queue
//!   and one protection domain for all. The peers' processors do not take part.
//! - The rights of a peer: [`Protection`]. Dropping a [`DataConnection`] fences the peer.
//!
//! Without the feature `verbs` this module does not exist. The plain data of RDMA is in
//! [`crate::rdma`].

#[cfg(target_endian = "big")]
compile_error!(
    "the feature `verbs` needs a little-endian machine: devices compare and swap words in the \
     machine's byte order, and those of a region are little-endian"
);

mod connect;
mod control_channel;
mod data_path;
mod direct;
mod fabric;
mod ffi;
mod handles;
mod identifier;
mod lanes;
mod link;
mod listen;
mod local_memory;
mod preflight;
#[cfg(test)]
mod structures;
mod work;

pub use connect::{connect_control, connect_data};
pub use control_channel::VerbsChannel;
pub use fabric::VerbsFabric;
pub use link::DataLink;
pub use listen::{DataConnection, Event, Incoming, Listener, Loopback, Protection};
pub(crate) use preflight::ask_all;
