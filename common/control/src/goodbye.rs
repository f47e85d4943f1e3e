//! The end of a client's control channel.

use std::time::Duration;

use farside_fabric::ControlChannel;

use super::Request;

/// Says goodbye; waits this long until the message does not need this end any more. If it does
/// not arrive, the server sees the connection end, and takes this client for one that died.
pub fn say_goodbye(channel: &mut dyn ControlChannel, most: Duration) {
    let mut goodbye = Vec::new();
    Request::Goodbye.encode(&mut goodbye);
    let _ = channel.send(&goodbye);
    let _ = channel.flush(most);
}
