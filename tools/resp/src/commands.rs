//! The commands: what they ask of the store, and what they reply. Here is what they share: the
//! arguments of a request, the state of its connection, and the key that stands for the empty one.

pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod introspection;
pub(crate) mod operation;
pub(crate) mod plan;
pub(crate) mod table;
pub(crate) mod task;
pub(crate) mod whole;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use farside_resp::Protocol;

use crate::gateway::ClientRecord;

/// The arguments of a request, the first of which is the command's name.
pub(crate) trait Arguments {
    fn count(&self) -> usize;
    fn get(&self, number: usize) -> &[u8];

    /// Whether an argument is this word, in letters of any case.
    fn is(&self, number: usize, word: &str) -> bool {
        self.get(number).eq_ignore_ascii_case(word.as_bytes())
    }
}

const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// What the gateway knows about the client of a connection.
pub(crate) struct ClientState {
    pub(crate) record: Arc<ClientRecord>,
    pub(crate) protocol: Protocol,
    pub(crate) is_authenticated: bool,
    /// MULTI was sent, and neither EXEC nor DISCARD since.
    pub(crate) is_in_transaction: bool,
    /// It has given a wrong password: it gets no answer in this second.
    pub(crate) is_delayed: bool,
    /// The connection ends when its replies are sent.
    pub(crate) is_closing: bool,
}

impl ClientState {
    pub(crate) fn set_protocol(&mut self, protocol: Protocol) {
        self.protocol = protocol;
        let number = if protocol == Protocol::Two { 2 } else { 3 };
        self.record.protocol.store(number, Ordering::Relaxed);
    }
}

/// Sets the name of a client. An empty one removes it.
pub(crate) fn set_name(state: &ClientState, name: &[u8]) -> Result<(), &'static str> {
    checked_name(name)?.clone_into(&mut state.record.name());
    Ok(())
}

/// The name, if it is one that redis allows.
pub(crate) fn checked_name(name: &[u8]) -> Result<&str, &'static str> {
    let is_plain = name.iter().all(u8::is_ascii_graphic);
    str::from_utf8(name).ok().filter(|_| is_plain).ok_or(BAD_NAME)
}

/// The key that stands for the empty one, which redis has: Farside's keys have at least one byte.
/// Clients that use this key itself use the empty one.
const EMPTY_KEY: &[u8] = b"\0kv-resp: the empty key";

/// The key of the store for a client's key.
#[inline]
pub(crate) fn key_in_store(key: &[u8]) -> &[u8] {
    if key.is_empty() { EMPTY_KEY } else { key }
}

/// The client's key for a key of the store.
pub(crate) fn key_of_client(key: Vec<u8>) -> Vec<u8> {
    if key == EMPTY_KEY { Vec::new() } else { key }
}
