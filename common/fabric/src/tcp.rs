//! TCP: a server process executes the verbs of its clients, on any network.
//!
//! A client has one connection for its control channel, and one for each session: all to one port.
//! The first message of each says which it is. A session's connection carries records ([`record`]).
//! Those of one doorbell leave with one system call.
//!
//! - Connecting: [`connect_control`] and [`connect_data`]; on the other side [`Listener`] and
//!   [`Arrivals`].
//! - The data path: [`TcpFabric`] at the client, [`Executors`] at the server. The executors run the
//!   same code as a client on shared memory (`memory`), with the same checks of clock and lease.
//!
//! Both kinds of client can therefore use one region at once: processors execute all verbs. If an
//! RDMA device serves the region, too, it gets the executors' atomic verbs ([`DeviceAtomics`]).

#[cfg(target_endian = "big")]
compile_error!(
    "tcp:// needs a little-endian machine: words of a region travel in the machine's byte order"
);

mod arrivals;
mod clock_bound;
mod connect;
mod control_channel;
mod data_path;
mod device_atomics;
mod executors;
mod kept_bytes;
#[allow(unsafe_code, reason = "long WRITEs are sent from the buffers of lanes, without a copy")]
mod link;
mod listen;
#[allow(unsafe_code, reason = "the system copies payloads from and into the region")]
mod long_chain;
mod other_protocol;
#[allow(unsafe_code, reason = "the system sends payloads from where they are")]
mod output;
pub mod record;
mod session;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

use std::time::Duration;

use crate::{Nanos, SOFTWARE_ROUND_TRIP_MIN_NS};

pub use arrivals::Arrivals;
pub use connect::{DataLink, connect_control, connect_data};
pub use control_channel::TcpChannel;
pub use data_path::TcpFabric;
pub use device_atomics::DeviceAtomics;
#[doc(hidden)]
pub use executors::SteppedExecutor;
pub use executors::{DataConnection, Event, ExecutorOptions, Executors};
pub use listen::{GREETING_MAX, Incoming, Listener};
pub use other_protocol::OtherProtocol;
pub use output::DIRECT_BYTES_MIN;
pub use tls::{TlsClient, TlsError, TlsFiles, TlsServer};

/// RTT_min of `docs/protocol.md`: no chain of any client takes less time.
pub const ROUND_TRIP_MIN_NS: u32 = SOFTWARE_ROUND_TRIP_MIN_NS;
/// L of `docs/protocol.md`: the server refuses a chain that changes the region later than this
/// after its post. A longer time allows longer stalls of the network, and makes T_word shorter.
pub const LATENESS_MAX_NS: Nanos = 1_000_000_000;
/// How long a peer may leave sent bytes unacknowledged, and how long an idle one may be silent
/// between two keepalive probes, before the connection is closed.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time without an answer to chains in flight before a session closes its connection.
/// The longest over RDMA, by default, is the same.
const SILENCE_NS_MAX: Nanos = 7_500_000_000;
