//! The messages between client and server: the hello, the proofs and the welcome, then requests and
//! replies on the control channel. No operation on a key takes part in them.
//!
//! Over verbs the messages travel as RDMA-CM private data and by SEND and RECV; on shared memory,
//! over a Unix socket. Every decoder returns a value or an error for any bytes.
#![deny(unsafe_code)]

pub mod address;
pub mod attach;
pub mod cluster;
mod connect;
mod connected;
pub mod listening;
mod message;
mod proof;
mod secret;
mod statistics;

use std::time::Duration;

pub use connect::*;
pub use connected::*;
pub use farside_fabric::{
    ControlChannel, MESSAGE_BYTES_MAX, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Role,
};
pub use farside_layout::{FreeBlock, SplitOutcome};
pub use message::*;
pub use proof::{Handshake, SecretKey, SessionKey};
pub use secret::{Nonce, Proof, Secret};
pub use statistics::*;

/// The version of the messages. A server refuses a client that does not speak it.
pub const PROTOCOL_VERSION: u16 = 8;

/// Why a message cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ControlError {
    #[error("a message of its kind cannot have {bytes} bytes")]
    Length { bytes: usize },
    #[error("the peer does not speak Farside's protocol")]
    NotFarside,
    #[error("the peer sent a map of a cluster that cannot be understood")]
    Map,
    #[error("{field} has the unknown value {value}")]
    Unknown { field: &'static str, value: u64 },
}

/// Sends a goodbye, and waits up to `timeout` until its delivery does not need this process any
/// more. If the goodbye does not arrive, the server treats this client as dead.
pub fn say_goodbye(channel: &mut dyn ControlChannel, timeout: Duration) {
    let mut goodbye = Vec::new();
    Request::Goodbye.encode(&mut goodbye);
    let _ = channel.send(&goodbye);
    let _ = channel.flush(timeout);
}
