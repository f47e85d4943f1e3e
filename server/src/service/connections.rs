//! The connections of the control thread: what epoll watches them for, and their turns.
//!
//! Connections wait for their turn in one queue. After a bounded number of messages a connection
//! goes back to its end. So a client with many requests delays another only by one turn. A
//! connection without a client goes to the front: it has only one message to send.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use farside_control::{
    ConnectRequest, MESSAGE_BYTES_MAX, Refusal, Request, Role, ServerMessage, ServerRequest,
};
use farside_fabric::rdma::ConnectionId;
use farside_layout::CLIENT_IDS;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::client_connection::{ClientConnection, ClientIdentity, DisconnectReason, STRANGERS_MAX};
use super::probing::probe_first;
use crate::error::{ServerError, system};

/// Events taken at a time: one for each connection, the listener and the stop descriptor. So every
/// client with an unread message is in the queue before a chore may declare it unresponsive.
pub(super) const EVENTS_MAX: usize = CLIENT_IDS as usize + STRANGERS_MAX + 2;

pub(super) const LISTENER: u64 = 0;
pub(super) const STOP: u64 = 1;
pub(super) const FIRST_CONNECTION: u64 = 2;

/// A message of a connection.
pub(super) enum ReceivedMessage {
    /// The first message of a connection that has not identified itself.
    Hello(Result<ConnectRequest, Refusal>),
    /// A message of the client with this id, in this role.
    Request(u16, Role, Request),
}

/// All connections.
pub(super) struct Connections {
    epoll: OwnedFd,
    /// By token. Tokens rise, so of two connections the one with the lower token is older.
    pub(super) by_token: BTreeMap<u64, ClientConnection>,
    next_token: u64,
    /// The tokens of the connections that wait for their turn.
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
            by_token: BTreeMap::new(),
            next_token: FIRST_CONNECTION,
            queue: VecDeque::new(),
            receive_buffer: vec![0; MESSAGE_BYTES_MAX],
            send_buffer: Vec::with_capacity(MESSAGE_BYTES_MAX),
            snapshots_taken: 0,
        })
    }

    /// Has epoll watch a descriptor, whose events carry this token.
    pub(super) fn watch(&self, source: impl AsFd, token: u64) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
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

    /// Adds and watches a connection. Returns its token.
    pub(super) fn add(&mut self, connection: ClientConnection) -> io::Result<u64> {
        let token = self.next_token;
        self.watch(&connection, token)?;
        self.next_token += 1;
        self.by_token.insert(token, connection);
        Ok(token)
    }

    /// Removes a connection. Over verbs this fences its client: its queue pairs are destroyed when
    /// this returns.
    pub(super) fn remove(&mut self, token: u64) -> Option<ClientConnection> {
        let mut connection = self.by_token.remove(&token)?;
        // Closing the descriptor would not be enough: a copy in a forked child keeps it watched.
        let _ = self.unwatch(&connection);
        connection.close();
        Some(connection)
    }

    /// Removes all connections, when the service stops.
    pub(super) fn remove_all(&mut self) -> impl Iterator<Item = ClientConnection> + use<> {
        std::mem::take(&mut self.by_token).into_values()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &ClientConnection)> {
        self.by_token.iter().map(|(token, connection)| (*token, connection))
    }

    /// Adds a connection to the queue if it is not in it.
    pub(super) fn enqueue(&mut self, token: u64) {
        let connection = self.by_token.get_mut(&token);
        let Some(connection) = connection.filter(|connection| !connection.is_queued) else {
            return;
        };
        connection.is_queued = true;
        match connection.is_client() {
            true => self.queue.push_back(token),
            false => self.queue.push_front(token),
        }
    }

    /// Takes the next connection from the queue.
    pub(super) fn dequeue(&mut self) -> Option<u64> {
        let token = self.queue.pop_front()?;
        if let Some(connection) = self.by_token.get_mut(&token) {
            connection.is_queued = false;
        }
        Some(token)
    }

    /// Whether the connection exists and is not in the queue.
    pub(super) fn is_idle(&self, token: u64) -> bool {
        self.by_token.get(&token).is_some_and(|connection| !connection.is_queued)
    }

    /// Sends the unsent messages of a connection, then receives one. Returns `None` if there is
    /// none, or if an answer is still unsent.
    pub(super) fn receive(
        &mut self,
        token: u64,
    ) -> Result<Option<ReceivedMessage>, DisconnectReason> {
        let Some(connection) = self.by_token.get_mut(&token) else { return Ok(None) };
        connection.flush(&mut self.send_buffer)?;
        if connection.is_waiting() {
            return Ok(None);
        }
        let Some(bytes) = connection.receive(&mut self.receive_buffer)? else { return Ok(None) };
        let message = &self.receive_buffer[..bytes];
        Ok(Some(match connection.client {
            ClientIdentity::Stranger => ReceivedMessage::Hello(ConnectRequest::decode(message)),
            ClientIdentity::Client { id, role, .. } => {
                let request = Request::decode(message).map_err(DisconnectReason::broken)?;
                ReceivedMessage::Request(id, role, request)
            }
            ClientIdentity::Leaving => {
                return Err(DisconnectReason::broken("it speaks after its goodbye"));
            }
        }))
    }

    /// Sends an answer to a client, now or once there is room.
    pub(super) fn reply(
        &mut self,
        token: u64,
        reply: ServerMessage,
    ) -> Result<(), DisconnectReason> {
        let Some(connection) = self.by_token.get_mut(&token) else { return Ok(()) };
        connection.answer(reply, &mut self.send_buffer)
    }

    /// Sends a request to a client, now or once there is room.
    pub(super) fn ask(&mut self, token: u64, request: ServerRequest) {
        let Some(connection) = self.by_token.get_mut(&token) else { return };
        // If this fails, the client has disconnected, and epoll reports that anyway.
        let _ = connection.ask(request, &mut self.send_buffer);
        let _ = self.update_interest(token);
    }

    /// Sends a request to every writer. Returns the tokens of their connections.
    pub(super) fn ask_writers(&mut self, request: ServerRequest) -> Vec<u64> {
        let writers = self.iter().filter(|(_, client)| client.role() == Some(Role::Writer));
        let writers: Vec<u64> = writers.map(|(token, _)| token).collect();
        writers.iter().for_each(|token| self.ask(*token, request));
        writers
    }

    /// Has epoll watch a connection for the events that matter now.
    pub(super) fn update_interest(&mut self, token: u64) -> Result<(), DisconnectReason> {
        let Some(connection) = self.by_token.get_mut(&token) else { return Ok(()) };
        let wants = connection.wants();
        if wants != connection.watched {
            let data = epoll::EventData::new_u64(token);
            epoll::modify(&self.epoll, &*connection, data, wants)
                .map_err(|error| DisconnectReason::Unreachable(error.into()))?;
            connection.watched = wants;
        }
        Ok(())
    }

    /// Handles the end of a connection through a device. Drops the connection if it is a session's.
    /// Returns the token if it is a client's control channel.
    pub(super) fn end_connection(&mut self, id: ConnectionId) -> Option<u64> {
        let client = self.iter().find(|(_, connection)| connection.id == Some(id));
        let token = client.map(|(token, _)| token);
        if token.is_none() {
            for client in self.by_token.values_mut() {
                client.data.retain(|session| session.id() != id);
            }
        }
        token
    }

    /// Probes every client's device: through a session if one answers, because an answer on the
    /// control channel wakes this thread. If a device stays silent, its connection fails by itself.
    pub(super) fn probe(&mut self) {
        for connection in self.by_token.values_mut() {
            if !probe_first(&mut connection.data) {
                let _ = connection.channel.probe();
            }
        }
    }

    /// Returns the connection to close if too many have no client. It is the oldest one of the user
    /// that has most of them, so that no user crowds out another.
    pub(super) fn surplus(&self) -> Option<u64> {
        let strangers = self.iter().filter(|(_, connection)| !connection.is_client());
        let strangers: Vec<_> =
            strangers.map(|(token, connection)| (token, connection.user)).collect();
        if strangers.len() <= STRANGERS_MAX {
            return None;
        }
        let count_of = |user| strangers.iter().filter(|(_, other)| *other == user).count();
        let (_, user) = strangers.iter().max_by_key(|(_, user)| count_of(*user))?;
        let oldest = strangers.iter().find(|(_, other)| other == user);
        oldest.map(|(token, _)| *token)
    }

    /// Notes the progress of the snapshot that a client takes, in thousandths.
    pub(super) fn note_snapshot(&mut self, token: u64, permille: u32) {
        if let Some(connection) = self.by_token.get_mut(&token) {
            connection.snapshot_permille = (permille < 1000).then_some(permille);
            self.snapshots_taken += u64::from(permille == 1000);
        }
    }
}
