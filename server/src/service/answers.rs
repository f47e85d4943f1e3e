//! The answers to requests of clients, of operators, and of those who want the cluster's map.

use std::time::Duration;

use farside_control::{
    CLIENTS_PER_MESSAGE_MAX, ConnectedClient, Request, Role, ServerMessage, ServerRequest,
    ServerStatistics,
};
use farside_fabric::{Nanos, boot_time_ns};
use farside_layout::BlockAddress;

use super::ControlService;
use super::client_connection::{
    AwaitedAnswer, ClientConnection, ClientIdentity, DisconnectReason, PushedMessage,
};
use crate::cluster::Changes;
use crate::error::ServerError;

/// The server asks its clients to describe themselves no sooner than this after the last time, so
/// that no client makes it ask all the time.
const DESCRIBE_NS_MIN: Nanos = 100_000_000;

impl ControlService {
    /// Answers a request of a client.
    pub(super) fn answer(
        &mut self,
        connection_number: u64,
        (client, role): (u16, Role),
        request: Request,
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let (reply, begins_recall) = match request {
            Request::TakeBlocks { .. }
            | Request::GiveBlocks { .. }
            | Request::GiveHeads { .. }
            | Request::Held { .. }
            | Request::Collect
            | Request::Split { .. }
            | Request::Expires
            | Request::Kick { .. }
                if role == Role::Reader =>
            {
                return Err(DisconnectReason::broken(
                    "a reader sent a request that only a writer may send",
                ));
            }
            Request::TakeBlocks { class, count } => self.keeper.take_blocks(class, count, now)?,
            Request::Split { directory_hash, local_depth } => {
                self.keeper.split((directory_hash, local_depth), now)?
            }
            Request::Statistics => (ServerMessage::Statistics(self.statistics(role, now)), false),
            Request::Collect => {
                let reply = ServerMessage::Statistics(self.statistics(role, now));
                self.keeper.collector.want(now);
                (reply, false)
            }
            Request::GiveBlocks { class, rested, blocks } => {
                let given = self.keeper.give_blocks(class, rested, blocks, now);
                return given.map_err(DisconnectReason::broken);
            }
            Request::GiveHeads { class, blocks } => {
                let given = self.keeper.give_heads(class, blocks, now)?;
                return given.map_err(DisconnectReason::broken);
            }
            Request::Held { collection, last, blocks } => {
                self.keeper.note_held(connection_number, (collection, last), blocks);
                return Ok(());
            }
            Request::Reads { found, absent, blocks } => {
                self.note_reads(connection_number, (found, absent), &blocks);
                return Ok(());
            }
            Request::Expires => {
                self.keeper.reaper.announce(client, now);
                return Ok(());
            }
            Request::Snapshot { permille } => {
                self.connections.note_snapshot(connection_number, permille);
                return Ok(());
            }
            Request::Alive { clock_ns } => {
                let answered = self.roll_call.answered(connection_number, clock_ns, now);
                return answered.map_err(|ms| DisconnectReason::ClockBehind { ms });
            }
            Request::Heartbeat { .. } | Request::Map | Request::NewerMap { .. } => {
                return self.answer_about_cluster(connection_number, request, now);
            }
            Request::Samples { .. }
            | Request::Description(_)
            | Request::Clients { .. }
            | Request::Kick { .. }
            | Request::Hot { .. } => {
                return self.answer_operator(connection_number, request, now);
            }
            Request::Goodbye => return Err(DisconnectReason::Goodbye),
        };
        self.connections.reply(connection_number, reply)?;
        if begins_recall {
            self.connections.ask_writers(ServerRequest::Return);
        }
        Ok(())
    }

    fn note_reads(&mut self, connection_number: u64, counts: (u64, u64), blocks: &[BlockAddress]) {
        // Without a question only the counts are noted.
        let was_asked = self.connections.take_question(AwaitedAnswer::Reads, connection_number);
        self.keeper.note_reads(counts, if was_asked { blocks } else { &[] });
    }

    pub(super) fn statistics(&mut self, role: Role, now: Nanos) -> ServerStatistics {
        let connections = self.connections.iter();
        let snapshots: Vec<u32> =
            connections.filter_map(|(_, connection)| connection.snapshot_permille).collect();
        ServerStatistics {
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.admission.clients.connected.into(),
            clients_lost: self.clients_lost,
            snapshots: snapshots.len() as u64,
            snapshot_permille: snapshots.into_iter().min().unwrap_or(0).into(),
            snapshots_taken: self.connections.snapshots_taken,
            huge_page_bytes: self.memory.huge_bytes(),
            operations: self.cluster.as_ref().map_or(0, |cluster| cluster.operations),
            ..self.keeper.statistics(role, now)
        }
    }

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

impl ControlService {
    /// Answers a message that concerns the cluster, out of order. `now` is after it was received.
    pub(super) fn answer_about_cluster(
        &mut self,
        connection_number: u64,
        request: Request,
        now: Nanos,
    ) -> Result<(), DisconnectReason> {
        let no_cluster = || DisconnectReason::broken("the server is a part of no cluster");
        let cluster = self.cluster.as_mut().ok_or_else(no_cluster)?;
        let connection = self.connections.by_number.get(&connection_number);
        let role = connection.and_then(ClientConnection::proved_role).unwrap_or(Role::Reader);
        let message = match request {
            Request::Heartbeat { clock_ns, operations } => {
                cluster.operations = cluster.operations.saturating_add(operations);
                if !cluster.answers_heartbeats(now) {
                    return Ok(());
                }
                PushedMessage::Heartbeat { clock_ns }
            }
            Request::Map => match cluster.map_message() {
                Some(message) => PushedMessage::Map(message),
                None => return Ok(()),
            },
            Request::NewerMap { map } => {
                return cluster.note_claim(&map, role, now).map_err(DisconnectReason::broken);
            }
            Request::Goodbye => return Err(DisconnectReason::Gone),
            _ => return Err(DisconnectReason::broken("it has no client")),
        };
        self.connections.push(connection_number, message);
        Ok(())
    }

    /// Takes the news of the cluster, and pushes a map that has changed.
    pub(super) fn take_cluster_news(&mut self) -> Result<(), ServerError> {
        let Some(cluster) = &mut self.cluster else { return Ok(()) };
        let Changes { map, own } = cluster.take_news()?;
        if let Some(view) = own {
            self.admission.serve_view(cluster.map().cluster, view);
            let (shard, number) = (view.shard, view.number);
            tracing::info!(shard, number, "FS-047 the server serves a shard of the cluster");
        }
        if let Some(message) = cluster.map_message().filter(|_| map) {
            self.connections.push_map(&message);
        }
        Ok(())
    }

    /// Tells the cluster that the server has stopped, after all clients were fenced.
    pub(super) fn leave_cluster(&mut self) {
        if let Some(cluster) = self.cluster.take() {
            cluster.leave(Duration::from_nanos(self.keeper.settle_ns()));
        }
    }

    /// Notes that the serving thread runs.
    pub(super) fn note_running(&mut self) {
        if let Some(cluster) = &mut self.cluster {
            cluster.note_running(boot_time_ns());
        }
    }
}
