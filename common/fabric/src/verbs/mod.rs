//! RDMA: real queue pairs, on a network card or on soft-RoCE. The only part of Farside that names
//! the C libraries, libibverbs and librdmacm.
//!
//! - Connecting: [`connect_data`] and [`connect_control`], and [`Listener`] on the other side.
//! - The data path: [`VerbsFabric`]. The peer's processor takes no part in it.
//! - What a peer may reach: [`Protection`]; dropping a [`DataConnection`] is the fence.
//! - What is wrong with this machine: [`preflight`].
//!
//! Without the feature `verbs` this module has the same names and signatures, and nothing of it
//! can be made: `verbs_disabled.rs`.

#[cfg(target_endian = "big")]
compile_error!(
    "the feature `verbs` needs a little-endian machine: devices compare and swap words in the \
     machine's byte order, and those of a region are little-endian"
);

mod connect;
mod control;
mod datapath;
mod fabric;
mod ffi;
mod handles;
mod identifier;
mod lanes;
mod listener;
mod memory;
mod preflight;
mod protection;
mod report;
#[cfg(test)]
mod structures;
mod types;
mod work;

pub use connect::{DataLink, connect_control, connect_data};
pub use control::VerbsChannel;
pub use fabric::VerbsFabric;
pub use listener::{Event, Incoming, Listener};
pub use preflight::preflight;
pub use protection::{DataConnection, Loopback, LoopbackPeer, Protection};
pub use report::{Capabilities, Device, Finding, Gid, Port, Report};
pub use types::{
    ACK_TIMEOUT, ConnectionId, Options, ProbeState, REASON_BYTES_MAX, RemoteRegion, VerbsError,
};
