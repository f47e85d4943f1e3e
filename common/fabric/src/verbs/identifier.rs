//! RDMA-CM's event channels, events and connection identifiers.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::addr::SocketAddrArg;

use super::ffi::{self, cm, constructed};
use crate::rdma::{Options, VerbsError};

/// RDMA_OPTION_ID and RDMA_OPTION_ID_ACK_TIMEOUT, which the bindings do not have.
pub(super) const OPTION_LEVEL_ID: c_int = 0;
pub(super) const OPTION_ACK_TIMEOUT: c_int = 3;
const FAMILY_V4: u16 = rustix::net::AddressFamily::INET.as_raw();
const FAMILY_V6: u16 = rustix::net::AddressFamily::INET6.as_raw();

/// RDMA-CM's events of one or more connections. Never blocks.
pub(super) struct EventChannel {
    raw: NonNull<ffi::rdma_event_channel>,
}

// SAFETY: librdmacm synchronizes access to a channel.
unsafe impl Send for EventChannel {}
// SAFETY: likewise.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    pub(super) fn new() -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the call has no arguments.
        let raw = unsafe { ffi::rdma_create_event_channel() };
        let raw = constructed(raw).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::ACCESS | Errno::PERM) => VerbsError::NoPermission { source },
            Some(Errno::NODEV | Errno::NOENT | Errno::NXIO) => VerbsError::NoDevice { source },
            _ => VerbsError::System { doing: "opening RDMA-CM", source },
        })?;
        let channel = Self { raw };
        rustix::io::ioctl_fionbio(channel.as_fd(), true)
            .map_err(ffi::system("preparing RDMA-CM"))?;
        Ok(Arc::new(channel))
    }

    /// The next event, if there is one.
    pub(super) fn next(&self) -> io::Result<Option<Event<'_>>> {
        let mut raw = null_mut();
        // SAFETY: the channel is alive and the target writable.
        match cm(unsafe { ffi::rdma_get_cm_event(self.raw.as_ptr(), &raw mut raw) }) {
            Ok(()) => Ok(Some(Event { raw: constructed(raw)?, _channel: self })),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// Readable when there is an event.
impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is from rdma_create_event_channel and not yet dropped.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: the channel owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold an `Arc` of the channel, so none is left.
        unsafe { ffi::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// An event, acknowledged when dropped. Drop it before its identifier, whose destruction waits for
/// the acknowledgement.
pub(super) struct Event<'c> {
    raw: NonNull<ffi::rdma_cm_event>,
    _channel: &'c EventChannel,
}

impl Event<'_> {
    fn raw(&self) -> &ffi::rdma_cm_event {
        // SAFETY: the event is valid until `drop` acknowledges it.
        unsafe { self.raw.as_ref() }
    }

    /// The kind of event: `RDMA_CM_EVENT_*`.
    pub(super) fn kind(&self) -> ffi::rdma_cm_event_type::Type {
        self.raw().event
    }

    /// A negative errno, or the reason of a rejection.
    pub(super) fn status(&self) -> c_int {
        self.raw().status
    }

    /// The identifier of the event. The identifier of a connection request is new, and the caller
    /// owns it.
    pub(super) fn id(&self) -> *mut ffi::rdma_cm_id {
        self.raw().id
    }

    /// The number that [`CmId::set_number`] gave the identifier.
    pub(super) fn number(&self) -> u64 {
        // SAFETY: an identifier outlives those of its events that are not acknowledged.
        unsafe { (*self.raw().id).context }.addr() as u64
    }

    fn connection(&self) -> &ffi::rdma_conn_param {
        // SAFETY: all identifiers are of RDMA_PS_TCP, whose events have this member.
        unsafe { &self.raw().param.conn }
    }

    /// The peer's private data, followed by zeros.
    pub(super) fn private_data(&self) -> &[u8] {
        let connection = self.connection();
        if connection.private_data.is_null() {
            return &[];
        }
        let (start, bytes) = (connection.private_data.cast::<u8>(), connection.private_data_len);
        // SAFETY: librdmacm's own buffer of this length, valid until the event is acknowledged.
        unsafe { std::slice::from_raw_parts(start, bytes.into()) }
    }

    /// How many READs and atomic verbs the peer wants to have in flight at most.
    pub(super) fn responder_resources(&self) -> u8 {
        self.connection().responder_resources
    }

    /// Completes the disconnection on this side. Work in flight on the queue pair fails now, and
    /// does not wait for all retries.
    pub(super) fn finish_disconnection(&self) {
        // SAFETY: an identifier outlives those of its events that are not acknowledged.
        let _ = unsafe { ffi::rdma_disconnect(self.id()) };
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: the event is from rdma_get_cm_event and acknowledged once.
        let _ = unsafe { ffi::rdma_ack_cm_event(self.raw.as_ptr()) };
    }
}

/// RDMA-CM's identifier of one end of a connection, or of a listening address. Its destruction
/// disconnects.
pub(super) struct CmId {
    raw: NonNull<ffi::rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

// SAFETY: an identifier is memory of the process, and does not depend on the thread that made it.
unsafe impl Send for CmId {}
// SAFETY: librdmacm does not synchronize access to the structure. The calls that write its fields
// (bind, resolve, listen, make a queue pair, connect, accept, set the number) come from the thread
// that sets up the connection, before another thread has it. Later its fields are only read, and
// `disconnect` is two calls into the kernel, which synchronizes them.
unsafe impl Sync for CmId {}

impl CmId {
    pub(super) fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw = null_mut();
        // SAFETY: the channel is alive, because `self` holds it, and the target is writable.
        cm(unsafe {
            ffi::rdma_create_id(
                channel.raw.as_ptr(),
                &raw mut raw,
                null_mut(),
                ffi::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        Ok(Self { raw: constructed(raw)?, _channel: channel.clone() })
    }

    /// Becomes the owner of a connection request's identifier.
    ///
    /// # Safety
    /// `raw` must come from a connection request of this channel, and have no other owner.
    pub(super) unsafe fn adopt(raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<EventChannel>) -> Self {
        Self { raw, _channel: channel.clone() }
    }

    pub(super) fn raw(&self) -> *mut ffi::rdma_cm_id {
        self.raw.as_ptr()
    }

    /// The identifier's device, if it is bound to one. The device is open while `self` lives.
    pub(super) fn device(&self) -> Option<NonNull<ffi::ibv_context>> {
        // SAFETY: the identifier is alive.
        NonNull::new(unsafe { (*self.raw()).verbs })
    }

    /// The name of the identifier's device.
    pub(super) fn device_name(&self) -> String {
        let Some(context) = self.device() else { return "unknown".to_owned() };
        // SAFETY: the device is open while the identifier lives.
        ffi::device_name(unsafe { context.as_ref() }.device)
    }

    /// The identifier's queue pair; null before it is made.
    pub(super) fn queue_pair(&self) -> *mut ffi::ibv_qp {
        // SAFETY: the identifier is alive.
        unsafe { (*self.raw()).qp }
    }

    /// Sets the number that events of this identifier return.
    pub(super) fn set_number(&self, number: u64) {
        let context = std::ptr::without_provenance_mut::<c_void>(number as usize);
        // SAFETY: the identifier is alive. The field is for the library's user, and during the
        // write no other thread reads it from an event.
        unsafe { (*self.raw()).context = context };
    }

    /// Binds the identifier to a local address, and to the device that has it.
    pub(super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        with_raw(address, |raw| {
            // SAFETY: the identifier is alive, and the address only read.
            cm(unsafe { ffi::rdma_bind_addr(self.raw(), raw.cast()) })
        })
    }

    pub(super) fn listen(&self, backlog: c_int) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        cm(unsafe { ffi::rdma_listen(self.raw(), backlog) })
    }

    /// Starts to find the device through which an address is reached.
    pub(super) fn resolve_address(&self, address: SocketAddr, timeout: Duration) -> io::Result<()> {
        with_raw(address, |raw| {
            let (own, ms) = (null_mut(), milliseconds(timeout));
            // SAFETY: the identifier is alive, and the address only read.
            cm(unsafe { ffi::rdma_resolve_addr(self.raw(), own, raw.cast(), ms) })
        })
    }

    /// Starts to find the route to the address.
    pub(super) fn resolve_route(&self, timeout: Duration) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        cm(unsafe { ffi::rdma_resolve_route(self.raw(), milliseconds(timeout)) })
    }

    /// Sets how long the device waits for acknowledgements, before the connection is made.
    pub(super) fn set_ack_timeout(&self, options: &Options) -> io::Result<()> {
        let mut exponent = options.ack_exponent();
        let value = (&raw mut exponent).cast::<c_void>();
        // SAFETY: the option is one byte long, and only read.
        cm(unsafe {
            ffi::rdma_set_option(self.raw(), OPTION_LEVEL_ID, OPTION_ACK_TIMEOUT, value, 1)
        })
    }

    pub(super) fn connect(&self, parameters: &mut ffi::rdma_conn_param) -> io::Result<()> {
        // SAFETY: the identifier is alive; the caller's structure is valid for the call.
        cm(unsafe { ffi::rdma_connect(self.raw(), parameters) })
    }

    pub(super) fn accept(&self, parameters: &mut ffi::rdma_conn_param) -> io::Result<()> {
        // SAFETY: the identifier is alive; the caller's structure is valid for the call.
        cm(unsafe { ffi::rdma_accept(self.raw(), parameters) })
    }

    pub(super) fn reject(&self, reason: &[u8]) -> io::Result<()> {
        let start = reason.as_ptr().cast::<c_void>();
        // SAFETY: the identifier is alive; the bytes are only read. Callers check the length.
        cm(unsafe { ffi::rdma_reject(self.raw(), start, reason.len() as u8) })
    }

    /// Ends the connection, if there is one: work in flight on both sides completes with an error.
    pub(super) fn disconnect(&self) {
        // SAFETY: the identifier is alive.
        let _ = unsafe { ffi::rdma_disconnect(self.raw()) };
    }

    /// The local address to which it is bound.
    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is alive, and its address does not change once it is bound.
        let route = unsafe { &(*self.raw()).route };
        let address = &route.addr.src_addr_union;
        // SAFETY: the addresses of all families begin with the family.
        let family = unsafe { address.src_sin }.sin_family;
        match family {
            FAMILY_V4 => {
                // SAFETY: the address is of this family.
                let v4 = unsafe { address.src_sin };
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some((IpAddr::V4(ip), u16::from_be(v4.sin_port)).into())
            }
            FAMILY_V6 => {
                // SAFETY: the address is of this family.
                let v6 = unsafe { address.src_sin6 };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some((IpAddr::V6(ip), u16::from_be(v6.sin6_port)).into())
            }
            _ => None,
        }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: `self` owns it. Its queue pair holds an `Arc` of it, and so is destroyed already.
        let _ = unsafe { ffi::rdma_destroy_id(self.raw()) };
    }
}

/// Calls with the address in C's form.
fn with_raw<T>(address: SocketAddr, call: impl FnOnce(*mut c_void) -> T) -> T {
    // SAFETY: the pointer is not used after the call: callers pass it to functions that copy.
    unsafe { address.with_sockaddr(|raw, _| call(raw.cast_mut().cast())) }
}

fn milliseconds(timeout: Duration) -> c_int {
    timeout.as_millis().min(i32::MAX as u128) as c_int
}
