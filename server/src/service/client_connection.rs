//! One connection as the control thread sees it: its client, and what it has not received yet.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use farside_control::{ControlChannel, Refusal, Reply, Role, ServerRequest};
use farside_fabric::ChainError;
use farside_fabric::rdma::ConnectionId;
use rustix::event::epoll::EventFlags;

use super::acceptor::DataConnection;
use super::connections::STRANGERS_MAX;
use crate::collect::ANSWER_NS;

/// The client at the other end of a connection, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientIdentity {
    /// Not identified yet.
    Stranger,
    Client {
        id: u16,
        role: Role,
        lease: u64,
        /// What its sessions have to show, over verbs.
        ticket: u64,
    },
    /// A client that said goodbye. Whether it took its last answer shows when it hangs up.
    Leaving,
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
    Silent,
    #[error("it did not report its blocks within {} s", ANSWER_NS / 1_000_000_000)]
    Mute,
    #[error("its process did not answer for {ms} ms")]
    Unanswered { ms: u64 },
    #[error("its clock fell {ms} ms behind the server's")]
    ClockBehind { ms: u64 },
    #[error("more than {STRANGERS_MAX} connections have no client")]
    Crowded,
}

impl DisconnectReason {
    pub(super) fn broken(why: impl ToString) -> Self {
        Self::Broken(why.to_string())
    }
}

/// Which request goes first: the most urgent is 0.
fn urgency(ask: ServerRequest) -> usize {
    match ask {
        ServerRequest::Alive => 0,
        ServerRequest::Report { .. } => 1,
        ServerRequest::Return => 2,
    }
}

/// A connection. It has at most one answer that was not sent: until then it is not read from, so
/// that a client that asks and does not listen fills its own socket and nothing else.
pub(super) struct ClientConnection {
    pub(super) channel: Box<dyn ControlChannel>,
    /// What events of the RDMA device call its control channel.
    pub(super) id: Option<ConnectionId>,
    /// Its sessions' ways to the region, over verbs.
    pub(super) data: Vec<Box<dyn DataConnection>>,
    pub(super) client: ClientIdentity,
    /// The user at the other end, on this host.
    pub(super) user: Option<u32>,
    /// It waits for a turn of the control thread.
    pub(super) is_queued: bool,
    /// What epoll watches it for.
    pub(super) watched: EventFlags,
    /// How far the snapshot is that it takes.
    pub(super) snapshot_permille: Option<u32>,
    unsent: Option<Reply>,
    last_sent: Option<Reply>,
    /// What it is to be asked once there is room, by [`urgency`].
    asks: [Option<ServerRequest>; 3],
    /// The other end is closed: it gets nothing any more, but what it sent before is still here.
    is_closed: bool,
    /// It closed before it took `last_sent`; what it left before that is unknown.
    missed_last: bool,
}

impl ClientConnection {
    pub(super) fn new(channel: Box<dyn ControlChannel>, client: ClientIdentity) -> Self {
        Self {
            channel,
            id: None,
            data: Vec::new(),
            client,
            user: None,
            is_queued: false,
            watched: EventFlags::IN,
            snapshot_permille: None,
            unsent: None,
            last_sent: None,
            asks: [None; 3],
            is_closed: false,
            missed_last: false,
        }
    }

    pub(super) fn is_client(&self) -> bool {
        self.role().is_some()
    }

    /// What its client may do, if it has one.
    pub(super) fn role(&self) -> Option<Role> {
        match self.client {
            ClientIdentity::Client { role, .. } => Some(role),
            ClientIdentity::Stranger | ClientIdentity::Leaving => None,
        }
    }

    /// Whether an answer waits until the client takes those before it.
    pub(super) fn is_waiting(&self) -> bool {
        self.unsent.is_some()
    }

    /// What epoll should watch it for.
    pub(super) fn wants(&self) -> EventFlags {
        let is_asking = self.next_ask().is_some();
        match (self.is_waiting(), is_asking && !self.is_closed) {
            _ if !self.channel.is_writable_with_room() => EventFlags::IN,
            (true, _) => EventFlags::OUT,
            // What it says meanwhile may be what makes it ask for less.
            (false, true) => EventFlags::IN | EventFlags::OUT,
            (false, false) => EventFlags::IN,
        }
    }

    /// Receives one message; `None` if there is none after all.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, DisconnectReason> {
        match self.channel.receive(buffer) {
            Ok(Some(0)) => {
                // It may have closed between this call's look for an error and its look for data.
                let error = rustix::net::sockopt::socket_error(&self.channel);
                self.missed_last |= error == Ok(Err(rustix::io::Errno::CONNRESET));
                Err(DisconnectReason::Gone)
            }
            Ok(received) => Ok(received),
            Err(error) => match error.kind() {
                io::ErrorKind::InvalidData => Err(DisconnectReason::Broken(error.to_string())),
                io::ErrorKind::TimedOut => Err(DisconnectReason::Silent),
                // Said once, before what the client sent, which may include its goodbye.
                io::ErrorKind::ConnectionReset if !self.missed_last => {
                    (self.is_closed, self.missed_last) = (true, true);
                    Ok(None)
                }
                _ => Err(DisconnectReason::Gone),
            },
        }
    }

    /// Answers, now or once there is room.
    pub(super) fn answer(
        &mut self,
        reply: Reply,
        buffer: &mut Vec<u8>,
    ) -> Result<(), DisconnectReason> {
        debug_assert!(!self.is_waiting());
        self.unsent = Some(reply);
        self.flush(buffer)
    }

    /// Asks, now or once there is room; nothing a second time before the first was sent.
    pub(super) fn ask(
        &mut self,
        ask: ServerRequest,
        buffer: &mut Vec<u8>,
    ) -> Result<(), DisconnectReason> {
        self.asks[urgency(ask)] = Some(ask);
        self.flush(buffer)
    }

    fn next_ask(&self) -> Option<ServerRequest> {
        self.asks.into_iter().flatten().next()
    }

    /// Sends the answer that waits, then what there is to ask.
    pub(super) fn flush(&mut self, buffer: &mut Vec<u8>) -> Result<(), DisconnectReason> {
        if let Some(reply) = &self.unsent {
            reply.encode(buffer);
            if self.send(buffer)? {
                self.last_sent = self.unsent.take();
            }
        }
        while let Some(ask) = self.next_ask().filter(|_| self.unsent.is_none()) {
            Reply::Ask(ask).encode(buffer);
            if !self.send(buffer)? {
                return Ok(());
            }
            self.asks[urgency(ask)] = None;
            // What it did not read when it closes may be no more than this.
            self.last_sent = None;
        }
        Ok(())
    }

    /// Whether the message is on its way.
    fn send(&mut self, message: &[u8]) -> Result<bool, DisconnectReason> {
        if self.is_closed {
            return Ok(false);
        }
        match self.channel.send(message) {
            Ok(()) => return Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                // Not the end: its last requests are still to be read.
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

    /// From here on nothing is sent.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Answers that the client certainly never saw.
    pub(super) fn take_undelivered(&mut self) -> [Option<Reply>; 2] {
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
