//! Shares of a server's places, so that neither readers nor one user can take all of them.

use farside_control::{Refusal, Role};
use farside_fabric::boot_time_ns;

use super::{STRANGERS_MAX, Service};
use crate::peer::{ClientIdentity, DisconnectReason};

/// One place in this many is kept: from readers for writers, and from one user for others.
const KEPT_SHARE: u32 = 8;

/// How many of `clients_max` places readers may have together, and one user for itself.
fn share(clients_max: u32) -> usize {
    (clients_max - clients_max / KEPT_SHARE) as usize
}

impl Service {
    /// Whether there is a place for another client in this role, of this user. The server's own
    /// user and root could stop the server as well, and may have all.
    pub(super) fn check_shares(&self, role: Role, user: Option<u32>) -> Result<(), Refusal> {
        let share = share(self.clients.clients_max());
        let clients = || self.peers.values().filter(|peer| peer.is_client());
        if role == Role::Reader {
            let is_reader = |who| matches!(who, ClientIdentity::Client { role: Role::Reader, .. });
            let readers = clients().filter(|peer| is_reader(peer.who)).count();
            if readers >= share {
                return Err(Refusal::FullOfReaders { readers: readers as u64 });
            }
        }
        let own = rustix::process::geteuid().as_raw();
        let Some(user) = user.filter(|user| *user != 0 && *user != own) else { return Ok(()) };
        let count = clients().filter(|peer| peer.user == Some(user)).count();
        if count >= share {
            return Err(Refusal::FullForUser { clients: count as u64 });
        }
        Ok(())
    }

    /// Closes a connection without a client if there are too many: the oldest of the user that has
    /// most of them, so that no user crowds out another's.
    pub(super) fn thin_out(&mut self) {
        let strangers = self.peers.iter().filter(|(_, peer)| !peer.is_client());
        let strangers: Vec<_> = strangers.map(|(token, peer)| (*token, peer.user)).collect();
        if strangers.len() <= STRANGERS_MAX {
            return;
        }
        let of_user = |user| strangers.iter().filter(|(_, other)| *other == user).count();
        let Some((_, user)) = strangers.iter().max_by_key(|(_, user)| of_user(*user)) else {
            return;
        };
        let Some((oldest, _)) = strangers.iter().find(|(_, other)| other == user) else { return };
        let why = "dropped a connection: too many do not say who they are";
        match self.crowding.due(boot_time_ns()) {
            None => tracing::debug!("{why}"),
            Some(0) => tracing::warn!("{why}"),
            Some(others) => tracing::warn!(others, "{why}"),
        }
        self.disconnect(*oldest, &DisconnectReason::Crowded);
    }
}
