//! The connections of the serving thread: the events that epoll watches for, the queue for turns,
//! and the probes of the hosts of clients, because a host without power sends no disconnect.
//!
//! Connections wait for their turn in one queue. After a bounded number of messages a connection
//! goes back to the end of the queue. So a client with many requests delays other clients only by
//! one turn. A connection without a client goes to the front, because it has only two messages to
//! send.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use farside_control::{
    ConnectRequest, FabricKind, MESSAGE_BYTES_MAX, Proof, ProofMessage, Refusal, Request, Role,
    ServerMessage, ServerRequest,
};
use farside_fabric::Nanos;
use farside_fabric::rdma::{ConnectionId, ProbeState};
use farside_layout::CLIENT_IDS;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::acceptor::DataConnection;
use super::client_connection::{
    AwaitedAnswer, CLIENTLESS_MAX, CLIENTLESS_OVER_TCP_MAX, ClientConnection, ClientIdentity,
    DisconnectReason, MAP_CONNECTIONS_MAX, PushedMessage,
};
use crate::error::{ServerError, system};

/// How many events one call of epoll returns: one for each connection, the listener, the stop
/// descriptor, the news of the cluster and the questions of the metrics thread. So every client
/// with an unread message is in the queue before a chore may declare it unresponsive.
pub(super) const EVENTS_MAX: usize =
    CLIENT_IDS as usize + 2 * CLIENTLESS_MAX + CLIENTLESS_OVER_TCP_MAX + MAP_CONNECTIONS_MAX + 4;

/// The number of the listener in epoll's events.
pub(super) const LISTENER: u64 = 0;
/// The number of the stop descriptor in epoll's events.
pub(super) const STOP: u64 = 1;
/// The number of the news of the cluster in epoll's events.
pub(super) const CLUSTER: u64 = 2;
/// The number of the questions of the metrics thread in epoll's events.
pub(super) const METRICS: u64 = 3;
/// The number of the first connection. Each later connection has the next number.
pub(super) const FIRST_CONNECTION: u64 = 4;

/// A message of a connection.
pub(super) enum ReceivedMessage {
    /// The first message of a connection that has not identified itself.
    ConnectRequest(Result<ConnectRequest, Refusal>),
    /// The answer to a challenge.
    Proof(Proof),
    /// A message of the client with this id, in this role.
    Request(u16, Role, Request),
    /// A message of a connection for the map of the cluster.
    MapRequest(Request),
}

/// All connections.
pub(super) struct Connections {
    epoll: OwnedFd,
    /// By number. The numbers rise, so the older of two connections has the lower number.
    pub(super) by_number: BTreeMap<u64, ClientConnection>,
    next_number: u64,
    /// The numbers of the connections that wait for their turn.
    pub(super) queue: VecDeque<u64>,
    receive_buffer: Vec<u8>,
    send_buffer: Vec<u8>,
    /// The number of complete snapshots.
    pub(super) snapshots_taken: u64,
}

impl Connections {
    pub(super) fn new() -> Result<Self, ServerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create epoll"))?;
        Ok(Self {
            epoll,
            by_number: BTreeMap::new(),
            next_number: FIRST_CONNECTION,
            queue: VecDeque::new(),
            receive_buffer: vec![0; MESSAGE_BYTES_MAX],
            send_buffer: Vec::with_capacity(MESSAGE_BYTES_MAX),
            snapshots_taken: 0,
        })
    }

    /// Has epoll watch a descriptor, whose events carry this number.
    pub(super) fn watch(
        &self,
        source: impl AsFd,
        connection_number: u64,
    ) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(connection_number);
        epoll::add(&self.epoll, source, data, epoll::EventFlags::IN)
    }

    pub(super) fn unwatch(&self, source: impl AsFd) -> rustix::io::Result<()> {
        epoll::delete(&self.epoll, source)
    }

    /// Waits until a watched descriptor has an event, or until the timeout.
    pub(super) fn wait(
        &self,
        events: &mut Vec<epoll::Event>,
        timeout: Option<&Timespec>,
    ) -> rustix::io::Result<()> {
        events.clear();
        epoll::wait(&self.epoll, spare_capacity(events), timeout).map(|_| ())
    }

    /// Adds and watches a connection. Returns its number.
    pub(super) fn add(&mut self, connection: ClientConnection) -> io::Result<u64> {
        let connection_number = self.next_number;
        self.watch(&connection, connection_number)?;
        self.next_number += 1;
        self.by_number.insert(connection_number, connection);
        Ok(connection_number)
    }

    /// Removes and returns a connection. Over verbs this fences its client: it destroys the queue
    /// pairs before it returns.
    pub(super) fn remove(&mut self, connection_number: u64) -> Option<ClientConnection> {
        let mut connection = self.by_number.remove(&connection_number)?;
        // Closing the descriptor would not be enough: a copy in a forked child keeps it watched.
        let _ = self.unwatch(&connection);
        connection.close();
        Some(connection)
    }

    /// Removes and returns all connections, when the service stops.
    pub(super) fn remove_all(&mut self) -> impl Iterator<Item = ClientConnection> + use<> {
        std::mem::take(&mut self.by_number).into_values()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &ClientConnection)> {
        self.by_number
            .iter()
            .map(|(connection_number, connection)| (*connection_number, connection))
    }

    /// Adds a connection to the queue, unless the queue has it already.
    pub(super) fn enqueue(&mut self, connection_number: u64) {
        let connection = self.by_number.get_mut(&connection_number);
        let Some(connection) = connection.filter(|connection| !connection.is_queued) else {
            return;
        };
        connection.is_queued = true;
        match connection.client {
            ClientIdentity::Client { .. } | ClientIdentity::Map { .. } => {
                self.queue.push_back(connection_number);
            }
            ClientIdentity::Unidentified
            | ClientIdentity::Challenged(_)
            | ClientIdentity::Leaving => {
                self.queue.push_front(connection_number);
            }
        }
    }

    /// Takes the next connection from the queue, and returns its number.
    pub(super) fn dequeue(&mut self) -> Option<u64> {
        let connection_number = self.queue.pop_front()?;
        if let Some(connection) = self.by_number.get_mut(&connection_number) {
            connection.is_queued = false;
        }
        Some(connection_number)
    }

    /// Whether the connection exists and is not in the queue.
    pub(super) fn is_idle(&self, connection_number: u64) -> bool {
        self.by_number.get(&connection_number).is_some_and(|connection| !connection.is_queued)
    }

    /// Sends the unsent messages of a connection, then receives one message. Returns `None` if no
    /// message has arrived, or if an answer is still unsent.
    pub(super) fn receive(
        &mut self,
        connection_number: u64,
    ) -> Result<Option<ReceivedMessage>, DisconnectReason> {
        let Some(connection) = self.by_number.get_mut(&connection_number) else { return Ok(None) };
        connection.flush(&mut self.send_buffer)?;
        if connection.is_waiting() {
            return Ok(None);
        }
        let Some(bytes) = connection.receive(&mut self.receive_buffer)? else { return Ok(None) };
        let message = &self.receive_buffer[..bytes];
        Ok(Some(match connection.client {
            ClientIdentity::Unidentified => {
                ReceivedMessage::ConnectRequest(ConnectRequest::decode(message))
            }
            ClientIdentity::Challenged(_) => {
                let ProofMessage(proof) =
                    ProofMessage::decode(message).map_err(DisconnectReason::broken)?;
                ReceivedMessage::Proof(proof)
            }
            ClientIdentity::Client { id, role, .. } => {
                let request = Request::decode(message).map_err(DisconnectReason::broken)?;
                ReceivedMessage::Request(id, role, request)
            }
            ClientIdentity::Map { .. } => {
                let request = Request::decode(message).map_err(DisconnectReason::broken)?;
                ReceivedMessage::MapRequest(request)
            }
            ClientIdentity::Leaving => {
                return Err(DisconnectReason::broken("it speaks after its goodbye"));
            }
        }))
    }

    /// Sends an answer to a client, now or once the channel has room.
    pub(super) fn reply(
        &mut self,
        connection_number: u64,
        reply: ServerMessage,
    ) -> Result<(), DisconnectReason> {
        let Some(connection) = self.by_number.get_mut(&connection_number) else { return Ok(()) };
        connection.answer(reply, &mut self.send_buffer)
    }

    /// Pushes a message to the other end of a connection, now or once the channel has room.
    pub(super) fn push(&mut self, connection_number: u64, message: PushedMessage) {
        let Some(connection) = self.by_number.get_mut(&connection_number) else { return };
        // If this fails, the client has disconnected, and epoll reports that anyway.
        let _ = connection.push(message, &mut self.send_buffer);
        let _ = self.update_interest(connection_number);
    }

    /// Sends a request to a client, now or once the channel has room.
    pub(super) fn ask(&mut self, connection_number: u64, request: ServerRequest) {
        self.push(connection_number, PushedMessage::Request(request));
    }

    /// Pushes the map of the cluster to all clients and to all connections for the map.
    pub(super) fn push_map(&mut self, message: &Arc<[u8]>) {
        let wants_map = |connection: &ClientConnection| connection.proved_role().is_some();
        let wanting = self.iter().filter(|(_, connection)| wants_map(connection));
        let wanting: Vec<u64> = wanting.map(|(connection_number, _)| connection_number).collect();
        for connection_number in wanting {
            self.push(connection_number, PushedMessage::Map(Arc::clone(message)));
        }
    }

    /// Sends a request to every writer. Returns the numbers of their connections.
    pub(super) fn ask_writers(&mut self, request: ServerRequest) -> Vec<u64> {
        self.ask_each(request, |client| client.role() == Some(Role::Writer))
    }

    /// Asks every client, readers included. `counts` is whether the answers are taken. Returns how
    /// many are asked.
    pub(super) fn ask_for(&mut self, answer: AwaitedAnswer, counts: bool) -> usize {
        let asked = self.ask_clients(match answer {
            AwaitedAnswer::Reads => ServerRequest::Reads,
            AwaitedAnswer::Samples => ServerRequest::Samples,
        });
        for connection_number in &asked {
            if let Some(connection) = self.by_number.get_mut(connection_number) {
                connection.awaited[answer as usize] = counts;
            }
        }
        asked.len()
    }

    /// Returns whether the client was asked for this, and has not answered before.
    pub(super) fn take_question(&mut self, answer: AwaitedAnswer, connection_number: u64) -> bool {
        let connection = self.by_number.get_mut(&connection_number);
        connection
            .is_some_and(|connection| std::mem::take(&mut connection.awaited[answer as usize]))
    }

    /// Sends a request to every client, readers included. Returns the numbers of their connections.
    pub(super) fn ask_clients(&mut self, request: ServerRequest) -> Vec<u64> {
        self.ask_each(request, ClientConnection::is_client)
    }

    fn ask_each(
        &mut self,
        request: ServerRequest,
        is_asked: impl Fn(&ClientConnection) -> bool,
    ) -> Vec<u64> {
        let asked = self.iter().filter(|(_, client)| is_asked(client));
        let asked: Vec<u64> = asked.map(|(connection_number, _)| connection_number).collect();
        asked.iter().for_each(|connection_number| self.ask(*connection_number, request));
        asked
    }

    /// Has epoll watch a connection for the events that [`ClientConnection::wants`] returns now.
    pub(super) fn update_interest(
        &mut self,
        connection_number: u64,
    ) -> Result<(), DisconnectReason> {
        let Some(connection) = self.by_number.get_mut(&connection_number) else { return Ok(()) };
        let wants = connection.wants();
        if wants != connection.watched {
            let data = epoll::EventData::new_u64(connection_number);
            epoll::modify(&self.epoll, &*connection, data, wants)
                .map_err(|error| DisconnectReason::Unreachable(error.into()))?;
            connection.watched = wants;
        }
        Ok(())
    }

    /// Handles the end of a connection of this acceptor. Drops the connection if it is a session's.
    /// Returns the number of the connection if it is a client's control channel.
    pub(super) fn end_connection(&mut self, acceptor: usize, id: ConnectionId) -> Option<u64> {
        let client = self.iter().find(|(_, connection)| connection.id == Some((acceptor, id)));
        let connection_number = client.map(|(connection_number, _)| connection_number);
        if connection_number.is_none() {
            let is_its = |client: &&mut ClientConnection| client.came_through(acceptor);
            for client in self.by_number.values_mut().filter(is_its) {
                client.data.retain(|session| session.id() != id);
            }
        }
        connection_number
    }

    /// Probes every client's device. It probes through a session if one answers, because an answer
    /// on the control channel wakes this thread. If a device stays silent, its connection fails by
    /// itself. Returns the number of clients, and how many of their sessions were found dead.
    pub(super) fn probe(&mut self) -> (u64, u64) {
        let mut dead = 0;
        for connection in self.by_number.values_mut() {
            let before = connection.data.len();
            if !probe_first(&mut connection.data) {
                let _ = connection.channel.probe();
            }
            dead += (before - connection.data.len()) as u64;
        }
        (self.by_number.len() as u64, dead)
    }

    /// Returns the number of the connection to close if too many connections of a fabric have no
    /// client. Those for the map of the cluster have a limit of their own.
    pub(super) fn surplus(&self) -> Option<(u64, DisconnectReason)> {
        let is_for_map =
            |connection: &ClientConnection| matches!(connection.client, ClientIdentity::Map { .. });
        let maps = self.surplus_above(MAP_CONNECTIONS_MAX, is_for_map);
        let maps = maps.map(|number| (number, DisconnectReason::CrowdedByMaps));
        let fabrics = [FabricKind::Shm, FabricKind::Tcp, FabricKind::Rdma].into_iter();
        let mut clientless = fabrics.filter_map(|fabric| {
            let max =
                if fabric == FabricKind::Tcp { CLIENTLESS_OVER_TCP_MAX } else { CLIENTLESS_MAX };
            let number = self.surplus_above(max, |connection| {
                connection.fabric == fabric && !is_for_map(connection)
            })?;
            Some((number, DisconnectReason::Crowded { max }))
        });
        clientless.next().or(maps)
    }

    /// The user or the host with most of these connections loses the oldest of its own, so that
    /// none crowds out another.
    fn surplus_above(&self, max: usize, is_one: impl Fn(&ClientConnection) -> bool) -> Option<u64> {
        let clientless =
            self.iter().filter(|(_, connection)| !connection.is_client() && is_one(connection));
        let clientless: Vec<_> = clientless
            .map(|(number, connection)| (number, (connection.user, connection.host)))
            .collect();
        if clientless.len() <= max {
            return None;
        }
        let mut counts = BTreeMap::new();
        clientless.iter().for_each(|(_, origin)| *counts.entry(*origin).or_insert(0) += 1);
        let (origin, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let oldest = clientless.iter().find(|(_, other)| *other == origin);
        oldest.map(|(connection_number, _)| *connection_number)
    }

    /// Notes the progress of the snapshot that a client takes, in thousandths.
    pub(super) fn note_snapshot(&mut self, connection_number: u64, permille: u32) {
        if let Some(connection) = self.by_number.get_mut(&connection_number) {
            connection.snapshot_permille = (permille < 1000).then_some(permille);
            self.snapshots_taken += u64::from(permille == 1000);
        }
    }
}

/// The time of the next probe.
pub(super) struct Probing {
    /// Pause between two probes; 0 disables them.
    period_ns: Nanos,
    /// When all clients were probed last, or when the first of them connected.
    probed_at: Nanos,
}

impl Probing {
    pub(super) fn every(period_ns: Nanos) -> Self {
        Self { period_ns, probed_at: 0 }
    }

    /// Notes that a client connected. Only the first client sets the time of the next probe.
    /// Otherwise clients that keep connecting would postpone every probe.
    pub(super) fn note_connected(&mut self, is_first: bool, now: Nanos) {
        if is_first {
            self.probed_at = now;
        }
    }

    /// Notes that all clients are probed now.
    pub(super) fn begin(&mut self, now: Nanos) {
        self.probed_at = now;
    }

    /// Returns when to probe next, if there are clients.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        (self.period_ns > 0).then(|| self.probed_at.saturating_add(self.period_ns))
    }
}

/// Probes the first of a client's sessions. Returns whether the session answered the previous
/// probe, or was not probed yet.
///
/// A dead session is dropped. This does not mean that the client is dead: the packet with which it
/// disconnected the session may have been lost.
pub(super) fn probe_first<C: DataConnection + ?Sized>(sessions: &mut Vec<Box<C>>) -> bool {
    let Some(first) = sessions.first_mut() else { return false };
    let state = first.probe_state();
    if matches!(state, Ok(ProbeState::Dead)) {
        sessions.remove(0);
        return false;
    }
    // A session that cannot be probed is disconnecting, and an event will report it.
    let _ = first.probe();
    matches!(state, Ok(ProbeState::Idle | ProbeState::Alive))
}

#[cfg(test)]
mod tests {
    use std::io;

    use farside_fabric::rdma::ConnectionId;

    use super::*;

    /// A session in this state, and how often it was probed.
    struct Fake(ProbeState, u32);

    impl DataConnection for Fake {
        fn id(&self) -> ConnectionId {
            ConnectionId(0)
        }

        fn probe_state(&mut self) -> io::Result<ProbeState> {
            Ok(self.0)
        }

        fn probe(&mut self) -> io::Result<()> {
            self.1 += 1;
            Ok(())
        }
    }

    #[test]
    fn a_dead_session_is_dropped_and_the_next_is_probed() {
        let mut sessions =
            vec![Box::new(Fake(ProbeState::Dead, 0)), Box::new(Fake(ProbeState::Idle, 0))];
        assert!(!probe_first(&mut sessions), "the channel has to show whether the client is alive");
        assert_eq!(sessions.len(), 1);
        assert!(probe_first(&mut sessions));
        assert_eq!(sessions[0].1, 1);
        sessions[0].0 = ProbeState::Alive;
        assert!(probe_first(&mut sessions));
        // While the device retransmits the probe.
        sessions[0].0 = ProbeState::Pending;
        assert!(!probe_first(&mut sessions));
        assert_eq!(sessions.len(), 1);
        sessions[0].0 = ProbeState::Dead;
        assert!(!probe_first(&mut sessions) && sessions.is_empty());
        assert!(!probe_first(&mut sessions));
    }

    #[test]
    fn clients_that_connect_and_disconnect_postpone_no_probe() {
        let mut probing = Probing::every(1000);
        probing.note_connected(true, 5000);
        for now in [5400, 5800, 5999] {
            probing.note_connected(false, now);
            assert_eq!(probing.next_at(), Some(6000));
        }
        probing.begin(6000);
        assert_eq!(probing.next_at(), Some(7000));
        probing.note_connected(true, 9000);
        assert_eq!(probing.next_at(), Some(10_000), "there was no client before");
    }

    #[test]
    fn a_period_of_0_means_no_probes() {
        let mut probing = Probing::every(0);
        probing.note_connected(true, 5000);
        assert_eq!(probing.next_at(), None);
    }
}
