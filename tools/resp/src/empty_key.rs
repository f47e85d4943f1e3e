//! The empty key. Redis has it, and Farside's keys have at least one byte, so another key stands
//! for it in the store.

/// The key that stands for the empty one. Clients that use this key itself use the empty one.
pub(crate) const STAND_IN: &[u8] = b"\0kv-resp: the empty key";

/// The key of the store for a client's key.
#[inline]
pub(crate) fn to_store(key: &[u8]) -> &[u8] {
    if key.is_empty() { STAND_IN } else { key }
}

/// The client's key for a key of the store.
pub(crate) fn to_client(key: Vec<u8>) -> Vec<u8> {
    if key == STAND_IN { Vec::new() } else { key }
}
