//! One connection of the serving thread: its client, and the messages that wait to be sent.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use farside_control::{
    ClientDescription, ControlChannel, FabricKind, Handshake, Refusal, Role, ServerMessage,
    ServerRequest,
};
use farside_fabric::rdma::ConnectionId;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use rustix::event::epoll::EventFlags;

use super::acceptor::DataConnection;
use super::proofs::SessionGate;
use crate::chores::collect::REPORT_NS_MAX;

/// Limit on connections of a fabric without a client: they have not proved anything, or have signed
/// off. Above the limit the server closes one of them: see `Connections::surplus`. Over RDMA each
/// has half a megabyte of pinned memory.
pub(super) const CLIENTLESS_MAX: usize = 64;
/// As [`CLIENTLESS_MAX`], over TCP, where many hosts may connect at once.
pub(super) const CLIENTLESS_OVER_TCP_MAX: usize = 256;
/// How long a client may take to prove that it knows the secret, and a refused one to hang up.
pub(super) const PROOF_NS_MAX: Nanos = 5_000_000_000;
/// Limit on connections for the map of the cluster. Above it the server closes one of them.
pub(super) const MAP_CONNECTIONS_MAX: usize = 1024;

/// The client at the other end of a connection, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientIdentity {
    /// Not identified yet.
    Unidentified,
    /// It has to prove that it knows the secret.
    Challenged(Handshake),
    Client {
        id: u16,
        role: Role,
        lease: u64,
    },
    /// A client that said goodbye, or that was refused. When it hangs up, it has read its last
    /// answer.
    Leaving,
    /// No client: the connection is for the map of the cluster. Its other end has proved that it
    /// may connect in this role.
    Map {
        role: Role,
    },
}

/// An answer that the server takes once for each question.
#[derive(Clone, Copy)]
pub(super) enum AwaitedAnswer {
    /// The blocks that the client has read, for eviction.
    Reads,
    /// A sample of its reads, for an operator.
    Samples,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum DisconnectReason {
    #[error("it said goodbye")]
    Goodbye,
    #[error("it disconnected without a goodbye")]
    Gone,
    #[error("it was refused: {0}")]
    Refused(Refusal),
    #[error("it breaks the protocol: {0}")]
    Broken(String),
    #[error("the server does not reach the region: {0}")]
    Failed(#[from] ChainError),
    #[error("it cannot be answered: {0}")]
    Unreachable(io::Error),
    #[error("its host does not answer")]
    HostSilent,
    #[error("it did not report its blocks within {} s", REPORT_NS_MAX / 1_000_000_000)]
    ReportOverdue,
    #[error("its process did not answer for {ms} ms")]
    ProcessSilent { ms: u64 },
    #[error("its clock fell {ms} ms behind the server's")]
    ClockBehind { ms: u64 },
    #[error("an operator disconnected it")]
    Kicked,
    #[error("it did not prove within {} s that it knows the secret", PROOF_NS_MAX / 1_000_000_000)]
    ProofOverdue,
    #[error("more than {max} connections have no client")]
    Crowded { max: usize },
    #[error("more than {MAP_CONNECTIONS_MAX} connections are for the map of the cluster")]
    CrowdedByMaps,
}

impl DisconnectReason {
    pub(super) fn broken(why: impl ToString) -> Self {
        Self::Broken(why.to_string())
    }
}

/// A message outside of the order of requests and answers. Of each kind only the latest counts.
#[derive(Clone, Debug)]
pub(super) enum PushedMessage {
    Heartbeat {
        clock_ns: u64,
    },
    Request(ServerRequest),
    /// An encoded `ServerMessage::Map`.
    Map(Arc<[u8]>),
}

/// The number of kinds of pushed messages.
const PUSHED_KINDS: usize = 8;

impl PushedMessage {
    /// Returns the rank by which pushed messages are sent; 0 is sent first.
    fn urgency(&self) -> usize {
        match self {
            Self::Heartbeat { .. } => 0,
            Self::Request(ServerRequest::Alive) => 1,
            Self::Request(ServerRequest::Report { .. }) => 2,
            Self::Request(ServerRequest::Return) => 3,
            Self::Map(_) => 4,
            Self::Request(ServerRequest::Reads) => 5,
            Self::Request(ServerRequest::Samples) => 6,
            Self::Request(ServerRequest::Describe) => 7,
        }
    }

    fn encode(&self, buffer: &mut Vec<u8>) {
        match self {
            Self::Heartbeat { clock_ns } => {
                ServerMessage::Heartbeat { clock_ns: *clock_ns }.encode(buffer);
            }
            Self::Request(request) => ServerMessage::Request(*request).encode(buffer),
            Self::Map(message) => {
                buffer.clear();
                buffer.extend_from_slice(message);
            }
        }
    }
}

/// A connection. At most one answer waits to be sent. Until it is sent, the server reads no further
/// request, so a client that does not read its answers fills only its own socket.
pub(super) struct ClientConnection {
    pub(super) channel: Box<dyn ControlChannel>,
    /// The number of its acceptor, and the identifier of its control channel in the acceptor's
    /// events. The sessions of a client come through the same acceptor. `None` on shared memory.
    pub(super) id: Option<(usize, ConnectionId)>,
    /// The connections of its sessions to the region, over verbs.
    pub(super) data: Vec<Box<dyn DataConnection>>,
    /// Decides which connections are its sessions'; `None` on shared memory, or without a client.
    pub(super) gate: Option<SessionGate>,
    pub(super) client: ClientIdentity,
    /// The fabric through which it came.
    pub(super) fabric: FabricKind,
    pub(super) connected_at: Nanos,
    /// The last description that its client sent of itself, and when it arrived.
    pub(super) description: Option<(ClientDescription, Nanos)>,
    /// The user of the client, if it is on this host.
    pub(super) user: Option<u32>,
    /// The host of the client, over TCP.
    pub(super) host: Option<IpAddr>,
    /// Whether the connection is in the queue for a turn of the serving thread.
    pub(super) is_queued: bool,
    /// The events for which epoll watches the connection.
    pub(super) watched: EventFlags,
    /// The progress of the snapshot that its client takes, in thousandths.
    pub(super) snapshot_permille: Option<u32>,
    /// Whether the client was asked, and has not answered yet. By [`AwaitedAnswer`].
    pub(super) awaited: [bool; 2],
    unsent: Option<ServerMessage>,
    last_sent: Option<ServerMessage>,
    /// The pushed messages to send once the channel has room, by their urgency.
    pushed: [Option<PushedMessage>; PUSHED_KINDS],
    /// The client has closed its end. Nothing can be sent to it, but the messages that it sent
    /// before can still be read.
    is_closed: bool,
    /// The client closed its end before it read `last_sent`. Whether it read earlier messages is
    /// unknown.
    missed_last: bool,
}

impl ClientConnection {
    pub(super) fn new(
        channel: Box<dyn ControlChannel>,
        client: ClientIdentity,
        fabric: FabricKind,
    ) -> Self {
        Self {
            channel,
            id: None,
            data: Vec::new(),
            gate: None,
            client,
            fabric,
            connected_at: boot_time_ns(),
            description: None,
            user: None,
            host: None,
            is_queued: false,
            watched: EventFlags::IN,
            snapshot_permille: None,
            awaited: [false; 2],
            unsent: None,
            last_sent: None,
            pushed: Default::default(),
            is_closed: false,
            missed_last: false,
        }
    }

    /// Whether this acceptor accepted it, and so the connections of its sessions.
    pub(super) fn came_through(&self, acceptor: usize) -> bool {
        self.id.is_some_and(|(through, _)| through == acceptor)
    }

    pub(super) fn is_client(&self) -> bool {
        self.role().is_some()
    }

    /// The role of its client; `None` if it has no client.
    pub(super) fn role(&self) -> Option<Role> {
        match self.client {
            ClientIdentity::Client { role, .. } => Some(role),
            _ => None,
        }
    }

    /// The role that its other end has proved: that of its client, or of a connection for the map.
    pub(super) fn proved_role(&self) -> Option<Role> {
        match self.client {
            ClientIdentity::Client { role, .. } | ClientIdentity::Map { role } => Some(role),
            ClientIdentity::Unidentified
            | ClientIdentity::Challenged(_)
            | ClientIdentity::Leaving => None,
        }
    }

    /// Whether an answer waits until the client has read earlier ones.
    pub(super) fn is_waiting(&self) -> bool {
        self.unsent.is_some()
    }

    /// Returns the events for which epoll should watch the connection.
    pub(super) fn wants(&self) -> EventFlags {
        let has_pushed = self.has_pushed() || self.channel.has_unsent();
        match (self.is_waiting(), has_pushed && !self.is_closed) {
            _ if !self.channel.signals_room_as_writable() => EventFlags::IN,
            (true, _) => EventFlags::OUT,
            // It has no answer pending, so its requests are still read.
            (false, true) => EventFlags::IN | EventFlags::OUT,
            (false, false) => EventFlags::IN,
        }
    }

    /// Receives one message, and returns its length; `None` if no message has arrived.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, DisconnectReason> {
        match self.channel.receive(buffer) {
            Ok(Some(0)) => {
                // If the client closed between the check for an error and the check for data in
                // this call, the error is still pending.
                let error = rustix::net::sockopt::socket_error(&self.channel);
                self.missed_last |= error == Ok(Err(rustix::io::Errno::CONNRESET));
                Err(DisconnectReason::Gone)
            }
            Ok(received) => Ok(received),
            Err(error) => match error.kind() {
                io::ErrorKind::InvalidData => Err(DisconnectReason::broken(error)),
                // Over TCP the system reports an unreachable host only after it was silent for too
                // long.
                io::ErrorKind::TimedOut
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable => Err(DisconnectReason::HostSilent),
                // The system reports this error once, before the messages that the client sent, one
                // of which may be its goodbye.
                io::ErrorKind::ConnectionReset if !self.missed_last => {
                    (self.is_closed, self.missed_last) = (true, true);
                    Ok(None)
                }
                _ => Err(DisconnectReason::Gone),
            },
        }
    }

    /// Sends an answer, now or once the channel has room.
    pub(super) fn answer(
        &mut self,
        reply: ServerMessage,
        buffer: &mut Vec<u8>,
    ) -> Result<(), DisconnectReason> {
        debug_assert!(!self.is_waiting());
        self.unsent = Some(reply);
        self.flush(buffer)
    }

    /// Pushes a message, now or once the channel has room. It replaces an unsent one of the same
    /// kind.
    pub(super) fn push(
        &mut self,
        message: PushedMessage,
        buffer: &mut Vec<u8>,
    ) -> Result<(), DisconnectReason> {
        let urgency = message.urgency();
        self.pushed[urgency] = Some(message);
        self.flush(buffer)
    }

    fn has_pushed(&self) -> bool {
        self.pushed.iter().any(Option::is_some)
    }

    /// Sends the answer that waits, then the pushed messages that wait.
    pub(super) fn flush(&mut self, buffer: &mut Vec<u8>) -> Result<(), DisconnectReason> {
        if let Some(reply) = &self.unsent {
            reply.encode(buffer);
            if self.send(buffer)? {
                // Other answers hold nothing that must be taken back.
                let is_kept = |it: &ServerMessage| matches!(it, ServerMessage::Blocks { .. });
                self.last_sent = self.unsent.take().filter(is_kept);
            }
        }
        for urgency in 0..PUSHED_KINDS {
            let Some(message) = self.pushed[urgency].as_ref().filter(|_| self.unsent.is_none())
            else {
                continue;
            };
            message.encode(buffer);
            if !self.send(buffer)? {
                return Ok(());
            }
            self.pushed[urgency] = None;
            // If the client closes with a message unread, that may be only this one.
            self.last_sent = None;
        }
        Ok(())
    }

    /// Sends a message. Returns false if the channel has no room, or if the client has closed its
    /// end.
    fn send(&mut self, message: &[u8]) -> Result<bool, DisconnectReason> {
        if self.is_closed {
            return Ok(false);
        }
        match self.channel.send(message) {
            Ok(()) => return Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                // Not an error: the client's last requests must still be read.
                io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::NotConnected => self.is_closed = true,
                io::ErrorKind::ConnectionReset => {
                    (self.is_closed, self.missed_last) = (true, true);
                }
                _ => return Err(DisconnectReason::Unreachable(error)),
            },
        }
        Ok(false)
    }

    /// Closes the connections of the sessions, and sends no more answers. Over verbs this fences
    /// the client: it destroys the queue pairs before it returns.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.data.clear();
    }

    /// Takes and returns the answers that the client certainly did not read.
    pub(super) fn take_undelivered(&mut self) -> [Option<ServerMessage>; 2] {
        let unsent = if self.is_closed { self.unsent.take() } else { None };
        let missed = if self.missed_last { self.last_sent.take() } else { None };
        [unsent, missed]
    }
}

impl AsFd for ClientConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
