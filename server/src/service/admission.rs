//! Clients that say in their request for a connection what they are: each is refused, or admitted
//! as a client or as a session of one.

use farside_control::{
    ConnectRequest, Purpose, REQUEST_BYTES_MAX, Refusal, Role, Welcome, encode_reply,
};
use farside_fabric::boot_time_ns;
use farside_fabric::rdma::{ConnectionId, RemoteRegion};

use super::Service;
use super::acceptor::ConnectionRequest;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};

/// How many sessions a client may have.
const SESSIONS_MAX: usize = 4096;

/// A request that the service refuses, and the reason.
type Refused = Result<(), (Box<dyn ConnectionRequest>, Refusal)>;

/// A number that cannot be guessed; never 0, which is none.
fn new_ticket() -> std::io::Result<u64> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(random).max(1))
}

impl Service {
    pub(super) fn let_in(&mut self, incoming: Box<dyn ConnectionRequest>) {
        let bytes = incoming.hello();
        // RDMA-CM pads with zeros.
        let bytes = bytes.get(..REQUEST_BYTES_MAX).unwrap_or(bytes);
        let request = ConnectRequest::decode(bytes)
            .and_then(|request| self.tokens.admit(&request).map(|()| request));
        let accepted = match request {
            Err(refusal) => Err((incoming, refusal)),
            Ok(_) if !incoming.reaches_region() => Err((incoming, Refusal::Device)),
            Ok(ConnectRequest { role, purpose, .. }) => match purpose {
                Purpose::Control => self.let_in_client(incoming, role),
                Purpose::Data { client_id, ticket } => {
                    self.let_in_session(incoming, (client_id, ticket, role))
                }
            },
        };
        if let Err((incoming, refusal)) = accepted {
            self.refusals.note(refusal, boot_time_ns());
            incoming.reject(&encode_reply(&Err(refusal)));
        }
    }

    fn let_in_client(&mut self, incoming: Box<dyn ConnectionRequest>, role: Role) -> Refused {
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
            let (channel, connection) = accepted.map_err(|error| error.to_string())?;
            let mut peer = Peer::new(channel, ClientIdentity::Client { id, role, lease, ticket });
            peer.connection = Some(connection);
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
        incoming: Box<dyn ConnectionRequest>,
        (client_id, ticket, role): (u16, u64, Role),
    ) -> Refused {
        let found = self.peers.iter().find_map(|(token, peer)| match peer.who {
            ClientIdentity::Client { id, role: of, lease, ticket: own } => {
                ((id, of, own) == (client_id, role, ticket)).then_some((*token, lease))
            }
            _ => None,
        });
        let unknown = Refusal::UnknownClient { client: client_id.into() };
        let Some((token, lease)) = found else { return Err((incoming, unknown)) };
        let welcome = self.welcome_with_key((client_id, lease), ticket, role);
        let (Some(welcome), Some(peer)) = (welcome, self.peers.get_mut(&token)) else {
            return Ok(());
        };
        if peer.data.len() >= SESSIONS_MAX {
            return Err((incoming, Refusal::Full { clients: SESSIONS_MAX as u64 }));
        }
        match incoming.accept_data(role, &encode_reply(&Ok(welcome))) {
            Ok(connection) => peer.data.push(connection),
            Err(error) => tracing::warn!(client = client_id, "cannot serve a session: {error}"),
        }
        Ok(())
    }

    fn welcome_with_key(&self, admitted: (u16, u64), ticket: u64, role: Role) -> Option<Welcome> {
        let remote = self.acceptor.remote(role)?;
        let RemoteRegion { base_address, rkey, round_trip_min_ns, .. } = remote;
        let welcome = self.welcome_of(admitted);
        Some(Welcome { base_address, rkey, round_trip_min_ns, ticket, ..welcome })
    }

    /// The other end of a connection is gone. What a client sent before that counts.
    pub(super) fn hang_up(&mut self, id: ConnectionId) {
        let of_client = self.peers.iter().find(|(_, peer)| peer.connection == Some(id));
        if let Some(token) = of_client.map(|(token, _)| *token) {
            self.listen_to(token);
            return self.disconnect(token, &DisconnectReason::Gone);
        }
        for peer in self.peers.values_mut() {
            peer.data.retain(|connection| connection.id() != id);
        }
    }
}
