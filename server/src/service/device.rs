//! Clients anywhere: they come through an RDMA device, and say who they are in what RDMA-CM carries
//! for them.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use farside_config::ServerConfig;
use farside_control::{
    ServerRequest, ConnectRequest, Purpose, REQUEST_BYTES_MAX, Refusal, Role, Welcome, encode_reply,
};
use farside_fabric::shm::Region;
use farside_fabric::verbs::{
    ConnectionId, Event, Incoming, Listener, Loopback, Protection, RemoteRegion, VerbsError,
};
use farside_fabric::{Nanos, boot_time_ns};

use super::door::Door;
use super::probing::ask_first;
use super::roll_call::Call;
use super::{EVENTS_MAX, Service};
use crate::error::ServerError;
use crate::own_endpoint::LANES;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};

/// How many sessions a client may have.
const SESSIONS_MAX: usize = 4096;

/// A device, and the region as each role may reach it through it.
pub(super) struct Device {
    listener: Listener,
    writers: Protection,
    readers: Protection,
}

impl Device {
    pub(super) fn new(
        listener: Listener,
        region: &Arc<Region>,
        config: &ServerConfig,
    ) -> Result<Self, ServerError> {
        let address = listener.local_address();
        let address = address.ok_or(ServerError::NoDeviceAddress { listen: listen(config) })?;
        let writers = Protection::at(address, region, Role::Writer)?;
        let readers = Protection::at(address, region, Role::Reader)?;
        Ok(Self { listener, writers, readers })
    }

    /// The server's own way to the region (invariant I11).
    pub(super) fn loopback(&self, config: &ServerConfig) -> Result<Loopback, VerbsError> {
        self.writers.loopback(LANES, &config.rdma.options())
    }

    fn protection(&self, role: Role) -> &Protection {
        match role {
            Role::Writer => &self.writers,
            Role::Reader => &self.readers,
        }
    }
}

fn listen(config: &ServerConfig) -> String {
    config.listen.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// A number that nobody can guess; never 0, which is none.
fn new_ticket() -> std::io::Result<u64> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(random).max(1))
}

/// Listens at the first address of the host's that a device has.
pub(crate) fn bind(
    addresses: &[SocketAddr],
    config: &ServerConfig,
) -> Result<Listener, ServerError> {
    let mut failure = ServerError::NoDeviceAddress { listen: listen(config) };
    for address in addresses {
        if address.ip().is_unspecified() {
            continue;
        }
        match Listener::bind(*address, &config.rdma.options()) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error.into(),
        }
    }
    Err(failure)
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Service {
    /// Takes what the device has to tell; the rest keeps its descriptor readable.
    pub(super) fn take_events(&mut self) {
        for _ in 0..EVENTS_MAX {
            let Door::Device(device) = &mut self.door else { return };
            match device.listener.next_event() {
                Ok(None) => return,
                Ok(Some(Event::Request(incoming))) => self.let_in(incoming),
                Ok(Some(Event::Disconnected(id) | Event::DeviceRemoved(id))) => self.hang_up(id),
                Ok(Some(Event::Established(_))) => {}
                Err(error) => {
                    tracing::warn!("cannot take an event of the RDMA device: {error}");
                    return;
                }
            }
        }
    }

    fn let_in(&mut self, incoming: Incoming) {
        let bytes = incoming.private_data();
        // RDMA-CM pads with zeros.
        let bytes = bytes.get(..REQUEST_BYTES_MAX).unwrap_or(bytes);
        let request = ConnectRequest::decode(bytes)
            .and_then(|request| self.tokens.admit(&request).map(|()| request));
        let accepted = match (&self.door, request) {
            (_, Err(refusal)) => Err((incoming, refusal)),
            (Door::Device(device), Ok(_)) if !device.writers.serves(&incoming) => {
                Err((incoming, Refusal::Device))
            }
            (_, Ok(ConnectRequest { role, purpose, .. })) => match purpose {
                Purpose::Control => self.let_in_client(incoming, role),
                Purpose::Data { client_id, ticket } => {
                    self.let_in_session(incoming, (client_id, ticket, role))
                }
            },
        };
        if let Err((incoming, refusal)) = accepted {
            self.refusals.note(refusal, boot_time_ns());
            // Whoever does not get it learns less.
            let _ = incoming.reject(&encode_reply(&Err(refusal)));
        }
    }

    fn let_in_client(&mut self, incoming: Incoming, role: Role) -> Result<(), (Incoming, Refusal)> {
        // Over RDMA nothing tells users apart.
        let admitted = self.check_shares(role, None).and_then(|()| self.clients.admit());
        let (id, lease) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => return Err((incoming, refusal)),
        };
        let is_first = self.peers.is_empty();
        let added = new_ticket().map_err(|error| error.to_string()).and_then(|ticket| {
            let welcome = self.welcome_with_key((id, lease), ticket, role);
            let welcome = welcome.ok_or("there is no device")?;
            let accepted = incoming.accept_control(&encode_reply(&Ok(welcome)));
            let channel = accepted.map_err(|error| error.to_string())?;
            let connection = Some(channel.id());
            let mut peer = Peer::new(channel, ClientIdentity::Client { id, role, lease, ticket });
            peer.connection = connection;
            self.add_peer(peer).map_err(|error| error.to_string())
        });
        match added {
            Ok(token) => {
                tracing::info!(client = id, ?role, "a client connected");
                let now = boot_time_ns();
                self.probing.client_came(is_first, now);
                // A reader relies on no proof of a word.
                if role == Role::Writer {
                    self.roll_call.came(token, now);
                }
            }
            Err(error) => {
                self.take_back_admission(id);
                tracing::warn!("cannot serve a client just now: {error}");
            }
        }
        Ok(())
    }

    fn let_in_session(
        &mut self,
        incoming: Incoming,
        (client_id, ticket, role): (u16, u64, Role),
    ) -> Result<(), (Incoming, Refusal)> {
        let found = self.peers.iter().find_map(|(token, peer)| match peer.who {
            ClientIdentity::Client { id, role: of, lease, ticket: own } => {
                ((id, of, own) == (client_id, role, ticket)).then_some((*token, lease))
            }
            _ => None,
        });
        let unknown = Refusal::UnknownClient { client: client_id.into() };
        let Some((token, lease)) = found else { return Err((incoming, unknown)) };
        let welcome = self.welcome_with_key((client_id, lease), ticket, role);
        let (Door::Device(device), Some(welcome), Some(peer)) =
            (&self.door, welcome, self.peers.get_mut(&token))
        else {
            return Ok(());
        };
        if peer.data.len() >= SESSIONS_MAX {
            return Err((incoming, Refusal::Full { clients: SESSIONS_MAX as u64 }));
        }
        match incoming.accept_data(device.protection(role), &encode_reply(&Ok(welcome))) {
            Ok(connection) => peer.data.push(connection),
            Err(error) => tracing::warn!(client = client_id, "cannot serve a session: {error}"),
        }
        Ok(())
    }

    fn welcome_with_key(&self, admitted: (u16, u64), ticket: u64, role: Role) -> Option<Welcome> {
        let Door::Device(device) = &self.door else { return None };
        let remote = device.protection(role).remote();
        let RemoteRegion { base_address, rkey, round_trip_min_ns, .. } = remote;
        let welcome = self.welcome_of(admitted);
        Some(Welcome { base_address, rkey, round_trip_min_ns, ticket, ..welcome })
    }

    /// Asks the processes of writers for a sign of life when it is time, and fences those that gave
    /// none.
    pub(super) fn call_roll(&mut self, now: Nanos) {
        let Call { ask, silent } = self.roll_call.step(now);
        for token in ask {
            if let Some(peer) = self.peers.get_mut(&token) {
                // One that is gone already is found out soon, and what does not fit waits for room.
                let _ = peer.ask(ServerRequest::Alive, &mut self.reply);
                let _ = self.settle(token);
            }
        }
        for (token, ms) in silent {
            self.disconnect_silent(token, &DisconnectReason::Unanswered { ms });
        }
    }

    /// The other end of a connection is gone. What a client sent before that counts.
    fn hang_up(&mut self, id: ConnectionId) {
        let of_client = self.peers.iter().find(|(_, peer)| peer.connection == Some(id));
        if let Some(token) = of_client.map(|(token, _)| *token) {
            self.listen_to(token);
            return self.disconnect(token, &DisconnectReason::Gone);
        }
        for peer in self.peers.values_mut() {
            peer.data.retain(|connection| connection.id() != id);
        }
    }

    /// When to look after the hosts of clients.
    pub(super) fn next_probe_at(&self) -> Option<Nanos> {
        let is_device = matches!(self.door, Door::Device(_));
        self.probing.next_at().filter(|_| is_device && !self.peers.is_empty())
    }

    /// Asks every client's device for a sign of life: by a session if one answers, for the channel
    /// wakes this thread when it does. One that is silent ends by itself.
    pub(super) fn probe(&mut self, now: Nanos) {
        self.probing.begin(now);
        for peer in self.peers.values_mut() {
            if !ask_first(&mut peer.data) {
                let _ = peer.channel.probe();
            }
        }
    }
}
