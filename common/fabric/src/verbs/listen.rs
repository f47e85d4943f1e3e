//! The accepting side: one event channel for all connections, and connection requests with the
//! private data of their peers.

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
pub use protection::{DataConnection, Loopback, Protection};

const BACKLOG: i32 = 128;

/// Listens at an address. Never blocks. The descriptor is readable when there is an event.
pub struct Listener {
    id: CmId,
    channel: Arc<EventChannel>,
    next_number: u64,
    options: Options,
}

/// An event of a listener, or of a connection that it accepted.
pub enum Event {
    /// A client asks for a connection.
    Request(Incoming),
    /// The peer knows that its connection was accepted.
    Established(ConnectionId),
    /// The peer has disconnected, or the connection's device was removed. Work in flight has
    /// failed; drop the connection.
    Disconnected(ConnectionId),
}

impl Listener {
    /// Listens at an address of an RDMA device, or at those of all devices. Port 0 is any free one.
    ///
    /// # Errors
    /// [`VerbsError::NoRoute`] if no RDMA device has the address, otherwise the system's error.
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

    /// The address at which it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// The system's error.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        while let Some(event) = self.channel.next()? {
            let id = ConnectionId(event.number());
            match event.kind() {
                kind::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    let (private_data, depth) =
                        (event.private_data().to_vec(), event.responder_resources());
                    let Some(raw) = NonNull::new(event.id()) else { continue };
                    // The new identifier's destruction would wait for this acknowledgement.
                    drop(event);
                    // SAFETY: the identifier is of a connection request, and adopted once.
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
                kind::RDMA_CM_EVENT_DEVICE_REMOVAL => return Ok(Some(Event::Disconnected(id))),
                // An address has changed, or an identifier may be reused.
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

/// A connection request. If it is dropped without an answer, it is refused without a reason.
pub struct Incoming {
    id: Arc<CmId>,
    number: ConnectionId,
    private_data: Vec<u8>,
    /// How many READs and atomics the peer wants to have in flight.
    depth: u8,
    options: Options,
}

impl Incoming {
    /// The peer's private data, followed by zeros. It may be anything.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The number of the connection in later events.
    pub fn id(&self) -> ConnectionId {
        self.number
    }

    /// Refuses the request. The peer gets the reason, of at most [`REASON_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`VerbsError`]; the peer is refused without a reason.
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
        let mut channel = VerbsChannel::new(Arc::new(queue_pair), domain, self.number)?;
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
}
