//! Clients on this host: they come through a Unix socket, say who they are in their first message,
//! and are passed the region.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use farside_config::ServerConfig;
use farside_control::{
    ConnectRequest, ControlChannel, Purpose, Refusal, Role, Welcome, encode_reply,
};
use farside_fabric::boot_time_ns;
use farside_fabric::shm::{Listener, RegionMemory, ShmChannel};
use rustix::event::epoll;

use super::acceptor::{Acceptor, Arrival};
use super::{ACCEPT_PAUSE_NS, Service};
use crate::error::{ServerError, system};
use crate::listening::BoundListener;
use crate::own_endpoint::OwnEndpoint;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};
use crate::recovery::Opened;

/// How many connections are accepted in a turn.
const ACCEPTS_MAX: usize = 16;

/// A socket, and the region's descriptors for the clients that come through it.
struct SocketAcceptor {
    listener: Listener,
    for_writers: File,
    for_readers: File,
}

impl BoundListener for Listener {
    fn open(
        self: Box<Self>,
        _: &ServerConfig,
        memory: &RegionMemory,
        opened: &Opened,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError> {
        // What epoll promises may be gone when it is fetched; the thread must not wait for it.
        let made = rustix::io::ioctl_fionbio(&*self, true).map_err(io::Error::from);
        let for_writers = made.and_then(|()| memory.file.try_clone());
        let for_writers = for_writers.map_err(system("prepare the socket"))?;
        let for_readers = memory.reader_descriptor()?;
        let acceptor = SocketAcceptor { listener: *self, for_writers, for_readers };
        Ok((Box::new(acceptor), OwnEndpoint::over_memory(&opened.region)))
    }
}

impl Acceptor for SocketAcceptor {
    fn arrivals_max(&self) -> usize {
        ACCEPTS_MAX
    }

    fn next(&mut self) -> io::Result<Option<Arrival>> {
        let connection = match self.listener.accept() {
            Ok(connection) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        let user = connection.peer_user();
        let stranger = ShmChannel::over(connection).and_then(|channel| {
            let channel: Box<dyn ControlChannel> = Box::new(channel);
            Ok((channel, user?))
        });
        Ok(Some(Arrival::Stranger(stranger)))
    }

    fn descriptor(&self, role: Role) -> Option<BorrowedFd<'_>> {
        Some(match role {
            Role::Writer => self.for_writers.as_fd(),
            Role::Reader => self.for_readers.as_fd(),
        })
    }
}

impl AsFd for SocketAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Service {
    /// Serves a connection that has not identified itself.
    pub(super) fn add_stranger(&mut self, stranger: io::Result<(Box<dyn ControlChannel>, u32)>) {
        let added = stranger.and_then(|(channel, user)| {
            let mut peer = Peer::new(channel, ClientIdentity::Stranger);
            peer.user = Some(user);
            self.add_peer(peer)
        });
        match added {
            Ok(_) => self.thin_out(),
            Err(error) if self.unaccepted.due(boot_time_ns()).is_some() => {
                tracing::warn!("cannot serve a client just now: {error}");
            }
            Err(_) => {}
        }
    }

    /// The client waits; so does this thread.
    pub(super) fn pause_accepting(&mut self, error: &io::Error) {
        if self.unaccepted.due(boot_time_ns()).is_some() {
            tracing::warn!("cannot accept a client just now: {error}");
        }
        if epoll::delete(&self.epoll, &self.acceptor).is_ok() {
            self.accept_again_at = Some(boot_time_ns() + ACCEPT_PAUSE_NS);
        }
    }

    pub(super) fn welcome(&mut self, token: u64, bytes: &[u8]) -> Result<(), DisconnectReason> {
        let malformed = Refusal::Malformed { bytes: bytes.len() as u64 };
        let request = ConnectRequest::decode(bytes)
            .and_then(|request| self.tokens.admit(&request).map(|()| request))
            .and_then(|request| match request.purpose {
                Purpose::Control => Ok(request),
                Purpose::Data { .. } => Err(malformed),
            });
        let user = self.peers.get(&token).and_then(|peer| peer.user);
        let admitted = request.and_then(|request| {
            self.check_shares(request.role, user)?;
            Ok((request.role, self.clients.admit()?))
        });
        let welcome = admitted.map(|(role, admitted)| (role, self.welcome_of(admitted)));
        let Some(peer) = self.peers.get_mut(&token) else { return Ok(()) };
        match welcome {
            Err(refusal) => {
                // A client that does not take it learns less.
                let _ = peer.channel.send(&encode_reply(&Err(refusal)));
                Err(DisconnectReason::Refused(refusal))
            }
            Ok((role, welcome)) => {
                let Welcome { client_id: id, lease, ticket, .. } = welcome;
                let reply = encode_reply(&Ok(welcome));
                let sent = match self.acceptor.descriptor(role) {
                    Some(descriptor) => peer.channel.send_with_descriptor(&reply, descriptor),
                    None => peer.channel.send(&reply),
                };
                if let Err(error) = sent {
                    self.take_back_admission(id);
                    return Err(DisconnectReason::Unreachable(error));
                }
                tracing::info!(client = id, ?role, "a client connected");
                peer.who = ClientIdentity::Client { id, role, lease, ticket };
                Ok(())
            }
        }
    }
}
