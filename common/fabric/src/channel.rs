//! What every fabric's control channel agrees on: roles, and the longest of each message.

/// What a connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Only READ. Enforced by the memory (shm) or the device (verbs), not by the client.
    Reader = 1,
    /// Everything.
    Writer = 2,
}

/// The longest message on a control channel, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// What RDMA-CM lets a connecting side say, in bytes.
pub const REQUEST_BYTES_MAX: usize = 56;
/// What RDMA-CM lets an accepting side say, in bytes.
pub const REPLY_BYTES_MAX: usize = 196;
