//! The connections of the control thread: what epoll watches them for, and their turns.
//!
//! Connections wait for their turn in one queue. Each gets a share and goes back to its end, so
//! that one with many requests delays another by a share at most. A connection without a client
//! goes first; it has one message to send.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use farside_control::{
    ConnectRequest, MESSAGE_BYTES_MAX, Purpose, Refusal, Reply, Request, Role, ServerRequest,
};
use farside_fabric::rdma::ConnectionId;
use farside_layout::CLIENTS_MAX;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::client_connection::{ClientConnection, ClientIdentity, DisconnectReason};
use super::probing::probe_first;
use crate::error::{ServerError, system};

/// Limit on connections without a client: not yet identified, or already signed off. Above it the
/// oldest is closed.
pub(super) const STRANGERS_MAX: usize = 64;
/// Events taken at a time: those of all connections, the listener and the end. So each client that
/// spoke by then has its turn, or waits for it, before a chore may call it mute.
pub(super) const EVENTS_MAX: usize = CLIENTS_MAX as usize + STRANGERS_MAX + 2;

pub(super) const LISTENER: u64 = 0;
pub(super) const STOP: u64 = 1;
pub(super) const FIRST_CONNECTION: u64 = 2;

/// A message of a connection.
pub(super) enum Received {
    /// Of a stranger.
    Hello(Result<ConnectRequest, Refusal>),
    /// Of the client with this id.
    Request(u16, Role, Request),
}

/// All connections.
pub(super) struct Connections {
    epoll: OwnedFd,
    /// By token; tokens rise, so the first that is no client is the oldest.
    by_token: BTreeMap<u64, ClientConnection>,
    next_token: u64,
    /// Connections whose turn is still to come, in their order.
    queue: VecDeque<u64>,
    received: Vec<u8>,
    sent: Vec<u8>,
    snapshots_taken: u64,
}

impl Connections {
    pub(super) fn new() -> Result<Self, ServerError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create epoll"))?;
        Ok(Self {
            epoll,
            by_token: BTreeMap::new(),
            next_token: FIRST_CONNECTION,
            queue: VecDeque::new(),
            received: vec![0; MESSAGE_BYTES_MAX],
            sent: Vec::with_capacity(MESSAGE_BYTES_MAX),
            snapshots_taken: 0,
        })
    }

    /// Watches a descriptor under this token.
    pub(super) fn watch(&self, source: impl AsFd, token: u64) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, source, data, epoll::EventFlags::IN)
    }

    pub(super) fn unwatch(&self, source: impl AsFd) -> rustix::io::Result<()> {
        epoll::delete(&self.epoll, source)
    }

    /// Waits until something can be read, or for so long.
    pub(super) fn wait(
        &self,
        events: &mut Vec<epoll::Event>,
        timeout: Option<&Timespec>,
    ) -> rustix::io::Result<()> {
        events.clear();
        epoll::wait(&self.epoll, spare_capacity(events), timeout).map(|_| ())
    }

    /// From here on the connection is watched.
    pub(super) fn add(&mut self, connection: ClientConnection) -> io::Result<u64> {
        let token = self.next_token;
        self.watch(&connection, token)?;
        self.next_token += 1;
        self.by_token.insert(token, connection);
        Ok(token)
    }

    /// The connection is served no more. Over verbs this fences its client: the queue pairs are
    /// gone when it returns.
    pub(super) fn remove(&mut self, token: u64) -> Option<ClientConnection> {
        let mut connection = self.by_token.remove(&token)?;
        // Explicitly, for a copy of the descriptor in a forked child would keep it watched.
        let _ = self.unwatch(&connection);
        connection.close();
        connection.data.clear();
        Some(connection)
    }

    /// All of them, for a service that ends.
    pub(super) fn remove_all(&mut self) -> impl Iterator<Item = ClientConnection> + use<> {
        std::mem::take(&mut self.by_token).into_values()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_token.is_empty()
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut ClientConnection> {
        self.by_token.get_mut(&token)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &ClientConnection)> {
        self.by_token.iter().map(|(token, connection)| (*token, connection))
    }

    /// A connection waits for its turn; once.
    pub(super) fn enqueue(&mut self, token: u64) {
        let connection = self.by_token.get_mut(&token);
        let Some(connection) = connection.filter(|of| !of.is_queued) else { return };
        connection.is_queued = true;
        match connection.is_client() {
            true => self.queue.push_back(token),
            false => self.queue.push_front(token),
        }
    }

    /// The connection whose turn it is.
    pub(super) fn dequeue(&mut self) -> Option<u64> {
        let token = self.queue.pop_front()?;
        self.by_token.get_mut(&token).into_iter().for_each(|of| of.is_queued = false);
        Some(token)
    }

    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the connection is there and has no turn to come.
    pub(super) fn is_idle(&self, token: u64) -> bool {
        self.by_token.get(&token).is_some_and(|of| !of.is_queued)
    }

    /// Sends what a connection waits for, and takes a message; `None` when there is none, or no
    /// room for an answer.
    pub(super) fn receive(&mut self, token: u64) -> Result<Option<Received>, DisconnectReason> {
        let Some(connection) = self.by_token.get_mut(&token) else { return Ok(None) };
        connection.flush(&mut self.sent)?;
        if connection.is_waiting() {
            return Ok(None);
        }
        let Some(bytes) = connection.receive(&mut self.received)? else { return Ok(None) };
        let message = &self.received[..bytes];
        Ok(Some(match connection.client {
            ClientIdentity::Stranger => Received::Hello(decode_hello(message)),
            ClientIdentity::Client { id, role, .. } => {
                let request = Request::decode(message).map_err(DisconnectReason::broken)?;
                Received::Request(id, role, request)
            }
            ClientIdentity::Leaving => {
                return Err(DisconnectReason::broken("it speaks after its goodbye"));
            }
        }))
    }

    /// Answers a client, now or once there is room.
    pub(super) fn reply(&mut self, token: u64, reply: Reply) -> Result<(), DisconnectReason> {
        let Some(connection) = self.by_token.get_mut(&token) else { return Ok(()) };
        connection.answer(reply, &mut self.sent)
    }

    /// Asks a client, now or once there is room.
    pub(super) fn ask(&mut self, token: u64, request: ServerRequest) {
        let Some(connection) = self.by_token.get_mut(&token) else { return };
        // A client that is gone already is found out soon: the event is there.
        let _ = connection.ask(request, &mut self.sent);
        let _ = self.update_interest(token);
    }

    /// Asks every writer; returns their connections.
    pub(super) fn ask_writers(&mut self, request: ServerRequest) -> Vec<u64> {
        let writers = self.iter().filter(|(_, of)| of.role() == Some(Role::Writer));
        let writers: Vec<u64> = writers.map(|(token, _)| token).collect();
        writers.iter().for_each(|token| self.ask(*token, request));
        writers
    }

    /// Watches a connection for what comes next.
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

    /// The other end of a connection through a device is gone. The token, if it is a client's
    /// control channel; a session ends here.
    pub(super) fn end(&mut self, id: ConnectionId) -> Option<u64> {
        let of_client = self.iter().find(|(_, of)| of.id == Some(id));
        let token = of_client.map(|(token, _)| token);
        if token.is_none() {
            let all = self.by_token.values_mut();
            all.for_each(|of| of.data.retain(|connection| connection.id() != id));
        }
        token
    }

    /// Asks every client's device for a sign of life: by a session if one answers, for the channel
    /// wakes this thread when it does. A client whose device is silent ends by itself.
    pub(super) fn probe(&mut self) {
        for connection in self.by_token.values_mut() {
            if !probe_first(&mut connection.data) {
                let _ = connection.channel.probe();
            }
        }
    }

    /// The connection to close if too many have no client: the oldest of the user that has most of
    /// them, so that no user crowds out another's.
    pub(super) fn surplus(&self) -> Option<u64> {
        let strangers = self.iter().filter(|(_, of)| !of.is_client());
        let strangers: Vec<_> = strangers.map(|(token, of)| (token, of.user)).collect();
        if strangers.len() <= STRANGERS_MAX {
            return None;
        }
        let of_user = |user| strangers.iter().filter(|(_, other)| *other == user).count();
        let (_, user) = strangers.iter().max_by_key(|(_, user)| of_user(*user))?;
        let oldest = strangers.iter().find(|(_, other)| other == user);
        oldest.map(|(token, _)| *token)
    }

    /// A client takes a snapshot and is so far, in thousandths.
    pub(super) fn note_snapshot(&mut self, token: u64, permille: u32) {
        if let Some(connection) = self.by_token.get_mut(&token) {
            connection.snapshot_permille = (permille < 1000).then_some(permille);
            self.snapshots_taken += u64::from(permille == 1000);
        }
    }

    /// How far the snapshots under way are, and how many were taken.
    pub(super) fn snapshots(&self) -> (impl Iterator<Item = u32>, u64) {
        let under_way = self.by_token.values().filter_map(|of| of.snapshot_permille);
        (under_way, self.snapshots_taken)
    }
}

/// What a stranger on this host wants: to be a client, for its sessions need no connection.
fn decode_hello(message: &[u8]) -> Result<ConnectRequest, Refusal> {
    let request = ConnectRequest::decode(message)?;
    match request.purpose {
        Purpose::Control => Ok(request),
        Purpose::Data { .. } => Err(Refusal::Malformed { bytes: message.len() as u64 }),
    }
}
