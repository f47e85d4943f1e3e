//! What the serving thread does about the cluster.

use std::time::Duration;

use farside_control::{Request, Role};
use farside_fabric::{Nanos, boot_time_ns};

use super::ControlService;
use super::client_connection::{ClientConnection, DisconnectReason, PushedMessage};
use crate::cluster::Changes;
use crate::error::ServerError;

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
