//! What client and server say to each other off the data path: the connection request and reply,
//! then requests and replies on the control channel.
//!
//! The same bytes travel as RDMA-CM private data and SEND/RECV on verbs, and over a Unix socket on
//! shared memory. Every decoder takes any bytes and answers with a value or an error.

#![deny(unsafe_code)]

pub mod address;
pub mod attach;
mod connect;
mod message;
mod statistics;
mod trust;

use std::time::Duration;

pub use connect::*;
pub use farside_fabric::{
    ControlChannel, MESSAGE_BYTES_MAX, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Role,
};
pub use farside_layout::{FreeBlock, SplitOutcome};
pub use message::*;
pub use statistics::*;

/// The version of the messages here. A server answers a request of another version with a refusal.
pub const PROTOCOL_VERSION: u16 = 3;

/// Why a message cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ControlError {
    #[error("a message of {bytes} bytes is too short or too long for what it is")]
    Length { bytes: usize },
    #[error("the peer does not speak Farside's protocol")]
    NotFarside,
    #[error("{field} has the unknown value {value}")]
    Unknown { field: &'static str, value: u64 },
}

/// Says goodbye; waits this long until the message does not need this end any more. If it does
/// not arrive, the server sees the connection end, and takes this client for one that died.
pub fn say_goodbye(channel: &mut dyn ControlChannel, most: Duration) {
    let mut goodbye = Vec::new();
    Request::Goodbye.encode(&mut goodbye);
    let _ = channel.send(&goodbye);
    let _ = channel.flush(most);
}
