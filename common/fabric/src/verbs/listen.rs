//! The accepting side: one event channel for all connections, and requests with the private data of
//! their peers.

mod protection;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::connect::{RECEIVER_RETRIES, check_bytes};
use super::control_channel::VerbsChannel;
use super::ffi::{self, rdma_cm_event_type as kind, system};
use super::handles::{CompletionQueue, ProtectionDomain, QueuePair};
use super::identifier::{CmId, EventChannel};
use crate::REPLY_BYTES_MAX;
use crate::rdma::{ConnectionId, Options, REASON_BYTES_MAX, VerbsError};
pub use protection::{DataConnection, Loopback, LoopbackPeer, Protection};

const BACKLOG: i32 = 128;

/// Listens at an address. Never blocks; readable when there is an event.
pub struct Listener {
    id: CmId,
    channel: Arc<EventChannel>,
    next_number: u64,
    options: Options,
}

/// What a listener has to tell.
pub enum Event {
    /// A client wants to connect.
    Request(Incoming),
    /// The peer of an accepted connection knows that it was accepted.
    Established(ConnectionId),
    /// The peer of an accepted connection is gone. What was under way on it has failed; drop the
    /// connection.
    Disconnected(ConnectionId),
    /// The device of an accepted connection is gone, and the connection with it.
    DeviceRemoved(ConnectionId),
}

impl Listener {
    /// Listens at an address of an RDMA device, or of all of them; port 0 for any free one.
    ///
    /// # Errors
    /// [`VerbsError::NoRoute`] for an address of no RDMA device, else what the system says.
    pub fn bind(address: SocketAddr, options: &Options) -> Result<Self, VerbsError> {
        let channel = EventChannel::new()?;
        let id = CmId::new(&channel).map_err(system("making an RDMA-CM identifier"))?;
        id.bind(address).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => {
                VerbsError::System { doing: "binding the address", source }
            }
            _ => VerbsError::NoRoute { address, source },
        })?;
        id.listen(BACKLOG).map_err(system("listening"))?;
        Ok(Self { id, channel, next_number: 1, options: *options })
    }

    /// Where it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// What the system says.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        // Every event of the C library is looked at once.
        while let Some(event) = self.channel.next()? {
            let id = ConnectionId(event.number());
            match event.kind() {
                kind::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    let (private_data, depth) =
                        (event.private_data().to_vec(), event.responder_resources());
                    let Some(raw) = NonNull::new(event.id()) else { continue };
                    // Acknowledged before anybody can drop the new identifier.
                    drop(event);
                    // SAFETY: of a connection request, and taken over once.
                    let id = unsafe { CmId::adopt(raw, &self.channel) };
                    let number = ConnectionId(self.next_number);
                    self.next_number += 1;
                    id.set_number(number.0);
                    let (id, options) = (Arc::new(id), self.options);
                    let incoming = Incoming { id, number, private_data, depth, options };
                    return Ok(Some(Event::Request(incoming)));
                }
                kind::RDMA_CM_EVENT_ESTABLISHED => return Ok(Some(Event::Established(id))),
                kind::RDMA_CM_EVENT_DISCONNECTED
                | kind::RDMA_CM_EVENT_CONNECT_ERROR
                | kind::RDMA_CM_EVENT_UNREACHABLE
                | kind::RDMA_CM_EVENT_REJECTED => {
                    event.finish_disconnection();
                    return Ok(Some(Event::Disconnected(id)));
                }
                kind::RDMA_CM_EVENT_DEVICE_REMOVAL => return Ok(Some(Event::DeviceRemoved(id))),
                // Addresses that change, and identifiers that may be used again.
                _ => {}
            }
        }
        Ok(None)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A connection that a client asks for. Dropped without an answer, it is refused without a reason.
pub struct Incoming {
    id: Arc<CmId>,
    number: ConnectionId,
    private_data: Vec<u8>,
    /// How many READs and atomics the peer would like to have in flight.
    depth: u8,
    options: Options,
}

impl Incoming {
    /// What the peer said, with zeros behind it: whatever it likes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// What events will call it.
    pub fn id(&self) -> ConnectionId {
        self.number
    }

    /// Refuses; the peer gets the reason, at most [`REASON_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`VerbsError`]: the peer then hears of no reason.
    pub fn reject(self, reason: &[u8]) -> Result<(), VerbsError> {
        check_bytes(reason, REASON_BYTES_MAX)?;
        self.id.reject(reason).map_err(system("refusing a connection"))
    }

    /// Accepts it as a control channel.
    ///
    /// # Errors
    /// [`VerbsError`]; the peer is refused without a reason.
    pub fn accept_control(self, reply: &[u8]) -> Result<VerbsChannel, VerbsError> {
        let capacity = VerbsChannel::CAPACITY;
        let domain = Arc::new(ProtectionDomain::new(&self.id)?);
        let completions = CompletionQueue::new(&self.id, capacity.sends + capacity.receives)?;
        let queue_pair = QueuePair::new(&self.id, &domain, &Arc::new(completions), capacity)?;
        let mut channel = VerbsChannel::new(Arc::new(queue_pair), domain)?;
        channel.set_id(self.number);
        self.accept(reply, 0)?;
        channel.begin(None)?;
        Ok(channel)
    }

    /// Accepts it as a data connection to the region of `protection`.
    ///
    /// # Errors
    /// [`VerbsError`]; the peer is refused without a reason.
    pub fn accept_data(
        self,
        protection: &Protection,
        reply: &[u8],
    ) -> Result<DataConnection, VerbsError> {
        let connection = DataConnection::new(&self.id, protection, self.number, &self.options)?;
        let depth = i32::from(self.depth).min(super::preflight::query(&self.id)?.max_qp_rd_atom);
        self.accept(reply, depth.max(0) as u8)?;
        connection.restrict()?;
        Ok(connection)
    }

    fn accept(&self, reply: &[u8], depth: u8) -> Result<(), VerbsError> {
        check_bytes(reply, REPLY_BYTES_MAX)?;
        self.id.set_ack_timeout(&self.options).map_err(system("setting the ack timeout"))?;
        // SAFETY: a structure of numbers and a pointer.
        let mut parameters = unsafe { ffi::zeroed::<ffi::rdma_conn_param>() };
        parameters.private_data = reply.as_ptr().cast();
        parameters.private_data_len = reply.len() as u8;
        parameters.responder_resources = depth;
        parameters.rnr_retry_count = RECEIVER_RETRIES;
        self.id.accept(&mut parameters).map_err(system("accepting a connection"))
    }

    pub(super) fn identifier(&self) -> &Arc<CmId> {
        &self.id
    }
}
