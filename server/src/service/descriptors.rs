//! The shares of the server's descriptors. Each client has one, and over TCP and RDMA each session
//! another one, so the number of clients alone limits nothing.
//!
//! | part of the descriptors for clients | for |
//! |---|---|
//! | an eighth | clients without sessions, such as the operator's `kv-cli clients kick` |
//! | another eighth | writers, and their sessions |
//! | the rest | readers as well |

use farside_control::{Refusal, Role};
use rustix::process::{Resource, getrlimit};

use super::client_connection::{CLIENTLESS_MAX, ClientConnection};
use super::connections::Connections;

/// Limit on the connections over TCP that have not identified themselves.
const GREETING_MAX: u64 = farside_fabric::tcp::GREETING_MAX as u64;
/// Strangers get this part of the descriptors at most.
const STRANGERS_DIVISOR: u64 = 4;
/// This part is for writers, and as much is for clients without sessions.
const RESERVED_DIVISOR: u64 = 8;

/// The descriptors that the server has beside its clients.
pub(super) struct Descriptors {
    own: u64,
}

/// How many descriptors are used, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    /// Those of readers and their sessions.
    readers: u64,
    /// Those of all clients and sessions.
    all: u64,
}

impl Descriptors {
    /// Counts those that are open now.
    pub(super) fn count() -> Self {
        let open = std::fs::read_dir("/proc/self/fd");
        Self { own: open.map_or(0, |all| all.count() as u64) }
    }

    /// Refuses another client in this role if too few descriptors are left.
    pub(super) fn check_client(
        &self,
        role: Role,
        connections: &Connections,
    ) -> Result<(), Refusal> {
        let (used, max) = (used(connections), self.max());
        refuse_if(role == Role::Reader && used.readers >= max.readers, used)
    }

    /// Refuses another session of a client in this role if too few descriptors are left.
    pub(super) fn check_session(
        &self,
        role: Role,
        connections: &Connections,
    ) -> Result<(), Refusal> {
        let (used, max) = (used(connections), self.max());
        let is_reader = role == Role::Reader;
        refuse_if(used.all >= max.all || is_reader && used.readers >= max.readers, used)
    }

    /// The limits. The system's may change while the server runs.
    fn max(&self) -> Shares {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let free = limit.saturating_sub(self.own);
        let strangers = GREETING_MAX + CLIENTLESS_MAX as u64;
        let clients = free - strangers.min(free / STRANGERS_DIVISOR);
        let reserved = clients / RESERVED_DIVISOR;
        Shares { readers: clients - 2 * reserved, all: clients - reserved }
    }
}

fn refuse_if(is_refused: bool, used: Shares) -> Result<(), Refusal> {
    match is_refused {
        true => Err(Refusal::OutOfDescriptors { connections: used.all }),
        false => Ok(()),
    }
}

fn used(connections: &Connections) -> Shares {
    let of = |connection: &ClientConnection| 1 + connection.data.len() as u64;
    let mut used = Shares { readers: 0, all: 0 };
    for (_, connection) in connections.iter() {
        used.all += of(connection);
        if connection.role() == Some(Role::Reader) {
            used.readers += of(connection);
        }
    }
    used
}
