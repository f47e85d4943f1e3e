//! The requests of operators: list the clients, disconnect one, list the hottest blocks.

use farside_control::{
    CLIENTS_PER_MESSAGE_MAX, ConnectedClient, Request, Role, ServerMessage, ServerRequest,
};
use farside_fabric::Nanos;

use super::ControlService;
use super::client_connection::{AwaitedAnswer, ClientConnection, ClientIdentity, DisconnectReason};

/// The server asks its clients to describe themselves no sooner than this after the last time, so
/// that no client makes it ask all the time.
const DESCRIBE_NS_MIN: Nanos = 100_000_000;

impl ControlService {
    /// Answers an operator's request, or stores a client's answer to a question that followed from
    /// one.
    pub(super) fn answer_operator(
        &mut self,
        connection_number: u64,
        request: Request,
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let reply = match request {
            Request::Description(description) => {
                if let Some(connection) = self.connections.by_number.get_mut(&connection_number) {
                    connection.description = Some((description, now));
                }
                return Ok(());
            }
            Request::Samples { blocks } => {
                if self.connections.take_question(AwaitedAnswer::Samples, connection_number) {
                    self.hot_blocks.add(&blocks);
                }
                return Ok(());
            }
            Request::Clients { from_id } => {
                let reply = self.list_clients(connection_number, from_id, now);
                if now >= self.describe_at {
                    self.describe_at = now.saturating_add(DESCRIBE_NS_MIN);
                    self.connections.ask_clients(ServerRequest::Describe);
                }
                reply
            }
            Request::Kick { client_id } => {
                let was_connected = self.kick(connection_number, client_id)?;
                ServerMessage::Kicked { was_connected }
            }
            Request::Hot { for_ms } => {
                let (samples, blocks) = self.hot_blocks.hottest(&self.keeper.opened.depot, now);
                self.hot_blocks.sample_for(for_ms, now);
                ServerMessage::Hot { samples, blocks }
            }
            _ => return Err(DisconnectReason::broken("no request of an operator")),
        };
        self.connections.reply(connection_number, reply)
    }

    /// Asks all clients for samples of their reads.
    pub(super) fn ask_for_samples(&mut self, now: Nanos) {
        let asked = self.connections.ask_for(AwaitedAnswer::Samples, self.hot_blocks.has_asked);
        self.hot_blocks.note_asked(asked, now);
    }

    fn list_clients(&self, asking: u64, from_id: u16, now: Nanos) -> ServerMessage {
        let identified = |(number, connection): (u64, &ClientConnection)| {
            let ClientIdentity::Client { id, role, .. } = connection.client else { return None };
            (id >= from_id).then_some((id, role, number))
        };
        let mut listed: Vec<_> = self.connections.iter().filter_map(identified).collect();
        listed.sort_unstable_by_key(|(id, ..)| *id);
        let last = listed.len() <= CLIENTS_PER_MESSAGE_MAX;
        listed.truncate(CLIENTS_PER_MESSAGE_MAX);
        let ms_since = |at: Nanos| now.saturating_sub(at) / 1_000_000;
        let client = |(id, role, number): (u16, Role, u64)| {
            let connection = self.connections.by_number.get(&number)?;
            let description = connection.description.as_ref();
            Some(ConnectedClient {
                id,
                role,
                fabric: connection.fabric,
                is_asking: number == asking,
                user: connection.user,
                connected_ms: ms_since(connection.connected_at),
                description: description.map(|(description, _)| description.clone()),
                description_age_ms: description.map_or(0, |(_, at)| ms_since(*at)),
            })
        };
        let clients = listed.into_iter().filter_map(client).collect();
        ServerMessage::Clients { last, clients }
    }

    /// Disconnects and fences the client with this id. Returns whether it was connected.
    fn kick(&mut self, asking: u64, client_id: u16) -> Result<bool, DisconnectReason> {
        let is_it = |connection: &ClientConnection| match connection.client {
            ClientIdentity::Client { id, .. } => id == client_id,
            _ => false,
        };
        let found = self.connections.iter().find(|(_, connection)| is_it(connection));
        match found.map(|(connection_number, _)| connection_number) {
            Some(own) if own == asking => Err(DisconnectReason::Kicked),
            Some(other) => {
                self.disconnect(other, &DisconnectReason::Kicked);
                Ok(true)
            }
            None => Ok(false),
        }
    }
}
