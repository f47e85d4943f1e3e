//! The state of a connection that commands read and change.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use farside_resp::Protocol;

use crate::gateway::ClientRecord;

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
