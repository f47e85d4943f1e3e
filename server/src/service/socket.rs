//! Clients on this host: they come through a Unix socket, say who they are in their first message,
//! and are passed the region.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use farside_control::{ConnectRequest, Purpose, Refusal, Role, Welcome, encode_reply};
use farside_fabric::boot_time_ns;
use farside_fabric::shm::{Listener, RegionMemory, ShmChannel};
use rustix::event::epoll;

use super::door::Door;
use super::{ACCEPT_PAUSE_NS, Service};
use crate::error::ServerError;
use crate::peer::{ClientIdentity, DisconnectReason, Peer};

/// A socket, and what those who come through it get.
pub(super) struct Socket {
    listener: Listener,
    for_writers: File,
    for_readers: File,
}

impl Socket {
    pub(super) fn new(listener: Listener, memory: &RegionMemory) -> Result<Self, ServerError> {
        // What epoll promises may be gone when it is fetched; the thread must not wait for it.
        let made = rustix::io::ioctl_fionbio(&listener, true).map_err(io::Error::from);
        let for_writers = made.and_then(|()| memory.file.try_clone());
        let for_writers = for_writers.map_err(crate::error::system("prepare the socket"))?;
        Ok(Self { listener, for_writers, for_readers: memory.reader_descriptor()? })
    }

    fn descriptor(&self, role: Role) -> BorrowedFd<'_> {
        match role {
            Role::Writer => self.for_writers.as_fd(),
            Role::Reader => self.for_readers.as_fd(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Service {
    /// Accepts a connection; false if there is none, or none can be.
    pub(super) fn accept_connection(&mut self) -> bool {
        let Door::Socket(socket) = &self.door else { return false };
        let connection = match socket.listener.accept() {
            Ok(connection) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // Out of descriptors, most likely. The client waits; so does this thread.
                if self.unaccepted.due(boot_time_ns()).is_some() {
                    tracing::warn!("cannot accept a client just now: {error}");
                }
                if epoll::delete(&self.epoll, socket).is_ok() {
                    self.accept_again_at = Some(boot_time_ns() + ACCEPT_PAUSE_NS);
                }
                return false;
            }
        };
        let user = connection.peer_user();
        let added = ShmChannel::over(connection).and_then(|channel| {
            let mut peer = Peer::new(channel, ClientIdentity::Stranger);
            peer.user = Some(user?);
            self.add_peer(peer)
        });
        if let Err(error) = added {
            if self.unaccepted.due(boot_time_ns()).is_some() {
                tracing::warn!("cannot serve a client just now: {error}");
            }
            return true;
        }
        self.thin_out();
        true
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
        // Only what came through a socket is a stranger.
        let Door::Socket(socket) = &self.door else { return Ok(()) };
        match welcome {
            Err(refusal) => {
                // Whoever does not take it learns less.
                let _ = peer.channel.send(&encode_reply(&Err(refusal)));
                Err(DisconnectReason::Refused(refusal))
            }
            Ok((role, welcome)) => {
                let Welcome { client_id: id, lease, ticket, .. } = welcome;
                let (reply, descriptor) = (encode_reply(&Ok(welcome)), socket.descriptor(role));
                if let Err(error) = peer.channel.send_with_descriptor(&reply, descriptor) {
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
